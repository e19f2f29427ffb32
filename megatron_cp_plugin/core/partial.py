"""Merges partial attention outputs and sums partial gradients without losing precision.

B batch, S local tokens, H query heads, D head dim, E that of values. A partial is attention over a
part of the keys: out [B,S,H,E] and lse [B,H,S], the natural log of its softmax denominator.

Source: AttnFix (Attention2D, Algorithm 2); the same as rescale (DISTFLASHATTN, Algorithm 2) and GAO
(BurstAttention, Algorithm 1, lines 13-16). Differs: rows that see no key are allowed.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
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
Term = tuple[slice, Tensors]  # a partial of adjacent rows


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


def _sum_rows(outs: Sequence[Tensor], terms: Sequence[Term], *, in_place: bool = False) -> None:
    """Each of one or two outs [B,S,heads,D] = the sum of its terms, in float32 (float64 for
    float64), in one pass over memory.

    Args:
        terms: rows of the outs, and these rows of a term for each out.
        in_place: the outs are terms too, and rows without any other stay as they are; else such
            rows become 0.
    """
    fused = fused_for(outs[0])
    if fused is not None:
        fused.sum_rows(outs, terms, in_place=in_place)
        return
    for number, out in enumerate(outs):
        wide = accumulation_dtype(out.dtype)
        total = out.to(wide) if in_place else torch.zeros_like(out, dtype=wide)
        for rows, tensors in terms:
            part = total if tensors[number].shape[1] == out.shape[1] else total[:, rows]
            part += tensors[number]
        if total is not out:
            out.copy_(total)


def _add_rows(totals: Sequence[Tensor], rows: SomeRows, gradients: Sequence[Tensor]) -> None:
    """Adds gradients to some rows of totals [B,S,heads,D], in place."""
    if not isinstance(rows, RowIndex):
        parts = [rows_at(x, rows) for x in totals]
        _sum_rows(parts, [(slice(0, parts[0].shape[1]), (*gradients,))], in_place=True)
        return
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
        _sum_rows((part,), [(slice(0, x.shape[1]), (x,))])
    return whole


def _are_apart(a: SomeRows, b: SomeRows) -> bool:
    """Whether two partials are known to share no row."""
    if isinstance(a, slice) and isinstance(b, slice):
        return bool(a.stop <= b.start or b.stop <= a.start)
    edges = [x.edges if isinstance(x, RowIndex) else ((x.start,), (x.stop,)) for x in (a, b)]
    if edges[0] is None or edges[1] is None:
        return False
    (start, stop), (first, last) = np.asarray(edges[0]), edges[1]
    return not (start.searchsorted(last) > stop.searchsorted(first, "right")).any()


def _share_rows(rows: SomeRows, others: Iterable[Partial]) -> bool:
    """Whether one of several partials may have one of these rows."""
    apart = [_are_apart(rows, own) for own, _ in others]
    return not all(apart)


class Accumulator:
    """Running merge of the partials of one block of queries.

    A partial is merged when one of the same rows comes, or when the result is asked for: so the
    last merge writes the output in its final dtype, a single partial is the output as it is, and
    nothing is copied to float32 only to be read again. Rows without any partial end as out 0, lse
    -inf.
    The first partial may be written to.

    Attributes:
        empty: there is no partial yet.
        borrowed: memory of waiting partials may change after the next `add` or `settle`.
    """

    empty = True
    borrowed = False

    def __init__(
        self, q: Tensor, value_dim: int, place: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Args:
        q: [B,S,H,D]. value_dim: E of the output to come, which is else like q.
        place: where the result will be, out [B,S,H,E] in q's dtype and lse [B,H,S], which may be
            strided; None: in memory of its own.
        """
        self._waiting = list[Partial]()
        self._like = q
        self._place = place
        self._shape = (*q.shape[:3], value_dim)
        self._wide = accumulation_dtype(q.dtype)
        self._total: tuple[Tensor, Tensor] | None = None
        self._owned = False  # whether _total is a wide buffer of ours, free to be written

    @property
    def keeps(self) -> bool:
        """Whether the next partial would be kept as it is."""
        return self.empty

    def place_of_first(self, rows: int) -> tuple[Tensor, Tensor] | None:
        """Where the result will be, if the first partial, of `rows` rows, can be there."""
        return self._place if self.empty and rows == self._like.shape[1] else None

    def add(self, rows: SomeRows, out: Tensor, lse: Tensor) -> None:
        """Merges a partial of some rows: out [B,rows,H,E], lse [B,H,rows]."""
        first, self.empty = self.empty, False
        if first and isinstance(rows, slice) and out.shape[1] == self._like.shape[1]:
            self._total = out, lse
            return
        if self._waiting and _share_rows(rows, self._waiting):
            self._merge_waiting()
        self._waiting.append((rows, (out, lse)))

    def _taken(self) -> list[Partial]:
        """Takes all partials that wait."""
        taken, self._waiting, self.borrowed = self._waiting, [], False
        return taken

    def settle(self) -> None:
        """Merges waiting partials, if the memory of one is borrowed."""
        if self.borrowed:
            self._merge_waiting()

    def _merge_waiting(self) -> None:
        """Merges waiting partials into the total, in a wide dtype from the second of a row on."""
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
        self, dtype: torch.dtype | None = None, others: Sequence[Partial] = ()
    ) -> tuple[Tensor, Tensor]:
        """Returns: out [B,S,H,E] in `dtype` (default: q's), lse [B,H,S] float32 or float64.

        Args:
            dtype: of a result that has no place.
            others: the last partials.
        """
        dtype = dtype or self._like.dtype
        for rows, (out, lse) in others:
            self.add(rows, out, lse)
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
        taken = self._taken()
        numbered = [isinstance(rows, RowIndex) for rows, _ in taken]
        out, lse = (dtype == self._like.dtype and self._place) or self._new(dtype)
        if any(numbered) or sum([some.shape[1] for _, (some, _) in taken]) < self._like.shape[1]:
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
    _sum_rows(place[:1], [(slice(0, out.shape[1]), (out,))])
    place[1].copy_(lse)
    return place


