"""Merges partial attention outputs and sums partial gradients without losing precision.

B batch, S local tokens, H query heads, D head dim, E that of values. A partial is attention over a
part of the keys: out [B,S,H,E] and lse [B,H,S], the natural log of its softmax denominator.

Source: AttnFix (Attention2D, Algorithm 2); the same as rescale (DISTFLASHATTN, Algorithm 2) and GAO
(BurstAttention, Algorithm 1, lines 13-16). Differs: rows that see no key are allowed.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp_plugin.core.ranges import Numbers


class RowIndex(NamedTuple):
    """Some rows of a block by number, if they are not a slice.

    Attributes:
        to: [n] int32, rows of the block; none twice.
        of: [n] int32, rows of the partial that is merged or added; None: all, in their order.
        edges: [2,n], ascending, where ranges of the block start and stop that have all these rows,
            on the host; None: not known.
    """

    to: Tensor
    of: Tensor | None = None
    edges: Numbers | None = None


SomeRows = slice | RowIndex
Tensors = tuple[Tensor, ...]
Partial = tuple[SomeRows, Tensors]
_ADJACENT = {None, 1}  # steps of slices
# Rows, and their parts of the partials that have them.
Piece = tuple[SomeRows, list[Tensors]]


_fused: dict[str, Callable[[], Any]] = {}


def register_fused(device_type: str, load: Callable[[], Any]) -> None:
    """Registers fused operations in float32 for a type of device.

    Args: load: returns, at each use, an object with fused versions of functions of `core`, under
        the same names. They take all dtypes but float64; lse and statistics are float32.
    """
    _fused[device_type] = load


def fused_for(x: Tensor) -> Any:
    """Fused operations for tensors like x; None: use PyTorch's operations."""
    load = None if x.dtype == torch.float64 else _fused.get(x.device.type)
    return None if load is None else load()


@cache  # in every pass of every layer
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_into(
    out: Tensor, lse: Tensor, a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor
) -> None:
    """(out, lse) = merge of the partials (a, a_lse) and (b, b_lse); out, lse may be a, a_lse.

    Args: out, a, b: [B,S,H,D], any floating dtype; lse, a_lse, b_lse: [B,H,S], wide dtype.
    """
    fused = fused_for(out)
    if fused is not None:
        fused.merge_into(out, lse, a, a_lse, b, b_lse)
        return
    merged = torch.logaddexp(a_lse, b_lse)
    out.copy_(a * _weight(a_lse, merged) + b * _weight(b_lse, merged))
    lse.copy_(merged)


