"""Simulates the ranks' actions on a machine: starts, ends, and waits of each.

Each rank has these resources: the host, which launches one operation after another; the stream of
computation; the stream of copies; one stream for each channel of a process group; each direction of
its GPU's links. Each node has network cards, in both directions; all nodes share a network.

The operation that can begin first is scheduled first, and holds its resources until it is done.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from megatron_cp_plugin.core.communication.record import Operation, Phase
from megatron_cp_plugin.planner.dry_run import (
    ChannelId,
    Event,
    Linear,
    Mark,
    Memory,
    Offer,
    Post,
    RecordedKernel,
    Wait,
)
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.meta import Trace

Key = tuple[ChannelId, int]  # an operation: its channel, and its number on the channel


@dataclass(frozen=True)
class PassTime:
    """One pass of a layer.

    Attributes:
        seconds: until the last rank's stream of computation is done; of a backward, from the end of
            the forward on.
        exposed_communication: seconds of these in which the rank that finishes last waits for
            messages.
        bytes: bytes by link ("copy", "inside", "between") of the rank that sends most in all.
    """

    seconds: float
    exposed_communication: float
    bytes: Mapping[str, int]


@dataclass(frozen=True)
class Timeline:
    """Forward and backward of a layer, one right after the other.

    Attributes:
        ranks: number of simulated ranks; for fewer than all see `simulate`.
    """

    forward: PassTime
    backward: PassTime
    ranks: int

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.forward.seconds + self.backward.seconds

    @property
    def exposed_communication(self) -> float:
        """Seconds of both passes in which the rank that finishes last waits for messages."""
        return self.forward.exposed_communication + self.backward.exposed_communication

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes by link, of both passes."""
        links = {*self.forward.bytes, *self.backward.bytes}
        return {
            link: self.forward.bytes.get(link, 0) + self.backward.bytes.get(link, 0)
            for link in sorted(links)
        }


def play(
    machine: Machine,
    nodes: Sequence[int],
    traces: Mapping[int, Trace],
    kernel: str,
    *,
    captured: bool,
) -> Timeline:
    """Simulates the ranks' actions.

    Args:
        nodes: node of every rank.
        traces: actions of some or all ranks; a rank without a trace is assumed to be as far as its
            partner in an exchange.
        kernel: name of a kernel of the machine.
        captured: whether it is a replay of a CUDA graph, so that the host launches nothing.

    Raises: ConfigError if the machine has no such kernel.
    """
    machine.kernel(kernel)
    return _Run(machine, nodes, traces, kernel, captured=captured).timeline()


_FUSED = frozenset(("merge", "sum", "rows", "delta"))  # names of what `sizes.OnePass` notes


def launched(machine: Machine, events: Sequence[Event]) -> float:
    """Seconds of the host for launching events."""
    return sum(_launch_seconds(machine, event) for event in events)


def _launch_seconds(machine: Machine, event: Event) -> float:
    """Of the host."""
    host = machine.host
    if isinstance(event, RecordedKernel):
        return host.kernel if event.phase == "forward" else host.kernel_backward
    if isinstance(event, Post):
        if event.operation == "exchange" and not event.sends and not event.receives:
            return 0.0  # of others, in which this rank has no part
        return host.peer if event.operation is None else host.group
    if isinstance(event, Wait | Offer | Mark):
        return 0.0
    if isinstance(event, Linear):
        return host.kernel
    return host.fused if event.name in _FUSED else host.operation


# Operations that write in another order than they read, or by places in an index.
_REORDERING = frozenset(
    ("cat", "clone", "constant_pad_nd", "flip", "index_select", "rows", "stack")
)
_REORDERED = 0.5  # of the speed of other operations; fitted to docs/data/ranks.csv


