"""A placement: what an algorithm is. From it, a mask and a length follow all plans.

A placement says which rank computes which queries against which keys, in which step, and from
whom it gets what it does not own. What travels, and when, follows.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar, Literal, NamedTuple

from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.documents import Spans
from megatron_cp_plugin.core.layout import Layout, rows_of
from megatron_cp_plugin.core.pipeline import HeadGroup
from megatron_cp_plugin.core.plan import OF_ROWS, RESULTS, Block, Compute, Kept, Move, Plan, Tensors
from megatron_cp_plugin.core.tiles import Mask, plan_tiles, sees

Side = Literal["queries", "keys"]


class Problem(NamedTuple):
    """What a plan depends on beside the placement.

    Attributes: seq_len: global. rectangular: as in `plan_tiles`.
    """

    seq_len: int
    mask: Mask
    phase: Phase
    rectangular: bool = True


class Placement(ABC):
    """An algorithm in one pass, for given numbers of ranks and heads; hashable."""

    @abstractmethod
    def derive(self, problem: Problem) -> Plan:
        """The plan of one pass; see `plan_of`."""


@lru_cache(maxsize=64)
def plan_of(placement: Placement, problem: Problem) -> Plan:
    """The plan of one pass, made once: at short lengths a step of training is bound by the host."""
    return placement.derive(problem)


class Place(NamedTuple):
    """Where and when a block of queries meets a block of keys.

    Attributes: part: (i, n): only the i-th of n parts of the query rows.
    """

    host: int
    step: int
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class BlockPlacement(Placement):
    """Pairs of the ranks' blocks, each pair on one rank; subclasses say where and when.

    Attributes:
        layout: of the tokens. size: number of ranks. groups: of heads, that are computed one after
            another in the same way. wide_partials, wide_gradients: partial outputs, and sums of
            gradients, travel in float32, not in the model's dtype.
        relay: a block goes from one rank that needs it to the next, its sums behind it; otherwise
            from its owner straight to each, and results straight back.
        masked: only what the mask needs travels; otherwise every block goes wherever it has a
            place.
        assembled: by collective operations. All that a rank computes in one step is one block of
            queries and one of keys; blocks are padded to equal lengths; tensors of one kind travel
            as one; lse and delta of all heads at once.
    """

    layout: Layout
    size: int
    groups: tuple[HeadGroup, ...]
    wide_partials: bool = False
    wide_gradients: bool = False
    relay: ClassVar[bool] = False
    masked: ClassVar[bool] = True
    assembled: ClassVar[bool] = False

    @abstractmethod
    def place(self, query: int, key: int) -> Iterable[Place]:
        """Where and when the queries of one rank meet the keys of another, whatever the mask."""

    def key_home(self, owner: int) -> int:
        """The rank that has a block of keys before any computation; others get it from there."""
        return owner

    def derive(self, problem: Problem) -> Plan:
        """See Placement.derive."""
        return _Derivation(self, problem).plan()


@dataclass
class _Visit:
    """What one rank does with a block that it does not have at home.

    Attributes: first, last: steps. start, stop: rows that it needs; none if it needs nothing.
    """

    rank: int
    first: int
    last: int
    start: int
    stop: int

    def add(self, step: int, start: int, stop: int) -> None:
        self.first, self.last = min(self.first, step), max(self.last, step)
        if start < stop:
            empty = self.start == self.stop
            self.start = start if empty else min(self.start, start)
            self.stop = stop if empty else max(self.stop, stop)


class _Cell(NamedTuple):
    """A pair of blocks that has a place; start, stop: rows of the queries."""

    place: Place
    query: int
    key: int
    start: int
    stop: int


class _Derivation:
    """One plan in the making: of one group of heads first, then of all."""

    def __init__(self, placement: BlockPlacement, problem: Problem) -> None:
        self.placement, self.problem = placement, problem
        size, layout = placement.size, placement.layout.within(problem.mask.documents)
        self.spans = tuple(layout.spans(rank, size, problem.seq_len) for rank in range(size))
        self.lengths = tuple(sum(map(len, spans)) for spans in self.spans)
        self.width = max(self.lengths)
        self.all_heads = _all_of(placement.groups)
        self.cells: list[_Cell] = []
        self.visits: dict[tuple[Side, int], dict[int, _Visit]] = {}
        for query in range(size):
            for key in range(size):
                for place in placement.place(query, key):
                    self._add(query, key, place)
        for visits in self.visits.values():
            self._cut(visits)
        found = [v.last for visits in self.visits.values() for v in visits.values()]
        self.steps = 1 + max([*found, *(cell.place.step for cell in self.cells)], default=0)

    def _add(self, query: int, key: int, place: Place) -> None:
        index, count = place.part
        tokens = self.lengths[query]
        start, stop = tokens * index // count, tokens * (index + 1) // count
        queries, keys = rows_of(self.spans[query], start, stop), self.spans[key]
        masked = self.placement.masked
        needed = not masked or sees(queries, keys, self.problem.mask)
        if needed:
            self.cells.append(_Cell(place, query, key, start, stop))
        touched = (start, stop), (0, self.lengths[key])
        if needed and masked and not self.placement.relay:
            touched = _touched(queries, keys, self.problem, start)
        if place.host != query:
            self._visit("queries", query, place, touched[0] if needed else (0, 0))
        if place.host != self.placement.key_home(key):
            self._visit("keys", key, place, touched[1] if needed else (0, 0))

    def _visit(self, side: Side, owner: int, place: Place, rows: tuple[int, int]) -> None:
        visits = self.visits.setdefault((side, owner), {})
        if place.host not in visits:
            visits[place.host] = _Visit(place.host, place.step, place.step, 0, 0)
        visits[place.host].add(place.step, *rows)

    def _cut(self, visits: dict[int, _Visit]) -> None:
        """Leaves out what the mask makes needless; a relay goes on to the last that needs it."""
        if not self.placement.masked:
            return
        needed = [visit.first for visit in visits.values() if visit.start < visit.stop]
        for visit in list(visits.values()):
            relayed = self.placement.relay and visit.first <= max(needed, default=-1)
            if visit.start == visit.stop and not relayed:
                del visits[visit.rank]

    def plan(self) -> Plan:
        placement, problem = self.placement, self.problem
        templates = [*self._inputs(), *self._results()]
        computes = list(self._assembled() if placement.assembled else self._computes())
        moves: list[Move] = [*self._to_key_homes()]
        for index, group in enumerate(placement.groups):
            offset = index * self.steps
            for move in templates:
                shared = move.of_keys and not (group.last if move.result else group.first)
                once = move.messages[0][0] in OF_ROWS and placement.assembled
                if not shared and not (once and index):
                    heads = self.all_heads if once else group
                    moves.append(
                        move._replace(
                            posted=move.posted + offset, needed=move.needed + offset, heads=heads
                        )
                    )
        moves += self._from_key_homes(len(placement.groups) * self.steps)
        return Plan(
            problem.phase,
            problem.mask,
            problem.rectangular,
            self.spans,
            len(placement.groups) * self.steps,
            self.all_heads,
            tuple(
                compute._replace(step=compute.step + index * self.steps, heads=group)
                for index, group in enumerate(placement.groups)
                for compute in computes
            ),
            tuple(moves),
            self._kept(),
        )

    def _computes(self) -> Iterator[Compute]:
        for place, query, key, start, stop in self.cells:
            queries = self._block("queries", query, place.host, start, stop)
            keys = self._block("keys", key, place.host, 0, self.lengths[key])
            yield Compute(place.step, place.host, queries, keys, self.all_heads)

    def _block(self, side: Side, owner: int, host: int, start: int, stop: int) -> Block:
        """The rows with which a host computes, no more than it has."""
        visit = self.visits.get((side, owner), {}).get(host)
        if visit is not None:
            start, stop = max(start, visit.start), min(stop, visit.stop)
        return Block((owner,), start, stop)

    def _assembled(self) -> Iterator[Compute]:
        """All cells of a rank and step as one computation."""
        owners: dict[tuple[int, int], tuple[set[int], set[int]]] = {}
        for (host, step, _), query, key, *_ in self.cells:
            queries, keys = owners.setdefault((step, host), (set(), set()))
            queries.add(query)
            keys.add(key)
        for (step, host), (queries, keys) in owners.items():
            q_block, k_block = self._joined(queries), self._joined(keys)
            yield Compute(step, host, q_block, k_block, self.all_heads)

    def _joined(self, owners: set[int]) -> Block:
        return Block(tuple(sorted(owners)), 0, sum(self.lengths[owner] for owner in owners))

    def _inputs(self) -> Iterator[Move]:
        for (side, owner), visits in self.visits.items():
            for messages in self._messages(side, results=False):
                source = self._home(side, owner)
                since: int | None = None  # from when a relay's last holder has the block
                for visit in sorted(visits.values(), key=lambda visit: visit.first):
                    posted = visit.first - 1
                    if self.placement.relay:
                        posted = 0 if since is None else since
                    yield self._move(
                        posted, visit.first, source, visit.rank, messages, owner, visit
                    )
                    if self.placement.relay:
                        source, since = visit.rank, visit.first

    def _results(self) -> Iterator[Move]:
        for (side, owner), visits in self.visits.items():
            home = self._home(side, owner)
            ordered = sorted(visits.values(), key=lambda visit: visit.first)
            for messages in self._messages(side, results=True):
                posted = -1
                for index, visit in enumerate(ordered):
                    target, needed = home, visit.last + 1
                    posted = visit.last
                    if self.placement.relay and index + 1 < len(ordered):
                        target, needed = ordered[index + 1].rank, ordered[index + 1].last
                    yield self._move(posted, needed, visit.rank, target, messages, owner, visit)

    def _move(
        self,
        posted: int,
        needed: int,
        source: int,
        target: int,
        messages: tuple[Tensors, ...],
        owner: int,
        visit: _Visit,
    ) -> Move:
        block = Block((owner,), visit.start, visit.stop)
        tokens = visit.stop - visit.start
        if self.placement.assembled:
            tokens = self.width
        elif self.placement.relay:
            block, tokens = Block((owner,), 0, self.lengths[owner]), self.lengths[owner]
        wide = messages[0][0] in self._wide
        return Move(
            posted, needed, source, target, messages, block, tokens, self.all_heads, 0, wide
        )

    @property
    def _wide(self) -> Tensors:
        partials = ("out",) if self.placement.wide_partials else ()
        return (*partials, "dq", "dk", "dv") if self.placement.wide_gradients else partials

    def _home(self, side: Side, owner: int) -> int:
        return owner if side == "queries" else self.placement.key_home(owner)

    def _messages(self, side: Side, *, results: bool) -> Iterator[tuple[Tensors, ...]]:
        """What travels of a block, in one go each: the tensors by message."""
        forward, assembled = self.problem.phase == "forward", self.placement.assembled
        if results and forward:
            if side == "queries":
                yield (("out",), ("lse",))
        elif results:
            yield (("dq",),) if side == "queries" else _packed(("dk", "dv"), assembled)
        elif side == "keys":
            yield _packed(("k", "v"), assembled)
        elif forward:
            yield (("q",),)
        elif assembled:
            yield (("lse", "delta"),)
            yield (("q", "dout"),)
        else:
            yield (("q",), ("dout",), ("delta",), ("lse",))

    def _to_key_homes(self) -> Iterator[Move]:
        """Keys and values go home before anything is computed; for the backward they are there."""
        if self.problem.phase == "forward":
            for owner, home in self._absent():
                yield self._whole(-2, -1, owner, home, (("k",), ("v",)), owner)

    def _from_key_homes(self, steps: int) -> Iterator[Move]:
        if self.problem.phase == "backward":
            for owner, home in self._absent():
                yield self._whole(steps, steps + 1, home, owner, (("dk",), ("dv",)), owner)

    def _kept(self) -> tuple[Kept, ...]:
        if self.problem.phase == "forward":
            return ()
        return tuple(Kept(home, ("k", "v"), (owner,)) for owner, home in self._absent())

    def _absent(self) -> Iterator[tuple[int, int]]:
        for owner in range(self.placement.size):
            home = self.placement.key_home(owner)
            if home != owner:
                yield owner, home

    def _whole(
        self,
        posted: int,
        needed: int,
        source: int,
        target: int,
        messages: tuple[Tensors, ...],
        owner: int,
    ) -> Move:
        tokens = self.lengths[owner]
        block = Block((owner,), 0, tokens)
        return Move(posted, needed, source, target, messages, block, tokens, self.all_heads)


def _touched(
    queries: Spans, keys: Spans, problem: Problem, start: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows of the whole block of queries, of which `start` come before, and of the keys."""
    tiles = plan_tiles(queries, keys, problem.mask, rectangular=problem.rectangular)
    return (
        (start + min(tile.q.start for tile in tiles), start + max(tile.q.stop for tile in tiles)),
        (min(tile.kv.start for tile in tiles), max(tile.kv.stop for tile in tiles)),
    )


