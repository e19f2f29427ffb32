"""The peer transport's orders to CUDA streams, carried out by a model of GPUs in random order.

The model knows streams, events, flags and copies; each stream does what was queued on it in order,
and which stream goes on next is drawn by lot. So whatever two streams do without waiting for each
other happens in both orders.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.peer import PeerCommunicator

TURNS = 9
FLOAT = ((4,), torch.float32)


class Stream:
    """Work in order; a piece of work says whether it is done, or waits."""

    gpus: "Gpus"

    def __init__(self, priority: int = 0) -> None:
        self.queue: deque[Callable[[], bool]] = deque()
        self.gpus.streams.append(self)

    def do(self, work: Callable[[], object]) -> None:
        def done() -> bool:
            work()
            return True

        self.queue.append(done)

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: "Event") -> None:
        self.queue.append(event.reached)


class Event:
    def __init__(self) -> None:
        self.reached: Callable[[], bool] = lambda: True

    def record(self, stream: Stream) -> None:
        come: list[bool] = []
        stream.do(lambda: come.append(True))
        self.reached = lambda: bool(come)


class Gpus:
    """All streams of all ranks, and the memory that ranks write in each other's."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.streams: list[Stream] = []
        self.current: Stream | None = None
        self.flags: dict[tuple[int, int], int] = {}  # by (rank, word)
        self.slabs: dict[int, Tensor] = {}

    def step(self) -> bool:
        """One piece of work of some stream; False if none can go on."""
        waiting = [stream for stream in self.streams if stream.queue]
        self.random.shuffle(waiting)
        for stream in waiting:
            if stream.queue[0]():
                stream.queue.popleft()
                return True
        return False

    def finish(self) -> None:
        while self.step():
            pass
        assert not any(stream.queue for stream in self.streams), "streams wait for each other"

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Modelled(PeerCommunicator):
    """With the model in the place of the driver's calls and of symmetric memory."""

    gpus: Gpus

    def _symmetric(self, size_bytes):
        memory = torch.full((size_bytes,), 255, dtype=torch.uint8)
        self.gpus.slabs[self.rank] = memory
        return memory, None

    def _write(self, stream, rank, word, value):
        stream.do(lambda: self.gpus.flags.__setitem__((rank, word), value))

    def _await(self, stream, word):
        stream.queue.append(lambda: self.gpus.flags.get((self.rank, word), 0) == 1)

    def _remote(self, rank, offset, like):
        gpus = self.gpus

        class Remote:
            def copy_(self, tensor):
                size = tensor.numel() * tensor.element_size()
                target = gpus.slabs[rank][offset : offset + size].view(tensor.dtype)
                gpus.current.do(lambda: target.copy_(tensor))

        return Remote()


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    model = Gpus(Random(request.node.name))
    Stream.gpus = Modelled.gpus = model
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", model.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: model.current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    monkeypatch.setattr(dist, "get_rank", lambda group=(0, 0): group[0])
    monkeypatch.setattr(dist, "get_world_size", lambda group: group[1])
    return model


def flow_of(rank: int, size: int, slots: int) -> PeerCommunicator:
    flow = Modelled("blocks", (rank, size), slots)
    flow.reserve([FLOAT])
    return flow


def exchanging(
    gpus: Gpus, flow: PeerCommunicator, streams: int, kept: list[Tensor]
) -> Iterator[None]:
    """One rank's program: around a ring, each time on streams drawn by lot."""
    rank, size = flow.rank, flow.size
    own = [Stream() for _ in range(streams)]
    source, target = (rank - 1) % size, (rank + 1) % size
    for turn in range(TURNS):
        posting, reading = gpus.random.choice(own), gpus.random.choice(own)
        sent = torch.full(*FLOAT[:1], float("nan"))
        with gpus.on(posting):
            (buffer,) = flow.buffers([FLOAT], torch.device("cpu"))
            posting.do(lambda sent=sent, turn=turn: sent.fill_(10 * turn + rank))
            pending = flow.exchange([(sent, target)], [(buffer, source)])
        yield
        with gpus.on(reading):
            pending.wait()
            for _ in range(gpus.random.randrange(6)):
                reading.do(lambda: None)
            expected = torch.full((4,), float(10 * turn + source))
            reading.do(lambda b=buffer, e=expected: kept.append(torch.stack((b, e))))
            # Free to be changed from here on.
            reading.do(lambda sent=sent: sent.fill_(float("nan")))
        yield


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_blocks_are_whole_on_any_stream(
    size: int, slots: int, streams: int, seed: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever streams exchanges are posted on and waited for, also if one of them is late."""
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    kept: list[Tensor] = []
    flows = [flow_of(rank, size, slots) for rank in range(size)]
    programs = [exchanging(gpus, flow, streams, kept) for flow in flows]
    while programs:
        program = gpus.random.choice(programs)
        if next(program, True):
            programs.remove(program)
        for _ in range(gpus.random.randrange(12)):
            gpus.step()
    gpus.finish()
    assert len(kept) == size * TURNS
    for got, expected in kept:
        assert got.tolist() == expected.tolist()


def test_memory_that_another_stream_gets_back_waits_for_the_copy(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's allocator gives it to the stream that it came from."""
    noted: list[tuple[int, object]] = []
    monkeypatch.setattr(
        Tensor, "record_stream", lambda self, stream: noted.append((id(self), stream))
    )
    posting, reading = Stream(), Stream()
    with gpus.on(posting):
        flow, _ = flow_of(0, 2, 1), flow_of(1, 2, 1)
        tensors = [torch.zeros(4), torch.ones(4)]
        pending = [flow.exchange([(x, 1)], []) for x in tensors]
        pending[0].wait()
    assert not noted
    with gpus.on(reading):
        pending[1].wait()
    assert noted == [(id(tensors[1]), flow._stream)]
