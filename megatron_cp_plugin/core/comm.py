"""Asynchronous communication between the ranks of one group, every message counted.

An algorithm posts an operation, computes, and then waits: `pending = comm.exchange(...)`,
`pending.wait()`. Nothing here knows about attention.

Bytes and messages are counted point to point, as the algorithm asks for them: in an all-gather of x
among P ranks each rank sends P - 1 messages of x, whatever the backend does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import contiguous_copy
from megatron_cp_plugin.errors import CommunicationError

Phase = Literal["forward", "backward"]
Operation = Literal["exchange", "all_gather", "reduce_scatter", "all_to_all"]
Send = tuple[Tensor, int]
Receive = tuple[Tensor, int]
Described = tuple[tuple[int, ...], torch.dtype]


_ALIGNMENT = 256


def aligned_bytes(described: Described) -> int:
    """Bytes of memory for a tensor."""
    shape, dtype = described
    return -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, eq=False)
class Room:
    """Memory for all tensors that a rank receives in an exchange. One object for equal ones.

    Attributes:
        like: shapes and dtypes of the tensors.
        order: the order in which they lie in memory.
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


# Under which phase operations are counted.
PHASE: ContextVar[Phase] = ContextVar("phase", default="forward")


class CommunicatingIn:
    """Within this context operations are counted under a phase."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def __enter__(self) -> None:
        self._token = PHASE.set(self._phase)

    def __exit__(self, *_: object) -> None:
        PHASE.reset(self._token)


@dataclass(frozen=True)
class Transfer:
    """What one rank sent or received in one operation.

    Attributes:
        rank: global rank that counts it.
        channel: name of the channel.
        messages, bytes: how many messages, and their payload.
    """

    rank: int
    channel: str
    op: Operation
    phase: Phase
    direction: Literal["sent", "received"]
    messages: int
    bytes: int


@dataclass
class CommunicationLog:
    """Rows of one recording, in the order in which operations were posted."""

    rows: list[Transfer] = field(default_factory=list)

    def _select(self, *wanted: object) -> Iterator[Transfer]:
        for row in tuple(self.rows):
            given = row.rank, row.op, row.phase, row.direction
            if all(want in (None, x) for want, x in zip(wanted, given, strict=True)):
                yield row

    def bytes(
        self,
        *,
        rank: int | None = None,
        op: str | None = None,
        phase: Phase | None = None,
        direction: str = "sent",
    ) -> int:
        """Total bytes of the rows that match; None matches all."""
        return sum(row.bytes for row in self._select(rank, op, phase, direction))

    def messages(
        self,
        *,
        rank: int | None = None,
        op: str | None = None,
        phase: Phase | None = None,
        direction: str = "sent",
    ) -> int:
        """Total messages of the rows that match; None matches all."""
        return sum(row.messages for row in self._select(rank, op, phase, direction))


# Backward runs in autograd's own threads on CUDA, so a recording cannot be local to a thread.
_recordings: list[CommunicationLog] = []
_recordings_lock = Lock()


@contextmanager
def record_communication() -> Iterator[CommunicationLog]:
    """Counts what this process sends and receives until the context ends."""
    log = CommunicationLog()
    with _recordings_lock:
        _recordings.append(log)
    try:
        yield log
    finally:
        with _recordings_lock:
            _recordings[:] = [other for other in _recordings if other is not log]


# Whether this thread's messages are left out of all recordings.
_unrecorded: ContextVar[bool] = ContextVar("unrecorded", default=False)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Within this context this thread's messages are not counted."""
    token = _unrecorded.set(True)
    try:
        yield
    finally:
        _unrecorded.reset(token)


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
        global_rank: for the log.
        channel: its name.
        strided: whether `exchange` sends tensors that are not contiguous.
        lends: later exchanges overwrite the tensors that `buffers` returned.
    """

    strided: bool = False
    lends: bool = False

    def __init__(self, channel: str, rank: int, size: int, global_rank: int) -> None:
        self.channel = channel
        self.rank = rank
        self.size = size
        self.global_rank = global_rank

    def buffers(self, room: Room, device: torch.device) -> tuple[Tensor, ...]:
        """Empty tensors for all that the next exchange receives."""
        if room.order == (*range(len(room.like)),):
            each = room.like
            return tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in each])
        return room.views(torch.empty(room.bytes, dtype=torch.uint8, device=device), 0)

    def reserve(self, room: Room) -> None:  # noqa: B027  (most need no room)
        """Makes room for `buffers` like these. All ranks call it where blocks are unequal."""

    def expect(self, sources: Collection[int]) -> None:  # noqa: B027  (most need not know)
        """Lets ranks send the messages of this rank's next exchange already, if there is room.

        After this call only work that is already queued may read blocks received before.
        """

    def mark(self) -> None:  # noqa: B027  (most need not know)
        """Marks a point in the work of the current stream: see `exchange`, `early`."""

    def exchange(
        self,
        sends: Sequence[Send],
        receives: Sequence[Receive],
        beside: Beside = NOTHING_BESIDE,
        *,
        early: bool = False,
    ) -> Pending[None]:
        """Sends tensors to ranks and fills buffers from ranks, all at once.

        Several messages between one pair of ranks arrive in the order in which they are listed.

        Args:
            sends: (tensor, destination); tensors are contiguous unless `strided`, and stay
                unchanged until `wait`.
            receives: (contiguous buffer, source).
            beside: what each destination receives, if it receives from several ranks. A channel
                that writes to its memory needs it.
            early: the tensors to be sent were there at the last `mark`; they need not wait for
                work that was queued after it.
        """
        if _recordings:
            self._count("exchange", [t for t, _ in sends], [t for t, _ in receives])
        if beside or early:
            return self._exchange_beside(sends, receives, beside, early=early)
        return self._exchange(sends, receives)

    def all_gather(self, x: Tensor) -> Pending[Tensor]:
        """Equal shapes on all ranks: x [...] -> [P, ...], by rank. Alone: x itself, as a view."""
        if self.size == 1:
            return Pending(lambda: x.unsqueeze(0))
        if _recordings:
            self._count_with_all("all_gather", x)
        return self._all_gather(x.contiguous())

    def reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        """Sums over ranks: x [P, ...] -> [...], the part of this rank. Same shape on all ranks."""
        if self.size == 1:
            return Pending(lambda: x[0])
        if _recordings:
            self._count_with_all("reduce_scatter", x[0])
        return self._reduce_scatter(x.contiguous())

    def all_to_all(self, x: Tensor) -> Pending[Tensor]:
        """x[i] goes to rank i, result[i] came from rank i: [P, ...] -> [P, ...]."""
        if self.size == 1:
            return Pending(lambda: x)
        if _recordings:
            self._count_with_all("all_to_all", x[0])
        return self._all_to_all(x if x.is_contiguous() else contiguous_copy(x))

    def _count_with_all(self, op: Operation, block: Tensor) -> None:
        """Counts a block to, and one from, each other rank."""
        others = [block] * (self.size - 1)
        self._count(op, others, others)

    def _count(self, op: Operation, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        for direction, tensors in (("sent", sent), ("received", received)):
            # Tensors without storage are not sent: a simulation uses them.
            if tensors and not tensors[0].is_meta and not _unrecorded.get():
                row = Transfer(
                    self.global_rank,
                    self.channel,
                    op,
                    PHASE.get(),
                    direction,  # type: ignore[arg-type]
                    len(tensors),
                    sum(t.numel() * t.element_size() for t in tensors),
                )
                with _recordings_lock:
                    for log in _recordings:
                        log.rows.append(row)

    def _exchange_beside(
        self, sends: Sequence[Send], receives: Sequence[Receive], beside: Beside, *, early: bool
    ) -> Pending[None]:
        """As `_exchange`, for channels that write to others' memory."""
        return self._exchange(sends, receives)

    @abstractmethod
    def _exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Pending[None]: ...

    @abstractmethod
    def _all_gather(self, x: Tensor) -> Pending[Tensor]: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor) -> Pending[Tensor]: ...

    @abstractmethod
    def _all_to_all(self, x: Tensor) -> Pending[Tensor]: ...


def others_lost(rank: int, size: int, doing: str, error: RuntimeError) -> CommunicationError:
    """The error of a rank that waited in vain. Args: doing: such as "on channel 'keys'"."""
    reason = str(error).splitlines()[0]
    return CommunicationError(
        f"rank {rank} of {size} lost the others {doing}; has one of them died? ({reason})"
    )
