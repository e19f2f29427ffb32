"""Ranges of tokens, one as a `Span`, many as an array; and rows of a block, as a few ranges."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Self

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Span:
    """Global token positions start, start + step, ... below stop."""

    start: int
    stop: int
    step: int = 1

    def __hash__(self) -> int:
        # In one key no two spans start at the same position, so the start alone is hashed: a pack
        # of documents has a thousand spans, and there are many keys.
        return hash(self.start)

    def __len__(self) -> int:
        return max(0, -(-(self.stop - self.start) // self.step))

    @property
    def positions(self) -> range:
        return range(self.start, self.stop, self.step)


class Ranges(Sequence[Span]):
    """Spans as an array; `Span` objects are made on demand, because a rank with packed documents
    has a thousand. The elements are positions of a block's tokens, or rows of a block that a kernel
    takes.

    Attributes:
        table: int64 [3,n]: start, stop and step of each range; the step is negative where a kernel
            takes rows in reverse order.
    """

    def __init__(self, table: Numbers) -> None:
        self.table = table

    @classmethod
    def of(cls, spans: Sequence[Span]) -> "Ranges":
        """The ranges of those spans that are not empty."""
        if isinstance(spans, Ranges):
            return spans if spans.lengths.all() else Ranges(spans.table[:, spans.lengths > 0])
        edges = [(span.start, span.stop, span.step) for span in spans if len(span)]
        return cls(np.array(edges, np.int64).reshape(-1, 3).T)

    @classmethod
    def between(cls, starts: Numbers, stops: Numbers) -> Self:
        """Ranges of step 1."""
        return cls(np.stack((starts, stops, np.ones_like(starts))))

    def __len__(self) -> int:
        return self.table.shape[1]

    def __getitem__(self, index: int) -> Span:  # type: ignore[override]
        return Span(*self.table[:, index].tolist())

    def __iter__(self) -> Iterator[Span]:
        return map(Span, *self.table.tolist())

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Ranges) and np.array_equal(self.table, other.table)
        return self is other or same

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.table.tobytes())

    @property
    def start(self) -> Numbers:
        """[n]: the first element of each."""
        return self.table[0]

    @property
    def stop(self) -> Numbers:
        """[n]: where each stops."""
        return self.table[1]

    @property
    def step(self) -> Numbers:
        """[n]: the step of each."""
        return self.table[2]

    @cached_property
    def lengths(self) -> Numbers:
        """[n]: how many elements each has."""
        start, stop, step = self.table
        found: Numbers = np.maximum(-((start - stop) // step), 0)
        return found

    @cached_property
    def ends(self) -> Numbers:
        """[n]: where each range ends when all are packed in succession."""
        return np.cumsum(self.lengths)

    @cached_property
    def total(self) -> int:
        """Number of elements."""
        return int(self.ends[-1]) if len(self) else 0

    @cached_property
    def plain(self) -> bool:
        """Whether all steps are 1."""
        return bool((self.step == 1).all())

    @cached_property
    def extents(self) -> Numbers:
        """[2,n]: the smallest element of each, and the one after its largest."""
        last = self.start + self.step * (self.lengths - 1)
        return np.stack((np.minimum(self.start, last), np.maximum(self.start, last) + 1))

    @property
    def extent(self) -> tuple[int, int]:
        """The smallest of all elements, and the one after the largest."""
        return int(self.extents[0].min()), int(self.extents[1].max())

    @property
    def packed(self) -> Self:
        """The place of each range when all are packed in succession."""
        return self.between(self.ends - self.lengths, self.ends)

    @property
    def elements(self) -> Numbers:
        """All elements, one range after the other."""
        if self.plain:
            line = np.repeat(self.start - offsets(self.lengths), self.lengths)
            line += np.arange(len(line))
            return line
        whose, within = expanded(self.lengths)
        return self.start[whose] + within * self.step[whose]

    @property
    def united(self) -> Self:
        """Ranges of step 1 in ascending order; ranges that touch each other are joined."""
        start, stop, _ = self.table
        if (start[1:] < start[:-1]).any():
            start, stop = self.table[:2, np.argsort(start, kind="stable")]
        first, last = runs(start[1:] != stop[:-1], len(start))
        return self.between(start[first], stop[last])

    def some(self, wanted: Flags | Numbers | Sequence[int] | slice) -> Self:
        """Some of the ranges, in the order of their numbers."""
        return type(self)(self.table[:, wanted])

    def moved(self, by: int | Numbers) -> Self:
        """The ranges moved up by a number. Args: by: of all, or of each [n]."""
        start, stop, step = self.table
        return type(self)(np.stack((start + by, stop + by, step)))

    @property
    def backward(self) -> Self:
        """Each range in reverse order."""
        start, _, step = self.table
        last = start + step * (self.lengths - 1)
        return type(self)(np.stack((last, start - step, -step)))

    def cut(self, rows: Numbers) -> tuple[Self, Numbers]:
        """The elements with some numbers, and the range each piece comes from.

        Args:
            rows: [2,m], where ranges of numbers start and stop, none beyond the last element.

        Returns: a range for each piece of a range that has such elements, and its number.
        """
        start, stop = rows[:, rows[0] < rows[1]]
        first = self.ends.searchsorted(start, side="right")
        which, within = expanded(self.ends.searchsorted(stop) - first + 1)
        whose = first[which] + within
        before, step = (self.ends - self.lengths)[whose], self.step[whose]
        first = self.start[whose] + step * np.maximum(start[which] - before, 0)
        last = self.start[whose] + step * (np.minimum(stop[which], self.ends[whose]) - before - 1)
        return type(self)(np.stack((first, last + np.sign(step), step))), whose


def joined(blocks: Sequence[Ranges]) -> Ranges:
    """The ranges of one block after another."""
    return Ranges(np.concatenate([block.table for block in blocks], 1))


def offsets(lengths: Numbers) -> Numbers:
    """Where each begins if one follows the other: (3, 1, 2) -> (0, 3, 4)."""
    return np.cumsum(lengths) - lengths


def offsets_of_each(whose: Numbers, lengths: Numbers) -> Numbers:
    """As `offsets`, counted anew for each owner. Args: whose: the owner of each, ascending."""
    all_of_them = offsets(lengths)
    return all_of_them - all_of_them[np.searchsorted(whose, whose)]


def expanded(counts: Numbers) -> tuple[Numbers, Numbers]:
    """For groups of such sizes, each element's group and its number in the group.

    (2, 0, 3) -> (0, 0, 2, 2, 2), (0, 1, 0, 1, 2).
    """
    whose = np.repeat(np.arange(len(counts)), counts)
    return whose, np.arange(len(whose)) - np.repeat(offsets(counts), counts)


def runs(apart: Flags, count: int) -> tuple[Numbers, Numbers]:
    """The first and the last element of each run of elements.

    Args: apart: for each element but the first, whether it begins a run.
    """
    begins = np.ones(count, np.bool_)
    begins[1:] = apart
    first = np.flatnonzero(begins)
    after = np.empty_like(first)
    after[:-1], after[-1:] = first[1:], count
    return first, after - 1


def first_fit(
    begins: Numbers, ends: Numbers, loads: Numbers | None = None, most: Sequence[int] = ()
) -> list[list[int]]:
    """Puts elements into as few groups as possible, in each of which every element begins after the
    one before it ends.

    Args:
        begins, ends: [d,n]: where each begins and ends, in d dimensions; ascending in the first.
        loads: [k,n], k numbers of each element.
        most: k largest sums of these in a group of several elements.
    """
    loads = np.zeros((0, begins.shape[1]), np.int64) if loads is None else loads
    if (ends[:, :-1] <= begins[:, 1:]).all() and (loads.sum(1) <= most).all():
        return [[*range(begins.shape[1])]]
    # Of each group the numbers, where the last one ends, and the loads.
    groups: list[tuple[list[int], list[int], list[int]]] = []
    columns = (x.T.tolist() for x in (begins, ends, loads))
    for number, (begin, end, load) in enumerate(zip(*columns, strict=True)):
        for members, reached, carried in groups:
            total = [*map(int.__add__, carried, load)]
            if all(map(int.__ge__, begin, reached)) and all(map(int.__le__, total, most)):
                members.append(number)
                reached[:], carried[:] = end, total
                break
        else:
            groups.append(([number], end, load))
    return [members for members, *_ in groups]


# Half-open ranges of a block's rows, ascending, that do not touch each other.
Rows = tuple[tuple[int, int], ...]

# Rows in gaps shorter than a block's rows divided by this number are sent although nobody needs
# them: every further range costs a copy before and after a message.
_GAPS = 64


def longest_gap(tokens: int) -> int:
    """Longest gap of rows of a block that nobody needs, and that are sent with their neighbours."""
    return tokens // _GAPS


def between(start: int, stop: int) -> Rows:
    """Rows [start, stop)."""
    return ((start, stop),) if start < stop else ()


def row_count(rows: Rows) -> int:
    """Number of rows."""
    return sum(stop - start for start, stop in rows)


def union(parts: Iterable[Rows], gap: int = 0) -> Rows:
    """Union of parts; gaps of at most `gap` rows are filled."""
    distinct = [*{id(rows): rows for rows in parts if rows}.values()]  # a hash takes all of them
    if len(distinct) > 1:
        # Often one of them is all rows.
        first = min(rows[0][0] for rows in distinct)
        whole: Rows = ((first, max(rows[-1][1] for rows in distinct)),)
        distinct = [rows for rows in distinct if rows == whole][:1] or distinct
    if sum(map(len, distinct)) < 2:
        return distinct[0] if distinct else ()
    found: list[tuple[int, int]] = []
    for start, stop in sorted({one for rows in distinct for one in rows}):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def united(edges: Numbers, gap: int) -> Rows:
    """As `union`, for many ranges as an array [2,n], none of them empty."""
    starts, stops = edges[:, np.argsort(edges[0], kind="stable")]
    reached = np.maximum.accumulate(stops)
    first, last = runs(starts[1:] > reached[:-1] + gap, len(starts))
    return tuple(zip(starts[first].tolist(), reached[last].tolist(), strict=True))


def clipped(rows: Rows, start: int, stop: int) -> Rows:
    """The rows that are in [start, stop)."""
    ranges = ((max(first, start), min(last, stop)) for first, last in rows)
    return tuple((first, last) for first, last in ranges if first < last)


@lru_cache(maxsize=4096)
def common(here: Rows, there: Rows) -> tuple[tuple[slice, slice], ...]:
    """Rows that two packed blocks have in common, in pieces: the place of each in both blocks."""
    found = []
    for (first, last), row in _places(here):
        for (low, high), other in _places(there):
            start, stop = max(first, low), min(last, high)
            if start < stop:
                mine = slice(row + start - first, row + stop - first)
                found.append((mine, slice(other + start - low, other + stop - low)))
    return tuple(found)


def _places(rows: Rows) -> Iterator[tuple[tuple[int, int], int]]:
    """Ranges, and where each begins in the packed block."""
    lengths = (stop - start for start, stop in rows)
    return zip(rows, accumulate(lengths, initial=0), strict=False)


def positions_of(spans: Ranges, rows: Rows) -> Ranges:
    """Positions of some rows of a block."""
    return _cut_blocks([(spans, rows)])[1]


def _cut_blocks(blocks: Sequence[tuple[Ranges, Rows]]) -> tuple[Ranges, Ranges, Numbers]:
    """Positions of several blocks, positions of some of their rows, and the spans of these."""
    whole = joined([spans for spans, _ in blocks])
    before = accumulate((spans.total for spans, _ in blocks), initial=0)
    found = [
        (n + start, n + stop)
        for n, (_, rows) in zip(before, blocks, strict=False)
        for start, stop in rows
    ]
    return whole, *whole.cut(np.array(found, np.int64).reshape(-1, 2).T)


def positions_of_all(blocks: Sequence[tuple[Ranges, Rows]]) -> tuple[Ranges, Numbers]:
    """Positions of some rows of several blocks, and the block of each span."""
    _, found, span = _cut_blocks(blocks)
    return found, np.repeat(np.arange(len(blocks)), [len(spans) for spans, _ in blocks])[span]


def rows_of_all(blocks: Sequence[tuple[Ranges, Rows]]) -> Rows:
    """Some rows of several blocks, as rows of one block that joins all positions of these blocks.

    Args: blocks: positions without steps, and rows.
    """
    whole, found, span = _cut_blocks(blocks)
    order = np.argsort(whole.start, kind="stable")
    row = np.empty_like(whole.start)
    row[order] = offsets(whole.lengths[order])
    return united(found.table[:2] + (row - whole.start)[span], 0)
