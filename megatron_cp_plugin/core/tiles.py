"""The tile planner: which kernel calls cover a block of queries against a block of keys.

A plan exists before a tensor moves, so that it can be tested, counted and drawn. It is made by
NumPy, for many pairs of blocks at once: with packed documents a pair has hundreds of tiles.

Local row i of a block stands for one global position. With ascending positions a band of the mask
lies between two staircases: row i sees the local keys m(i) to n(i). Both are piecewise constant or
grow by one a row, so a few rectangles and triangles cover what is between them exactly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple, Self, cast

import numpy as np

from megatron_cp_plugin.core.layout import Documents
from megatron_cp_plugin.core.masks.bands import (
    FAR,
    KEYS,
    QUERIES,
    BandRows,
    Bands,
    SteppedBlocks,
    stretched,
)
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.ranges import (
    Flags,
    Numbers,
    Ranges,
    Span,
    expanded,
    joined,
    offsets,
    runs,
)
from megatron_cp_plugin.errors import ContextParallelError


@dataclass(frozen=True)
class Mask:
    """Which keys a query may see.

    Attributes:
        causal: those at its own position and before; else all.
        window: only the last `window` of these keys, the query's own included; None: all. Causal
            only.
        documents: only keys of the query's own document; positions as of `document_starts`.
        slices: None, or the keys that each query sees, with their documents. Then `causal` says
            whether no query sees a later key, and a window hides only earlier keys.
    """

    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()
    slices: Slices | None = None

    def __post_init__(self) -> None:
        causal = self.causal
        if self.slices is not None:
            assert not self.documents
            assert causal == self.slices.causal
            causal = True
        if self.window is not None and (self.window < 1 or not causal):
            shape = "causal" if causal else "full"
            raise ContextParallelError(
                f"a window is 1 or more and needs causal attention, got {self.window} with {shape} "
                "attention: leave window out"
            )

    def __hash__(self) -> int:
        # Plans and tiles are cached by mask: it is hashed once, however many documents it has.
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.causal, self.window, self.documents, self.slices))

    @classmethod
    def of(cls, slices: Slices, window: int | None = None) -> "Mask":
        """The mask of some slices."""
        return cls(slices.causal, window, slices=slices)

    @cached_property
    def bands(self) -> Bands:
        """All (query, key) pairs that the mask lets through."""
        if self.slices is not None:
            bands = self.slices.bands
            return bands if self.window is None else bands.restricted_to_window(self.window)
        low = None if self.window is None else 1 - self.window
        return Bands.of_documents(self.documents, low, 0 if self.causal else None)

    @property
    def resolved(self) -> Documents:
        """The argument of `Layout.for_documents`, for layouts that depend on documents."""
        return self.documents if self.slices is None else self.slices

    @property
    def special(self) -> str:
        """Features that not every algorithm supports, in words for errors; empty if none."""
        if self.slices is not None:
            return f"spans, got {len(self.slices)} of them"
        if self.documents:
            return f"documents, got {len(self.documents) + 1} of them"
        return "" if self.window is None else f"sliding windows, got window {self.window}"


@lru_cache(maxsize=64, typed=True)  # every layer asks: one object, which is hashed once
def mask_of(causal: bool, window: int | None, resolved: Documents = ()) -> Mask:
    """The mask of a call. Args: resolved: documents; or spans, in place of causal."""
    if isinstance(resolved, Slices):
        return Mask.of(resolved, window)
    return Mask(causal, window, cast(tuple[int, ...], resolved))


@dataclass(frozen=True)
class Tile:
    """One kernel call: local query rows against local key columns.

    Attributes:
        q, kv: slices of the local blocks (step > 1 for cyclic layouts).
        rows, cols: lengths of the two slices; both positive, rows <= cols if causal.
        causal: bottom-right aligned, row i sees column j iff j <= i + cols - rows. Where rows
            equals cols this is the ordinary causal square.
        reverse: rows and columns are taken in reverse order, so that causal means j >= i instead:
            the lower edge of a window, with kernels that know only the upper one.
        window: row i sees no column j <= i + cols - rows - window; 0: it sees the first column
            too. For kernels that know windows, in place of `reverse`.
    """

    q: slice
    kv: slice
    rows: int
    cols: int
    causal: bool
    reverse: bool = False
    window: int = 0

    @property
    def area(self) -> int:
        """Number of (query, key) pairs that the tile computes."""
        return int(pairs_within(self.rows, self.cols, self.causal, self.window))


def pairs_within(
    rows: Numbers | int, cols: Numbers | int, causal: Flags | bool, window: Numbers | int
) -> Numbers:
    """Number of (query, key) pairs of tiles. Args: of each, as of `Tile`."""
    later = np.where(causal, rows * (rows - 1) // 2, 0)
    hidden = np.where(np.asarray(window) > 0, np.maximum(cols - np.asarray(window), 0), 0)
    found: Numbers = rows * cols - later - hidden * (hidden + 1) // 2
    return found


@dataclass(eq=False)
class TileTable:
    """Tiles as arrays; `Tile` objects are made on demand. A table equals only itself.

    Attributes:
        q, kv: the rows and the columns of each.
        causal, reverse: bool [n]; window: int64 [n].
    """

    q: Ranges
    kv: Ranges
    causal: Flags
    reverse: Flags
    window: Numbers

    @classmethod
    def together(cls, *tables: Self) -> Self:
        """The tiles of several tables, one table after another."""
        q, kv = (joined(x) for x in ([x.q for x in tables], [x.kv for x in tables]))
        flags = zip(*((x.causal, x.reverse, x.window) for x in tables), strict=True)
        return cls(q, kv, *map(np.concatenate, flags))

    @cached_property
    def each(self) -> tuple[Tile, ...]:
        """The tiles."""
        places = (map(_slice, *side.table.tolist()) for side in (self.q, self.kv))
        columns = self.rows, self.cols, self.causal, self.reverse, self.window
        return tuple(map(Tile, *places, *(column.tolist() for column in columns)))

    def __len__(self) -> int:
        return len(self.q)

    def __iter__(self) -> Iterator[Tile]:
        return iter(self.each)

    @property
    def rows(self) -> Numbers:
        """Of each tile, how many."""
        return self.q.lengths

    @property
    def cols(self) -> Numbers:
        """Of each tile, how many."""
        return self.kv.lengths

    @property
    def areas(self) -> Numbers:
        """Area of each tile, as `Tile.area`."""
        return pairs_within(self.rows, self.cols, self.causal, self.window)

    def some(self, wanted: Flags | Numbers | slice) -> Self:
        """Some of the tiles, possibly in another order."""
        flags = self.causal[wanted], self.reverse[wanted], self.window[wanted]
        return type(self)(self.q.some(wanted), self.kv.some(wanted), *flags)

    def moved(self, rows: int, cols: int) -> Self:
        """The same tiles of blocks that have `rows` and `cols` more before them."""
        return replace(self, q=self.q.moved(rows), kv=self.kv.moved(cols)) if rows or cols else self


_NO = np.zeros(0, np.bool_)
NO_TILES = TileTable(Ranges.of(()), Ranges.of(()), _NO, _NO, np.zeros(0, np.int64))


def _slice(start: int, stop: int, step: int) -> slice:
    return slice(start, stop) if step == 1 else slice(start, stop, step)


@lru_cache(maxsize=4096)
def plan_tiles(
    q_spans: Sequence[Span],
    kv_spans: Sequence[Span],
    mask: Mask,
    *,
    rectangular: bool = False,
    windows: bool = False,
) -> TileTable:
    """Covers every visible (query, key) pair of two blocks exactly once.

    Args:
        q_spans, kv_spans: global positions of the blocks' rows, ascending and disjoint: tuples, or
            `Ranges`.
        rectangular: the kernel takes causal tiles with more columns than rows (bottom-right
            aligned). Otherwise such a tile becomes a full one and a causal square.
        windows: the kernel takes rectangular tiles and tiles with a `window`. Otherwise such a tile
            becomes triangles; those at its lower edge are in reverse order.

    Returns: tiles; none if no query sees any key. Raises: ValueError if spans are not ascending.
    """
    pair = Ranges.of(q_spans), Ranges.of(kv_spans)
    (tiles,) = plan_pairs([pair], mask, rectangular=rectangular, windows=windows)
    return tiles


def plan_pairs(
    pairs: Sequence[tuple[Ranges, Ranges]], mask: Mask, *, rectangular: bool, windows: bool = False
) -> list[TileTable]:
    """As `plan_tiles` for many pairs of blocks, almost as fast as for one pair.

    Args: pairs: positions of queries and of keys; no range is empty.
    """
    found, plain = [NO_TILES] * len(pairs), []
    cover = _with_windows if windows else partial(_cover, rectangular=rectangular)
    for number, (q, kv) in enumerate(pairs):
        if not len(q) or not len(kv):
            continue
        if q.plain and kv.plain:
            plain.append(number)
            continue
        blocks = SteppedBlocks.of(q, kv, mask.bands)
        _, tiles = cover(_stairs([(blocks.q, blocks.kv)], blocks.bands))
        q = stretched(tiles.q, blocks.q.packed, blocks.rows)
        kv = stretched(tiles.kv, blocks.kv.packed, blocks.cols)
        found[number] = replace(tiles, q=q, kv=kv)
    if plain:
        pair, tiles = cover(_stairs([pairs[number] for number in plain], mask.bands))
        edges = np.searchsorted(pair, np.arange(len(plain) + 1)).tolist()
        for number, start, stop in zip(plain, edges, edges[1:], strict=False):
            found[number] = tiles.some(slice(start, stop))
    return found


def _distinct(blocks: Sequence[Ranges]) -> tuple[list[Ranges], Numbers]:
    """The distinct blocks, and each block's number among them."""
    numbers: dict[Ranges, int] = {}
    number = [numbers.setdefault(block, len(numbers)) for block in blocks]
    return list(numbers), np.array(number)


