"""Which tiles of a computation are one kernel call: with documents there may be hundreds.

A kernel that packs takes any sequences of queries and keys, one after the other, in one call. Tiles
that follow each other in rows and in columns are such sequences as they are; to some kernels also
those that leave some rows or columns out. Other small ones are copied together for the call, for
one of each would cost more than the copies.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp_plugin.core.devices import uploaded
from megatron_cp_plugin.core.kernel import Packing
from megatron_cp_plugin.core.partial import RowIndex, SomeRows
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

Ranges = tuple[range, ...]


class Side(NamedTuple):
    """Where the queries, or the keys, of a batch are in a block.

    Attributes:
        taken: those of all sequences, one after the other; as in `partial.rows_at`.
        given: to which rows results go, in as many rounds as a row is taken; () if there are none.
    """

    taken: slice | Tensor
    given: tuple[SomeRows, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """Tiles of one kind as the sequences of one call. No row of queries is in two of them.

    Attributes:
        rows, cols: of each sequence, in the order in which the kernel takes them.
        apart: they ascend, and what is between them is left out.
        forward: nothing is given to keys; so if `apart` they may be in any order, and repeated.
    """

    rows: Ranges
    cols: Ranges
    causal: bool
    apart: bool = False
    forward: bool = False

    @cached_property
    def packing(self) -> Packing:
        """The sequences."""
        return Packing(*(_places(x, apart=self.apart) for x in (self.rows, self.cols)))

    def sides(self, device: torch.device) -> tuple[Side, Side]:
        """The queries and the keys; all layers of a micro-batch have the same."""
        return _on_device(self, device)


@lru_cache(maxsize=512)  # batches of some micro-batches: they take memory of the device
def _on_device(batch: Batch, device: torch.device) -> tuple[Side, Side]:
    rows = _picked(batch.rows, apart=batch.apart)
    cols = _picked(batch.cols, apart=batch.apart, given=not batch.forward)
    indices = (*_indices(rows), *_indices(cols))
    parts: Iterator[Tensor] = iter(())
    if indices:
        parts = iter(uploaded(torch.cat(indices), device).split([len(x) for x in indices]))
    return _placed(rows, parts), _placed(cols, parts)


KernelCall = Tile | Batch


class Batches:
    """The tiles of a block of queries and one of keys, and the kernel calls that compute them."""

    def __init__(self, tiles: Iterable[Tile], heads: int) -> None:
        """Args: heads: query heads that are computed at a time."""
        self.tiles, self._heads = tuple(tiles), heads
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
            singly = (_call([_Unit(tile)], tile.causal) for tile in self.tiles)
            found = _packed(self.tiles, self._heads, gaps, forward) if packed else singly
            self._calls[way] = tuple(found)
        return self._calls[way]


def _packed(tiles: Sequence[Tile], heads: int, gaps: bool, forward: bool) -> list[KernelCall]:
    found: list[KernelCall] = []
    rows = max((tile.q.stop for tile in tiles), default=0)
    keys = max((tile.kv.stop for tile in tiles), default=0)
    least, most = (queries // heads for queries in _COPIED)
    by_kind: dict[tuple[bool, bool], list[Tile]] = {}
    for tile in tiles:
        by_kind.setdefault((tile.causal, tile.reverse), []).append(tile)
    for (causal, _), of_kind in by_kind.items():
        units = _units(of_kind if causal else _larger(of_kind))
        in_place = _in_place(units, forward) if gaps else []
        found += (_call(group, causal, apart=True, forward=forward) for group in in_place)
        taken = {unit for group in in_place for unit in group}
        units = [unit for unit in units if unit not in taken]
        found += (_call([u], causal) for u in units if u.area * heads >= _LARGE)
        small = (unit for unit in units if unit.area * heads < _LARGE)
        groups = _disjoint(small, min(max(rows // 2, least), most), 2 * keys)
        found += (_call(group, causal, forward=forward) for group in groups)
    # What may be all rows comes first: there is nothing yet to merge it with.
    return sorted(found, key=_row_count, reverse=True)


class _Unit:
    """Tiles of one kind that follow each other in rows and in columns.

    Attributes: tiles: in that order. start, stop: of all rows. area, cols: of all tiles. plain:
        they are slices without steps, and not reversed.
    """

    def __init__(self, tile: Tile) -> None:
        self.tiles, self.area, self.cols = [tile], tile.area, tile.cols
        self.start, self.stop = tile.q.start, tile.q.stop
        self.plain = tile.q.step in (None, 1) and tile.kv.step in (None, 1) and not tile.reverse

    def takes(self, other: "_Unit") -> bool:
        """Whether another unit of one tile follows, and is taken in."""
        (tile,), last = other.tiles, self.tiles[-1]
        follows = (tile.q.start, tile.kv.start) == (last.q.stop, last.kv.stop)
        if not (follows and self.plain and other.plain):
            return False
        self.tiles.append(tile)
        self.area, self.cols, self.stop = self.area + other.area, self.cols + other.cols, other.stop
        return True


def _larger(tiles: Iterable[Tile]) -> list[Tile]:
    """Full tiles, those as one that have the same rows and columns that follow each other, or the
    same columns and rows that do.
    """
    found: list[Tile] = []
    for tile in sorted(tiles, key=lambda tile: (tile.q.start, tile.q.stop, tile.kv.start)):
        if found and found[-1].q == tile.q and _follow(found[-1].kv, tile.kv):
            kv = slice(found[-1].kv.start, tile.kv.stop)
            found[-1] = replace(tile, kv=kv, cols=found[-1].cols + tile.cols)
        else:
            found.append(tile)
    wide, found = found, []
    for tile in sorted(wide, key=lambda tile: (tile.kv.start, tile.kv.stop, tile.q.start)):
        if found and found[-1].kv == tile.kv and _follow(found[-1].q, tile.q):
            q = slice(found[-1].q.start, tile.q.stop)
            found[-1] = replace(tile, q=q, rows=found[-1].rows + tile.rows)
        else:
            found.append(tile)
    return found


def _follow(before: slice, part: slice) -> bool:
    unit = before.step in (None, 1) and part.step in (None, 1)
    return unit and before.stop == part.start


def _units(tiles: Iterable[Tile]) -> list[_Unit]:
    units: list[_Unit] = []
    for tile in sorted(tiles, key=lambda tile: (tile.q.start, tile.kv.start)):
        unit = _Unit(tile)
        if not (units and units[-1].takes(unit)):
            units.append(unit)
    return units


def _disjoint(
    units: Iterable[_Unit], most_rows: float = inf, most_cols: float = inf
) -> list[list[_Unit]]:
    """As few groups as can be, of units that have no row in common.

    Args: units: ascending in rows. most_rows, most_cols: of a group, repeated ones counted again.
    """
    groups: list[list[_Unit]] = []
    sizes: list[tuple[int, int]] = []
    for unit in units:
        own = unit.stop - unit.start, unit.cols
        for index, (group, (rows, cols)) in enumerate(zip(groups, sizes, strict=True)):
            fits = rows + own[0] <= most_rows and cols + own[1] <= most_cols
            if unit.start >= group[-1].stop and fits:
                group.append(unit)
                sizes[index] = rows + own[0], cols + own[1]
                break
        else:
            groups.append([unit])
            sizes.append(own)
    return groups


def _in_place(units: Sequence[_Unit], forward: bool) -> list[list[_Unit]]:
    """Groups of units that a kernel takes where they are, leaving out what is between them."""
    if not all(unit.plain for unit in units):
        return []
    groups = _disjoint(units) if forward else [[*units]]
    return [group for group in groups if len(group) > 1 and _fits(group, forward)]


def _fits(units: Sequence[_Unit], forward: bool) -> bool:
    """Whether rows ascend, and columns too unless they are only read, and few are left out."""
    if any(a.stop > b.start for a, b in pairwise(units)):
        return False
    rows = units[-1].stop - units[0].start
    few_rows = rows <= _SPARSE * sum(unit.stop - unit.start for unit in units)
    if forward:
        return few_rows
    places = [(unit.tiles[0].kv.start, unit.tiles[-1].kv.stop) for unit in units]
    ascend = all(a[1] <= b[0] for a, b in pairwise(places))
    few_cols = places[-1][1] - places[0][0] <= _SPARSE * sum(unit.cols for unit in units)
    return few_rows and ascend and few_cols


def _call(
    units: Sequence[_Unit], causal: bool, *, apart: bool = False, forward: bool = False
) -> KernelCall:
    tiles = [tile for unit in units for tile in unit.tiles]
    if len(tiles) == 1 and not tiles[0].document_bounds:
        return tiles[0]
    rows: list[range] = []
    cols: list[range] = []
    for tile in tiles:
        if tile.document_bounds:
            documents = [slice(a, b) for a, b in pairwise(tile.document_bounds)]
            rows += (_range(tile.q)[part] for part in documents)
            cols += (_range(tile.kv)[part] for part in documents)
        else:
            order = -1 if tile.reverse else 1
            rows.append(_range(tile.q)[::order])
            cols.append(_range(tile.kv)[::order])
    return Batch(tuple(rows), tuple(cols), causal, apart, forward)


def _row_count(call: KernelCall) -> int:
    return call.rows if isinstance(call, Tile) else sum(map(len, call.rows))


def _range(part: slice) -> range:
    return range(part.start, part.stop, part.step or 1)


def _extent(rows: range) -> tuple[int, int]:
    """The first of some rows, and the one after the last, in ascending order."""
    return min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1


def _follows(before: range, rows: range) -> bool:
    return before.step == rows.step == 1 and before.stop == rows.start


class _Picked(NamedTuple):
    """A `Side` on the host. Attributes: given: otherwise than all rows as they are taken."""

    taken: slice | Tensor
    given: tuple[tuple[Tensor, Tensor], ...] | None = None


def _places(ranges: Ranges, *, apart: bool) -> tuple[slice, ...]:
    """Where the sequences are in what a kernel is given."""
    if apart:
        first = min(x.start for x in ranges)
        return tuple(slice(x.start - first, x.stop - first) for x in ranges)
    return tuple(slice(a, b) for a, b in pairwise(accumulate(map(len, ranges), initial=0)))


def _picked(ranges: Ranges, *, apart: bool, given: bool = True) -> _Picked:
    """Args: given: there are results for them."""
    if all(_follows(a, b) for a, b in pairwise(ranges)) and ranges[0].step == 1:
        return _Picked(slice(ranges[0].start, ranges[-1].stop), None if given else ())
    if apart:
        whole = slice(min(x.start for x in ranges), max(x.stop for x in ranges))
        if not given:
            return _Picked(whole, ())
        numbers = _numbers(ranges)
        return _Picked(whole, ((numbers, numbers - whole.start),))
    taken = _numbers(ranges)
    if not given:
        return _Picked(taken, ())
    rounds = _rounds(ranges)
    if len(rounds) == 1:
        return _Picked(taken)
    packed = [range(a, b) for a, b in pairwise(accumulate(map(len, ranges), initial=0))]
    pairs = (
        (_numbers([ranges[n] for n in numbers]), _numbers([packed[n] for n in numbers]))
        for numbers in rounds
    )
    return _Picked(taken, tuple(pairs))


def _rounds(ranges: Ranges) -> list[list[int]]:
    """Numbers of the ranges, in groups that have nothing in common."""
    extents = list(map(_extent, ranges))
    groups: list[tuple[int, list[int]]] = []
    for number in sorted(range(len(ranges)), key=extents.__getitem__):
        start, stop = extents[number]
        for index, (reached, group) in enumerate(groups):
            if start >= reached:
                group.append(number)
                groups[index] = stop, group
                break
        else:
            groups.append((stop, [number]))
    return [group for _, group in groups]


def _numbers(ranges: Sequence[range]) -> Tensor:
    """The elements of all ranges, one after the other. By NumPy: torch's threads cost more."""
    table = np.array([(x.start, x.step, len(x)) for x in ranges], np.int64)
    starts, steps, lengths = table.T
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return torch.from_numpy(np.repeat(starts, lengths) + within * np.repeat(steps, lengths))