def _packed(tensors: Tensors, assembled: bool) -> tuple[Tensors, ...]:
    return (tensors,) if assembled else tuple((name,) for name in tensors)


def _all_of(groups: tuple[HeadGroup, ...]) -> HeadGroup:
    """All heads of some groups as one."""
    q, kv = groups[-1].q.stop, groups[-1].kv.stop
    return HeadGroup(slice(0, q), slice(0, kv), first=True, last=True)


@dataclass(frozen=True)
class HeadPlacement(Placement):
    """Teams of consecutive ranks split the heads; `between` places the blocks of whole teams.

    All tokens of a team come together by all-to-alls inside it, for each rank's share of the
    heads, and results go back the same way, one group of heads after another.

    Attributes:
        layout: of the single ranks. members: ranks of a team. between: of the teams, for one share
            of the heads; its groups are those that it computes one after another.
        exchanges: groups of heads that are exchanged at a time, each with the number of groups of
            `between` in it. keep: q, k, v and lse stay exchanged for the backward.
    """

    layout: Layout
    members: int
    between: BlockPlacement
    exchanges: tuple[tuple[HeadGroup, int], ...]
    keep: bool

    def derive(self, problem: Problem) -> Plan:
        """See Placement.derive."""
        inner = self.between.derive(problem)
        size, layout = inner.size * self.members, self.layout.within(problem.mask.documents)
        spans = tuple(layout.spans(rank, size, problem.seq_len) for rank in range(size))
        lengths = tuple(sum(map(len, own)) for own in spans)
        return Plan(
            problem.phase,
            problem.mask,
            problem.rectangular,
            spans,
            inner.steps,
            inner.heads,
            tuple(self._computes(inner)),
            (*self._exchanged(problem.phase, inner, lengths), *self._moved(inner)),
            self._kept(problem.phase, inner.size, inner.heads),
            self.members,
        )

    def _team(self, owners: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(o * self.members + share for o in owners for share in range(self.members))

    def _computes(self, inner: Plan) -> Iterator[Compute]:
        for compute in inner.computes:
            queries, keys = (
                block._replace(owners=self._team(block.owners))
                for block in (compute.queries, compute.keys)
            )
            for share in range(self.members):
                host = compute.host * self.members + share
                yield compute._replace(host=host, queries=queries, keys=keys, share=share)

    def _moved(self, inner: Plan) -> Iterator[Move]:
        for move in inner.moves:
            block = move.block._replace(owners=self._team(move.block.owners))
            for share in range(self.members):
                source, target = (
                    rank * self.members + share for rank in (move.source, move.target)
                )
                yield move._replace(source=source, target=target, block=block, share=share)

    def _exchanged(self, phase: Phase, inner: Plan, lengths: tuple[int, ...]) -> Iterator[Move]:
        """The all-to-alls: those of the next group of heads while one is computed."""
        each = inner.steps // len(self.between.groups)
        returns = int(any(move.result for move in inner.moves))
        starts = list(accumulate((count * each for _, count in self.exchanges), initial=0))
        for index, (group, _) in enumerate(self.exchanges):
            # Sums that go round between the teams come home one step after the last computation.
            start, last = starts[index], starts[index + 1] - 1 + returns
            before = starts[index - 1] if index else -1
            after = max(last + 1, starts[index + 2] - 1 if index + 2 < len(starts) else 0)
            for messages in self._inputs(phase, group, index):
                heads = inner.heads if messages[0][0] in OF_ROWS else group
                yield from self._all_to_all(before, start, messages, heads, lengths)
            for messages in _head_results(phase, group):
                yield from self._all_to_all(last, after, messages, group, lengths)

    def _inputs(self, phase: Phase, group: HeadGroup, index: int) -> Iterator[tuple[Tensors, ...]]:
        again = phase == "forward" or not self.keep
        if phase == "backward":
            if not index:
                yield (("delta",), ("lse",)) if again else (("delta",),)
            yield (("dout",),)
        if again:
            yield (("q",),)
            if group.first:
                yield (("k",), ("v",))

    def _all_to_all(
        self,
        posted: int,
        needed: int,
        messages: tuple[Tensors, ...],
        heads: HeadGroup,
        lengths: tuple[int, ...],
    ) -> Iterator[Move]:
        back = messages[0][0] in RESULTS
        width = max(lengths)
        for source in range(len(lengths)):
            first = source // self.members * self.members
            for target in range(first, first + self.members):
                owner, share = (target, source - first) if back else (source, target - first)
                if source != target:
                    block = Block((owner,), 0, lengths[owner])
                    yield Move(posted, needed, source, target, messages, block, width, heads, share)

    def _kept(self, phase: Phase, teams: int, heads: HeadGroup) -> tuple[Kept, ...]:
        if phase == "forward" or not self.keep:
            return ()
        return tuple(
            Kept(rank, ("q", "k", "v", "lse"), self._team((rank // self.members,)), share)
            for rank in range(teams * self.members)
            for share in (rank % self.members,)
        )


def _head_results(phase: Phase, group: HeadGroup) -> Iterator[tuple[Tensors, ...]]:
    if phase == "forward":
        yield (("out",), ("lse",))
        return
    yield (("dq",),)
    if group.last:
        yield (("dk",), ("dv",))
