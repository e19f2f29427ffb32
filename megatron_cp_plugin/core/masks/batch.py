"""Several tiles as the sequences of one kernel call: its rows, and where its results go."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.kernel import Packing
from megatron_cp_plugin.core.partial import RowIndex, SomeRows
from megatron_cp_plugin.core.ranges import Numbers, Ranges, first_fit


class BatchRows(NamedTuple):
    """Where the queries, or the keys, of a batch are in a block.

    Attributes:
        taken: those of all sequences, one after the other; as in `partial.rows_at`.
        given: to which rows results go, in as many rounds as a row is taken; () if there are none.
    """

    taken: slice | Tensor
    given: tuple[SomeRows, ...]

    @property
    def numbers(self) -> Iterator[Tensor]:
        """All numbers of rows."""
        indices = (rows for rows in self.given if isinstance(rows, RowIndex))
        for x in (self.taken, *(x for rows in indices for x in rows)):
            if isinstance(x, Tensor):
                yield x

    def placed(self, placed: Mapping[int, Tensor]) -> "BatchRows":
        """The same with numbers on a device. Args: placed: by the `id` of those on the host."""
        taken = self.taken if isinstance(self.taken, slice) else placed[id(self.taken)]
        given = (
            RowIndex(placed[id(rows.to)], None if rows.of is None else placed[id(rows.of)])
            if isinstance(rows, RowIndex)
            else rows
            for rows in self.given
        )
        return BatchRows(taken, tuple(given))


@dataclass(frozen=True, eq=False)
class Batch:
    """Tiles of one kind as the sequences of one call. No row of queries is in two of them.

    Attributes:
        rows, cols: of each sequence, in the order in which the kernel takes them.
        apart: they ascend, and what is between them is left out.
        forward: nothing is given to keys; so if `apart` they may be in any order, and repeated.
        window: of each sequence, as of `Tile`.
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
        sides = (_places(x, apart=self.apart) for x in (self.rows, self.cols))
        return Packing(np.stack(tuple(sides)))

    def sides(self, device: torch.device) -> tuple[BatchRows, BatchRows]:
        """The queries and the keys; all layers of a micro-batch have the same."""
        return _on_device(self, device)


@kept_on_device(maxsize=512)  # batches of some micro-batches: they take memory of the device
def _on_device(batch: Batch, device: torch.device) -> tuple[BatchRows, BatchRows]:
    rows = _rows(batch.rows, apart=batch.apart)
    cols = _rows(batch.cols, apart=batch.apart, given=not batch.forward)
    numbers = {id(x): x for side in (rows, cols) for x in side.numbers}
    placed: dict[int, Tensor] = {}
    if numbers:
        line = uploaded(torch.cat([*numbers.values()]), device)
        parts = line.split([len(x) for x in numbers.values()])
        placed = dict(zip(numbers, parts, strict=True))
    return rows.placed(placed), cols.placed(placed)


def _places(ranges: Ranges, *, apart: bool) -> Numbers:
    """[2,n]: where the sequences start and stop in what a kernel is given."""
    return ranges.extents - ranges.start.min() if apart else ranges.packed.extents


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
        return BatchRows(whole, (RowIndex(elements, elements - whole.start),))
    if not given:
        return BatchRows(elements, ())
    order, packed = np.lexsort((stop, start)), ranges.packed
    rounds = first_fit(start[None, order], stop[None, order])
    if len(rounds) == 1:
        return BatchRows(elements, (RowIndex(elements),))
    pairs = ((x.some(order[some]).elements for x in (ranges, packed)) for some in rounds)
    return BatchRows(elements, tuple(RowIndex(*map(torch.from_numpy, pair)) for pair in pairs))
