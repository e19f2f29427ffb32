"""A rank alone: what it posts and waits for, and which ranks of the job these are."""

import pytest
import torch

from megatron_cp_plugin.core.comm import Room, Topology
from megatron_cp_plugin.planner.dry_run import DryRunGroup, Event, Post, Wait, recording

ROWS = torch.empty(6, 2, device="meta")  # float32


def events_of(body) -> list[Event]:
    found: list[Event] = []
    token = recording.set(found)
    try:
        body()
    finally:
        recording.reset(token)
    return found


def test_messages_are_between_ranks_of_the_job() -> None:
    """Of a subgroup of ranks 2, 4 and 5 of six, of which this one is the second."""
    group = DryRunGroup(4, (0, 0, 0, 1, 1, 1), peer_access=True).subgroup((2, 4, 5), "team")
    assert (group.rank, group.size, group.nodes) == (1, 3, (0, 1, 1))
    assert not group.peer_access  # two nodes
    channel = group.channel("keys")

    def body() -> None:
        pending = channel.exchange([(ROWS, 2), (ROWS[:1], 0)], [(ROWS[:3], 0)])
        pending.wait()

    name = "keys", (2, 4, 5)
    assert events_of(body) == [
        Post(name, 0, "exchange", ((5, 48), (2, 8)), ((2, 24),), 0),
        Wait(name, 0),
    ]
    assert group.channel("keys") is channel


@pytest.mark.parametrize(
    ("name", "shape", "bytes_to_others"),
    [
        ("all_gather", (3, 6, 2), 2 * 48),
        ("reduce_scatter", (2,), 2 * 8),
        ("all_to_all", (6, 2), 16),
    ],
)
def test_collective_operations(name: str, shape: tuple[int, ...], bytes_to_others: int) -> None:
    channel, found = DryRunGroup(2, (0, 0, 0), peer_access=False).channel("keys"), []

    def body() -> None:
        came = getattr(channel, name)(ROWS).wait()
        found.append(came[0] if name == "all_to_all" else came)

    post, wait = events_of(body)
    assert found[0].shape == shape
    assert post == Post(("keys", (0, 1, 2)), 0, name, (), (), bytes_to_others)
    assert wait == Wait(post.channel, 0)


def test_receive_buffers_count() -> None:
    """Those of subgroups too; nothing is noted where nobody records."""
    group = DryRunGroup(0, (0, 0, 0, 0), peer_access=True)

    def receive(topology: Topology, slots: int) -> None:
        channel = topology.peer_channel("blocks", slots)
        (buffer,) = channel.buffers(Room.of([((6, 2), torch.float32)]), ROWS.device)
        channel.exchange([(ROWS, 1)], [(buffer, 1)]).wait()

    def body() -> None:
        receive(group, 2)
        receive(group.subgroup((0, 1), "team"), 3)

    found = events_of(body)
    assert [event.operation for event in found if isinstance(event, Post)] == [None, None]
    two, three = [slab.numel() for slab in group.slabs()]
    assert 3 * two == 2 * three >= 2 * 3 * 48
    body()
    assert len(found) == 6  # an offer, a post and a wait each
    assert recording.get() is None
