"""Exchanges between the GPUs of one node by their copy engines, over peer memory.

NCCL moves data with kernels that take multiprocessors away from attention; a copy engine takes
none. Each rank writes straight into its peer's receive buffer and then a flag beside it; streams,
not kernels and not the host, wait for flags.
"""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.comm import Communicator, Described, Pending, Receive, Send
from megatron_cp_plugin.errors import ContextParallelError

_ALIGNMENT = 256


class SlottedCommunicator(Communicator):
    """Exchanges with at most one destination and one source each, received in a few slots.

    All ranks post the same number of exchanges; what one rank sends has the shapes of what the
    other expects. Exchanges take the n slots in turn, those that receive nothing too. A received
    block may be read, on the stream that waited for it, until the next exchange is posted that
    takes the same slot and receives. The collective operations are not offered.

    Attributes:
        slab: all slots, one after another. held_bytes: memory held for receiving, which torch's
        statistics do not show.
    """

    slab: Tensor

    def __init__(self, channel: str, rank: int, size: int, global_rank: int, slots: int) -> None:
        super().__init__(channel, rank, size, global_rank)
        self._slots = slots
        self._slot_bytes = 0
        self._turn = 0

    def buffers(self, like: Sequence[Described], device: torch.device) -> tuple[Tensor, ...]:
        """See Communicator.buffers; views of this turn's slot."""
        sizes = [_bytes(shape, dtype) for shape, dtype in like]
        offsets = _offsets(sizes)
        self.reserve(like)
        base = self._turn % self._slots * self._slot_bytes
        return tuple(
            self.slab[base + start : base + start + size].view(dtype).view(shape)
            for (shape, dtype), start, size in zip(like, offsets, sizes, strict=False)
        )

    def reserve(self, like: Sequence[Described]) -> None:
        """See Communicator.reserve."""
        needed = _offsets([_bytes(shape, dtype) for shape, dtype in like])[-1]
        if needed > self._slot_bytes:
            self._grow(needed)
            self._slot_bytes = needed

    @property
    def held_bytes(self) -> int:
        return self._slots * self._slot_bytes

    def _exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Pending[None]:
        sources = {source for _, source in receives}
        targets = {to for _, to in sends}
        if len(sources) > 1 or len(targets) > 1:
            raise ContextParallelError(
                f"peer transport needs one source and one destination an exchange, got {sources} "
                f"and {targets}: use transport group"
            )
        slot = self._turn % self._slots
        pending = self._post(slot, sends, receives)
        self._turn += 1
        return pending

    @abstractmethod
    def _grow(self, slot_bytes: int) -> None:
        """Replaces the slab by one with larger slots; all ranks come here in the same turn."""

    @abstractmethod
    def _post(self, slot: int, sends: Sequence[Send], receives: Sequence[Receive]) -> Pending[None]:
        """An exchange with one destination and one source at most."""

    def _all_gather(self, x: Tensor) -> Pending[Tensor]:
        raise NotImplementedError("peer transport exchanges only")

    def _reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        raise NotImplementedError("peer transport exchanges only")

    def _all_to_all(self, x: Tensor) -> Pending[Tensor]:
        raise NotImplementedError("peer transport exchanges only")


