"""Exchanges blocks between GPUs of one node with copy engines, over peer memory.

NCCL moves data with kernels that take multiprocessors away from attention; copy engines take none.
Each rank writes straight into its peer's receive buffer and then a flag beside it; streams, not
kernels and not the host, wait for flags.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.comm import (
    Beside,
    Communicator,
    Pending,
    Pieces,
    Receive,
    Room,
    Sent,
)
from megatron_cp_plugin.core.communication.devices import contiguous_copy, copy_into
from megatron_cp_plugin.errors import ContextParallelError

# By destination, tensors and where each begins in the destination's slot, in bytes.
Writes = Mapping[int, Sequence[tuple[Tensor, int]]]
# A rank, the number of one of its flags, and the value to be set; None: to be waited for.
_FlagStep = tuple[int, int, int | None]

_KEPT = 64  # views of slots
_MAX_PITCH = 2**31 - 1  # bytes, of a two-dimensional copy: CU_DEVICE_ATTRIBUTE_MAX_PITCH
_AFTER_AN_ERROR = (
    "did a call before it end in an error? Start again, or call megatron_cp_plugin.release() on "
    "all ranks"
)


class SlottedCommunicator(Communicator):
    """Exchanges that are received in a few slots.

    All ranks post the same number of exchanges; tensors sent have the shapes that the receiver
    expects, and a slot has all tensors of an exchange. Exchanges, also those that receive nothing,
    take `rotation` slots in turn. A received block may be read, on the stream that waited for it,
    until the next receiving exchange of the same slot is posted or expected. Of the collective
    operations only all-to-alls are offered.
    """

    direct = True
    _slab: Tensor

    def __init__(self, channel: str, rank: int, size: int, global_rank: int, slots: int) -> None:
        super().__init__(channel, rank, size, global_rank)
        self._slots = self.rotation = slots
        self._held_slots = self._slot_bytes = 0
        self._views: dict[tuple[int, Room], tuple[Tensor, ...]] = {}
        self._turn = 0
        self._awaited: set[int] = set()  # slots
        self._expected: frozenset[int] = frozenset()  # ranks that may write to this turn's slot
        self._told = False  # they know it

    def buffers(self, room: Room, device: torch.device) -> tuple[Tensor, ...]:
        """See Communicator.buffers; views of this turn's slot, which all layers share."""
        if not room.like:
            return ()
        slot = self._turn % self.rotation
        if (slot, room) not in self._views:
            self.reserve(room)
            if len(self._views) == _KEPT:
                self._views.clear()
            with torch.inference_mode(False):  # see Topology.peer_channel
                self._views[slot, room] = room.views(self._slab, slot * self._slot_bytes)
        return self._views[slot, room]

    def reserve(self, room: Room) -> None:
        if room.bytes > self._slot_bytes or self.rotation > self._held_slots:
            slot_bytes = max(room.bytes, self._slot_bytes)
            self._held_slots = max(self.rotation, self._held_slots)
            with torch.inference_mode(False):
                self._grow(slot_bytes)
            self._slot_bytes = slot_bytes
            self._views.clear()

    def expect(self, sources: Collection[int]) -> None:
        """See Communicator.expect; if the slot is not free yet, the exchange offers it."""
        slot = self._turn % self.rotation
        if slot not in self._awaited and not self._expected:
            self._free(slot)
            self._expected = frozenset(sources)

    def offer(self) -> None:
        """See Communicator.offer."""
        if self._expected and not self._told:
            self._offer(self._turn % self.rotation, self._expected)
            self._told = True

    @property
    def held_bytes(self) -> int:
        return self._held_slots * self._slot_bytes

    def _exchange_direct(
        self, sends: Sequence[Sent], receives: Sequence[Receive], beside: Beside, *, early: bool
    ) -> Pending[None]:
        return self._begin(self._writes(sends, beside), receives, early=early)

    def _all_to_all(self, tensors: Sequence[Tensor]) -> Pending[Sequence[Tensor]]:
        room = Room.of([(tuple(x.shape), x.dtype) for x in tensors])
        came = self.buffers(room, tensors[0].device)
        given = [x if x.stride(-1) == 1 else contiguous_copy(x) for x in tensors]
        each, coming = [x.unbind() for x in given], [x.unbind() for x in came]
        mine = zip(room.starts, each, strict=True)
        placed = [(x, start + self.rank * x[0].nbytes) for start, x in mine]
        # Each rank begins with another one.
        others = [(self.rank + n) % self.size for n in range(1, self.size)]
        writes = {to: [(x[to], place) for x, place in placed] for to in others}
        receives = [(x[source], source) for x in coming for source in others]
        slot = self._turn % self.rotation
        pending = self._begin(writes, receives, early=False)
        both = zip(coming, each, strict=True)
        await_copies = self._copy_own(slot, [(to[self.rank], x[self.rank]) for to, x in both])

        def finish(_: None) -> Sequence[Tensor]:
            await_copies()
            return came

        return pending.then(finish)

    def _begin(self, writes: Writes, receives: Sequence[Receive], *, early: bool) -> Pending[None]:
        sources = {source for _, source in receives}
        slot = self._turn % self.rotation
        if receives and slot in self._awaited:
            raise RuntimeError(
                f"a block on {self.channel!r} was not waited for before the next: {_AFTER_AN_ERROR}"
            )
        if self._expected and self._expected != sources:
            raise RuntimeError(
                f"ranks {sorted(self._expected)} were expected to send on {self.channel!r}, got an "
                f"exchange with ranks {sorted(sources)}: {_AFTER_AN_ERROR}"
            )
        if sources:
            self.expect(sources)
            self.offer()
        pending = self._post(slot, writes, receives, early=early)
        self._turn, self._expected, self._told = self._turn + 1, frozenset(), False
        if not receives:
            return pending
        self._awaited.add(slot)
        return pending.then(lambda _: self._awaited.discard(slot))

    def _writes(self, sends: Sequence[Sent], beside: Beside) -> Writes:
        """Places of what is sent, by destination in the order in which they are listed."""
        found, by_target = dict[int, list[tuple[Tensor, int]]](), dict[int, list[Tensor | Pieces]]()
        for x, to in sends:
            by_target.setdefault(to, []).append(x)
        for to, tensors in by_target.items():
            like = [(x.shape, x.dtype) for x in tensors]
            room, sources = beside.get(to) or (Room.of(like), [self.rank] * len(like))
            mine = [n for n, source in enumerate(sources) if source == self.rank]
            if like != [room.like[n] for n in mine]:
                raise RuntimeError(f"rank {to} expects other tensors on {self.channel!r}")
            found[to] = places = []
            for x, n in zip(tensors, mine, strict=True):
                place = room.starts[n]
                for part in x.parts if isinstance(x, Pieces) else (x,):
                    places.append((part, place))
                    place += part.nbytes
        return found

    @abstractmethod
    def _grow(self, slot_bytes: int) -> None:
        """Replaces the slab by one with larger slots; all ranks come here in the same turn."""

    def _free(self, slot: int) -> None:
        """Notes that work which is queued from now on reads nothing in a slot."""

    def _offer(self, slot: int, sources: Collection[int]) -> None:
        """Lets ranks write to a slot once all work that was queued before `_free` is done."""

    def _copy_own(self, slot: int, blocks: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], object]:
        """Copies (there, here) to a slot that was offered, on the current stream.

        Returns: lets the stream that is then current wait for it.
        """
        for there, here in blocks:
            copy_into(there, here)
        return lambda: None

    @abstractmethod
    def _post(
        self, slot: int, writes: Writes, receives: Sequence[Receive], *, early: bool
    ) -> Pending[None]:
        """Posts an exchange, whose slot is offered. Args: early: as of `exchange`."""

    def _no_collective(self, x: Tensor) -> Pending[Tensor]:
        raise NotImplementedError("peer transport exchanges only")

    _all_gather = _reduce_scatter = _no_collective


