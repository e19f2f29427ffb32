"""Derives one rank's part of a plan in which blocks travel around a ring of all ranks."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_cp_plugin.core.blocks.rows import Rows, union
from megatron_cp_plugin.core.blocks.touched import longest_gap
from megatron_cp_plugin.core.plans.derive_blocks import Cell, Derivation, Side, Visit, added
from megatron_cp_plugin.core.plans.plan import Move, TensorNames

AllMessages = tuple[tuple[TensorNames, ...], ...]


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
        rank, side = self.setting.rank, self.placement.goes_round
        assert rank is not None
        assert side is not None
        self.side: Side = side
        self.up = 1 if side == "keys" else -1
        seen = self.keys_seen if side == "keys" else self.queries_seeing
        for other in sorted(seen[rank]):
            query, key = (rank, other) if side == "keys" else (other, rank)
            (place,) = self.placement.place(query, key)
            self.cells.append(Cell(place, query, key, 0, self.lengths[query]))
        needed = self._needed(seen)
        order = needed if side == "keys" else sorted(needed)
        self.laps = {owner: self._lap(owner, needed[owner]) for owner in order}
        self.widths = {}
        # By what travels; both passes have the same where it is keys.
        self.inputs: dict[AllMessages, tuple[Move, ...]] = {}
        return max((lap.last for lap in self.laps.values()), default=0)

    def _needed(self, seen: Sequence[Mapping[int, Rows]]) -> dict[int, list[tuple[int, Rows]]]:
        """Hops of each block to those that need rows of it, and these rows.

        Blocks are in the order in which pairs of queries and keys are, if it is keys that go round.
        """
        size, up = self.placement.size, self.up
        if all(len(owners) == size > 1 for owners in seen):
            columns = list(zip(*(owners.values() for owners in seen), strict=True))
            hops = range(1, size)
            return {
                owner: list(zip(hops, (*rows[owner + 1 :], *rows[:owner])[::up], strict=True))
                for owner, rows in ((owner, columns[owner]) for owner in (*hops, 0))
            }
        needed: dict[int, list[tuple[int, Rows]]] = {}
        for visitor, owners in enumerate(seen):
            for owner, rows in owners.items():
                if owner != visitor:
                    needed.setdefault(owner, []).append((up * (visitor - owner) % size, rows))
        for found in needed.values():
            found.sort()
        return needed

    def _lap(self, owner: int, needed: Sequence[tuple[int, Rows]]) -> _Lap:
        rank, size = self.setting.rank, self.placement.size
        assert rank is not None
        hop, first, last = self.up * (rank - owner) % size, needed[0][0], needed[-1][0]
        gap = longest_gap(self.lengths[owner])
        index = bisect_left(needed, (hop,))
        here = index < len(needed) and needed[index][0] == hop
        own = needed[index][1] if here else ()
        before, further = (
            union({rows for _, rows in hops}, gap)
            for hops in (needed[:index], needed[index + here :])
        )
        lap = _Lap(
            hop,
            first,
            last,
            (added(own, further, gap) if hop else (), further),
            (before, added(before, own, gap), () if hop else further),
        )
        if 1 <= hop <= last:
            visit = Visit(rank, hop, hop, own, lap.given[0])
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
        all_messages = tuple(self._messages(self.side, results=False))
        if all_messages not in self.inputs:
            self.inputs[all_messages] = tuple(self._inputs_of(all_messages))
        yield from self.inputs[all_messages]

    def _inputs_of(self, all_messages: AllMessages) -> Iterator[Move]:
        for owner, lap in self.laps.items():
            hops = [hop for hop in (lap.hop - 1, lap.hop) if 0 <= hop < lap.last]
            for messages in all_messages:
                for hop in hops:
                    rows = lap.given[hop == lap.hop]
                    source, target = self._at(owner, hop), self._at(owner, hop + 1)
                    yield self._move(hop, hop + 1, source, target, messages, owner, rows)

    def _results(self) -> Iterator[Move]:
        """See Derivation."""
        laps = self.laps.values()
        hops_of_all = set().union(*(range(lap.first, lap.last + 1) for lap in laps))
        self._add_times(hops_of_all, results=True)
        all_messages = tuple(self._messages(self.side, results=True))
        for owner, lap in self.laps.items():
            (came, sent, returned), hop = lap.found, lap.hop
            found: list[tuple[int, Rows]] = [] if hop else [(lap.last, returned)]
            if lap.first < hop <= lap.last:
                found.append((hop - 1, came))
            if hop and lap.first <= hop <= lap.last:
                found.append((hop, sent))
            for messages in all_messages:
                for hop, rows in found:
                    source = self._at(owner, hop)
                    target = owner if hop == lap.last else self._at(owner, hop + 1)
                    yield self._move(hop, hop + 1, source, target, messages, owner, rows)
