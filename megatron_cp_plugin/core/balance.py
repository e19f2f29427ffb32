"""Assigns rows to ranks: equally many tokens, equal work, and few parts.

A sequence comes in parts that do not see each other, such as packed documents. Ranks are served one
after another, the last one first. Each gets the longest whole parts that leave enough work to the
others. If the longest part is too much for a rank, the rank gets its last rows, which see most, as
many as give the rank its share of the work once the rest of its room is filled with the shortest
parts. The first rows of that part remain, as a shorter part. So

- a long document lies on as few ranks as its work allows, consecutive ones, on each as one chunk,
  and its keys are needed only by ranks further up: a ring never passes them on all the way round;
- about one short document a rank is cut, to fill the rank up;
- the rows left have the same mean work for all ranks still to be served, so that each of these can
    get exactly its share.

Ranks in multiples of eight, as nodes have them, are served in two steps: first each team of eight
consecutive ranks, then the ranks of each team. A team gets whole parts where some are found that
fill its room and are its share. So a document is cut between two nodes only where it is more than
the first one's share, or where documents are few.

Nothing here depends on masks: the work of rows is a function of their positions. Rows that are cut
off may be more work than in one part with the rows before them. Then the ranks that are served
later, the first ones, get more: gradients of their keys come home while they compute.

Source: none. WLB-LLM (section 5) balances by zigzag inside each document or by whole documents.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, batched, chain, starmap
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from megatron_cp_plugin.core.ranges import Flags, Numbers

TEAM = 8  # ranks that are served together first; a constant, so that all programs cut alike
# What a rank may be off its share, to have whole parts, and what is left for the others is not.
_SLACK = 0.005

# Whole parts are looked for where there are as many for each team; how many may change places, and
# how many of the best changes are tried.
_FEW, _MOST, _TRIED = 4, 32, 16
_BASE = 2**36  # rows and work as one number

Range = tuple[int, int]  # of rows: start and stop
Work = Callable[[int, int], int]


def room(rank: int, size: int, rows: int) -> int:
    """Number of rows that a rank gets: equal, with one more for the first ranks if needed."""
    return rows // size + (rank < rows % size)


def deal(parts: Sequence[Range], size: int, work: Work) -> list[list[Range]]:
    """The rows of every rank.

    Args:
        parts: that follow each other.
        work: of rows [start, stop) of one part, if any: how many keys they see; later rows of a
            part no fewer than earlier ones, or the parts are many.
    """
    total = sum(stop - start for start, stop in parts)
    rooms = [room(rank, size, total) for rank in range(size)]
    if size <= TEAM or size % TEAM:
        return _serve(parts, rooms, work)
    members = list(batched(rooms, TEAM))
    teams = _serve(parts, list(map(sum, members)), work, teams=True)
    served = (_serve(sorted(rows), each, work) for rows, each in zip(teams, members, strict=True))
    return list(chain.from_iterable(served))


def _serve(
    parts: Sequence[Range], rooms: Sequence[int], work: Work, *, teams: bool = False
) -> list[list[Range]]:
    """The rows of every rank, or team. Args: rooms: how many each gets, for equal work."""
    pool = _Pool(parts, work)
    found: list[list[Range]] = [[] for _ in rooms]
    for rank in range(len(rooms) - 1, 0, -1):
        share = pool.work / (rank + 1)
        whole = pool.pack(rooms[rank], share, rank + 1) if teams else []
        found[rank] = whole or pool.serve(rooms[rank], share)
    found[0] = pool.left
    return found


class _Part(NamedTuple):
    """Rows that no rank has yet.

    Attributes:
        density: work per row.
        work: of all of them; load: by its density.
    """

    density: float
    start: int
    stop: int
    rows: int
    work: int
    load: float


_ROWS, _WORK, _LOAD = map(attrgetter, ("rows", "work", "load"))


class _Pool:
    """Parts that are left, in ascending order of work per row. Attributes: work: of all of it."""

    def __init__(self, parts: Sequence[Range], work: Work) -> None:
        self._work = work
        filled = [rows for rows in parts if rows[0] < rows[1]]
        works = np.array(list(starmap(work, filled)), np.int64)
        starts, stops = np.array(filled, np.int64).reshape(-1, 2).T
        counts = stops - starts
        density = works / counts
        order = np.lexsort((starts, density))
        columns = density, starts, stops, counts, works, density * counts
        ordered = (column[order].tolist() for column in columns)
        self._parts = list(map(_Part._make, zip(*ordered, strict=True)))
        self.work = int(works.sum())
        self._low = 0  # parts before this one are taken
        self._begun = -1  # start of the part whose last rows the rank before has
        # Rows and work of all parts before each part; the last entry is the total.
        self._rows, self._works = [0], [0.0]
        self._changed = 0  # the first part that these sums do not include
        self._sum()

    @property
    def left(self) -> list[Range]:
        """All of it."""
        return [(part.start, part.stop) for part in self._parts[self._low :]]

    def _sum(self) -> None:
        """Updates the sums, from the first part that has changed."""
        start = self._changed
        changed = self._parts[start:]
        self._rows[start:] = accumulate(map(_ROWS, changed), initial=self._rows[start])
        self._works[start:] = accumulate(map(_LOAD, changed), initial=self._works[start])
        self._changed = len(self._parts)

    def _add(self, start: int, stop: int) -> None:
        if start < stop:
            rows, work = stop - start, self._work(start, stop)
            density = work / rows
            part = _Part(density, start, stop, rows, work, density * rows)
            index = bisect_left(self._parts, part, self._low)
            self._parts.insert(index, part)
            self.work += part.work
            self._changed = min(self._changed, index)

    def _remove(self, index: int) -> _Part:
        part = self._parts.pop(index)
        self.work -= part.work
        self._changed = min(self._changed, index)
        return part

    def pack(self, room: int, share: float, ranks: int) -> list[Range]:
        """Takes whole parts that fill a room and are its share of the work, if it finds some.

        Parts at equal distances in the order of density nearly are; then one or two of them change
        places with others, or leave, or come. Args: ranks: that are left.
        """
        parts = self._parts[self._low :]
        # The last entry is no part.
        rows, work = (np.array([*map(of, parts), 0]) for of in (_ROWS, _WORK))
        if len(parts) < _FEW * ranks or rows.max() > room or work.max() > share:
            return []
        for first in dict.fromkeys((ranks // 2, (ranks - 1) // 2, ranks // 4)):
            chosen = np.zeros(len(rows), bool)
            chosen[first:-1:ranks] = True
            taken = _changed(chosen, rows, work, room, share)
            if taken:
                for index in reversed(taken):
                    self._remove(self._low + index)
                self._sum()
                self._begun = -1
                return [(parts[index].start, parts[index].stop) for index in taken]
        return []

    def serve(self, room: int, share: float) -> list[Range]:
        """Takes the rows of a rank. Args: room: how many. share: their work."""
        found: list[Range] = []
        slack, wanted = share * _SLACK, share
        while room:
            index = None
            lightest = self._lightest(room, len(self._parts))
            if lightest is None or lightest < wanted - slack:
                index = self._whole(room, wanted + slack, longest=not found)
            part = None if index is None else self._remove(index)
            if part is not None:
                self._sum()
                after = room - part.rows, wanted - part.load
                if self._heaviest(after[0]) < after[1] - slack:
                    self._add(part.start, part.stop)
                    self._sum()
                    part = None
            if part is None:
                return found + self._cut(room, wanted, slack, longest=not found)
            found.append((part.start, part.stop))
            room, wanted = after
        return found

    def _first(self, room: int) -> int:
        """The first part that fills the room together with all lighter ones."""
        return bisect_left(self._rows, room + self._rows[self._low], self._low) - 1

    def _whole(self, room: int, limit: float, *, longest: bool) -> int | None:
        """Takes the densest part that is not too much, whole, with the lightest parts beside it.

        Args: longest: only the densest of all.
        """
        low, high = self._first(room), len(self._parts)
        if self._fits(high - 1, room, limit):
            return high - 1
        if longest or not self._fits(low, room, limit):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle, room, limit) else (low, middle)
        return low

    def _fits(self, index: int, room: int, limit: float) -> bool:
        part = self._parts[index]
        if part.rows > room:
            return False
        lightest = self._lightest(room - part.rows, index)
        return lightest is not None and part.load + lightest <= limit

    def _lightest(self, rows: int, below: int) -> float | None:
        """Work of `rows` rows of the lightest parts, the last rows of the last one; None if those
        below a part are fewer.
        """
        rows, before = rows + self._rows[self._low], self._works[self._low]
        if rows > self._rows[below]:
            return None
        index = bisect_left(self._rows, rows, self._low)
        missing = self._rows[index] - rows
        if not missing:
            return self._works[index] - before
        part = self._parts[index - 1]
        return self._works[index - 1] - before + self._work(part.start + missing, part.stop)

    def _heaviest(self, rows: int) -> float:
        """Work of `rows` rows of the densest parts, the last rows of the last one."""
        rows = max(self._rows[-1] - rows, self._rows[self._low])
        index = bisect_left(self._rows, rows, self._low)
        stop = self._parts[index - 1].stop
        missing = self._rows[index] - rows
        return self._works[-1] - self._works[index] + self._work(stop - missing, stop)

    def _cut(self, room: int, wanted: float, slack: float, *, longest: bool) -> list[Range]:
        """Takes the last rows of one part and the lightest parts for the rest of the room."""
        index = self._heavy(room, wanted, longest=longest)
        most = min(room, self._parts[index].rows)
        rows = 0
        if self._beside(index, room, 0) < wanted - slack:
            rows = _largest(most, lambda count: self._beside(index, room, count) <= wanted)
        too_much = self._beside(index, room, rows) > wanted + slack
        heads = self._heads(room, wanted, index) if too_much else 0
        start, stop = self._remove(index)[1:3]
        found = [(stop - rows, stop)] if rows else []
        self._begun = start if rows else -1
        room, stop = room - rows, stop - rows
        if room and not heads:
            self._cut_behind(start, index, room)
        while room and self._low < index:
            part = self._parts[self._low]
            self._low += 1
            self.work -= part.work
            if part.rows <= room:
                found.append((part.start, part.stop))
                room -= part.rows
                continue
            first, second = part.start + heads, part.stop - room + heads
            found += [(part.start, first)] if heads else []
            found += [(second, part.stop)] if heads < room else []
            self._add(first, second)
            room = 0
        if room:
            found.append((start, start + room))
        self._add(start + room, stop)
        self._sum()
        return found

    def _cut_behind(self, start: int, index: int, room: int) -> None:
        """Lets the light part that is cut, not taken whole, lie behind the heavy one if it can. So
        a rank gets rows of both, from the rank before, in the order of positions.

        Args:
            start, index: of the heavy part.
            room: rows that light parts fill.
        """
        last = self._first(room)  # it would be cut
        if last >= index or self._parts[last].start > start:
            return
        rows = self._rows[last + 1] - self._rows[self._low] - room  # that are left
        left = self._work(self._parts[last].start, self._parts[last].start + rows)
        for other in range(last - 1, self._low - 1, -1):
            part = self._parts[other]
            behind = part.start > start and part.rows > rows > 0
            if behind and self._work(part.start, part.start + rows) == left:
                self._parts[last], self._parts[other] = part, self._parts[last]
                return

    def _heavy(self, room: int, wanted: float, *, longest: bool) -> int:
        """The part whose last rows are taken: the part that the rank before has begun, or the
        densest; to finish a rank, the lightest part that is enough.
        """
        low, top = self._first(room), len(self._parts) - 1
        for index in range(low, top):
            if longest and self._parts[index].start != self._begun:
                continue
            if self._beside(index, room, min(room, self._parts[index].rows)) >= wanted:
                return index
        return top

    def _beside(self, index: int, room: int, rows: int) -> float:
        """Work of a part's last rows with the lightest parts, and then its own first rows."""
        start, stop = self._parts[index][1:3]
        last = self._work(stop - rows, stop)
        lightest = self._lightest(room - rows, index)
        if lightest is None:
            first = room - rows - self._rows[index] + self._rows[self._low]
            lightest = self._works[index] - self._works[self._low]
            lightest += self._work(start, start + first)
        return last + lightest

    def _heads(self, room: int, wanted: float, below: int) -> int:
        """Number of first rows to take of the last of the lightest parts, if its last rows alone
        are too much.
        """
        index = bisect_left(self._rows, room + self._rows[self._low], self._low)
        if index > below:
            return 0
        part = self._parts[index - 1]
        rows = room - self._rows[index - 1] + self._rows[self._low]
        wanted -= self._works[index - 1] - self._works[self._low]

        def too_much(heads: int) -> bool:
            first = self._work(part.start, part.start + heads)
            return first + self._work(part.stop - rows + heads, part.stop) > wanted

        return min(rows, _largest(rows, too_much) + 1)


