"""The peer transport on a model of GPUs, which carries out its orders in random order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.comm import Room, Topology
from megatron_cp_plugin.core.communication import peer
from megatron_cp_plugin.core.communication.peer import PeerCommunicator, Shown
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.errors import ContextParallelError
from tests.gpu_model import Gpus, Graph, Hardware, Stream, cuda, modelled
from tests.pairwise import pairwise

ROUNDS = 12
SHAPE = (2, 2, 2)
FLOAT = (SHAPE, torch.float32)


class Group(tuple[int, int]):
    """A rank, and the number of ranks."""

    group_name = "group"


def test_no_rank_writes_to_memory_that_is_still_being_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that were offered a slot write to it as soon as it has memory."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    events: list[str] = []
    cleared: list[Tensor] = []

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        events.append("memory")
        cleared.append(torch.full((size,), 255, dtype=dtype))
        return cleared[-1]

    def synchronize() -> None:
        assert not cleared or not cleared[-1].any()
        events.append("wait for the GPU")

    with cuda(Gpus(Random(0), "streams")):
        monkeypatch.setattr(symmetric_memory, "empty", empty)
        handle = SimpleNamespace(buffer_ptrs=[0, 4096])
        monkeypatch.setattr(symmetric_memory, "rendezvous", lambda memory, name: handle)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(dist, "barrier", lambda *_, **__: events.append("wait for ranks"))
        channel = PeerCommunicator("test", Group((0, 2)), "sharing", 2, Stream(), Stream())  # type: ignore[arg-type]
        made = ["memory", "wait for the GPU", "wait for ranks"]
        assert events == made
        channel.reserve(Room.of([FLOAT]))
        assert events == [*made, *made[1:], *made]


def test_ranks_that_have_shared_memory_unequally_often_exchange() -> None:
    """Torch numbers keys by the exchanges of a process."""

    def body(topology: Topology) -> list[list[bytes]]:
        shown, found = Shown(topology.gather), list[list[bytes]]()
        store = dist.PrefixStore("group", shown)
        for number in range(3 * topology.rank, 3 * topology.rank + 2):
            keys = [f"CUDASymmetricMemory/{number}/{rank}" for rank in range(3)]
            store.set(keys[topology.rank], str(topology.rank))
            store.wait(keys)
            found += [[store.get(key) for key in keys], store.multi_get(keys)]
            store.barrier(f"CUDASymmetricMemory/{number}", 3)
        return found

    assert VirtualWorld(3).run(body) == [[[b"0", b"1", b"2"]] * 4] * 3


What = Literal["expect", "offer", "post", "wait"]


@dataclass(frozen=True)
class Exchange:
    """Each of the receivers gets a block from every rank that is one of the `shifts` before it.

    Attributes:
        early: blocks are made before other work is queued, for which they do not wait.
        whole: an all-to-all.
    """

    channel: int
    shifts: tuple[int, ...]
    receivers: frozenset[int]
    early: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Program:
    """What all ranks do in one order: expect an exchange, offer memory for it, post it, or wait for
    it, by its index.
    """

    exchanges: tuple[Exchange, ...]
    events: tuple[tuple[What, int], ...]

    @staticmethod
    def draw(random: Random, case: "Case") -> "Program":
        exchanges: list[Exchange] = []
        events: list[tuple[What, int]] = []
        expected: dict[int, int] = {}  # by channel
        under_way: list[int] = []
        count = random.randrange(1, 6)
        while len(exchanges) < count or under_way or expected:
            channel = random.randrange(case.channels)
            turns = [n for n, other in enumerate(exchanges) if other.channel == channel]
            if channel in expected:
                turns.remove(expected[channel])
            # A slot is waited for before it is taken again.
            free = not any(index in under_way for index in turns[-case.slots : len(turns)][:1])
            free |= len(turns) < case.slots
            if channel in expected:
                if random.random() < 0.3:
                    events.append(("offer", expected[channel]))
                if free and random.random() < 0.6:
                    under_way.append(expected.pop(channel))
                    events.append(("post", under_way[-1]))
                    continue
            elif len(exchanges) < count and random.random() < 0.6:
                receivers = [rank for rank in range(case.size) if random.random() < 0.8]
                shifts = [n for n in range(1, case.size) if random.random() < 0.7] or [1]
                random.shuffle(shifts)
                exchange = Exchange(
                    channel, (*shifts,), frozenset(receivers), random.random() < 0.5
                )
                if random.random() < 0.3:
                    every = range(case.size)
                    exchange = Exchange(channel, (*every[1:],), frozenset(every), whole=True)
                if random.random() < 0.4:
                    expected[channel] = len(exchanges)
                    events.append(("expect", len(exchanges)))
                elif free:
                    under_way.append(len(exchanges))
                    events.append(("post", len(exchanges)))
                else:
                    continue
                exchanges.append(exchange)
                continue
            if under_way:
                index = under_way.pop(random.randrange(len(under_way)))
                events.append(("wait", index))
        return Program(tuple(exchanges), tuple(events))


@dataclass(frozen=True)
class Case:
    """Attributes: streams: of a rank, on which it posts and waits; captured: those in captures."""

    size: int = 2
    slots: int = 2
    channels: int = 1
    streams: int = 1
    captured: int = 1
    hardware: Hardware = "streams"


class Rank:
    """One rank's host: it queues, captures and replays, and checks nothing itself."""

    def __init__(self, rank: int, case: Case, gpus: Gpus) -> None:
        self.rank, self.case, self.gpus = rank, case, gpus
        gpus.next_gpu()
        self.streams = [Stream() for _ in range(case.streams)]
        kind = modelled(peer, gpus)
        names = [f"channel {number}" for number in range(case.channels)]
        with gpus.on(self.streams[0]):
            streams = Stream(), Stream()
            of_all = (rank, case.size), "sharing", case.slots, *streams
            self.channels = [kind(name, *of_all) for name in names]
            for channel in self.channels:
                channel.reserve(Room.of([FLOAT] * case.size))
        self.round = torch.zeros(1)  # in the GPU's memory
        self.graphs: list[Graph] = []
        self.kept: list[Tensor] = []

    def host(self, parts: Sequence[Callable[["Rank"], Iterator[None]]]) -> Iterator[None]:
        for part in parts:
            yield from part(self)

    def queue(self, program: Program, streams: Sequence[Stream]) -> Iterator[None]:
        """Orders a program to streams, whether or not they are captured, from the first one on."""
        case, random, pending = self.case, self.gpus.random, {}
        for stream in streams[1:]:
            stream.wait_stream(streams[0])
        for what, index in program.events:
            exchange = program.exchanges[index]
            channel, stream = self.channels[exchange.channel], random.choice(streams)
            sources = [(self.rank - shift) % case.size for shift in exchange.shifts]
            targets = [(self.rank + shift) % case.size for shift in exchange.shifts]
            targets = [target for target in targets if target in exchange.receivers]
            with self.gpus.on(stream):
                if what == "expect":
                    if self.rank in exchange.receivers:
                        channel.expect({*sources})
                elif what == "offer":
                    channel.offer()
                elif what == "post" and exchange.whole:
                    sent = torch.full((case.size, 2, 2, 3), float("nan"))[..., :2]
                    stream.do(partial(self._fill, sent, index))
                    pending[index] = channel.all_to_all(sent), sent, []
                elif what == "post":
                    sent, sends, receives = self._block(index), [], []
                    if self.rank in exchange.receivers:
                        like = [FLOAT] * len(sources)
                        buffers = channel.buffers(Room.of(like), torch.device("cuda", 0))
                        receives = [*zip(buffers, sources, strict=True)]
                    if targets:
                        sends = [(sent, target) for target in targets]
                        self._work(stream)
                        stream.do(partial(self._fill, sent, index))
                    if exchange.early:
                        channel.mark()
                        self._work(stream)
                    beside = {
                        to: (
                            Room.of([FLOAT] * len(sources)),
                            [(to - shift) % case.size for shift in exchange.shifts],
                        )
                        for to in targets
                    }
                    made = channel.exchange(sends, receives, beside, early=exchange.early)
                    pending[index] = made, sent, receives
                else:
                    under_way, sent, receives = pending[index]
                    came = under_way.wait()
                    if exchange.whole:
                        receives = [*zip(came[0], range(case.size), strict=True)]
                    self._work(stream)
                    for buffer, source in receives:
                        stream.do(partial(self._keep, buffer, source, index))
                    # Free to be changed from here on.
                    stream.do(partial(sent.fill_, float("nan")))
            yield
        for stream in streams[1:]:
            streams[0].wait_stream(stream)

    @staticmethod
    def _block(index: int) -> Tensor:
        """Contiguous, some heads of all rows, or some heads of some rows."""
        whole = SHAPE, (2, 2, 3), (2, 3, 3)
        return torch.full(whole[index % 3], float("nan"))[:, :2, :2]

    def _work(self, stream: Stream) -> None:
        for _ in range(self.gpus.random.randrange(4)):
            stream.do(lambda: None)

    def _fill(self, sent: Tensor, index: int) -> None:
        sent.fill_(100 * self.round.item() + 10 * index + self.rank)

    def _keep(self, buffer: Tensor, source: int, index: int) -> None:
        wanted = torch.full(SHAPE, 100 * self.round.item() + 10 * index + source)
        self.kept.append(torch.stack((buffer, wanted)))

    def capture(self, program: Program) -> Iterator[None]:
        graph = self.gpus.new_graph()
        with graph.capture(self.streams[0]):
            yield from self.queue(program, self.streams[: self.case.captured])
        self.graphs.append(graph)

    def eager(self, number: int, program: Program) -> Iterator[None]:
        self.streams[0].do(partial(self.round.fill_, number))
        yield from self.queue(program, self.streams)

    def replay(self, number: int, index: int) -> Iterator[None]:
        stream = self.gpus.random.choice(self.streams)
        stream.wait_stream(self.streams[0])
        stream.do(partial(self.round.fill_, number))
        self.gpus.replay(self.graphs[index], stream)
        self.streams[0].wait_stream(stream)
        yield


