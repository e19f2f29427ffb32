"""Triton kernels for the loss: each row of logits is read once, nothing is written in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _logit_statistics_kernel(  # type: ignore[no-untyped-def]
    lse_ptr,
    target_ptr,
    logits_ptr,
    wanted_ptr,
    scale_ptr,
    entropy_ptr,
    vocabulary,
    by_row,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row)
    nothing = float("-inf")
    high = tl.full((), nothing, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    below = tl.full((), 0.0, tl.float32)  # sum of exp(x - high) (high - x)
    for start in range(0, vocabulary, BLOCK):
        inside = start + column < vocabulary
        x = tl.load(logits_ptr + row * by_row + start + column, inside, nothing).to(tl.float32)
        if scale_ptr is not None:
            x *= scale
        higher = tl.maximum(high, tl.max(x, 0))
        base = tl.where(higher == nothing, 0.0, higher)  # where all logits are -inf so far
        shrink = tl.exp(high - base)
        part = tl.exp(x - base)
        if entropy_ptr is not None:
            rise = tl.where(high == nothing, 0.0, base - high)
            short = tl.where(x == nothing, 0.0, base - x)
            below = shrink * (below + total * rise) + tl.sum(part * short, 0)
        total = total * shrink + tl.sum(part, 0)
        high = higher
    tl.store(lse_ptr + row, tl.log(total) + tl.where(high == nothing, 0.0, high))
    wanted = tl.load(wanted_ptr + row).to(tl.int64)
    here = (wanted >= 0) & (wanted < vocabulary)
    target = tl.load(logits_ptr + row * by_row + wanted, here, 0.0).to(tl.float32)
    if scale_ptr is not None:
        target *= scale
    tl.store(target_ptr + row, target)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, tl.log(total) + below / total)


def logit_statistics(
    logits: Tensor, wanted: Tensor, scale: Tensor | None = None, entropy: bool = False
) -> tuple[Tensor, ...]:
    """As `token_losses.logit_statistics`, in float32. Args: logits: columns are contiguous."""
    rows, vocabulary = logits.shape
    found = tuple(
        torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2 + entropy)
    )
    if rows:
        _logit_statistics_kernel[(rows,)](
            *found[:2],
            logits,
            wanted.contiguous(),
            None if scale is None else scale.contiguous(),
            found[2] if entropy else None,
            vocabulary,
            logits.stride(0),
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=8,
        )
    return found


@triton.jit
def _logit_gradients_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    wanted_ptr,
    lse_ptr,
    dloss_ptr,
    scale_ptr,
    entropy_ptr,
    dentropy_ptr,
    vocabulary,
    by_row,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    at = logits_ptr + row * by_row + column
    x = tl.load(at, inside, 0.0).to(tl.float32)
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row)
        x *= scale
    wanted = tl.load(wanted_ptr + row)
    x -= tl.load(lse_ptr + row)  # the logarithm of the probability
    probability = tl.exp(x)
    gradient = (probability - tl.where(column == wanted, 1.0, 0.0)) * tl.load(dloss_ptr + row)
    if dentropy_ptr is not None:
        more = probability * (tl.maximum(x, -1e30) + tl.load(entropy_ptr + row))
        gradient -= more * tl.load(dentropy_ptr + row)
    if scale_ptr is not None:
        gradient *= scale
    tl.store(at, gradient.to(logits_ptr.dtype.element_ty), inside)


def logit_gradients_(
    logits: Tensor,
    wanted: Tensor,
    lse: Tensor,
    dloss: Tensor,
    scale: Tensor | None = None,
    entropy: Tensor | None = None,
    dentropy: Tensor | None = None,
) -> None:
    """As `token_losses.logit_gradients_`, in float32. Args: logits: columns are contiguous."""
    rows, vocabulary = logits.shape
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    of_rows = (wanted, lse, dloss, scale, entropy, dentropy)
    if rows:
        _logit_gradients_kernel[(rows, triton.cdiv(vocabulary, block))](
            logits,
            *(None if x is None else x.contiguous() for x in of_rows),
            vocabulary,
            logits.stride(0),
            BLOCK=block,
            num_warps=8,
        )
