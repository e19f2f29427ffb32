"""Compiles a placement into a plan: of all ranks, or of one without looking at what others do.

A placement says where pairs of blocks meet. So it says which ranks a block reaches in which steps,
whatever the mask: these ranks are the stops of the block's line. A mask removes stops from the
line and rows from the block: the rest is the block's route. Each hop of a route becomes a move of
the plan: hops of inputs lead from the block's owner, hops of results lead to it. A rank's part of
the plan has the hops that begin or end at the rank.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, islice, product
from operator import itemgetter
from typing import Literal, NamedTuple

from megatron_cp_plugin.core.blocks.owned import Owned
from megatron_cp_plugin.core.blocks.rows import (
    Rows,
    between,
    clipped,
    row_count,
    rows_of_all,
    union,
)
from megatron_cp_plugin.core.blocks.touched import (
    keys_seen,
    longest_gap,
    queries_seeing,
    sees,
    touched_rows,
)
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.head_groups import HeadGroup, together
from megatron_cp_plugin.core.layout import rows_of
from megatron_cp_plugin.core.placement import BlockPlacement, Place, Placement
from megatron_cp_plugin.core.plans.plan import (
    OF_ROWS,
    Block,
    Compute,
    Kept,
    Move,
    Plan,
    TensorNames,
    Time,
)
from megatron_cp_plugin.core.plans.team_heads import with_teams
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError

Side = Literal["queries", "keys"]
SIDES: tuple[Side, ...] = ("queries", "keys")

# In place of the number of a stop:
_HOME = -1  # the rank where inputs start, or where results end
_NOWHERE = -2  # a rank that is no stop of the block


@lru_cache(maxsize=64)
def plan_of(
    placement: Placement,
    seq_len: int,
    mask: Mask,
    phase: Phase,
    rectangular: bool = True,
    rank: int | None = None,
) -> Plan:
    """The plan of one pass, made once: at short lengths a step of training is bound by the host.

    Args:
        seq_len: tokens of all ranks.
        rectangular: as in `plan_tiles`.
        rank: only this rank's part, what it computes, sends and receives in the steps of all ranks,
            with what all ranks exchange before and after them; None: the plan of all ranks.
    """
    if isinstance(placement, BlockPlacement):
        returning = phase == "backward" and placement.retained_by(0) is not None
        routes = _routes(placement, seq_len, mask, rank, returning)
        return _Pass(routes, phase).plan(rectangular)
    team = None if rank is None else rank // placement.members
    between = plan_of(placement.between, seq_len, mask, phase, rectangular, team)
    return with_teams(placement, between, rank)


class _Pair(NamedTuple):
    """A block of queries and a block of keys, by their owners, and the place where they meet."""

    query: int
    key: int
    place: Place


class _Hop(NamedTuple):
    """Rows of a block that go from one rank to another.

    Attributes: posted, needed: steps, as in `Move`.
    """

    posted: int
    needed: int
    source: int
    target: int
    rows: Rows


class _Line:
    """The stops of a block: all ranks that it reaches, whatever the mask, in the order of their
    first steps. The number of a stop is its index in that order.

    Ranks and owners are distances from an origin: the block's owner if the placement is cyclic,
    else rank 0.

    Attributes:
        ranks: the rank of each stop.
        number: the number of a stop, by its rank.
        first, last: steps in which each stop first and last computes with the block.
        met: (number of a stop, part of the query rows) of each place where another block meets this
            one, by the owner of that other block.
        stop: the number of the stop where another block meets this one, by the owner of that block;
            empty unless each stop meets one other block, each other block one stop, and all rows
            meet.
    """

    def __init__(self, meetings: Iterable[tuple[int, Place]]) -> None:
        """Args: meetings: distances of the owners of other blocks, and where they meet this one."""
        steps: dict[int, list[int]] = {}
        found = list(meetings)
        for _, place in found:
            steps.setdefault(place.rank, []).append(place.step)
        self.ranks = sorted(steps, key=lambda rank: min(steps[rank]))
        self.first = [min(steps[rank]) for rank in self.ranks]
        self.last = [max(steps[rank]) for rank in self.ranks]
        self.number = {rank: number for number, rank in enumerate(self.ranks)}
        self.met: dict[int, list[tuple[int, tuple[int, int]]]] = {}
        for other, place in found:
            self.met.setdefault(other, []).append((self.number[place.rank], place.part))
        simple = len(found) == len(self.met) == len(self.ranks)
        if simple and all(place.part == (0, 1) for _, place in found):
            self.stop = {other: number for other, ((number, _),) in self.met.items()}
        else:
            self.stop = {}


@dataclass
class _Route:
    """The part of a block's line that a mask leaves.

    Attributes:
        origin: the rank from which the line's distances count.
        home: the rank to which the results go.
        source: the rank that has the block at first.
        needed: rows that a stop computes with, by the number of the stop, in ascending order.
        stops: numbers of the stops that the block reaches.
        gap: see `longest_gap`.
        rows: rows that come to every stop; None: those that the stop and the stops behind it need.
    """

    side: Side
    origin: int
    home: int
    source: int
    line: _Line
    needed: dict[int, Rows]
    stops: Sequence[int]
    gap: int
    rows: Rows | None


class _Routes:
    """Which blocks meet where under a mask, and how they get there; the same in both passes.

    Attributes:
        masked: pairs of blocks that do not see each other are left out.
        selective: rows that do not see the other block of a pair are left out too.
        at_once: the rows that meet are found for all pairs of blocks together.
        pairs: pairs that are computed, those of `rank` only if it is given.
        steps: number of steps of one group of heads, the same on all ranks.
        hops: hops of inputs (false) and of results (true), by side and owner of the block.
        received: rows of a block that a rank has, by side, owner and rank.
        retained: rows of a block of keys that a rank keeps, by the block's owner.
        times: (posted, needed) of all sends of inputs (false) and of results (true), by side; only
            if the plan is of one rank.
        widths: number of rows to which the blocks of a team are padded, by side and owner.
    """

    def __init__(
        self,
        placement: BlockPlacement,
        seq_len: int,
        mask: Mask,
        rank: int | None,
        returning: bool,
    ) -> None:
        """Finds the pairs, and the hops of both passes.

        Args:
            rank: as in `plan_of`.
            returning: blocks of keys come from the ranks that retained them in the forward.
        """
        self.placement, self.mask, self.rank, self.size = placement, mask, rank, placement.size
        self.returning = returning
        self.tokens = placement.layout.within(mask.followed), self.size, seq_len
        self.spans = Owned.of(*self.tokens)
        self.lengths = self.spans.lengths
        special, gaps = bool(mask.special), self.spans.gaps
        self.masked = placement.masked or (special and not gaps)
        # Whole blocks need not be packed; where ranks pass them on, few would be any shorter.
        self.selective = self.masked and (special or not placement.relay)
        self.at_once = self.masked and not gaps
        self.legs = [placement.leg(each) for each in range(self.size)]
        self.one_leg = len(set(self.legs)) == 1
        self.holders = [placement.key_holder(owner) for owner in range(self.size)]
        self.pairs: list[_Pair] = []
        self.hops: dict[bool, dict[tuple[Side, int], list[_Hop]]] = {False: {}, True: {}}
        self.received: dict[tuple[Side, int, int], Rows] = {}
        self.retained: dict[int, Rows] = {}
        self.times: dict[tuple[Side, bool], set[tuple[int, int]]] = defaultdict(set)
        self.widths: dict[tuple[Side, int], int] = {}
        self._noted: set[tuple[_Line, Sequence[int], int]] = set()
        self.steps = 1
        if placement.assembled:
            self._gather()
        elif placement.cyclic:
            self._meet_alike()
        else:
            self._meet()
        for (side, owner), hops in self.hops[False].items():
            self.received.update(((side, owner, hop.target), hop.rows) for hop in hops)

    def home(self, side: Side, owner: int) -> int:
        """The rank that has a block before the first step: the owner, or the holder of the keys."""
        return owner if side == "queries" else self.holders[owner]

    def part(self, pair: _Pair) -> tuple[int, int]:
        """Rows [start, stop) of a pair's queries."""
        (index, count), tokens = pair.place.part, self.lengths[pair.query]
        return tokens * index // count, tokens * (index + 1) // count

    # Where blocks meet

    def _meet(self) -> None:
        """Asks the placement for each pair of blocks."""
        sparse = self.masked and not self.placement.relay
        meetings: dict[tuple[Side, int], list[tuple[int, Place]]] = {}
        for query, key in product(range(self.size), range(self.size)):
            if sparse and not self._sees(query, key):
                continue
            for place in self.placement.place(query, key):
                self._check(query, key, place)
                if place.rank != query:
                    meetings.setdefault(("queries", query), []).append((key, place))
                if place.rank != self.holders[key]:
                    meetings.setdefault(("keys", key), []).append((query, place))
                mine = self.rank in (None, place.rank)
                if mine or place.rank == query == self.holders[key]:
                    self._add(_Pair(query, key, place))
        for (side, owner), found in meetings.items():
            self._follow(side, owner, 0, _Line(found))

    def _meet_alike(self) -> None:
        """Asks the placement, which is `cyclic`, only for the pairs with the keys of rank 0."""
        size, ranks = self.size, range(self.size) if self.rank is None else (self.rank,)
        places = [(t, place) for t in range(size) for place in self.placement.place(t, 0)]
        for t, place in places:
            self._check(t, 0, place)
            keys = ((rank - place.rank) % size for rank in ranks)
            # A step in which ranks compute with their own blocks counts for all.
            for key in keys if t or not place.step else range(size):
                rank = (key + place.rank) % size
                self._add(_Pair((key + t) % size, key, place._replace(rank=rank)))
        self.pairs.sort()
        of_queries = (
            (-t % size, place._replace(rank=(place.rank - t) % size))
            for t, place in places
            if place.rank != t
        )
        lines = _Line(of_queries), _Line((t, place) for t, place in places if place.rank)
        for side, line in zip(SIDES, lines, strict=True):
            for owner in range(size) if line.ranks else ():
                self._follow(side, owner, owner, line)

    def _gather(self) -> None:
        """Gathers blocks: each block goes to all ranks of a team, and all get the same rows of it.

        The ranks that compute with the same queries are a team, and so are the ranks that compute
        with the same keys. Of teams without `rank` only matters whether anything travels in them.
        """
        placement, ranks = self.placement, range(self.size) if self.rank is None else (self.rank,)
        blocks = {rank: placement.blocks_of(rank) for rank in ranks}
        for rank in ranks:
            pairs = product(*blocks[rank])
            seen = (pair for pair in pairs if not self.masked or self._sees(*pair))
            self.pairs += [_Pair(*pair, Place(rank, 0)) for pair in islice(seen, 1)]
        for number, side in enumerate(SIDES):
            for team in dict.fromkeys(of_rank[number] for of_rank in blocks.values()):
                if len(team) > 1:
                    self._gather_team(side, team)
                    self._note_gathered(side)

    def _note_gathered(self, side: Side) -> None:
        """Notes when blocks of a side travel, if any team has blocks that travel."""
        number = SIDES.index(side)
        if self.rank is None or self.times[side, False]:
            return
        homes = (self.home(side, owner) for owner in range(self.size))
        if not self.masked or any(
            rows and other not in self.placement.blocks_of(home)[1 - number]
            for home, seen in zip(homes, self._seen(side), strict=True)
            for other, rows in seen.items()
        ):
            self.times[side, False].add((-1, 0))
            self.times[side, True].add((0, 1))

    def _gather_team(self, side: Side, team: tuple[int, ...]) -> None:
        homes = {owner: self.home(side, owner) for owner in team}
        given = {owner: between(0, self.lengths[owner]) for owner in team}
        if self.masked:
            for owner, home in homes.items():
                others = self._seen(side)[owner]
                away = others.keys() - set(self.placement.blocks_of(home)[side == "queries"])
                given[owner] = union(
                    map(others.__getitem__, away), longest_gap(self.lengths[owner])
                )
            width = max(map(row_count, given.values()))
            self.widths.update({(side, owner): width for owner in team})
            if not width:
                return
        for owner, home in homes.items():
            rows, others_too = given[owner], self.rank in (None, home)
            ends = [
                rank
                for rank in homes.values()
                if rank != home and (others_too or rank == self.rank)
            ]
            self.hops[False][side, owner] = [_Hop(-1, 0, home, rank, rows) for rank in ends]
            self.hops[True][side, owner] = [_Hop(0, 1, rank, home, rows) for rank in ends]

    def _check(self, query: int, key: int, place: Place) -> None:
        if not (0 <= place.rank < self.size and place.step >= 0):
            raise ConfigError(
                f"queries of rank {query} meet keys of rank {key} on rank {place.rank} in step "
                f"{place.step}: use ranks 0 to {self.size - 1} and steps from 0"
            )

    def _add(self, pair: _Pair) -> None:
        """Adds a pair if the mask needs it; a pair of another rank only adds to `steps`."""
        if self._has_rows(pair):
            self.steps = max(self.steps, pair.place.step + 1)
            if self.rank in (None, pair.place.rank):
                self.pairs.append(pair)

    # What the mask needs of them

    def _follow(self, side: Side, owner: int, origin: int, line: _Line) -> None:
        """Finds the hops of a block: of its inputs, and of the results for it."""
        needed = self._needed(side, owner, origin, line)
        stops = self._stops(origin, line, needed)
        if not stops:
            return
        self.steps = max(self.steps, 1 + max(map(line.last.__getitem__, stops)))
        home, gap, rows = self.home(side, owner), longest_gap(self.lengths[owner]), None
        retaining = self.placement.retained_by(owner) if side == "keys" else None
        if retaining is not None:
            rows = self.retained[owner] = union(needed.values(), gap)
            if self.returning:
                self.received[side, owner, retaining] = rows
        source = home if retaining is None or not self.returning else retaining
        route = _Route(side, origin, home, source, line, needed, stops, gap, rows)
        if self.one_leg and self.rank is not None:
            # Blocks that are alike, and do not come to the rank, are sent at the same times.
            kind, distance = (line, stops, next(iter(needed))), (self.rank - origin) % self.size
            here = self.rank in (home, source) or line.number.get(distance) in stops
            if kind in self._noted and not here:
                return
            self._noted.add(kind)
        relay = self.placement.relay
        inputs = self._passed_on(route) if relay else self._straight(route, results=False)
        results = self._summed_up(route) if relay else self._straight(route, results=True)
        for of_kind, hops in ((False, [*inputs]), (True, [*results])):
            if hops:
                self.hops[of_kind][side, owner] = hops

    def _stops(self, origin: int, line: _Line, needed: dict[int, Rows]) -> Sequence[int]:
        """Numbers of the stops that a block reaches; a leg of a relay goes on to its last stop that
        needs the block.
        """
        if not self.masked:
            return range(len(line.ranks))
        if not (needed and self.placement.relay):
            return tuple(needed)
        if self.one_leg:
            return range(bisect_right(line.first, line.first[next(reversed(needed))]))
        legs = [self.legs[(origin + rank) % self.size] for rank in line.ranks]
        last = {legs[number]: line.first[number] for number in needed}
        of_all = enumerate(zip(legs, line.first, strict=True))
        return [number for number, (leg, first) in of_all if first <= last.get(leg, -1)]

    def _needed(self, side: Side, owner: int, origin: int, line: _Line) -> dict[int, Rows]:
        size = self.size
        if self.at_once and line.stop:
            others = self._seen(side)[owner]
            stops = (line.stop.get((other - origin) % size) for other in others)
            pairs = zip(stops, others.values(), strict=True)
            return dict(sorted([(stop, rows) for stop, rows in pairs if stop is not None and rows]))
        needed: dict[int, Rows] = {}
        for distance, met in line.met.items():
            other = (origin + distance) % size
            pair = (other, owner) if side == "keys" else (owner, other)
            for stop, part in met:
                if self.at_once and part == (0, 1):
                    rows = self._seen(side)[owner].get(other, ())
                else:
                    rows = self._rows(side, _Pair(*pair, Place(0, 0, part)))
                if rows:
                    needed[stop] = union((needed[stop], rows)) if stop in needed else rows
        return dict(sorted(needed.items()))

    def _seen(self, side: Side) -> list[dict[int, Rows]]:
        """[owner][other]: rows of the owner's block that the other owner's block meets, if any."""
        return self._keys_seen if side == "keys" else self._queries_seen

    @cached_property
    def _keys_seen(self) -> list[dict[int, Rows]]:
        return self._by_owner(keys_seen(*self.tokens, self.mask))

    @cached_property
    def _queries_seen(self) -> list[dict[int, Rows]]:
        if self.selective:
            return self._by_owner(queries_seeing(*self.tokens, self.mask))
        seen = keys_seen(*self.tokens, self.mask)
        return [dict.fromkeys(keys, self._whole(query)) for query, keys in enumerate(seen)]

    def _by_owner(self, of_ranks: Sequence[dict[int, Rows]]) -> list[dict[int, Rows]]:
        found: list[dict[int, Rows]] = [{} for _ in of_ranks]
        for other, seen in enumerate(of_ranks):
            for owner, rows in seen.items():
                found[owner][other] = rows
        if self.selective:
            return found
        return [dict.fromkeys(others, self._whole(owner)) for owner, others in enumerate(found)]

    def _whole(self, owner: int) -> Rows:
        return between(0, self.lengths[owner])

    def _sees(self, query: int, key: int) -> bool:
        if self.at_once:
            return query in self._keys_seen[key]
        return sees(self.spans[query], self.spans[key], self.mask)

    def _has_rows(self, pair: _Pair) -> bool:
        """Whether any query of a pair sees any key; true for all pairs if not `masked`."""
        if not self.masked:
            return True
        if pair.place.part == (0, 1) or not self._sees(pair.query, pair.key):
            return self._sees(pair.query, pair.key)
        queries = rows_of(self.spans[pair.query], *self.part(pair))
        return sees(queries, self.spans[pair.key], self.mask)

    def _rows(self, side: Side, pair: _Pair) -> Rows:
        """Rows of one block of a pair that travel for the pair: all, or those that meet the other
        block.
        """
        if not self._has_rows(pair):
            return ()
        start, stop = self.part(pair)
        if not self.selective:
            return between(start, stop) if side == "queries" else self._whole(pair.key)
        queries = rows_of(self.spans[pair.query], start, stop)
        rows, cols = touched_rows(queries, self.spans[pair.key], self.mask)
        if side == "keys":
            return cols
        return tuple((start + first, start + last) for first, last in rows)

    # How they travel

    def _straight(self, route: _Route, *, results: bool) -> Iterator[_Hop]:
        """Hops between the home, or source, and each stop: inputs to the stops, results back."""
        home = route.home if results else route.source
        steps = route.line.last if results else route.line.first
        stops = route.stops if results else self._after_source(route)
        posted = {stop: steps[stop] - (not results) for stop in stops}
        self._note(route.side, results, ((step, step + 1) for step in posted.values()))
        at = self._stop_of(route, home)
        for stop in posted if at in (None, _HOME) else posted.keys() & {at}:
            rows = union((route.needed[stop],), route.gap) if route.rows is None else route.rows
            rank, step = self._rank_at(route, stop, home), posted[stop]
            yield _Hop(step, step + 1, *((rank, home) if results else (home, rank)), rows)

    def _passed_on(self, route: _Route) -> Iterator[_Hop]:
        """Hops of inputs: from each stop of a leg to the next one, and from the first stop of a leg
        to the first stop of the next leg. A stop sends the block as soon as it has it.
        """
        first, home, head = route.line.first, route.source, _HOME
        at, legs = self._stop_of(route, home), self._legs(route, self._after_source(route))
        found: list[tuple[int, int, int, int]] = []
        for leg in legs:
            near = self._is_near(route, leg, home)
            chain = [_HOME if near else head, *leg]
            begin = 0 if chain[0] == _HOME else first[chain[0]]
            needed = [first[stop] for stop in leg]
            self._note(route.side, False, zip([begin, *needed], needed, strict=False))
            for i in _hops(chain, at):
                found.append((needed[i - 1] if i else begin, needed[i], chain[i], chain[i + 1]))
            head = head if near else leg[0]
        given = self._given(route, legs, {target for *_, target in found})
        for begin, end, source, target in found:
            ranks = self._rank_at(route, source, home), self._rank_at(route, target, home)
            yield _Hop(begin, end, *ranks, given[target])

    def _summed_up(self, route: _Route) -> Iterator[_Hop]:
        """Hops of results: from each stop of a leg to the next one, and from the last stop home.
        Each stop adds its own results to the sum. The first stop that computes sends the first sum.
        """
        last, home = route.line.last, route.home
        at = self._stop_of(route, home)
        for leg in self._legs(route, route.stops):
            start = next(i for i, stop in enumerate(leg) if stop in route.needed)
            chain, posted = [*leg[start:], _HOME], [last[stop] for stop in leg[start:]]
            lag = 1 if self._is_near(route, leg, home) else self.placement.lag
            needed = [*posted[1:], posted[-1] + lag]
            self._note(route.side, True, zip(posted, needed, strict=True))
            numbers = _hops(chain, at)
            sums = _unions(route, chain, {chain[i] for i in numbers})
            for i in numbers:
                source, target = chain[i], chain[i + 1]
                ranks = self._rank_at(route, source, home), self._rank_at(route, target, home)
                yield _Hop(posted[i], needed[i], *ranks, sums[source])

    def _given(
        self, route: _Route, legs: Sequence[Sequence[int]], wanted: set[int]
    ) -> dict[int, Rows]:
        """Rows that come to each of the `wanted` stops: those that it needs, and those that
        the stops behind it need.
        """
        if route.rows is not None:
            return dict.fromkeys(wanted, route.rows)
        found: dict[int, Rows] = {}
        later: Rows = ()  # rows that the legs behind need
        for leg in reversed(legs) if wanted else ():
            near = self._is_near(route, leg, route.source)
            found |= _unions(route, leg[::-1], wanted if near else {*wanted, leg[0]})
            if not near:
                later = found[leg[0]] = union((found[leg[0]], later), route.gap)
        return found

    def _note(self, side: Side, results: bool, times: Iterable[tuple[int, int]]) -> None:
        if self.rank is not None:
            self.times[side, results].update(times)

    def _after_source(self, route: _Route) -> Sequence[int]:
        """The route's stops, without the rank that retained the block and now sends it."""
        if route.source == route.home:
            return route.stops
        source = route.line.number[(route.source - route.origin) % self.size]
        return [stop for stop in route.stops if stop != source]

    def _legs(self, route: _Route, stops: Sequence[int]) -> list[Sequence[int]]:
        if self.one_leg:
            return [stops] if stops else []
        legs = [self.legs[self._rank_at(route, stop, route.home)] for stop in stops]
        of_legs = groupby(zip(legs, stops, strict=True), itemgetter(0))
        return [[stop for _, stop in leg] for _, leg in of_legs]

    def _is_near(self, route: _Route, leg: Sequence[int], home: int) -> bool:
        """Whether rank `home` belongs to this leg."""
        return self.one_leg or self.legs[self._rank_at(route, leg[0], home)] == self.legs[home]

    def _stop_of(self, route: _Route, home: int) -> int | None:
        """The number of the rank's stop. None: the plan is of all ranks."""
        if self.rank in (None, home):
            return None if self.rank is None else _HOME
        return route.line.number.get((self.rank - route.origin) % self.size, _NOWHERE)

    def _rank_at(self, route: _Route, stop: int, home: int) -> int:
        return home if stop == _HOME else (route.origin + route.line.ranks[stop]) % self.size


