"""Recordings of what ranks send and receive.

Bytes and messages are counted point to point, as the algorithm asks for them: in an all-gather of x
among P ranks each rank sends P - 1 messages of x, whatever the backend does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal, TypedDict, Unpack

Phase = Literal["forward", "backward"]
Operation = Literal["exchange", "all_gather", "reduce_scatter", "all_to_all"]
Messages = Sequence[tuple[Any, int]]  # tensors, or pieces that arrive as one, and the other rank

# Under which phase operations are counted.
PHASE: ContextVar[Phase] = ContextVar("phase", default="forward")


# Whether this thread's messages are left out of all recordings.
UNRECORDED: ContextVar[bool] = ContextVar("unrecorded", default=False)


@contextmanager
def holding[T](variable: ContextVar[T], value: T) -> Iterator[None]:
    """Within this context a variable has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@dataclass(frozen=True)
class Transfer:
    """What one rank sent or received in one operation.

    Attributes:
        rank: global rank that counts it.
        bytes: the payload of all messages.
    """

    rank: int
    channel: str
    op: Operation
    phase: Phase
    direction: Literal["sent", "received"]
    messages: int
    bytes: int


class Wanted(TypedDict, total=False):
    """Values that rows of a recording have; None: any. Without a direction: of what was sent."""

    rank: int | None
    op: str | None
    phase: Phase | None
    direction: str


@dataclass
class CommunicationLog:
    """Rows of one recording, in the order in which operations were posted."""

    rows: list[Transfer] = field(default_factory=list)

    def _select(self, wanted: Wanted) -> Iterator[Transfer]:
        asked = {"direction": "sent", **wanted}
        for row in tuple(self.rows):
            if all(value in (None, getattr(row, name)) for name, value in asked.items()):
                yield row

    def bytes(self, **wanted: Unpack[Wanted]) -> int:
        """Total bytes of the rows that match."""
        return sum(row.bytes for row in self._select(wanted))

    def messages(self, **wanted: Unpack[Wanted]) -> int:
        """Total messages of the rows that match."""
        return sum(row.messages for row in self._select(wanted))


# Backward runs in autograd's own threads on CUDA, so a recording cannot be local to a thread.
RECORDINGS: list[CommunicationLog] = []
_recordings_lock = Lock()


@contextmanager
def record_communication() -> Iterator[CommunicationLog]:
    """Counts what this process sends and receives until the context ends."""
    log = CommunicationLog()
    with _recordings_lock:
        RECORDINGS.append(log)
    try:
        yield log
    finally:
        with _recordings_lock:
            RECORDINGS[:] = [other for other in RECORDINGS if other is not log]


def count(rank: int, channel: str, op: Operation, sent: Messages, received: Messages) -> None:
    """Adds what a rank sends and receives in one operation to all recordings."""
    for direction, messages in (("sent", sent), ("received", received)):
        # Tensors without storage are not sent: a simulation uses them.
        sizes = [x.shape.numel() * x.dtype.itemsize for x, _ in messages if not x.is_meta]
        if sizes and not UNRECORDED.get():
            row = Transfer(rank, channel, op, PHASE.get(), direction, len(sizes), sum(sizes))  # type: ignore[arg-type]
            with _recordings_lock:
                for log in RECORDINGS:
                    log.rows.append(row)
