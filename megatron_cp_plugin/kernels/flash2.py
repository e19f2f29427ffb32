"""flash-attn 2, through the functions that its own autograd Function calls."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.kernels.base import Packed, Problem, SoftmaxKernel, Statistics, gpu_reason


class Flash2(SoftmaxKernel):
    """flash_attn.flash_attn_interface (2.7 and newer)."""

    name = "flash2"
    deterministic = True
    rectangular_causal = True

    def unsupported(self, problem: Problem) -> str | None:
        if find_spec("flash_attn") is None or find_spec("flash_attn.flash_attn_interface") is None:
            return "needs the package flash-attn (version 2), which is not installed"
        return gpu_reason(problem, range(8, 257, 8), (8, 0))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_forward

        out, lse, *_ = _flash_attn_forward(
            q, k, v, softmax_scale=scale, causal=causal, return_softmax=False, **_PLAIN
        )
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_backward

        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        _flash_attn_backward(
            dout,
            q,
            k,
            v,
            statistics.out_for(dout),
            statistics.lse.contiguous(),
            dq,
            dk,
            dv,
            softmax_scale=scale,
            causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_PLAIN,
        )
        return dq, dk, dv

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], *, scale: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out, lse, *_ = _flash_attn_varlen_forward(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            softmax_scale=scale,
            causal=True,
            return_softmax=False,
            **_PLAIN,
            **Packed.of(bounds, q.shape[0], q.device).settings,
        )
        return out.view(q.shape), lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1)

    def backward_packed(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        bounds: tuple[int, ...],
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _flash_attn_varlen_backward(
            dout.flatten(0, 1),
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            statistics.out_for(dout).flatten(0, 1),
            statistics.flattened().lse.contiguous(),
            dq.flatten(0, 1),
            dk.flatten(0, 1),
            dv.flatten(0, 1),
            softmax_scale=scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_PLAIN,
            **Packed.of(bounds, q.shape[0], q.device).settings,
        )
        return dq, dk, dv


# What no tile here has.
_PLAIN: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}
