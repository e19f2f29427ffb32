"""gate * x / rms(x), which keeps only x, gate and one number per token for the backward.

s tokens, b batch, h heads of this tensor-parallel rank, d head dim. Arithmetic is float32 (float64
for float64). With w channels of all ranks, for a token

    scale = (sum(x^2) / w + epsilon)^(-1/2)     out = gate x scale
    dgate = dout x scale                        dx = dout gate scale - x scale^2 sum(dgate gate) / w
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_cp_plugin.core.autograd.function import differentiable_once
from megatron_cp_plugin.core.partial import delta_of


def gated_norm(x: Tensor, gate: Tensor, epsilon: float, group: dist.ProcessGroup) -> Tensor:
    """Returns gate * x / rms(x) [s,b,h,d], with the mean over all heads of a token on all ranks."""
    out: Tensor = _GatedNorm.apply(x, gate, epsilon, group)
    return out


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, epsilon: float, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.group, ctx.width = group, x.shape[2] * x.shape[3] * group.size()
        scale = torch.rsqrt(_total(x, x, group) / ctx.width + epsilon)
        ctx.save_for_backward(x, gate, scale)
        return _write_product(x.new_empty(x.shape), x, gate, scale)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, scale = ctx.saved_tensors
        dout = dout.contiguous()
        dgate = _write_product(torch.empty_like(dout), dout, x, scale)
        share = _total(dgate, gate, ctx.group) * scale.square() / ctx.width
        dx = _write_product(torch.empty_like(x), dout, gate, scale, (x, share))
        return dx, dgate, None, None


def _total(a: Tensor, b: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a * b over the heads of all ranks: [s,b,h,d] twice -> [s,b]."""
    total = delta_of(a, b).sum(1)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


def _write_product(
    out: Tensor, a: Tensor, b: Tensor, scale: Tensor, less: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Writes a * b * scale - x * share of less = (x, share), with scale and share [s,b], to out."""
    if a.is_cuda and a.dtype != torch.float64:
        from megatron_cp_plugin.kernels import fused

        fused.product_into(out, a, b, scale, less)
        return out
    product = a.to(scale.dtype) * b * scale[..., None, None]
    if less is not None:
        x, share = less
        product -= x * share[..., None, None]
    return out.copy_(product)
