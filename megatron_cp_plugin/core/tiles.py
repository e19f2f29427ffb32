"""The tile planner: which kernel calls cover a block of queries against a block of keys.

Pure Python: a plan exists before a tensor moves, so that it can be tested, counted and drawn.

Local row i of a block stands for one global position. With ascending positions a band of the mask
lies between two staircases: row i sees the local keys m(i) to n(i). Both are piecewise constant or
grow by one a row, so a few rectangles and triangles cover what is between them exactly.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

from megatron_cp_plugin.core.layout import Documents, ManySpans, Span, Spans
from megatron_cp_plugin.core.masks.bands import BandPart, Bands, parts_of, within
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.errors import ContextParallelError


@dataclass(frozen=True)
class Mask:
    """Which keys a query may see.

    Attributes:
        causal: those at its own position and before; else all.
        window: of those only the last so many, its own included; None: all. Causal only.
        documents: of those only the ones of its own document; as of `document_starts`.
        slices: None, or which keys it sees, with the documents that they have. `causal` then says
            whether none of them is a later one, and a window hides earlier ones alone.
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
        # Plans and tiles are kept by it: hashed once, however many documents it has.
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.causal, self.window, self.documents, self.slices))

    @classmethod
    def of(cls, slices: Slices, window: int | None = None) -> "Mask":
        """The mask of some slices."""
        return cls(slices.causal, window, slices=slices)

    @property
    def bands(self) -> Bands:
        """All pairs of a query and a key that it lets through."""
        return _bands(self)

    @property
    def followed(self) -> Documents:
        """What a layout follows that depends on documents, see `Layout.within`."""
        return self.documents if self.slices is None else self.slices

    @property
    def special(self) -> str:
        """What not every algorithm serves, as an error has it; empty if there is nothing."""
        if self.slices is not None:
            return f"spans, got {len(self.slices)} of them"
        if self.documents:
            return f"documents, got {len(self.documents) + 1} of them"
        return "" if self.window is None else f"sliding windows, got window {self.window}"


@lru_cache(maxsize=64)
def _bands(mask: Mask) -> Bands:
    if mask.slices is not None:
        bands = mask.slices.bands
        return bands if mask.window is None else bands.within_window(mask.window)
    low = None if mask.window is None else 1 - mask.window
    return Bands.of_documents(mask.documents, low, 0 if mask.causal else None)


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


class _Stair(NamedTuple):
    """Rows [start, stop) of which the first sees the keys [first, last).

    Attributes: slopes: of `first` and `last`: how many keys later they are for each next row.
    """

    start: int
    stop: int
    first: int
    last: int
    slopes: tuple[int, int]

    def after(self, rows: int) -> "_Stair":
        """The run without so many of its first rows; perhaps beyond its end, were it longer."""
        lower, upper = self.slopes
        first, last = self.first + lower * rows, self.last + upper * rows
        return self._replace(start=self.start + rows, first=first, last=last)


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


@lru_cache(maxsize=4096)
def _planned_once(
    q_spans: Spans, kv_spans: Spans, mask: Mask, rectangular: bool
) -> tuple[Tile, ...]:
    found = (
        tile
        for part in parts_of(filled(q_spans), filled(kv_spans), mask.bands)
        for stair in _stairs(part)
        for tile in _cover(stair, part, rectangular)
    )
    return tuple(_joined(found))


def filled(spans: Sequence[Span]) -> Spans:
    """Those that are not empty."""
    if isinstance(spans, ManySpans):
        return spans if spans.edges[0, :1] < spans.edges[1, :1] else ()
    found = tuple([span for span in spans if span.start < span.stop])
    # They themselves if they can be, which may be hashed already.
    return spans if isinstance(spans, tuple) and len(found) == len(spans) else found


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


def _stairs(part: BandPart) -> Iterator[_Stair]:
    """Runs of rows whose first and last keys each stay the same, or move by one a row."""
    starts, stops = [kv.start for kv in part.kv], [kv.stop for kv in part.kv]
    before = [0, *accumulate(map(len, part.kv))]

    def keys_below(position: int) -> tuple[int, int]:
        """How many keys are below a position, and how many at it."""
        number = bisect_right(stops, position)
        if number == len(starts):
            return before[number], 0
        inside = position - starts[number]
        return before[number] + max(0, inside), int(inside >= 0)

    cuts = sorted(edge - shift for edge in (*starts, *stops) for shift in (part.low, part.high))
    run: _Stair | None = None
    row = 0
    for q in part.q:
        inner = cuts[bisect_right(cuts, q.start) : bisect_left(cuts, q.stop)]
        for start, stop in pairwise((q.start, *inner, q.stop)):
            if start == stop:
                continue
            first, lower = keys_below(start + part.low)
            last, upper = keys_below(start + part.high)
            local = row + start - q.start
            new = _Stair(local, local + stop - start, first, last + upper, (lower, upper))
            if run is not None and run.after(run.stop - run.start)[2:4] == new[2:4]:
                # It goes on, and if not with all rows then with the one in which a slope begins.
                more = stop - start if run.slopes == new.slopes else int(new.last > new.first)
                run, new = run._replace(stop=run.stop + more), new.after(more)
            if new.start == new.stop:
                continue
            if run is not None and run.last > run.first:
                yield run
            run = new
        row += len(q)
    if run is not None and run.last > run.first:
        yield run


def _cover(stair: _Stair, part: BandPart, rectangular: bool) -> Iterator[Tile]:
    """Tiles of a run of rows."""
    start, stop, first, last, (lower, upper) = stair
    rows = stop - start
    if lower and upper and rows > last - first:
        # The two triangles of as many rows as the band is wide touch each other.
        for done in range(0, rows, last - first):
            some = stair.after(done)
            some = some._replace(stop=min(stop, some.start + last - first))
            yield from _cover(some, part, rectangular)
        return

    def tile(
        count: int, left: int, right: int, *, causal: bool = False, reverse: bool = False
    ) -> Tile:
        q, kv = within(part.rows, start, start + count), within(part.cols, left, right)
        return Tile(q, kv, count, right - left, causal, reverse)

    if rows == 1:
        yield tile(1, first, last)
        return
    # Keys up to `middle` are of a lower triangle, from `top` on of an upper one; all see the rest.
    top = last - upper
    triangle = min(rows, top - first) if lower else 0
    middle = first + triangle
    joins_upper = rectangular and upper
    joins_lower = rectangular and lower and not upper
    if triangle:
        yield tile(triangle, first, top if joins_lower else middle, causal=True, reverse=True)
    if middle < top and not joins_upper and not joins_lower:
        yield tile(rows, middle, top)
    if upper:
        yield tile(rows, middle if joins_upper else top, top + rows, causal=True)


def visible_pairs(seq_len: int, mask: Mask) -> int:
    """Number of (query, key) pairs of the whole sequence that the mask lets through."""
    return mask.bands.area(seq_len)