def _changed(chosen: Flags, rows: Numbers, work: Numbers, room: int, share: float) -> list[int]:
    """Numbers of parts with these rows in all, and this work; none if none are found.

    Args: chosen: parts that nearly have. rows, work: of all parts; the last entry is no part.
    """
    own, others = (np.append(np.flatnonzero(x[:-1]), -1)[-_MOST:] for x in (chosen, ~chosen))
    swaps = np.stack(np.broadcast_arrays(own[:, None], others), -1).reshape(-1, 2)
    change = [of[swaps[:, 1]] - of[swaps[:, 0]] for of in (rows, work)]
    key = change[0] * _BASE + change[1]
    missing = room - int(rows[chosen].sum()), round(share) - int(work[chosen].sum())
    wanted, order = missing[0] * _BASE + missing[1] - key, key.argsort(kind="stable")
    place = key[order].searchsorted(wanted)
    second = order[np.concatenate((place - 1, place)).clip(0, len(key) - 1)]
    off = np.abs(np.tile(wanted, 2) - key[second])
    for at in off.argsort(kind="stable")[:_TRIED].tolist():
        both = swaps[[at % len(key), second[at]]].T
        if any(x == y != -1 for x, y in both.tolist()):
            continue
        changed = chosen.copy()
        changed[both[0]], changed[both[1]] = False, True
        changed[-1] = False
        fills = rows[changed].sum() == room
        if fills and abs(int(work[changed].sum()) - share) <= share * _SLACK:
            return np.flatnonzero(changed).tolist()
    return []


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `most` for which a condition holds; it holds for 0."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
