"""Which tiles of a computation are one kernel call: with documents there may be hundreds.

A kernel that packs takes any sequences of queries and keys, one after the other, in one call. Tiles
that follow each other in rows and in columns are such sequences as they are. Other small ones are
copied together for it, for a call of each would cost more than the copies.
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

    Attributes: rows, cols: of each sequence, in the order in which the kernel takes them.
    """

    rows: Ranges
    cols: Ranges
    causal: bool

    @cached_property
    def packing(self) -> Packing:
        """The sequences."""
        rows, cols = (accumulate(map(len, x), initial=0) for x in (self.rows, self.cols))
        return Packing(tuple(rows), tuple(cols))

    def sides(self, device: torch.device) -> tuple[Side, Side]:
        """The queries and the keys; all layers of a micro-batch have the same."""
        return _on_device(self, device)


@lru_cache(maxsize=512)  # batches of some micro-batches: they take memory of the device
def _on_device(batch: Batch, device: torch.device) -> tuple[Side, Side]:
    rows, cols = _picked(batch.rows), _picked(batch.cols)
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

    def calls(self, *, packed: bool) -> tuple[KernelCall, ...]:
        """Every tile once. Args: packed: by a kernel that packs; else a call each."""
        return self._packed if packed else self._single

    @cached_property
    def _single(self) -> tuple[KernelCall, ...]:
        return tuple(_call([_Unit.of(tile)], causal=tile.causal) for tile in self.tiles)

    @cached_property
    def _packed(self) -> tuple[KernelCall, ...]:
        found: list[KernelCall] = []
        keys = max((_extent(_range(tile.kv))[1] for tile in self.tiles), default=0)
        by_kind: dict[tuple[bool, bool], list[Tile]] = {}
        for tile in self.tiles:
            by_kind.setdefault((tile.causal, tile.reverse), []).append(tile)
        for (causal, reverse), tiles in by_kind.items():
            units = _units(tiles if causal else _larger(tiles))
            # Reversed tiles are copied anyway.
            large = [u for u in units if u.area * self._heads >= _LARGE and not reverse]
            small = [u for u in units if u.area * self._heads < _LARGE or reverse]
            groups = (*([unit] for unit in large), *_apart(small, 2 * keys))
            found += (_call(group, causal=causal) for group in groups)
        # What may be all rows comes first: there is nothing yet to merge it with.
        return tuple(sorted(found, key=_row_count, reverse=True))


@dataclass
class _Unit:
    """Tiles of one kind that follow each other in rows and in columns.

    Attributes: tile: the only one, if it is no run of documents.
    """

    rows: list[range]
    cols: list[range]
    area: int
    tile: Tile | None

    @classmethod
    def of(cls, tile: Tile) -> "_Unit":
        rows, cols = _range(tile.q), _range(tile.kv)
        if tile.document_bounds:
            parts = [slice(a, b) for a, b in pairwise(tile.document_bounds)]
            return cls([rows[x] for x in parts], [cols[x] for x in parts], tile.area, None)
        if tile.reverse:
            rows, cols = rows[::-1], cols[::-1]
        return cls([rows], [cols], tile.area, tile)

    def follows(self, other: "_Unit") -> bool:
        return _follows(other.rows[-1], self.rows[0]) and _follows(other.cols[-1], self.cols[0])


def _larger(tiles: Iterable[Tile]) -> list[Tile]:
    """Full tiles, those as one that have the same rows and columns that follow each other, or the
    same columns and rows that do.
    """
    found: list[Tile] = []
    for tile in sorted(tiles, key=lambda tile: (_ends(tile.q), _ends(tile.kv))):
        if found and found[-1].q == tile.q and _follows(_range(found[-1].kv), _range(tile.kv)):
            kv = slice(found[-1].kv.start, tile.kv.stop)
            found[-1] = replace(tile, kv=kv, cols=found[-1].cols + tile.cols)
        else:
            found.append(tile)
    wide, found = found, []
    for tile in sorted(wide, key=lambda tile: (_ends(tile.kv), _ends(tile.q))):
        if found and found[-1].kv == tile.kv and _follows(_range(found[-1].q), _range(tile.q)):
            q = slice(found[-1].q.start, tile.q.stop)
            found[-1] = replace(tile, q=q, rows=found[-1].rows + tile.rows)
        else:
            found.append(tile)
    return found


def _ends(part: slice) -> tuple[int, int, int]:
    return part.start, part.stop, part.step or 1


def _units(tiles: Iterable[Tile]) -> list[_Unit]:
    units: list[_Unit] = []
    for unit in sorted(map(_Unit.of, tiles), key=lambda unit: _extent(unit.rows[0])):
        if units and unit.follows(units[-1]):
            last = units[-1]
            last.rows += unit.rows
            last.cols += unit.cols
            last.area, last.tile = last.area + unit.area, None
        else:
            units.append(unit)
    return units


def _apart(units: Iterable[_Unit], most: int) -> Iterator[list[_Unit]]:
    """As few groups as can be, of units that have no row in common.

    Args: units: ascending in rows. most: keys that a group may have, repeated ones counted again.
    """
    groups: list[tuple[list[_Unit], int, int]] = []
    for unit in units:
        start, _ = _extent(unit.rows[0])
        stop, cols = max(_extent(x)[1] for x in unit.rows), sum(map(len, unit.cols))
        for index, (group, reached, taken) in enumerate(groups):
            if start >= reached and taken + cols <= most:
                groups[index] = [*group, unit], stop, taken + cols
                break
        else:
            groups.append(([unit], stop, cols))
    yield from (group for group, *_ in groups)


def _call(units: Sequence[_Unit], *, causal: bool) -> KernelCall:
    if len(units) == 1 and units[0].tile is not None:
        return units[0].tile
    rows = (x for unit in units for x in unit.rows)
    cols = (x for unit in units for x in unit.cols)
    return Batch(tuple(rows), tuple(cols), causal)


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


def _picked(ranges: Ranges) -> _Picked:
    if all(_follows(a, b) for a, b in pairwise(ranges)) and ranges[0].step == 1:
        return _Picked(slice(ranges[0].start, ranges[-1].stop), ())
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
    if isinstance(side.taken, slice):
        return Side(side.taken, (side.taken,))
    taken = next(on_device)
    if not side.rounds:
        return Side(taken, (RowIndex(taken),))
    return Side(taken, tuple(RowIndex(next(on_device), next(on_device)) for _ in side.rounds))


@dataclass(frozen=True)
class Part:
    """Some rows of a block of queries, and all that is computed for them.

    Attributes: rows: of the block. work: with rows that count from rows.start.
    """

    rows: slice
    work: Batches


@lru_cache(maxsize=256)
def parts(tiles: tuple[Tile, ...], rows: int, heads: int, packed: bool) -> tuple[Part, ...]:
    """Divides a block of `rows` queries where no kernel call has rows on both sides.

    Then a part needs no buffer to merge into unless it has several calls. Rows that see nothing
    are a part without tiles.

    Args: heads, packed: as in `Batches`.
    """
    return tuple(_parts(tiles, rows, heads, packed))


def _parts(tiles: tuple[Tile, ...], rows: int, heads: int, packed: bool) -> Iterator[Part]:
    cuts = _merged(map(_rows_of, Batches(tiles, heads).calls(packed=packed)))
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
