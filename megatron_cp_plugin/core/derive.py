"""From a placement, a mask and a length to a plan: what every rank computes, sends and receives."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product, zip_longest
from typing import Literal, NamedTuple

from megatron_cp_plugin.core.derive_heads import with_teams
from megatron_cp_plugin.core.documents import Spans, by_document
from megatron_cp_plugin.core.layout import Layout, rows_of
from megatron_cp_plugin.core.pipeline import together
from megatron_cp_plugin.core.placement import BlockPlacement, HeadPlacement, Place, Placement
from megatron_cp_plugin.core.plan import (
    OF_ROWS,
    Block,
    Compute,
    Kept,
    Move,
    Plan,
    Setting,
    TensorNames,
)
from megatron_cp_plugin.core.tiles import Mask, plan_tiles, sees
from megatron_cp_plugin.errors import ConfigError

Side = Literal["queries", "keys"]


@lru_cache(maxsize=64)
def plan_of(placement: Placement, setting: Setting) -> Plan:
    """The plan of one pass, made once: at short lengths a step of training is bound by the host."""
    if isinstance(placement, HeadPlacement):
        return with_teams(placement, plan_of(placement.between, setting))
    return _Derivation(placement, setting).plan()


@lru_cache(maxsize=64)
def plan_of_rank(placement: BlockPlacement, setting: Setting, rank: int) -> Plan:
    """The part of a plan that one rank follows: what it computes, sends and receives.

    Raises: ValueError for a relay, where what a rank sends depends on all others.
    """
    if placement.relay:
        raise ValueError("a relay is planned for all ranks: use plan_of")
    plan = _Derivation(placement, setting, rank).plan()
    return replace(
        plan,
        computes=tuple(compute for compute in plan.computes if compute.rank == rank),
        moves=tuple(move for move in plan.moves if rank in (move.source, move.target)),
    )


@dataclass
class _Visit:
    """What one rank does with a block that it did not hold before.

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
    """A plan of a block placement in the making: of one group of heads first, then of all."""

    def __init__(
        self, placement: BlockPlacement, setting: Setting, rank: int | None = None
    ) -> None:
        """Args: rank: only what it follows need be right; None: the plan of all."""
        self.placement, self.setting = placement, setting
        size, layout = placement.size, placement.layout.within(setting.mask.documents)
        self.spans = tuple(layout.spans(rank, size, setting.seq_len) for rank in range(size))
        if placement.masked:
            self.seen = _seen(layout, size, setting.seq_len, setting.mask)
        self.lengths = tuple(sum(map(len, spans)) for spans in self.spans)
        self.width = max(self.lengths)
        groups = placement.groups
        self.all_heads = groups[0] if len(groups) == 1 else together(groups)
        self.cells: list[_Cell] = []
        self.visits: dict[tuple[Side, int], dict[int, _Visit]] = {}
        for query, key in (
            product(range(size), range(size)) if rank is None else placement.met(rank)
        ):
            for place in placement.place(query, key):
                self._add(query, key, place)
        for visits in self.visits.values():
            self._cut(visits)
        found = [v.last for visits in self.visits.values() for v in visits.values()]
        self.steps = 1 + max([*found, *(cell.place.step for cell in self.cells)], default=0)

    def _add(self, query: int, key: int, place: Place) -> None:
        if not (0 <= place.rank < self.placement.size and place.step >= 0):
            raise ConfigError(
                f"queries of rank {query} meet keys of rank {key} on rank {place.rank} in step "
                f"{place.step}: use ranks 0 to {self.placement.size - 1} and steps from 0"
            )
        index, count = place.part
        tokens = self.lengths[query]
        start, stop = tokens * index // count, tokens * (index + 1) // count
        queries, keys = self.spans[query], self.spans[key]
        masked = self.placement.masked
        needed = not masked or self.seen[query][key]
        if needed and masked and count > 1:
            queries = rows_of(queries, start, stop)
            needed = sees(queries, keys, self.setting.mask)
        if needed:
            self.cells.append(_Cell(place, query, key, start, stop))
        touched = (start, stop), (0, self.lengths[key])
        if needed and masked and not self.placement.relay:
            touched = _touched(queries, keys, self.setting, start)
        if place.rank != query:
            self._visit("queries", query, place, touched[0] if needed else (0, 0))
        if place.rank != self.placement.key_holder(key):
            self._visit("keys", key, place, touched[1] if needed else (0, 0))

    def _visit(self, side: Side, owner: int, place: Place, rows: tuple[int, int]) -> None:
        visits = self.visits.setdefault((side, owner), {})
        if place.rank not in visits:
            visits[place.rank] = _Visit(place.rank, place.step, place.step, 0, 0)
        visits[place.rank].add(place.step, *rows)

    def _cut(self, visits: dict[int, _Visit]) -> None:
        """Leaves out what the mask makes needless; a leg goes on to the last that needs it."""
        placement = self.placement
        if not placement.masked:
            return
        last: dict[int, int] = {}  # by leg
        for visit in visits.values():
            if visit.start < visit.stop:
                leg = placement.leg(visit.rank)
                last[leg] = max(visit.first, last.get(leg, -1))
        for visit in list(visits.values()):
            relayed = placement.relay and visit.first <= last.get(placement.leg(visit.rank), -1)
            if visit.start == visit.stop and not relayed:
                del visits[visit.rank]

    def plan(self) -> Plan:
        placement, setting = self.placement, self.setting
        templates = [*self._inputs(), *self._results()]
        computes = list(self._assembled() if placement.assembled else self._computes())
        moves: list[Move] = [*self._to_key_holders()]
        for index, group in enumerate(placement.groups):
            offset = index * self.steps
            for move in templates:
                shared = move.of_keys and not (group.last if move.result else group.first)
                once = move.messages[0][0] in OF_ROWS and placement.assembled
                if shared or (once and index):
                    continue
                heads = self.all_heads if once else group
                if offset or heads is not move.heads:
                    posted, needed = move.posted + offset, move.needed + offset
                    move = move._replace(posted=posted, needed=needed, heads=heads)
                moves.append(move)
        moves += self._from_key_holders(len(placement.groups) * self.steps)
        return Plan(
            setting.phase,
            setting.mask,
            setting.rectangular,
            self.spans,
            placement.groups,
            len(placement.groups) * self.steps,
            tuple(
                compute._replace(step=compute.step + index * self.steps, heads=group)
                for index, group in enumerate(placement.groups)
                for compute in computes
            ),
            tuple(moves),
            placement.relay,
            self._kept(),
            retained=tuple(sorted(self._retained())),
        )

    def _computes(self) -> Iterator[Compute]:
        for place, query, key, start, stop in self.cells:
            queries = self._block("queries", query, place.rank, start, stop)
            keys = self._block("keys", key, place.rank, 0, self.lengths[key])
            yield Compute(place.step, place.rank, queries, keys, self.all_heads)

    def _block(self, side: Side, owner: int, rank: int, start: int, stop: int) -> Block:
        """The rows with which a rank computes, no more than it has."""
        visit = self.visits.get((side, owner), {}).get(rank)
        if visit is not None:
            start, stop = max(start, visit.start), min(stop, visit.stop)
        return Block((owner,), start, stop)

    def _assembled(self) -> Iterator[Compute]:
        """All cells of a rank and step as one computation."""
        owners: dict[tuple[int, int], tuple[set[int], set[int]]] = {}
        for (rank, step, _), query, key, *_ in self.cells:
            queries, keys = owners.setdefault((step, rank), (set(), set()))
            queries.add(query)
            keys.add(key)
        for (step, rank), (queries, keys) in owners.items():
            q_block, k_block = self._joined(queries), self._joined(keys)
            yield Compute(step, rank, q_block, k_block, self.all_heads)

    def _joined(self, owners: set[int]) -> Block:
        return Block(tuple(sorted(owners)), 0, sum(self.lengths[owner] for owner in owners))

    def _inputs(self) -> Iterator[Move]:
        for (side, owner), visits in self.visits.items():
            retaining = self.placement.retained_by(owner)
            holder, others = self._holder(side, owner), visits
            if side == "keys" and retaining is not None and self.setting.phase == "backward":
                holder = retaining
                others = {rank: visit for rank, visit in visits.items() if rank != retaining}
            for messages in self._messages(side, results=False):
                for source, posted, visit in self._sources(holder, others):
                    yield self._move(
                        posted, visit.first, source, visit.rank, messages, owner, visit
                    )

    def _sources(self, holder: int, visits: dict[int, _Visit]) -> Iterator[tuple[int, int, _Visit]]:
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
            holder = self._holder(side, owner)
            legs: dict[int, list[_Visit]] = {}
            for visit in sorted(visits.values(), key=lambda visit: visit.first):
                leg = legs.setdefault(placement.leg(visit.rank) if placement.relay else -1, [])
                # Nothing is sent before there is something to add.
                if leg or visit.start < visit.stop or not placement.masked:
                    leg.append(visit)
            for messages in self._messages(side, results=True):
                for number, leg in legs.items():
                    lag = 1 if number in (-1, placement.leg(holder)) else placement.lag
                    for visit, after in zip_longest(leg, leg[1:] if placement.relay else ()):
                        target, needed = holder, visit.last + lag
                        if after is not None:
                            target, needed = after.rank, after.last
                        yield self._move(
                            visit.last, needed, visit.rank, target, messages, owner, visit
                        )

    def _move(
        self,
        posted: int,
        needed: int,
        source: int,
        target: int,
        messages: tuple[TensorNames, ...],
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
        return tuple(Kept(holder, ("k", "v"), (owner,)) for owner, holder in self._absent())

    def _retained(self) -> Iterator[Kept]:
        for owner in range(self.placement.size):
            rank = self.placement.retained_by(owner)
            if rank is not None:
                yield Kept(rank, ("k", "v"), (owner,))

    def _absent(self) -> Iterator[tuple[int, int]]:
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
        block = Block((owner,), 0, tokens)
        return Move(posted, needed, source, target, messages, block, tokens, self.all_heads)


def sees_all(layout: Layout, size: int, seq_len: int, mask: Mask) -> bool:
    """Whether some query of every rank's block sees some key of every block."""
    return all(map(all, _seen(layout.within(mask.documents), size, seq_len, mask)))


@lru_cache(maxsize=16)  # both passes of a micro-batch have the same
def _seen(layout: Layout, size: int, seq_len: int, mask: Mask) -> tuple[tuple[bool, ...], ...]:
    """[query owner][key owner]: whether any query of the one sees any key of the other."""
    spans = [tuple(filter(len, layout.spans(rank, size, seq_len))) for rank in range(size)]
    if mask == Mask() and all(spans):
        # With a thousand ranks there are a million pairs.
        first = [min(span.start for span in own) for own in spans]
        last = [max(span.positions[-1] for span in own) for own in spans]
        return tuple(tuple(key <= query for key in first) for query in last)
    if not mask.documents or any(span.step > 1 for own in spans for span in own):
        return tuple(tuple(sees(q, k, mask) for k in spans) for q in spans)
    # A block's documents are looked up once, not for each other block.
    inside = replace(mask, documents=())
    parts = [by_document(own, mask.documents) if own else {} for own in spans]
    return tuple(
        tuple(
            any(sees(of_query[n][1], of_key[n][1], inside) for n in of_query.keys() & of_key.keys())
            for of_key in parts
        )
        for of_query in parts
    )


def _touched(
    queries: Spans, keys: Spans, setting: Setting, start: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows of the whole block of queries, of which `start` come before, and of the keys."""
    tiles = plan_tiles(queries, keys, setting.mask, rectangular=setting.rectangular)
    return (
        (start + min(tile.q.start for tile in tiles), start + max(tile.q.stop for tile in tiles)),
        (min(tile.kv.start for tile in tiles), max(tile.kv.stop for tile in tiles)),
    )


def _packed(tensors: TensorNames, assembled: bool) -> tuple[TensorNames, ...]:
    return (tensors,) if assembled else tuple((name,) for name in tensors)
