"""Several tiles as the sequences of one kernel call: its rows, and where its results go."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self, overload

import numpy as np
import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.kernel import Packing
from megatron_cp_plugin.core.partial import RowIndex, SomeRows
from megatron_cp_plugin.core.ranges import Flags, Numbers, expanded, offsets


class Ranges(Sequence[range]):
    """Elements of a block, as ranges that come one after another.

    Attributes: first, step, lengths: int64 [n]. A step may be negative; no length is 0.
    """

    def __init__(self, first: Numbers, step: Numbers, lengths: Numbers) -> None:
        self.first, self.step, self.lengths = first, step, lengths

    @classmethod
    def of(cls, places: Numbers, lengths: Numbers, reverse: Flags) -> Self:
        """Args: places: start, stop and step of slices. reverse: which of them are reversed."""
        first, _, step = places
        first = np.where(reverse, first + step * (lengths - 1), first)
        return cls(first, np.where(reverse, -step, step), lengths)

    def __len__(self) -> int:
        return len(self.first)

    @overload
    def __getitem__(self, index: int) -> range: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[range, ...]: ...
    def __getitem__(self, index: int | slice) -> range | tuple[range, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        first, step, count = (int(x[index]) for x in (self.first, self.step, self.lengths))
        return range(first, first + step * count, step)

    @cached_property
    def extents(self) -> Numbers:
        """[2,n]: the first of each range, and the one after the last, in ascending order."""
        last = self.first + self.step * (self.lengths - 1)
        return np.stack((np.minimum(self.first, last), np.maximum(self.first, last) + 1))

    @property
    def extent(self) -> tuple[int, int]:
        """The first of all, and the one after the last."""
        return int(self.extents[0].min()), int(self.extents[1].max())

    @property
    def packed(self) -> Self:
        """Where they are when they are packed, one behind the other."""
        return type(self)(offsets(self.lengths), np.ones_like(self.step), self.lengths)

    def some(self, wanted: Sequence[int]) -> Self:
        """Some of them, by their numbers."""
        return type(self)(self.first[wanted], self.step[wanted], self.lengths[wanted])

    @property
    def elements(self) -> Tensor:
        """Of all ranges, one after the other. By NumPy: torch's threads cost more."""
        if (self.step == 1).all():
            line = np.repeat(self.first - offsets(self.lengths), self.lengths)
            line += np.arange(len(line))
            return torch.from_numpy(line)
        whose, within = expanded(self.lengths)
        return torch.from_numpy(self.first[whose] + within * self.step[whose])


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
    return ranges.extents - ranges.first.min() if apart else ranges.packed.extents


def _on_host(ranges: Ranges, *, apart: bool, given: bool = True) -> _OnHost:
    """Args: given: there are results for them."""
    start, stop = ranges.extents
    if (ranges.step == 1).all() and (stop[:-1] == start[1:]).all():
        return _OnHost(slice(*ranges.extent), None if given else ())
    if apart:  # what is between them is taken too
        whole = slice(*ranges.extent)
        if not given:
            return _OnHost(whole, ())
        numbers = ranges.elements
        return _OnHost(whole, ((numbers, numbers - whole.start),))
    taken = ranges.elements
    if not given:
        return _OnHost(taken, ())
    rounds, packed = _rounds(ranges), ranges.packed
    if len(rounds) == 1:
        return _OnHost(taken)
    pairs = ((ranges.some(numbers).elements, packed.some(numbers).elements) for numbers in rounds)
    return _OnHost(taken, tuple(pairs))


def _rounds(ranges: Ranges) -> list[list[int]]:
    """Numbers of the ranges, in groups that have nothing in common."""
    start, stop = ranges.extents
    order = np.lexsort((stop, start))
    if (stop[order][:-1] <= start[order][1:]).all():
        return [order.tolist()]
    groups: list[list[int]] = []
    ends: list[int] = []
    for number, begin, end in zip(
        *(x.tolist() for x in (order, start[order], stop[order])), strict=True
    ):
        for index, reached in enumerate(ends):
            if begin >= reached:
                groups[index].append(number)
                ends[index] = end
                break
        else:
            groups.append([number])
            ends.append(end)
    return groups


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