def run(case: Case, seed: int) -> int:
    """Two graphs are captured, and replayed between each other and eager exchanges, on all ranks.

    Returns how many blocks were right; raises AssertionError if one was not, or ranks wait for
    each other, or CUDA would have refused a call.
    """
    random = Random(seed)
    gpus = Gpus(random, case.hardware)
    with cuda(gpus):
        ranks = [Rank(rank, case, gpus) for rank in range(case.size)]
        # What all ranks do: the same, each in its own time.
        parts: list[Callable[[Rank], Iterator[None]]] = []
        captured: list[Program] = []
        blocks = 0
        for number in range(ROUNDS):
            program = Program.draw(random, case)
            if number in (1, 2):
                captured.append(program)
                parts.append(partial(Rank.capture, program=program))
                continue
            if number == 0 or random.random() < 0.3:
                parts.append(partial(Rank.eager, number=number, program=program))
            else:
                index = random.randrange(len(captured))
                program = captured[index]
                parts.append(partial(Rank.replay, number=number, index=index))
            blocks += sum(len(x.receivers) * (len(x.shifts) + x.whole) for x in program.exchanges)
        hosts = [rank.host(parts) for rank in ranks]
        while hosts:
            host = random.choice(hosts)
            if next(host, "ended") == "ended":
                hosts.remove(host)
            for _ in range(random.randrange(12)):
                gpus.step()
        gpus.finish()
    kept = [block for rank in ranks for block in rank.kept]
    for got, wanted in kept:
        assert got.tolist() == wanted.tolist(), "a block is wrong"
    assert len(kept) == blocks, "blocks got lost"
    offers = (case.size * case.slots) * 4  # bytes of a rank's flags, before those of what has come
    left = [flag for flag, value in gpus.flags.items() if value and flag % (1 << 32) < offers]
    assert not left, "an offer is left"
    return blocks


