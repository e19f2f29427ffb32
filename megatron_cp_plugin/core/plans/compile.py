"""Compiles a placement into a plan: of all ranks, or of one without looking at what others do.

A placement says where pairs of blocks meet. So it determines which ranks a block reaches in which
steps, whatever the mask: these ranks are the stops of the block's line. A mask removes stops from
the line and rows from the block: the rest is the block's route. Each hop of a route becomes a move
of the plan: hops of inputs lead from the block's owner, hops of results lead to it. A rank's part
of the plan has the hops that begin or end at the rank.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, islice, pairwise, product
from operator import itemgetter
from typing import NamedTuple

from megatron_cp_plugin.core.blocks.visible_rows import rows_met, rows_of_parts
from megatron_cp_plugin.core.call import together
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.layout import TokenMap
from megatron_cp_plugin.core.placement import BlockPlacement, Place, Placement
from megatron_cp_plugin.core.plans.plan import (
    KEYS,
    MERGED_SLOTS,
    PER_HEAD,
    QUERIES,
    Block,
    Compute,
    Kept,
    Move,
    Plan,
    Side,
    TensorNames,
    Time,
)
from megatron_cp_plugin.core.plans.team_heads import TeamHeads
from megatron_cp_plugin.core.ranges import (
    Rows,
    between,
    clipped,
    longest_gap,
    row_count,
    rows_of_all,
    union,
)
from megatron_cp_plugin.core.tiles import Mask

# Values that stand in place of the number of a stop:
_HOME = -1  # the rank where inputs start, or where results end
_NOWHERE = -2  # a rank that is no stop of the block

# Rows of others, in blocks of the longest rank, that a merged step may need: they take memory.
_MOST_ROWS = 2


@lru_cache(maxsize=64)
def plan_of(
    placement: Placement,
    seq_len: int,
    mask: Mask,
    phase: Phase,
    rank: int | None = None,
    near: int = 1,
) -> Plan:
    """The plan of one pass. It is made once, because the host limits training steps of short
    sequences.

    Args:
        rank: the plan has only this rank's part: its computations, sends and receives, and all
            ranks' exchanges before the first step and after the last. None: the plan of all ranks.
        near: with the parts of all ranks of its node, of this number; 1: of the rank alone.
    """
    if isinstance(placement, BlockPlacement):
        returning = phase == "backward" and placement.retained_by(0) is not None
        routes = _routes(placement, seq_len, mask, rank, near, returning)
        return _Writer(routes, phase).plan()
    team = None if rank is None else rank // placement.members
    of_teams = plan_of(placement.of_teams, seq_len, mask, phase, team)
    return TeamHeads(placement, of_teams, rank).plan()


# A block of queries and a block of keys, by their owners, and the place where they meet.
_Pair = tuple[int, int, Place]


class _Hop(NamedTuple):
    """One hop of a block, or of some of its rows, between two ranks. Attributes: as of `Move`."""

    posted: int
    needed: int
    source: int
    target: int
    block: Block


class _Line:
    """The stops of a block: all ranks that it reaches, whatever the mask, in the order of their
    first steps. The number of a stop is its index in that order.

    Ranks and owners are distances from an origin: the block's owner if the placement is cyclic,
    else rank 0.

    Attributes:
        ranks: the rank of each stop.
        number: the number of a stop, by its rank.
        first, last: steps in which each stop first and last computes with the block; the last entry
            is step 0, in which the block leaves its home.
        met: (number of a stop, the place) of each place where another block meets this one, by the
            distance of the owner of that other block.
        stop: the number of the stop where another block meets this one, by the same distance; empty
            unless each stop meets one other block, and all its rows.
    """

    def __init__(
        self, size: int, meetings: Iterable[tuple[int, Place]], last: int | None = None
    ) -> None:
        """Args:
        meetings: distances of the owners of other blocks, and where they meet this one.
        last: the step after which all stops send their results; None: each after its last.
        """
        steps: dict[int, list[int]] = {}
        found = list(meetings)
        for _, place in found:
            steps.setdefault(place.rank, []).append(place.step)
        self.ranks = sorted(steps, key=lambda rank: min(steps[rank]))
        self.first = [*(min(steps[rank]) for rank in self.ranks), 0]
        self.last = [max(steps[rank]) if last is None else last for rank in self.ranks]
        self.number = {rank: number for number, rank in enumerate(self.ranks)}
        self.met: list[list[tuple[int, Place]]] = [[] for _ in range(size)]
        for other, place in found:
            self.met[other].append((self.number[place.rank], place))
        simple = len(found) == len(self.ranks) == sum(map(bool, self.met)) and all(
            place.whole for _, place in found
        )
        self.stop = [met[0][0] if met else _NOWHERE for met in self.met] if simple else []


@lru_cache(maxsize=64)  # the same under all masks
def _cyclic_lines(placement: BlockPlacement) -> tuple[list[tuple[int, Place]], list[_Line]]:
    """Owners and places of the queries that meet the keys of rank 0; the line of every block of
    queries, and of every block of keys.
    """
    size = placement.size
    places = [(t, place) for t in range(size) for place in placement.place(t, 0)]
    of_queries = [
        (-t % size, place._replace(rank=(place.rank - t) % size))
        for t, place in places
        if place.rank != t
    ]
    of_keys = [(t, place) for t, place in places if place.rank]
    return places, [_Line(size, of_queries), _Line(size, of_keys)]


class _Chain(NamedTuple):
    """Consecutive stops, beginning at `end`: inputs go out along them, results come in.

    Attributes:
        stops: their numbers.
        end: the stop, or home, from which inputs come to the first of them; home for results.
        step: in which `end` has the inputs, or needs the results.
        near: they are in the node segment of the block's source, or home.
    """

    stops: Sequence[int]
    end: int
    step: int
    near: bool = True


class _Route(NamedTuple):
    """The part of a block's line that a mask leaves, for its inputs or for the results.

    Attributes:
        results: results go from the stops to `end`; otherwise inputs go from `end` to the stops.
        origin: the rank from which the line's distances count.
        end: the rank that has the inputs at first, or to which the results go.
        needed: the rows that stops compute with, by their numbers, ascending.
        stops: numbers of the stops that the block reaches.
        gap: see `longest_gap`.
        whole: rows that come to every stop; None: those that the stop and the stops behind it need.
    """

    results: bool
    owner: int
    origin: int
    end: int
    line: _Line
    needed: Mapping[int, Rows]
    stops: Sequence[int]
    gap: int
    whole: Rows | None

    @property
    def steps(self) -> Sequence[int]:
        """Steps of the stops; the last entry is the step of `end`."""
        return self.line.last if self.results else self.line.first

    def rank_at(self, stop: int) -> int:
        """The rank of a stop, by its number."""
        size = len(self.line.met)
        return self.end if stop == _HOME else (self.origin + self.line.ranks[stop]) % size


class _Routes:
    """Which blocks meet where under a mask, and how they get there; the same in both passes.

    Attributes:
        masked: pairs of blocks that do not see each other are left out.
        selective: rows that do not see the other block of a pair are left out too.
        merging: see `_merged`.
        parts: rows of both blocks that meet, of pairs with a part of the query rows, by the owners
            of queries and of keys and the bounds of the part; none if not `masked`.
        segments: the node segment of each rank; None: all ranks are in one.
        sources: the rank from which others get a block of keys, by the block's owner.
        pairs: pairs that are computed, those of `rank` only if it is given.
        once: see Plan.
        steps: number of steps of one group of heads, the same on all ranks.
        received: rows of a block that a rank has, by side, owner and rank.
        retained: rows of a block of keys that a rank keeps for the backward, by rank and owner.
        times: (posted, needed) of all their sends, likewise; only if the plan is of one rank.
    """

    def __init__(
        self,
        placement: BlockPlacement,
        seq_len: int,
        mask: Mask,
        rank: int | None,
        near: int,
        returning: bool,
    ) -> None:
        """Finds the pairs, and the hops of both passes.

        Args:
            near: as of `plan_of`.
            returning: blocks of keys come from the ranks that retained them in the forward.
        """
        self.placement, self.mask, self.rank, self.size = placement, mask, rank, placement.size
        self.returning = returning
        self.tokens = placement.layout.for_documents(mask.resolved), self.size, seq_len
        self.spans = TokenMap.of(*self.tokens)
        self.lengths = self.spans.lengths
        special = bool(mask.special)
        self.masked = placement.masked or (special and not (self.spans.gaps or placement.assembled))
        # Whole blocks need no packing; in a relay few blocks would be shorter.
        self.selective = self.masked and (special or not placement.relay)
        # Each step of other masks has equal work, and a block of keys of its own.
        self.merging = special and self.masked and not (placement.relay or placement.assembled)
        self.merging = self.merging and placement.retained_by(0) is None
        self.parts: dict[tuple[int, int, int, int], tuple[Rows, Rows]] = {}
        first = 0 if rank is None else rank // near * near
        self.ranks = range(self.size) if rank is None else range(first, first + near)
        segments = [placement.node_segment(each) for each in range(self.size)]
        self.segments = segments if len(set(segments)) > 1 else None
        self.sources = [placement.key_source(owner) for owner in range(self.size)]
        self.pairs: list[_Pair] = []
        self.hops: dict[tuple[bool, Side], dict[int, list[_Hop]]]
        self.hops = {way: {} for way in product((False, True), Side)}
        self.received: dict[tuple[Side, int, int], Rows] = {}
        self.retained: dict[tuple[int, int], Rows] = {}
        self.times: dict[tuple[bool, Side], set[tuple[int, int]]] = defaultdict(set)
        self.last_merged: int | None = None  # the last merged step with pairs
        self.keeps_keys = False  # those that come in the forward stay for the backward
        self.once = False
        self._met: dict[Side, Sequence[Mapping[int, Rows]]] = {}
        self._kinds: set[tuple[object, ...]] = set()
        self.steps = 1
        if placement.assembled:
            self._gather()
        elif placement.cyclic and not self.merging:
            self._meet_cyclic()
        else:
            self._meet()
        for side in Side:
            for owner, hops in self.hops[False, side].items():
                self.received.update(((side, owner, hop.target), hop.block.rows) for hop in hops)
        if self.keeps_keys:
            came = self.received.items()
            self.retained = {(rank, owner): x for (side, owner, rank), x in came if side == KEYS}

    def home(self, side: Side, owner: int) -> int:
        """The rank that has a block before the first step."""
        return self.sources[owner] if side else owner

    # Where blocks meet

    def _meet(self) -> None:
        """Asks the placement for each pair of blocks."""
        asked: Iterable[tuple[int, int]] = product(range(self.size), range(self.size))
        if self.masked and not self.placement.relay:
            met = enumerate(self.met(KEYS))
            asked = sorted((query, key) for key, queries in met for query in queries)
        meetings: dict[tuple[Side, int], list[tuple[int, Place]]] = {}
        pairs = [(*pair, place) for pair in asked for place in self.placement.place(*pair)]
        self._find_parts(pairs)
        if self.merging:
            pairs = self._merged(pairs)
        for pair in pairs:
            query, key, place = pair
            if place.rank != query:
                meetings.setdefault((QUERIES, query), []).append((key, place))
            if place.rank != self.sources[key]:
                meetings.setdefault((KEYS, key), []).append((query, place))
            if place.rank in self.ranks or place.rank == query == self.sources[key]:
                self._add(*pair)
        for (side, owner), found in meetings.items():
            self._follow(side, owner, 0, _Line(self.size, found, self.last_merged))

    def _meet_cyclic(self) -> None:
        """Asks the placement, which is `cyclic`, only for the pairs with the keys of rank 0."""
        size = self.size
        places, lines = _cyclic_lines(self.placement)
        partial = product([each for each in places if not each[1].whole], range(size))
        self._find_parts(((key + t) % size, key, place) for (t, place), key in partial)
        for t, place in places:
            keys = [(rank - place.rank) % size for rank in self.ranks]
            # A step in which ranks compute with their own blocks counts for all.
            for key in keys if t or not place.step else range(size):
                rank = (key + place.rank) % size
                self._add((key + t) % size, key, Place(rank, *place[1:]))
        self.pairs.sort()
        for side, line in zip(Side, lines, strict=True):
            for owner in range(size) if line.ranks else ():
                self._follow(side, owner, owner, line)

    def _merged(self, pairs: Sequence[_Pair]) -> list[_Pair]:
        """The same pairs, with each rank's steps that need blocks of others merged to as few as
        `_MOST_ROWS` allows; one step more, without pairs, is for results that come home.

        So that ranks do not wait for each other in every step: a mask leaves them unequal work in
        each, though it may be equal in all.
        """
        needed: dict[tuple[int, int], dict[tuple[Side, int], Rows]] = defaultdict(dict)
        for query, key, place in pairs:
            blocks = [(QUERIES, query)] if place.rank != query else []
            blocks += [(KEYS, key)] if place.rank != self.sources[key] else []
            for block in blocks:
                rows = self._rows(block[0], query, key, place)
                of_rank = needed[place.step, place.rank]
                of_rank[block] = union((of_rank.get(block, ()), rows))
        number, held = Counter[int](), Counter[int]()  # the present step of each rank, and its rows
        numbers: dict[tuple[int, int], int] = {}
        for (step, rank), found in sorted(needed.items()):
            rows_of_step = sum(map(row_count, found.values()))
            held[rank] += rows_of_step
            if not number[rank] or held[rank] > _MOST_ROWS * max(self.lengths):
                number[rank] += 1
                held[rank] = rows_of_step
            numbers[step, rank] = number[rank]
        uses = {(numbers[at], at[1], block) for at, found in needed.items() for block in found}
        self.once = len(uses) == len({use[1:] for use in uses})
        if number:
            self.last_merged = max(number.values())
            self.steps = self.last_merged + 2
            most = max(held.values())
            self.keeps_keys = self.last_merged == 1 and most in self.placement.keeps_keys
        return [
            (query, key, place._replace(step=numbers.get((place.step, place.rank), 0)))
            for query, key, place in pairs
        ]

    def _find_parts(self, pairs: Iterable[_Pair]) -> None:
        if self.masked:
            parts = [
                (query, key, *place.rows(self.lengths[query]))
                for query, key, place in pairs
                if not place.whole and self._sees(query, key)
            ]
            self.parts = rows_of_parts(self.spans, parts, self.mask) if parts else {}

    def _add(self, query: int, key: int, place: Place) -> None:
        """Adds a pair if the mask needs it; a pair of another rank only adds to `steps`."""
        if self._sees(query, key) and (place.whole or self._rows(KEYS, query, key, place)):
            self.steps = max(self.steps, place.step + 1)
            if place.rank in self.ranks:
                self.pairs.append((query, key, place))

    def _gather(self) -> None:
        """Gathers blocks: each whole block goes to all ranks of a team.

        The ranks that compute with the same queries are a team, and so are the ranks that compute
        with the same keys. Of the teams without `rank` the plan only needs to know whether anything
        travels.
        """
        blocks = {rank: self.placement.blocks_of(rank) for rank in self.ranks}
        for rank, owners in blocks.items():
            seen = (pair for pair in product(*owners) if self._sees(*pair))
            self.pairs += [(*pair, Place(rank, 0)) for pair in islice(seen, 1)]
        for side in Side:
            teams = [team for team in {each[side]: 0 for each in blocks.values()} if len(team) > 1]
            for team in teams:
                homes = [self.home(side, owner) for owner in team]
                for owner, home in zip(team, homes, strict=True):
                    block = Block((owner,), self._whole(owner))
                    ends = [one for one in homes if one != home and self.rank in (None, one, home)]
                    self.hops[False, side][owner] = [_Hop(-1, 0, home, one, block) for one in ends]
                    self.hops[True, side][owner] = [_Hop(0, 1, one, home, block) for one in ends]
            if teams and self.rank is not None:
                self.times[False, side].add((-1, 0))
                self.times[True, side].add((0, 1))

    # What the mask needs of them

    def met(self, side: Side) -> Sequence[Mapping[int, Rows]]:
        """[owner][other]: rows of the owner's block that meet the other's block, all or those that
        see it or are seen; of other blocks only those that it meets.
        """
        if side not in self._met:
            others: Sequence[Iterable[int]] = [range(self.size)] * self.size
            if self.selective or (self.masked and not self.spans.all_see_all(self.mask.causal)):
                others = self._met[side] = rows_met(*self.tokens, self.mask, side.value)
            if not self.selective:
                blocks = enumerate(others)
                self._met[side] = [dict.fromkeys(some, self._whole(n)) for n, some in blocks]
        return self._met[side]

    def _whole(self, owner: int) -> Rows:
        return between(0, self.lengths[owner])

    def _sees(self, query: int, key: int) -> bool:
        """Whether any query of a block sees any key of another; true for all if not `masked`."""
        return query in self.met(KEYS)[key]

    def _rows(self, side: Side, query: int, key: int, place: Place) -> Rows:
        """Rows of one block that travel for a pair: all rows, or the rows that meet the other
        block; none if the mask hides the pair.
        """
        if place.whole:
            owner, other = (key, query) if side else (query, key)
            return self.met(side)[owner].get(other, ())
        start, stop = place.rows(self.lengths[query])
        if self.masked:
            met = self.parts.get((query, key, start, stop), ((), ()))
            if self.selective or not met[0]:
                return met[side]
        return self._whole(key) if side else between(start, stop)

    def _follow(self, side: Side, owner: int, origin: int, line: _Line) -> None:
        """Finds the hops of a block: of its inputs, and of the results for it."""
        needed = dict(self._needed(side, owner, origin, line))
        stops = self._stops(origin, line, [*needed])
        if not stops:
            return
        home, gap, whole = self.home(side, owner), longest_gap(self.lengths[owner]), None
        source, sent = home, stops
        retaining = self.placement.retained_by(owner) if side else None
        if retaining is not None:
            whole = self.retained[retaining, owner] = union(needed.values(), gap)
            if self.returning:
                source, self.received[side, owner, retaining] = retaining, whole
                own = line.number.get((source - origin) % self.size)
                sent = tuple([stop for stop in stops if stop != own])
        here = any(
            rank in (home, source) or self._stop(rank, origin, line) in stops for rank in self.ranks
        )
        # Blocks that are alike are sent at the same times.
        kind = line, stops, min(needed, default=0), self.segments and origin
        new = kind not in self._kinds
        if new:
            self._kinds.add(kind)
            self.steps = max(self.steps, 1 + max(map(line.last.__getitem__, stops)))
        elif not here:
            return
        for results, end, reached in ((False, source, sent), (True, home, stops)):
            rows = None if results else whole
            route = _Route(results, owner, origin, end, line, needed, reached, gap, rows)
            chains = self._chains(route)
            if new and self.rank is not None:
                for chain in chains:
                    steps = [chain.step, *map(route.steps.__getitem__, chain.stops)]
                    self.times[results, side].update(pairwise(steps[::-1] if results else steps))
            if here:
                self.hops[results, side][owner] = self._hops_along(route, chains)

    def _stop(self, rank: int, origin: int, line: _Line) -> int:
        """Number of the stop at a rank."""
        return line.number.get((rank - origin) % self.size, _NOWHERE)

    def _stops(self, origin: int, line: _Line, needed: Sequence[int]) -> Sequence[int]:
        """Numbers of the stops that a block reaches: a relay goes on, in each node segment, to the
        last stop that needs the block.
        """
        if not self.masked:
            return range(len(line.ranks))
        if not (needed and self.placement.relay):
            return tuple(needed)
        if self.segments is None:
            return range(bisect_right(line.first, line.first[needed[-1]], hi=len(line.ranks)))
        segments = [self.segments[(origin + rank) % self.size] for rank in line.ranks]
        last = {segments[number]: line.first[number] for number in needed}
        of_all = enumerate(zip(segments, line.first, strict=False))
        return tuple([number for number, (one, first) in of_all if first <= last.get(one, -1)])

    def _needed(
        self, side: Side, owner: int, origin: int, line: _Line
    ) -> Sequence[tuple[int, Rows]]:
        """Numbers of the stops that need a block, ascending, and the rows that each needs."""
        met = self.met(side)[owner].items()
        if stop := line.stop:
            found = [(stop[other - origin], rows) for other, rows in met]
            return sorted([pair for pair in found if pair[0] >= 0 and pair[1]])
        needed: dict[int, Rows] = {}
        for other, rows in met:
            query, key = (other, owner) if side else (owner, other)
            for number, place in line.met[other - origin]:
                if some := rows if place.whole else self._rows(side, query, key, place):
                    needed[number] = union((needed.get(number, ()), some))
        return sorted(needed.items())

    # How they travel

    def _chains(self, route: _Route) -> list[_Chain]:
        """The chains on which a block leaves its source, or results come home.

        Without a relay each stop has a chain of its own. In a relay a block goes from each stop of
        a node segment to the next one, and from the first stop of a segment to the first stop of
        the next segment, as soon as the stop before has it. Each stop adds its own results to the
        sum, the first stop that computes sends the first sum, and the last stop of a segment sends
        its sum home.
        """
        steps, head, found = route.steps, _HOME, []
        if not self.placement.relay:
            return [_Chain((stop,), _HOME, self._time(route, steps[stop])) for stop in route.stops]
        for near, some in self._in_segments(route):
            if route.results:
                first = next(stop for stop in route.needed if stop >= some[0])
                arrival = steps[some[-1]] + (1 if near else self.placement.latency)
                found.append(_Chain(some[some.index(first) :][::-1], _HOME, arrival, near))
            else:
                end = _HOME if near else head
                found.append(_Chain(some, end, steps[end], near))
                head = head if near else some[0]
        return found

    def _time(self, route: _Route, step: int) -> int:
        """When a block leaves home for a stop, or when the results of the stop are at home.

        Inputs of the first merged steps leave at the start, as many as there are receive buffers.
        """
        if route.results:
            return step + 1
        return 0 if self.merging and step <= MERGED_SLOTS else step - 1

    def _in_segments(self, route: _Route) -> list[tuple[bool, Sequence[int]]]:
        """The stops in each node segment, and whether the route's end is there too."""
        if self.segments is None:
            return [(True, route.stops)] if route.stops else []
        segments = [self.segments[route.rank_at(stop)] for stop in route.stops]
        grouped = groupby(zip(segments, route.stops, strict=True), itemgetter(0))
        home = self.segments[route.end]
        return [(one == home, tuple([stop for _, stop in group])) for one, group in grouped]

    def _hops_along(self, route: _Route, chains: Sequence[_Chain]) -> list[_Hop]:
        """The hops of chains that begin or end at `ranks`; all if the plan is of all ranks."""
        results, needed, steps = route.results, route.needed, route.steps
        found: list[_Hop] = []
        own = [
            _HOME if rank == route.end else self._stop(rank, route.origin, route.line)
            for rank in self.ranks
        ]
        later: Rows = ()  # rows that the segments behind need
        for stops, end, step, near in chains if results else reversed(chains):
            heading = not (near or results)
            wanted: Sequence[int] = range(len(stops))
            if self.rank is not None:
                before = [end, *stops]  # the places of the chain: a hop leads to each but the first
                places = {before.index(at) for at in own if at in before}
                wanted = [hop for hop in wanted if {hop, hop + 1} & places]
            total, behind, hops = Rows(), len(stops), list[_Hop]()
            for hop in reversed([0, *wanted] if heading and 0 not in wanted else wanted):
                more = [needed[stop] for stop in stops[hop:behind] if stop in needed]
                more += [later] if heading and not hop else []
                total, behind = route.whole or union((total, *more), route.gap), hop
                inner = (steps[stops[hop - 1]], stops[hop - 1]) if hop else (step, end)
                ends = [inner, (steps[stops[hop]], stops[hop])]
                (posted, source), (to, target) = reversed(ends) if results else ends
                block = Block((route.owner,), total)
                if hop in wanted:
                    ranks = route.rank_at(source), route.rank_at(target)
                    hops.append(_Hop(posted, to, *ranks, block))
            later = total if heading else later
            found += hops if results else reversed(hops)
        return found


