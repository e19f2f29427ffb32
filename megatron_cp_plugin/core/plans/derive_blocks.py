"""Plans of placements that say where blocks meet, in the making: of all ranks at once, or of one
where a mask has no say in what travels.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product, starmap, zip_longest
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
from megatron_cp_plugin.core.layout import rows_of
from megatron_cp_plugin.core.pipeline import together
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.plans.plan import (
    OF_KEYS,
    OF_ROWS,
    Block,
    Compute,
    Kept,
    Move,
    Plan,
    Setting,
    TensorNames,
    Time,
    later,
)
from megatron_cp_plugin.errors import ConfigError

Side = Literal["queries", "keys"]


@dataclass
class Visit:
    """What one rank does with a block that it did not hold before.

    Attributes: first, last: steps. needed: rows that it computes with. given: those that come, with
        what others get from there.
    """

    rank: int
    first: int
    last: int
    needed: Rows = ()
    given: Rows = ()

    def add(self, step: int, rows: Rows) -> None:
        self.first, self.last = min(self.first, step), max(self.last, step)
        self.needed = union((self.needed, rows)) if self.needed else rows


class Cell(NamedTuple):
    """A pair of blocks that has a place. Attributes: start, stop: rows of the queries."""

    place: Place
    query: int
    key: int
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether they are all rows of the block."""
        return self.place.part[1] == 1


