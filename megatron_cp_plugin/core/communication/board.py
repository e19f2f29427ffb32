"""A page of memory on which the ranks of one machine show each other two numbers a call.

Over gloo that takes the hosts 0.4 ms, a third of a short forward pass.
"""

import fcntl
import os
import struct
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from uuid import uuid4

_FOLDER = Path("/dev/shm")
# Numbers of a rank for one call: the call's number, the two that it shows, and the hash of all
# three, since others may read while they are written.
_ENTRY = 4
# Seconds for which a rank only lets others run while it waits; then it sleeps for a tenth of what
# it has waited, at most so long at a time; and between two looks at whether the others still run.
_YIELDS, _SLEEPS, _LOOKS = 0.001, 0.005, 0.05


class Board:
    """Two entries for each rank, in turn: a rank writes its next entry but one when all have
    written the next one, and so have read the one before.

    A rank locks its part of the file until its process, and all that it has forked, have ended.
    """

    def __init__(self, path: Path, rank: int, size: int, seconds: float) -> None:
        """Args: seconds: to wait for others. Raises: OSError: no such file, or no lock of it."""
        self._file = path.open("r+b", buffering=0)
        self._lock(fcntl.F_WRLCK, rank)
        self._numbers = memoryview(mmap(self._file.fileno(), 0)).cast("q")
        self._rank, self._size, self._seconds, self._call = rank, size, seconds, 0

    def compare(self, first: int, second: int) -> list[tuple[int, int]]:
        """Every rank's two numbers for this call, by rank.

        Args: first, second: below 2^63.

        Raises: RuntimeError if one does not come.
        """
        self._call += 1
        shown = self._call, first, second
        at = self._place(self._rank)
        self._numbers[at : at + _ENTRY] = memoryview(array("q", (*shown, hash(shown))))
        return [self._seen(rank) or self._awaited(rank) for rank in range(self._size)]

    def _place(self, rank: int) -> int:
        return (self._call % 2 * self._size + rank) * _ENTRY

    def _seen(self, rank: int) -> tuple[int, int] | None:
        """A rank's numbers for this call; None: they are not there, or not whole."""
        at = self._place(rank)
        call, first, second, check = self._numbers[at : at + _ENTRY].tolist()
        is_there = call == self._call and check == hash((call, first, second))
        return (first, second) if is_there else None

    def _awaited(self, rank: int) -> tuple[int, int]:
        begun = looked = time.monotonic()
        while True:
            now = time.monotonic()
            looks = now - looked > _LOOKS
            has_ended = looks and self._has_ended(rank)
            if found := self._seen(rank):  # it may have ended after it showed them
                return found
            if has_ended:
                raise RuntimeError(f"the process of rank {rank} has ended")
            if now - begun > self._seconds:
                raise RuntimeError(f"rank {rank} did not come in {self._seconds:.0f} s")
            looked = now if looks else looked
            if now - begun < _YIELDS:
                os.sched_yield()  # time.sleep(0) takes 60 us
            else:
                time.sleep(min((now - begun) / 10, _SLEEPS))

    def _has_ended(self, rank: int) -> bool:
        """Whether the system has taken the lock of a rank away."""
        try:
            self._lock(fcntl.F_WRLCK, rank)
        except OSError:
            return False
        self._lock(fcntl.F_UNLCK, rank)
        return True

    def _lock(self, kind: int, rank: int) -> None:
        """Sets or frees the lock of this open file, not of this process, which may be several
        ranks. Raises: OSError if another one has it.
        """
        asked = struct.pack("hhqqi4x", kind, os.SEEK_SET, rank, 1, 0)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, asked)


def shared_board(
    rank: int, size: int, seconds: float, gather: Callable[[object], list[object]]
) -> Board | None:
    """A board of these ranks; None if they do not share memory. A collective operation.

    Args: gather: every rank's value, by rank.
    """
    path, board = _FOLDER / f"megatron_cp_plugin-{uuid4().hex}", None
    if rank == 0:
        with suppress(OSError), path.open("xb") as file:
            file.truncate(2 * size * _ENTRY * 8)
    first = gather(path.name)[0]
    with suppress(OSError):
        board = Board(_FOLDER / str(first), rank, size, seconds)
    shared = all(gather(board is not None))
    if rank == 0:
        path.unlink(missing_ok=True)  # all ranks have it open
    return board if shared else None