class Shown(dist.distributed_c10d.Store):
    """What torch's symmetric memory exchanges, by rank, whatever its keys are.

    Below 2.15 torch numbers the keys by the exchanges of a process: ranks of which some have shared
    memory with others before would wait for each other for ever (pytorch/pytorch#196082).
    """

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        """Args: gather: gives every rank's value; a collective operation."""
        super().__init__()
        self._gather = gather
        self._of_ranks: list[bytes] = []

    def set(self, key: str, value: Any) -> None:
        """Every exchange begins with it on all ranks."""
        self._of_ranks = self._gather(value)

    def get(self, key: str) -> bytes:
        """Args: key: ends with the rank's number."""
        return self._of_ranks[int(key.rpartition("/")[2])]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """They have come."""

    def add(self, key: str, amount: int) -> int:
        """What the barrier of a store begins with. Returns: 0: this rank has nothing to set."""
        self._gather(amount)
        return 0


class PeerCommunicator(SlottedCommunicator):
    """Over CUDA peer memory.

    Exchanges may be posted, and waited for, on any stream: a slot is offered again only after the
    stream that read it last has reached this point. They may be captured in CUDA graphs, after the
    same exchanges were made outside a graph; all ranks capture and replay the same exchanges, in
    one order with all others of this channel. If a graph is replayed on another stream than the
    exchanges before and after it, the streams must wait for each other. All ranks post exchanges in
    one order over all channels: branches of a graph may share a queue of the hardware, where waits
    hold each other up.

    A flag is 0 or 1, so that a replay repeats the first run. Each rank has two flags for every
    other rank and slot: "you may write to this slot of mine", and, of its own slots, "has come".
    The rank that waits for the former resets it; the rank that offers a slot resets the latter. A
    stream of copies and one of offers do all of this but the last wait, because each operation on a
    flag holds its stream up for some microseconds. Offers wait for this rank's work alone, never
    for a copy: so no rank waits for itself by way of others.
    """

    def __init__(
        self,
        channel: str,
        group: dist.ProcessGroup,
        sharing: str,
        slots: int,
        copies: torch.cuda.Stream,
        offers: torch.cuda.Stream,
    ) -> None:
        """Args:
        sharing: name of the group over which torch shows the ranks each other's memory.
        copies, offers: streams that all channels of this GPU share, so that all their copies,
            and all their offers, have one order.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        super().__init__(channel, rank, size, dist.get_rank(), slots)
        _refuse_capture(f"make the receive buffers of {channel!r}")
        self._group, self._sharing = group, sharing
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._copies, self._offers = copies, offers
        self._mark, self._freed = torch.cuda.Event(), torch.cuda.Event()
        # By slot: the flags of what has come have been set back.
        self._reset = [torch.cuda.Event() for _ in range(slots)]
        self._readers: list[tuple[torch.cuda.Stream, int] | None] = [None] * slots
        self._operations: dict[_FlagStep, object] = {}
        self._streams: dict[object, torch.cuda.Stream] = {}
        self._flags, self._flags_handle = self._symmetric(2 * size * slots * 4)
        self._flag_addresses = list(self._flags_handle.buffer_ptrs)
        self._slab, self._addresses = self._flags, list[int]()
        self._slab_handle: Any = None
        self._captured = False
        self._of_graphs: list[tuple[Tensor, Any]] = []  # former slabs, which replays write to

    @property
    def _current(self) -> torch.cuda.Stream:
        """The current stream: one object for each, because torch takes several us to make one."""
        key = torch._C._cuda_getCurrentStream(self._device.index)
        if key not in self._streams:
            self._streams[key] = torch.cuda.current_stream(self._device)
        return self._streams[key]

    def buffers(self, room: Room, device: torch.device) -> tuple[Tensor, ...]:
        """See Communicator.buffers. Raises: ContextParallelError for tensors on another device."""
        if device != self._device:
            raise ContextParallelError(
                f"peer transport needs tensors on {self._device}, got {device}: use transport group"
            )
        return super().buffers(room, device)

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + sum(slab.numel() for slab, _ in self._of_graphs)

    def _post(
        self, slot: int, writes: Writes, receives: Sequence[Receive], *, early: bool
    ) -> Pending[None]:
        if not writes and not receives:
            return Pending(lambda: None)
        current, copies = self._current, self._copies
        capture = _capture_of(current)
        self._captured |= capture != 0
        sources = dict.fromkeys(source for _, source in receives)
        if writes and early:
            copies.wait_event(self._mark)
        elif writes:
            copies.wait_stream(current)
        first = slot * self._slot_bytes
        done = torch.cuda.Event() if writes else None

        def send() -> None:
            for to, each in writes.items():
                offered = to * self._slots + slot
                self._operate(copies, (self.rank, offered, None), (self.rank, offered, 0))
                for tensor, place in each:
                    push(copies, tensor, self._addresses[to] + first + place)
                self._operate(copies, (to, self._arrival(self.rank, slot), 1))
            if done is not None:
                done.record(copies)

        if not capture:
            send()

        def finish() -> None:
            nonlocal done
            if capture:
                # Where all branches of a graph have one queue (CUDA_DEVICE_MAX_CONNECTIONS=1), a
                # rank must have made its offers before it waits for those of others, and kernels
                # that were captured meanwhile would wait behind that.
                if _capture_of(self._offers) == capture:
                    copies.wait_stream(self._offers)
                    done = done or torch.cuda.Event()
                send()
            now = self._current
            # What leaves before what comes: so there is no order of a graph's branches in which
            # ranks wait for each other's messages before they have sent their own.
            if done is not None:
                now.wait_event(done)
            if now != current:
                # Their memory returns to its allocator, which does not wait.
                # This closure keeps them alive until they are copied.
                for tensor, _ in chain.from_iterable(writes.values()):
                    tensor.record_stream(copies)
            if sources:
                now.wait_event(self._reset[slot])
                each = [(self.rank, self._arrival(source, slot), None) for source in sources]
                self._operate(now, *each)
                self._readers[slot] = now, _capture_of(now)

        return Pending(finish)

    def _arrival(self, source: int, slot: int) -> int:
        """Number of the flag "has come" of a rank's messages in a slot."""
        return (self.size + source) * self._slots + slot

    def mark(self) -> None:
        self._mark.record(self._current)

    def _free(self, slot: int) -> None:
        current, reader = self._current, self._readers[slot]
        # Before a capture, and before a replay, everything is in order on one stream.
        if reader is not None and reader[0] != current and reader[1] == _capture_of(current):
            self._offers.wait_stream(reader[0])
        self._freed.record(current)

    def _offer(self, slot: int, sources: Collection[int]) -> None:
        offers = self._offers
        offers.wait_event(self._freed)
        resets = [(self.rank, self._arrival(source, slot), 0) for source in sources]
        each = [(source, self.rank * self._slots + slot, 1) for source in sources]
        self._operate(offers, *resets, *each)
        self._reset[slot].record(offers)

    def _copy_own(self, slot: int, blocks: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], object]:
        current, copied = self._current, torch.cuda.Event()
        current.wait_event(self._reset[slot])
        super()._copy_own(slot, blocks)
        copied.record(current)
        return lambda: self._current.wait_event(copied)

    def _grow(self, slot_bytes: int) -> None:
        _refuse_capture(f"make room for {slot_bytes} bytes in {self.channel!r}")
        torch.cuda.synchronize()
        dist.barrier(self._group, device_ids=[self._device.index])
        if self._captured:
            self._of_graphs.append((self._slab, self._slab_handle))
            self._captured = False
        self._slab, self._slab_handle = self._symmetric(self._held_slots * slot_bytes)
        self._addresses = list(self._slab_handle.buffer_ptrs)

    def _symmetric(self, size_bytes: int) -> tuple[Tensor, Any]:
        """Zeros that all ranks of the group can write to, and the handle to all ranks' parts."""
        from torch.distributed import _symmetric_memory

        symmetric_memory: Any = _symmetric_memory  # whose names of groups have a type of their own
        memory = symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=self._device).zero_()
        handle = symmetric_memory.rendezvous(memory, self._sharing)
        # `empty` also writes zeros and does not wait for them, while a rank that was offered a slot
        # before it had memory writes to it at once.
        torch.cuda.synchronize()
        dist.barrier(self._group, device_ids=[self._device.index])
        return memory, handle

    def _operate(self, stream: torch.cuda.Stream, *steps: _FlagStep) -> None:
        """Sets flags, or waits for them, in one call of the driver: each takes several us."""
        from cuda.bindings import driver

        for step in steps:
            if step not in self._operations:
                self._operations[step] = self._operation(*step)
        operations = [self._operations[step] for step in steps]
        _check_driver(driver.cuStreamBatchMemOp(stream.cuda_stream, len(operations), operations, 0))

    def _operation(self, rank: int, word: int, value: int | None) -> object:
        """What sets a flag of a rank once a stream comes to it, or (None) waits until it is 1."""
        from cuda.bindings import driver

        made, kinds = driver.CUstreamBatchMemOpParams(), driver.CUstreamBatchMemOpType
        made.operation = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
        part, flags = made.writeValue, 0
        if value is None:
            made.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
            part, flags = made.waitValue, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        part.operation, part.address = made.operation, self._flag_addresses[rank] + 4 * word
        part.value, part.flags = 1 if value is None else value, int(flags)
        return made


