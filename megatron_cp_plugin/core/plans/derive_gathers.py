"""Derives one rank's part of a plan in which teams of ranks gather blocks."""

from collections.abc import Iterable, Iterator
from itertools import product

from megatron_cp_plugin.core.blocks.rows import Rows, between, row_count, union
from megatron_cp_plugin.core.blocks.touched import longest_gap
from megatron_cp_plugin.core.placement import Place
from megatron_cp_plugin.core.plans.derive_blocks import Cell, Derivation, Side, Visit
from megatron_cp_plugin.core.plans.plan import Move


class OneGathering(Derivation):
    """Without looking at what travels in teams that the rank is not in, but whether anything does.

    The ranks that compute with the same queries are a team, and those that do with the same keys.
    """

    def _meet(self) -> int:
        """See Derivation."""
        rank = self._rank
        queries, keys = self.placement.blocks_of(rank)
        if not self.masked or any(self._sees(*pair) for pair in product(queries, keys)):
            self.cells.append(Cell(Place(rank, 0), queries[0], keys[0], 0, self.lengths[rank]))
        self.widths = {}
        self.travelling: list[Side] = []
        found: dict[tuple[Side, int], dict[int, Visit]] = {}
        teams: dict[Side, tuple[int, ...]] = {"queries": queries, "keys": keys}
        for side, owners in teams.items():
            if len(owners) == 1:
                continue
            given = self._given(side, owners)
            width = max(map(row_count, given.values()))
            if self.masked:
                self.widths.update({(side == "keys", owner): width for owner in owners})
            if width or self._any_travels(side):
                self.travelling.append(side)
            for owner in owners if width else ():
                mine = self._holder(side, owner) == rank
                targets = self._others_with(side, owner) if mine else (rank,)
                found[side, owner] = {
                    target: Visit(target, 0, 0, given=given[owner]) for target in targets
                }
        # In the order in which pairs of queries and keys are.
        self.visits = dict(sorted(found.items(), key=lambda item: self._first_pair(*item[0])))
        return 0

    @property
    def _rank(self) -> int:
        assert self.setting.rank is not None
        return self.setting.rank

    def _given(self, side: Side, owners: tuple[int, ...]) -> dict[int, Rows]:
        """Of the blocks of a team the rows that travel: all that any other rank of it needs."""
        if not self.masked:
            return {owner: between(0, self.lengths[owner]) for owner in owners}
        # Blocks of the other side that a block meets where it is from the beginning.
        stays = {
            owner: self.placement.blocks_of(self._holder(side, owner))[side == "queries"]
            for owner in owners
        }
        needed: dict[int, list[Rows]] = {owner: [] for owner in owners}
        for other, seen in enumerate(self._seen(side)):
            for owner in needed.keys() & seen.keys():
                if other not in stays[owner]:
                    needed[owner].append(seen[owner])
        return {
            owner: union(parts, longest_gap(self.lengths[owner])) for owner, parts in needed.items()
        }

    def _any_travels(self, side: Side) -> bool:
        """Whether any rank needs rows of another rank's block."""
        return any(
            rows and self._place(side, owner, other).rank != self._holder(side, owner)
            for other, seen in enumerate(self._seen(side))
            for owner, rows in seen.items()
        )

    def _seen(self, side: Side) -> list[dict[int, Rows]]:
        return self.keys_seen if side == "keys" else self.queries_seeing

    def _place(self, side: Side, owner: int, other: int) -> Place:
        """Where a block meets one of the other side."""
        pair = (other, owner) if side == "keys" else (owner, other)
        (place,) = self.placement.place(*pair)
        return place

    def _others_with(self, side: Side, owner: int) -> Iterable[int]:
        """The other ranks that compute with a block, in the order of those of the other side."""
        holder = self._holder(side, owner)
        places = (self._place(side, owner, other) for other in range(self.placement.size))
        return dict.fromkeys(place.rank for place in places if place.rank != holder)

    def _first_pair(self, side: Side, owner: int) -> tuple[int, int, bool]:
        """The first pair of queries and keys for which a block travels."""
        holder = self._holder(side, owner)
        ranks = range(self.placement.size)
        other = next(x for x in ranks if self._place(side, owner, x).rank != holder)
        return (other, owner, True) if side == "keys" else (owner, other, False)

    def _inputs(self) -> Iterator[Move]:
        """See Derivation."""
        yield from super()._inputs()
        for side in self.travelling:
            for messages in self._messages(side, results=False):
                self.times.add((messages[0][0], -1, 0))

    def _results(self) -> Iterator[Move]:
        """See Derivation."""
        yield from super()._results()
        for side in self.travelling:
            for messages in self._messages(side, results=True):
                self.times.add((messages[0][0], 0, 1))
