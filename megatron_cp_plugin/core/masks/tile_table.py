"""Tiles as arrays: of two blocks with packed documents there may be hundreds."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Self, overload

import numpy as np

from megatron_cp_plugin.core.layout import Spans, without_steps
from megatron_cp_plugin.core.masks.bands import FAR, KEYS, QUERIES, BandRows, Bands
from megatron_cp_plugin.core.ranges import Flags, Numbers, expanded, offsets, runs
from megatron_cp_plugin.core.tiles import Mask, Tile, filled, plan_tiles

# Bands that two blocks have in common from which on they are planned together, not one by one.
_MANY = 8


class TileTable(Sequence[Tile]):
    """Tiles, whose objects are made when they are asked for; equal only to itself.

    Attributes:
        q, kv: int64 [3,n]: start, stop and step of their slices. causal, reverse: bool [n]. Tiles
            of several documents are one for each here.
        joined: bool [n]: whether it is one tile with the one before, of whole documents.
    """

    def __init__(
        self, q: Numbers, kv: Numbers, causal: Flags, reverse: Flags, joined: Flags
    ) -> None:
        self.q, self.kv, self.causal, self.reverse, self.joined = q, kv, causal, reverse, joined

    @classmethod
    def of(cls, tiles: Iterable[Tile]) -> Self:
        """The same tiles."""
        found: list[tuple[int, ...]] = []
        tiles = tuple(tiles)
        for tile in tiles:
            (q, q_step), (kv, kv_step) = ((x.start, x.step or 1) for x in (tile.q, tile.kv))
            kind = tile.causal, tile.reverse
            for number, (a, b) in enumerate(pairwise(tile.document_bounds)):
                found.append((q + a, q + b, 1, kv + a, kv + b, 1, *kind, number > 0))
            if not tile.document_bounds:
                q_place, kv_place = (q, tile.q.stop, q_step), (kv, tile.kv.stop, kv_step)
                found.append((*q_place, *kv_place, *kind, False))
        table = np.array(found, np.int64).reshape(-1, 9).T
        made = cls(table[:3], table[3:6], *table[6:].astype(np.bool_))
        made._tiles = tiles
        return made

    @cached_property
    def _tiles(self) -> tuple[Tile, ...]:
        return tuple(self._made())

    def _made(self) -> Iterator[Tile]:
        columns = (*self.q, self.rows, *self.kv, self.cols, self.causal, self.reverse)
        numbers = list(zip(*(column.tolist() for column in columns), strict=True))
        ends = [*np.flatnonzero(~self.joined).tolist(), len(numbers)]
        for start, stop in pairwise(ends):
            q, _, q_step, rows, kv, _, kv_step, cols, causal, reverse = numbers[start]
            _, q_stop, _, _, _, kv_stop, *_ = numbers[stop - 1]
            places = _slice(q, q_stop, q_step), _slice(kv, kv_stop, kv_step)
            if stop == start + 1:
                yield Tile(*places, rows, cols, causal, reverse)
            else:
                bounds = (0, *np.cumsum(self.rows[start:stop]).tolist())
                yield Tile(*places, bounds[-1], bounds[-1], True, document_bounds=bounds)

    def __len__(self) -> int:
        return int(np.count_nonzero(~self.joined))

    def __iter__(self) -> Iterator[Tile]:
        return iter(self._tiles)

    @overload
    def __getitem__(self, index: int) -> Tile: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tile, ...]: ...
    def __getitem__(self, index: int | slice) -> Tile | tuple[Tile, ...]:
        return self._tiles[index]

    @cached_property
    def rows(self) -> Numbers:
        """Of each tile, how many."""
        return _lengths(self.q)

    @cached_property
    def cols(self) -> Numbers:
        """Of each tile, how many."""
        return _lengths(self.kv)

    @property
    def areas(self) -> Numbers:
        """Of each tile, as `Tile.area`."""
        whole = self.rows * self.cols
        return np.where(self.causal, whole - self.rows * (self.rows - 1) // 2, whole)

    @property
    def single(self) -> Self:
        """The same tiles, one for each document."""
        joined = np.zeros_like(self.joined)
        return type(self)(self.q, self.kv, self.causal, self.reverse, joined)

    def some(self, wanted: Flags | Numbers) -> Self:
        """Some of the tiles, as they are or in another order."""
        flags = (self.causal[wanted], self.reverse[wanted], self.joined[wanted])
        return type(self)(self.q[:, wanted], self.kv[:, wanted], *flags)

    def moved(self, rows: int, cols: int) -> Self:
        """The same tiles of blocks that have so many rows and columns more before them."""
        if not rows and not cols:
            return self
        q, kv = (
            x + np.array([[more], [more], [0]]) for x, more in ((self.q, rows), (self.kv, cols))
        )
        return type(self)(q, kv, self.causal, self.reverse, self.joined)


def table_of(tiles: Iterable[Tile]) -> TileTable:
    """Tiles as arrays; themselves if they are."""
    return tiles if isinstance(tiles, TileTable) else TileTable.of(tiles)


def _slice(start: int, stop: int, step: int) -> slice:
    return slice(start, stop) if step == 1 else slice(start, stop, step)


def _lengths(places: Numbers) -> Numbers:
    start, stop, step = places
    return -((start - stop) // step)


def tiles_of(q_spans: Spans, kv_spans: Spans, mask: Mask, *, rectangular: bool) -> TileTable:
    """The tiles of `plan_tiles`; where blocks share many documents all are planned together."""
    table = None
    if len(mask.bands) >= _MANY and without_steps(q_spans, kv_spans):
        queries, keys = filled(q_spans), filled(kv_spans)
        table = _at_once(queries, keys, mask.bands, rectangular=rectangular)
    if table is None:
        table = TileTable.of(plan_tiles(q_spans, kv_spans, mask, rectangular=rectangular))
    return table


class _Stairs(NamedTuple):
    """Runs of rows as `tiles` has them, but of the lower slope 0. Attributes: each [n].

    Attributes: row, rows: the first one of a block, how many. first, last: keys that it sees, of a
        block. upper: slope of the last one.
    """

    row: Numbers
    rows: Numbers
    first: Numbers
    last: Numbers
    upper: Numbers


def _at_once(
    q_spans: Spans, kv_spans: Spans, bands: Bands, *, rectangular: bool
) -> TileTable | None:
    """Tiles of blocks without gaps; None if few bands have any, or some have a lower diagonal."""
    if not q_spans or not kv_spans:
        return None
    queries, keys = BandRows.of(q_spans, bands, QUERIES), BandRows.of(kv_spans, bands, KEYS)
    shared = np.array(queries.shared_with(keys), np.int64)
    if len(shared) < _MANY or (bands.table[4, shared] > -FAR).any():
        return None
    stairs = _stairs(queries, keys, shared, bands.table[5, shared])
    return None if stairs is None else _cover(stairs, rectangular)


def _stairs(queries: BandRows, keys: BandRows, shared: Numbers, high: Numbers) -> _Stairs | None:
    """As `tiles._stairs`, of all bands; None if a run goes on into one of another slope.

    Args: shared: bands that both have. high: their diagonals.
    """
    # Positions [start, stop) that a band has of a span of queries: a piece.
    q_first, q_count = queries.spans_of(shared)
    of_piece, number = expanded(q_count)
    start, stop, shift = queries.piece(shared[of_piece], q_first[of_piece] + number)
    # Cut where queries begin or cease to see one key more each: at the edges of spans of keys.
    k_first, k_count = keys.spans_of(shared)
    of_edge, number = expanded(k_count)
    k_start, k_stop, _ = keys.piece(shared[of_edge], k_first[of_edge] + number)
    of_edge = np.concatenate((of_edge, of_edge))
    cut = np.concatenate((k_start, k_stop)) - high[of_edge]
    number = queries.span_before(cut) - q_first[of_edge]
    has = (number >= 0) & (number < q_count[of_edge])
    piece, cut = (offsets(q_count)[of_edge] + number)[has], cut[has]
    inside = (start[piece] < cut) & (cut < stop[piece])
    piece = np.concatenate((np.arange(len(start)), piece[inside]))
    begin = np.concatenate((start, cut[inside]))
    order = np.lexsort((begin, piece))
    piece, begin = piece[order], begin[order]
    distinct, _ = runs((piece[1:] != piece[:-1]) | (begin[1:] != begin[:-1]), len(piece))
    piece, begin = piece[distinct], begin[distinct]
    end = np.append(begin[1:], 0)
    is_last = np.append(piece[1:] != piece[:-1], True)
    rows = np.where(is_last, stop[piece], end) - begin
    # Keys that the first one of these rows sees, and whether each next row sees one more.
    band, row = of_piece[piece], begin - shift[piece]
    first, total = keys.start[shared[band]], keys.stop[shared[band]]
    position = begin + high[band]
    below, last = (np.clip(keys.rows_below(x), first, total) for x in (position, position + 1))
    upper = last - below
    # What goes on as the rows before it did is one run with them.
    goes_on = (band[1:] == band[:-1]) & ((last + upper * rows)[:-1] == last[1:])
    same_slope = upper[1:] == upper[:-1]
    if (goes_on & ~same_slope & (last > first)[1:]).any():
        return None
    begins, _ = runs(~(goes_on & same_slope), len(row))
    rows = np.add.reduceat(rows, begins)
    seen = last[begins] > first[begins]
    begins, rows = begins[seen], rows[seen]
    return _Stairs(row[begins], rows, first[begins], last[begins], upper[begins])


def _cover(stairs: _Stairs, rectangular: bool) -> TileTable:
    """As `tiles._cover`, of all runs."""
    row, rows, first, last, upper = stairs
    causal = (upper > 0) & (rows > 1)
    top = last - causal
    # Of each run a full tile, and a causal one.
    full = (first < top) & ~(causal & rectangular)
    left = np.where(causal & (not rectangular), top, first)
    q = np.stack((row, row + rows, np.ones_like(row)))
    run, number = expanded(np.stack((full, causal)).sum(0))
    triangle = causal[run] & ((number > 0) | ~full[run])
    start = np.where(triangle, left[run], first[run])
    stop = np.where(triangle, (top + rows)[run], top[run])
    kv = np.stack((start, stop, np.ones_like(start)))
    return _with_documents_joined(q[:, run], kv, triangle)


def _with_documents_joined(q: Numbers, kv: Numbers, causal: Flags) -> TileTable:
    """As `tiles._joined`: causal tiles, each a whole document, that follow each other are one."""
    rows = q[1] - q[0]
    whole = (rows == kv[1] - kv[0]) & (causal | (rows == 1))
    joined = np.zeros(len(rows), np.bool_)
    joined[1:] = whole[1:] & whole[:-1]
    joined[1:] &= (q[1, :-1] == q[0, 1:]) & (kv[1, :-1] == kv[0, 1:])
    causal = causal | joined
    causal[:-1] |= joined[1:]
    return TileTable(q, kv, causal, np.zeros_like(causal), joined)
