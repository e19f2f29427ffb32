"""A model of GPUs that carries out what the peer transport asks CUDA for, in random order.

The model knows streams, events, flags, copies and graphs. Each stream does what was queued on it in
order, and which stream goes on next is drawn by lot. So whatever two streams do without waiting for
each other happens in both orders. What is captured becomes nodes that depend on each other, and a
replay carries them out in any order that the dependencies allow: not only in that of the streams
that they were captured from. Where all nodes go through one queue of the hardware, a node that
waits holds up those behind it, also those that it does not depend on.
"""

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.comm import Room
from megatron_cp_plugin.core.communication import peer
from megatron_cp_plugin.core.communication.peer import PeerCommunicator

# "streams": each has a queue of its own in the hardware, and each branch of a graph. "graph": all
# branches of a graph share one. "gpu": everything on a GPU shares one, as it was submitted.
Hardware = Literal["streams", "graph", "gpu"]


@dataclass(frozen=True)
class Piece:
    """Work that is done at once, when it may begin."""

    may: Callable[[], bool]
    do: Callable[[], object]


class Stream:
    """Work in order, or, while it is captured, the nodes that the next one depends on."""

    gpus: "Gpus"

    def __init__(self, priority: int = 0) -> None:
        self.graph: Graph | None = None
        self.tail: frozenset[int] = frozenset()
        shared = self.gpus.hardware == "gpu"
        self.queue: deque[Piece | Replay] = self.gpus.shared if shared else deque()
        if not any(self.queue is other for other in self.gpus.queues):
            self.gpus.queues.append(self.queue)

    @property
    def cuda_stream(self) -> "Stream":
        return self

    def add(self, may: Callable[[], bool], do: Callable[[], object]) -> None:
        if self.graph is None:
            self.queue.append(Piece(may, do))
        else:
            self.tail = frozenset([self.graph.add(Piece(may, do), self.tail)])

    def do(self, work: Callable[[], object]) -> None:
        self.add(lambda: True, work)

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: "Event") -> None:
        if event.graph is None:
            assert self.graph is None, "a captured stream waits for work outside of the capture"
            self.add(event.reached, lambda: None)
            return
        assert self.graph in (None, event.graph), "streams of two captures wait for each other"
        assert not event.graph.nodes or not event.graph.done, "an event of an ended capture"
        self.graph, self.tail = event.graph, self.tail | event.nodes
        self.graph.streams.append(self)


class Event:
    def __init__(self) -> None:
        self.reached: Callable[[], bool] = lambda: True
        self.graph: Graph | None = None
        self.nodes: frozenset[int] = frozenset()

    def record(self, stream: Stream) -> None:
        self.graph, self.nodes = stream.graph, stream.tail
        if stream.graph is None:
            come: list[bool] = []
            stream.do(lambda: come.append(True))
            self.reached = lambda: bool(come)


@dataclass
class Graph:
    """What was captured: pieces of work, and for each those that it depends on."""

    number: int
    nodes: list[tuple[Piece, frozenset[int]]] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    done: bool = False

    def add(self, piece: Piece, after: frozenset[int]) -> int:
        self.nodes.append((piece, after))
        return len(self.nodes) - 1

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[None]:
        assert not self.done
        stream.graph, stream.tail = self, frozenset()
        yield
        before, left = set(stream.tail), list(stream.tail)
        while left:
            more = self.nodes[left.pop()][1] - before
            before |= more
            left += more
        assert len(before) == len(self.nodes), "a stream did not come back before capture ended"
        for each in (stream, *self.streams):
            each.graph, each.tail = None, frozenset()
        self.done = True


class Replay:
    """One replay of a graph, on its way."""

    def __init__(self, graph: Graph, random: Random, one_queue: bool) -> None:
        self.random = random
        self.nodes = graph.nodes
        self.left = set(range(len(graph.nodes)))
        self.queue: deque[int] | None = None
        if one_queue:
            self.queue = deque()
            while len(self.queue) < len(self.nodes):
                self.queue.append(random.choice(self.ready(self.left - {*self.queue})))

    def ready(self, left: set[int]) -> list[int]:
        return [node for node in left if not self.nodes[node][1] & left]

    def step(self) -> bool:
        """One node; False if none can go on."""
        ready = self.ready(self.left) if self.queue is None else [self.queue[0]]
        self.random.shuffle(ready)
        for node in ready:
            piece = self.nodes[node][0]
            if piece.may():
                piece.do()
                self.left.remove(node)
                if self.queue is not None:
                    self.queue.popleft()
                return True
        return False


