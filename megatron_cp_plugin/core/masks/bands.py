"""Masks as bands: rectangles of visible (query, key) pairs, each cut by two diagonals.

A causal mask, a window, a packed document and a slice of a span mask are one thing: queries in
[q_start, q_stop) see the keys in [k_start, k_stop) that are low to high positions later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from megatron_cp_plugin.core.ranges import Numbers, Ranges, expanded, joined, offsets, runs

# End of a mask of unknown length, and diagonals that hide none of it.
_END = 1 << 40
FAR = 1 << 42
# Distance by which positions of blocks planned together are moved apart.
_APART = 1 << 41
_LEAST_STEPS = 3  # of a staircase: two become no fewer parts
# Rows of the table of bands; each is the first of two.
QUERIES, KEYS = 0, 2


@dataclass(eq=False)
class Bands:
    """Bands that have no pair in common.

    Attributes:
        table: int64 [6,n]: q_start, q_stop, k_start, k_stop, low, high of each: queries i of
            [q_start, q_stop) see those keys j of [k_start, k_stop) with low <= j - i <= high.
    """

    table: Numbers

    @classmethod
    def of_documents(cls, starts: Sequence[int], low: int | None, high: int | None) -> Self:
        """Squares on the diagonal.

        Args: starts: where documents but the first begin. low, high: None: no limit.
        """
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
    def transposed(self) -> "Bands":
        """With queries in the place of keys, and keys in the place of queries."""
        q_start, q_stop, k_start, k_stop, low, high = self.table
        return Bands(np.stack((k_start, k_stop, q_start, q_stop, -high, -low)))

    def of_each(self, documents: Sequence[int]) -> "Bands":
        """The (query, key) pairs that are in one document.

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

    def restricted_to_window(self, window: int) -> "Bands":
        """Their pairs of a query and a key that is less than `window` positions earlier."""
        table = self.table.copy()
        np.maximum(table[4], 1 - window, out=table[4])
        return Bands(_with_pairs(table))

    def joined(self) -> "Bands":
        """The same pairs, with staircases as one band below a diagonal, and a triangle above it on
        each step: kernels compute a few large parts faster than many.

        A staircase is three bands or more, each from the row on where the one before ends, all from
        one column on, and causal or full, whose last rows end on one diagonal.
        """
        q_start, q_stop, k_start, k_stop, low, high = self.table
        diagonal = k_stop - q_stop
        full = high >= k_stop - 1 - q_start
        steps = np.flatnonzero((low <= k_start - q_stop + 1) & (full | (high == diagonal)))
        steps = steps[np.lexsort((q_start[steps], diagonal[steps], k_start[steps]))]
        goes_on = q_start[steps[1:]] == q_stop[steps[:-1]]
        for edge in (k_start, diagonal):
            goes_on &= edge[steps[1:]] == edge[steps[:-1]]
        first, last = runs(~goes_on, len(steps))
        many = last - first >= _LEAST_STEPS - 1
        run, number = expanded((last - first + 1)[many])
        of_stairs = steps[first[many][run] + number]
        first, last = steps[first[many]], steps[last[many]]
        below = self.table[:, first]
        below[1], below[3], below[4], below[5] = q_stop[last], k_stop[last], -FAR, diagonal[last]
        above = self.table[:, of_stairs[full[of_stairs]]]
        above[4] = above[3] - above[1] + 1
        above[1] -= 1
        np.maximum(above[2], above[0] + above[4], out=above[2])
        above = above[:, (above[0] < above[1]) & (above[2] < above[3])]
        return Bands(np.concatenate((np.delete(self.table, of_stairs, 1), below, above), 1))

    def area(self, seq_len: int) -> int:
        """Number of pairs among the first seq_len positions."""
        start, stop, k_start, k_stop, low, high = self.table
        stop, keys = np.minimum(stop, seq_len), np.minimum(k_stop, seq_len) - k_start
        some = (start < stop) & (keys > 0)
        start, stop, keys = start[some], stop[some], keys[some]

        def below(diagonals: Numbers) -> Numbers:
            """Number of pairs whose key is before a diagonal."""
            shift = (diagonals - k_start)[some]
            return ramp(stop + shift, keys) - ramp(start + shift, keys)

        return int((below(high + 1) - below(low)).sum())

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
    """The columns of a table of bands that have any pair; no rectangle is empty."""
    q_start, q_stop, k_start, k_stop, low, high = table
    low, high = np.maximum(low, k_start - q_stop + 1), np.minimum(high, k_stop - 1 - q_start)
    found: Numbers = table[:, low <= high]
    return found


def ramp(rows: Numbers, keys: Numbers) -> Numbers:
    """Sum of the first `rows` of the numbers 0, 1, 2, ..., keys, keys, ..."""
    rising = np.clip(rows, 0, keys + 1)
    found: Numbers = rising * (rising - 1) // 2 + np.maximum(0, rows - rising) * keys
    return found


