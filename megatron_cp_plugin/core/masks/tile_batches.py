"""Groups tiles into kernel calls: with documents there may be hundreds of tiles.

A kernel that packs computes any sequences of queries and keys, one after the other, in one call.
Tiles that follow each other in rows and in columns form such sequences in place; for some kernels
they may leave out rows or columns between them. Other small tiles are copied together for one call,
because a call for each would cost more than the copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.kernel import Packing
from megatron_cp_plugin.core.partial import RowIndex, SomeRows
from megatron_cp_plugin.core.ranges import Numbers, Ranges, expanded, first_fit, runs, united
from megatron_cp_plugin.core.tiles import NO_TILES, Tile, TileTable


class BatchRows(NamedTuple):
    """Places of a batch's queries, or keys, in a block.

    Attributes:
        taken: rows of all sequences, one after the other; as in `partial.rows_at`.
        given: rows to which results are added, in as many rounds as a row is taken; (): no results.
    """

    taken: slice | Tensor
    given: tuple[SomeRows, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """Tiles of one kind as the sequences of one call. No row of queries is in two sequences.

    Attributes:
        rows, cols: rows and columns of each sequence, in the order in which the kernel takes them.
        apart: rows and columns ascend, and the ones between sequences are left out.
        forward: keys get no results; so if `apart` keys may be in any order, and repeated.
        window: window of each sequence, as in `Tile`.
    """

    rows: Ranges
    cols: Ranges
    causal: bool
    apart: bool = False
    forward: bool = False
    window: int = 0

    @cached_property
    def packing(self) -> Packing:
        """The sequences."""
        sides = self.rows, self.cols
        if self.apart:  # with what is between sequences
            return Packing(np.stack([x.extents - x.start.min() for x in sides]))
        return Packing(np.stack([x.packed.extents for x in sides]))

    @kept_on_device(maxsize=512)  # batches of some micro-batches: they take memory of the device
    def sides(self, device: torch.device) -> tuple[BatchRows, BatchRows]:
        """Rows of queries and of keys; the same for all layers of a micro-batch."""
        rows = _rows(self.rows, apart=self.apart)
        cols = _rows(self.cols, apart=self.apart, given=not self.forward)
        leaves, structure = tree_flatten((rows, cols))
        numbers = {id(x): x for x in leaves if isinstance(x, Tensor)}
        if not numbers:
            return rows, cols
        line = uploaded(torch.cat([*numbers.values()]), device)
        parts = line.split([len(x) for x in numbers.values()])
        placed = dict(zip(numbers, parts, strict=True))
        sides: tuple[BatchRows, BatchRows]
        sides = tree_unflatten([placed.get(id(x), x) for x in leaves], structure)
        return sides


def _rows(ranges: Ranges, *, apart: bool, given: bool = True) -> BatchRows:
    """On the host. Args: given: there are results for them."""
    start, stop = ranges.extents
    whole = slice(*ranges.extent)
    if ranges.plain and (stop[:-1] == start[1:]).all():
        return BatchRows(whole, (whole,) if given else ())
    if apart and not given:
        return BatchRows(whole, ())
    # By NumPy: torch's threads cost more.
    elements = torch.from_numpy(ranges.elements)
    if apart:  # what is between them is taken too
        return BatchRows(whole, (RowIndex(elements, elements - whole.start, ranges.extents),))
    if not given:
        return BatchRows(elements, ())
    order, packed = np.lexsort((stop, start)), ranges.packed
    rounds = first_fit(start[None, order], stop[None, order])
    if len(rounds) == 1:
        return BatchRows(elements, (RowIndex(elements, None, ranges.extents[:, order]),))
    pairs = ((x.some(order[some]).elements for x in (ranges, packed)) for some in rounds)
    found = [RowIndex(torch.from_numpy(to), torch.from_numpy(of)) for to, of in pairs]
    return BatchRows(elements, tuple(found))


# Number of (query, key) pairs, over all heads, that keep a GPU busy for longer than the host needs
# to launch the next call: about 70 us forward with head dim 128.
LARGE = 2**26
# Number of queries, over all heads, that are copied for one call: the least that is worth a call,
# and the most, which bounds memory. Between these bounds: half of all queries.
_COPIED = 2**13, 2**17
# Largest ratio of all rows to computed rows where a call leaves rows out: these take memory, though
# no time.
_SPARSE = 4

KernelCall = Tile | Batch


@lru_cache(maxsize=256)  # all layers ask for the same
def packed_calls(
    tiles: TileTable, heads: int, gaps: bool = False, forward: bool = False
) -> tuple[KernelCall, ...]:
    """Calls of a kernel that packs, which compute every tile once.

    Args:
        heads: query heads that are computed at a time.
        gaps: the kernel takes sequences with other rows between them.
        forward: results are for queries alone.
    """
    if len(tiles) < 2:
        return tiles.each
    found: list[KernelCall] = []
    rows, keys = (int(x.stop.max(initial=0)) for x in (tiles.q, tiles.kv))
    least, most = (queries // heads for queries in _COPIED)
    most_rows = min(max(rows // 2, least), most)
    for units in _units_of(tiles):
        rest = np.ones(len(units), np.bool_)
        for group in _in_place(units, forward, most_rows) if gaps else ():
            found.append(_call(units.tiles, units.numbers(group), apart=True, forward=forward))
            rest[group] = False
        large = units.area * heads >= LARGE
        alone = np.flatnonzero(rest & large).tolist()
        found += (_call(units.tiles, units.numbers([unit])) for unit in alone)
        small = np.flatnonzero(rest & ~large)
        spans = units.start[None, small], units.stop[None, small]
        sizes = np.stack((units.rows, units.cols))[:, small]  # repeated ones count again
        for group in first_fit(*spans, sizes, (most_rows, 2 * keys)) if len(small) else ():
            found.append(_call(units.tiles, units.numbers(small[group]), forward=forward))
    # What may be all rows comes first: there is nothing yet to merge it with.
    counted = [(one.rows if isinstance(one, Tile) else one.rows.total, one) for one in found]
    return tuple([one for _, one in sorted(counted, key=itemgetter(0), reverse=True)])


@lru_cache(maxsize=256)  # the same in both passes
def _units_of(tiles: TileTable) -> tuple["_Units", ...]:
    """Units of tiles of each kind."""
    # A document of one token goes with the other documents, which are causal.
    of_one = (tiles.rows == 1) & (tiles.cols == 1) & ~tiles.reverse
    tiles = replace(tiles, causal=tiles.causal | (of_one & tiles.causal.any()))
    kinds = 4 * tiles.window + 2 * tiles.causal + tiles.reverse
    of_kinds = {kind: tiles.some(kinds == kind) for kind in dict.fromkeys(kinds.tolist())}
    return tuple([_Units(some if kind else _larger(some)) for kind, some in of_kinds.items()])


class _Units:
    """Tiles of one kind, in units: tiles that follow each other in rows and in columns are one
    unit.

    Attributes:
        tiles: in that order. Of each unit, int64 [n]: start, stop: of all rows; k_start, k_stop: of
            all columns; rows, cols, area: of all its tiles.
        plain: all tiles are slices without steps and not reversed.
    """

    def __init__(self, tiles: TileTable) -> None:
        self.tiles = tiles = tiles.some(np.lexsort((tiles.kv.start, tiles.q.start)))
        plain = (tiles.q.step == 1) & (tiles.kv.step == 1) & ~tiles.reverse
        follows = plain[1:] & plain[:-1]
        for x in (tiles.q, tiles.kv):
            follows &= x.stop[:-1] == x.start[1:]
        self._first, self._last = runs(~follows, len(plain))
        self.start, self.k_start = tiles.q.start[self._first], tiles.kv.start[self._first]
        self.stop, self.k_stop = tiles.q.stop[self._last], tiles.kv.stop[self._last]
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
    """Full tiles, after joining tiles with the same rows and successive columns, or with the same
    columns and successive rows.
    """
    q, kv = _widened(tiles.q, tiles.kv)
    kv, q = _widened(kv, q)
    no = np.zeros(len(q), np.bool_)
    return TileTable(q, kv, no, no, np.zeros(len(q), np.int64))


def _widened(same: Ranges, wide: Ranges) -> tuple[Ranges, Ranges]:
    """Joins tiles that have one side in common, and successive ranges on the other side."""
    order = np.lexsort((wide.start, same.stop, same.start))
    same, wide = same.some(order), wide.some(order)
    follows = (same.table[:, 1:] == same.table[:, :-1]).all(0) & (wide.stop[:-1] == wide.start[1:])
    follows &= (wide.step[1:] == 1) & (wide.step[:-1] == 1)
    first, last = runs(~follows, len(same))
    table = np.stack((wide.start[first], wide.stop[last], wide.step[first]))
    return same.some(first), Ranges(table)


def _in_place(units: _Units, forward: bool, copied: int) -> list[list[int]]:
    """Groups of units that a kernel takes in place, leaving out rows and columns between them.

    Args: copied: most rows that may be copied for one call.
    """
    if not units.plain:
        return []
    if forward:
        groups = first_fit(units.start[None], units.stop[None])
        return [group for group in groups if len(group) > 1 and _fits(units, group, forward)]
    # Units that follow each other in rows and in columns.
    begins, ends = (units.start, units.k_start), (units.stop, units.k_stop)
    groups = first_fit(np.stack(begins), np.stack(ends))
    # Each call makes gradients of all rows and all keys, which must be added up.
    few = len(groups) == 1 or (len(groups) == 2 and units.rows.sum() > copied)
    fit = few and all(len(group) > 1 and _fits(units, group, forward) for group in groups)
    return groups if fit else []


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
    """One call of some tiles. Args: numbers: of the tiles, all of one kind."""
    some = tiles.some(numbers)
    if len(numbers) == 1:
        (tile,) = some
        return tile
    rows, cols = (x.backward if some.reverse[0] else x for x in (some.q, some.kv))
    return Batch(rows, cols, bool(some.causal[0]), apart, forward, int(some.window[0]))


@dataclass(frozen=True)
class Part:
    """Some rows of a block of queries, and all tiles of these rows.

    Attributes: tiles: their rows count from rows.start.
    """

    rows: slice
    tiles: TileTable


@lru_cache(maxsize=64)
def parts(tiles: TileTable, rows: int, heads: int, packed: bool, gaps: bool) -> tuple[Part, ...]:
    """Divides a block of `rows` queries at rows that no kernel call crosses.

    Then a part needs no buffer to merge into unless it has several calls. Rows that see nothing
    are a part without tiles.

    Args: packed: the kernel packs, see `packed_calls`; otherwise each tile is a call.
    """
    calls = packed_calls(tiles, heads, gaps) if packed else tiles.each
    reached, found = 0, list[Part]()
    edges = [(x.q.start, x.q.stop) if isinstance(x, Tile) else x.rows.extent for x in calls]
    extents = np.array(edges, np.int64).reshape(-1, 2).T
    for start, stop in (*united(extents, -1), (rows, rows)):  # of calls that share rows
        if start > reached:
            found.append(Part(slice(reached, start), NO_TILES))
        if start < stop:
            own = tiles.some((start <= tiles.q.start) & (tiles.q.start < stop))
            found.append(Part(slice(start, stop), own.moved(-start, 0)))
        reached = stop
    return tuple(found)