class _Stairs(NamedTuple):
    """Runs of rows; the first row of a run sees the keys [first, last).

    Attributes, each [n]:
        pair: number of the pair of blocks.
        row, rows: the first row in its block, and how many.
        first, last: keys, in their block.
        lower, upper: by how much `first` and `last` grow from row to row.
    """

    pair: Numbers
    row: Numbers
    rows: Numbers
    first: Numbers
    last: Numbers
    lower: Numbers
    upper: Numbers

    def after(self, run: Numbers, number: Numbers | int = 0) -> Self:
        """Some runs without their first rows. Args: number: number of rows left out of each."""
        pair, row, rows, first, last, lower, upper = (column[run] for column in self)
        first, last = first + lower * number, last + upper * number
        return type(self)(pair, row + number, rows - number, first, last, lower, upper)


def _stairs(pairs: Sequence[tuple[Ranges, Ranges]], bands: Bands) -> _Stairs:
    """Runs of rows whose first and last keys each stay the same, or move by one a row.

    Args: pairs: blocks of queries and of keys, without steps, none empty.
    """
    (q_blocks, query), (k_blocks, key) = map(_distinct, zip(*pairs, strict=True))
    queries, keys = BandRows(q_blocks, bands, QUERIES), BandRows(k_blocks, bands, KEYS)
    # [pair, band]: largest and smallest distance of keys from queries.
    low, high = bands.table[4:]
    most = keys.last[key] - queries.first[query]
    least = keys.first[key] - queries.last[query]
    met = queries.filled[query] & keys.filled[key] & (least <= high) & (most >= low)
    pair, band = met.nonzero()
    of_queries, of_keys = (side[pair] * len(bands) + band for side in (query, key))
    # Diagonals, from positions of queries to those of keys, in the order of their blocks.
    apart = keys.shift[key[pair]] - queries.shift[query[pair]]
    diagonals = np.stack((low, high))[:, band] + apart
    cutting = low[band] >= least[met], high[band] <= most[met]
    # Cut where the number of visible keys begins or ceases to change: at edges of spans of keys.
    q_first, q_count, cell, start, stop = queries.pieces(of_queries)
    _, _, of_edge, *edges = keys.pieces(of_keys)
    edge, of_edge = np.concatenate(edges), np.tile(of_edge, 2)
    chosen = [np.flatnonzero(cuts[of_edge]) for cuts in cutting]
    of_cut = np.concatenate([of_edge[some] for some in chosen])
    piece, begin = np.arange(len(start)), start
    if len(of_cut):
        shifts = zip(diagonals, chosen, strict=True)
        cut = np.concatenate([edge[some] - shift[of_edge[some]] for shift, some in shifts])
        number = queries.spans.start.searchsorted(cut) - 1 - q_first[of_cut]
        has = (number >= 0) & (number < q_count[of_cut])
        at, cut = (offsets(q_count)[of_cut] + number)[has], cut[has]
        inside = (start[at] < cut) & (cut < stop[at])
        piece, begin = np.append(piece, at[inside]), np.append(begin, cut[inside])
        order = np.lexsort((begin, piece))
        piece, begin = piece[order], begin[order]
        distinct, _ = runs((piece[1:] != piece[:-1]) | (begin[1:] != begin[:-1]), len(piece))
        piece, begin = piece[distinct], begin[distinct]
    is_last = np.append(piece[1:] != piece[:-1], True)
    rows = np.where(is_last, stop[piece], np.append(begin[1:], 0)) - begin
    # Keys that the first of these rows sees, and whether each next row sees one fewer or more.
    cell = cell[piece]
    k_rows = keys.start.ravel()[of_keys[cell]], keys.stop.ravel()[of_keys[cell]]
    (first, below), (after, last) = (
        [np.clip(keys.rows_below(begin + diagonal[cell] + more), *k_rows) for more in (0, 1)]
        for diagonal in diagonals
    )
    pair, before = pair[cell], keys.before[key[pair[cell]]]
    row = queries.rows_below(begin) - queries.before[query[pair]]
    found = _Stairs(pair, row, rows, first - before, last - before, below - first, last - after)
    return _joined_runs(found, cell)


