"""Channels of a topology and their memory."""

import operator

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Room, Topology
from megatron_cp_plugin.core.communication.virtual import VirtualTopology
from megatron_cp_plugin.errors import ConfigError
from tests.peer_world import PeerWorld, run_virtual


def attend(topology: Topology, **settings):
    """Forward and backward of a small problem."""
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    out = cp.attention(q, q, q, group=topology, **settings)
    return torch.autograd.grad(out.sum(), q)


@pytest.mark.parametrize("algo", ["zigzag", "ulysses"])
def test_peer_transport_without_peer_access_is_refused(algo: str):
    with pytest.raises(ConfigError, match=f"{algo} transport peer needs GPUs of one node"):
        run_virtual(2, lambda topology: attend(topology, algo=algo, transport="peer"))


def test_channels_of_one_name_have_the_slots_that_were_asked_for():
    """Each with memory and turns of its own."""

    def body(topology: Topology):
        one, two = (topology.peer_channel("blocks", slots) for slots in (1, 2))
        assert topology.peer_channel("blocks", 2) is two
        other = 1 - topology.rank
        got = []
        for channel, value in ((one, 1.0), (two, 2.0), (two, 3.0)):
            described = [((4,), torch.float32)]
            (buffer,) = channel.buffers(Room.of(described), torch.device("cpu"))
            sent = torch.full((4,), value + topology.rank)
            channel.exchange([(sent, other)], [(buffer, other)]).wait()
            got.append(buffer)
        return torch.stack(got)

    for rank, got in enumerate(run_virtual(2, body, peer_access=True)):
        assert got[:, 0].tolist() == [1.0 + 1 - rank, 2.0 + 1 - rank, 3.0 + 1 - rank]


def test_one_receive_buffer_where_all_comes_in_one_step():
    """Two from the first call on that needs them; what comes is right before and after."""
    settings = {"algo": "zigzag", "layout": "documents", "route": "straight"}
    short, long = [0, *range(20, 120, 20), 128], [0, 8, 128]

    def body(topology: Topology):
        counts, outs = [], []
        for edges, heads in ((short, 4), (long, 1), (short, 1), (long, 1)):
            how = settings | {"cu_seqlens": edges, "group": topology}
            q = cp.shard(torch.arange(128 * heads * 8.0).view(1, 128, heads, 8).sin(), 1, **how)
            out = cp.unshard(cp.attention(q, q, q, kernel="reference", **how), 1, **how)
            outs.append(out.flatten())
            if topology.size > 1:
                channel = topology.peer_channel("fetches", 2)
                counts.append((channel.rotation, channel.held_bytes // channel._slot_bytes))
        return counts, torch.cat(outs)

    ((_, whole),) = run_virtual(1, body)
    for counts, outs in run_virtual(4, body, peer_access=True):
        assert counts == [(1, 1), (2, 2), (1, 2), (2, 2)]
        torch.testing.assert_close(outs, whole)


def test_memory_of_subgroups_counts():
    def body(topology: Topology):
        attend(topology, algo="usp", ulysses=2, kernel="reference")
        first = topology.rank // 2 * 2
        ring = topology.subgroup(range(topology.rank % 2, 4, 2), "ring")
        team = topology.subgroup(range(first, first + 2), "team")
        found = topology.peer_bytes, ring.peer_bytes, team.peer_bytes
        topology.drop_peer_channels()
        assert not topology.peer_bytes
        attend(topology, algo="usp", ulysses=2, kernel="reference")
        return *found, topology.peer_bytes

    for whole, ring, team, again in run_virtual(4, body, peer_access=True):
        assert whole == ring + team == again
        assert min(ring, team) > 0


@pytest.mark.parametrize(
    ("nodes", "near"),
    [
        ((0, 0, 0, 0), 4),
        ((0, 0, 2, 2), 2),
        ((0, 1, 0, 1), None),
        ((0, 0, 0, 3), None),
        ((0, 1, 1, 3), None),
        ((0, 1, 2, 3), None),
    ],
)
def test_ranks_of_a_node_are_near_where_all_nodes_are_alike(nodes, near, monkeypatch):
    def body(topology: Topology):
        found = topology.near
        assert found is None or found.rank == topology.rank % near
        return found and found.size

    of_members = property(lambda self: tuple([nodes[rank] for rank in self._members]))
    monkeypatch.setattr(VirtualTopology, "nodes", of_members)
    assert run_virtual(4, body, peer_access=True) == [near] * 4
    assert run_virtual(4, body) == [None] * 4


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