class Gpus:
    """All streams of all ranks, and the memory that ranks write in each other's."""

    def __init__(self, random: Random, hardware: Hardware = "streams") -> None:
        self.random = random
        self.hardware = hardware
        self.queues: list[deque[Piece | Replay]] = []
        self.shared: deque[Piece | Replay] = deque()
        self.current: Stream | None = None
        self.flags: dict[int, int] = {}  # by address
        self.memory: dict[tuple[str, int, int], Tensor] = {}  # by channel, count and rank
        self.parts: dict[tuple[str, int, int], int] = {}  # upper bits of addresses in a part
        self.graphs = 0
        self.copied: list[int] = []  # bytes of whole copies

    def next_gpu(self) -> None:
        """Streams that are made from now on are another GPU's."""
        self.shared = deque()

    def step(self) -> bool:
        """One piece of work of some stream; False if none can go on."""
        waiting = [queue for queue in self.queues if queue]
        self.random.shuffle(waiting)
        for queue in waiting:
            head = queue[0]
            if isinstance(head, Replay):
                if head.step():
                    if not head.left:
                        queue.popleft()
                    return True
            elif head.may():
                queue.popleft()
                head.do()
                return True
        return False

    def finish(self) -> None:
        while self.step():
            pass
        assert not any(self.queues), "streams wait for each other"

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def memory_at(self, address: int) -> int:
        """The address in this process of one in a rank's part of symmetric memory."""
        found = {number: part for part, number in self.parts.items()}.get(address >> 32)
        if found is None:  # of this rank alone
            return address
        return self.memory[found].data_ptr() + address % (1 << 32)

    def kernel(self, work: Callable[[], object]) -> None:
        assert self.current is not None
        self.current.do(work)

    def captures(self) -> bool:
        return self.current is not None and self.current.graph is not None

    def new_graph(self) -> Graph:
        self.graphs += 1
        return Graph(self.graphs)

    def replay(self, graph: Graph, stream: Stream) -> None:
        assert graph.done
        if graph.nodes:
            stream.queue.append(Replay(graph, self.random, self.hardware != "streams"))

    @property
    def driver(self) -> SimpleNamespace:
        """What the transport calls of CUDA's driver."""

        def write(stream: Stream, address: int, value: int) -> None:
            stream.do(lambda: self.flags.__setitem__(address, value))

        def wait(stream: Stream, address: int, value: int) -> None:
            stream.add(lambda: self.flags.get(address, 0) == value, lambda: None)

        def parameters() -> SimpleNamespace:
            return SimpleNamespace(waitValue=SimpleNamespace(), writeValue=SimpleNamespace())

        def operate(stream: Stream, count: int, each: list[SimpleNamespace], _: int) -> tuple[int]:
            assert 0 < count == len(each) < 256
            for one in each:
                waits = one.operation == "wait"
                part = one.waitValue if waits else one.writeValue
                assert (part.operation, part.flags) == (one.operation, int(waits))
                (wait if waits else write)(stream, part.address, part.value)
            return (0,)

        def info(stream: Stream) -> tuple[int, int, int]:
            return 0, int(stream.graph is not None), stream.graph.number if stream.graph else 0

        def move(there: int, here: int, size: int) -> None:
            ctypes.memmove(self.memory_at(there), here, size)

        def copy_whole(there: int, here: int, size: int, stream: Stream) -> tuple[int]:
            self.copied.append(size)
            stream.do(partial(move, there, here, size))
            return (0,)

        def copy(places: SimpleNamespace, stream: Stream) -> tuple[int]:
            assert places.srcMemoryType == places.dstMemoryType == "unified"
            assert places.WidthInBytes <= min(places.srcPitch, places.dstPitch)
            if max(places.srcPitch, places.dstPitch) >= 2**31:
                return (1,)  # CUDA_ERROR_INVALID_VALUE
            for row in range(places.Height):
                there, here = (
                    start + row * pitch
                    for start, pitch in (
                        (places.dstDevice, places.dstPitch),
                        (places.srcDevice, places.srcPitch),
                    )
                )
                stream.do(partial(move, there, here, places.WidthInBytes))
            return (0,)

        return SimpleNamespace(
            CUDA_MEMCPY2D=SimpleNamespace,
            CUmemorytype=SimpleNamespace(CU_MEMORYTYPE_UNIFIED="unified"),
            cuMemcpyAsync=copy_whole,
            cuMemcpy2DAsync=copy,
            CUstreamBatchMemOpParams=parameters,
            CUstreamBatchMemOpType=SimpleNamespace(
                CU_STREAM_MEM_OP_WAIT_VALUE_32="wait", CU_STREAM_MEM_OP_WRITE_VALUE_32="write"
            ),
            cuStreamBatchMemOp=operate,
            cuStreamGetCaptureInfo=info,
            CUstreamWaitValue_flags=SimpleNamespace(CU_STREAM_WAIT_VALUE_EQ=1),
        )


class Memory:
    """A handle to symmetric memory: the parts of all ranks, in the order of ranks."""

    def __init__(self, gpus: Gpus, channel: str, count: int, size: int) -> None:
        parts = [(channel, count, rank) for rank in range(size)]
        self.buffer_ptrs = [gpus.parts.setdefault(one, len(gpus.parts) + 1) << 32 for one in parts]


def modelled(module: ModuleType, gpus: Gpus) -> type[PeerCommunicator]:
    """The transport of a module, with the model's memory."""
    base: type[PeerCommunicator] = module.PeerCommunicator

    class Modelled(base):  # type: ignore[valid-type, misc]
        count = 0

        def buffers(self, room: Room, device: torch.device) -> tuple[Tensor, ...]:
            return super().buffers(room, self._device if device.type == "cpu" else device)

        def _symmetric(self, size_bytes: int) -> tuple[Tensor, Any]:
            self.count += 1  # all ranks make theirs in one order
            memory = torch.full((size_bytes,), 255, dtype=torch.uint8)
            gpus.memory[self.channel, self.count, self.rank] = memory
            return memory, Memory(gpus, self.channel, self.count, self.size)

    return Modelled


@contextmanager
def cuda(gpus: Gpus) -> Iterator[None]:
    """The model in the place of CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        Stream.gpus = gpus
        patch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=gpus.driver))
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda _: gpus.current)
        number = "_cuda_getCurrentStream"
        patch.setattr(torch._C, number, lambda _: id(gpus.current), raising=False)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", gpus.captures)
        patch.setattr(dist, "barrier", lambda group, device_ids: None)
        patch.setattr(dist, "get_rank", lambda group=(0, 0): group[0])
        patch.setattr(dist, "get_world_size", lambda group: group[1])
        patch.setattr(Tensor, "record_stream", lambda self, stream: None)
        patch.setattr(peer, "copy_into", lambda to, x: gpus.kernel(partial(to.copy_, x)))
        yield
