"""One rank's part of a plan in which blocks go round a ring of all ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_cp_plugin.core.derive_blocks import Cell, Derivation, Side, Visit, added
from megatron_cp_plugin.core.plan import Move
from megatron_cp_plugin.core.rows import Rows, union
from megatron_cp_plugin.core.touched import longest_gap


@dataclass
class _Lap:
    """What concerns a rank of a block that goes round a ring.

    Attributes: hop: of the block to the rank; 0: it owns it. first, last: the hops to those that
        need it. given: rows that come, and that go on. found: rows of the sums that the rank before
        sends, this one, and the last one.
    """

    hop: int
    first: int
    last: int
    given: tuple[Rows, Rows]
    found: tuple[Rows, Rows, Rows]


class OneOfARing(Derivation):
    """One rank's part, where blocks go round: without looking at what passes between others."""

    def _meet(self) -> int:
        """See Derivation."""
        rank, size, side = self.setting.rank, self.placement.size, self.placement.goes_round
        assert rank is not None
        assert side is not None
        self.side: Side = side
        self.up = 1 if side == "keys" else -1
        seen = self.keys_seen if side == "keys" else self.queries_seeing
        for other in sorted(seen[rank]):
            query, key = (rank, other) if side == "keys" else (other, rank)
            (place,) = self.placement.place(query, key)
            self.cells.append(Cell(place, query, key, 0, self.lengths[query]))
        needed: dict[int, dict[int, Rows]] = {}  # by owner and hop
        for visitor, owners in enumerate(seen):
            for owner, rows in owners.items():
                if owner != visitor:
                    of_owner = needed.get(owner) or needed.setdefault(owner, {})
                    of_owner[self.up * (visitor - owner) % size] = rows
        # In the order in which pairs of queries and keys are.
        order = needed if side == "keys" else sorted(needed)
        self.laps = {owner: self._lap(owner, needed[owner]) for owner in order}
        self.widths = {}
        return max((lap.last for lap in self.laps.values()), default=0)

    def _lap(self, owner: int, needed: dict[int, Rows]) -> _Lap:
        rank, size = self.setting.rank, self.placement.size
        assert rank is not None
        hop, first, last = self.up * (rank - owner) % size, min(needed), max(needed)
        gap = longest_gap(self.lengths[owner])

        own = needed.get(hop, ())
        further = union([rows for at, rows in needed.items() if at > hop], gap)
        before = union([rows for at, rows in needed.items() if at < hop], gap)
        lap = _Lap(
            hop,
            first,
            last,
            (added(own, further, gap) if hop else (), further),
            (before, added(before, own, gap), () if hop else further),
        )
        if 1 <= hop <= last:
            visit = Visit(rank, hop, hop, needed.get(hop, ()), lap.given[0])
            self.visits[self.side, owner] = {rank: visit}
        return lap

    def _at(self, owner: int, hop: int) -> int:
        return (owner + self.up * hop) % self.placement.size

    def _add_times(self, hops: set[int], *, results: bool) -> None:
        """Args: hops: that any block makes."""
        for messages in self._messages(self.side, results=results):
            self.times.update((messages[0][0], hop, hop + 1) for hop in hops)

    def _inputs(self) -> Iterator[Move]:
        """See Derivation."""
        laps = self.laps.values()
        self._add_times(set().union(*(range(lap.last) for lap in laps)), results=False)
        for owner, lap in self.laps.items():
            hops = [hop for hop in (lap.hop - 1, lap.hop) if 0 <= hop < lap.last]
            for messages in self._messages(self.side, results=False):
                for hop in hops:
                    rows = lap.given[hop == lap.hop]
                    source, target = self._at(owner, hop), self._at(owner, hop + 1)
                    yield self._move(hop, hop + 1, source, target, messages, owner, rows)

    def _results(self) -> Iterator[Move]:
        """See Derivation."""
        laps = self.laps.values()
        hops_of_all = set().union(*(range(lap.first, lap.last + 1) for lap in laps))
        self._add_times(hops_of_all, results=True)
        for owner, lap in self.laps.items():
            (came, sent, returned), hop = lap.found, lap.hop
            found: list[tuple[int, Rows]] = [] if hop else [(lap.last, returned)]
            if lap.first < hop <= lap.last:
                found.append((hop - 1, came))
            if hop and lap.first <= hop <= lap.last:
                found.append((hop, sent))
            for messages in self._messages(self.side, results=True):
                for hop, rows in found:
                    source = self._at(owner, hop)
                    target = owner if hop == lap.last else self._at(owner, hop + 1)
                    yield self._move(hop, hop + 1, source, target, messages, owner, rows)