class GradientSum:
    """Running sums of the partial gradients of one block, added in float32.

    Gradients of k and v come together; one object sums both. The first one of all rows is the sum
    until others come, and belongs to it from then on.

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
            few: few partials come after the first: they wait, at most three for each row in the
                mean, so that the sum is written once, in its final dtype. This takes no more memory
                than a sum in float32. Otherwise each is added as it comes, in float32.
            place: gives memory for the sums, into which the first partial can be written.
        """
        self._like = like
        self._wide = accumulation_dtype(like[0].dtype)
        self._few = few
        self._place = place
        self.placing = place is not None
        self.placed: Tensors | None = None
        self._total: Tensors = ()
        # Partials that wait: slices, which are added in one pass, and others, which share no row.
        self._slices = list[Term]()
        self._apart = list[Partial]()

    def place_of_first(self, rows: int) -> Tensors | None:
        """Where the first partial, of `rows` rows, is to be written to; None: anywhere."""
        if self._place is None or not self.placing or rows != self._like[0].shape[1]:
            return None
        self.placed = self._place()
        return self.placed

    def add(self, rows: SomeRows, *gradients: Tensor) -> None:
        """Adds the gradients of some rows [B,rows,heads,D]."""
        self.placing = False
        whole = isinstance(rows, slice) and gradients[0].shape[1] == self._like[0].shape[1]
        if whole and not self._total:  # in every layer: without a further call
            self._total = gradients
            return
        self._wait(rows, gradients, 3 * self._like[0].shape[1])
        if not self._few:
            self.final(self._wide)

    def _wait(self, rows: SomeRows, gradients: Tensors, most: int | None = None) -> None:
        """Lets gradients wait. Args: most: rows that may wait; None: any number."""
        is_slice = isinstance(rows, slice) and rows.step in _ADJACENT
        if self._apart or not is_slice:
            full = _share_rows(rows, [*self._slices, *self._apart])
        else:
            waiting = sum([own[0].shape[1] for _, own in self._slices])
            full = most is not None and waiting + gradients[0].shape[1] > most
        if full:
            self.final(self._wide)
        if isinstance(rows, slice) and is_slice:
            self._slices.append((rows, gradients))
        else:
            self._apart.append((rows, gradients))

    def result(self, dtype: torch.dtype | None = None, others: Sequence[Partial] = ()) -> Tensors:
        """The sums, contiguous, in `dtype` (default: the dtype of the tensors).

        Args: others: the last gradients.
        """
        dtype = dtype or self._like[0].dtype
        return tuple([x.to(dtype).contiguous() for x in self.final(dtype, others)])

    def write(self, outs: Tensors, others: Sequence[Partial] = ()) -> None:
        """outs [B,S,heads,D] = the sums; they may be strided. Args: others: the last gradients."""
        for each in others:
            self._wait(*each)
        places, total = [*map(id, self.placed or ())], self._total
        if self._apart or (total and [*map(id, total)] == places):
            total = self.final(outs[0].dtype)
        if not total or [*map(id, total)] != places:
            whole = [(slice(0, total[0].shape[1]), total)] if total else []
            _sum_rows(outs, [*whole, *self._slices])

    @property
    def keeps(self) -> bool:
        """Whether the next gradient, if of all rows, would be kept as it is."""
        return not self._total

    @property
    def held(self) -> Tensors:
        """The sums, for a caller that copies them."""
        return self.final(self._wide)

    def final(self, dtype: torch.dtype, others: Sequence[Partial] = ()) -> Tensors:
        """The sums, with those that wait, for a caller that writes them in `dtype`; in `dtype` if
        that saves a copy. Args: others: the last gradients.
        """
        for each in others:
            self._wait(*each)
        slices, apart, total = self._slices, self._apart, self._total
        if total and not slices and not apart:
            return total
        self._slices, self._apart = [], []
        if apart and total and total[0].dtype == self._wide:
            dtype = self._wide  # those that are not slices are added after the others
        if total and total[0].dtype == dtype:
            if slices:
                _sum_rows(total, slices, in_place=True)
        else:
            whole = [(slice(0, total[0].shape[1]), total)] if total else []
            self._total = tuple([x.new_empty(x.shape, dtype=dtype) for x in self._like])
            _sum_rows(self._total, [*whole, *slices])
        for rows, gradients in apart:
            _add_rows(self._total, rows, gradients)
        return self._total


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

    def write(self, heads: slice | None, total: GradientSum, others: Sequence[Partial]) -> None:
        """Writes the sums of some heads (None: all). Args: others: the last gradients."""
        if not self._made and heads is None:
            self.whole, self._made = total.result(others=others), True
        else:
            total.write(self.place(heads) if total.placed is None else total.placed, others)


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
