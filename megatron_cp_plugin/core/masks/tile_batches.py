"""Groups tiles into kernel calls: with documents there may be hundreds of tiles.

A kernel that packs takes any sequences of queries and keys, one after the other, in one call. Tiles
that follow each other in rows and in columns are such sequences as they are; to some kernels also
those that leave some rows or columns out. Other small ones are copied together for the call, for
one of each would cost more than the copies.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import inf

import numpy as np

from megatron_cp_plugin.core.masks.batch import Batch, Ranges
from megatron_cp_plugin.core.masks.tile_table import TileTable, table_of
from megatron_cp_plugin.core.ranges import Numbers, expanded, runs
from megatron_cp_plugin.core.tiles import Tile

# Pairs of a query and a key, for all heads, with which a call keeps a GPU busy for longer than the
# host needs for the next one: some 70 us forward with head dim 128.
_LARGE = 2**26
# Queries, for all heads, that are copied for one call: the least that is worth one, and the most,
# for which memory is taken. Between them it is half of those that there are.
_COPIED = 2**13, 2**17
# How many rows there may be in all where some are left out, for each that is computed: they take
# memory, if no time.
_SPARSE = 4

KernelCall = Tile | Batch


class Batches:
    """The tiles of a block of queries and one of keys, and the kernel calls that compute them."""

    def __init__(self, tiles: Iterable[Tile], heads: int) -> None:
        """Args: heads: query heads that are computed at a time."""
        self.tiles, self._heads = table_of(tiles), heads
        self._calls: dict[tuple[bool, bool, bool], tuple[KernelCall, ...]] = {}

    def calls(
        self, *, packed: bool, gaps: bool = False, forward: bool = False
    ) -> tuple[KernelCall, ...]:
        """Every tile once.

        Args: packed: by a kernel that packs; else a call each. gaps: it takes sequences with others
            between them. forward: results are for queries only.
        """
        way = packed, gaps, forward
        if way not in self._calls:
            several = packed and len(self.tiles.joined) > 1
            found = (
                _packed(self.tiles, self._units, self._heads, gaps, forward)
                if several
                else _singly(self.tiles)
            )
            self._calls[way] = tuple(found)
        return self._calls[way]

    @cached_property
    def _units(self) -> tuple["_Units", ...]:
        """The tiles of each kind; both passes have the same."""
        return tuple(_units_of(self.tiles))


def _singly(tiles: TileTable) -> Iterator[KernelCall]:
    bounds = [*np.flatnonzero(~tiles.joined).tolist(), len(tiles.joined)]
    for tile, (start, stop) in zip(tiles, pairwise(bounds), strict=True):
        yield tile if stop == start + 1 else _call(tiles, np.arange(start, stop))


def _packed(
    tiles: TileTable, kinds: tuple["_Units", ...], heads: int, gaps: bool, forward: bool
) -> list[KernelCall]:
    found: list[KernelCall] = []
    rows, keys = (int(x[1].max(initial=0)) for x in (tiles.q, tiles.kv))
    least, most = (queries // heads for queries in _COPIED)
    most_rows = min(max(rows // 2, least), most)
    for units in kinds:
        rest = np.ones(len(units), np.bool_)
        for group in _in_place(units, forward, most_rows) if gaps else ():
            found.append(_call(units.tiles, units.numbers(group), apart=True, forward=forward))
            rest[group] = False
        large = units.area * heads >= _LARGE
        alone = np.flatnonzero(rest & large).tolist()
        found += (_call(units.tiles, units.numbers([unit])) for unit in alone)
        small = np.flatnonzero(rest & ~large)
        groups = _disjoint(units, small, most_rows, 2 * keys)
        found += (_call(units.tiles, units.numbers(group), forward=forward) for group in groups)
    # What may be all rows comes first: there is nothing yet to merge it with.
    return sorted(found, key=_row_count, reverse=True)


def _units_of(tiles: TileTable) -> Iterator["_Units"]:
    kinds = 2 * tiles.causal + tiles.reverse
    for kind in dict.fromkeys(kinds.tolist()):
        of_kind = tiles.some(kinds == kind)
        yield _Units(of_kind if kind > 1 else _larger(of_kind))


class _Units:
    """Tiles of one kind, those as one that follow each other in rows and in columns.

    Attributes: tiles: in that order. Of each unit, int64 [n]: start, stop: of all rows; k_start,
        k_stop: of all columns; rows, cols, area: of all its tiles. plain: they all are slices
        without steps, and not reversed.
    """

    def __init__(self, tiles: TileTable) -> None:
        self.tiles = tiles = tiles.some(np.lexsort((tiles.kv[0], tiles.q[0]))).single
        plain = (tiles.q[2] == 1) & (tiles.kv[2] == 1) & ~tiles.reverse
        follows = plain[1:] & plain[:-1]
        for x in (tiles.q, tiles.kv):
            follows &= x[1, :-1] == x[0, 1:]
        self._first, self._last = runs(~follows, len(plain))
        self.start, self.k_start = tiles.q[0, self._first], tiles.kv[0, self._first]
        self.stop, self.k_stop = tiles.q[1, self._last], tiles.kv[1, self._last]
        self.rows = self.stop - self.start
        self.cols = np.add.reduceat(tiles.cols, self._first)
        self.area = np.add.reduceat(tiles.areas, self._first)
        self.plain = bool(plain.all())

    def __len__(self) -> int:
        return len(self._first)

    def numbers(self, units: Sequence[int] | Numbers) -> Numbers:
        """Those of the tiles of some units."""
        whose, within = expanded((self._last - self._first + 1)[units])
        return self._first[units][whose] + within


def _larger(tiles: TileTable) -> TileTable:
    """Full tiles, those as one that have the same rows and columns that follow each other, or the
    same columns and rows that do.
    """
    order = np.lexsort((tiles.kv[0], tiles.q[1], tiles.q[0]))
    q, kv = _widened(tiles.q[:, order], tiles.kv[:, order])
    order = np.lexsort((q[0], kv[1], kv[0]))
    kv, q = _widened(kv[:, order], q[:, order])
    no = np.zeros(q.shape[1], np.bool_)
    return TileTable(q, kv, no, no, no)


def _widened(same: Numbers, wide: Numbers) -> tuple[Numbers, Numbers]:
    """Those as one of which one side is the same, and the others follow each other."""
    follows = (same[:, 1:] == same[:, :-1]).all(0) & (wide[1, :-1] == wide[0, 1:])
    follows &= (wide[2, 1:] == 1) & (wide[2, :-1] == 1)
    first, last = runs(~follows, same.shape[1])
    return same[:, first], np.stack((wide[0, first], wide[1, last], wide[2, first]))


def _disjoint(
    units: _Units, numbers: Numbers, most_rows: float = inf, most_cols: float = inf
) -> list[list[int]]:
    """As few groups as can be, of units that have no row in common.

    Args: numbers: of units, ascending in rows. most_rows, most_cols: of a group, repeated ones
        counted again.
    """
    columns = (x[numbers] for x in (units.start, units.stop, units.rows, units.cols))
    start, stop, rows, cols = columns
    fit = rows.sum() <= most_rows and cols.sum() <= most_cols
    if len(numbers) and fit and (stop[:-1] <= start[1:]).all():
        return [numbers.tolist()]
    groups: list[list[int]] = []
    sizes: list[tuple[int, int, int]] = []  # where a group ends, its rows and its columns
    for number, *unit in zip(
        *(x.tolist() for x in (numbers, start, stop, rows, cols)), strict=True
    ):
        begin, end, own_rows, own_cols = unit
        for index, (reached, of_group, of_keys) in enumerate(sizes):
            new = end, of_group + own_rows, of_keys + own_cols
            if begin >= reached and new[1] <= most_rows and new[2] <= most_cols:
                groups[index].append(number)
                sizes[index] = new
                break
        else:
            groups.append([number])
            sizes.append((end, own_rows, own_cols))
    return groups


def _in_place(units: _Units, forward: bool, copied: int) -> list[list[int]]:
    """Groups of units that a kernel takes where they are, leaving out what is between them.

    Args: copied: as many rows may be copied for one call.
    """
    if not units.plain:
        return []
    if forward:
        groups = _disjoint(units, np.arange(len(units)))
        return [group for group in groups if len(group) > 1 and _fits(units, group, forward)]
    groups = _ascending(units)
    # Each call makes gradients of all rows, and of all keys, that are added up.
    few = len(groups) == 1 or (len(groups) == 2 and units.rows.sum() > copied)
    fit = few and all(len(group) > 1 and _fits(units, group, forward) for group in groups)
    return groups if fit else []


def _ascending(units: _Units) -> list[list[int]]:
    """Groups of units that follow each other in rows and in columns, as few as can be."""
    follows = (units.stop[:-1] <= units.start[1:]) & (units.k_stop[:-1] <= units.k_start[1:])
    if follows.all():
        return [[*range(len(units))]]
    groups: list[list[int]] = []
    ends: list[tuple[int, int]] = []
    columns = (units.start, units.k_start, units.stop, units.k_stop)
    for number, (row, col, *end) in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
        for index, (last_row, last_col) in enumerate(ends):
            if row >= last_row and col >= last_col:
                groups[index].append(number)
                ends[index] = end[0], end[1]
                break
        else:
            groups.append([number])
            ends.append((end[0], end[1]))
    return groups


def _fits(units: _Units, group: Sequence[int], forward: bool) -> bool:
    """Whether few rows are left out, and few columns unless they are only read."""
    start, stop = units.start[group], units.stop[group]
    few_rows = bool(stop[-1] - start[0] <= _SPARSE * (stop - start).sum())
    if forward:
        return few_rows
    start, stop = units.k_start[group], units.k_stop[group]
    few_cols = bool(stop[-1] - start[0] <= _SPARSE * units.cols[group].sum())
    return few_rows and few_cols


def _call(
    tiles: TileTable, numbers: Numbers, *, apart: bool = False, forward: bool = False
) -> KernelCall:
    """One of some tiles. Args: numbers: of the tiles, all of one kind."""
    some = tiles.some(numbers)
    if len(numbers) == 1:
        (tile,) = some
        return tile
    rows = Ranges.of(some.q, some.rows, some.reverse)
    cols = Ranges.of(some.kv, some.cols, some.reverse)
    return Batch(rows, cols, bool(some.causal[0]), apart, forward)


def _row_count(call: KernelCall) -> int:
    return call.rows if isinstance(call, Tile) else int(call.rows.lengths.sum())


@dataclass(frozen=True)
class Part:
    """Some rows of a block of queries, and all that is computed for them.

    Attributes: rows: of the block. work: with rows that count from rows.start.
    """

    rows: slice
    work: Batches


@lru_cache(maxsize=256)
def parts(
    tiles: Sequence[Tile], rows: int, heads: int, packed: bool, gaps: bool
) -> tuple[Part, ...]:
    """Divides a block of `rows` queries where no kernel call has rows on both sides.

    Then a part needs no buffer to merge into unless it has several calls. Rows that see nothing
    are a part without tiles.

    Args: heads, packed, gaps: as in `Batches`.
    """
    work = Batches(tiles, heads)
    cuts = _merged(map(_rows_of, work.calls(packed=packed, gaps=gaps)))
    return tuple(_parts(work.tiles, rows, heads, cuts))


def _parts(
    tiles: TileTable, rows: int, heads: int, cuts: Iterable[tuple[int, int]]
) -> Iterator[Part]:
    reached = 0
    for start, stop in cuts:
        if start > reached:
            yield Part(slice(reached, start), Batches((), heads))
        own = tiles.some((start <= tiles.q[0]) & (tiles.q[0] < stop))
        yield Part(slice(start, stop), Batches(own.moved(-start, 0), heads))
        reached = stop
    if reached < rows:
        yield Part(slice(reached, rows), Batches((), heads))


def _rows_of(call: KernelCall) -> tuple[int, int]:
    return (call.q.start, call.q.stop) if isinstance(call, Tile) else call.rows.extent


def _merged(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without those that overlap."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(extents):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
