"""Masks as bands: rectangles of visible (query, key) pairs, each cut by two diagonals.

A causal mask, a window, a packed document and a slice of a span mask are one thing: queries of
[q_start, q_stop) that see those keys of [k_start, k_stop) that are low to high positions later.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from math import lcm
from typing import NamedTuple, Self

import numpy as np

from megatron_cp_plugin.core.layout import Span, Spans, edges_of, without_steps
from megatron_cp_plugin.core.ranges import Numbers, expanded

# Where a mask ends whose length nobody has said, and diagonals that leave all of it.
_END = 1 << 40
FAR = 1 << 42
# Where the table of some bands has them: the first of two columns of `Band`.
QUERIES, KEYS = 0, 2


class Band(NamedTuple):
    """Queries i of [q_start, q_stop) that see keys j of [k_start, k_stop): low <= j - i <= high."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    low: int = -FAR
    high: int = FAR


class Bands:
    """Bands that have no pair in common.

    Attributes: table: int64 [6,n], the columns of `Band`.
    """

    def __init__(self, table: Numbers) -> None:
        self.table = table

    @classmethod
    def of_documents(cls, starts: Sequence[int], low: int | None, high: int | None) -> Self:
        """Squares on the diagonal. Args: starts: of all but the first. low, high: None: any."""
        edges = np.array([0, *starts, _END], dtype=np.int64)
        begin, end = edges[:-1], edges[1:]
        lows, highs = (
            np.full_like(begin, far if edge is None else edge)
            for edge, far in ((low, -FAR), (high, FAR))
        )
        return cls(np.stack((begin, end, begin, end, lows, highs)))

    def __len__(self) -> int:
        return self.table.shape[1]

    @cached_property
    def rows(self) -> list[Band]:
        """All of them, in order."""
        return [Band(*numbers) for numbers in self.table.T.tolist()]

    @cached_property
    def transposed(self) -> "Bands":
        """With queries in the place of keys, and keys in the place of queries."""
        q_start, q_stop, k_start, k_stop, low, high = self.table
        return Bands(np.stack((k_start, k_stop, q_start, q_stop, -high, -low)))

    def of_each(self, documents: Sequence[int]) -> "Bands":
        """Their pairs of a query and a key of the same document.

        Args: documents: where all but the first begin, ascending.
        """
        edges = np.array([0, *documents, _END], dtype=np.int64)
        q_start, q_stop, k_start, k_stop, *_ = self.table
        first, last = (
            edges.searchsorted(positions, side="right")
            for positions in (np.maximum(q_start, k_start), np.minimum(q_stop, k_stop) - 1)
        )
        band, number = expanded(np.maximum(last - first + 1, 0))
        document = first[band] + number
        table = self.table[:, band]
        for start in (QUERIES, KEYS):
            np.maximum(table[start], edges[document - 1], out=table[start])
            np.minimum(table[start + 1], edges[document], out=table[start + 1])
        return Bands(_with_pairs(table))

    def within_window(self, window: int) -> "Bands":
        """Their pairs of a query and a key that is less than so many positions earlier."""
        table = self.table.copy()
        np.maximum(table[4], 1 - window, out=table[4])
        return Bands(_with_pairs(table))

    def area(self, seq_len: int) -> int:
        """Number of pairs among the first seq_len positions."""
        return sum(_area(band, seq_len) for band in self.rows)

    def keys_of(self, seq_len: int) -> Numbers:
        """How many keys each query of a sequence sees, int64 [N]."""
        start, stop, k_start, k_stop, low, high = self.table
        stop, keys = np.minimum(stop, seq_len), np.minimum(k_stop, seq_len) - k_start
        some = (start < stop) & (keys > 0) & (low <= high)
        start, stop, keys = start[some], stop[some], keys[some]
        # Of a query and the one before it: how many more it sees, and how many more of these.
        more, growth = np.zeros((2, seq_len + 1), np.int64)
        for sign, shift in ((1, (high + 1 - k_start)[some]), (-1, (low - k_start)[some])):
            # Keys below a diagonal: of each next query one more, from the first key to the last.
            np.add.at(more, start, sign * np.clip(start + shift, 0, keys))
            np.add.at(more, stop, -sign * np.clip(stop - 1 + shift, 0, keys))
            first, last = np.maximum(start, -shift) + 1, np.minimum(stop, keys - shift + 1)
            grows = first < last
            np.add.at(growth, first[grows], sign)
            np.add.at(growth, last[grows], -sign)
        more += np.cumsum(growth)
        found: Numbers = np.cumsum(more)[:-1]
        return found