def _joined_runs(stairs: _Stairs, cell: Numbers) -> _Stairs:
    """Joins runs that continue each other; drops runs that see no key.

    Args: cell: the pair of blocks and band that each run belongs to.
    """
    goes_on, same = _going_on(stairs, cell)
    while (alone := goes_on & ~same & (stairs.rows[1:] == 1)).any():
        # A run of one row fits any slopes, so it continues the run before it; the next run may then
        # continue too.
        run = np.flatnonzero(alone & ~np.append(False, alone[:-1])) + 1
        for slope in (stairs.lower, stairs.upper):
            slope[run] = slope[run - 1]
        goes_on, same = _going_on(stairs, cell)
    begins, _ = runs(~same, len(cell))
    rows = np.add.reduceat(stairs.rows, begins) if len(cell) else stairs.rows
    found = _Stairs(*(column[begins] for column in stairs))._replace(rows=rows)
    # If a run goes on until the row in which another slope begins, this row is its last one.
    shares = np.append(False, goes_on)[begins].astype(np.int64)
    found = found.after(np.arange(len(begins)), shares)
    found.rows[:-1] += shares[1:]
    return found.after(np.flatnonzero(found.last > found.first))


def _going_on(stairs: _Stairs, cell: Numbers) -> tuple[Flags, Flags]:
    """For all runs but the first: whether the run before reaches its first row, and continues in
    it. Args: cell: as of `_joined_runs`.
    """
    _, _, rows, first, last, lower, upper = stairs
    goes_on = (cell[1:] == cell[:-1]) & (last > first)[1:]
    for edge, slope in ((first, lower), (last, upper)):
        goes_on &= (edge + slope * rows)[:-1] == edge[1:]
    return goes_on, goes_on & (lower[1:] == lower[:-1]) & (upper[1:] == upper[:-1])


