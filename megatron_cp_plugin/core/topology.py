"""Process groups: who takes part, and one group for each concurrent flow of messages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache

import torch.distributed as dist

from megatron_cp_plugin.core.comm import Communicator, ProcessGroupCommunicator


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

    @abstractmethod
    def subgroup(self, ranks: Sequence[int], name: str) -> "Topology":
        """The topology of some of the ranks (of this group), which must include this rank."""

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> "Topology":
        """Topology of a process group; None: all processes, or this one where there is no
        process group.
        """
        from megatron_cp_plugin.core.virtual import VirtualWorld

        if group is None:
            if not dist.is_initialized():
                return VirtualWorld(1).topology(0)
            group = dist.group.WORLD
            assert group is not None
        return _of_group(group)


@cache
def _of_group(group: dist.ProcessGroup) -> Topology:
    return ProcessGroupTopology(group)


class ProcessGroupTopology(Topology):
    """Over a torch.distributed process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._channels: dict[str, Communicator] = {}
        self._subgroups: dict[tuple[int, ...], Topology] = {}

    def channel(self, name: str) -> Communicator:
        if name not in self._channels:
            # The first flow uses the group that was given: no further connections or buffers.
            group = self._new_group(range(self.size)) if self._channels else self._group
            self._channels[name] = ProcessGroupCommunicator(name, group)
        return self._channels[name]

    def subgroup(self, ranks: Sequence[int], name: str) -> Topology:
        chosen = tuple(ranks)
        if chosen == tuple(range(self.size)):
            return self
        if chosen not in self._subgroups:
            self._subgroups[chosen] = ProcessGroupTopology(self._new_group(chosen))
        return self._subgroups[chosen]

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
