"""Simulates an attention layer on a machine: what each rank does, and what it waits for.

What a rank does is what its own code did without data (`planner.trace`), which follows the plan.
Resources are, of each rank: the host, which launches one thing after another; the stream of
computation; the stream of copies; one stream for each channel of a process group, each direction
of its GPU's links; and of each node the network cards in either direction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from megatron_cp_plugin import registry
from megatron_cp_plugin.algorithms.grid import GridAlgorithm
from megatron_cp_plugin.algorithms.grid_placements import GatheredPlacement, GridRingPlacement
from megatron_cp_plugin.algorithms.head_split import HeadSplit
from megatron_cp_plugin.algorithms.point_to_point import PointToPoint
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.linear import LinearAlgorithm, LinearShape
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.planner.machine import Machine, Operation, Pass, Rate
from megatron_cp_plugin.planner.trace import (
    ChannelId,
    Event,
    Linear,
    Memory,
    Post,
    Tile,
    Trace,
    Wait,
    alone,
    trace_linear,
    trace_softmax,
)

PASSES: tuple[Pass, ...] = ("forward", "backward")


class Interval(NamedTuple):
    """Something that took time. Attributes: lane: of a rank. start, stop: seconds."""

    rank: int
    lane: str
    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class PassTime:
    """One pass of a layer.

    Attributes:
        seconds: until the last rank's stream of computation is done; of a backward, from the end of
            the forward on. computing: of these, the mean over ranks in which it computes.
        exposed_communication: in which the rank that is done last waits for messages. bytes: by
            link ("copy", "inside", "between"), of the rank that sends most over all of them.
    """

    seconds: float
    computing: float
    exposed_communication: float
    bytes: Mapping[str, int]


@dataclass(frozen=True)
class Timeline:
    """Forward and backward of a layer, one right after the other.

    Attributes: intervals: of the simulated ranks. ranks: how many those were; of fewer than there
        are see `simulate`.
    """

    forward: PassTime
    backward: PassTime
    intervals: tuple[Interval, ...]
    ranks: int

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.forward.seconds + self.backward.seconds

    @property
    def exposed_communication(self) -> float:
        """Seconds of both passes in which the rank that is done last waits for messages."""
        return self.forward.exposed_communication + self.backward.exposed_communication

    @property
    def bytes(self) -> dict[str, int]:
        """By link, of both passes."""
        links = {*self.forward.bytes, *self.backward.bytes}
        return {
            link: self.forward.bytes.get(link, 0) + self.backward.bytes.get(link, 0)
            for link in sorted(links)
        }


def simulate(
    algo: str,
    options: Mapping[str, object],
    shape: Shape | LinearShape,
    mask: Mask,
    machine: Machine,
    nodes: Sequence[int],
    *,
    transport: str = "auto",
    kernel: str | None = None,
    captured: bool = False,
) -> Timeline:
    """One layer, forward and backward.

    Up to 16 ranks all are simulated. Of more, where all exchange in collective operations
    (allgather, attention2d, ulysses over the process group), three are, at the true size: the
    others are taken to come when these do. All else is simulated on 16 and on 32 ranks, or two and
    four nodes, with as many tokens a rank, and goes on from there in a straight line: with every
    further rank, or team, there are as many steps more, each like the others.

    Args:
        algo, options: as `registry.create`. shape: of the whole problem. mask: of softmax
            attention. nodes: the node of each rank. transport: "auto", by copy engines where the
            machine has them and all ranks are on one node; or "group". kernel: one of the
            machine's; default: its first.
        captured: in a CUDA graph, so that the host launches nothing.

    Raises: ConfigError if the algorithm cannot serve this, or a name or value is unknown.
    """
    nodes, size = tuple(nodes), len(nodes)
    kernel = kernel or next(iter(machine.kernels))
    peer_access = transport != "group" and machine.copy is not None and len(set(nodes)) == 1
    ranks: tuple[int, ...] = tuple(range(size))
    if size > _ALL:
        options = _pinned(algo, options, shape, nodes, peer_access=peer_access)
        if not _by_collectives(algo, options, shape, nodes, peer_access=peer_access):
            smaller = _smaller(nodes)
            if smaller is not None:
                few, more = (
                    simulate(
                        algo,
                        options,
                        replace(shape, seq_len=shape.seq_len // size * count),
                        mask,
                        machine,
                        nodes[:count],
                        transport=transport if peer_access else "group",
                        kernel=kernel,
                        captured=captured,
                    )
                    for count in smaller
                )
                return _extended(few, more, smaller, size)
        else:
            ranks = (0, size // 2, size - 1)
    traces = _traces(algo, tuple(options.items()), shape, mask, nodes, ranks, peer_access)
    return _Run(machine, nodes, traces, kernel, captured=captured).timeline()


_ALL = 16  # so many ranks are simulated one by one


def _smaller(nodes: Sequence[int]) -> tuple[int, int] | None:
    """Two numbers of ranks that stand for more, if there are any."""
    per_node = nodes.count(nodes[0])
    step = per_node if per_node > 1 and len(set(nodes)) > 1 else 1
    few = step * max(2, _ALL // step)
    if 2 * few >= len(nodes) or len(nodes) % few:
        return None
    return few, 2 * few


def _extended(few: Timeline, more: Timeline, counts: tuple[int, int], size: int) -> Timeline:
    """What two numbers of ranks say of a third one."""
    factor = (size - counts[1]) / (counts[1] - counts[0])

    def line(a: float, b: float) -> float:
        return b + max(0.0, b - a) * factor

    def one(a: PassTime, b: PassTime) -> PassTime:
        return PassTime(
            line(a.seconds, b.seconds),
            line(a.computing, b.computing),
            line(a.exposed_communication, b.exposed_communication),
            {link: round(line(a.bytes.get(link, 0), b.bytes[link])) for link in b.bytes},
        )

    forward, backward = one(few.forward, more.forward), one(few.backward, more.backward)
    return Timeline(forward, backward, more.intervals, more.ranks)


def layer_seconds(
    algo: str,
    options: Mapping[str, object],
    size: int,
    shape: Shape | LinearShape,
    mask: Mask,
    machine: Machine,
    *,
    nodes: Sequence[int] | None = None,
    transport: str = "auto",
    kernel: str | None = None,
    captured: bool = False,
) -> float:
    """Seconds of forward and backward.

    Args: nodes: default: as many ranks on each as the machine has GPUs; others as of `simulate`.
    """
    where = machine.nodes(size) if nodes is None else nodes
    return simulate(
        algo,
        options,
        shape,
        mask,
        machine,
        where,
        transport=transport,
        kernel=kernel,
        captured=captured,
    ).seconds


def host_seconds(
    algo: str,
    options: Mapping[str, object],
    shape: Shape,
    mask: Mask,
    machine: Machine,
    nodes: Sequence[int],
) -> tuple[float, float]:
    """Seconds of the host for what rank 0 launches in forward and backward."""
    peer_access = machine.copy is not None and len(set(nodes)) == 1
    trace = _trace(algo, options, shape, mask, 0, nodes, peer_access=peer_access)
    return _launched(machine, trace.forward), _launched(machine, trace.backward)


def _launched(machine: Machine, events: Sequence[Event]) -> float:
    return sum(_launch_seconds(machine, event) for event in events)


def _launch_seconds(machine: Machine, event: Event) -> float:
    """Of the host."""
    host = machine.host
    if isinstance(event, Tile):
        return host.kernel if event.phase == "forward" else host.kernel_backward
    if isinstance(event, Post):
        return host.peer if event.operation is None else host.group
    if isinstance(event, Wait):
        return 0.0
    return host.kernel if isinstance(event, Linear) else host.operation


def tile_seconds(machine: Machine, kernel: str, tile: Tile) -> float:
    """What an attention kernel takes on a GPU of its own."""
    speeds, backward = machine.kernel(kernel), tile.phase == "backward"
    of_keys, of_values = (3, 2) if backward else (1, 1)  # products with D, and with E
    width = of_keys * tile.head_dim + of_values * tile.value_dim
    flop = 2.0 * tile.batch * tile.heads * tile.area * width
    speed = speeds.by_pass[f"{tile.phase} {'causal' if tile.causal else 'full'}"]
    dims = f"{tile.head_dim}"
    if tile.value_dim != tile.head_dim:
        dims += f":{tile.value_dim}"
    flop /= speeds.dims.get(tile.phase, {}).get(dims, 1.0)
    return speed.time(flop, tile.rows, tile.columns)


@lru_cache(maxsize=256)  # what ranks do is the same on every machine
def _traces(
    algo: str,
    options: tuple[tuple[str, object], ...],
    shape: Shape | LinearShape,
    mask: Mask,
    nodes: tuple[int, ...],
    ranks: tuple[int, ...],
    peer_access: bool,
) -> dict[int, Trace]:
    """Of some ranks."""
    of_all = algo, dict(options), shape, mask
    return {rank: _trace(*of_all, rank, nodes, peer_access=peer_access) for rank in ranks}


def _pinned(
    algo: str,
    options: Mapping[str, object],
    shape: Shape | LinearShape,
    nodes: tuple[int, ...],
    *,
    peer_access: bool,
) -> Mapping[str, object]:
    """Options with what follows from the number of ranks set to what it is for so many."""
    if isinstance(shape, LinearShape):
        return options
    algorithm = _made(algo, options, shape, nodes, peer_access=peer_access)
    pinned = dict(options)
    if isinstance(algorithm, HeadSplit):
        pinned["chunks"] = len(algorithm.exchanged_groups(shape))
        if "ulysses" in registry.option_names(algo):
            pinned["ulysses"] = algorithm.degree(shape.kv_heads)
    elif isinstance(algorithm, PointToPoint):
        pinned["chunks"] = len(algorithm.head_groups(shape))
        if isinstance(algorithm, GridAlgorithm) and "rows" in registry.option_names(algo):
            pinned["rows"], pinned["cols"] = algorithm.grid_shape(shape)
            if algorithm.kind is GridRingPlacement:
                pinned["chunks"] = 0
    return pinned


def _by_collectives(
    algo: str,
    options: Mapping[str, object],
    shape: Shape | LinearShape,
    nodes: tuple[int, ...],
    *,
    peer_access: bool,
) -> bool:
    """Whether ranks meet in collective operations only, so that each stands for the others."""
    if isinstance(shape, LinearShape):
        return algo != "lasp"
    algorithm = _made(algo, options, shape, nodes, peer_access=peer_access)
    if isinstance(algorithm, HeadSplit):
        return algorithm.degree(shape.kv_heads) == len(nodes)
    return isinstance(algorithm, GridAlgorithm) and algorithm.kind is GatheredPlacement


def _made(
    algo: str,
    options: Mapping[str, object],
    shape: Shape,
    nodes: tuple[int, ...],
    *,
    peer_access: bool,
) -> Algorithm:
    algorithm = registry.create(algo, alone(0, nodes, peer_access=peer_access), options)
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
    algorithm.check(algorithm.options, size=len(nodes), **heads, causal=True)
    return algorithm


def _trace(
    algo: str,
    options: Mapping[str, object],
    shape: Shape | LinearShape,
    mask: Mask,
    rank: int,
    nodes: Sequence[int],
    *,
    peer_access: bool,
) -> Trace:
    if isinstance(shape, LinearShape):

        def make_linear(topology: Topology) -> LinearAlgorithm:
            algorithm = registry.create_linear(algo, topology, options)
            algorithm.check(algorithm.options, size=len(nodes), heads=shape.heads)
            return algorithm

        return trace_linear(make_linear, rank, nodes, shape, causal=mask.causal)

    def make(topology: Topology) -> Algorithm:
        algorithm = registry.create(algo, topology, options)
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
        algorithm.check(algorithm.options, size=len(nodes), **heads, causal=mask.causal)
        return algorithm

    return trace_softmax(make, rank, nodes, shape, mask, peer_access=peer_access)


@dataclass
class _Operation:
    """What ranks do together on a channel.

    Attributes: all by rank. posts: what it posted, and when its stream came there. offered: when
        others may write to its memory. copied: when it has written to others'. done: when it is
        over.
    """

    posts: dict[int, tuple[Post, float]] = field(default_factory=dict)
    offered: dict[int, float] = field(default_factory=dict)
    copied: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)


@dataclass
class _Rank:
    """Where a rank is. Attributes: place: in its events. host, stream: seconds."""

    events: Sequence[Event]
    place: int = 0
    host: float = 0.0
    stream: float = 0.0
    copies: float = 0.0
    waited: float = 0.0
    busy: list[tuple[float, float]] = field(default_factory=list)
    slowed: list[tuple[float, float]] = field(default_factory=list)  # by the process group
    queue: list[tuple[ChannelId, int]] = field(default_factory=list)  # of copies
    at_forward: tuple[float, float, int] = (0.0, 0.0, 0)


class _Run:
    """All ranks on their way."""

    def __init__(
        self,
        machine: Machine,
        nodes: Sequence[int],
        traces: Mapping[int, Trace],
        kernel: str,
        *,
        captured: bool,
    ) -> None:
        self.machine, self.nodes, self.traces = machine, nodes, traces
        self.kernel, self.captured = kernel, captured
        machine.kernel(kernel)  # refused before anything runs
        self.ranks = {
            rank: _Rank((*trace.forward, *trace.backward)) for rank, trace in traces.items()
        }
        self.operations: dict[tuple[ChannelId, int], _Operation] = defaultdict(_Operation)
        self.channel_free: dict[tuple[int, ChannelId], float] = {}
        self.channel_next: dict[tuple[int, ChannelId], int] = {}
        self.free: dict[tuple[str, int], float] = {}  # links
        self.intervals: list[Interval] = []
        self.sent: dict[tuple[int, Pass, str], int] = defaultdict(int)
        self.open: dict[tuple[ChannelId, int], None] = {}

    def timeline(self) -> Timeline:
        while True:
            for number, rank in self.ranks.items():
                self._advance(number, rank)
            if not self._resolve():
                break
        stuck = [n for n, rank in self.ranks.items() if rank.place < len(rank.events)]
        assert not stuck, f"ranks {stuck} wait for messages that nobody sends"
        return self._summary()

    # -- what a rank does by itself

    def _advance(self, number: int, rank: _Rank) -> None:
        forward = len(self.traces[number].forward)
        while rank.place < len(rank.events):
            if rank.place == forward and not rank.at_forward[2]:
                rank.at_forward = rank.stream, rank.waited, len(rank.busy) or 1
                rank.host += self._launch(self.machine.host.call_backward)
            elif rank.place == 0:
                rank.host += self._launch(self.machine.host.call)
            event = rank.events[rank.place]
            if isinstance(event, Wait):
                done = self.operations[event.channel, event.number].done.get(number)
                if done is None:
                    return
                ready = max(rank.stream, rank.host)
                rank.waited += max(0.0, done - ready)
                rank.stream = max(ready, done)
            else:
                rank.host += self._launch(_launch_seconds(self.machine, event))
                if isinstance(event, Post):
                    self._post(number, rank, event)
                else:
                    self._compute(number, rank, event)
            rank.place += 1
        if rank.at_forward[2] == 0:
            rank.at_forward = rank.stream, rank.waited, len(rank.busy)

    def _launch(self, seconds: float) -> float:
        return 0.0 if self.captured else seconds

    def _compute(self, number: int, rank: _Rank, event: Tile | Linear | Memory) -> None:
        machine = self.machine
        if isinstance(event, Tile):
            seconds = tile_seconds(machine, self.kernel, event)
            name = f"attention {event.phase}"
        elif isinstance(event, Linear):
            seconds = event.flop / machine.linear_flops[event.phase]
            name = f"linear attention {event.phase}"
        else:
            seconds = machine.operation_seconds + event.bytes / machine.memory_bytes_per_second
            name = event.name
        start = max(rank.stream, rank.host)
        stop = self._slowed(rank, start, seconds * machine.ranks_per_gpu)
        rank.stream = stop
        rank.busy.append((start, stop))
        self.intervals.append(Interval(number, "computation", name, start, stop))

    def _slowed(self, rank: _Rank, start: float, seconds: float) -> float:
        """When a computation ends, that is slower while the process group moves data."""
        share, now, left = self.machine.group_share, start, seconds
        for begin, end in rank.slowed:
            if end <= now or share == 1.0:
                continue
            before = max(0.0, begin - now)
            if left <= before:
                return now + left
            left -= before
            now += before
            if left <= (end - now) * share:
                return now + left / share
            left -= (end - now) * share
            now = end
        return now + left

    # -- what ranks do together

    def _post(self, number: int, rank: _Rank, post: Post) -> None:
        peer = post.operation is None
        key = post.channel, post.number
        self.operations[key].posts[number] = post, max(rank.stream, rank.host)
        if peer:
            rank.queue.append(key)
        self.open[key] = None
        phase: Pass = "forward" if not rank.at_forward[2] else "backward"
        if post.operation == "exchange" or peer:
            for target, size in post.sends:
                self.sent[number, phase, self._link(number, target, peer=peer)] += size
        else:
            others = [member for member in post.channel[1] if member != number]
            for other in others:
                link = self._link(number, other, peer=False)
                self.sent[number, phase, link] += post.bytes // len(others)

    def _link(self, source: int, target: int, *, peer: bool) -> str:
        if peer:
            return "copy"
        return "inside" if self.nodes[source] == self.nodes[target] else "between"

    def _resolve(self) -> bool:
        """Finishes the operation that can begin first. Returns: whether there was one."""
        best: tuple[float, tuple[ChannelId, int], int] | None = None
        for key in self.open:
            for found in self._startable(key):
                if best is None or found < best:
                    best = found
        if best is None:
            return False
        start, key, number = best
        operation = self.operations[key]
        post = operation.posts[number][0]
        if post.operation is None:
            self._copy(start, key, number)
        elif post.operation == "exchange":
            self._exchange(key)
        else:
            self._collective(key, post.operation, start)
        members = [m for m in key[0][1] if m in self.ranks]
        if all(m in operation.done for m in members):
            del self.open[key]
        return True

    def _startable(
        self, key: tuple[ChannelId, int]
    ) -> list[tuple[float, tuple[ChannelId, int], int]]:
        """When a rank can begin its part of an operation, or all ranks theirs."""
        operation = self.operations[key]
        first = next(iter(operation.posts))
        if operation.posts[first][0].operation is None:
            return self._startable_copies(key, operation)
        members = [m for m in key[0][1] if m in self.ranks]
        if len(operation.posts) < len(members):
            return []
        if any(self.channel_next.get((m, key[0]), 0) != key[1] for m in members):
            return []
        starts = [
            max(operation.posts[m][1], self.channel_free.get((m, key[0]), 0.0)) for m in members
        ]
        return [(max(starts), key, first)]

    def _startable_copies(
        self, key: tuple[ChannelId, int], operation: _Operation
    ) -> list[tuple[float, tuple[ChannelId, int], int]]:
        """Each rank's copies come one after another, and wait for room where they go."""
        found = []
        for number, (post, ready) in operation.posts.items():
            rank = self.ranks[number]
            if number in operation.copied or rank.queue[0] != key:
                continue
            start = operation.offered.setdefault(number, max(rank.copies, ready))
            targets = [target for target, _ in post.sends if target in self.ranks]
            if all(target in operation.offered for target in targets):
                starts = (operation.offered[target] for target in targets)
                found.append((max([start, *starts]), key, number))
        return found

    def _copy(self, start: float, key: tuple[ChannelId, int], number: int) -> None:
        """A rank's part of an exchange by copy engines."""
        operation, rank = self.operations[key], self.ranks[number]
        post, _ = operation.posts[number]
        assert self.machine.copy is not None
        end = start
        if post.sends:
            size = sum(size for _, size in post.sends)
            end = self._move(start, number, post.sends[0][0], size, self.machine.copy, "copies")
        rank.copies = operation.copied[number] = end
        rank.queue.pop(0)
        for member in operation.copied.keys() - operation.done.keys():
            received = operation.posts[member][0].receives
            sources = {source for source, _ in received if source in self.ranks}
            if sources <= operation.copied.keys():
                arrivals = (operation.copied[source] for source in sources)
                operation.done[member] = max([operation.copied[member], *arrivals])

    def _move(
        self, start: float, source: int, target: int, size: int, rate: Rate, lane: str
    ) -> float:
        """A message over links that are free then. Returns: when it has come."""
        resources = self._resources(source, target)
        begin = max([start, *(self.free.get(one, 0.0) for one in resources)])
        end = begin + rate.time(size)
        for one in resources:
            self.free[one] = end
        if ("fabric", 0) in resources and self.machine.between_total:
            self.free["fabric", 0] = begin + size / self.machine.between_total
        name = f"to {target}" if lane == "copies" else f"{source} to {target}"
        self.intervals.append(Interval(source, lane, name, begin, end))
        return end

    def _resources(self, source: int, target: int) -> list[tuple[str, int]]:
        if self.nodes[source] == self.nodes[target]:
            return [("out", source), ("in", target)]
        found = [("card out", self._card(source)), ("card in", self._card(target))]
        return [*found, ("fabric", 0)] if self.machine.between_total else found

    def _card(self, rank: int) -> int:
        """The number of a rank's network card, over all nodes."""
        mates = [other for other, node in enumerate(self.nodes) if node == self.nodes[rank]]
        cards = min(self.machine.cards_per_node, len(mates))
        return self.nodes[rank] * self.machine.cards_per_node + (
            mates.index(rank) * cards // len(mates)
        )

    def _exchange(self, key: tuple[ChannelId, int]) -> None:
        """Messages of all ranks of a channel; each rank is done when its own are."""
        operation, channel = self.operations[key], key[0]
        begin = {
            m: max(ready, self.channel_free.get((m, channel), 0.0))
            for m, (_, ready) in operation.posts.items()
        }
        ends = dict(begin)
        moving: dict[int, float] = {}
        for number, (post, _) in sorted(operation.posts.items(), key=lambda one: begin[one[0]]):
            for target, size in _joined(post.sends):
                start = max(begin[number], begin.get(target, begin[number]))
                inside = self.nodes[number] == self.nodes[target]
                rate = (self.machine.inside if inside else self.machine.between).exchange
                end = self._move(start, number, target, size, rate, channel[0])
                for m in {number, target} & ends.keys():
                    ends[m] = max(ends[m], end)
                    moving[m] = min(moving.get(m, start), start)
        for number, (post, _) in operation.posts.items():
            for source, size in _joined(post.receives):
                if source not in ends:  # it is not simulated, and comes when this rank does
                    inside = self.nodes[number] == self.nodes[source]
                    rate = (self.machine.inside if inside else self.machine.between).exchange
                    end = self._move(begin[number], source, number, size, rate, channel[0])
                    ends[number] = max(ends[number], end)
        for m, end in ends.items():
            operation.done[m] = end
            self._ended(m, channel, key[1], moving.get(m, end), end)

    def _collective(self, key: tuple[ChannelId, int], operation: Operation, start: float) -> None:
        channel = key[0]
        posts = self.operations[key].posts
        members = channel[1]
        size = max(post.bytes for post, _ in posts.values())
        seconds, shared = self._collective_seconds(members, operation, size)
        resources = [("out", m) for m in members]
        if len({self.nodes[m] for m in members}) > 1:
            resources = [("card out", card) for card in {self._card(m) for m in members}]
        of_all = [("fabric", 0)] if shared else []
        start = max([start, *(self.free.get(one, 0.0) for one in (*resources, *of_all))])
        end = start + seconds
        for one in resources:
            self.free[one] = end
        for one in of_all:
            self.free[one] = start + shared
        for m in posts:
            self.operations[key].done[m] = end
            self._ended(m, channel, key[1], start, end)
            self.intervals.append(Interval(m, channel[0], operation, start, end))

    def _collective_seconds(
        self, members: Sequence[int], operation: Operation, size: int
    ) -> tuple[float, float]:
        """Seconds, and those for which it takes all that nodes share between them.

        Args: size: bytes that a rank sends.
        """
        machine, count = self.machine, len(members)
        of_nodes = defaultdict(list)
        for m in members:
            of_nodes[self.nodes[m]].append(m)
        if len(of_nodes) == 1:
            return machine.inside.rate(operation, count).time(size), 0.0
        rate, local = machine.between.rate(operation, count), max(map(len, of_nodes.values()))
        within = float(size)
        if operation == "all_to_all":
            within = size * (local - 1) / (count - 1)
            crossing = (size - within) * local  # of a node
        else:
            crossing = size  # a ring through all nodes, over all cards of each
        cards = len({self._card(m) for m in next(iter(of_nodes.values()))})
        if len(self.ranks) < len(self.nodes):  # other groups like this one use the same cards
            a_card = self.nodes.count(self.nodes[members[0]]) / machine.cards_per_node
            crossing *= max(1.0, a_card * cards / local)
        seconds, shared = rate.time(crossing / cards), 0.0
        if machine.between_total:
            shared = crossing * len(of_nodes) / machine.between_total
            seconds = max(seconds, rate.seconds + shared)
        if local > 1:
            seconds = max(seconds, machine.inside.rate(operation, local).time(within))
        return seconds, shared

    def _ended(self, number: int, channel: ChannelId, which: int, start: float, end: float) -> None:
        """Notes that an operation of the process group ran on a rank."""
        self.channel_free[number, channel] = end
        self.channel_next[number, channel] = which + 1
        share, rank = self.machine.group_share, self.ranks[number]
        if share == 1.0 or end <= start:
            return
        rank.slowed.append((start, end))
        late = sum(max(0.0, min(stop, end) - max(begin, start)) for begin, stop in rank.busy[-64:])
        rank.stream += late * (1 - share)

    def _summary(self) -> Timeline:
        forward = max(rank.at_forward[0] for rank in self.ranks.values())
        whole = max(rank.stream for rank in self.ranks.values())
        last = max(self.ranks.values(), key=lambda rank: rank.stream)
        middle = max(self.ranks.values(), key=lambda rank: rank.at_forward[0])
        count = len(self.ranks)

        def computing(start: float, stop: float) -> float:
            spans = (
                min(e, stop) - max(b, start)
                for rank in self.ranks.values()
                for b, e in rank.busy
                if e > start and b < stop
            )
            return sum(spans) / count

        def sent(phase: Pass) -> dict[str, int]:
            by_rank: dict[int, dict[str, int]] = {rank: {} for rank in self.ranks}
            for (rank, of, link), size in self.sent.items():
                if of == phase:
                    by_rank[rank][link] = size
            return max(by_rank.values(), key=lambda links: sum(links.values()))

        return Timeline(
            PassTime(forward, computing(0, forward), middle.at_forward[1], sent("forward")),
            PassTime(
                whole - forward,
                computing(forward, whole),
                last.waited - last.at_forward[1],
                sent("backward"),
            ),
            tuple(self.intervals),
            count,
        )


def _joined(sends: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Messages to one rank as one."""
    sizes: dict[int, int] = {}
    for target, size in sends:
        sizes[target] = sizes.get(target, 0) + size
    return list(sizes.items())
