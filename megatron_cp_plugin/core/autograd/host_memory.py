"""What checkpoints keep for the backward goes to pinned host memory while the GPU is short of room.

A checkpointed layer keeps its input, and attention's output, until the backward. On long
sequences that is most of a GPU's memory, and the host is idle: the copies, on a stream of their
own, take less time than the layer's computation. What was kept last comes back while the layer
after it is differentiated.
"""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

# Smaller tensors stay, without a look at the memory: nothing is gained by them.
LEAST_BYTES = 64 << 20
# A layer of a Llama is recomputed and differentiated in the room of 27 of its inputs; logits, of a
# vocabulary of 128K, are 32 of them.
ROOM = 40
_PIECE_BYTES = 64 << 20
# Tensors that are on their way back while one is used: a layer's input and attention's output.
_AHEAD = 2


class HostMemory:
    """Pinned memory of this process, in pieces that are used again, never given back.

    Every rank decides for itself: nothing is communicated.
    """

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[Moved] | None = None

    def keep(self, x: Tensor) -> "Tensor | Moved":
        """x itself, or where it went if the GPU is short of memory and the host is not."""
        if not self._is_short(x):
            return x
        count = -(-x.nbytes // _PIECE_BYTES)
        missing = count - len(self._pieces)
        if missing > 0 and not host_has_room(missing * _PIECE_BYTES):
            return x
        pinned = torch.cuda.is_available()
        for _ in range(missing):
            piece = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned)
            self._pieces.append(piece)
        pieces = self._pieces[-count:]
        del self._pieces[-count:]
        if x.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        moved = Moved(self, x, pieces)
        self._last = weakref.ref(moved)
        return moved

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """What a function that is called here saves for its backward is kept as `keep` says."""
        with torch.autograd.graph.saved_tensors_hooks(
            # Other inputs, such as the angles of RoPE, are the same for all layers.
            lambda x: self.keep(x) if x.requires_grad and not x.is_leaf else x,
            lambda x: x.tensor() if isinstance(x, Moved) else x,
        ):
            yield

    def _is_short(self, x: Tensor) -> bool:
        size = x.numel() * x.element_size()
        if not x.is_cuda or type(x) is not Tensor or size < LEAST_BYTES:
            return False
        if not x.is_contiguous() or torch.cuda.is_current_stream_capturing():
            return False
        if self._stream is not None and self._stream.device != x.device:
            return False
        return free_bytes(x.device) < ROOM * size

    @contextmanager
    def copying(self) -> Iterator[torch.cuda.Stream | None]:
        """Copies that are asked for here come after what the current stream was given so far.

        Yields: their stream; None: on a CPU.
        """
        if self._stream is None:
            yield None
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            yield self._stream


class Moved:
    """A tensor in host memory."""

    def __init__(self, memory: HostMemory, x: Tensor, pieces: list[Tensor]) -> None:
        """Args: x: contiguous."""
        self._memory, self._pieces = memory, pieces
        self._shape, self._dtype, self._device = x.shape, x.dtype, x.device
        self._before = memory._last  # the one that the backward will want after this one
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        with memory.copying() as stream:
            for piece, part in zip(pieces, _bytes_of(x.detach()), strict=True):
                piece[: len(part)].copy_(part, non_blocking=True)
        if stream is not None:
            x.record_stream(stream)

    def __del__(self) -> None:
        # Copies into them begin after those from them, on the same stream.
        self._memory._pieces += self._pieces

    def tensor(self) -> Tensor:
        """The tensor, on its device; those before it begin to come back."""
        back = self._fetched()
        self._back = None
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
        before = self._before
        for _ in range(_AHEAD):
            moved = None if before is None else before()
            if moved is None:
                break
            moved._fetched()
            before = moved._before
        return back

    def _fetched(self) -> Tensor:
        """The tensor, once the stream of copies has done what it was given so far."""
        if self._back is None:
            # From the current stream's memory, where layers find the blocks again.
            self._back = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            with self._memory.copying() as stream:
                for piece, part in zip(self._pieces, _bytes_of(self._back), strict=True):
                    part.copy_(piece[: len(part)], non_blocking=True)
                self._arrived = None if stream is None else stream.record_event()
        return self._back


def _bytes_of(x: Tensor) -> tuple[Tensor, ...]:
    """A contiguous tensor in pieces."""
    return x.view(-1).view(torch.uint8).split(_PIECE_BYTES)


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that no tensor takes, whether torch holds them or nobody; no bound on CPUs."""
    if device.type != "cuda":
        return 2**62
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def host_has_room(size: int) -> bool:
    """Whether a quarter of the host's memory stays free beside `size` more bytes."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = total
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and (text := limit.read_text().strip()) != "max":  # a container's
        total = min(total, int(text))
        free = min(free, int(text) - int(used.read_text()))
    return free - size >= total // 4