# Both passes of a micro-batch use the same routes if their placements are equal.
_routes = lru_cache(maxsize=16)(_Routes)


class _Writer:
    """Writes the plan of a pass: routes are of one group of heads, the plan of all groups."""

    def __init__(self, routes: _Routes, phase: Phase) -> None:
        self.routes, self.placement, self.phase = routes, routes.placement, phase
        self.groups = self.placement.groups
        self.all_heads = together(self.groups)
        self.wide = ("dq", "dk", "dv") if self.placement.wide_gradients else ()

    def plan(self) -> Plan:
        routes = self.routes
        steps = len(self.groups) * routes.steps
        elsewhere = [each for each in enumerate(routes.sources) if each[0] != each[1]]
        kept = [
            Kept(rank, ("k", "v"), (owner,), rows=rows)
            for (rank, owner), rows in routes.retained.items()
            if rank in routes.ranks
        ]
        if self.phase == "backward":
            kept += [Kept(rank, ("k", "v"), (owner,)) for owner, rank in elsewhere]
        moves = list(self._redistributed(elsewhere, steps))
        times = set[Time]()
        for number in range(len(self.groups)):
            moves += self._moves(number)
            times.update(
                Time(*way, posted + number * routes.steps, needed + number * routes.steps)
                for way, found in routes.times.items()
                if self._messages(*way, number)
                for posted, needed in found
            )
        return Plan(
            self.phase,
            routes.mask,
            routes.spans,
            self.groups,
            steps,
            tuple(self._computes()),
            tuple(moves),
            self.placement.relay,
            tuple(sorted(kept, key=itemgetter(0, 2))),
            times=frozenset(times),
            merged=routes.last_merged is not None,
            once=routes.once,
        )

    def _messages(self, result: bool, side: Side, number: int) -> Sequence[tuple[TensorNames, ...]]:
        """Messages of each move of a block, for a group of heads."""
        group, backward = self.groups[number], self.phase == "backward"
        if side:
            wanted, names = group.first, ("k", "v")
            if result:
                wanted, names = group.last and backward, ("dk", "dv")
            elif backward and self.routes.keeps_keys:
                wanted = False
            messages = (names,) if self.placement.assembled else (names[:1], names[1:])
            return (messages,) if wanted else ()
        if result:
            return ((("dq",),),) if backward else ((("out",), ("lse",)),)
        if not backward:
            return ((("q",),),)
        if not self.placement.assembled:
            return ((("q",), ("dout",), ("delta",), ("lse",)),)
        return (*(((("lse", "delta"),),) if not number else ()), (("q", "dout"),))

    def _moves(self, number: int) -> Iterator[Move]:
        """Moves of all blocks for a group of heads."""
        routes, assembled, group = self.routes, self.placement.assembled, self.groups[number]
        most, before = max(routes.lengths), number * routes.steps
        for result, side in product((False, True), Side):
            for messages in self._messages(result, side, number):
                name = messages[0][0]
                heads = self.all_heads if assembled and name in PER_HEAD else group
                wide = name in self.wide
                for hops in routes.hops[result, side].values():
                    for posted, needed, source, target, block in hops:
                        ends = before + posted, before + needed, source, target
                        tokens = most if assembled else row_count(block.rows)
                        yield Move(*ends, messages, block, tokens, heads, 0, wide)

    def _computes(self) -> Iterator[Compute]:
        by = self._by_pairs
        if self.placement.assembled:
            by = self._joined
        elif self.routes.merging and not self.routes.spans.gaps:
            by = self._by_steps
        made, steps = [*by()], self.routes.steps
        for number, group in enumerate(self.groups):
            for step, rank, queries, keys in made:
                yield Compute(step + number * steps, rank, queries, keys, group)

    def _by_pairs(self) -> Iterator[tuple[int, int, Block, Block]]:
        for query, key, place in self.routes.pairs:
            rank, rows = place.rank, self._rows(QUERIES, query, place.rank)
            if not place.whole:
                rows = clipped(rows, *place.rows(self.routes.lengths[query]))
            keys = Block((key,), self._rows(KEYS, key, rank))
            yield place.step, rank, Block((query,), rows), keys

    def _by_steps(self) -> Iterator[tuple[int, int, Block, Block]]:
        """The pairs of a merged step in as few computations as can be: of one block of queries, or
        several, with all keys of others that they meet.
        """
        routes, lengths = self.routes, self.routes.lengths
        keys_of: dict[tuple[int, int, int, int, int, bool], list[int]] = {}
        for query, key, place in routes.pairs:
            own, rows = routes.sources[key] == place.rank, place.rows(lengths[query])
            keys_of.setdefault((place.step, place.rank, query, *rows, own), []).append(key)
        # By step, rank, keys, and rows of a part of the queries.
        queries_of: dict[tuple[int, int, tuple[int, ...], tuple[int, int] | None], list[int]] = {}
        for (step, rank, query, start, stop, _), keys in keys_of.items():
            # Own queries, and parts of a block, are computations of their own.
            whole = query != rank and stop - start == lengths[query]
            part = None if whole else (start, stop)
            kind = step, rank, tuple(sorted(keys)), part
            queries_of.setdefault(kind, []).append(query)
        for (step, rank, of_keys, part), queries in queries_of.items():
            for some in [queries] if part is None else [[query] for query in queries]:
                of_queries = self._block(QUERIES, sorted(some), rank)
                if part is not None:
                    of_queries = Block(of_queries.owners, clipped(of_queries.rows, *part))
                yield step, rank, of_queries, self._block(KEYS, of_keys, rank)

    def _block(self, side: Side, owners: Sequence[int], rank: int) -> Block:
        """All rows that a rank has of some blocks."""
        held = {owner: self._rows(side, owner, rank) for owner in owners}
        if len(held) == 1:
            return Block((*held,), *held.values())
        tokens = sum(self.routes.lengths[owner] for owner in held)
        rows = between(0, tokens)
        if sum(map(row_count, held.values())) < tokens:
            rows = rows_of_all([(self.routes.spans[owner], x) for owner, x in held.items()])
        return Block((*held,), rows)

    def _joined(self) -> Iterator[tuple[int, int, Block, Block]]:
        """One computation for each rank, of all its pairs: step, rank, queries and keys."""
        for _, _, (rank, step, *_) in self.routes.pairs:
            sides = zip(Side, self.placement.blocks_of(rank), strict=True)
            queries, keys = (self._block(side, sorted(owners), rank) for side, owners in sides)
            yield step, rank, queries, keys

    def _rows(self, side: Side, owner: int, rank: int) -> Rows:
        """Rows of a block that a rank has."""
        rows = self.routes.received.get((side, owner, rank))
        return between(0, self.routes.lengths[owner]) if rows is None else rows

    def _redistributed(self, elsewhere: Iterable[tuple[int, int]], steps: int) -> Iterator[Move]:
        """Moves of keys and values to their source ranks before the first step, and of their
        gradients back to the owners after the last; always of all ranks, because all exchange them
        together.
        """
        for owner, source in elsewhere:
            tokens = self.routes.lengths[owner]
            block = Block((owner,), between(0, tokens))
            times, ends, names = (-2, -1), (owner, source), (("k",), ("v",))
            if self.phase == "backward":
                times, ends, names = (steps, steps + 1), (source, owner), (("dk",), ("dv",))
            yield Move(*times, *ends, names, block, tokens, self.all_heads)
