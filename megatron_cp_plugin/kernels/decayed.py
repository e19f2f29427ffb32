"""Triton kernels of states: what they add to the tokens after them, and how they pass runs."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.linear.runs import Interval

_TOKENS = 64
_TILES = 16
_WIDEST = 128  # a transition fits in shared memory


@triton.jit(do_not_specialize=["longest", "batch", "tokens"])
def _add_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    state_ptr,
    log2_rate_ptr,
    interval_ptr,
    longest,
    batch,
    tokens,
    heads,
    x_dim,
    out_dim,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    X_DIM: tl.constexpr,
    OUT_DIM: tl.constexpr,
):
    # Of a grid's dimensions only the first takes more than 65535.
    parts = tl.cdiv(longest, TILES * TOKENS)
    first = tl.program_id(0) % parts * TILES * TOKENS
    sequence = (tl.program_id(0) // parts).to(tl.int64)
    head = sequence % heads
    entry = sequence // heads % batch
    interval = sequence // heads // batch
    start = tl.load(interval_ptr + 2 * interval).to(tl.int64)
    count = tl.load(interval_ptr + 2 * interval + 1) - start
    log2_rate = tl.load(log2_rate_ptr + head)
    # Behind some distance of a decaying head nothing is left to add.
    if tl.exp2(log2_rate * (first + 1)) > 0:
        in_column = tl.arange(0, X_DIM)
        in_live = in_column < x_dim
        column = tl.program_id(1) * OUT_DIM + tl.arange(0, OUT_DIM)
        live = column < out_dim
        state_at = (sequence * x_dim + in_column[:, None]) * out_dim + column[None, :]
        state = tl.load(state_ptr + state_at, in_live[:, None] & live[None, :], 0.0)
        state = state.to(x_ptr.dtype.element_ty)
        for tile in tl.range(TILES, num_stages=2):
            token = first + tile * TOKENS + tl.arange(0, TOKENS)
            inside = (token < count)[:, None]
            row = (entry * tokens + start + token) * heads + head
            x_at = row[:, None] * x_dim + in_column[None, :]
            x = tl.load(x_ptr + x_at, inside & in_live[None, :], 0.0)
            added = tl.dot(x, state) * tl.exp2(log2_rate * (token + 1))[:, None]
            out_at = row[:, None] * out_dim + column[None, :]
            out_inside = inside & live[None, :]
            out = tl.load(out_ptr + out_at, out_inside, 0.0).to(tl.float32) + added
            tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), out_inside)


def add_decayed_(
    out: Tensor, x: Tensor, states: Tensor, log2_rates: Tensor, intervals: Sequence[Interval]
) -> None:
    """out_t += rate**t * state^T x_t in place, for tokens t = 1, 2, ... of an interval that begins
    with the state; summed in float32.

    Args: out: [B,S,H,E], x: [B,S,H,D] bfloat16; states: [n,B,H,D,E] float32; log2_rates: [H]
        float32; intervals: local tokens (start, stop) for each of n; tensors are contiguous.
    """
    batch, tokens, heads, x_dim = x.shape
    out_dim = out.shape[3]
    columns = min(128, _power_of_two(out_dim))
    longest = max([stop - start for start, stop in intervals])
    # Triton's own functions of integers take longer on the host.
    grid = (
        -(-longest // (_TILES * _TOKENS)) * len(intervals) * batch * heads,
        -(-out_dim // columns),
    )
    _add_kernel[grid](
        out,
        x,
        states.contiguous(),
        log2_rates,
        _on_device(tuple(intervals), x.device),
        longest,
        batch,
        tokens,
        heads,
        x_dim,
        out_dim,
        TILES=_TILES,
        TOKENS=_TOKENS,
        X_DIM=_power_of_two(x_dim),
        OUT_DIM=columns,
        num_warps=8,
    )


@triton.jit
def _pass_kernel(  # type: ignore[no-untyped-def]
    found_ptr,
    added_ptr,
    through_ptr,
    first_ptr,
    bound_ptr,
    order_ptr,
    begins_ptr,
    heads,  # of all batch entries
    dim,
    width,
    added_run,
    added_head,
    through_run,
    through_head,
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    head = (tl.program_id(0) % heads).to(tl.int64)
    way = tl.program_id(0) // heads
    row = tl.arange(0, DIM)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at = row[:, None] * width + column[None, :]
    inside = (row < dim)[:, None] & (column < width)[None, :]
    matrix_at = row[:, None] * dim + row[None, :]
    in_matrix = (row < dim)[:, None] & (row < dim)[None, :]
    state = tl.zeros([DIM, WIDTH], dtype=tl.float32)
    if FIRST:  # noqa: SIM102  (the second is of the GPU)
        if tl.load(begins_ptr + way) != 0:
            state = tl.load(first_ptr + head * dim * width + at, inside, 0.0)
    for number in range(tl.load(bound_ptr + way), tl.load(bound_ptr + way + 1)):
        run = tl.load(order_ptr + number).to(tl.int64)
        through = tl.load(
            through_ptr + run * through_run + head * through_head + matrix_at, in_matrix, 0.0
        )
        added = tl.load(added_ptr + run * added_run + head * added_head + at, inside, 0.0)
        state = tl.dot(through, state, input_precision="tf32x3") + added
    found = found_ptr + (way.to(tl.int64) * heads + head) * dim * width
    tl.store(found + at, state, inside)


def passed_along(
    added: Tensor,
    through: Tensor,
    first: Tensor | None,
    bounds: Tensor,
    order: Tensor,
    begins: Tensor,
) -> Tensor | None:
    """See `core.fused.FusedOperations.passed_along`; products of three TF32 parts, head dims up to
    128.
    """
    _, batch, heads, dim, width = added.shape
    if dim > _WIDEST:
        return None
    found = added.new_empty(len(begins), batch, heads, dim, width)
    columns = min(32, _power_of_two(width))
    _pass_kernel[len(begins) * batch * heads, -(-width // columns)](
        found,
        added,
        through,
        None if first is None else first.contiguous(),
        bounds,
        order,
        begins,
        batch * heads,
        dim,
        width,
        added.stride(0),
        added.stride(2),
        through.stride(0),
        through.stride(2),
        FIRST=first is not None,
        DIM=_power_of_two(dim),
        WIDTH=columns,
        num_warps=4,
        num_stages=2,
    )
    return found


def _power_of_two(dim: int) -> int:
    """The next one, of 16 or more."""
    return 1 << max(4, (dim - 1).bit_length())


@kept_on_device(maxsize=64)  # of some micro-batches
def _on_device(intervals: tuple[Interval, ...], device: torch.device) -> Tensor:
    """[n,2] int32."""
    return uploaded(torch.tensor(intervals, device="cpu"), device)