def push(copies: torch.cuda.Stream, tensor: Tensor, address: int) -> None:
    """Copies a tensor to contiguous memory, by a copy engine, on the stream `copies`. A change of
    the current stream would keep the host longer.

    Raises: RuntimeError if the driver refuses.
    """
    from cuda.bindings import driver

    if tensor.is_contiguous():
        if size := tensor.numel() * tensor.element_size():
            places = address, tensor.data_ptr()
            _check_driver(driver.cuMemcpyAsync(*places, size, copies.cuda_stream))
        return
    pieces = _pieces(tensor)
    if pieces is None or pieces[2] * tensor.element_size() > _MAX_PITCH:
        size = tensor[0].numel() * tensor.element_size()
        for number, part in enumerate(tensor):
            push(copies, part, address + number * size)
        return
    # torch would do it by a kernel.
    count, elements, distance = pieces
    width = elements * tensor.element_size()
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    copy.srcDevice, copy.srcPitch = tensor.data_ptr(), distance * tensor.element_size()
    copy.dstDevice, copy.dstPitch = address, width
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


def _check_driver(result: tuple[Any, ...]) -> None:
    """Raises: RuntimeError if a driver call failed."""
    if int(result[0]):
        raise RuntimeError(f"CUDA driver call failed: {result[0]}")