def _indices(side: _Picked) -> Iterator[Tensor]:
    if isinstance(side.taken, Tensor):
        yield side.taken
    for pair in side.given or ():
        yield from pair


def _placed(side: _Picked, on_device: Iterator[Tensor]) -> Side:
    """With tensors on a device, in the order of `_indices`."""
    taken = side.taken if isinstance(side.taken, slice) else next(on_device)
    if side.given is None:
        return Side(taken, (taken if isinstance(taken, slice) else RowIndex(taken),))
    return Side(taken, tuple(RowIndex(next(on_device), next(on_device)) for _ in side.given))


@dataclass(frozen=True)
class Part:
    """Some rows of a block of queries, and all that is computed for them.

    Attributes: rows: of the block. work: with rows that count from rows.start.
    """

    rows: slice
    work: Batches


@lru_cache(maxsize=256)
def parts(
    tiles: tuple[Tile, ...], rows: int, heads: int, packed: bool, gaps: bool
) -> tuple[Part, ...]:
    """Divides a block of `rows` queries where no kernel call has rows on both sides.

    Then a part needs no buffer to merge into unless it has several calls. Rows that see nothing
    are a part without tiles.

    Args: heads, packed, gaps: as in `Batches`.
    """
    calls = Batches(tiles, heads).calls(packed=packed, gaps=gaps)
    return tuple(_parts(tiles, rows, heads, _merged(map(_rows_of, calls))))


def _parts(
    tiles: tuple[Tile, ...], rows: int, heads: int, cuts: Iterable[tuple[int, int]]
) -> Iterator[Part]:
    reached = 0
    for start, stop in cuts:
        if start > reached:
            yield Part(slice(reached, start), Batches((), heads))
        own = (tile.moved(-start, 0) for tile in tiles if start <= tile.q.start < stop)
        yield Part(slice(start, stop), Batches(own, heads))
        reached = stop
    if reached < rows:
        yield Part(slice(reached, rows), Batches((), heads))


def _rows_of(call: KernelCall) -> tuple[int, int]:
    extents = [_extent(x) for x in ([_range(call.q)] if isinstance(call, Tile) else call.rows)]
    return min(start for start, _ in extents), max(stop for _, stop in extents)


def _merged(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without those that overlap."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(extents):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