def _with_pairs(table: Numbers) -> Numbers:
    """Those columns of a table of bands, none an empty rectangle, that have any pair."""
    q_start, q_stop, k_start, k_stop, low, high = table
    low, high = np.maximum(low, k_start - q_stop + 1), np.minimum(high, k_stop - 1 - q_start)
    found: Numbers = table[:, low <= high]
    return found


def _area(band: Band, seq_len: int) -> int:
    q_start, q_stop, k_start, k_stop, low, high = band
    q_stop, k_stop = min(q_stop, seq_len), min(k_stop, seq_len)
    keys = k_stop - k_start
    if q_stop <= q_start or keys <= 0:
        return 0

    def below(diagonal: int) -> int:
        """Pairs of which the key is at most so many positions later."""
        first, last = (query + diagonal - k_start for query in (q_start, q_stop))
        return _ramp(last, keys) - _ramp(first, keys)

    return below(high) - below(low - 1)


def _ramp(rows: int, keys: int) -> int:
    """The sum of 1, 2, ..., keys, keys, ...: of so many numbers."""
    rising = max(0, min(rows, keys))
    return rising * (rising + 1) // 2 + max(0, rows - keys) * keys


class BandPart(NamedTuple):
    """What a block of queries and one of keys have of a band.

    Attributes:
        q, kv: positions, step 1, ascending. low, high: as in Band, of these positions.
        rows, cols: the same as slices of the blocks, whose step may be more.
    """

    q: Spans
    kv: Spans
    low: int
    high: int
    rows: slice
    cols: slice

    @property
    def visible(self) -> bool:
        """Whether any query sees any key."""
        return any(
            max(self.low, kv.start - q.stop + 1) <= min(self.high, kv.stop - 1 - q.start)
            for q in self.q
            for kv in self.kv
        )


def parts_of(q_spans: Spans, kv_spans: Spans, bands: Bands) -> Iterator[BandPart]:
    """What two blocks have of each band; some may still have no visible pair.

    Args: q_spans, kv_spans: positions, no span of them empty.

    Raises: ValueError if spans with step 1 do not ascend.
    """
    if not q_spans or not kv_spans:
        return
    if without_steps(q_spans, kv_spans):
        of_queries = BandRows.of(q_spans, bands, QUERIES)
        of_keys = BandRows.of(kv_spans, bands, KEYS)
        shared = of_queries.shared_with(of_keys)
        for number, edges in zip(shared, bands.table[:, shared].T.tolist(), strict=True):
            band = Band(*edges)
            q, rows = of_queries.part(number, band.q_start, band.q_stop)
            kv, cols = of_keys.part(number, band.k_start, band.k_stop)
            yield BandPart(q, kv, band.low, band.high, rows, cols)
        return
    # Positions of equal residue modulo the common step form a problem with step 1.
    common = lcm(*(span.step for span in (*q_spans, *kv_spans)))
    for q_residue, q_span, q_local in _residues(q_spans, common):
        for k_residue, k_span, k_local in _residues(kv_spans, common):
            for band in _of_residues(bands, common, (q_residue, q_span), (k_residue, k_span)):
                queries, keys = (Span(*band[:2]),), (Span(*band[2:4]),)
                rows = _part(q_local, q_span, *queries)
                cols = _part(k_local, k_span, *keys)
                yield BandPart(queries, keys, band.low, band.high, rows, cols)


def within(outer: slice, start: int, stop: int) -> slice:
    """Elements [start, stop) of the slice `outer`."""
    if outer.step in (None, 1):
        return slice(outer.start + start, outer.start + stop)
    first, last = (outer.start + index * outer.step for index in (start, stop - 1))
    return slice(first, last + 1, outer.step)


def _part(local: slice, whole: Span, part: Span) -> slice:
    """The elements of a slice that stands for a span of step 1 and has a part of it."""
    return within(local, part.start - whole.start, part.stop - whole.start)


