"""A quick estimate of a candidate: what a few ranks compute and get, step by step.

It says in which order candidates are worth to be simulated, where a simulation of each would take
too long. No plan of all ranks is made, so that a thousand of them are no more work than a few.

B batch, S local tokens, H query heads, G KV heads, P ranks, U ranks of a team.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import NamedTuple

from megatron_cp_plugin.core.blocks.assembly import assemble
from megatron_cp_plugin.core.blocks.ranges import Numbers
from megatron_cp_plugin.core.comm import Operation
from megatron_cp_plugin.core.layout import Layout, Span, Spans, rows_of
from megatron_cp_plugin.core.pipeline import HeadGroup, together
from megatron_cp_plugin.core.placement import BlockPlacement, HeadPlacement, Placement
from megatron_cp_plugin.core.plans.plan import row_bytes
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask, Tile, plan_tiles
from megatron_cp_plugin.planner.machine import Machine, Pass
from megatron_cp_plugin.planner.simulate import PASSES, tile_seconds
from megatron_cp_plugin.planner.trace import Tile as Kernel

_INPUTS = {"forward": ("q",), "backward": ("q", "dout", "delta", "lse")}
_RESULTS = {"forward": ("out", "lse"), "backward": ("dq",)}
_Owners = tuple[tuple[int, ...], tuple[int, ...]]  # of queries and of keys


class _Tiles(NamedTuple):
    """Kernel calls of one kind in a step. Attributes: area: pairs of a query and a key."""

    rows: int
    columns: int
    area: float
    causal: bool


class _Met(NamedTuple):
    """What a block of queries and one of keys have to do. Attributes: rows, columns: touched."""

    tiles: tuple[_Tiles, ...]
    rows: int
    columns: int


class _Step(NamedTuple):
    """What a rank does in a step.

    Attributes: queries, keys: tokens of blocks that come for it, from its own node and from others.
    """

    tiles: tuple[_Tiles, ...]
    queries: tuple[int, int]
    keys: tuple[int, int]


_Steps = tuple[tuple[_Step, ...], list[int]]


class _Moved(NamedTuple):
    """Messages of a rank. Attributes: inside, between: bytes, in its node and to others."""

    seconds: float = 0.0
    inside: float = 0.0
    between: float = 0.0

    def plus(self, *others: _Moved) -> _Moved:
        return _Moved(*map(sum, zip(self, *others, strict=True)))


class Estimate(NamedTuple):
    """Of one pass, or of both.

    Attributes: computing: seconds of these. inside, between: bytes that a rank sends in its node,
        and to others. host: seconds in which the host launches all that. exposed: seconds in which
        messages are waited for.
    """

    seconds: float
    computing: float = 0.0
    inside: float = 0.0
    between: float = 0.0
    host: float = 0.0
    exposed: float = 0.0


@dataclass(frozen=True)
class Estimator:
    """Of candidates for one layer on one machine.

    Attributes: nodes: of each rank. peer: by copy engines. kernel: of the machine.
    """

    shape: Shape
    mask: Mask
    machine: Machine
    nodes: tuple[int, ...]
    peer: bool
    kernel: str

    def least(self, placements: Sequence[Placement]) -> float:
        """Seconds that forward and backward take at least, without much work."""
        return sum(self._least(*one) for one in zip(placements, PASSES, strict=True))

    def passes(self, placements: Sequence[Placement]) -> list[Estimate]:
        """Forward and backward."""
        return [self._pass(*one) for one in zip(placements, PASSES, strict=True)]

    def _least(self, placement: Placement, phase: Pass) -> float:
        """Seconds that one rank computes at least, or gets what it needs in."""
        members = 1
        if isinstance(placement, HeadPlacement):
            members, placement = placement.members, placement.between
        whole, most = together(placement.groups), 0.0
        links = (self.machine.inside.exchange, self.machine.between.exchange, self.machine.copy)
        fastest = max(link.bytes_per_second for link in links if link is not None)
        for rank in {0, placement.size - 1, *self._busiest(placement)}:
            queries, keys = self._owners(placement, rank)
            if len(queries) < placement.size and len(keys) < placement.size:
                # Of a grid, whose ranks get all blocks of their rows and columns.
                tokens = self.shape.batch * self.shape.seq_len // placement.size
                width = self._width(_INPUTS[phase], whole) * (len(queries) - 1)
                width += self._width(("k", "v"), whole) * (len(keys) - 1)
                most = max(most, tokens * width / fastest)
            elif 1 in (len(queries), len(keys)):
                most = max(most, self._own(placement, rank, len(queries) == 1, phase, members))
        return most

    def _own(
        self, placement: BlockPlacement, rank: int, of_queries: bool, phase: Pass, members: int
    ) -> float:
        """Seconds in which a rank computes all of its queries, or all of its keys."""
        key = placement.layout, placement.size, rank, of_queries, phase, members
        if key not in self._owns:
            own, every = self._spans(placement)(rank), (Span(0, self.shape.seq_len),)
            both = (own, every) if of_queries else (every, own)
            tiles = self._meet(*both).tiles
            self._owns[key] = self._computing(tiles, together(placement.groups), phase)
        return self._owns[key]

    @cached_property
    def _owns(self) -> dict[tuple[Layout, int, int, bool, Pass, int], float]:
        return {}

    def _pass(self, placement: Placement, phase: Pass) -> Estimate:
        found = self._passes.get((placement, phase))
        if found is None:
            found = self._new_pass(placement, phase)
            host = self.machine.host
            call = found.host + (host.call if phase == "forward" else host.call_backward)
            exposed = max(0.0, found.seconds - found.computing)
            found = found._replace(seconds=max(found.seconds, call), exposed=exposed)
            self._passes[placement, phase] = found
        return found

    @cached_property
    def _passes(self) -> dict[tuple[Placement, Pass], Estimate]:
        return {}

    def _new_pass(self, placement: Placement, phase: Pass) -> Estimate:
        if isinstance(placement, HeadPlacement):
            return self._by_heads(placement, phase)
        return self._by_blocks(placement, phase, 1)

    # -- blocks that meet on ranks

    def _by_blocks(self, placement: BlockPlacement, phase: Pass, members: int) -> Estimate:
        """Args: members: ranks of a team; 1: ranks are on their own."""
        ranks = {0, placement.size - 1, *self._busiest(placement)}
        one = self._gathered if placement.assembled else self._steps
        return max(one(placement, phase, rank, members) for rank in ranks)

    def _gathered(
        self, placement: BlockPlacement, phase: Pass, rank: int, members: int
    ) -> Estimate:
        spans, groups = self._spans(placement), placement.groups
        queries, keys = self._owners(placement, rank)
        width = max(sum(map(len, spans(owner))) for owner in (*queries, *keys))
        key = placement.layout, (queries, keys)
        if key not in self._assembled:
            q, k = (assemble([spans(one) for one in owners], width) for owners in (queries, keys))
            self._assembled[key] = self._meet(q.spans, k.spans).tiles
        sizes, coming, leaving = self._assembled[key], _Moved(), _Moved()
        computing = len(groups) * self._computing(sizes, groups[0], phase)
        whole = together(groups)
        inputs = self._width(_INPUTS[phase], whole), self._width(("k", "v"), whole)
        results = (
            self._width(_RESULTS[phase], whole, wide=placement.wide_partials),
            self._width(("dk", "dv"), whole) if phase == "backward" else 0,
        )
        for owners, width_in, width_out in zip((queries, keys), inputs, results, strict=True):
            if len(owners) > 1:
                tokens = self.shape.batch * width * (len(owners) - 1)
                gathered = self._collective("all_gather", owners, tokens * width_in)
                coming = coming.plus(gathered)
                if width_out:
                    scattered = self._collective("all_to_all", owners, tokens * width_out)
                    leaving = leaving.plus(scattered)
        host = len(groups) * self._launching(len(sizes), 4, phase)
        computed = Estimate(computing, computing, host=host)
        return self._pipeline(len(groups), computed, coming, leaving)

    def _busiest(self, placement: BlockPlacement) -> tuple[int, ...]:
        """Ranks whose queries see most, and whose keys are seen most.

        With a causal mask, or a full one, the first and the last rank have the least and the most.
        """
        if not self.mask.followed:
            return ()
        key = placement.layout, placement.size
        if key not in self._busiest_of:
            spans = self._spans(placement)
            work = [
                [
                    sum(int(one[span.start : span.stop : span.step].sum()) for span in spans(rank))
                    for rank in range(placement.size)
                ]
                for one in self._seen
            ]
            self._busiest_of[key] = tuple({one.index(max(one)) for one in work})
        return self._busiest_of[key]

    @cached_property
    def _busiest_of(self) -> dict[tuple[Layout, int], tuple[int, ...]]:
        return {}

    @cached_property
    def _seen(self) -> tuple[Numbers, Numbers]:
        """How many keys each query sees, and how many queries each key is seen by."""
        bands, tokens = self.mask.bands, self.shape.seq_len
        return bands.keys_of(tokens), bands.transposed.keys_of(tokens)

    def _owners(self, placement: BlockPlacement, rank: int) -> _Owners:
        """Whose queries, and whose keys, meet on a rank."""
        key = _whatever_groups(placement), rank
        if key not in self._owners_of:
            pairs = zip(*placement.pairs_of(rank), strict=True)
            queries, keys = (tuple(sorted(set(owners))) for owners in pairs)
            self._owners_of[key] = queries, keys
        return self._owners_of[key]

    @cached_property
    def _owners_of(self) -> dict[tuple[Hashable, int], _Owners]:
        return {}

    def _steps(self, placement: BlockPlacement, phase: Pass, rank: int, members: int) -> Estimate:
        kinds, order = self._of_rank(placement, rank, members)
        group, times = placement.groups[0], len(placement.groups)
        wide, backward = placement.wide_gradients, phase == "backward"
        of_query = self._width(_INPUTS[phase], group)
        of_query += self._width(_RESULTS[phase], group, wide=wide)
        of_key = self._width(("k", "v"), group)
        of_key += self._width(("dk", "dv"), group, wide=wide) if backward else 0
        lag = placement.lag if placement.relay else 0
        known: list[tuple[float, _Moved]] = []
        for step in kinds:
            moved = _Moved()
            for far in (False, True):
                size = step.queries[far] * of_query + step.keys[far] * of_key
                if size:
                    message = self._link(size * self.shape.batch, far, members, lag)
                    moved = moved.plus(message)
            tiles = ((tile.rows, tile.columns, tile.area, tile.causal) for tile in step.tiles)
            computing = self._computing(tiles, group, phase)
            if not self.peer:
                computing += min(computing, moved.seconds) * (1 - self.machine.group_share)
            known.append((computing, moved))
        now = came = before = 0.0
        each = [(computing, moved.seconds) for computing, moved in known]
        for _ in placement.groups:
            for kind in order:
                computing, coming = each[kind]
                # It comes while the step before computes, and no sooner.
                if coming:
                    came = (before if before > came else came) + coming
                before = came if came > now else now
                now = before + computing
        last = max((moved.seconds for _, moved in known), default=0.0)
        computed = inside = between = host = 0.0
        for kind, count in Counter(order).items():
            computing, moved = known[kind]
            computed += count * times * computing
            inside += count * times * moved.inside
            between += count * times * moved.between
            messages = 1 + backward if moved.seconds else 0
            host += count * times * self._launching(len(kinds[kind].tiles), messages, phase)
        return Estimate(now + last * backward, computed, inside, between, host)

    def _of_rank(self, placement: BlockPlacement, rank: int, members: int) -> _Steps:
        """Steps that differ, and which of them comes when."""
        key = _whatever_groups(placement), rank, members
        if key not in self._known:
            kinds: dict[_Step, int] = {}
            steps = self._place(placement, rank, members)
            order = [kinds.setdefault(step, len(kinds)) for step in steps]
            self._known[key] = tuple(kinds), order
        return self._known[key]

    def _place(self, placement: BlockPlacement, rank: int, members: int) -> Iterator[_Step]:
        tiles: defaultdict[int, list[_Tiles]] = defaultdict(list)
        moved: defaultdict[int, list[list[int]]] = defaultdict(lambda: [[0, 0], [0, 0]])
        seen: set[tuple[int, int]] = set()
        spans = self._spans(placement)
        for pair in placement.pairs_of(rank):
            for place in placement.place(*pair):
                if place.rank != rank:
                    continue
                q, k = (spans(owner) for owner in pair)
                if place.part != (0, 1):
                    tokens, (index, count) = sum(map(len, q)), place.part
                    q = rows_of(q, tokens * index // count, tokens * (index + 1) // count)
                found = self._meet(q, k)
                if not found.tiles:
                    continue
                tiles[place.step] += found.tiles
                for side, owner in enumerate(pair):
                    if owner == rank or (side, owner) in seen:
                        continue
                    seen.add((side, owner))
                    far = self.nodes[owner * members] != self.nodes[rank * members]
                    if placement.relay:
                        rows = sum(map(len, spans(owner)))
                    else:
                        rows = found.columns if side else found.rows
                    moved[place.step][side][far] += rows
        for number in sorted(tiles):
            (q_near, q_far), (k_near, k_far) = moved[number]
            yield _Step(tuple(tiles[number]), (q_near, q_far), (k_near, k_far))

    def _meet(self, queries: Spans, keys: Spans) -> _Met:
        """Blocks that lie alike to each other have the same tiles, wherever they are."""
        key = self._places(queries, keys)
        found = self._mets.get(key)
        if found is None:
            tiles = plan_tiles(queries, keys, self.mask, rectangular=True)
            rows, columns = (
                max(edge.stop for edge in edges) - min(edge.start for edge in edges) if edges else 0
                for edges in ([tile.q for tile in tiles], [tile.kv for tile in tiles])
            )
            found = self._mets[key] = _Met(tuple(map(_sizes, tiles)), rows, columns)
        return found

    def _places(self, queries: Spans, keys: Spans) -> Hashable:
        """What tiles depend on: lengths, and distances as far as the mask tells them apart."""
        mask, steps = self.mask, {span.step for span in (*queries, *keys)}
        if mask.documents or mask.slices or len(steps) > 1:
            return queries, keys
        (step,), window = steps, mask.window or 0
        rows = [_extent(q) for q in queries]
        places = [step, *(count for _, count in rows)]
        for k in keys:
            start, columns = _extent(k)
            places.append(columns)
            for first, count in rows:
                places.append(max(-count, min(columns, (first - start) // step)))
                if window:
                    places.append(max(-count, min(columns, (first - start - window) // step)))
        return tuple(places)

    @cached_property
    def _mets(self) -> dict[Hashable, _Met]:
        return {}

    @cached_property
    def _assembled(self) -> dict[tuple[Layout, _Owners], tuple[_Tiles, ...]]:
        return {}

    @cached_property
    def _known(self) -> dict[tuple[Hashable, int, int], _Steps]:
        return {}

    def _link(self, size: float, far: bool, members: int, lag: int) -> _Moved:
        """A message that all ranks get at a time.

        Args: far: from another node. lag: of a relay; 0: it comes from its owner.
        """
        machine = self.machine
        if self.peer and machine.copy is not None:
            return _Moved(machine.copy.time(size), size)
        if len(set(self.nodes)) == 1 or not (far or lag):
            return _Moved(machine.inside.exchange.time(size), size)
        if lag == 1:
            return _Moved(self._between(size, members), 0.0, size)
        if lag:  # once to each node, during so many steps
            slow = self._between(size, self._local) / lag
            fast = machine.inside.exchange.time(size)
            return _Moved(max(slow, fast), size - size / lag, size / lag)
        return _Moved(self._between(size, self._local), 0.0, size)

    def _between(self, size: float, senders: float) -> float:
        """Args: size: of a message. senders: ranks of a node that send one at a time."""
        machine = self.machine
        cards = min(machine.cards_per_node, self._local)
        seconds = machine.between.exchange.time(size * max(1.0, senders / cards))
        if machine.between_total:
            total = size * senders * len(set(self.nodes))
            seconds = max(seconds, total / machine.between_total)
        return seconds

    # -- heads that are exchanged

    def _by_heads(self, placement: HeadPlacement, phase: Pass) -> Estimate:
        shape, members = self.shape, placement.members
        between, count = placement.between, len(placement.exchanges)
        computing = self._by_blocks(between, phase, members)
        launching = count * self._launching(0, 4, phase)
        computing = computing._replace(host=computing.host + launching)
        share = together(between.groups)
        names = _INPUTS[phase] if phase == "forward" or not placement.keep else ("dout",)
        coming = self._width(names, share)
        leaving = self._width(_RESULTS[phase], share)
        if phase == "forward" or not placement.keep:
            coming += self._width(("k", "v"), share)
        if phase == "backward":
            leaving += self._width(("dk", "dv"), share)
        tokens = shape.batch * shape.seq_len // len(self.nodes) * (members - 1)
        team = range(members)
        return self._pipeline(
            count,
            computing,
            self._collective("all_to_all", team, tokens * coming),
            self._collective("all_to_all", team, tokens * leaving),
        )

    # -- parts of both

    def _launching(self, kernels: int, messages: int, phase: Pass) -> float:
        """Seconds of the host. Args: messages: exchanges, each with what puts it in place."""
        host = self.machine.host
        kernel = host.kernel if phase == "forward" else host.kernel_backward
        message = (host.peer if self.peer else host.group) + 3 * host.operation
        return kernels * kernel + messages * message

    def _pipeline(
        self, count: int, computed: Estimate, coming: _Moved, leaving: _Moved
    ) -> Estimate:
        """Groups of which one is computed while the next comes and the one before leaves."""
        one, moving = computed.seconds / count, (coming.seconds + leaving.seconds) / count
        slower = min(one, moving) * (1 - self.machine.group_share) if count > 1 else 0.0
        one += slower
        seconds = one + moving + (count - 1) * max(one, moving)
        return Estimate(
            seconds,
            computed.computing + slower * count,
            computed.inside + coming.inside + leaving.inside,
            computed.between + coming.between + leaving.between,
            computed.host,
        )

    def _collective(self, operation: Operation, members: Iterable[int], size: float) -> _Moved:
        """Args: members: ranks. size: bytes that a rank sends."""
        machine, ranks = self.machine, list(members)
        on = Counter(self.nodes[rank] for rank in ranks)
        mates, count = max(on.values()), len(ranks)
        if count == 1:
            return _Moved()
        inside = size * (mates - 1) / (count - 1)
        if len(on) == 1:
            return _Moved(machine.inside.rate(operation, mates).time(size), inside)
        if operation == "all_to_all":
            crossing = (size - inside) * self._local
        else:
            crossing = size * self._local / mates  # rings through all nodes
        rate = machine.between.rate(operation, count)
        seconds = rate.time(crossing / min(machine.cards_per_node, self._local))
        if machine.between_total:
            total = crossing * len(set(self.nodes))
            seconds = max(seconds, rate.seconds + total / machine.between_total)
        return _Moved(seconds, inside, size - inside)

    def _computing(
        self, tiles: Iterable[tuple[int, int, float, bool]], group: HeadGroup, phase: Pass
    ) -> float:
        shape = self.shape
        heads = group.heads, group.kv_heads, shape.head_dim, shape.value_dim
        kernels = (
            Kernel(phase, shape.batch, rows, columns, area, *heads, causal)
            for rows, columns, area, causal in tiles
        )
        seconds = sum(tile_seconds(self.machine, self.kernel, kernel) for kernel in kernels)
        return seconds * self.machine.ranks_per_gpu

    def _width(self, names: Iterable[str], group: HeadGroup, *, wide: bool = False) -> int:
        """Bytes of a token."""
        return sum(row_bytes(name, self.shape, group, wide) for name in names)

    def _spans(self, placement: BlockPlacement) -> Callable[[int], Spans]:
        layout = placement.layout.within(self.mask.followed)
        if (layout, placement.size) not in self._spans_of:
            self._spans_of[layout, placement.size] = cache(
                lambda owner: layout.spans(owner, placement.size, self.shape.seq_len)
            )
        return self._spans_of[layout, placement.size]

    @cached_property
    def _spans_of(self) -> dict[tuple[Layout, int], Callable[[int], Spans]]:
        return {}

    @cached_property
    def _local(self) -> int:
        """Ranks of a node, at most."""
        return max(Counter(self.nodes).values())


def _extent(span: Span) -> tuple[int, int]:
    """Where it starts, and how many tokens it has."""
    start = span.start
    return start, max(0, -((start - span.stop) // span.step))


def _whatever_groups(placement: BlockPlacement) -> Hashable:
    """Equal of placements that differ in their groups of heads only."""
    others = (getattr(placement, one.name) for one in fields(placement) if one.name != "groups")
    return type(placement), *others


def _sizes(tile: Tile) -> _Tiles:
    rows, columns = (edge.stop - edge.start for edge in (tile.q, tile.kv))
    return _Tiles(rows, columns, float(tile.area), tile.causal)
