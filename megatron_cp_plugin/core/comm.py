"""The ranks of a group, and asynchronous communication between them, in channels.

An algorithm posts an operation, computes, and then waits: `pending = comm.exchange(...)`,
`pending.wait()`. A channel is one stream of messages. Nothing here knows about attention.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import contiguous_copy
from megatron_cp_plugin.core.communication.record import RECORDINGS, Operation, count
from megatron_cp_plugin.errors import CommunicationError


class Pieces(NamedTuple):
    """Rows [1,S,...] in several pieces of memory, which arrive as one tensor."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> torch.Size:
        _, _, *rest = self.parts[0].shape
        return torch.Size((1, sum([x.shape[1] for x in self.parts]), *rest))

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def is_meta(self) -> bool:
        return self.parts[0].is_meta


Send = tuple[Tensor, int]
Receive = tuple[Tensor, int]
# What a channel that is `direct` sends.
Sent = tuple[Tensor | Pieces, int]
Described = tuple[tuple[int, ...], torch.dtype]


_ALIGNMENT = 256


def aligned_bytes(described: Described) -> int:
    """Bytes of memory for a tensor."""
    shape, dtype = described
    return -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, eq=False)
class Room:
    """Memory for all tensors that a rank receives in an exchange. One object for equal ones.

    Attributes: order: the order in which they lie in memory.
    """

    like: tuple[Described, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, like: Iterable[Described], order: Sequence[int] | None = None) -> "Room":
        """Args: order: None: as they are listed."""
        listed = tuple(like)
        return _room(listed, (*range(len(listed)),) if order is None else tuple(order))

    @cached_property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(map(aligned_bytes, self.like))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each tensor begins, in bytes."""
        sizes = [aligned_bytes(self.like[number]) for number in self.order]
        starts = dict(zip(self.order, accumulate(sizes, initial=0), strict=False))
        return tuple([starts[number] for number in range(len(sizes))])

    def views(self, slab: Tensor, first: int) -> tuple[Tensor, ...]:
        """The tensors. Args: slab: bytes. first: where the memory begins in it."""
        found = []
        for start, (shape, dtype) in zip(self.starts, self.like, strict=True):
            begin = first + start
            stop = begin + torch.Size(shape).numel() * dtype.itemsize
            found.append(slab[begin:stop].view(dtype).view(shape))
        return tuple(found)


@lru_cache(maxsize=4096)
def _room(like: tuple[Described, ...], order: tuple[int, ...]) -> Room:
    return Room(like, order)


# By rank: the memory in which it receives, and the source of each tensor.
Beside = Mapping[int, tuple[Room, Sequence[int]]]
NOTHING_BESIDE: Beside = {}


class Pending[T]:
    """An operation under way. The result may be used, and inputs changed, only after `wait`.

    Attributes: wait: gives the result. On CUDA the current stream waits, not the host. Call it
        once.
    """

    def __init__(self, wait: Callable[[], T]) -> None:
        self.wait = wait

    def then[U](self, change: Callable[[T], U]) -> "Pending[U]":
        """The same operation, with a function applied to its result after the wait."""
        wait = self.wait
        return Pending(lambda: change(wait()))


class Communicator(ABC):
    """A channel of messages among P ranks.

    All ranks post the same operations in the same order, also those in which they do nothing.

    Attributes:
        rank, size: within the group.
        global_rank: for recordings.
        direct: it writes to other ranks' memory. So tensors that are sent need not be contiguous,
            and may be `Pieces`; and later exchanges overwrite the tensors that `buffers` returned.
        rotation: number of its receive buffers that exchanges take in turn; the same on all ranks.
    """

    direct: bool = False
    rotation: int = 1

    def __init__(self, channel: str, rank: int, size: int, global_rank: int) -> None:
        self.channel = channel
        self.rank = rank
        self.size = size
        self.global_rank = global_rank

    @property
    def held_bytes(self) -> int:
        """Memory held for receiving, which torch's statistics do not show."""
        return 0

    def buffers(self, room: Room, device: torch.device) -> tuple[Tensor, ...]:
        """Empty tensors for all that the next exchange receives."""
        if room.order == (*range(len(room.like)),):
            each = room.like
            return tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in each])
        return room.views(torch.empty(room.bytes, dtype=torch.uint8, device=device), 0)

    def reserve(self, room: Room) -> None:  # noqa: B027  (most need no room)
        """Makes room for `buffers` like these. All ranks call it where blocks are unequal."""

    def expect(self, sources: Collection[int]) -> None:  # noqa: B027  (most need not know)
        """Lets ranks send the messages of this rank's next exchange already, if there is room,
        once it calls `offer` or posts that exchange.

        After this call only work that is already queued may read blocks received before.
        """

    def offer(self) -> None:  # noqa: B027  (most need not know)
        """Tells ranks that they may send what was expected: takes the host longer than `expect`."""

    def mark(self) -> None:  # noqa: B027  (most need not know)
        """Marks a point in the work of the current stream: see `exchange`, `early`."""

    def exchange(
        self,
        sends: Sequence[Sent],
        receives: Sequence[Receive],
        beside: Beside = NOTHING_BESIDE,
        *,
        early: bool = False,
    ) -> Pending[None]:
        """Sends tensors to ranks and fills buffers from ranks, all at once.

        Several messages between one pair of ranks arrive in the order in which they are listed.

        Args:
            sends: (tensor, destination); tensors are contiguous unless `direct`, and stay
                unchanged until `wait`.
            receives: (contiguous buffer, source).
            beside: what each destination receives, if it receives from several ranks. A channel
                that writes to its memory needs it.
            early: the tensors to be sent were there at the last `mark`; they need not wait for
                work that was queued after it.
        """
        if RECORDINGS:
            count(self.global_rank, self.channel, "exchange", sends, receives)
        if self.direct:
            return self._exchange_direct(sends, receives, beside, early=early)
        return self._exchange(cast(Sequence[Send], sends), receives)

    def all_gather(self, x: Tensor) -> Pending[Tensor]:
        """Equal shapes on all ranks: x [...] -> [P, ...], by rank. Alone: x itself, as a view."""
        if self.size == 1:
            return Pending(lambda: x.unsqueeze(0))
        if RECORDINGS:
            self._count_with_all("all_gather", x)
        return self._all_gather(x.contiguous())

    def reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        """Sums over ranks: x [P, ...] -> [...], the part of this rank. Same shape on all ranks."""
        if self.size == 1:
            return Pending(lambda: x[0])
        if RECORDINGS:
            self._count_with_all("reduce_scatter", x[0])
        return self._reduce_scatter(x.contiguous())

    def all_to_all(self, *tensors: Tensor) -> Pending[Sequence[Tensor]]:
        """Of each x, x[i] goes to rank i, result[i] came from rank i: [P, ...] -> [P, ...]. Results
        may be lent, see `direct`.
        """
        if self.size == 1:
            return Pending(lambda: tensors)
        if RECORDINGS:
            for x in tensors:
                self._count_with_all("all_to_all", x[0])
        if self.direct:
            return self._all_to_all(tensors)
        return self._all_to_all([x if x.is_contiguous() else contiguous_copy(x) for x in tensors])

    def _count_with_all(self, op: Operation, block: Tensor) -> None:
        """Counts a block to, and one from, each other rank."""
        others = [(block, rank) for rank in range(self.size) if rank != self.rank]
        count(self.global_rank, self.channel, op, others, others)

    def _exchange_direct(
        self, sends: Sequence[Sent], receives: Sequence[Receive], beside: Beside, *, early: bool
    ) -> Pending[None]:
        """As `exchange`, for channels that are `direct`."""
        raise NotImplementedError

    def _exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Pending[None]:
        """As `exchange`, for channels that are not."""
        raise NotImplementedError

    @abstractmethod
    def _all_gather(self, x: Tensor) -> Pending[Tensor]: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor) -> Pending[Tensor]: ...

    @abstractmethod
    def _all_to_all(self, tensors: Sequence[Tensor]) -> Pending[Sequence[Tensor]]: ...


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
        self._peer_channels: dict[tuple[str, int], Communicator] = {}
        self._subgroups: dict[tuple[int, ...], Topology] = {}

    @abstractmethod
    def channel(self, name: str) -> Communicator:
        """A communicator over all ranks of this group, with an order of its own."""

    @property
    @abstractmethod
    def peer_access(self) -> bool:
        """Whether every rank's GPU can write to every other's memory. A collective operation."""

    @cached_property
    def near(self) -> "Topology | None":
        """The ranks of this rank's node, all with `peer_access`; None unless every node has such
        ranks, equally many, with consecutive numbers. A collective operation the first time.
        """
        local = self.nodes.count(self.nodes[0])
        if local == self.size:
            return self if self.peer_access else None
        if local == 1 or self.size % local:
            return None
        first = self.rank // local * local
        near = self.subgroup(range(first, first + local), "node")
        return near if all(self.gather(near.peer_access)) else None

    def peer_channel(self, name: str, slots: int) -> Communicator:
        """As `channel`, but with copy engines and `slots` receive buffers, where there is
        `peer_access`: see core.communication.peer.
        """
        if (name, slots) not in self._peer_channels:
            # Evaluation may come before training, which writes to the same memory.
            with torch.inference_mode(False):
                self._peer_channels[name, slots] = self._make_peer_channel(name, slots)
        return self._peer_channels[name, slots]

    @abstractmethod
    def _make_peer_channel(self, name: str, slots: int) -> Communicator: ...

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


def others_lost(rank: int, size: int, doing: str, error: RuntimeError) -> CommunicationError:
    """The error of a rank that waited in vain. Args: doing: such as "on channel 'keys'"."""
    reason = str(error).splitlines()[0]
    return CommunicationError(
        f"rank {rank} of {size} lost the others {doing}; has one of them died? ({reason})"
    )
