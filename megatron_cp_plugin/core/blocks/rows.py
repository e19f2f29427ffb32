"""Some rows of a block, and their indices when they alone are packed."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from megatron_cp_plugin.core.layout import ManySpans, Spans, edges_of, rows_of, without_steps
from megatron_cp_plugin.core.ranges import Numbers, expanded, offsets, runs

# Half-open ranges of a block's rows, ascending, that do not touch each other.
Rows = tuple[tuple[int, int], ...]


def between(start: int, stop: int) -> Rows:
    """Rows [start, stop)."""
    return ((start, stop),) if start < stop else ()


def row_count(rows: Rows) -> int:
    """How many rows they are."""
    if len(rows) == 1:
        return rows[0][1] - rows[0][0]
    return sum(stop - start for start, stop in rows)


def union(parts: Iterable[Rows], gap: int = 0) -> Rows:
    """Rows that are in any part, and those between them in gaps of at most `gap` rows."""
    distinct = [*{rows for rows in parts if rows}]
    if len(distinct) > 1:
        # Often one of them is all rows.
        whole = min(rows[0][0] for rows in distinct), max(rows[-1][1] for rows in distinct)
        distinct = [rows for rows in distinct if rows == (whole,)] or distinct
    ranges = {one for rows in distinct for one in rows}
    if len(ranges) < 2:
        return tuple(ranges)
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def united(edges: Numbers, gap: int) -> Rows:
    """The same of many ranges as an array [2,n], of which none is empty."""
    starts, stops = edges[:, np.argsort(edges[0], kind="stable")]
    reached = np.maximum.accumulate(stops)
    first, last = runs(starts[1:] > reached[:-1] + gap, len(starts))
    return tuple(zip(starts[first].tolist(), reached[last].tolist(), strict=True))


def clipped(rows: Rows, start: int, stop: int) -> Rows:
    """Those of the rows that are in [start, stop)."""
    if rows and start <= rows[0][0] and rows[-1][1] <= stop:
        return rows
    ranges = ((max(first, start), min(last, stop)) for first, last in rows)
    return tuple((first, last) for first, last in ranges if first < last)


class Piece(NamedTuple):
    """Rows that two packed blocks have. Attributes: here, there: where they are in each."""

    here: slice
    there: slice


@lru_cache(maxsize=4096)
def common(here: Rows, there: Rows) -> tuple[Piece, ...]:
    """The rows that two packed blocks have."""
    found = []
    for (first, last), row in _placed(here):
        for (low, high), other in _placed(there):
            start, stop = max(first, low), min(last, high)
            if start < stop:
                mine = slice(row + start - first, row + stop - first)
                found.append(Piece(mine, slice(other + start - low, other + stop - low)))
    return tuple(found)


def _placed(rows: Rows) -> Iterator[tuple[tuple[int, int], int]]:
    """Ranges, and where each begins in the packed block."""
    before = 0
    for start, stop in rows:
        yield (start, stop), before
        before += stop - start


def positions_of(spans: Spans, rows: Rows) -> Spans:
    """Positions of some rows of a block."""
    if len(rows) == 1:
        return rows_of(spans, *rows[0])
    if not without_steps(spans):
        return tuple(span for part in rows for span in rows_of(spans, *part))
    return ManySpans(_cut([(spans, rows)]).positions)


class _Cut(NamedTuple):
    """Some rows of several blocks, in ranges that are each of one span of positions.

    Attributes: edges: int64 [2,n], of the spans of all blocks. before: [n], rows that these blocks
        have before each, one block behind the other. span: [m], of each range. rows: [2,m], where
        ranges start and stop.
    """

    edges: Numbers
    before: Numbers
    span: Numbers
    rows: Numbers

    @property
    def positions(self) -> Numbers:
        """[2,m]: where positions of the ranges start and stop."""
        return self.rows + (self.edges[0] - self.before)[self.span]


def _cut(blocks: Sequence[tuple[Spans, Rows]]) -> _Cut:
    edges = np.concatenate([edges_of(spans) for spans, _ in blocks], 1)
    ends = np.cumsum(edges[1] - edges[0])
    before = ends - (edges[1] - edges[0])
    ranges, number = [], 0
    for spans, rows in blocks:
        first = ends.item(number - 1) if number else 0
        ranges += [(first + start, first + stop) for start, stop in rows]
        number += len(spans)
    start, stop = np.array(ranges, np.int64).reshape(-1, 2).T
    span = ends.searchsorted(start, side="right")
    which, within = expanded(ends.searchsorted(stop) - span + 1)
    span = span[which] + within
    start, stop = np.maximum(start[which], before[span]), np.minimum(stop[which], ends[span])
    some = start < stop
    return _Cut(edges, before, span[some], np.stack((start, stop))[:, some])


def positions_of_all(blocks: Sequence[tuple[Spans, Rows]]) -> tuple[Numbers, Numbers]:
    """Positions of some rows of several blocks, which have no steps.

    Returns: [2,n], where they start and stop, of one block after another; and [n], whose they are.
    """
    found = _cut(blocks)
    owner = np.repeat(np.arange(len(blocks)), [len(spans) for spans, _ in blocks])
    return found.positions, owner[found.span]


def rows_of_all(blocks: Sequence[tuple[Spans, Rows]]) -> Rows:
    """Some rows of several blocks as rows of the one block that has all their positions.

    Args: blocks: positions without steps, and rows.
    """
    found = _cut(blocks)
    starts, stops = found.edges
    order = np.argsort(starts, kind="stable")
    lengths = (stops - starts)[order]
    row = np.empty_like(starts)
    row[order] = offsets(lengths)
    return united(found.rows + (row - found.before)[found.span], 0)


def narrowed(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """As `x.narrow`; x itself if that is all of it."""
    return x if x.shape[dim] == length else x.narrow(dim, start, length)


def token_dim(x: Tensor, before: int = 0) -> int:
    """Of [B,S,heads,D] or [B,heads,S]. Args: before: dimensions that will be put before these."""
    return before + (1 if x.dim() == 4 else 2)
