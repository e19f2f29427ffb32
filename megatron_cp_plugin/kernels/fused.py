"""Triton kernels around attention: merges, sums and products in one pass each.

Every tensor is read once and written once, whatever its dtype and strides (the head dim is
contiguous); all arithmetic is float32. Kernels take a tensor [B,S,H,D] or [B,H,S] as a tuple with
three of its strides.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_cp_plugin.core.partial import PLACEHOLDER_TERMS, Term
from megatron_cp_plugin.kernels.decayed import passed_along as passed_along
from megatron_cp_plugin.kernels.fused_loss import logit_gradients_ as logit_gradients_
from megatron_cp_plugin.kernels.fused_loss import logit_statistics as logit_statistics

_ROWS = 16
_TERMS = 8  # of a sum in one pass


@triton.jit
def _program_rows(sizes, ROWS: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows [ROWS] of a program, in the order batch, token, head: places, whether the row
    exists, and which of its elements exist [ROWS,DIM].
    """
    tokens, heads, rows, dim = sizes
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < rows
    inside = live[:, None] & (tl.arange(0, DIM) < dim)[None, :]
    return row // (heads * tokens), (row // heads) % tokens, row % heads, live, inside


@triton.jit
def _numbered(index, token):  # type: ignore[no-untyped-def]
    """Maps tokens through an index; None: the tokens themselves."""
    found = token
    if index is not None:
        found = tl.load(index + token).to(tl.int64)
    return found


@triton.jit
def _at(x, batch, token, head, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers [ROWS,DIM] into a tensor [B,S,H,D]."""
    ptr, by_b, by_s, by_h = x
    rows = batch * by_b + token * by_s + head * by_h
    return ptr + (rows[:, None] + tl.arange(0, DIM)[None, :])


@triton.jit
def _at_row(x, batch, head, token):  # type: ignore[no-untyped-def]
    """Pointers [ROWS] into a tensor [B,H,S]."""
    ptr, by_b, by_h, by_s = x
    return ptr + (batch * by_b + head * by_h + token * by_s)


@triton.jit
def _loaded(x, batch, token, head, inside, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(_at(x, batch, token, head, DIM), inside, 0.0).to(tl.float32)


@triton.jit
def _store(x, batch, token, head, value, inside, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(_at(x, batch, token, head, DIM), value.to(x[0].dtype.element_ty), inside)


def _launch(
    kernel: Any, like: Tensor, tokens: int, *given: Any, programs: int = 1, **flags: object
) -> None:
    """Runs a kernel for each head of each token, if there are any.

    Args:
        kernel: takes sizes, and then `given`.
        like: [B,*,H,D].
        given: tensors of more than two dimensions go with strides.
        programs: number of programs for the same heads and tokens.
    """
    batch, _, heads, dim = like.shape
    if rows := batch * tokens * heads:
        strided = [
            (x, *x.stride()[:3]) if isinstance(x, Tensor) and x.dim() > 2 else x for x in given
        ]
        grid, sizes = (-(-rows // _ROWS), programs), (tokens, heads, rows, dim)
        kernel[grid](sizes, *strided, ROWS=_ROWS, DIM=_power_of_2(dim), **flags)


def _power_of_2(dim: int) -> int:
    """The next one. Triton's functions for it and for quotients took 8 us each in a profile."""
    return 1 << (dim - 1).bit_length()


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    sizes, out, lse, a, a_lse, b, b_lse, at, b_at, ROWS: tl.constexpr, DIM: tl.constexpr
):
    batch, token, head, live, inside = _program_rows(sizes, ROWS, DIM)
    place, b_place = _numbered(at, token), _numbered(b_at, token)
    nothing = float("-inf")
    a_log = tl.load(_at_row(a_lse, batch, head, place), live, nothing)
    b_log = tl.load(_at_row(b_lse, batch, head, b_place), live, nothing)
    high = tl.maximum(a_log, b_log)
    high = tl.where(high == nothing, 0.0, high)  # rows that neither part has a key for
    a_weight = tl.exp(a_log - high)
    b_weight = tl.exp(b_log - high)
    total = a_weight + b_weight
    empty = total == 0.0
    scale = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    merged = _loaded(a, batch, place, head, inside, DIM) * (a_weight * scale)[:, None]
    merged += _loaded(b, batch, b_place, head, inside, DIM) * (b_weight * scale)[:, None]
    # Each warp loads every lse, which may be written in place: all have loaded before one stores.
    tl.debug_barrier()
    _store(out, batch, place, head, merged, inside, DIM)
    log = tl.where(empty, nothing, high + tl.log(tl.where(empty, 1.0, total)))
    tl.store(_at_row(lse, batch, head, place), log, live)