def tile_seconds(machine: Machine, kernel: str, tile: RecordedKernel) -> float:
    """Seconds of an attention kernel on a GPU of its own."""
    speeds, backward = machine.kernel(kernel), tile.phase == "backward"
    of_keys, of_values = (3, 2) if backward else (1, 1)  # products with D, and with E
    width = of_keys * tile.head_dim + of_values * tile.value_dim
    flop = 2.0 * tile.batch * tile.heads * tile.area * width
    speed = speeds.by_pass[f"{tile.phase} {'causal' if tile.causal else 'full'}"]
    dims = f"{tile.head_dim}"
    if tile.value_dim != tile.head_dim:
        dims += f":{tile.value_dim}"
    flop /= speeds.dims.get(tile.phase, {}).get(dims, 1.0)
    return speed.time(flop, tile.rows, tile.columns, packed=tile.packed)


@dataclass
class _Operation:
    """An operation of several ranks on a channel.

    Attributes, all by rank:
        posts: the posted operation, and the time at which the rank's stream reached it.
        offered: time from which others may write to its memory.
        copied: time at which it has written to others' memory; arrived: to that of one of them,
            by source and target.
        done: time at which it is over.
        unsent: targets and bytes of the messages that it has yet to copy.
    """

    posts: dict[int, tuple[Post, float]] = field(default_factory=dict)
    offered: dict[int, float] = field(default_factory=dict)
    copied: dict[int, float] = field(default_factory=dict)
    arrived: dict[tuple[int, int], float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    unsent: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class _Begin(NamedTuple):
    """A pass begins."""

    phase: Phase


@dataclass
class _Rank:
    """State of a rank.

    Attributes:
        events: its actions.
        place: number of actions that are done.
        phase: its present phase.
        host, stream, copies: time until which each is busy.
        waited: seconds of waiting for messages, by pass.
        marked, ended: times at which the stream reached the last mark, and the end of the forward.
        busy: intervals of computation.
        slowed: intervals in which the process group moved data.
        queue: copies that are not done.
    """

    events: Sequence[Event | _Begin]
    place: int = 0
    phase: Phase = "forward"
    host: float = 0.0
    stream: float = 0.0
    copies: float = 0.0
    waited: dict[Phase, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0})
    marked: float = 0.0
    ended: float = 0.0
    busy: list[tuple[float, float]] = field(default_factory=list)
    slowed: list[tuple[float, float]] = field(default_factory=list)
    queue: list[Key] = field(default_factory=list)


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
        self.machine, self.nodes, self.kernel, self.captured = machine, nodes, kernel, captured
        self.ranks = {
            rank: _Rank((_Begin("forward"), *trace.forward, _Begin("backward"), *trace.backward))
            for rank, trace in traces.items()
        }
        self.cards = _cards(machine, nodes)
        # If one rank of many is simulated, the ranks that share its network card do the same.
        alone = len(self.ranks) < len(nodes)
        a_node = max(Counter(nodes).values())
        self.crowd = max(1.0, a_node / machine.cards_per_node) if alone else 1.0
        self.operations: dict[Key, _Operation] = defaultdict(_Operation)
        self.open: dict[Key, None] = {}  # operations that are not finished, in order
        self.channel_free: dict[tuple[int, ChannelId], float] = {}
        self.channel_next: dict[tuple[int, ChannelId], int] = {}
        self.free: dict[tuple[str, int], float] = {}  # links
        self.sent: dict[tuple[int, Phase, str], int] = defaultdict(int)

    def timeline(self) -> Timeline:
        while True:
            for number, rank in self.ranks.items():
                self._advance(number, rank)
            if not self._resolve():
                break
        stuck = [n for n, rank in self.ranks.items() if rank.place < len(rank.events)]
        assert not stuck, f"ranks {stuck} wait for messages that nobody sends"
        return self._summary()

    # -- operations of one rank

    def _advance(self, number: int, rank: _Rank) -> None:
        """Runs the rank until it waits for an operation that is not scheduled yet."""
        while rank.place < len(rank.events):
            event = rank.events[rank.place]
            if isinstance(event, Wait):
                done = self.operations[event.channel, event.number].done.get(number)
                if done is None:
                    return
                ready = max(rank.stream, rank.host)
                rank.waited[rank.phase] += max(0.0, done - ready)
                rank.stream = max(ready, done)
            elif isinstance(event, Offer):
                offered = self.operations[event.channel, event.number].offered
                offered.setdefault(number, max(rank.stream, rank.host))
            elif isinstance(event, Mark):
                rank.marked = max(rank.stream, rank.host)
            elif isinstance(event, _Begin):
                rank.phase, rank.ended = event.phase, rank.stream
                host = self.machine.host
                rank.host += self._launch(
                    host.call if event.phase == "forward" else host.call_backward
                )
            else:
                rank.host += self._launch(_launch_seconds(self.machine, event))
                if isinstance(event, Post):
                    self._post(number, rank, event)
                else:
                    self._compute(rank, event)
            rank.place += 1

    def _launch(self, seconds: float) -> float:
        return 0.0 if self.captured else seconds

    def _compute(self, rank: _Rank, event: RecordedKernel | Linear | Memory) -> None:
        machine = self.machine
        if isinstance(event, RecordedKernel):
            seconds = tile_seconds(machine, self.kernel, event)
        elif isinstance(event, Linear):
            seconds = event.flop / machine.linear_speed(event.phase)
        else:
            speed = machine.memory_bytes_per_second
            speed *= _REORDERED if event.name in _REORDERING else 1.0
            seconds = machine.operation_seconds + event.bytes / speed
        start = max(rank.stream, rank.host)
        stop = self._slowed(rank, start, seconds * machine.ranks_per_gpu)
        rank.stream = stop
        rank.busy.append((start, stop))

    def _slowed(self, rank: _Rank, start: float, seconds: float) -> float:
        """End of a computation, which is slower while the process group moves data."""
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

    # -- operations of several ranks

    def _post(self, number: int, rank: _Rank, post: Post) -> None:
        peer = post.operation is None
        key = post.channel, post.number
        ready = max(rank.stream, rank.host)
        if peer:
            rank.queue.append(key)
            self.operations[key].offered.setdefault(number, ready)
            self.operations[key].unsent[number] = _joined_sends(post.sends)
            if post.early:
                ready = max(rank.marked, rank.host)
        self.operations[key].posts[number] = post, ready
        self.open[key] = None
        if post.operation == "exchange" or peer:
            for target, size in post.sends:
                self.sent[number, rank.phase, self._link(number, target, peer=peer)] += size
        else:
            others = [member for member in post.channel[1] if member != number]
            for other in others:
                link = self._link(number, other, peer=False)
                self.sent[number, rank.phase, link] += post.bytes // len(others)

    def _link(self, source: int, target: int, *, peer: bool) -> str:
        if peer:
            return "copy"
        return "inside" if self.nodes[source] == self.nodes[target] else "between"

    def _resolve(self) -> bool:
        """Finishes the operation that can begin first. Returns: whether there was one."""
        best: tuple[float, Key, int] | None = None
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

    def _startable(self, key: Key) -> list[tuple[float, Key, int]]:
        """Earliest start of a rank's part in an operation, or of all ranks' parts."""
        operation = self.operations[key]
        first = next(iter(operation.posts))
        if operation.posts[first][0].operation is None:
            return self._startable_copies(key, operation)
        members = [m for m in key[0][1] if m in self.ranks]
        if len(operation.posts) < len(members):
            return []
        if any(self.channel_next.get((m, key[0]), 0) != key[1] for m in members):
            return []
        return [(max(self._group_start(m, key) for m in members), key, first)]

    def _group_start(self, number: int, key: Key) -> float:
        """Earliest start of a rank's part in an operation of a process group: its kernel waits for
        the end of one that computes, which takes all multiprocessors.
        """
        ready = self.operations[key].posts[number][1]
        start = max(ready, self.channel_free.get((number, key[0]), 0.0))
        running = (stop for begin, stop in self.ranks[number].busy[-64:] if begin < start < stop)
        return max(running, default=start)

    def _startable_copies(self, key: Key, operation: _Operation) -> list[tuple[float, Key, int]]:
        """Earliest start of copies: a rank's copies run one after another, and wait for room at
        their target.
        """
        found = []
        for number, (_, ready) in operation.posts.items():
            rank = self.ranks[number]
            if number in operation.copied or rank.queue[0] != key:
                continue
            start = max(rank.copies, ready)
            for target, _ in operation.unsent[number][:1]:
                if target in self.ranks:
                    free = self.free.get(("in", target), 0.0)
                    start = max(start, operation.offered.get(target, inf), free)
            if start < inf:
                found.append((start, key, number))
        return found

    def _copy(self, start: float, key: Key, number: int) -> None:
        """A rank's next message of an exchange by copy engines, in the order in which it writes."""
        operation, rank = self.operations[key], self.ranks[number]
        unsent = operation.unsent[number]
        rank.copies = start
        if unsent:
            target, size = unsent.pop(0)
            _, rank.copies = self._move(start, number, target, size, copied=True)
            operation.arrived[number, target] = rank.copies
        if unsent:
            return
        operation.copied[number] = rank.copies
        rank.queue.pop(0)
        for member in operation.copied.keys() - operation.done.keys():
            received = operation.posts[member][0].receives
            sources = {source for source, _ in received if source in self.ranks}
            if sources <= operation.copied.keys():
                arrivals = (operation.arrived[source, member] for source in sources)
                operation.done[member] = max([operation.copied[member], *arrivals])

    def _move(
        self, start: float, source: int, target: int, size: int, *, copied: bool = False
    ) -> tuple[float, float]:
        """Sends a message over its links, perhaps by copy engines. Returns: when it moves."""
        machine, inside = self.machine, self.nodes[source] == self.nodes[target]
        rate = (machine.inside if inside else machine.between).exchange
        resources = [("out", source), ("in", target)]
        if copied:
            assert machine.copy is not None
            rate = machine.copy
        elif not inside:
            resources = [("card out", self.cards[source]), ("card in", self.cards[target])]
            size = round(size * self.crowd)
            if machine.between_total:
                resources.append(("fabric", 0))
        begin = max([start, *(self.free.get(one, 0.0) for one in resources)])
        end = begin + rate.time(size)
        for one in resources[:2]:
            self.free[one] = end
        # Messages from ranks that are not simulated are in the others' part of the bytes sent.
        if ("fabric", 0) in resources and machine.between_total and source in self.ranks:
            others = len(self.nodes) / len(self.ranks) / self.crowd
            self.free["fabric", 0] = begin + size * others / machine.between_total
        return begin, end

    def _exchange(self, key: Key) -> None:
        """Messages of all ranks of a channel; each rank is done when its own are."""
        operation = self.operations[key]
        begin = {m: self._group_start(m, key) for m in operation.posts}
        ends = dict(begin)
        moved: dict[int, list[tuple[float, float]]] = {m: [] for m in operation.posts}
        for number, (post, _) in sorted(operation.posts.items(), key=lambda one: begin[one[0]]):
            for target, size in _joined_sends(post.sends):
                start = max(begin[number], begin.get(target, begin[number]))
                moving = self._move(start, number, target, size)
                for m in {number, target} & ends.keys():
                    ends[m] = max(ends[m], moving[1])
                    moved[m].append(moving)
        for number, (post, _) in operation.posts.items():
            for source, size in _joined_sends(post.receives):
                if source not in ends:  # the partner is not simulated, and arrives with this rank
                    _, end = self._move(begin[number], source, number, size)
                    ends[number] = max(ends[number], end)
        for m, end in ends.items():
            operation.done[m] = end
            self._ended(m, key, moved[m], end)

    def _collective(self, key: Key, operation: Operation, start: float) -> None:
        posts, members = self.operations[key].posts, key[0][1]
        size = max(post.bytes for post, _ in posts.values())
        seconds, shared = self._collective_seconds(members, operation, size)
        resources = [("out", m) for m in members]
        if len({self.nodes[m] for m in members}) > 1:
            resources = [("card out", card) for card in {self.cards[m] for m in members}]
        of_all = [("fabric", 0)] if shared else []
        start = max([start, *(self.free.get(one, 0.0) for one in (*resources, *of_all))])
        end = start + seconds
        for one in resources:
            self.free[one] = end
        for one in of_all:
            self.free[one] = start + shared
        for m in posts:
            self.operations[key].done[m] = end
            self._ended(m, key, [(start, end)], end)

    def _collective_seconds(
        self, members: Sequence[int], operation: Operation, size: int
    ) -> tuple[float, float]:
        """Seconds, and the seconds in which it takes all that nodes share between them.

        Args: size: bytes that a rank sends.
        """
        machine, count = self.machine, len(members)
        of_nodes = defaultdict(list)
        for m in members:
            of_nodes[self.nodes[m]].append(m)
        if len(of_nodes) == 1:
            return machine.inside.rate(operation, count).time(size), 0.0
        local = max(map(len, of_nodes.values()))
        cards = len({self.cards[m] for m in next(iter(of_nodes.values()))})
        a_card = max(local / cards, self.crowd)  # other groups use the same cards
        seconds, crossing = machine.crossing_seconds(operation, count, local, size, a_card)
        if not machine.between_total:
            return seconds, 0.0
        shared = crossing * cards * len(of_nodes) / machine.between_total
        latency = machine.between.rate(operation, count).seconds
        return max(seconds, latency + shared), shared

    def _ended(self, number: int, key: Key, moved: list[tuple[float, float]], end: float) -> None:
        """Notes that a rank has ended an operation. Args: moved: when it moved data."""
        self.channel_free[number, key[0]] = end
        self.channel_next[number, key[0]] = key[1] + 1
        share, rank, before = self.machine.group_share, self.ranks[number], -inf
        for start, stop in sorted(moved) if share < 1.0 else ():
            start, before = max(start, before), max(stop, before)
            rank.slowed.append((start, before))
            late = (min(x, before) - max(begin, start) for begin, x in rank.busy[-64:])
            rank.stream += sum(max(0.0, each) for each in late) * (1 - share)

    def _summary(self) -> Timeline:
        ranks = self.ranks.values()
        middle, end = max(rank.ended for rank in ranks), max(rank.stream for rank in ranks)
        last = max(ranks, key=lambda rank: rank.ended), max(ranks, key=lambda rank: rank.stream)
        return Timeline(
            self._pass("forward", middle, last[0].waited["forward"]),
            self._pass("backward", end - middle, last[1].waited["backward"]),
            len(self.ranks),
        )

    def _pass(self, phase: Phase, seconds: float, waited: float) -> PassTime:
        sent: dict[int, dict[str, int]] = {rank: {} for rank in self.ranks}
        for (rank, of, link), size in self.sent.items():
            if of == phase:
                sent[rank][link] = size
        most = max(sent.values(), key=lambda links: sum(links.values()))
        return PassTime(seconds, waited, most)


def _cards(machine: Machine, nodes: Sequence[int]) -> tuple[int, ...]:
    """The network card of each rank, numbered over all nodes; neighbouring ranks share a card."""
    counts, before, found = Counter(nodes), Counter[int](), []
    for node in nodes:
        of_node = min(machine.cards_per_node, counts[node])
        found.append(node * machine.cards_per_node + before[node] * of_node // counts[node])
        before[node] += 1
    return tuple(found)


def _joined_sends(sends: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins the messages to one rank."""
    sizes: dict[int, int] = {}
    for target, size in sends:
        sizes[target] = sizes.get(target, 0) + size
    return list(sizes.items())
