"""Channels of a topology and their memory."""

import pytest
import torch

from megatron_cp_plugin.core.comm import Room, Topology
from megatron_cp_plugin.errors import ConfigError
from tests.core.test_virtual import attend, channels
from tests.peer_world import run_virtual


def test_peer_transport_without_peer_access_is_refused():
    with pytest.raises(ConfigError, match="zigzag transport peer needs GPUs of one node"):
        run_virtual(2, lambda topology: attend(topology, algo="zigzag", transport="peer"))


def test_channels_of_one_name_have_the_slots_that_were_asked_for():
    """Each with memory and turns of its own."""

    def body(topology: Topology):
        one, two = channels(topology, 1, 2)
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


def test_memory_of_subgroups_counts():
    def body(topology: Topology):
        attend(topology, algo="usp", ulysses=2, kernel="reference")
        inner = topology.subgroup(range(topology.rank % 2, 4, 2), "ring")
        return topology.peer_bytes, inner.peer_bytes

    for whole, inner in run_virtual(4, body, peer_access=True):
        assert whole == inner > 0