def merge_into(
    out: Tensor, lse: Tensor, a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor
) -> None:
    """See `partial.merge_into`; with lse in float32."""
    _launch(_merge_kernel, b, b.shape[1], out, lse, a, a_lse, b, b_lse, None, None)


def merge_rows_into(
    out: Tensor, lse: Tensor, to: Tensor, b: Tensor, b_lse: Tensor, of: Tensor | None
) -> None:
    """Merges some rows of (b, b_lse) (None: all, in their order) into some of (out, lse).

    Args:
        out, b: [B,S,H,D], any floating dtype; lse, b_lse: [B,H,S] float32.
        to, of: [n] int32.
    """
    _launch(_merge_kernel, b, len(to), out, lse, out, lse, b, b_lse, to, of)


@triton.jit
def _merge_all_kernel(  # type: ignore[no-untyped-def]
    sizes,
    out,
    lse,
    outs,
    lses,
    parts,
    out_p,  # from one of the partials to the next
    lse_p,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    batch, token, head, live, inside = _program_rows(sizes, ROWS, DIM)
    nothing = float("-inf")
    lses_at = _at_row(lses, batch, head, token)
    outs_at = _at(outs, batch, token, head, DIM)
    next_lses = lses_at
    high = tl.full((ROWS,), nothing, tl.float32)
    for _ in range(parts):
        high = tl.maximum(high, tl.load(next_lses, live, nothing))
        next_lses += lse_p
    high = tl.where(high == nothing, 0.0, high)  # rows that no part has a key for
    total = tl.zeros((ROWS,), tl.float32)
    merged = tl.zeros((ROWS, DIM), tl.float32)
    for _ in range(parts):
        weight = tl.exp(tl.load(lses_at, live, nothing) - high)
        merged += tl.load(outs_at, inside, 0.0).to(tl.float32) * weight[:, None]
        total += weight
        lses_at += lse_p
        outs_at += out_p
    empty = total == 0.0
    merged *= tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))[:, None]
    _store(out, batch, token, head, merged, inside, DIM)
    log = tl.where(empty, nothing, high + tl.log(tl.where(empty, 1.0, total)))
    tl.store(_at_row(lse, batch, head, token), log, live)


def merge_all_into(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> None:
    """See `partial.merge_all_into`; with lse in float32."""
    given = out, lse, outs[0], lses[0], len(outs), outs.stride(0), lses.stride(0)
    _launch(_merge_all_kernel, out, out.shape[1], *given)


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    sizes, out, a, b, out_at, a_at, b_at, ROWS: tl.constexpr, DIM: tl.constexpr
):
    """out[out_at] = a[a_at] + b[b_at]; b may be None, and so may indices."""
    batch, token, head, _, inside = _program_rows(sizes, ROWS, DIM)
    to = _numbered(out_at, token)
    total = _loaded(a, batch, _numbered(a_at, token), head, inside, DIM)
    if b is not None:
        total += _loaded(b, batch, _numbered(b_at, token), head, inside, DIM)
    tl.debug_barrier()  # out may be a, and a narrow row may be loaded by several warps
    _store(out, batch, to, head, total, inside, DIM)


