"""Rows of a block, their indices in a packed block of these rows, and the packing itself."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.partial import RowIndex, taken
from megatron_cp_plugin.core.ranges import Numbers, Ranges, joined, offsets, runs

# Half-open ranges of a block's rows, ascending, that do not touch each other.
Rows = tuple[tuple[int, int], ...]

# Up to this number, pieces of rows are taken, or added, one by one; more pieces go through one
# kernel, by row numbers.
FEW = 2


# Rows in gaps shorter than a block's rows divided by this number are sent although nobody needs
# them: every further range costs a copy before and after a message.
_GAPS = 64


def longest_gap(tokens: int) -> int:
    """Longest gap of rows that nobody needs and that are sent with their neighbours. Args: tokens:
    of the block.
    """
    return tokens // _GAPS


def between(start: int, stop: int) -> Rows:
    """Rows [start, stop)."""
    return ((start, stop),) if start < stop else ()


def row_count(rows: Rows) -> int:
    """Number of rows."""
    if len(rows) == 1:
        return rows[0][1] - rows[0][0]
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
    if rows and start <= rows[0][0] and rows[-1][1] <= stop:
        return rows
    ranges = ((max(first, start), min(last, stop)) for first, last in rows)
    return tuple((first, last) for first, last in ranges if first < last)


@lru_cache(maxsize=4096)
def common(here: Rows, there: Rows) -> tuple[tuple[slice, slice], ...]:
    """Rows that two packed blocks have in common, in pieces: the place of each piece in both
    blocks.
    """
    found = []
    for (first, last), row in _placed_ranges(here):
        for (low, high), other in _placed_ranges(there):
            start, stop = max(first, low), min(last, high)
            if start < stop:
                mine = slice(row + start - first, row + stop - first)
                found.append((mine, slice(other + start - low, other + stop - low)))
    return tuple(found)


def _placed_ranges(rows: Rows) -> Iterator[tuple[tuple[int, int], int]]:
    """Ranges, and where each begins in the packed block."""
    before = 0
    for start, stop in rows:
        yield (start, stop), before
        before += stop - start


def positions_of(spans: Ranges, rows: Rows) -> Ranges:
    """Positions of some rows of a block."""
    return spans.at(*rows[0]) if len(rows) == 1 else _cut_blocks([(spans, rows)])[1]


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


def narrowed(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """As `x.narrow`; x itself if nothing is cut off."""
    return x if x.shape[dim] == length else x.narrow(dim, start, length)


def token_dim(x: Tensor, before: int = 0) -> int:
    """Dimension of tokens in [B,S,heads,D] or [B,heads,S]. Args: before: number of dimensions in
    front.
    """
    return before + (1 if x.dim() == 4 else 2)


def packed(x: Tensor, dim: int, rows: Rows, held: Rows, *, strided: bool = False) -> Tensor:
    """Packs some rows of a packed block; x itself if these are all its rows.

    Args:
        x: the rows `held` of the block, along a dimension.
        strided: only the last dimension need be contiguous, so that rows without gaps are a view.
    """
    if rows == held:
        return x if strided and x.stride(-1) == 1 else x.contiguous()
    parts = [there for _, there in common(rows, held)]
    if len(parts) > FEW:
        return taken(x, dim, numbers_of(rows, held, x.device).to)
    pieces = [x.narrow(dim, part.start, part.stop - part.start) for part in parts]
    if len(pieces) == 1:
        return pieces[0] if strided and pieces[0].stride(-1) == 1 else pieces[0].contiguous()
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0).contiguous()


@kept_on_device(maxsize=64)  # of some micro-batches: they take memory of the device
def numbers_of(here: Rows, there: Rows, device: torch.device) -> RowIndex:
    """Rows that two packed blocks have in common: their numbers in the second and the first."""
    pieces = common(here, there)
    to, of = (
        torch.cat([torch.arange(part.start, part.stop, device="cpu") for part in parts])
        for parts in ([there for _, there in pieces], [here for here, _ in pieces])
    )
    if len(of) == row_count(here):
        return RowIndex(uploaded(to, device))
    to, of = uploaded(torch.stack((to, of)), device)
    return RowIndex(to, of)