class PeerCommunicator(SlottedCommunicator):
    """Over CUDA peer memory.

    Exchanges may be posted, and waited for, on any stream: a slot is offered again only once the
    stream that read it last has come to this point, and offers are in the order of exchanges.
    """

    def __init__(self, channel: str, group: dist.ProcessGroup, slots: int) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        super().__init__(channel, rank, size, dist.get_rank(), slots)
        self._group = group
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(priority=-1)
        self._posted: torch.cuda.Stream | None = None
        self._readers: list[torch.cuda.Stream | None] = [None] * slots
        self._sent = [0] * self.size
        self._received = [0] * self.size
        # Word p of each half: what rank p has made ready for us, what rank p has written to us.
        self._flags, self._flags_handle = self._symmetric(2 * self.size * 4)
        self._flags.zero_()
        self.slab = self._flags
        self._slab_handle: Any = None
        torch.cuda.synchronize()
        dist.barrier(group)

    def _post(self, slot: int, sends: Sequence[Send], receives: Sequence[Receive]) -> Pending[None]:
        if torch.cuda.is_current_stream_capturing():
            raise ContextParallelError(
                "transport peer counts its messages, which a CUDA graph cannot do when it is "
                "replayed: use transport group"
            )
        current = torch.cuda.current_stream()
        expected: dict[int, int] = {}  # as of now, whatever is posted before this is waited for
        for source in {source for _, source in receives}:
            # Offers are flags that only rise, and this one says that the slot has been read.
            for other in (self._posted, self._readers[slot]):
                if other not in (None, current):
                    current.wait_stream(other)
            self._received[source] += 1
            expected[source] = self._received[source]
            self._write(current, source, self.rank, expected[source])
            self._posted, self._readers[slot] = current, None
        copied = torch.cuda.Event()
        base = slot * self._slot_bytes
        for to in {to for _, to in sends}:
            self._sent[to] += 1
            self._stream.wait_stream(current)
            self._await(self._stream, to, self._sent[to])
            offsets = _offsets([t.numel() * t.element_size() for t, _ in sends])
            with torch.cuda.stream(self._stream):
                for (tensor, _), start in zip(sends, offsets, strict=False):
                    self._remote(to, base + start, tensor).copy_(tensor)
            self._write(self._stream, to, self.size + self.rank, self._sent[to])
            copied.record(self._stream)

        def finish() -> None:
            now = torch.cuda.current_stream()
            for source, count in expected.items():
                self._await(now, self.size + source, count)
                self._readers[slot] = now
            if sends:  # which this closure keeps alive until they have been copied
                now.wait_event(copied)
                if now != current:
                    # Their memory goes back to where it came from, which does not wait.
                    for tensor, _ in sends:
                        tensor.record_stream(self._stream)

        return Pending(finish)

    def _remote(self, rank: int, offset: int, like: Tensor) -> Tensor:
        """A view of a peer's slab."""
        assert self._slab_handle is not None
        return self._slab_handle.get_buffer(
            rank, tuple(like.shape), like.dtype, offset // like.element_size()
        )

    def _grow(self, slot_bytes: int) -> None:
        torch.cuda.synchronize()
        dist.barrier(self._group)
        self.slab, self._slab_handle = self._symmetric(self._slots * slot_bytes)

    def _symmetric(self, size_bytes: int) -> tuple[Tensor, Any]:
        """Memory that all ranks of the group can write to, and the handle to their parts."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        memory = symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return memory, symmetric_memory.rendezvous(memory, self._group.group_name)

    def _write(self, stream: torch.cuda.Stream, rank: int, word: int, value: int) -> None:
        """Sets a flag of a peer once the stream has come here."""
        from cuda.bindings import driver

        address = self._flags_handle.buffer_ptrs[rank] + 4 * word
        _checked(driver.cuStreamWriteValue32(stream.cuda_stream, address, _wrapped(value), 0))

    def _await(self, stream: torch.cuda.Stream, word: int, value: int) -> None:
        """Holds the stream until a flag of ours has reached the value."""
        from cuda.bindings import driver

        address = self._flags_handle.buffer_ptrs[self.rank] + 4 * word
        at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        _checked(
            driver.cuStreamWaitValue32(stream.cuda_stream, address, _wrapped(value), int(at_least))
        )


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where aligned pieces of those sizes begin; the last entry is the total."""
    aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    return [0, *accumulate(aligned)]


def _wrapped(value: int) -> int:
    """Flags compare cyclically, modulo 2^32."""
    return value & 0xFFFFFFFF


def _checked(result: tuple[Any, ...]) -> None:
    """Raises: RuntimeError if a driver call failed."""
    if int(result[0]):
        raise RuntimeError(f"CUDA driver call failed: {result[0]}")
