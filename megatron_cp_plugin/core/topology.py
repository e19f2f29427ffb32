"""The ranks of a group, and a channel for each concurrent stream of their messages."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import cached_property

import torch

from megatron_cp_plugin.core.comm import Communicator
from megatron_cp_plugin.core.communication.peer import SlottedCommunicator
from megatron_cp_plugin.errors import ContextParallelError

_KEPT = 4096  # numbers of tokens that a rank remembers


class Recent[T: Hashable](dict[T, None]):
    """The values that were added last, at most `kept` of them."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self._kept = kept

    def add(self, value: T) -> None:
        """Adds a value, or makes it the last one."""
        self.pop(value, None)
        self[value] = None
        if len(self) > self._kept:
            del self[next(iter(self))]


class Topology(ABC):
    """The ranks of one context-parallel group.

    All ranks of a group must ask for the same channels and subgroups in the same order, because
    making one is a collective operation.

    Attributes:
        rank, size: within the group.
        plans_all: plans are made for all ranks, because one process asks for several ranks' plans.
        calls: number of calls that the ranks have compared, see `core.agree`.
    """

    plans_all = False
    calls = 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._peer_channels: dict[tuple[str, int], SlottedCommunicator] = {}
        self._subgroups: dict[tuple[int, ...], Topology] = {}

    @abstractmethod
    def channel(self, name: str) -> Communicator:
        """A communicator over all ranks of this group, with an order of its own."""

    @property
    @abstractmethod
    def peer_access(self) -> bool:
        """Whether every rank's GPU can write to every other's memory. A collective operation."""

    def peer_channel(self, name: str, slots: int) -> Communicator:
        """As `channel`, but with copy engines and `slots` receive buffers: see
        core.communication.peer.

        Raises: ContextParallelError without `peer_access`.
        """
        if not self.peer_access:
            raise ContextParallelError(
                "transport peer needs GPUs of one node with access to each other's memory, got "
                "ranks without it: use transport auto or group"
            )
        if (name, slots) not in self._peer_channels:
            # Evaluation may come before training, which writes to the same memory.
            with torch.inference_mode(False):
                self._peer_channels[name, slots] = self._make_peer_channel(name, slots)
        return self._peer_channels[name, slots]

    @abstractmethod
    def _make_peer_channel(self, name: str, slots: int) -> SlottedCommunicator: ...

    @property
    def peer_bytes(self) -> int:
        """Memory that peer channels hold, here and in subgroups, beside torch's allocator's."""
        own = sum(channel.held_bytes for channel in self._peer_channels.values())
        return own + sum(topology.peer_bytes for topology in self._subgroups.values())

    def drop_peer_channels(self) -> None:
        """Forgets peer channels, here and in subgroups, so that their memory can be freed."""
        self._peer_channels.clear()
        for topology in self._subgroups.values():
            topology.drop_peer_channels()

    def subgroup(self, ranks: Sequence[int], name: str) -> "Topology":
        """The topology of some of the ranks (of this group), which must include this rank.

        All ranks ask for subgroups of one size at a time, which do not overlap.
        """
        chosen = tuple(ranks)
        if len(chosen) == self.size and chosen == tuple(range(self.size)):
            return self
        if chosen not in self._subgroups:
            self._subgroups[chosen] = self._make_subgroup(chosen, name)
        return self._subgroups[chosen]

    @abstractmethod
    def _make_subgroup(self, ranks: tuple[int, ...], name: str) -> "Topology": ...

    @property
    @abstractmethod
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank: ranks with the same number share one. A collective operation."""

    @abstractmethod
    def gather[T](self, mine: T) -> list[T]:
        """Every rank's object, by rank: small picklable objects, for checks.

        A collective operation; not among the messages that `record_communication` counts.
        """

    @abstractmethod
    def numbers(self, mine: tuple[int, int]) -> list[tuple[int, int]]:
        """Every rank's two numbers, below 2**63, by rank; otherwise as `gather`.

        The hosts exchange them: no GPU works or is waited for, also while a graph is captured.
        """

    @cached_property
    def choices(self) -> dict[Hashable, tuple[str, tuple[tuple[str, object], ...]]]:
        """Algorithms and options that `auto` has chosen for calls, equal on all ranks."""
        return {}

    @cached_property
    def held(self) -> Recent[int]:
        """Numbers of tokens that this rank held in calls without the sequence's length."""
        return Recent(_KEPT)

    @cached_property
    def cut(self) -> Recent[tuple[str, int]]:
        """Names of layouts by which this rank has split sequences, and the tokens that it got."""
        return Recent(_KEPT)