# Both passes of a micro-batch use the same routes if their placements are equal.
_routes = lru_cache(maxsize=16)(_Routes)


def _hops(chain: Sequence[int], at: int | None) -> Sequence[int]:
    """Numbers of the hops of a chain of stops that begin or end at stop `at`; None: of all hops."""
    if at is None:
        return range(len(chain) - 1)
    if at not in chain:
        return ()
    number = chain.index(at)
    return range(max(0, number - 1), min(number + 1, len(chain) - 1))


def _unions(route: _Route, stops: Iterable[int], wanted: set[int]) -> dict[int, Rows]:
    """Rows that a wanted stop and all stops before it in `stops` need, by the wanted stop."""
    found: dict[int, Rows] = {}
    parts: list[Rows] = [()]
    for stop in stops if wanted else ():
        rows = route.needed.get(stop)
        if rows is not None and rows != parts[-1]:
            parts.append(rows)
        if stop in wanted:
            found[stop] = union(parts, route.gap)
            parts = [found[stop]]
    return found


class _Pass:
    """Makes the plan of a pass from its routes: the routes are of one group, the plan of all."""

    def __init__(self, routes: _Routes, phase: Phase) -> None:
        self.routes, self.placement, self.phase = routes, routes.placement, phase
        self.groups = self.placement.groups
        self.all_heads = self.groups[0] if len(self.groups) == 1 else together(self.groups)
        partials = ("out",) if self.placement.wide_partials else ()
        self.wide = (*partials, "dq", "dk", "dv") if self.placement.wide_gradients else partials

    def plan(self, rectangular: bool) -> Plan:
        routes = self.routes
        steps = len(self.groups) * routes.steps
        absent = [each for each in enumerate(routes.holders) if each[0] != each[1]]
        kept = [Kept(rank, ("k", "v"), (owner,)) for owner, rank in absent]
        retained = (
            Kept(rank, ("k", "v"), (owner,), rows=routes.retained[owner])
            for owner in routes.retained
            if (rank := self.placement.retained_by(owner)) is not None
            and routes.rank in (None, rank)
        )
        return Plan(
            self.phase,
            routes.mask,
            rectangular,
            routes.spans,
            self.groups,
            steps,
            tuple(self._computes()),
            (*self._redistributed(absent, steps), *self._moves()),
            self.placement.relay,
            tuple(sorted(kept if self.phase == "backward" else ())),
            retained=tuple(sorted(retained)),
            times=frozenset(self._times()),
        )

    def _moves(self) -> Iterator[Move]:
        """The moves of all groups of heads."""
        assembled, most = self.placement.assembled, max(self.routes.lengths)
        for offset, group, results, side, all_messages in self._travelling():
            for (of_side, owner), hops in self.routes.hops[results].items():
                if of_side != side:
                    continue
                width = self.routes.widths.get((side, owner), most)
                for messages in all_messages:
                    name = messages[0][0]
                    heads = self.all_heads if assembled and name in OF_ROWS else group
                    for posted, needed, source, target, rows in hops:
                        tokens, block = (
                            width if assembled else row_count(rows),
                            Block((owner,), rows),
                        )
                        begin, end = posted + offset, needed + offset
                        wide = name in self.wide
                        yield Move(
                            begin, end, source, target, messages, block, tokens, heads, 0, wide
                        )

    def _times(self) -> Iterator[Time]:
        for offset, _, results, side, all_messages in self._travelling():
            for messages, (posted, needed) in product(
                all_messages, self.routes.times[side, results]
            ):
                yield Time(messages[0][0], posted + offset, needed + offset)

    def _travelling(
        self,
    ) -> Iterator[tuple[int, HeadGroup, bool, Side, tuple[tuple[TensorNames, ...], ...]]]:
        """Tensors that travel, by group of heads, direction and side.

        Yields: (number of steps before the group's first, the group, whether the tensors are
        results, the side, and for each move its messages, each a tuple of tensor names).
        """
        forward, assembled = self.phase == "forward", self.placement.assembled
        for number, group in enumerate(self.groups):
            of_group = number * self.routes.steps, group
            rows = ((("lse", "delta"),),) if not number else ()
            if forward:
                queries: tuple[tuple[TensorNames, ...], ...] = ((("q",),),)
            elif assembled:
                queries = (*rows, (("q", "dout"),))
            else:
                queries = ((("q",), ("dout",), ("delta",), ("lse",)),)
            yield *of_group, False, "queries", queries
            if group.first:
                yield *of_group, False, "keys", (_packed("k", "v", assembled),)
            yield *of_group, True, "queries", (((("out",), ("lse",)) if forward else (("dq",),)),)
            if group.last and not forward:
                yield *of_group, True, "keys", (_packed("dk", "dv", assembled),)

    def _computes(self) -> Iterator[Compute]:
        made = [*(self._joined() if self.placement.assembled else self._by_pairs())]
        for number, group in enumerate(self.groups):
            for step, rank, queries, keys in made:
                yield Compute(step + number * self.routes.steps, rank, queries, keys, group)

    def _by_pairs(self) -> Iterator[tuple[int, int, Block, Block]]:
        for pair in self.routes.pairs:
            query, key, (rank, step, _) = pair
            rows = clipped(self._rows("queries", query, rank), *self.routes.part(pair))
            yield step, rank, Block((query,), rows), Block((key,), self._rows("keys", key, rank))

    def _joined(self) -> Iterator[tuple[int, int, Block, Block]]:
        """One computation for each rank, of all its pairs: step, rank, queries and keys."""
        routes = self.routes
        for _, _, (rank, step, _) in routes.pairs:
            blocks = []
            for side, owners in zip(SIDES, self.placement.blocks_of(rank), strict=True):
                held = {
                    owner: self._rows(side, owner, rank)
                    for owner in sorted(owners)
                    if (side, owner) in routes.hops[False] or routes.home(side, owner) == rank
                }
                tokens = sum(routes.lengths[owner] for owner in held)
                rows = between(0, tokens)
                if sum(map(row_count, held.values())) < tokens:
                    rows = rows_of_all([(routes.spans[owner], x) for owner, x in held.items()])
                blocks.append(Block(tuple(held), rows))
            yield step, rank, blocks[0], blocks[1]

    def _rows(self, side: Side, owner: int, rank: int) -> Rows:
        """Rows of a block that a rank has."""
        rows = self.routes.received.get((side, owner, rank))
        return between(0, self.routes.lengths[owner]) if rows is None else rows

    def _redistributed(self, absent: Iterable[tuple[int, int]], steps: int) -> Iterator[Move]:
        """Moves of keys and values to their holders before the first step, and of their gradients
        back to the owners after the last; always of all ranks, because all exchange them together.
        """
        for owner, holder in absent:
            tokens = self.routes.lengths[owner]
            block = Block((owner,), between(0, tokens))
            times, ends, names = (-2, -1), (owner, holder), (("k",), ("v",))
            if self.phase == "backward":
                times, ends, names = (steps, steps + 1), (holder, owner), (("dk",), ("dv",))
            yield Move(*times, *ends, names, block, tokens, self.all_heads)


def _packed(first: str, second: str, assembled: bool) -> tuple[TensorNames, ...]:
    return ((first, second),) if assembled else ((first,), (second,))
