"""Several tiles as the sequences of one kernel call: its rows, and where its results go."""

from collections.abc import Iterator
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
        sides = (_places(x, apart=self.apart) for x in (self.rows, self.cols))
        return Packing(np.stack(tuple(sides)))

    def sides(self, device: torch.device) -> tuple[BatchRows, BatchRows]:
        """The queries and the keys; all layers of a micro-batch have the same."""
        return _on_device(self, device)


@kept_on_device(maxsize=512)  # batches of some micro-batches: they take memory of the device
def _on_device(batch: Batch, device: torch.device) -> tuple[BatchRows, BatchRows]:
    rows = _on_host(batch.rows, apart=batch.apart)
    cols = _on_host(batch.cols, apart=batch.apart, given=not batch.forward)
    indices = (*_indices(rows), *_indices(cols))
    parts: Iterator[Tensor] = iter(())
    if indices:
        parts = iter(uploaded(torch.cat(indices), device).split([len(x) for x in indices]))
    return _placed(rows, parts), _placed(cols, parts)


class _OnHost(NamedTuple):
    """`BatchRows` on the host.

    Attributes: given: of each round rows of the block, and of the results; None: there is one, of
        all rows as they are taken.
    """

    taken: slice | Tensor
    given: tuple[tuple[Tensor, Tensor], ...] | None = None


def _places(ranges: Ranges, *, apart: bool) -> Numbers:
    """[2,n]: where the sequences start and stop in what a kernel is given."""
    return ranges.extents - ranges.start.min() if apart else ranges.packed.extents


def _on_host(ranges: Ranges, *, apart: bool, given: bool = True) -> _OnHost:
    """Args: given: there are results for them."""
    start, stop = ranges.extents
    if ranges.plain and (stop[:-1] == start[1:]).all():
        return _OnHost(slice(*ranges.extent), None if given else ())
    if apart:  # what is between them is taken too
        whole = slice(*ranges.extent)
        if not given:
            return _OnHost(whole, ())
        numbers = _elements(ranges)
        return _OnHost(whole, ((numbers, numbers - whole.start),))
    taken = _elements(ranges)
    if not given:
        return _OnHost(taken, ())
    order, packed = np.lexsort((stop, start)), ranges.packed
    rounds = first_fit(start[None, order], stop[None, order])
    if len(rounds) == 1:
        return _OnHost(taken)
    wanted = (order[numbers] for numbers in rounds)
    return _OnHost(
        taken, tuple((_elements(ranges.some(x)), _elements(packed.some(x))) for x in wanted)
    )


def _elements(ranges: Ranges) -> Tensor:
    """All of them. By NumPy: torch's threads cost more."""
    return torch.from_numpy(ranges.elements)


def _indices(rows: _OnHost) -> Iterator[Tensor]:
    if isinstance(rows.taken, Tensor):
        yield rows.taken
    for pair in rows.given or ():
        yield from pair


def _placed(rows: _OnHost, on_device: Iterator[Tensor]) -> BatchRows:
    """With tensors on a device, in the order of `_indices`."""
    taken = rows.taken if isinstance(rows.taken, slice) else next(on_device)
    if rows.given is None:
        return BatchRows(taken, (taken if isinstance(taken, slice) else RowIndex(taken),))
    return BatchRows(taken, tuple(RowIndex(next(on_device), next(on_device)) for _ in rows.given))
