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
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.devices import uploaded
from megatron_cp_plugin.core.kernel import Packing
from megatron_cp_plugin.core.partial import RowIndex, Rows
from megatron_cp_plugin.core.tiles import Tile

# Pairs of a query and a key, for all heads, with which a call keeps a GPU busy for longer than the
# host needs for the next one: some 70 us forward with head dim 128.
_LARGE = 2**26
# How many rows there may be in all where some are left out, for each that is computed: they take
# memory, if no time.
_SPARSE = 4

Ranges = tuple[range, ...]


class Side(NamedTuple):
    """Where the queries, or the keys, of a batch are in a block.

    Attributes:
        taken: those of all sequences, one after the other; as in `partial.rows_at`.
        given: to which rows results go, in as many rounds as a row is taken.
    """

    taken: slice | Tensor
    given: tuple[Rows, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """Tiles of one kind as the sequences of one call. No row of queries is in two of them.

    Attributes: rows, cols: of each sequence, in the order in which the kernel takes them. apart:
        they ascend, and what is between them is left out.
    """

    rows: Ranges
    cols: Ranges
    causal: bool
    apart: bool = False

    @cached_property
    def packing(self) -> Packing:
        """The sequences."""
        return Packing(*(_places(x, apart=self.apart) for x in (self.rows, self.cols)))

    def sides(self, device: torch.device) -> tuple[Side, Side]:
        """The queries and the keys; all layers of a micro-batch have the same."""
        return _on_device(self, device)


@lru_cache(maxsize=512)  # batches of some micro-batches: they take memory of the device
def _on_device(batch: Batch, device: torch.device) -> tuple[Side, Side]:
    rows, cols = (_picked(x, apart=batch.apart) for x in (batch.rows, batch.cols))
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

    def calls(self, *, packed: bool, gaps: bool = False) -> tuple[KernelCall, ...]:
        """Every tile once. Args: packed: by a kernel that packs; else a call each. gaps: it takes
        sequences with others between them.
        """
        if not packed:
            return self._single
        return self._apart if gaps else self._copied

    @cached_property
    def _single(self) -> tuple[KernelCall, ...]:
        return tuple(_call([_Unit(tile)], causal=tile.causal) for tile in self.tiles)

    @cached_property
    def _copied(self) -> tuple[KernelCall, ...]:
        return tuple(_packed(self.tiles, self._heads, gaps=False))

    @cached_property
    def _apart(self) -> tuple[KernelCall, ...]:
        return tuple(_packed(self.tiles, self._heads, gaps=True))


def _packed(tiles: Sequence[Tile], heads: int, *, gaps: bool) -> list[KernelCall]:
    found: list[KernelCall] = []
    keys = max((tile.kv.stop for tile in tiles), default=0)
    by_kind: dict[tuple[bool, bool], list[Tile]] = {}
    for tile in tiles:
        by_kind.setdefault((tile.causal, tile.reverse), []).append(tile)
    for (causal, reverse), of_kind in by_kind.items():
        units = _units(of_kind if causal else _larger(of_kind))
        if gaps and len(units) > 1 and _ascend(units):
            found.append(_call(units, causal=causal, apart=True))
            continue
        # Reversed tiles are copied anyway.
        large = [u for u in units if u.area * heads >= _LARGE and not reverse]
        small = [u for u in units if u.area * heads < _LARGE or reverse]
        groups = (*([unit] for unit in large), *_disjoint(small, 2 * keys))
        found += (_call(group, causal=causal) for group in groups)
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


def _disjoint(units: Iterable[_Unit], most: int) -> Iterator[list[_Unit]]:
    """As few groups as can be, of units that have no row in common.

    Args: units: ascending in rows. most: keys that a group may have, repeated ones counted again.
    """
    groups: list[tuple[list[_Unit], int, int]] = []
    for unit in units:
        for index, (group, reached, cols) in enumerate(groups):
            if unit.start >= reached and cols + unit.cols <= most:
                group.append(unit)
                groups[index] = group, unit.stop, cols + unit.cols
                break
        else:
            groups.append(([unit], unit.stop, unit.cols))
    yield from (group for group, *_ in groups)


def _ascend(units: Sequence[_Unit]) -> bool:
    """Whether rows and columns ascend, and not too many are left out."""
    if not all(unit.plain for unit in units):
        return False
    for a, b in pairwise(units):
        if a.stop > b.start or a.tiles[-1].kv.stop > b.tiles[0].kv.start:
            return False
    first, last = units[0].tiles[0], units[-1].tiles[-1]
    rows, cols = last.q.stop - first.q.start, last.kv.stop - first.kv.start
    taken = sum(unit.stop - unit.start for unit in units), sum(unit.cols for unit in units)
    return rows <= _SPARSE * taken[0] and cols <= _SPARSE * taken[1]


def _call(units: Sequence[_Unit], *, causal: bool, apart: bool = False) -> KernelCall:
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
    return Batch(tuple(rows), tuple(cols), causal, apart)


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
    """A `Side` on the host."""

    taken: slice | Tensor
    rounds: tuple[tuple[Tensor, Tensor], ...]


def _places(ranges: Ranges, *, apart: bool) -> tuple[slice, ...]:
    """Where the sequences are in what a kernel is given."""
    if apart:
        return tuple(slice(x.start - ranges[0].start, x.stop - ranges[0].start) for x in ranges)
    return tuple(slice(a, b) for a, b in pairwise(accumulate(map(len, ranges), initial=0)))


def _picked(ranges: Ranges, *, apart: bool) -> _Picked:
    whole = slice(ranges[0].start, ranges[-1].stop)
    if all(_follows(a, b) for a, b in pairwise(ranges)) and ranges[0].step == 1:
        return _Picked(whole, ())
    if apart:
        numbers = _numbers(ranges)
        return _Picked(whole, ((numbers, numbers - whole.start),))
    rounds = _rounds(ranges)
    if len(rounds) == 1:
        return _Picked(_numbers(ranges), ())
    starts = list(accumulate(map(len, ranges), initial=0))
    packed = [range(a, b) for a, b in pairwise(starts)]
    pairs = (
        (_numbers([ranges[n] for n in numbers]), _numbers([packed[n] for n in numbers]))
        for numbers in rounds
    )
    return _Picked(_numbers(ranges), tuple(pairs))


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
    """The elements of all ranges, one after the other."""
    starts, steps, lengths = torch.tensor([(x.start, x.step, len(x)) for x in ranges]).unbind(1)
    within = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(
        lengths
    )
    return starts.repeat_interleave(lengths) + within * steps.repeat_interleave(lengths)


def _indices(side: _Picked) -> Iterator[Tensor]:
    if isinstance(side.taken, Tensor):
        yield side.taken
    for pair in side.rounds:
        yield from pair


def _placed(side: _Picked, on_device: Iterator[Tensor]) -> Side:
    """With tensors on a device, in the order of `_indices`."""
    taken = side.taken if isinstance(side.taken, slice) else next(on_device)
    if not side.rounds:
        return Side(taken, (taken if isinstance(taken, slice) else RowIndex(taken),))
    return Side(taken, tuple(RowIndex(next(on_device), next(on_device)) for _ in side.rounds))


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
