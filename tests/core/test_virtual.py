"""Virtual ranks: mistakes of whoever sends and receives are seen."""

import operator

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Room, Topology
from tests.peer_world import PeerWorld, VirtualPeerCommunicator, run_virtual


@pytest.mark.parametrize(
    ("algo", "name"),
    [
        ("zigzag", "fetches"),
        ("distflash", "fetches"),
        ("allgather", "fetches"),
        ("attention2d", "fetches"),
    ],
)
def test_one_slot_too_few_is_seen(algo: str, name: str, monkeypatch: pytest.MonkeyPatch):
    """Blocks are overwritten while they are read or sent on: NaN, or an error."""
    original = VirtualPeerCommunicator.__init__

    def with_fewer(self, channel, world, members, rank, slots):
        original(self, channel, world, members, rank, slots - (channel == name))

    settings = {"algo": algo, "transport": "peer", "causal": algo == "distflash"}
    if algo == "attention2d":
        settings["rows"] = 2

    def body(topology: Topology):
        return attend(topology, **settings)[0].isfinite().all().item()

    assert all(run_virtual(4, body, peer_access=True))
    monkeypatch.setattr(VirtualPeerCommunicator, "__init__", with_fewer)
    try:
        fine = all(run_virtual(4, body, peer_access=True, timeout_s=5))
    except RuntimeError as error:
        fine = "before it waited for it" not in str(error)
    assert not fine


def test_a_message_that_is_changed_too_early_is_seen():
    def body(topology: Topology):
        (channel,) = channels(topology, 2)
        other = 1 - topology.rank
        (buffer,) = channel.buffers(Room.of([((4,), torch.float32)]), torch.device("cpu"))
        sent = torch.zeros(4)
        pending = channel.exchange([(sent, other)], [(buffer, other)])
        sent[2] = 1
        pending.wait()

    with pytest.raises(RuntimeError, match="changed what it sent in turn 0"):
        run_virtual(2, body, peer_access=True)


def test_one_number_is_sent_whatever_its_strides():
    """As the gradient of a sum is, of one token, head and element."""

    def body(topology: Topology) -> float:
        channel, other = topology.peer_channel("blocks", 2), 1 - topology.rank
        sent = torch.full((), 3.0 + topology.rank, dtype=torch.float64).expand(1, 1, 1, 1)
        (received,) = channel.buffers(Room.of([(sent.shape, sent.dtype)]), torch.device("cpu"))
        channel.exchange([(sent, other)], [(received, other)]).wait()
        return received.item()

    assert run_virtual(2, body, peer_access=True) == [4.0, 3.0]


def test_a_block_that_is_read_too_late_is_not_there():
    def body(topology: Topology):
        (channel,) = channels(topology, 2)
        other = 1 - topology.rank
        received = []
        for turn in range(3):
            (buffer,) = channel.buffers(Room.of([((4,), torch.bfloat16)]), torch.device("cpu"))
            sent = torch.full((4,), float(turn), dtype=torch.bfloat16)
            pending = channel.exchange([(sent, other)], [(buffer, other)])
            if turn == 2:
                assert received[0].isnan().all()
                assert received[1].eq(1).all()
            pending.wait()
            received.append(buffer)

    run_virtual(2, body, peer_access=True)


def test_a_send_that_is_not_waited_for_is_seen():
    """Its memory would be free, and written to, before it is copied."""

    def body(topology: Topology):
        (channel,) = channels(topology, 2)
        (buffer,) = channel.buffers(Room.of([((4,), torch.float32)]), torch.device("cpu"))
        if topology.rank:
            channel.exchange([(torch.zeros(4), 0)], [])
        else:
            channel.exchange([], [(buffer, 1)]).wait()

    with pytest.raises(RuntimeError, match="sends that were not waited for"):
        run_virtual(2, body, peer_access=True)


def test_ranks_that_make_room_in_different_turns_are_seen():
    def body(topology: Topology):
        (channel,) = channels(topology, 2)
        if topology.rank:
            channel.exchange([], []).wait()
        channel.buffers(Room.of([((4,), torch.float32)]), torch.device("cpu"))

    with pytest.raises(RuntimeError, match="makes room in turn and of bytes"):
        run_virtual(2, body, peer_access=True)


def attend(topology: Topology, **settings):
    """Forward and backward of a small problem."""
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    out = cp.attention(q, q, q, group=topology, **settings)
    return torch.autograd.grad(out.sum(), q)


def channels(topology: Topology, *slots: int):
    return [topology.peer_channel("blocks", count) for count in slots]


def test_receive_buffers_are_made_once():
    channel = PeerWorld(1).topology(0)._make_peer_channel("blocks", 2)

    def buffers(tokens):
        """Of the next two exchanges."""
        found = []
        for _ in range(2):
            found += channel.buffers(Room.of([((tokens, 3), torch.float32)]), torch.device("cpu"))
            channel.exchange([], []).wait()
        return found

    first, other = buffers(4)
    assert first.data_ptr() != other.data_ptr()
    assert all(map(operator.is_, buffers(4), (first, other)))
    larger = buffers(400)
    assert all(x.shape == (400, 3) for x in larger)
    grown = buffers(4)
    assert [x.data_ptr() for x in grown] == [x.data_ptr() for x in larger]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_training_after_inference_mode(size: int):
    """Receive buffers that evaluation has made are written to by training."""
    q, k, v, dout = torch.randn(4, 1, 8 * size, 2, 8, dtype=torch.float64)

    def body(topology: Topology) -> bool:
        settings = {"algo": "zigzag", "group": topology}
        inputs = [cp.shard(x, 1, **settings).requires_grad_() for x in (q, k, v)]
        with torch.inference_mode():
            cp.attention(*inputs, **settings, transport="peer")
        found = []
        for transport in ("peer", "group"):
            out = cp.attention(*inputs, **settings, transport=transport)
            found.append((out, *torch.autograd.grad(out, inputs, cp.shard(dout, 1, **settings))))
        return all(map(torch.equal, *found))

    assert all(run_virtual(size, body, peer_access=True))