def _split_runs(stairs: _Stairs) -> _Stairs:
    """Cuts runs between two diagonals into runs of as many rows as the diagonals are apart, so that
    the triangles at both diagonals touch.
    """
    width = stairs.last - stairs.first
    long = (stairs.lower > 0) & (stairs.upper > 0) & (stairs.rows > width)
    if not long.any():
        return stairs
    run, number = expanded(np.where(long, -(-stairs.rows // width), 1))
    found = stairs.after(run, number * width[run])
    return found._replace(rows=np.where(long[run], np.minimum(found.rows, width[run]), found.rows))


# Number of each tile's pair of blocks; and the tiles.
_Tiles = tuple[Numbers, TileTable]


def _with_windows(stairs: _Stairs) -> _Tiles:
    """Tiles of runs of rows, for kernels that support windows.

    A tile is one run, or two runs: in the first the window hides no key yet. A call of several
    sequences has one window, so pairs of blocks with windows of several widths are left to
    `_cover`.
    """
    pair, row, rows, first, last, lower, upper = stairs
    several = rows > 1
    has_lower, has_upper = (lower > 0) & several, (upper > 0) & several
    # Another slope may begin in the last row of a run, or behind it.
    shift = np.append(first[1:] - first[:-1], first[:1])[: len(first)]
    joins = (pair[1:] == pair[:-1]) & (row[1:] == (row + rows)[:-1])
    joins &= (shift[:-1] >= 0) & (shift[:-1] <= 1) & (last[1:] == (last + rows)[:-1])
    joins &= has_upper[1:] & has_lower[1:] & has_upper[:-1] & ~has_lower[:-1]
    begins = np.append(True, ~joins)[: len(rows)]
    joins = np.append(joins, False)[: len(rows)]
    # Rows, columns and window of each run with the run that it is joined with.
    total = rows + np.where(joins, np.append(rows[1:], 0)[: len(rows)], 0)
    cols = last - first + np.where(has_upper, total - 1, 0)
    edge = np.where(joins, rows - shift, 0)
    window = np.where(joins | has_lower, edge + cols - total + 1, 0)
    # The narrowest and the widest of each pair: of windows, and of lower edges by themselves.
    extremes = np.zeros((2, 2, pair.max(initial=-1) + 1), np.int64)
    extremes[0] = FAR
    for kind, some in enumerate((has_upper, ~has_upper)):
        some = some & (window > 0) & begins
        np.minimum.at(extremes[0, kind], pair[some], window[some])
        np.maximum.at(extremes[1, kind], pair[some], window[some])
    narrowest, (widest, _) = extremes
    served = (narrowest >= extremes[1]).all(0)[pair]
    # A window that hides nothing, as in a short document, is dropped, so that tiles can be computed
    # together.
    hides_nothing = (window == 0) & (has_upper | ~several) & (cols <= widest[pair])
    window = np.where(hides_nothing, widest[pair], window)
    q, kv = Ranges.between(row, row + total), Ranges.between(first, first + cols)
    no = np.zeros(len(rows), np.bool_)
    tiles = TileTable(q, kv, has_upper | hides_nothing, no, window)
    pair, tiles = pair[served & begins], tiles.some(served & begins)
    if served.all():
        return pair, tiles
    other_pair, others = _cover(_Stairs(*(x[~served] for x in stairs)), rectangular=True)
    pair = np.concatenate((pair, other_pair))
    order = np.argsort(pair, kind="stable")
    return pair[order], TileTable.together(tiles, others).some(order)


def _cover(stairs: _Stairs, rectangular: bool) -> _Tiles:
    """Tiles of runs of rows, for kernels with causal and full tiles only."""
    pair, row, rows, first, last, lower, upper = _split_runs(stairs)
    several = rows > 1
    has_lower, has_upper = (lower > 0) & several, (upper > 0) & several
    # Keys up to `middle` are of a lower triangle, from `top` on of an upper one; all see the rest.
    top = last - has_upper
    triangle = np.where(has_lower, np.minimum(rows, top - first), 0)
    middle = first + triangle
    joins_upper, joins_lower = has_upper & rectangular, has_lower & ~has_upper & rectangular
    below = triangle > 0
    full = (middle < top) & ~joins_upper & ~joins_lower
    # Lower triangle, full tile and upper triangle of each run, where they exist.
    run, kind = np.stack((below, full, has_upper), 1).nonzero()
    is_below, is_upper = kind == 0, kind == 2
    start = np.where(
        is_below, first[run], np.where(is_upper & ~joins_upper[run], top[run], middle[run])
    )
    stop = np.where(is_below & ~joins_lower[run], middle[run], top[run])
    stop += np.where(is_upper, rows[run], 0)
    q_stop = row[run] + np.where(is_below, triangle[run], rows[run])
    q, kv = Ranges.between(row[run], q_stop), Ranges.between(start, stop)
    return pair[run], TileTable(q, kv, kind != 1, is_below, np.zeros(len(run), np.int64))