class SteppedBlocks(NamedTuple):
    """Two blocks of positions with steps as blocks without steps.

    Positions of equal residue modulo the common step are a block without steps once they are
    divided by it. These blocks follow each other, `_APART` positions from one to the next.

    Attributes:
        bands: the bands between them; none without a pair.
        rows, cols: the elements of each range of `q` and `kv` as ranges of rows of their blocks.
    """

    q: Ranges
    kv: Ranges
    bands: Bands
    rows: Ranges
    cols: Ranges

    @classmethod
    def of(cls, q: Ranges, kv: Ranges, bands: Bands) -> Self:
        """Args: bands: of the mask."""
        common = int(np.lcm.reduce(np.concatenate((q.step, kv.step))))
        (q_residue, q_span, rows), (k_residue, k_span, cols) = (
            _residues(block, common) for block in (q, kv)
        )
        # [residue of queries, residue of keys, band]
        q_start, q_stop, k_start, k_stop, low, high = bands.table
        q_residue, k_residue = q_residue[:, None, None], k_residue[:, None]
        later = k_residue - q_residue
        q_first = np.maximum(-((q_residue - q_start) // common), q_span.start[:, None, None])
        q_last = np.minimum(-((q_residue - q_stop) // common), q_span.stop[:, None, None])
        k_first = np.maximum(-((k_residue - k_start) // common), k_span.start[:, None])
        k_last = np.minimum(-((k_residue - k_stop) // common), k_span.stop[:, None])
        lows, highs = -((later - low) // common), (high - later) // common
        found = (q_first < q_last) & (k_first < k_last) & (lows <= highs)
        found &= (k_first - q_last + 1 <= highs) & (k_last - 1 - q_first >= lows)
        query, key, _ = found.nonzero()
        columns = np.broadcast_arrays(q_first, q_last, k_first, k_last, lows, highs)
        table = np.stack([column[found] for column in columns])
        table[:2] += query * _APART
        table[2:4] += key * _APART
        table[4:] += (key - query) * _APART
        q, kv = (_far_apart(spans, np.arange(len(spans))) for spans in (q_span, k_span))
        return cls(q, kv, Bands(table), rows, cols)


def _residues(block: Ranges, common: int) -> tuple[Numbers, Ranges, Ranges]:
    """Residues, quotients and rows of the positions of each span, one residue after another."""
    every = common // block.step
    span, index = expanded(np.minimum(every, block.lengths))
    quotient, residue = np.divmod(block.start[span] + index * block.step[span], common)
    count = -((index - block.lengths[span]) // every[span])
    row, step = offsets(block.lengths)[span] + index, every[span]
    rows = Ranges(np.stack((row, row + step * count, step)))
    return residue, Ranges.between(quotient, quotient + count), rows


def stretched(parts: Ranges, spans: Ranges, rows: Ranges) -> Ranges:
    """Translates parts of spans to parts of the rows that stand for these spans.

    Args:
        parts: each of one span.
        spans: without steps, ascending.
        rows: of each span.
    """
    span = spans.stop.searchsorted(parts.start, side="right")
    step, shift = rows.step[span], rows.start[span] - spans.start[span] * rows.step[span]
    last = shift + (parts.stop - 1) * step
    return Ranges(np.stack((shift + parts.start * step, last + 1, step)))


def _far_apart(spans: Ranges, number: Numbers) -> Ranges:
    """Spans without steps; spans of one number are far from spans of the next."""
    return Ranges.between(spans.start + number * _APART, spans.stop + number * _APART)


class BandRows:
    """The rows of blocks without steps that each band has.

    Positions of one block are `_APART` from those of the next, and its rows follow those of the
    block before. A cell is a band of a block; its number is that in [blocks, bands].

    Attributes:
        before, shift: [blocks]: rows of all blocks before each, and how far its positions are
            moved.
        spans: positions of all blocks.
        start, stop: [blocks, bands]: rows of each cell.
        first, last: positions of the first and the last row of each cell, in their block.
        filled: whether the cell has rows.
    """

    def __init__(self, blocks: Sequence[Ranges], bands: Bands, side: int) -> None:
        """Args: side: QUERIES or KEYS. Raises: ValueError if positions of a block do not ascend."""
        counts = np.array([len(block) for block in blocks])
        number = np.arange(len(blocks))
        self.spans = spans = _far_apart(joined(blocks), np.repeat(number, counts))
        if (spans.stop[:-1] > spans.start[1:]).any():
            raise ValueError(f"spans must be ascending and disjoint, got {list(map(list, blocks))}")
        self._rows = np.concatenate(([0], spans.ends))  # before each span, and of all
        self.before, self.shift = self._rows[offsets(counts)], number * _APART
        shift = self.shift[:, None]
        self._edges = bands.table[side : side + 2, None] + shift
        self.start, self.stop = map(self.rows_below, self._edges)
        self.filled = self.start < self.stop
        self.first, self.last = (
            rows + (spans.start - self._rows[:-1])[np.maximum(self._span_of(rows), 0)] - shift
            for rows in (self.start, self.stop - 1)
        )

    def _span_of(self, rows: Numbers) -> Numbers:
        return self._rows[:-1].searchsorted(rows, side="right") - 1

    def rows_below(self, positions: Numbers) -> Numbers:
        """Number of rows of all blocks before some positions."""
        last = self.spans.start.searchsorted(positions, side="right") - 1
        inside = np.minimum(positions, self.spans.stop[last]) - self.spans.start[last]
        found: Numbers = np.where(last < 0, 0, self._rows[last] + inside)
        return found

    def pieces(self, cells: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
        """The pieces of spans that some cells have.

        Returns: of each cell the first span, and of how many it has some. Of each piece the cell,
            as its number among these, and the positions where it starts and stops.
        """
        first = self._span_of(self.start.ravel()[cells])
        count = self._span_of(self.stop.ravel()[cells] - 1) - first + 1
        cell, number = expanded(count)
        span, (start, stop) = first[cell] + number, self._edges.reshape(2, -1)[:, cells[cell]]
        start, stop = (
            np.maximum(self.spans.start[span], start),
            np.minimum(self.spans.stop[span], stop),
        )
        return first, count, cell, start, stop
