"""The tile planner: which kernel calls cover a block of queries against a block of keys.

Pure Python: a plan exists before a tensor moves, so that it can be tested, counted and drawn.

Local row i of a block stands for one global position. With ascending positions a causal mask is a
staircase: row i sees the first n(i) local keys. n is piecewise constant or grows by one a row, so
a few rectangles and triangles cover it exactly.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import lcm
from typing import Self

from megatron_cp_plugin.core.documents import Spans, common_documents
from megatron_cp_plugin.core.layout import Span
from megatron_cp_plugin.errors import ContextParallelError


@dataclass(frozen=True)
class Mask:
    """Which keys a query may see.

    Attributes:
        causal: those at its own position and before; else all.
        window: of those only the last so many, its own included; None: all. Causal only.
        documents: of those only the ones of its own document; as of `document_starts`.
    """

    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            shape = "causal" if self.causal else "full"
            raise ContextParallelError(
                f"a window is 1 or more and needs causal attention, got {self.window} with {shape} "
                "attention: leave window out"
            )

    @property
    def special(self) -> str:
        """What not every algorithm serves, as an error has it; empty if there is nothing."""
        if self.documents:
            return f"documents, got {len(self.documents) + 1} of them"
        return "" if self.window is None else f"sliding windows, got window {self.window}"


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
        document_bounds: where whole documents begin and end, one after the other: attention is
            causal within each, of rows and columns of the same range. (): no such documents.
    """

    q: slice
    kv: slice
    rows: int
    cols: int
    causal: bool
    reverse: bool = False
    document_bounds: tuple[int, ...] = ()

    def moved(self, rows: int, cols: int) -> Self:
        """The same tile of blocks that have so many rows and columns more before it."""
        q = slice(self.q.start + rows, self.q.stop + rows, self.q.step)
        kv = slice(self.kv.start + cols, self.kv.stop + cols, self.kv.step)
        return replace(self, q=q, kv=kv)

    @property
    def area(self) -> int:
        """Number of (query, key) pairs that the tile computes."""
        if not self.causal:
            return self.rows * self.cols
        if self.document_bounds:
            return sum((b - a) * (b - a + 1) // 2 for a, b in pairwise(self.document_bounds))
        return self.rows * (self.cols - self.rows) + self.rows * (self.rows + 1) // 2


@dataclass(frozen=True)
class _Stair:
    """Rows [start, stop) of which the first sees `first` keys and each next `slope` more."""

    start: int
    stop: int
    first: int
    slope: int

    @property
    def last(self) -> int:
        return self.first + self.slope * (self.stop - self.start - 1)


def plan_tiles(
    q_spans: Sequence[Span],
    kv_spans: Sequence[Span],
    mask: Mask,
    *,
    rectangular: bool = False,
) -> tuple[Tile, ...]:
    """Covers every visible (query, key) pair of two blocks exactly once.

    Args:
        q_spans, kv_spans: global positions of the blocks' rows, ascending and disjoint.
        mask: who sees whom.
        rectangular: the kernel takes causal tiles with more columns than rows (bottom-right
            aligned). Otherwise such a tile becomes a full one and a causal square.

    Returns: tiles; () if no query sees any key. Raises: ValueError if spans are not ascending.
    """
    return _planned_once(tuple(q_spans), tuple(kv_spans), mask, rectangular)


def sees(q_spans: Sequence[Span], kv_spans: Sequence[Span], mask: Mask) -> bool:
    """Whether any query of a block sees any key of another: whether `plan_tiles` has a tile."""
    q_spans, kv_spans = (tuple(filter(len, spans)) for spans in (q_spans, kv_spans))
    if not q_spans or not kv_spans:
        return False
    if mask.documents:
        inside = replace(mask, documents=())
        found = common_documents(q_spans, kv_spans, mask.documents)
        return any(sees(part.q, part.kv, inside) for part in found)
    if not mask.causal:
        return True
    if any(span.step > 1 for span in (*q_spans, *kv_spans)):
        return bool(plan_tiles(q_spans, kv_spans, mask))
    if mask.window is None:
        return kv_spans[0].start < q_spans[-1].stop
    return any(
        max(q.start, kv.start) < min(q.stop, kv.stop + mask.window - 1)
        for q in q_spans
        for kv in kv_spans
    )


def _plan(q_spans: Spans, kv_spans: Spans, mask: Mask, rectangular: bool) -> tuple[Tile, ...]:
    rows, cols = (sum(map(len, spans)) for spans in (q_spans, kv_spans))
    if not rows or not cols:
        return ()
    if mask.documents:
        q_spans, kv_spans = (tuple(filter(len, spans)) for spans in (q_spans, kv_spans))
        return tuple(_joined(_within_documents(q_spans, kv_spans, mask, rectangular)))
    if mask.window is not None:
        return tuple(_windowed(q_spans, kv_spans, mask.window, rectangular))
    if not mask.causal:
        return (Tile(slice(0, rows), slice(0, cols), rows, cols, causal=False),)
    if all(span.step == 1 for span in (*q_spans, *kv_spans)):
        runs = _staircase(_ascending(q_spans), _ascending(kv_spans))
        return tuple(_cover(runs, rectangular, slice(0, None, 1), slice(0, None, 1)))
    # Positions of equal residue modulo the common step form a problem with step 1.
    common = lcm(*(span.step for span in (*q_spans, *kv_spans)))
    tiles: list[Tile] = []
    for q_residue, q_span, q_local in _residues(q_spans, common):
        for kv_residue, kv_span, kv_local in _residues(kv_spans, common):
            late = int(kv_residue > q_residue)  # the key of the same quotient is in the future
            shifted = Span(kv_span.start + late, kv_span.stop + late)
            tiles += _cover(_staircase([q_span], [shifted]), rectangular, q_local, kv_local)
    return tuple(tiles)


# Called within itself too, for each document, with what need not be kept.
_planned_once = lru_cache(maxsize=4096)(_plan)


def _within_documents(
    q_spans: Spans, kv_spans: Spans, mask: Mask, rectangular: bool
) -> Iterator[Tile]:
    inside = replace(mask, documents=())
    for part in common_documents(q_spans, kv_spans, mask.documents):
        for tile in _plan(part.q, part.kv, inside, rectangular):
            yield tile.moved(part.rows, part.cols)


def _joined(tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Makes one tile of causal ones, each a whole document, that follow each other."""
    run: list[Tile] = []
    for tile in tiles:
        if run and not _follows(run[-1], tile):
            yield _as_one(run)
            run = []
        run.append(tile)
    if run:
        yield _as_one(run)


def _as_one(run: Sequence[Tile]) -> Tile:
    first, last = run[0], run[-1]
    if first is last:
        return first
    bounds = (0, *accumulate(tile.rows for tile in run))
    return Tile(
        slice(first.q.start, last.q.stop),
        slice(first.kv.start, last.kv.stop),
        bounds[-1],
        bounds[-1],
        causal=True,
        document_bounds=bounds,
    )


def _follows(before: Tile, tile: Tile) -> bool:
    return all(
        # A document of one token is as good as causal.
        (one.causal or one.rows == 1)
        and one.rows == one.cols
        and not one.reverse
        and one.q.step in (None, 1)
        and one.kv.step in (None, 1)
        for one in (before, tile)
    ) and (before.q.stop, before.kv.stop) == (tile.q.start, tile.kv.start)


def _ascending(spans: Sequence[Span]) -> list[Span]:
    kept = [span for span in spans if len(span)]
    if any(a.stop > b.start for a, b in pairwise(kept)):
        raise ValueError(f"spans must be ascending and disjoint, got {tuple(spans)}")
    return kept


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


def _staircase(q_spans: Sequence[Span], kv_spans: Sequence[Span]) -> list[_Stair]:
    runs: list[_Stair] = []
    row = 0
    for q in q_spans:
        position, before = q.start, 0
        for index, kv in enumerate(kv_spans):
            until = kv_spans[index + 1].start if index + 1 < len(kv_spans) else q.stop
            # Inside the key span each next row sees one key more, behind it all the same.
            for start, stop, slope in ((kv.start, kv.stop, 1), (kv.stop, max(until, kv.stop), 0)):
                low, high = max(start, position), min(stop, q.stop)
                if low < high:
                    first = before + (low - kv.start + 1 if slope else len(kv))
                    local = row + low - q.start
                    _append(runs, _Stair(local, local + high - low, first, slope))
            before += len(kv)
        row += len(q)
    return runs


def _append(runs: list[_Stair], run: _Stair) -> None:
    """Appends a run, joined with the last one where the staircase simply goes on."""
    if runs:
        last = runs[-1]
        goes_on = last.stop == run.start and run.first == last.last + run.slope
        if goes_on and last.slope == run.slope:
            runs[-1] = _Stair(last.start, run.stop, last.first, run.slope)
            return
    runs.append(run)


def _cover(runs: Sequence[_Stair], rectangular: bool, q: slice, kv: slice) -> Iterator[Tile]:
    for run in runs:
        rows = run.stop - run.start
        q_slice = _within(q, run.start, run.stop)
        if not run.slope or rows == 1:
            yield Tile(q_slice, _within(kv, 0, run.last), rows, run.last, causal=False)
            continue
        seen_by_all = run.first - 1
        if seen_by_all and not rectangular:
            yield Tile(q_slice, _within(kv, 0, seen_by_all), rows, seen_by_all, causal=False)
        start = 0 if rectangular else seen_by_all
        yield Tile(q_slice, _within(kv, start, run.last), rows, run.last - start, causal=True)


def _windowed(
    q_spans: Sequence[Span], kv_spans: Sequence[Span], window: int, rectangular: bool
) -> Iterator[Tile]:
    common = lcm(*(span.step for span in (*q_spans, *kv_spans)))
    for q_residue, q_span, q_local in _residues(q_spans, common):
        for kv_residue, kv_span, kv_local in _residues(kv_spans, common):
            late = int(kv_residue > q_residue)
            shifted = Span(kv_span.start + late, kv_span.stop + late)
            width = (window - 1 + kv_residue - q_residue) // common + 1 - late
            for tile in _band(q_span, shifted, width, rectangular):
                q = _within(q_local, tile.q.start, tile.q.stop)
                kv = _within(kv_local, tile.kv.start, tile.kv.stop)
                yield replace(tile, q=q, kv=kv)


def _band(q: Span, kv: Span, width: int, rectangular: bool) -> Iterator[Tile]:
    """Tiles for rows x of q that see keys y of kv iff 0 <= x - y < width."""
    if width < 1:
        return
    start, last = max(q.start, kv.start), min(q.stop, kv.stop + width - 1)
    lower_slopes_from, upper_slopes_until = kv.start + width, kv.stop
    while start < last:
        lower, upper = start >= lower_slopes_from, start < upper_slopes_until
        # Where both edges slope, the two triangles of `width` rows touch each other.
        stop = start + width if lower and upper else last
        edges = (lower_slopes_from, upper_slopes_until, last, stop)
        stop = min(edge for edge in edges if edge > start)
        yield from _piece(q, kv, (start, stop), width, (lower, upper), rectangular)
        start = stop


def _piece(
    q: Span,
    kv: Span,
    rows: tuple[int, int],
    width: int,
    slopes: tuple[bool, bool],
    rectangular: bool,
) -> Iterator[Tile]:
    """Tiles of some rows whose lower and upper edges each slope everywhere or nowhere."""
    start, stop = rows
    lower, upper = slopes

    def tile(count: int, cols: tuple[int, int], *, causal: bool, reverse: bool = False) -> Tile:
        return Tile(
            slice(start - q.start, start - q.start + count),
            slice(cols[0] - kv.start, cols[1] - kv.start),
            count,
            cols[1] - cols[0],
            causal,
            reverse,
        )

    low = max(kv.start, start - width + 1)
    if stop - start == 1:
        yield tile(1, (low, start + 1 if upper else kv.stop), causal=False)
        return
    # Keys up to `middle` are of a lower triangle, from `top` on of an upper one, all see the rest.
    top = start if upper else kv.stop
    triangle = min(stop - start, top - low) if lower else 0
    middle = low + triangle
    joins_upper = rectangular and upper
    joins_lower = rectangular and lower and not upper
    if triangle:
        end = top if joins_lower else middle
        yield tile(triangle, (low, end), causal=True, reverse=True)
    if middle < top and not joins_upper and not joins_lower:
        yield tile(stop - start, (middle, top), causal=False)
    if upper:
        yield tile(stop - start, (middle if joins_upper else top, stop), causal=True)


def _within(outer: slice, start: int, stop: int) -> slice:
    """Elements [start, stop) of the slice `outer`."""
    first = outer.start + start * outer.step
    if outer.step == 1:
        return slice(first, outer.start + stop)
    return slice(first, outer.start + (stop - 1) * outer.step + 1, outer.step)


def visible_pairs(seq_len: int, mask: Mask) -> int:
    """Number of (query, key) pairs of the whole sequence that the mask lets through."""
    return sum(
        _pairs(stop - start, mask) for start, stop in pairwise((0, *mask.documents, seq_len))
    )


def _pairs(tokens: int, mask: Mask) -> int:
    """Of one document."""
    if not mask.causal:
        return tokens * tokens
    window = min(mask.window or tokens, tokens)
    return window * (window + 1) // 2 + (tokens - window) * window
