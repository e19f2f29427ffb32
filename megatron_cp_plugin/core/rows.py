"""Some rows of a block, and where they are when they alone are packed, one behind the other."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.bands import Spans
from megatron_cp_plugin.core.layout import rows_of

# Half-open ranges of a block's rows, ascending, that do not touch each other.
Rows = tuple[tuple[int, int], ...]


def between(start: int, stop: int) -> Rows:
    """Rows [start, stop)."""
    return ((start, stop),) if start < stop else ()


def row_count(rows: Rows) -> int:
    """How many rows they are."""
    return sum(stop - start for start, stop in rows)


def union(parts: Iterable[Rows], gap: int = 0) -> Rows:
    """Rows that are in any part, and those between them in gaps of at most `gap` rows."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted({one for rows in parts for one in rows}):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def clipped(rows: Rows, start: int, stop: int) -> Rows:
    """Those of the rows that are in [start, stop)."""
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
    return tuple(span for start, stop in rows for span in rows_of(spans, start, stop))


def rows_at(spans: Spans, positions: Spans) -> Rows:
    """Rows of a block that have some positions. Args: spans, positions: ascending, without gaps."""
    found, row, left = [], 0, deque(positions)
    for span in spans:
        while left and left[0].start < span.stop:
            start, stop = max(span.start, left[0].start), min(span.stop, left[0].stop)
            if start < stop:
                found.append((row + start - span.start, row + stop - span.start))
            if left[0].stop > span.stop:
                break
            left.popleft()
        row += len(span)
    return union([tuple(found)])


def token_dim(x: Tensor, before: int = 0) -> int:
    """Of [B,S,heads,D] or [B,heads,S]. Args: before: dimensions that will be put before these."""
    return before + (1 if x.dim() == 4 else 2)


def packed(x: Tensor, dim: int, rows: Sequence[slice]) -> Tensor:
    """Some rows along a dimension, contiguous; x itself if they are all of it."""
    parts = [x.narrow(dim, part.start, part.stop - part.start) for part in rows]
    if len(parts) == 1:
        return parts[0].contiguous()
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).contiguous()