def _of_any_value(number: int) -> int:
    """A number for a kernel. Triton compiles kernels anew for 1 and for multiples of 16."""
    return 2 * number + 3


@triton.jit
def _value_of(number):  # type: ignore[no-untyped-def]
    return (number - 3) // 2


@triton.jit
def _sum_of_rows(  # type: ignore[no-untyped-def]
    sizes, first, out, terms, edges, IN_PLACE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr
):
    """Rows of `out` from `first` on = the sum of terms; each has the rows between two edges."""
    batch, token, head, _, inside = _program_rows(sizes, ROWS, DIM)
    token += _value_of(first)
    total = tl.zeros((ROWS, DIM), tl.float32)
    found = token < 0
    for number in tl.static_range(len(terms)):
        start, stop = _value_of(edges[2 * number]), _value_of(edges[2 * number + 1])
        has = (token >= start) & (token < stop)
        total += _loaded(terms[number], batch, token - start, head, inside & has[:, None], DIM)
        found |= has
    if IN_PLACE:
        inside &= found[:, None]
        total += _loaded(out, batch, token, head, inside, DIM)
    tl.debug_barrier()  # out may be a term, and a narrow row may be loaded by several warps
    _store(out, batch, token, head, total, inside, DIM)


@triton.jit
def _sum_rows_kernel(  # type: ignore[no-untyped-def]
    sizes,
    first,
    edges,
    out,
    terms,
    out_2,
    terms_2,
    dim_2,
    IN_PLACE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_2: tl.constexpr,
):
    """`_sum_of_rows` of one tensor, or of two, by two programs for the same rows."""
    if tl.program_id(1) == 0:
        _sum_of_rows(sizes, first, out, terms, edges, IN_PLACE, ROWS, DIM)
    elif out_2 is not None:
        tokens, heads, rows, _ = sizes
        sizes_2 = tokens, heads, rows, dim_2
        _sum_of_rows(sizes_2, first, out_2, terms_2, edges, IN_PLACE, ROWS, DIM_2)


def sum_rows(outs: Sequence[Tensor], terms: Sequence[Term], *, in_place: bool) -> None:
    """See `partial._sum_rows`."""
    like, start, stop = outs[0], 0, outs[0].shape[1]
    if len(terms) > _TERMS:
        every = slice(start, stop)
        each = [(every, (*outs,)), *terms] if in_place else terms
        wide = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in outs]
        sum_rows(wide, each[:_TERMS], in_place=False)
        sum_rows(outs, [(every, (*wide,)), *each[_TERMS:]], in_place=False)
        return
    if in_place:
        start, stop = min(x.start for x, _ in terms), max(x.stop for x, _ in terms)
    edges = [_of_any_value(edge) for rows, _ in terms for edge in (rows.start, rows.stop)]
    given: list[Any] = [_of_any_value(start), tuple(edges)]
    for out, *tensors in zip(outs, *[tensors for _, tensors in terms], strict=True):
        given += [(out, *out.stride()[:3]), tuple([(x, *x.stride()[:3]) for x in tensors])]
    given += [None, ()] if len(outs) == 1 else []
    dim_2 = outs[-1].shape[3]
    flags = {"programs": len(outs), "DIM_2": _power_of_2(dim_2), "IN_PLACE": in_place}
    _launch(_sum_rows_kernel, like, stop - start, *given, dim_2, **flags)


def add_rows_into(total: Tensor, to: Tensor, b: Tensor, of: Tensor | None) -> None:
    """Adds some rows of b (None: all) to some rows of total, [B,S,heads,D], in float32.

    Args: to, of: [n] int32, none twice.
    """
    _launch(_sum_kernel, total, len(to), total, total, b, to, to, of)


