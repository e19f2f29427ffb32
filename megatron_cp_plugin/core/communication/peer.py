"""Exchanges blocks between GPUs of one node with copy engines, over peer memory.

NCCL moves data with kernels that take multiprocessors away from attention; copy engines take none.
Each rank writes straight into its peer's receive buffer and then a flag beside it; streams, not
kernels and not the host, wait for flags.
"""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.comm import Communicator, Described, Pending, Receive, Send
from megatron_cp_plugin.errors import ContextParallelError

_ALIGNMENT = 256
_KEPT = 64  # views of slots
_MAX_PITCH = 2**31 - 1  # bytes, of a two-dimensional copy: CU_DEVICE_ATTRIBUTE_MAX_PITCH
_AFTER_AN_ERROR = (
    "did a call before it end in an error? Start again, or call megatron_cp_plugin.release() on "
    "all ranks"
)


class SlottedCommunicator(Communicator):
    """Exchanges with at most one destination and one source each, received in a few slots.

    All ranks post the same number of exchanges; tensors sent have the shapes that the receiver
    expects. Exchanges, also those that receive nothing, take the n slots in turn. A received block
    may be read, on the stream that waited for it, until the next receiving exchange of the same
    slot is posted or expected. The collective operations are not offered.

    Attributes: held_bytes: memory held for receiving, which torch's statistics do not show.
    """

    strided = True
    lends = True
    _slab: Tensor

    def __init__(self, channel: str, rank: int, size: int, global_rank: int, slots: int) -> None:
        super().__init__(channel, rank, size, global_rank)
        self._slots = slots
        self._slot_bytes = 0
        self._views: dict[tuple[object, ...], tuple[Tensor, ...]] = {}
        self._turn = 0
        self._awaited: set[int] = set()  # slots
        self._offered: frozenset[int] = frozenset()  # ranks that may write to this turn's slot

    def buffers(self, like: Sequence[Described], device: torch.device) -> tuple[Tensor, ...]:
        """See Communicator.buffers; views of this turn's slot."""
        return self._in_slot(self.rank, tuple(like))

    def _in_slot(self, rank: int, like: tuple[Described, ...]) -> tuple[Tensor, ...]:
        """Views of this turn's slot of a rank; cached, because all layers use the same."""
        slot = self._turn % self._slots
        key = rank, slot, like
        if key not in self._views:
            if rank == self.rank:
                self.reserve(like)
            if len(self._views) == _KEPT:
                self._views.clear()
            starts = _offsets([_bytes_of_shape(*one) for one in like])
            places = [slot * self._slot_bytes + start for start in starts]
            with torch.inference_mode(False):  # see Topology.peer_channel
                self._views[key] = tuple(
                    self._view(rank, place, *one) for place, one in zip(places, like, strict=False)
                )
        return self._views[key]

    def _view(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in this rank's slots. Args: start: its first byte."""
        return self._slab[start : start + _bytes_of_shape(shape, dtype)].view(dtype).view(shape)

    def reserve(self, like: Sequence[Described]) -> None:
        needed = _offsets([_bytes_of_shape(shape, dtype) for shape, dtype in like])[-1]
        if needed > self._slot_bytes:
            with torch.inference_mode(False):
                self._grow(needed)
            self._slot_bytes = needed
            self._views.clear()

    def expect(self, sources: Collection[int]) -> None:
        """See Communicator.expect; if the slot is not free yet, the exchange offers it."""
        slot = self._turn % self._slots
        if slot not in self._awaited and not self._offered:
            self._follow()
            self._offer(slot, sources)
            self._offered = frozenset(sources)

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
        if receives and slot in self._awaited:
            raise RuntimeError(
                f"a block on {self.channel!r} was not waited for before the next: {_AFTER_AN_ERROR}"
            )
        if self._offered and self._offered != sources:
            raise RuntimeError(
                f"ranks {sorted(self._offered)} were expected to send on {self.channel!r}, got an "
                f"exchange with ranks {sorted(sources)}: {_AFTER_AN_ERROR}"
            )
        pending = self._post(slot, sends, receives)
        self._turn, self._offered = self._turn + 1, frozenset()
        if not receives:
            return pending
        self._awaited.add(slot)
        return pending.then(lambda _: self._awaited.discard(slot))

    @abstractmethod
    def _grow(self, slot_bytes: int) -> None:
        """Replaces the slab by one with larger slots; all ranks come here in the same turn."""

    def _follow(self) -> None:
        """Operations that follow wait for all work queued on the current stream."""

    def _offer(self, slot: int, sources: Collection[int]) -> None:
        """Lets ranks write to a slot, after `_follow`."""

    @abstractmethod
    def _post(self, slot: int, sends: Sequence[Send], receives: Sequence[Receive]) -> Pending[None]:
        """Posts an exchange with at most one destination and one source, and an offer if none was
        made.
        """

    def _no_collective(self, x: Tensor) -> Pending[Tensor]:
        raise NotImplementedError("peer transport exchanges only")

    _all_gather = _reduce_scatter = _all_to_all = _no_collective


class PeerCommunicator(SlottedCommunicator):
    """Over CUDA peer memory.

    Exchanges may be posted, and waited for, on any stream: a slot is offered again only after the
    stream that read it last has reached this point. They may be captured in CUDA graphs, after the
    same exchanges were made outside a graph; all ranks capture and replay the same exchanges, in
    one order with all others of this channel. If a graph is replayed on another stream than the
    exchanges before and after it, the streams must wait for each other. All ranks post exchanges in
    one order over all channels: branches of a graph may share a queue of the hardware, where waits
    hold each other up.

    A flag is 0 or 1, so that a replay repeats the first run. Each rank has a flag for every other
    rank and slot, "you may write to this slot of mine", and one for every slot of its own, "has
    come". The rank that waits for the former resets it; the rank that offers a slot resets the
    latter. A stream of copies does all of this but the last wait, because each operation on a flag
    holds its stream up for some microseconds.
    """

    def __init__(
        self, channel: str, group: dist.ProcessGroup, slots: int, copies: torch.cuda.Stream
    ) -> None:
        """Args: copies: stream that all channels of this GPU share, so that all their operations
        have one order.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        super().__init__(channel, rank, size, dist.get_rank(), slots)
        _refuse_capture(f"make the receive buffers of {channel!r}")
        self._group = group
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = copies
        self._readers: list[tuple[torch.cuda.Stream, int] | None] = [None] * slots
        self._flags, self._flags_handle = self._symmetric((size + 1) * slots * 4)
        self._flag_addresses = list(self._flags_handle.buffer_ptrs)
        self._slab = self._flags
        self._slab_handle: Any = None
        self._captured = False
        self._of_graphs: list[tuple[Tensor, Any]] = []  # former slabs, which replays write to

    def buffers(self, like: Sequence[Described], device: torch.device) -> tuple[Tensor, ...]:
        """See Communicator.buffers. Raises: ContextParallelError for tensors on another device."""
        if device != self._device:
            raise ContextParallelError(
                f"peer transport needs tensors on {self._device}, got {device}: use transport group"
            )
        return super().buffers(like, device)

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + sum(slab.numel() for slab, _ in self._of_graphs)

    def _post(self, slot: int, sends: Sequence[Send], receives: Sequence[Receive]) -> Pending[None]:
        if not sends and not receives:
            return Pending(lambda: None)
        current, copies = torch.cuda.current_stream(self._device), self._stream
        capture = _capture_of(current)
        self._captured |= capture != 0
        arrival = self.size * self._slots + slot
        self._follow()
        if not self._offered:
            self._offer(slot, {source for _, source in receives})
        described = tuple([(tuple(x.shape), x.dtype) for x, _ in sends])
        places = [(to, self._in_slot(to, described)) for to in {to for _, to in sends}]
        done = torch.cuda.Event()

        def send() -> None:
            for to, targets in places:
                self._await(copies, to * self._slots + slot)
                self._write(copies, self.rank, to * self._slots + slot, 0)
                for (tensor, _), target in zip(sends, targets, strict=True):
                    push(copies, tensor, target)
                self._write(copies, to, arrival, 1)
            done.record(copies)

        if not capture:
            send()

        def finish() -> None:
            if capture:
                # Behind what was captured meanwhile. Where all branches of a graph have one queue
                # (CUDA_DEVICE_MAX_CONNECTIONS=1) kernels would wait there for the other rank.
                send()
            now = torch.cuda.current_stream(self._device)
            # What leaves before what comes: so there is no order of a graph's branches in which
            # ranks wait for each other's messages before they have sent their own. The flag of
            # what comes has been set back by then.
            now.wait_event(done)
            if now != current:
                # Their memory returns to its allocator, which does not wait.
                for tensor, _ in sends:  # which this closure keeps alive until they are copied
                    tensor.record_stream(copies)
            if receives:
                self._await(now, arrival)
                self._readers[slot] = now, _capture_of(now)

        return Pending(finish)

    def _follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _offer(self, slot: int, sources: Collection[int]) -> None:
        current, copies = torch.cuda.current_stream(self._device), self._stream
        reader = self._readers[slot]
        for source in sources:
            # Before a capture, and before a replay, everything is in order on one stream.
            if reader is not None and reader[0] != current and reader[1] == _capture_of(current):
                copies.wait_stream(reader[0])
            self._write(copies, self.rank, self.size * self._slots + slot, 0)
            self._write(copies, source, self.rank * self._slots + slot, 1)

    def _view(self, rank: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if rank == self.rank:
            return super()._view(rank, start, shape, dtype)
        return self._slab_handle.get_buffer(rank, shape, dtype, start // dtype.itemsize)

    def _grow(self, slot_bytes: int) -> None:
        _refuse_capture(f"make room for {slot_bytes} bytes in {self.channel!r}")
        torch.cuda.synchronize()
        dist.barrier(self._group)
        if self._captured:
            self._of_graphs.append((self._slab, self._slab_handle))
            self._captured = False
        self._slab, self._slab_handle = self._symmetric(self._slots * slot_bytes)

    def _symmetric(self, size_bytes: int) -> tuple[Tensor, Any]:
        """Zeros that all ranks of the group can write to, and the handle to all ranks' parts."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        memory = symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=self._device).zero_()
        handle = symmetric_memory.rendezvous(memory, self._group.group_name)
        # `empty` also writes zeros and does not wait for them, while a rank that was offered a slot
        # before it had memory writes to it at once.
        torch.cuda.synchronize()
        dist.barrier(self._group)
        return memory, handle

    def _write(self, stream: torch.cuda.Stream, rank: int, word: int, value: int) -> None:
        """Sets a flag of a rank once the stream has come here."""
        from cuda.bindings import driver

        address = self._flag_addresses[rank] + 4 * word
        _check_driver(driver.cuStreamWriteValue32(stream.cuda_stream, address, value, 0))

    def _await(self, stream: torch.cuda.Stream, word: int) -> None:
        """Holds the stream until a flag of ours is 1."""
        from cuda.bindings import driver

        address = self._flag_addresses[self.rank] + 4 * word
        equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        _check_driver(driver.cuStreamWaitValue32(stream.cuda_stream, address, 1, int(equal)))


def push(copies: torch.cuda.Stream, tensor: Tensor, target: Tensor) -> None:
    """Copies a tensor to a contiguous one of its shape and dtype, by a copy engine, on the stream
    `copies`. A change of the current stream would keep the host longer.

    Raises: RuntimeError if the driver refuses.
    """
    from cuda.bindings import driver

    if tensor.is_contiguous():
        if size := tensor.numel() * tensor.element_size():
            places = target.data_ptr(), tensor.data_ptr()
            _check_driver(driver.cuMemcpyAsync(*places, size, copies.cuda_stream))
        return
    pieces = _pieces(tensor)
    if pieces is None or pieces[2] * tensor.element_size() > _MAX_PITCH:
        for part, place in zip(tensor, target, strict=True):
            push(copies, part, place)
        return
    # torch would do it by a kernel.
    count, elements, distance = pieces
    width = elements * tensor.element_size()
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    copy.srcDevice, copy.srcPitch = tensor.data_ptr(), distance * tensor.element_size()
    copy.dstDevice, copy.dstPitch = target.data_ptr(), width
    copy.WidthInBytes, copy.Height = width, count
    _check_driver(driver.cuMemcpy2DAsync(copy, copies.cuda_stream))


def _pieces(x: Tensor) -> tuple[int, int, int] | None:
    """A tensor as contiguous pieces at equal distances: their number, their length in elements, and
    the distance of their starts. None: the tensor has another form.
    """
    count, elements, distance = 1, 1, 0
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if count == 1 and stride == elements:
            elements *= size
        elif size > 1 and count == 1:
            count, distance = size, stride
        elif size > 1 and stride == count * distance:
            count *= size
        elif size > 1:
            return None
    return count, elements, distance


def _capture_of(stream: torch.cuda.Stream) -> int:
    """The id of the capture that a stream is in; 0: of none."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    from cuda.bindings import driver

    error, _, capture, *_ = driver.cuStreamGetCaptureInfo(stream.cuda_stream)
    _check_driver((error,))
    return int(capture)


def _refuse_capture(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ContextParallelError(
            f"transport peer cannot {what} while a CUDA graph is captured: make the same call "
            "once before"
        )


def _bytes_of_shape(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where aligned pieces of those sizes begin; the last entry is the total."""
    aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    return [0, *accumulate(aligned)]


def _check_driver(result: tuple[Any, ...]) -> None:
    """Raises: RuntimeError if a driver call failed."""
    if int(result[0]):
        raise RuntimeError(f"CUDA driver call failed: {result[0]}")
