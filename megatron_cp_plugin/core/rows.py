"""Some rows of a block, and where they are when they alone are packed, one behind the other."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.bands import Rows as Rows
from megatron_cp_plugin.core.bands import Spans
from megatron_cp_plugin.core.layout import Span, rows_of


def between(start: int, stop: int) -> Rows:
    """Rows [start, stop)."""
    return ((start, stop),) if start < stop else ()


def row_count(rows: Rows) -> int:
    """How many rows they are."""
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
    found: list[Span] = []
    ends = list(accumulate(map(len, spans)))
    for start, stop in rows:
        first, last = bisect_right(ends, start), bisect_left(ends, stop) + 1
        before = ends[first] - len(spans[first])
        found += rows_of(spans[first:last], start - before, stop - before)
    return tuple(found)


def rows_at(spans: Spans, positions: Spans) -> Rows:
    """Rows of a block that have some positions. Args: spans, positions: ascending, without gaps."""
    found, starts = [], [span.start for span in spans]
    before = list(accumulate(map(len, spans), initial=0))
    for part in positions:
        for index in range(bisect_right(starts, part.start) - 1, bisect_left(starts, part.stop)):
            span = spans[index]
            start, stop = max(span.start, part.start), min(span.stop, part.stop)
            if start < stop:
                row = before[index] - span.start
                found.append((row + start, row + stop))
    return union([tuple(found)])


def token_dim(x: Tensor, before: int = 0) -> int:
    """Of [B,S,heads,D] or [B,heads,S]. Args: before: dimensions that will be put before these."""
    return before + (1 if x.dim() == 4 else 2)


def packed(x: Tensor, dim: int, rows: Sequence[slice], *, strided: bool = False) -> Tensor:
    """Some rows along a dimension, one behind the other; x itself if they are all of it.

    Args: strided: only the last dimension need be contiguous, so that rows without gaps are a view.
    """
    parts = [x.narrow(dim, part.start, part.stop - part.start) for part in rows]
    if len(parts) == 1:
        return parts[0] if strided and parts[0].stride(-1) == 1 else parts[0].contiguous()
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).contiguous()