def merge_all_into(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> None:
    """(out, lse) = merge of P partials, in one pass.

    Args:
        out: [B,S,H,D], outs: [P,B,S,H,D], any floating dtypes.
        lse: [B,H,S], lses: [P,B,H,S], of a wide dtype. All may be strided.
    """
    fused = fused_for(out)
    if fused is not None:
        fused.merge_all_into(out, lse, outs, lses)
        return
    merged = torch.logsumexp(lses, 0)
    total = outs[0] * _weight(lses[0], merged)
    for part, part_lse in zip(outs[1:], lses[1:], strict=True):
        total.addcmul_(part.to(total.dtype), _weight(part_lse, merged))
    out.copy_(total)
    lse.copy_(merged)


def _weight(lse: Tensor, merged: Tensor) -> Tensor:
    """exp(lse - merged) [B,H,S] as a factor of out [B,S,H,1]; 0 for rows without any key."""
    factor = torch.where(merged == -torch.inf, 0.0, torch.exp(lse - merged))
    return factor.transpose(1, 2).unsqueeze(-1)


def _sum_into(outs: Sequence[Tensor], *terms: Sequence[Tensor]) -> None:
    """Each of one or two outs [B,S,heads,D] = the sum of its terms, in float32 (float64 for
    float64). Args: terms: three at most, each for all outs; the first may be the outs.
    """
    fused = fused_for(outs[0])
    if fused is not None:
        fused.sum_into(outs, *terms)
        return
    for out, a, *others in zip(outs, *terms, strict=True):
        wide = accumulation_dtype(a.dtype) if others else a.dtype
        out.copy_(sum([b.to(wide) for b in others], start=a.to(wide)))


def _add_rows(totals: Sequence[Tensor], rows: SomeRows, *terms: Sequence[Tensor]) -> None:
    """Adds terms to some rows of totals [B,S,heads,D], in place: two at most, one for numbers."""
    if not isinstance(rows, RowIndex):
        whole = terms[0][0].shape[1] == totals[0].shape[1]
        parts = totals if whole else [rows_at(x, rows) for x in totals]
        _sum_into(parts, parts, *terms)
        return
    (gradients,) = terms
    fused = fused_for(totals[0])
    for total, gradient in zip(totals, gradients, strict=True):
        if fused is not None:
            fused.add_rows_into(total, rows.to, gradient, rows.of)
            continue
        added = gradient if rows.of is None else gradient.index_select(1, rows.of)
        wide = accumulation_dtype(total.dtype)
        sums = total.index_select(1, rows.to).to(wide) + added.to(wide)
        total[:, rows.to] = sums.to(total.dtype)


def _merge_rows(out: Tensor, lse: Tensor, rows: SomeRows, b: Tensor, b_lse: Tensor) -> None:
    """Merges a partial of some rows into out [B,S,H,D] and lse [B,H,S], in place."""
    if not isinstance(rows, RowIndex):
        if b.shape[1] < out.shape[1]:
            out, lse = out[:, rows], lse[:, :, rows]
        merge_into(out, lse, out, lse, b, b_lse)
        return
    fused = fused_for(out)
    if fused is not None:
        fused.merge_rows_into(out, lse, rows.to, b, b_lse, rows.of)
        return
    if rows.of is not None:
        b, b_lse = b.index_select(1, rows.of), b_lse.index_select(2, rows.of)
    part, part_lse = out.index_select(1, rows.to), lse.index_select(2, rows.to)
    merge_into(part, part_lse, part, part_lse, b, b_lse)
    out[:, rows.to], lse[:, :, rows.to] = part, part_lse


def rows_at(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Some rows of [B,S,heads,D]: a view, x itself for all rows, a copy for rows [n] int32."""
    if isinstance(rows, slice):
        return x if rows == slice(0, x.shape[1]) else x[:, rows]
    return taken(x, 1, rows)


def taken(x: Tensor, dim: int, rows: Tensor) -> Tensor:
    """A copy of some rows along a dimension, in their order. Args: rows: [n] int32."""
    # Fused operations compute in float32.
    exact = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    fused = fused_for(x) if exact and (dim, x.dim()) == (1, 4) else None
    return x.index_select(dim, rows) if fused is None else fused.rows_at(x, rows)


def beside_each_other(tensors: Sequence[Tensor]) -> Tensor:
    """[B,S,heads,D1], [B,S,heads,D2] ... -> [B,S,heads,D1+D2+...], contiguous."""
    first = tensors[0]
    if len(tensors) == 1 and first.is_contiguous():
        return first
    fused = fused_for(first)
    if fused is None:
        return torch.cat(tuple(tensors), -1).contiguous()
    widths = [x.shape[3] for x in tensors]
    whole = first.new_empty((*first.shape[:3], sum(widths)))
    for part, x in zip(whole.split(widths, -1), tensors, strict=True):
        fused.sum_into((part,), (x,))
    return whole


def _are_apart(a: SomeRows, b: SomeRows) -> bool:
    """Whether two partials are known to share no row."""
    edges = [x.edges if isinstance(x, RowIndex) else ((x.start,), (x.stop,)) for x in (a, b)]
    if edges[0] is None or edges[1] is None:
        return False
    (start, stop), (first, last) = np.asarray(edges[0]), edges[1]
    return not (start.searchsorted(last) > stop.searchsorted(first, "right")).any()


class _Partials:
    """Partials that wait to be added, in the order of arrival, at most two for each row. A row that
    is then written once can be written in the final dtype.

    Attributes:
        empty: there is no partial yet.
        borrowed: memory of waiting partials may change after the next `add` or `settle`.
    """

    _waiting: list[Partial]
    _end = 0  # no partial that waits has rows from here on
    _numbered = False  # rows of one that waits are not adjacent
    empty = True
    borrowed = False

    @property
    def keeps(self) -> bool:
        """Whether the next partial would be kept as it is."""
        return self.empty

    def _meets(self, rows: SomeRows) -> int:
        """The largest number of waiting partials that share one of these rows; 2: two or more, or
        one if rows are not adjacent, or unknown.
        """
        if self._numbered or isinstance(rows, RowIndex):
            apart = [_are_apart(rows, own) for own, _ in self._waiting]
            return 0 if all(apart) else 2
        if rows.start >= self._end:
            return 0
        slices = [own for own, _ in self._waiting if isinstance(own, slice)]
        both = [(max(own.start, rows.start), min(own.stop, rows.stop)) for own in slices]
        shared = sorted([bounds for bounds in both if bounds[0] < bounds[1]])
        apart = [stop <= start for (_, stop), (start, _) in pairwise(shared)]
        return min(len(shared), 1) if all(apart) else 2

    def _taken(self) -> list[Partial]:
        """Takes all partials that wait."""
        taken, self._waiting, self._numbered = self._waiting, [], False
        return taken

    def _pieces(self) -> list[Piece]:
        """Takes the waiting partials in pieces: rows, with the parts of all that have them."""
        found, adjacent = list[Piece](), list[tuple[slice, Tensors]]()
        for rows, tensors in self._taken():
            if isinstance(rows, slice) and rows.step in _ADJACENT:
                adjacent.append((rows, tensors))
            else:
                found.append((rows, [tensors]))
        extents = pairwise(sorted([(rows.start, rows.stop) for rows, _ in adjacent]))
        apart = [stop <= start for (_, stop), (start, _) in extents]
        if all(apart):
            return [*found, *[(rows, [tensors]) for rows, tensors in adjacent]]
        bounds = sorted({bound for rows, _ in adjacent for bound in (rows.start, rows.stop)})
        for start, stop in pairwise(bounds):
            parts = [
                part_of(tensors, slice(start - rows.start, stop - rows.start))
                for rows, tensors in adjacent
                if rows.start <= start and stop <= rows.stop
            ]
            if parts:
                found.append((slice(start, stop), parts))
        return found


class Accumulator(_Partials):
    """Running merge of the partials of one block of queries.

    A partial is merged when one of the same rows comes, or when the result is asked for: so the
    last merge writes the output in its final dtype, a single partial is the output as it is, and
    nothing is copied to float32 only to be read again. Rows without any partial end as out 0, lse
    -inf.
    The first partial may be written to.
    """

    def __init__(
        self, q: Tensor, value_dim: int, place: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Args:
        q: [B,S,H,D]. value_dim: E of the output to come, which is else like q.
        place: where the result will be, out [B,S,H,E] in q's dtype and lse [B,H,S], which may be
            strided; None: in memory of its own.
        """
        self._waiting = []
        self._like = q
        self._place = place
        self._shape = (*q.shape[:3], value_dim)
        self._wide = accumulation_dtype(q.dtype)
        self._total: tuple[Tensor, Tensor] | None = None
        self._owned = False  # whether _total is a wide buffer of ours, free to be written

    def place_of_first(self, rows: int) -> tuple[Tensor, Tensor] | None:
        """Where the result will be, if the first partial, of `rows` rows, can be there."""
        return self._place if self.empty and rows == self._like.shape[1] else None

    def add(self, rows: SomeRows, out: Tensor, lse: Tensor) -> None:
        """Merges a partial of some rows: out [B,rows,H,E], lse [B,H,rows]."""
        first, self.empty = self.empty, False
        if first and isinstance(rows, slice) and out.shape[1] == self._like.shape[1]:
            self._total = out, lse
            return
        if self._waiting and self._meets(rows):
            self._merge_waiting()
        if isinstance(rows, slice):
            self._end = max(self._end, rows.stop)
        else:
            self._numbered = True
        self._waiting.append((rows, (out, lse)))

    def settle(self) -> None:
        """Merges waiting partials, if the memory of one is borrowed."""
        if self.borrowed:
            self._merge_waiting()

    def _merge_waiting(self) -> None:
        """Merges waiting partials into the total, in a wide dtype from the second of a row on."""
        self.borrowed = False
        if self._total is None:
            self._owned = self._wide in [out.dtype for _, (out, _) in self._waiting]
            self._total = self._joined(self._wide if self._owned else self._like.dtype)
            return
        for rows, (out, lse) in self._taken():
            if self._owned:
                _merge_rows(*self._total, rows, out, lse)
                continue
            narrow, self._total, self._owned = self._total, self._new(self._wide), True
            if isinstance(rows, slice) and out.shape[1] == self._like.shape[1]:
                merge_into(*self._total, *narrow, out, lse)
            else:
                _merge_rows(*_copied(self._total, *narrow), rows, out, lse)

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """The result in a wide dtype."""
        return self.result(self._wide)

    def result(
        self, dtype: torch.dtype | None = None, plus: Tensors | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns: out [B,S,H,E] in `dtype` (default: q's), lse [B,H,S] float32 or float64.

        Args:
            dtype: of a result that has no place.
            plus: a last partial, of all rows.
        """
        dtype = dtype or self._like.dtype
        if plus is not None:
            self.add(slice(0, self._like.shape[1]), *plus)
        if self._total is None:
            self._total = self._joined(dtype)
        if len(self._waiting) == 1:
            ((rows, (last_out, last_lse)),) = self._waiting
            if isinstance(rows, slice) and last_out.shape[1] == self._like.shape[1]:
                found = self._place or self._new(dtype)
                merge_into(*found, *self._total, last_out, last_lse)
                return found
        if self._waiting and self._total[0].dtype != dtype:
            self._merge_waiting()
        elif self._waiting:
            for rows, (out, lse) in self._taken():
                _merge_rows(*self._total, rows, out, lse)
        return self._placed(dtype, *self._total)

    def _joined(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Joins waiting partials, no two of which share a row, to one."""
        numbered, taken = self._numbered, self._taken()
        out, lse = (dtype == self._like.dtype and self._place) or self._new(dtype)
        if numbered or sum([some.shape[1] for _, (some, _) in taken]) < self._like.shape[1]:
            out.zero_()
            lse.fill_(-torch.inf)
        for rows, (some, some_lse) in taken:
            if isinstance(rows, RowIndex):
                _merge_rows(out, lse, rows, some, some_lse)
            else:
                _copied((out[:, rows], lse[:, :, rows]), some, some_lse)
        return out, lse

    def _placed(self, dtype: torch.dtype, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a result in its place."""
        if self._place is None:
            return out.to(dtype), lse
        return self._place if out is self._place[0] else _copied(self._place, out, lse)

    def _new(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Memory for out and lse."""
        batch, tokens, heads, _ = self._like.shape
        out = self._like.new_empty(self._shape, dtype=dtype)
        return out, self._like.new_empty((batch, heads, tokens), dtype=self._wide)


def _copied(place: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The place, after copying out and lse to it."""
    _sum_into(place[:1], (out,))
    place[1].copy_(lse)
    return place


class GradientSum(_Partials):
    """Running sums of the partial gradients of one block, in float32 from the second one on.

    Gradients of k and v come together; one object sums both.

    Attributes:
        placing: there is no gradient yet, and the first may be written where the sums will be.
        placed: memory for the sums, once it is known.
    """

    def __init__(
        self, *like: Tensor, few: bool = False, place: Callable[[], Tensors] | None = None
    ) -> None:
        """Makes sums without a gradient.

        Args:
            like: [B,S,heads,D], of one dtype; shape, dtype and device of each gradient.
            few: a partial that comes after the first is probably the last of its rows, and waits,
                or two do: if they are, the sum is written in its final dtype, at best in the place
                of the first. With more to come that takes more memory.
            place: gives memory for the sums, into which the first partial can be written.
        """
        self._waiting = []
        self._like = like
        self._wide = accumulation_dtype(like[0].dtype)
        self._few = few
        self._place = place
        self.placing = place is not None
        self.placed: Tensors | None = None
        self._total: list[Tensor] = []
        self._owned = False  # whether _total has wide buffers of ours

    def place_of_first(self, rows: int) -> Tensors | None:
        """Where the first partial, of `rows` rows, is to be written to; None: anywhere."""
        if self._place is None or not self.placing or rows != self._like[0].shape[1]:
            return None
        self.placed = self._place()
        return self.placed

    def add(self, rows: SomeRows, *gradients: Tensor) -> None:
        """Adds the gradients of some rows [B,rows,heads,D]."""
        self.empty = self.placing = False
        whole = isinstance(rows, slice) and gradients[0].shape[1] == self._like[0].shape[1]
        if whole and not self._total:  # in every layer: without a further call
            self._total = list(gradients)
        elif self._few:
            if self._waiting and self._meets(rows) > 1:
                self._settle()
            if isinstance(rows, slice):
                self._end = max(self._end, rows.stop)
            self._numbered |= not isinstance(rows, slice) or rows.step not in _ADJACENT
            self._waiting.append((rows, gradients))
        else:
            self._add(rows, gradients)

    def settle(self) -> None:
        """Adds gradients that wait; but one alone waits on, to be added with the next one."""
        if len(self._waiting) > 1:
            self._settle()

    def add_last(self, others: Sequence[Partial]) -> None:
        """Adds gradients after which none come, in as few passes as can be: rows that have one or
        two more are summed in place, in the dtype that the sums have by then.
        """
        self.empty = self.placing = False
        self._total, self._waiting = self.final(self._like[0].dtype), [*others]
        if sum(isinstance(rows, RowIndex) for rows, _ in others) > 1:  # perhaps of the same rows
            self._owned = self._total[0].dtype == self._wide
            self._own_buffers()
        for rows, parts in self._pieces():
            if isinstance(rows, RowIndex):
                _add_rows(self._total, rows, *parts)
                continue
            there = [rows_at(x, rows) for x in self._total]
            sums = there
            if len(parts) > 2 and there[0].dtype != self._wide:
                sums = [x.new_empty(x.shape, dtype=self._wide) for x in there]
            before = there
            while parts:
                some, parts = parts[:2], parts[2:]
                after = sums if parts else there
                _sum_into(after, before, *some)
                before = after

    def result(self, dtype: torch.dtype | None = None, plus: Tensors | None = None) -> Tensors:
        """The sums, contiguous, in `dtype` (default: the dtype of the tensors).

        Args: plus: [B,S,heads,D] to be added in the same pass; the results are new tensors then.
        """
        dtype = dtype or self._like[0].dtype
        if plus is not None:
            return tuple(_plus(dtype, self.held, plus))
        return tuple([x.to(dtype).contiguous() for x in self.final(dtype)])

    def write(self, outs: Tensors, plus: Tensors | None = None) -> None:
        """outs [B,S,heads,D] = the sums, and `plus` if there are some; outs may be strided."""
        if plus is not None:
            _sum_into(outs, self.held, plus)
            return
        places = self.placed or (None,) * len(outs)
        each = zip(outs, self.final(outs[0].dtype), places, strict=True)
        moved = [(out, x) for out, x, place in each if x is not place]
        if moved:
            _sum_into(*zip(*moved, strict=True))

    @property
    def keeps(self) -> bool:
        """See _Partials; `few` gradients that wait are not kept for longer than they may be."""
        return not self._total

    @property
    def held(self) -> list[Tensor]:
        """The sums in their present dtype, for a caller that copies them."""
        if self._waiting:
            self._settle()
        return self._total or self._own_buffers()

    def final(self, dtype: torch.dtype) -> list[Tensor]:
        """The sums, for a caller that writes them in `dtype`; in `dtype` if that saves a copy."""
        if not self._waiting:
            return self._total or self._own_buffers()
        if not self._total and (self._numbered or len(self._waiting) == 1):
            self._total = [x.new_zeros(x.shape, dtype=dtype) for x in self._like]
        if self._total and self._total[0].dtype == dtype:
            for rows, parts in self._pieces():
                _add_rows(self._total, rows, *parts)
        elif self._numbered:
            self._settle()
        else:
            self._total, self._owned = self._joined(dtype), dtype == self._wide
        return self._total

    def _joined(self, dtype: torch.dtype) -> list[Tensor]:
        """The sums, with the waiting partials, in new memory. These have adjacent rows."""
        whole = [x.new_empty(x.shape, dtype=dtype) for x in self._like]
        pieces = [(x.start, x.stop, each) for x, each in self._pieces() if isinstance(x, slice)]
        end, tokens = 0, whole[0].shape[1]
        for start, stop, parts in [*sorted(pieces, key=itemgetter(0)), (tokens, tokens, [])]:
            if start > end:
                between = [x[:, end:start] for x in whole]
                if self._total:
                    _sum_into(between, [x[:, end:start] for x in self._total])
                else:
                    for x in between:
                        x.zero_()
            if parts:
                terms = [[x[:, start:stop] for x in self._total]] if self._total else []
                _sum_into([x[:, start:stop] for x in whole], *terms, *parts)
            end = stop
        return whole

    def _settle(self) -> None:
        """Adds the waiting gradients."""
        if self._owned or self._numbered:
            for rows, parts in self._pieces():
                self._add(rows, *parts)
        else:
            self._total, self._owned = self._joined(self._wide), True

    def _add(self, rows: SomeRows, *parts: Tensors) -> None:
        """Adds to wide totals."""
        if self._total and not self._owned and self._whole(rows, parts[0]):
            self._total, self._owned = _plus(self._wide, self._total, *parts), True
            return
        _add_rows(self._total if self._owned else self._own_buffers(), rows, *parts)

    def _own_buffers(self) -> list[Tensor]:
        """The totals as wide buffers."""
        if not self._total:
            self._total = [torch.zeros_like(x, dtype=self._wide) for x in self._like]
        elif not self._owned:
            wide = [torch.empty_like(x, dtype=self._wide) for x in self._like]
            _sum_into(wide, self._total)
            self._total = wide
        self._owned = True
        return self._total

    def _whole(self, rows: SomeRows, gradients: Tensors) -> bool:
        return isinstance(rows, slice) and gradients[0].shape[1] == self._like[0].shape[1]


def _plus(dtype: torch.dtype, *terms: Sequence[Tensor]) -> list[Tensor]:
    outs = [torch.empty(x.shape, dtype=dtype, device=x.device) for x in terms[0]]
    _sum_into(outs, *terms)
    return outs


def part_of(tensors: Tensors, rows: slice) -> Tensors:
    """Rows of tensors [B,S,heads,D], perhaps with [B,H,S], as views."""
    if rows.stop - rows.start == tensors[0].shape[1]:
        return tensors
    return tuple([x[:, rows] if x.dim() == 4 else x[:, :, rows] for x in tensors])


class WholeGradient:
    """Gradients [B,S,heads,D] that are put together from groups of heads, one after another.

    Their memory is allocated at first use, because less is in use later.

    Attributes: whole: all heads, contiguous, when each has been written.
    """

    whole: Tensors

    def __init__(self, *like: Tensor) -> None:
        """Args: like: [B,S,heads,D]; shape, dtype and device of each gradient."""
        self._like = like
        self._made = False

    def place(self, heads: slice | None) -> Tensors:
        """Memory for the sums of some heads, [B,S,heads,D]. Args: heads: None: all."""
        if not self._made:
            self.whole, self._made = tuple([torch.empty_like(x) for x in self._like]), True
        return self.whole if heads is None else tuple([x[:, :, heads] for x in self.whole])

    def write(self, heads: slice | None, total: GradientSum, plus: Tensors | None = None) -> None:
        """Writes the sums of some heads (None: all), and `plus` [B,S,heads,D] if there are some."""
        if not self._made and heads is None:
            self.whole, self._made = total.result(plus=plus), True
        else:
            total.write(self.place(heads) if total.placed is None else total.placed, plus)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [K,L] += a^T b, of [n,K] and [n,L], summed in the dtype of total."""
    if total.dtype == b.dtype:
        total.addmm_(a.t(), b)
    elif total.is_cuda:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.t().to(total.dtype), b.to(total.dtype))


def delta_of(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout * out): [B,S,H,D] twice -> [B,H,S] in float32 (float64 for float64)."""
    fused = fused_for(out)
    if fused is not None:
        return fused.delta_of(dout, out)
    dtype = accumulation_dtype(out.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).contiguous()


# Elements of a row whose products with dout make up delta: what one leaves is 2^-9 of it in
# bfloat16, what three leave is less than float32 tells apart.
PLACEHOLDER_TERMS = 3


def placeholder_out(dout: Tensor, delta: Tensor) -> Tensor:
    """An `out` from which `delta_of` computes this delta, to float32 precision; its other elements
    are 0.

    Its only elements are where dout is greatest: each makes up, rounded to dout's dtype, for what
    the ones before it leave of delta. Args: dout: [B,S,H,D] or [S,H,D]. delta: [B,H,S] or [H,S].
    """
    fused = fused_for(dout)
    if fused is not None:
        return fused.placeholder_out(dout, delta)
    at = dout.abs().topk(min(PLACEHOLDER_TERMS, dout.shape[-1]), -1).indices
    rest = delta.transpose(-2, -1)
    values: list[Tensor] = []
    for term in dout.gather(-1, at).to(delta.dtype).unbind(-1):
        value = (rest / term).to(dout.dtype)
        if values:  # as far as there are more elements, and numbers that are large enough
            value = value.where(value.isfinite(), 0.0)
        else:
            value = value.where(term != 0, rest.to(dout.dtype))
        rest = rest - value.to(rest.dtype) * term
        values.append(value)
    return torch.zeros_like(dout).scatter_(-1, at, torch.stack(values, -1))
