"""Triton kernels around attention: merges, sums and products in one pass each.

Every tensor is read once and written once, whatever its dtype and strides (the head dim is
contiguous); all arithmetic is float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_cp_plugin.core.partial import STAND_IN_TERMS
from megatron_cp_plugin.kernels.decayed import passed_along as passed_along
from megatron_cp_plugin.kernels.fused_loss import logit_gradients_ as logit_gradients_
from megatron_cp_plugin.kernels.fused_loss import logit_statistics as logit_statistics

_ROWS = 16


@triton.jit
def _rows(tokens, heads, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows [ROWS] of a program, in the order batch, token, head, and where they are."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = row % heads
    token = (row // heads) % tokens
    return row, row // (heads * tokens), token, head


@triton.jit
def _places(batch, token, head, column, by_b, by_s, by_h):  # type: ignore[no-untyped-def]
    """Offsets [ROWS,DIM] into a tensor [B,S,H,D] with these strides, and 1 of the last."""
    return (batch * by_b + token * by_s + head * by_h)[:, None] + column[None, :]


def _launch(
    kernel: Any,
    like: Tensor,
    tokens: int,
    given: Sequence[Tensor | int],
    strided: Sequence[Tensor],
    **flags: object,
) -> None:
    """Runs a kernel for each head of each token, if there are any.

    Args:
        kernel: takes `given`, tokens, heads, rows, dim, and three strides of each of `strided`.
        like: [B,*,H,D].
        strided: [B,S,H,D] or [B,H,S].
    """
    batch, _, heads, dim = like.shape
    if rows := batch * tokens * heads:
        strides = [stride for x in strided for stride in x.stride()[:3]]
        sizes = {"ROWS": _ROWS, "DIM": triton.next_power_of_2(dim)}
        grid = (triton.cdiv(rows, _ROWS),)
        kernel[grid](*given, tokens, heads, rows, dim, *strides, **sizes, **flags)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    lse_ptr,
    a_ptr,
    a_lse_ptr,
    b_ptr,
    b_lse_ptr,
    at_ptr,  # tokens of out and a, AT
    b_at_ptr,  # those of b, B_AT
    tokens,
    heads,
    rows,
    dim,
    out_b,
    out_s,
    out_h,
    lse_b,
    lse_h,
    lse_s,
    a_b,
    a_s,
    a_h,
    al_b,
    al_h,
    al_s,
    b_b,
    b_s,
    b_h,
    bl_b,
    bl_h,
    bl_s,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    AT: tl.constexpr,
    B_AT: tl.constexpr,
):
    row, batch, token, head = _rows(tokens, heads, ROWS)
    column = tl.arange(0, DIM)
    live = row < rows
    inside = live[:, None] & (column < dim)[None, :]
    place, b_place = token, token
    if AT:
        place = tl.load(at_ptr + token).to(tl.int64)
    if B_AT:
        b_place = tl.load(b_at_ptr + token).to(tl.int64)

    nothing = float("-inf")
    a_lse = tl.load(a_lse_ptr + batch * al_b + head * al_h + place * al_s, live, nothing)
    b_lse = tl.load(b_lse_ptr + batch * bl_b + head * bl_h + b_place * bl_s, live, nothing)
    high = tl.maximum(a_lse, b_lse)
    high = tl.where(high == nothing, 0.0, high)  # rows that neither part has a key for
    a_weight = tl.exp(a_lse - high)
    b_weight = tl.exp(b_lse - high)
    total = a_weight + b_weight
    empty = total == 0.0
    scale = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))

    a_at = _places(batch, place, head, column, a_b, a_s, a_h)
    b_at = _places(batch, b_place, head, column, b_b, b_s, b_h)
    a = tl.load(a_ptr + a_at, inside, 0.0).to(tl.float32)
    b = tl.load(b_ptr + b_at, inside, 0.0).to(tl.float32)
    merged = a * (a_weight * scale)[:, None] + b * (b_weight * scale)[:, None]
    # Each warp loads every lse, which may be written in place: all have loaded before one stores.
    tl.debug_barrier()
    out_at = _places(batch, place, head, column, out_b, out_s, out_h)
    tl.store(out_ptr + out_at, merged.to(out_ptr.dtype.element_ty), inside)
    lse = tl.where(empty, nothing, high + tl.log(tl.where(empty, 1.0, total)))
    tl.store(lse_ptr + batch * lse_b + head * lse_h + place * lse_s, lse, live)


def merge_into(
    out: Tensor, lse: Tensor, a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor
) -> None:
    """See `partial.merge_into`; with lse in float32."""
    _merge(out, lse, a, a_lse, b, b_lse, b.shape[1])


def merge_rows_into(
    out: Tensor, lse: Tensor, to: Tensor, b: Tensor, b_lse: Tensor, of: Tensor | None
) -> None:
    """Merges some rows of (b, b_lse) (None: all, in their order) into some of (out, lse).

    Args: out, b: [B,S,H,D], any floating dtype; lse, b_lse: [B,H,S] float32. to, of: [n] int32.
    """
    _merge(out, lse, out, lse, b, b_lse, len(to), to, of)


def _merge(
    out: Tensor,
    lse: Tensor,
    a: Tensor,
    a_lse: Tensor,
    b: Tensor,
    b_lse: Tensor,
    tokens: int,
    at: Tensor | None = None,
    b_at: Tensor | None = None,
) -> None:
    """Of so many tokens: out[at] = merge of a[at] and b[b_at]."""
    strided = out, lse, a, a_lse, b, b_lse
    indices = [lse if index is None else index for index in (at, b_at)]
    flags = {"AT": at is not None, "B_AT": b_at is not None}
    _launch(_merge_kernel, b, tokens, (*strided, *indices), strided, **flags)


@triton.jit
def _merge_all_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    lse_ptr,
    outs_ptr,
    lses_ptr,
    parts,
    out_p,  # from one of the partials to the next
    lse_p,
    tokens,
    heads,
    rows,
    dim,
    out_b,
    out_s,
    out_h,
    lse_b,
    lse_h,
    lse_s,
    o_b,
    o_s,
    o_h,
    l_b,
    l_h,
    l_s,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    row, batch, token, head = _rows(tokens, heads, ROWS)
    column = tl.arange(0, DIM)
    live = row < rows
    inside = live[:, None] & (column < dim)[None, :]
    nothing = float("-inf")
    lses_at = lses_ptr + batch * l_b + head * l_h + token * l_s
    outs_at = outs_ptr + _places(batch, token, head, column, o_b, o_s, o_h)
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
    out_at = _places(batch, token, head, column, out_b, out_s, out_h)
    tl.store(out_ptr + out_at, merged.to(out_ptr.dtype.element_ty), inside)
    lse = tl.where(empty, nothing, high + tl.log(tl.where(empty, 1.0, total)))
    tl.store(lse_ptr + batch * lse_b + head * lse_h + token * lse_s, lse, live)


def merge_all_into(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> None:
    """See `partial.merge_all_into`; with lse in float32."""
    given = out, lse, outs, lses, len(outs), outs.stride(0), lses.stride(0)
    _launch(_merge_all_kernel, out, out.shape[1], given, (out, lse, outs[0], lses[0]))


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    out_at_ptr,  # tokens of out, OUT_AT; and so on
    a_at_ptr,
    b_at_ptr,
    tokens,
    heads,
    rows,
    dim,
    out_b,
    out_s,
    out_h,
    a_b,
    a_s,
    a_h,
    b_b,
    b_s,
    b_h,
    c_b,
    c_s,
    c_h,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    COUNT: tl.constexpr,
    OUT_AT: tl.constexpr,
    A_AT: tl.constexpr,
    B_AT: tl.constexpr,
):
    row, batch, token, head = _rows(tokens, heads, ROWS)
    column = tl.arange(0, DIM)
    inside = (row < rows)[:, None] & (column < dim)[None, :]
    out_token, a_token, b_token = token, token, token
    if OUT_AT:
        out_token = tl.load(out_at_ptr + token).to(tl.int64)
    if A_AT:
        a_token = tl.load(a_at_ptr + token).to(tl.int64)
    if B_AT:
        b_token = tl.load(b_at_ptr + token).to(tl.int64)
    a_at = _places(batch, a_token, head, column, a_b, a_s, a_h)
    total = tl.load(a_ptr + a_at, inside, 0.0).to(tl.float32)
    if COUNT > 1:
        b_at = _places(batch, b_token, head, column, b_b, b_s, b_h)
        total += tl.load(b_ptr + b_at, inside, 0.0).to(tl.float32)
    if COUNT > 2:
        c_at = _places(batch, token, head, column, c_b, c_s, c_h)
        total += tl.load(c_ptr + c_at, inside, 0.0).to(tl.float32)
    tl.debug_barrier()  # out may be a, and a narrow row may be loaded by several warps
    out_at = _places(batch, out_token, head, column, out_b, out_s, out_h)
    tl.store(out_ptr + out_at, total.to(out_ptr.dtype.element_ty), inside)


def sum_into(out: Tensor, a: Tensor, *others: Tensor) -> None:
    """out = a + the others, two at most, [B,S,heads,D], summed in float32; out may be a."""
    _sum(out, (a, *others), out.shape[1])


def add_rows_into(total: Tensor, to: Tensor, b: Tensor, of: Tensor | None) -> None:
    """Adds some rows of b (None: all) to some rows of total, [B,S,heads,D], in float32.

    Args: to, of: [n] int32, none twice.
    """
    _sum(total, (total, b), len(to), to, to, of)


def rows_at(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows of [B,S,heads,D], in their order, contiguous. Args: rows: [n] int32."""
    out = x.new_empty((x.shape[0], len(rows), *x.shape[2:]))
    _sum(out, (x,), len(rows), None, rows)
    return out