def rows_at(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows of [B,S,heads,D], in their order, contiguous. Args: rows: [n] int32."""
    out = x.new_empty((x.shape[0], len(rows), *x.shape[2:]))
    _launch(_sum_kernel, out, len(rows), out, x, None, None, rows, None)
    return out


def write_rows(out: Tensor, to: Tensor, x: Tensor) -> None:
    """Writes the rows of x [B,n,heads,D] to some rows of out. Args: to: [n] int32; a number beyond
    the rows of `out` means a row behind it in memory.
    """
    _launch(_sum_kernel, x, len(to), out, x, None, to, None, None)


@triton.jit
def _delta_kernel(  # type: ignore[no-untyped-def]
    sizes, delta, dout, out, ROWS: tl.constexpr, DIM: tl.constexpr
):
    batch, token, head, live, inside = _program_rows(sizes, ROWS, DIM)
    product = _loaded(dout, batch, token, head, inside, DIM)
    product *= _loaded(out, batch, token, head, inside, DIM)
    tl.store(_at_row(delta, batch, head, token), tl.sum(product, 1), live)


def delta_of(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout * out): [B,S,H,D] twice -> [B,H,S] float32."""
    batch, tokens, heads, _ = out.shape
    delta = torch.empty((batch, heads, tokens), dtype=torch.float32, device=out.device)
    _launch(_delta_kernel, out, tokens, delta, dout, out)
    return delta


@triton.jit
def _placeholder_kernel(  # type: ignore[no-untyped-def]
    sizes, out, dout, delta, ROWS: tl.constexpr, DIM: tl.constexpr, TERMS: tl.constexpr
):
    batch, token, head, live, inside = _program_rows(sizes, ROWS, DIM)
    column = tl.arange(0, DIM)
    given = _loaded(dout, batch, token, head, inside, DIM)
    rest = tl.load(_at_row(delta, batch, head, token), live, 0.0)
    left = tl.where(inside, tl.abs(given), -1.0)
    found = tl.zeros((ROWS, DIM), tl.float32)
    for index in tl.static_range(TERMS):
        here = column[None, :] == tl.argmax(left, 1)[:, None]
        term = tl.sum(tl.where(here, given, 0.0), 1)
        value = (rest / term).to(out[0].dtype.element_ty).to(tl.float32)
        if index:
            value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
        else:
            value = tl.where(term != 0, value, rest)
        rest -= value * term
        found = tl.where(here, value[:, None], found)
        left = tl.where(here, -1.0, left)
    _store(out, batch, token, head, found, inside, DIM)


def placeholder_out(dout: Tensor, delta: Tensor) -> Tensor:
    """See `partial.placeholder_out`. Args: dout: its head dim is contiguous. delta: float32."""
    if dout.dim() == 3:
        return placeholder_out(dout[None], delta[None])[0]
    out, terms = torch.empty_like(dout), min(PLACEHOLDER_TERMS, dout.shape[3])
    _launch(_placeholder_kernel, dout, dout.shape[1], out, dout, delta, TERMS=terms)
    return out


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    sizes, out, a, b, scale_ptr, x, share_ptr, ROWS: tl.constexpr, DIM: tl.constexpr
):
    batch, token, head, live, inside = _program_rows(sizes, ROWS, DIM)
    place = batch * sizes[0] + token
    product = _loaded(a, batch, token, head, inside, DIM)
    product *= _loaded(b, batch, token, head, inside, DIM)
    product *= tl.load(scale_ptr + place, live, 0.0)[:, None]
    if x is not None:
        share = tl.load(share_ptr + place, live, 0.0)[:, None]
        product -= _loaded(x, batch, token, head, inside, DIM) * share
    _store(out, batch, token, head, product, inside, DIM)


def product_into(
    out: Tensor, a: Tensor, b: Tensor, scale: Tensor, less: tuple[Tensor, Tensor] | None = None
) -> None:
    """out = a * b * scale - x * share in float32, with less = (x, share) or without.

    Args: out, a, b, x: [B,S,H,D], any strides but 1 of the last; scale, share: [B,S] float32.
    """
    x, share = (None, None) if less is None else (less[0], less[1].contiguous())
    _launch(_product_kernel, out, out.shape[1], out, a, b, scale.contiguous(), x, share)
