"""Merges partial attention outputs and sums partial gradients without losing precision.

B batch, S local tokens, H query heads, D head dim, E that of values. A partial is attention over a
part of the keys: out [B,S,H,E] and lse [B,H,S], the natural log of its softmax denominator.

Source: AttnFix (Attention2D, Algorithm 2); the same as rescale (DISTFLASHATTN, Algorithm 2) and
GAO (BurstAttention, Algorithm 1, lines 13-16). Differs: rows that no key is visible to.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.fused import fused_for


class RowIndex(NamedTuple):
    """Some rows of a block by number, where they are no slice.

    Attributes:
        to: [n] int32, rows of the block; none twice.
        of: [n] int32, rows of what is merged with them or added; None: all, in their order.
    """

    to: Tensor
    of: Tensor | None = None


SomeRows = slice | RowIndex


Partial = tuple[SomeRows, tuple[Tensor, ...]]


class _Waiting:
    """Partials in the order in which they came: of rows that no two of them share, or two that do.

    Where each row is written once, it can be written in the final dtype.

    Attributes: partials: all of them.
    """

    partials: tuple[Partial, ...] = ()
    _start = _stop = 0  # between which their rows are
    _paired = False

    def fits(self, rows: SomeRows) -> bool:
        """Whether rows lie outside of all that are here, of at least one. Only of slices this is
        known.
        """
        if isinstance(rows, RowIndex) or isinstance(self.partials[0][0], RowIndex):
            return False
        return not self._paired and bool(rows.stop <= self._start or rows.start >= self._stop)

    def pairs_with(self, rows: SomeRows) -> bool:
        """Whether these rows and those of the only one here can be taken in one pass."""
        if self.single is None or isinstance(rows, RowIndex):
            return False
        other, _ = self.single
        return isinstance(other, slice) and {rows.step, other.step} <= {None, 1}

    def add(self, rows: SomeRows, *tensors: Tensor, paired: bool = False) -> None:
        """Takes a partial whose rows fit, or, if `paired`, that pairs with the only one."""
        self._paired = paired
        if isinstance(rows, slice):
            first = not self.partials
            self._start = rows.start if first else min(self._start, rows.start)
            self._stop = rows.stop if first else max(self._stop, rows.stop)
        self.partials += ((rows, tensors),)

    @property
    def single(self) -> Partial | None:
        """The only one, if there is just one."""
        return self.partials[0] if len(self.partials) == 1 else None

    def take(self) -> tuple[Partial, ...]:
        """All of them, of which none stays here."""
        taken, self.partials, self._paired = self.partials, (), False
        return taken


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
    if fused is not None and lse.dtype == torch.float32:
        fused.merge_into(out, lse, a, a_lse, b, b_lse)
        return
    merged = torch.logaddexp(a_lse, b_lse)
    out.copy_(a * _weight(a_lse, merged) + b * _weight(b_lse, merged))
    lse.copy_(merged)


def merge_all_into(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> None:
    """(out, lse) = merge of P partials, in one pass.

    Args:
        out: [B,S,H,D], outs: [P,B,S,H,D], any floating dtypes. lse: [B,H,S], lses: [P,B,H,S],
        wide dtype. All may be strided.
    """
    if len(outs) == 1:
        out.copy_(outs[0])
        lse.copy_(lses[0])
        return
    if len(outs) == 2:
        merge_into(out, lse, outs[0], lses[0], outs[1], lses[1])
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


def _sum_into(out: Tensor, a: Tensor, *others: Tensor) -> None:
    """out = a + the others, two at most, summed in float32 (float64 for float64); out may be a."""
    fused = fused_for(out)
    if fused is not None and a.dtype != torch.float64:
        fused.sum_into(out, a, *others)
    elif not others:
        out.copy_(a)
    else:
        wide = accumulation_dtype(a.dtype)
        total = a.to(wide)
        for b in others:
            total = total + b.to(wide)
        out.copy_(total)


def _add_rows(total: Tensor, rows: SomeRows, *gradients: Tensor) -> None:
    """Adds one or two to some rows of a total [B,S,heads,D], in place; one if rows are numbers."""
    if isinstance(rows, RowIndex):
        (gradient,) = gradients
        _add_at(total, rows, gradient)
        return
    part = rows_at(total, rows)
    _sum_into(part, part, *gradients)


def _add_at(total: Tensor, rows: RowIndex, gradient: Tensor) -> None:
    fused = fused_for(total)
    if fused is not None and total.dtype != torch.float64:
        fused.add_rows_into(total, rows.to, gradient, rows.of)
        return
    added = gradient if rows.of is None else gradient.index_select(1, rows.of)
    wide = accumulation_dtype(total.dtype)
    total[:, rows.to] = (total.index_select(1, rows.to).to(wide) + added.to(wide)).to(total.dtype)


def _merge_at(out: Tensor, lse: Tensor, rows: RowIndex, b: Tensor, b_lse: Tensor) -> None:
    """Merges a partial of some rows into out [B,S,H,D] and lse [B,H,S], in place."""
    fused = fused_for(out)
    if fused is not None and lse.dtype == torch.float32:
        fused.merge_rows_into(out, lse, rows.to, b, b_lse, rows.of)
        return
    if rows.of is not None:
        b, b_lse = b.index_select(1, rows.of), b_lse.index_select(2, rows.of)
    part, part_lse = out.index_select(1, rows.to), lse.index_select(2, rows.to)
    merge_into(part, part_lse, part, part_lse, b, b_lse)
    out[:, rows.to], lse[:, :, rows.to] = part, part_lse


def rows_at(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Some rows of [B,S,heads,D]: a view of a slice, x of all rows; a copy, in their order, of rows
    [n] int32.
    """
    if isinstance(rows, slice):
        return x if rows == slice(0, x.shape[1]) else x[:, rows]
    return taken(x, 1, rows)


