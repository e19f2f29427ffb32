"""Process groups: who takes part, and one group for each concurrent flow of messages."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from socket import gethostname
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_cp_plugin.core.comm import Communicator, ProcessGroupCommunicator

if TYPE_CHECKING:
    from megatron_cp_plugin.core.peer import PeerCommunicator


class Topology(ABC):
    """The ranks of one context-parallel group.

    All ranks of a group must ask for the same channels and subgroups in the same order, for
    making one is a collective operation.

    Attributes: rank, size: within the group.
    """

    rank: int
    size: int

    @abstractmethod
    def channel(self, name: str) -> Communicator:
        """A communicator over all ranks of this group, with a flow of its own."""

    @property
    @abstractmethod
    def peer_access(self) -> bool:
        """Whether every rank's GPU can write to every other's memory. A collective operation."""

    @abstractmethod
    def peer_channel(self, name: str, slots: int) -> Communicator:
        """Like `channel`, by copy engines: see core.peer. Needs `peer_access`."""

    @property
    @abstractmethod
    def peer_bytes(self) -> int:
        """Memory that peer channels hold beside what torch's allocator knows of."""

    @abstractmethod
    def subgroup(self, ranks: Sequence[int], name: str) -> "Topology":
        """The topology of some of the ranks (of this group), which must include this rank."""

    @property
    @abstractmethod
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank: ranks with the same number share one. A collective operation."""

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> "Topology":
        """Topology of a process group; None: all processes, or this one where there is no
        process group.
        """
        if group is None:
            if not dist.is_initialized():
                return _alone()
            group = dist.group.WORLD
            assert group is not None
        if group not in _topologies:
            _topologies[group] = ProcessGroupTopology(group)
        return _topologies[group]

    @staticmethod
    def release() -> None:
        """Gives back the receive buffers of all that `of` made; see functional.release."""
        for topology in _topologies.values():
            topology.drop_peer_channels()


_topologies: dict[dist.ProcessGroup, "ProcessGroupTopology"] = {}


def _alone() -> Topology:
    """One rank, which needs no network."""
    from megatron_cp_plugin.core.virtual import VirtualWorld

    return VirtualWorld(1).topology(0)


class ProcessGroupTopology(Topology):
    """Over a torch.distributed process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._channels: dict[str, Communicator] = {}
        self._peer_channels: dict[str, PeerCommunicator] = {}
        self._subgroups: dict[tuple[int, ...], Topology] = {}
        self._nodes: tuple[int, ...] | None = None
        self._peer_access: bool | None = None

    def channel(self, name: str) -> Communicator:
        if name not in self._channels:
            # The first flow uses the group that was given: no further connections or buffers.
            group = self._new_group(range(self.size)) if self._channels else self._group
            self._channels[name] = ProcessGroupCommunicator(name, group)
        return self._channels[name]

    @property
    def peer_access(self) -> bool:
        if self._peer_access is None:
            self._peer_access = self.size > 1 and self._reaches_all()
        return self._peer_access

    def _reaches_all(self) -> bool:
        if dist.get_backend(self._group) != "nccl" or len(set(self.nodes)) > 1:
            return False
        if os.environ.get("NCCL_P2P_DISABLE") == "1":
            return False  # whoever keeps NCCL from peer memory means us too
        mine = torch.cuda.current_device()
        devices: list[int] = [0] * self.size
        dist.all_gather_object(devices, mine, group=self._group)
        # Where each process sees one device only, nobody can tell from indices.
        told_apart = len(set(devices)) == self.size
        reached = told_apart and all(
            other == mine or torch.cuda.can_device_access_peer(mine, other) for other in devices
        )
        answers = [False] * self.size
        dist.all_gather_object(answers, reached, group=self._group)
        return all(answers)

    @property
    def peer_bytes(self) -> int:
        return sum(channel.held_bytes for channel in self._peer_channels.values())

    def peer_channel(self, name: str, slots: int) -> Communicator:
        from megatron_cp_plugin.core.peer import PeerCommunicator

        if name not in self._peer_channels:
            self._peer_channels[name] = PeerCommunicator(name, self._group, slots)
        return self._peer_channels[name]

    def drop_peer_channels(self) -> None:
        """Forgets them, here and in subgroups, so that their memory is free once nobody uses it."""
        self._peer_channels.clear()
        for topology in self._subgroups.values():
            if isinstance(topology, ProcessGroupTopology):
                topology.drop_peer_channels()

    def subgroup(self, ranks: Sequence[int], name: str) -> Topology:
        chosen = tuple(ranks)
        if chosen == tuple(range(self.size)):
            return self
        if chosen not in self._subgroups:
            self._subgroups[chosen] = (
                ProcessGroupTopology(self._new_group(chosen)) if len(chosen) > 1 else _alone()
            )
        return self._subgroups[chosen]

    @property
    def nodes(self) -> tuple[int, ...]:
        if self._nodes is None:
            hosts: list[str] = [""] * self.size
            dist.all_gather_object(hosts, gethostname(), group=self._group)
            self._nodes = tuple(hosts.index(host) for host in hosts)
        return self._nodes

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        world_ranks = dist.get_process_group_ranks(self._group)
        # Other context-parallel groups of the same job make theirs at another time, or never.
        group = dist.new_group(
            [world_ranks[rank] for rank in ranks],
            backend=dist.get_backend(self._group),
            use_local_synchronization=True,
        )
        assert isinstance(group, dist.ProcessGroup)  # this rank is a member
        return group