class BandRows:
    """Which rows of a block each band has.

    Attributes: start, stop: int64 [bands], these rows. first, last: positions of the first and of
        the last one. filled: whether there are any.
    """

    def __init__(self, spans: Spans, bands: Bands, side: int) -> None:
        """Args: side: QUERIES or KEYS."""
        self._spans, self._bands, self._side = spans, bands, side
        self._starts, self._stops = starts, stops = edges_of(spans)
        if (stops[:-1] > starts[1:]).any():
            raise ValueError(f"spans must be ascending and disjoint, got {spans}")
        # Rows before each span, and of all; how far positions of each are from rows.
        self._before = np.concatenate(([0], np.cumsum(stops - starts)))
        self._shift = starts - self._before[:-1]

        def position_of(rows: Numbers) -> Numbers:
            number = self._before[:-1].searchsorted(rows, side="right") - 1
            return rows + self._shift[np.maximum(number, 0)]

        self.start, self.stop = map(self.rows_below, bands.table[side : side + 2])
        self.filled = self.start < self.stop
        self.first, self.last = position_of(self.start), position_of(self.stop - 1)

    @staticmethod
    @lru_cache(maxsize=1024)  # a block is computed with every other one
    def of(spans: Spans, bands: Bands, side: int) -> "BandRows":
        """Those of a block."""
        return BandRows(spans, bands, side)

    def rows_below(self, positions: Numbers) -> Numbers:
        """How many rows of the block are before some positions."""
        last = np.searchsorted(self._starts, positions, side="right") - 1
        inside = np.minimum(positions, self._stops[last]) - self._starts[last]
        return np.where(last < 0, 0, self._before[last] + inside)

    def shared_with(self, keys: "BandRows") -> list[int]:
        """Bands that may have pairs of these queries and those keys."""
        low, high = self._bands.table[4:]
        found = self.filled & keys.filled
        found &= (keys.first - self.last <= high) & (keys.last - self.first >= low)
        return np.flatnonzero(found).tolist()

    def spans_of(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """The first span of the block that some bands have, and how many they have of it."""
        first, last = (
            np.searchsorted(self._before, rows, side="right") - 1
            for rows in (self.start[numbers], self.stop[numbers] - 1)
        )
        return first, last - first + 1

    def span_before(self, positions: Numbers) -> Numbers:
        """The last span of the block that begins before some positions; -1 if none does."""
        return np.searchsorted(self._starts, positions) - 1

    def piece(self, numbers: Numbers, spans: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Positions [start, stop) that bands have of spans, and how far these are from rows."""
        start = np.maximum(self._starts[spans], self._bands.table[self._side, numbers])
        stop = np.minimum(self._stops[spans], self._bands.table[self._side + 1, numbers])
        return start, stop, self._shift[spans]

    def part(self, number: int, start: int, stop: int) -> tuple[Spans, slice]:
        """Positions [start, stop) of the block, which are those of a band, and its rows."""
        rows = slice(int(self.start[number]), int(self.stop[number]))
        found, starts = [], self._start_list
        index = max(0, bisect_right(starts, start) - 1)
        while index < len(starts) and starts[index] < stop:
            span = self._spans[index]
            first, last = max(span.start, start), min(span.stop, stop)
            if first < last:
                found.append(Span(first, last))
            index += 1
        return tuple(found), rows

    @cached_property
    def _start_list(self) -> list[int]:
        starts: list[int] = self._starts.tolist()
        return starts


def _residues(spans: Sequence[Span], common: int) -> Iterator[tuple[int, Span, slice]]:
    """Splits spans by residue modulo `common`: (residue, quotients with step 1, local slice)."""
    offset = 0
    for span in spans:
        every = common // span.step
        for index in range(min(every, len(span))):
            position = span.start + index * span.step
            count = -(-(len(span) - index) // every)
            quotient = position // common
            local = slice(offset + index, offset + len(span), every)
            yield position % common, Span(quotient, quotient + count), local
        offset += len(span)


def _of_residues(
    bands: Bands, common: int, queries: tuple[int, Span], keys: tuple[int, Span]
) -> Iterator[Band]:
    """Bands of the quotients of positions of two residues, no more than spans of them have."""
    (q_residue, q), (k_residue, k) = queries, keys
    q_start, q_stop, k_start, k_stop, low, high = bands.table
    later = k_residue - q_residue
    q_first = np.maximum(-((q_residue - q_start) // common), q.start)
    q_last = np.minimum(-((q_residue - q_stop) // common), q.stop)
    k_first = np.maximum(-((k_residue - k_start) // common), k.start)
    k_last = np.minimum(-((k_residue - k_stop) // common), k.stop)
    lows, highs = -((later - low) // common), (high - later) // common
    found = (q_first < q_last) & (k_first < k_last) & (lows <= highs)
    found &= (k_first - q_last + 1 <= highs) & (k_last - 1 - q_first >= lows)
    table = np.stack((q_first, q_last, k_first, k_last, lows, highs))[:, found]
    for numbers in table.T.tolist():
        yield Band(*numbers)