@pytest.mark.parametrize(
    ("hardware", "size", "slots", "channels", "streams"),
    pairwise(("streams", "graph", "gpu"), (2, 3), (1, 2), (1, 2), ((1, 1), (3, 3), (3, 1))),
)
def test_blocks_are_whole(
    hardware: Hardware, size: int, slots: int, channels: int, streams: tuple[int, int]
) -> None:
    """Eager and replayed, on any streams, in any order that a graph allows, if a rank is late.

    Args: streams: all of them, and those that are captured.
    """
    case = Case(size, slots, channels, *streams, hardware)
    assert sum(run(case, seed) for seed in range(12)) > 0


def test_replays_keep_the_memory_that_they_write_to() -> None:
    """A larger block gets other memory, and the former one stays where graphs know it."""
    gpus = Gpus(Random(0))
    with cuda(gpus):
        rank = Rank(0, Case(size=2), gpus)
        (channel,) = rank.channels
        held = channel.held_bytes
        nothing = Program((Exchange(0, (1,), frozenset([0])),), (("post", 0), ("wait", 0)))
        with gpus.on(rank.streams[0]):
            channel.reserve(Room.of([((1024,), torch.float32)]))
            assert channel.held_bytes > held  # nothing was captured: the former memory is free
            grown = channel.held_bytes
        for _ in rank.capture(nothing):
            pass
        with gpus.on(rank.streams[0]):
            channel.reserve(Room.of([((2048,), torch.float32)]))
            assert channel.held_bytes == 3 * grown
            channel.reserve(Room.of([((4096,), torch.float32)]))
            assert channel.held_bytes == grown + 4 * grown


