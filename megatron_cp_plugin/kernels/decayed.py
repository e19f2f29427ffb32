"""A Triton kernel that adds what states contribute to the tokens after them."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.linear.runs import Interval

_TOKENS = 64
_TILES = 16


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


def _power_of_two(dim: int) -> int:
    """The next one, of 16 or more."""
    return 1 << max(4, (dim - 1).bit_length())


@kept_on_device(maxsize=64)  # of some micro-batches
def _on_device(intervals: tuple[Interval, ...], device: torch.device) -> Tensor:
    """[n,2] int32."""
    return uploaded(torch.tensor(intervals, device="cpu"), device)