def taken(x: Tensor, dim: int, rows: Tensor) -> Tensor:
    """A copy of some rows along a dimension, in their order. Args: rows: [n] int32."""
    # Fused operations compute in float32.
    exact = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    fused = fused_for(x) if exact and (dim, x.dim()) == (1, 4) else None
    return x.index_select(dim, rows) if fused is None else fused.rows_at(x, rows)


class Accumulator:
    """Running merge of the partials of one block of queries.

    A partial is merged when the next one of the same rows comes, or the result is asked for: so the
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
        self._like = q
        self._place = place
        self._shape = (*q.shape[:3], value_dim)
        self._wide = accumulation_dtype(q.dtype)
        self._total: tuple[Tensor, Tensor] | None = None
        self._owned = False  # whether _total is a wide buffer of ours, free to be written
        self._waiting = _Waiting()
        self._borrowed = False

    @property
    def empty(self) -> bool:
        """Whether there is no partial yet."""
        return not self._waiting.partials and self._total is None

    def place_of_first(self, rows: int) -> tuple[Tensor, Tensor] | None:
        """Where the result will be, if the first partial, of so many rows, can be there."""
        return self._place if self.empty and rows == self._like.shape[1] else None

    def add(self, rows: SomeRows, out: Tensor, lse: Tensor, *, borrowed: bool = False) -> None:
        """Merges a partial of some rows: out [B,rows,H,E], lse [B,H,rows].

        Args: borrowed: it may be changed after the next `add` or `settle`.
        """
        if self._waiting.partials and not self._waiting.fits(rows):
            self._merge_waiting()
        self._waiting.add(rows, out, lse)
        self._borrowed |= borrowed

    def settle(self) -> None:
        """Merges what waits, if some of it is borrowed."""
        if self._borrowed:
            self._merge_waiting()

    def _merge_waiting(self) -> None:
        for rows, (out, lse) in self._waiting.take():
            self._settle(rows, out, lse)
        self._borrowed = False

    def result(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Returns: out [B,S,H,E] in `dtype` (default: q's), lse [B,H,S] float32 or float64.

        Args: dtype: of a result that has no place.
        """
        dtype = dtype or self._like.dtype
        last = self._waiting.single
        if last is not None and self._whole(last[0], last[1][0]):
            last_out, last_lse = last[1]
            if self._total is None:
                return self._placed(dtype, last_out, last_lse)
            out, lse = self._place or (
                self._like.new_empty(self._shape, dtype=dtype),
                self._empty_lse(),
            )
            merge_into(out, lse, *self._total, last_out, last_lse)
            return out, lse
        total = self._total or self._nothing(dtype)
        if total[0].dtype == dtype:
            for rows, (out, lse) in self._waiting.take():
                self._merge_rows(total, rows, out, lse)
            return self._placed(dtype, *total)
        self._merge_waiting()
        assert self._total is not None
        return self._placed(dtype, *self._total)

    def _placed(self, dtype: torch.dtype, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """A result where it belongs."""
        if self._place is None:
            return out.to(dtype), lse
        if out is not self._place[0]:
            _sum_into(self._place[0], out)
            self._place[1].copy_(lse)
        return self._place

    def _settle(self, rows: SomeRows, out: Tensor, lse: Tensor) -> None:
        """Merges a partial into the total."""
        if self._total is None and self._whole(rows, out):
            self._total = (out, lse)
            return
        total_out, total_lse = self._total or self._nothing(self._wide)
        if self._owned:
            self._merge_rows((total_out, total_lse), rows, out, lse)
            return
        wide = self._like.new_empty(self._shape, dtype=self._wide), self._empty_lse()
        if self._whole(rows, out):
            merge_into(*wide, total_out, total_lse, out, lse)
        else:
            _sum_into(wide[0], total_out)
            wide[1].copy_(total_lse)
            self._merge_rows(wide, rows, out, lse)
        self._total, self._owned = wide, True

    @staticmethod
    def _merge_rows(total: tuple[Tensor, Tensor], rows: SomeRows, out: Tensor, lse: Tensor) -> None:
        """Merges a partial of some rows into the total, in place."""
        if isinstance(rows, RowIndex):
            _merge_at(*total, rows, out, lse)
            return
        if out.shape[1] < total[0].shape[1]:
            total = total[0][:, rows], total[1][:, :, rows]
        merge_into(*total, *total, out, lse)

    def _nothing(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        self._owned = dtype == self._wide
        self._total = (
            self._like.new_zeros(self._shape, dtype=dtype),
            self._empty_lse().fill_(-torch.inf),
        )
        return self._total

    def _empty_lse(self) -> Tensor:
        batch, tokens, heads, _ = self._like.shape
        return self._like.new_empty((batch, heads, tokens), dtype=self._wide)

    def _whole(self, rows: SomeRows, out: Tensor) -> bool:
        return isinstance(rows, slice) and out.shape[1] == self._like.shape[1]


class GradientSum:
    """Running sum of the partial gradients of one block, in float32 from the second one on.

    Attributes: empty: there is no gradient yet. placed: what the sum will be written to, once that
        is known.
    """

    def __init__(
        self, like: Tensor, *, few: bool = False, place: Callable[[], Tensor] | None = None
    ) -> None:
        """Args:
        like: [B,S,heads,D]; shape, dtype and device of the gradient.
        few: a partial that comes after the first is probably the last of its rows, and waits, or
            two do: if they are, the sum is written in its final dtype, at best in the place of the
            first. With more to come that takes more memory.
        place: gives what the sum will be written to, so that the first partial can be there.
        """
        self._like = like
        self._few = few
        self._place = place
        self.empty = True
        self.placed: Tensor | None = None
        self._total: Tensor | None = None
        self._owned = False  # whether _total is a wide buffer of ours
        self._waiting = _Waiting()  # to be added to the total

    def place_of_first(self, rows: int) -> Tensor | None:
        """Where the first partial, of so many rows, is to be written to; None: anywhere."""
        if self._place is None or not self.empty or rows != self._like.shape[1]:
            return None
        self.placed = self._place()
        return self.placed

    def add(self, rows: SomeRows, gradient: Tensor) -> None:
        """Adds the gradient of some rows [B,rows,heads,D]."""
        self.empty = False
        if self._total is None and self._whole(rows, gradient):
            self._total = gradient
        elif self._few:
            paired = bool(self._waiting.partials) and not self._waiting.fits(rows)
            if paired and not self._waiting.pairs_with(rows):
                self._settle()
                paired = False
            self._waiting.add(rows, gradient, paired=paired)
        else:
            self._add(rows, gradient)

    def result(self, dtype: torch.dtype | None = None, plus: Tensor | None = None) -> Tensor:
        """The sum, contiguous, in `dtype` (default: that of the tensor it is a gradient of).

        Args: plus: [B,S,heads,D] to be added in the same pass; the result is a new tensor then.
        """
        dtype = dtype or self._like.dtype
        if plus is not None:
            return self._plus(self.held, plus, dtype)
        return self._final(dtype).to(dtype).contiguous()

    def write(self, out: Tensor, plus: Tensor | None = None) -> None:
        """out [B,S,heads,D] = the sum, and `plus` if there is one; out may be strided."""
        total = self._final(out.dtype) if plus is None else self.held
        if plus is not None:
            _sum_into(out, total, plus)
        elif total is not self.placed:
            _sum_into(out, total)

    @property
    def keeps(self) -> bool:
        """Whether a gradient of all rows would be kept as it is, even if partial ones wait."""
        return self._total is None

    @property
    def held(self) -> Tensor:
        """The sum in whatever dtype it is, for whoever copies it elsewhere."""
        if self._waiting.partials:
            self._settle()
        return self._own_buffer() if self._total is None else self._total

    def _final(self, dtype: torch.dtype) -> Tensor:
        """The sum; rounded already where it ends in `dtype`, and nothing is added to it then."""
        if not self._waiting.partials:
            return self.held
        last = self._waiting.single
        if self._total is None:
            self._total = self._like.new_zeros(self._like.shape, dtype=dtype)
        if self._total.dtype == dtype:
            for rows, parts in _apart(self._waiting.take()):
                _add_rows(self._total, rows, *parts)
        elif last is not None and self._whole(last[0], last[1][0]):
            return self._plus(self._total, last[1][0], dtype)
        return self.held

    def _settle(self) -> None:
        """Adds what waits."""
        for rows, (gradient,) in self._waiting.take():
            self._add(rows, gradient)

    def _add(self, rows: SomeRows, gradient: Tensor) -> None:
        """Adds to a wide total."""
        if not self._owned and self._total is not None and self._whole(rows, gradient):
            wide = accumulation_dtype(self._like.dtype)
            self._total, self._owned = self._plus(self._total, gradient, wide), True
        else:
            total = self._total if self._owned else None
            _add_rows(self._own_buffer() if total is None else total, rows, gradient)

    def _plus(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self._like.shape, dtype=dtype, device=self._like.device)
        _sum_into(out, a, b)
        return out

    def _own_buffer(self) -> Tensor:
        """The total as a wide buffer."""
        if self._total is None:
            self._total = torch.zeros_like(self._like, dtype=accumulation_dtype(self._like.dtype))
        elif not self._owned:
            wide = torch.empty_like(self._like, dtype=accumulation_dtype(self._like.dtype))
            _sum_into(wide, self._total)
            self._total = wide
        self._owned = True
        return self._total

    def _whole(self, rows: SomeRows, gradient: Tensor) -> bool:
        return isinstance(rows, slice) and gradient.shape[1] == self._like.shape[1]


def _apart(partials: Sequence[Partial]) -> Iterator[Partial]:
    """Of two partials that share rows, rows that come once, each with all that is added there."""
    slices = [rows for rows, _ in partials if isinstance(rows, slice)]
    if len(slices) != 2 or slices[0].stop <= slices[1].start or slices[1].stop <= slices[0].start:
        yield from partials
        return
    bounds = sorted({bound for rows in slices for bound in (rows.start, rows.stop)})
    for start, stop in pairwise(bounds):
        parts = (
            rows_at(x, slice(start - rows.start, stop - rows.start))
            for rows, (_, (x,)) in zip(slices, partials, strict=True)
            if rows.start <= start and stop <= rows.stop
        )
        yield slice(start, stop), tuple(parts)


class WholeGradient:
    """A gradient [B,S,heads,D] that is put together from groups of heads, one after another.

    Its memory is taken when it is first of use, for later more is free again.

    Attributes: whole: all heads, contiguous, when each has been written.
    """

    whole: Tensor

    def __init__(self, like: Tensor) -> None:
        """Args: like: [B,S,heads,D]; shape, dtype and device of the gradient."""
        self._like = like
        self._made = False

    def place(self, heads: slice | None) -> Tensor:
        """Where the sum of some heads belongs, [B,S,heads,D]. Args: heads: None: all."""
        if not self._made:
            self.whole, self._made = torch.empty_like(self._like), True
        return self.whole if heads is None else self.whole[:, :, heads]

    def write(self, heads: slice | None, total: GradientSum, plus: Tensor | None = None) -> None:
        """Writes the sum of some heads (None: all), and `plus` [B,S,heads,D] if there is one."""
        if not self._made and heads is None:
            self.whole, self._made = total.result(plus=plus), True
        else:
            total.write(self.place(heads) if total.placed is None else total.placed, plus)


def delta_of(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout * out): [B,S,H,D] twice -> [B,H,S] in float32 (float64 for float64)."""
    fused = fused_for(out)
    if fused is not None and out.dtype != torch.float64:
        return fused.delta_of(dout, out)
    dtype = accumulation_dtype(out.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).contiguous()


# Elements of a row whose products with dout make up delta: what one leaves is 2^-9 of it in
# bfloat16, what three leave is less than float32 tells apart.
STAND_IN_TERMS = 3


def stand_in_of(dout: Tensor, delta: Tensor) -> Tensor:
    """An out of which `delta_of` makes this delta, up to float32; else 0.

    Its only elements are where dout is greatest: each makes up, rounded to dout's dtype, for what
    the ones before it leave of delta.

    Args:
        dout: [B,S,H,D], or flattened [S,H,D].
        delta: [B,H,S], or [H,S].

    Returns: as dout.
    """
    fused = fused_for(dout)
    if fused is not None and delta.dtype != torch.float64:
        return fused.stand_in_of(dout, delta)
    at = dout.abs().topk(min(STAND_IN_TERMS, dout.shape[-1]), -1).indices
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