def _sum(
    out: Tensor,
    parts: Sequence[Tensor],
    tokens: int,
    out_at: Tensor | None = None,
    a_at: Tensor | None = None,
    b_at: Tensor | None = None,
) -> None:
    """out[out_at] = a[a_at] + b[b_at] + c, of so many tokens. Args: parts: a, or more of these."""
    strided = out, *parts, *[parts[0]] * (3 - len(parts))
    places = out_at, a_at, b_at
    indices = [out if at is None else at for at in places]
    names = "OUT_AT", "A_AT", "B_AT"
    flags = {name: at is not None for name, at in zip(names, places, strict=True)}
    given = *strided, *indices
    _launch(_sum_kernel, out, tokens, given, strided, COUNT=len(parts), **flags)


@triton.jit
def _delta_kernel(  # type: ignore[no-untyped-def]
    delta_ptr,
    dout_ptr,
    out_ptr,
    tokens,
    heads,
    rows,
    dim,
    dout_b,
    dout_s,
    dout_h,
    out_b,
    out_s,
    out_h,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    row, batch, token, head = _rows(tokens, heads, ROWS)
    column = tl.arange(0, DIM)
    live = row < rows
    inside = live[:, None] & (column < dim)[None, :]
    dout_at = _places(batch, token, head, column, dout_b, dout_s, dout_h)
    out_at = _places(batch, token, head, column, out_b, out_s, out_h)
    dout = tl.load(dout_ptr + dout_at, inside, 0.0).to(tl.float32)
    out = tl.load(out_ptr + out_at, inside, 0.0).to(tl.float32)
    tl.store(delta_ptr + (batch * heads + head) * tokens + token, tl.sum(dout * out, 1), live)


def delta_of(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout * out): [B,S,H,D] twice -> [B,H,S] float32."""
    batch, tokens, heads, _ = out.shape
    delta = torch.empty((batch, heads, tokens), dtype=torch.float32, device=out.device)
    _launch(_delta_kernel, out, tokens, (delta, dout, out), (dout, out))
    return delta


@triton.jit
def _stand_in_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    dout_ptr,
    delta_ptr,
    tokens,
    heads,
    rows,
    dim,
    out_b,
    out_s,
    out_h,
    dout_b,
    dout_s,
    dout_h,
    delta_b,
    delta_h,
    delta_s,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    TERMS: tl.constexpr,
):
    row, batch, token, head = _rows(tokens, heads, ROWS)
    column = tl.arange(0, DIM)
    live = row < rows
    inside = live[:, None] & (column < dim)[None, :]
    dout_at = _places(batch, token, head, column, dout_b, dout_s, dout_h)
    dout = tl.load(dout_ptr + dout_at, inside, 0.0).to(tl.float32)
    rest = tl.load(delta_ptr + batch * delta_b + head * delta_h + token * delta_s, live, 0.0)
    left = tl.where(inside, tl.abs(dout), -1.0)
    out = tl.zeros((ROWS, DIM), tl.float32)
    for index in tl.static_range(TERMS):
        here = column[None, :] == tl.argmax(left, 1)[:, None]
        term = tl.sum(tl.where(here, dout, 0.0), 1)
        value = (rest / term).to(out_ptr.dtype.element_ty).to(tl.float32)
        if index:
            value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
        else:
            value = tl.where(term != 0, value, rest)
        rest -= value * term
        out = tl.where(here, value[:, None], out)
        left = tl.where(here, -1.0, left)
    out_at = _places(batch, token, head, column, out_b, out_s, out_h)
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), inside)


def stand_in_of(dout: Tensor, delta: Tensor) -> Tensor:
    """See `partial.stand_in_of`. Args: dout: its head dim is contiguous. delta: float32."""
    if dout.dim() == 3:
        return stand_in_of(dout[None], delta[None])[0]
    out = torch.empty_like(dout)
    given, terms = (out, dout, delta), min(STAND_IN_TERMS, dout.shape[3])
    _launch(_stand_in_kernel, dout, dout.shape[1], given, given, TERMS=terms)
    return out


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    a_ptr,
    b_ptr,
    scale_ptr,
    x_ptr,
    share_ptr,
    tokens,
    heads,
    rows,
    dim,
    out_b,
    out_s,
    out_h,
    a_b,
    a_s,
    a_h,
    b_b,
    b_s,
    b_h,
    x_b,
    x_s,
    x_h,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    LESS: tl.constexpr,
):
    row, batch, token, head = _rows(tokens, heads, ROWS)
    column = tl.arange(0, DIM)
    live = row < rows
    inside = live[:, None] & (column < dim)[None, :]
    a_at = _places(batch, token, head, column, a_b, a_s, a_h)
    b_at = _places(batch, token, head, column, b_b, b_s, b_h)
    a = tl.load(a_ptr + a_at, inside, 0.0).to(tl.float32)
    b = tl.load(b_ptr + b_at, inside, 0.0).to(tl.float32)
    product = a * b * tl.load(scale_ptr + row // heads, live, 0.0)[:, None]
    if LESS:
        x_at = _places(batch, token, head, column, x_b, x_s, x_h)
        x = tl.load(x_ptr + x_at, inside, 0.0).to(tl.float32)
        product -= x * tl.load(share_ptr + row // heads, live, 0.0)[:, None]
    out_at = _places(batch, token, head, column, out_b, out_s, out_h)
    tl.store(out_ptr + out_at, product.to(out_ptr.dtype.element_ty), inside)


def product_into(
    out: Tensor, a: Tensor, b: Tensor, scale: Tensor, less: tuple[Tensor, Tensor] | None = None
) -> None:
    """out = a * b * scale - x * share in float32, with less = (x, share) or without.

    Args: out, a, b, x: [B,S,H,D], any strides but 1 of the last; scale, share: [B,S] float32.
    """
    x, share = less or (a, scale)
    given = out, a, b, scale.contiguous(), x, share.contiguous()
    _launch(_product_kernel, out, out.shape[1], given, (out, a, b, x), LESS=less is not None)
