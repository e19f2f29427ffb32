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
    vocabulary,
    by_row,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    nothing = float("-inf")
    high = tl.full((), nothing, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + column < vocabulary
        x = tl.load(logits_ptr + row * by_row + start + column, inside, nothing).to(tl.float32)
        higher = tl.maximum(high, tl.max(x, 0))
        base = tl.where(higher == nothing, 0.0, higher)  # where all logits are -inf so far
        total = total * tl.exp(high - base) + tl.sum(tl.exp(x - base), 0)
        high = higher
    tl.store(lse_ptr + row, tl.log(total) + tl.where(high == nothing, 0.0, high))
    wanted = tl.load(wanted_ptr + row).to(tl.int64)
    here = (wanted >= 0) & (wanted < vocabulary)
    target = tl.load(logits_ptr + row * by_row + wanted, here, 0.0).to(tl.float32)
    tl.store(target_ptr + row, target)


def logit_statistics(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """As `core.chunked_loss.logit_statistics`, in float32. Args: logits: columns are contiguous."""
    rows, vocabulary = logits.shape
    lse, target = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in "lt")
    if rows:
        _logit_statistics_kernel[(rows,)](
            lse,
            target,
            logits,
            wanted.contiguous(),
            vocabulary,
            logits.stride(0),
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=8,
        )
    return lse, target


@triton.jit
def _logit_gradients_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    wanted_ptr,
    lse_ptr,
    dloss_ptr,
    vocabulary,
    by_row,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    at = logits_ptr + row * by_row + column
    x = tl.load(at, inside, 0.0).to(tl.float32)
    wanted = tl.load(wanted_ptr + row)
    probability = tl.exp(x - tl.load(lse_ptr + row))
    gradient = (probability - tl.where(column == wanted, 1.0, 0.0)) * tl.load(dloss_ptr + row)
    tl.store(at, gradient.to(logits_ptr.dtype.element_ty), inside)


def logit_gradients_(logits: Tensor, wanted: Tensor, lse: Tensor, dloss: Tensor) -> None:
    """As `core.chunked_loss.logit_gradients_`, in float32. Args: logits: columns are contiguous."""
    rows, vocabulary = logits.shape
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    if rows:
        _logit_gradients_kernel[(rows, triton.cdiv(vocabulary, block))](
            logits,
            wanted.contiguous(),
            lse.contiguous(),
            dloss.contiguous(),
            vocabulary,
            logits.stride(0),
            BLOCK=block,
            num_warps=8,
        )