class Derivation:
    """A plan of a block placement in the making: of one group of heads first, then of all.

    Attributes:
        masked: pairs of blocks that do not see each other are left out. selective: so are rows.
        at_once: which rows meet is found for all pairs of blocks together.
        cells: what is computed. visits: what comes to which rank, by side and owner of the block.
    """

    def __init__(self, placement: BlockPlacement, setting: Setting) -> None:
        self.placement, self.setting = placement, setting
        size, layout = placement.size, placement.layout.within(setting.mask.followed)
        self.tokens = layout, size, setting.seq_len
        self.spans = Owned.of(layout, size, setting.seq_len)
        special, gaps = bool(setting.mask.special), self.spans.gaps
        self.masked = placement.masked or (special and not gaps)
        # Whole blocks need not be packed; where ranks pass them on, few would be any shorter.
        self.selective = self.masked and (special or not placement.relay)
        self.at_once = self.masked and not gaps
        self.lengths = self.spans.lengths
        self.width = max(self.lengths)
        groups = placement.groups
        self.all_heads = groups[0] if len(groups) == 1 else together(groups)
        self.cells: list[Cell] = []
        self.visits: dict[tuple[Side, int], dict[int, Visit]] = {}
        # Where blocks are that nobody needs there: of a relay, (rank, step).
        self.passing: dict[tuple[Side, int], list[tuple[int, int]]] = {}
        self.steps = 1 + self._meet()
        # By the rank that is planned; both passes have the same.
        self.computes: dict[int | None, tuple[Compute, ...]] = {}

    def _meet(self) -> int:
        """Finds out which blocks meet where, and what comes to ranks. Returns: the last step."""
        placement, size = self.placement, self.placement.size
        sparse = self.masked and not placement.relay and not placement.assembled
        everyone, rank = product(range(size), range(size)), self.setting.rank
        for query, key in everyone if rank is None else placement.met(rank):
            if not sparse or self._sees(query, key):
                for place in placement.place(query, key):
                    self._add(query, key, place)
        for (side, owner), visits in self.visits.items():
            self._cut(visits, self.passing.get((side, owner), ()))
            self._give(side, owner, visits)
        self.widths = self._join_teams() if placement.assembled and self.masked else {}
        found = [v.last for visits in self.visits.values() for v in visits.values()]
        return max([*found, *(cell.place.step for cell in self.cells)], default=0)

    def _add(self, query: int, key: int, place: Place) -> None:
        if not (0 <= place.rank < self.placement.size and place.step >= 0):
            raise ConfigError(
                f"queries of rank {query} meet keys of rank {key} on rank {place.rank} in step "
                f"{place.step}: use ranks 0 to {self.placement.size - 1} and steps from 0"
            )
        index, count = place.part
        tokens = self.lengths[query]
        start, stop = tokens * index // count, tokens * (index + 1) // count
        cell = Cell(place, query, key, start, stop)
        needed = not self.masked or self._has_pairs(cell)
        if needed:
            self.cells.append(cell)
        if place.rank != query:
            self._visit("queries", query, place, self._queries_of(cell) if needed else ())
        if place.rank != self.placement.key_holder(key):
            self._visit("keys", key, place, self._keys_of(cell) if needed else ())

    def _has_pairs(self, cell: Cell) -> bool:
        """Whether any query of a cell sees any key."""
        _, query, key, start, stop = cell
        if cell.whole or not self._sees(query, key):
            return self._sees(query, key)
        return sees(rows_of(self.spans[query], start, stop), self.spans[key], self.setting.mask)

    def _queries_of(self, cell: Cell) -> Rows:
        """Rows of the queries that come for a cell: all, or those that see any of its keys."""
        if not self.selective:
            return between(cell.start, cell.stop)
        if self.at_once and cell.whole:
            return self.queries_seeing[cell.key][cell.query]
        rows, _ = self._touched(cell)
        return tuple((cell.start + first, cell.start + last) for first, last in rows)

    def _keys_of(self, cell: Cell) -> Rows:
        """Rows of the keys that come for a cell: all, or those that any of its queries sees."""
        if not self.selective:
            return between(0, self.lengths[cell.key])
        if self.at_once and cell.whole:
            return self.keys_seen[cell.query][cell.key]
        return self._touched(cell)[1]

    def _touched(self, cell: Cell) -> tuple[Rows, Rows]:
        queries = rows_of(self.spans[cell.query], cell.start, cell.stop)
        return touched_rows(queries, self.spans[cell.key], self.setting.mask)

    def _sees(self, query: int, key: int) -> bool:
        if self.at_once:
            return key in self.keys_seen[query]
        return sees(self.spans[query], self.spans[key], self.setting.mask)

    @cached_property
    def keys_seen(self) -> list[dict[int, Rows]]:
        """See `touched.keys_seen`."""
        return keys_seen(*self.tokens, self.setting.mask)

    @cached_property
    def queries_seeing(self) -> list[dict[int, Rows]]:
        """See `touched.queries_seeing`."""
        return queries_seeing(*self.tokens, self.setting.mask)

    def _visit(self, side: Side, owner: int, place: Place, rows: Rows) -> None:
        if self.masked and self.placement.relay and not rows:
            self.passing.setdefault((side, owner), []).append((place.rank, place.step))
            return
        visits = self.visits.setdefault((side, owner), {})
        if place.rank not in visits:
            visits[place.rank] = Visit(place.rank, place.step, place.step)
        visits[place.rank].add(place.step, rows)

    def _cut(self, visits: dict[int, Visit], passing: Iterable[tuple[int, int]]) -> None:
        """Leaves out what the mask makes needless; a leg goes on to the last that needs it."""
        placement = self.placement
        if not self.masked or placement.assembled:
            return
        others: dict[int, Visit] = {}
        for rank, step in passing:
            known = visits if rank in visits else others
            known.setdefault(rank, Visit(rank, step, step)).add(step, ())
        last: dict[int, int] = {}  # by leg: when the last rank that needs the block gets it
        for visit in visits.values():
            if visit.needed:
                leg = placement.leg(visit.rank)
                last[leg] = max(visit.first, last.get(leg, -1))
        visits.update(others)
        for visit in list(visits.values()):
            relayed = placement.relay and visit.first <= last.get(placement.leg(visit.rank), -1)
            if not visit.needed and not relayed:
                del visits[visit.rank]

    def _give(self, side: Side, owner: int, visits: dict[int, Visit]) -> None:
        """Works out which rows come to every rank."""
        gap = longest_gap(self.lengths[owner])
        for visit in visits.values():
            if visit.needed:
                visit.given = visit.needed = union((visit.needed,), gap)
        if self.placement.assembled or self.placement.retained_by(owner) is not None:
            all_rows = union((visit.needed for visit in visits.values()), gap)
            for visit in visits.values():
                visit.given = all_rows
        elif self.placement.relay:
            for source, _, visit in reversed(
                list(self._sources(self._holder(side, owner), visits))
            ):
                if source in visits:
                    before = visits[source]
                    before.given = added(before.given, visit.given, gap)

    def _join_teams(self) -> dict[tuple[bool, int], int]:
        """Rows of a message of queries (false), of keys (true), by their owner: as many as the
        longest one of all that come together has. What would have none does not travel.
        """
        teams: dict[tuple[Side, frozenset[int]], list[int]] = {}
        for (side, owner), visits in self.visits.items():
            team = side, frozenset((self._holder(side, owner), *visits))
            teams.setdefault(team, []).append(owner)
        widths: dict[tuple[bool, int], int] = {}
        for (side, _), owners in teams.items():
            given = (v.given for owner in owners for v in self.visits[side, owner].values())
            width = max(map(row_count, given), default=0)
            for owner in owners:
                widths[side == "keys", owner] = width
                if not width:
                    self.visits[side, owner].clear()
        return widths

    def plan(self) -> Plan:
        placement, setting = self.placement, self.setting
        self.times: set[tuple[str, int, int]] = set()
        templates = [*self._inputs(), *self._results()]
        if setting.rank not in self.computes:
            first = tuple(self._assembled() if placement.assembled else self._computes())
            groups = enumerate(placement.groups) if len(placement.groups) > 1 else ()
            of_all = [one.later(i * self.steps, group) for i, group in groups for one in first]
            self.computes[setting.rank] = tuple(of_all) or first
        moves = [*self._to_key_holders(), *self._of_groups(templates)]
        moves += self._from_key_holders(len(placement.groups) * self.steps)
        return Plan(
            setting.phase,
            setting.mask,
            setting.rectangular,
            self.spans,
            placement.groups,
            len(placement.groups) * self.steps,
            self.computes[setting.rank],
            tuple(moves),
            placement.relay,
            self._kept(),
            retained=tuple(sorted(self._retained())),
            times=frozenset(self._times() if setting.rank is not None else ()),
        )

    def _of_groups(self, templates: Sequence[Move]) -> Iterator[Move]:
        """Moves of all groups of heads. Args: templates: of the first one, with all heads."""
        if len(self.placement.groups) == 1:
            yield from templates
            return
        kinds = [
            (move, move.result, move.of_keys, self.placement.assembled and move.of_rows)
            for move in templates
        ]
        for index, group in enumerate(self.placement.groups):
            unshared = {True: group.last, False: group.first}
            some = [
                (move, self.all_heads if once else group)
                for move, result, of_keys, once in kinds
                if (unshared[result] or not of_keys) and not (once and index)
            ]
            yield from later(some, index * self.steps)

    def _times(self) -> Iterator[Time]:
        """Those of all groups of heads."""
        for index, group in enumerate(self.placement.groups):
            offset = index * self.steps
            for time in starmap(Time, self.times):
                shared = time.of_keys and not (group.last if time.result else group.first)
                once = time.tensor in OF_ROWS and self.placement.assembled
                if not shared and not (once and index):
                    yield Time(time.tensor, time.posted + offset, time.needed + offset)

    def _computes(self) -> Iterator[Compute]:
        for place, query, key, start, stop in self.cells:
            if not self._concerns(place.rank):
                continue
            queries = self._block("queries", query, place.rank, start, stop)
            keys = self._block("keys", key, place.rank, 0, self.lengths[key])
            yield Compute(place.step, place.rank, queries, keys, self.all_heads)

    def _block(self, side: Side, owner: int, rank: int, start: int, stop: int) -> Block:
        """The rows with which a rank computes, no more than it has."""
        visit = self.visits.get((side, owner), {}).get(rank)
        rows = between(start, stop)
        return Block((owner,), rows if visit is None else clipped(visit.given, start, stop))

    def _assembled(self) -> Iterator[Compute]:
        """All cells of a rank and step as one computation."""
        for step, rank in dict.fromkeys((cell.place.step, cell.place.rank) for cell in self.cells):
            if not self._concerns(rank):
                continue
            queries, keys = self._joined("queries", rank), self._joined("keys", rank)
            yield Compute(step, rank, queries, keys, self.all_heads)

    def _joined(self, side: Side, rank: int) -> Block:
        """All that a rank has, its own block and what came, as one."""
        held: dict[int, Rows] = {}
        for owner, length in enumerate(self.lengths):
            visit = self.visits.get((side, owner), {}).get(rank)
            if visit is not None:
                held[owner] = visit.given
            elif self._holder(side, owner) == rank:
                held[owner] = between(0, length)
        tokens = sum(self.lengths[owner] for owner in held)
        if sum(map(row_count, held.values())) == tokens:
            return Block(tuple(held), between(0, tokens))
        blocks = [(self.spans[owner], rows) for owner, rows in held.items()]
        return Block(tuple(held), rows_of_all(blocks))

    def _inputs(self) -> Iterator[Move]:
        for (side, owner), visits in self.visits.items():
            retaining = self.placement.retained_by(owner)
            holder, others = self._holder(side, owner), visits
            if side == "keys" and retaining is not None and self.setting.phase == "backward":
                holder = retaining
                others = {rank: visit for rank, visit in visits.items() if rank != retaining}
            sources = list(self._sources(holder, others))
            times = {(posted, visit.first) for _, posted, visit in sources}
            sources = [each for each in sources if self._concerns(each[0], each[2].rank)]
            for messages in self._messages(side, results=False):
                self.times.update((messages[0][0], *time) for time in times)
                for source, posted, visit in sources:
                    yield self._move(
                        posted, visit.first, source, visit.rank, messages, owner, visit.given
                    )

    def _sources(self, holder: int, visits: dict[int, Visit]) -> Iterator[tuple[int, int, Visit]]:
        """From whom, and when, every rank gets a block: as soon as the other one has it."""
        placement = self.placement
        source = head = holder, 0  # of the leg: a rank, and since when it has the block
        leg = placement.leg(holder)
        for visit in sorted(visits.values(), key=lambda visit: visit.first):
            if not placement.relay:
                yield holder, visit.first - 1, visit
                continue
            has = visit.rank, visit.first
            if placement.leg(visit.rank) == leg:
                yield *source, visit
            else:
                yield *head, visit
                leg, head = placement.leg(visit.rank), has
            source = has

    def _results(self) -> Iterator[Move]:
        placement = self.placement
        for (side, owner), visits in self.visits.items():
            all_messages = [*self._messages(side, results=True)]
            if not all_messages:
                continue
            holder = self._holder(side, owner)
            gap = longest_gap(self.lengths[owner])
            legs: dict[int, list[tuple[Visit, Rows]]] = {}
            for visit in sorted(visits.values(), key=lambda visit: visit.first):
                leg = legs.setdefault(placement.leg(visit.rank) if placement.relay else -1, [])
                if not placement.relay:
                    leg.append((visit, visit.given))
                # Nothing is sent before there is something to add.
                elif leg or visit.needed:
                    before = leg[-1][1] if leg else ()
                    leg.append((visit, added(before, visit.needed, gap)))
            times: set[tuple[int, int]] = set()
            found: list[tuple[int, int, int, int, Rows]] = []
            for number, leg in legs.items():
                lag = 1 if number in (-1, placement.leg(holder)) else placement.lag
                for (visit, rows), after in zip_longest(leg, leg[1:] if placement.relay else ()):
                    target, needed = holder, visit.last + lag
                    if after is not None:
                        target, needed = after[0].rank, after[0].last
                    times.add((visit.last, needed))
                    if self._concerns(visit.rank, target):
                        found.append((visit.last, needed, visit.rank, target, rows))
            for messages in all_messages:
                self.times.update((messages[0][0], *time) for time in times)
                for posted, needed, source, target, rows in found:
                    yield self._move(posted, needed, source, target, messages, owner, rows)

    def _concerns(self, *ranks: int) -> bool:
        """Whether the plan is of all ranks, or of one of these."""
        return self.setting.rank is None or self.setting.rank in ranks

    def _move(
        self,
        posted: int,
        needed: int,
        source: int,
        target: int,
        messages: tuple[TensorNames, ...],
        owner: int,
        rows: Rows,
    ) -> Move:
        block, tokens = Block((owner,), rows), row_count(rows)
        if self.placement.assembled:
            tokens = self.widths.get((messages[0][0] in OF_KEYS, owner), self.width)
        wide = messages[0][0] in self._wide
        return Move(
            posted, needed, source, target, messages, block, tokens, self.all_heads, 0, wide
        )

    @cached_property
    def _wide(self) -> TensorNames:
        partials = ("out",) if self.placement.wide_partials else ()
        return (*partials, "dq", "dk", "dv") if self.placement.wide_gradients else partials

    def _holder(self, side: Side, owner: int) -> int:
        return owner if side == "queries" else self.placement.key_holder(owner)

    def _messages(self, side: Side, *, results: bool) -> Iterator[tuple[TensorNames, ...]]:
        """What travels of a block, in one go each: the tensors by message."""
        forward, assembled = self.setting.phase == "forward", self.placement.assembled
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

    def _to_key_holders(self) -> Iterator[Move]:
        """Keys and values go to their holders before anything else; for the backward they stay."""
        if self.setting.phase == "forward":
            for owner, holder in self._absent():
                yield self._whole(-2, -1, owner, holder, (("k",), ("v",)), owner)

    def _from_key_holders(self, steps: int) -> Iterator[Move]:
        if self.setting.phase == "backward":
            for owner, holder in self._absent():
                yield self._whole(steps, steps + 1, holder, owner, (("dk",), ("dv",)), owner)

    def _kept(self) -> tuple[Kept, ...]:
        if self.setting.phase == "forward":
            return ()
        kept = (Kept(holder, ("k", "v"), (owner,)) for owner, holder in self._absent())
        return tuple(sorted(kept))

    def _retained(self) -> Iterator[Kept]:
        for owner in range(self.placement.size):
            rank = self.placement.retained_by(owner)
            if rank is not None:
                rows = self.visits["keys", owner][rank].given
                yield Kept(rank, ("k", "v"), (owner,), rows=rows)

    def _absent(self) -> Iterator[tuple[int, int]]:
        """Owners whose keys others hold: of all ranks, which exchange them together."""
        for owner in range(self.placement.size):
            holder = self.placement.key_holder(owner)
            if holder != owner:
                yield owner, holder

    def _whole(
        self,
        posted: int,
        needed: int,
        source: int,
        target: int,
        messages: tuple[TensorNames, ...],
        owner: int,
    ) -> Move:
        tokens = self.lengths[owner]
        block = Block((owner,), between(0, tokens))
        return Move(posted, needed, source, target, messages, block, tokens, self.all_heads)


def added(rows: Rows, others: Rows, gap: int) -> Rows:
    """The union of two, of which most often one has nothing that the other one has not."""
    if not others or rows == others:
        return rows
    return union((rows, others), gap) if rows else others


def _packed(tensors: TensorNames, assembled: bool) -> tuple[TensorNames, ...]:
    return (tensors,) if assembled else tuple((name,) for name in tensors)