def test_room_is_made_before_a_capture() -> None:
    gpus = Gpus(Random(0))
    with cuda(gpus):
        rank = Rank(0, Case(size=2), gpus)
        with (
            gpus.new_graph().capture(rank.streams[0]),
            gpus.on(rank.streams[0]),
            pytest.raises(ContextParallelError, match="make the same call once before"),
        ):
            rank.channels[0].reserve(Room.of([((1024,), torch.float32)]))


@dataclass
class Place:
    """Where a tensor without storage is pushed to."""

    shape: tuple[int, ...]

    def __iter__(self) -> Iterator["Place"]:
        return (Place(self.shape[1:]) for _ in range(self.shape[0]))

    def data_ptr(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("shape", "strides", "whole"),
    [
        # Of two sequences of 256K tokens, 64 heads of 64: the first 128 tokens, and all but one.
        ((2, 128, 64, 64), (2**30, 4096, 64, 1), [2**20, 2**20]),
        ((2, 2**18 - 1, 64, 64), (2**30, 4096, 64, 1), [2**31 - 2**13] * 2),
        ((1, 2, 3, 8), (2**32, 2**30, 8, 1), [48, 48]),
        # A rank without tokens.
        ((1, 0, 64, 64), (4096, 4096, 64, 1), []),
        # One token fewer in a sequence, and one copy serves.
        ((2, 128, 64, 64), (2**30 - 4096, 4096, 64, 1), []),
    ],
)
def test_pieces_are_no_further_apart_than_a_copy_in_two_dimensions_takes(
    shape: tuple[int, ...], strides: tuple[int, ...], whole: list[int]
) -> None:
    """CUDA refuses pitches from 2 GiB on."""
    x = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")
    place = Place(shape)
    gpus = Gpus(Random(0))
    with cuda(gpus):
        peer.push(Stream(), x, place.data_ptr())  # type: ignore[arg-type]
    assert gpus.copied == whole


def test_tensors_that_are_elsewhere_are_refused() -> None:
    """A group that has gloo for CPUs beside NCCL takes both; peer memory does not."""
    gpus = Gpus(Random(0))
    with cuda(gpus):
        (channel, *_) = Rank(0, Case(size=2), gpus).channels
        elsewhere = torch.device("meta")
        with pytest.raises(ContextParallelError, match="got meta: use transport group"):
            channel.buffers(Room.of([FLOAT]), elsewhere)


def test_what_an_error_has_left_is_no_hang() -> None:
    """A rank that others may write to already, after an error, does not wait for another one."""
    gpus = Gpus(Random(0))
    with cuda(gpus):
        ranks = [Rank(rank, Case(size=3), gpus) for rank in range(3)]
        channel, stream = ranks[0].channels[0], ranks[0].streams[0]
        (buffer,) = channel.buffers(Room.of([FLOAT]), torch.device("cuda", 0))
        with gpus.on(stream):
            channel.expect({1})
            with pytest.raises(RuntimeError, match=r"release\(\) on all ranks"):
                channel.exchange([], [(buffer, 2)])
            for _ in range(2):  # slots, of which no block is waited for
                channel.exchange([], [(buffer, 1)])
            with pytest.raises(RuntimeError, match=r"not waited .*release\(\) on all ranks"):
                channel.exchange([], [(buffer, 1)])


def test_memory_that_another_stream_gets_back_waits_for_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's allocator gives it to the stream that it came from."""
    noted: list[tuple[int, object]] = []
    gpus = Gpus(Random(0))
    with cuda(gpus):
        monkeypatch.setattr(
            Tensor, "record_stream", lambda self, stream: noted.append((id(self), stream))
        )
        rank = Rank(0, Case(size=2, slots=1, streams=2), gpus)
        Rank(1, rank.case, gpus)
        (channel,), (posting, reading) = rank.channels, rank.streams
        tensors = [torch.zeros(4), torch.ones(4)]
        with gpus.on(posting):
            pending = [channel.exchange([(x, 1)], []) for x in tensors]
            pending[0].wait()
        assert not noted
        with gpus.on(reading):
            pending[1].wait()
        assert noted == [(id(tensors[1]), channel._copies)]
