"""flash-attn 2, through the functions that its own autograd Function calls."""

from importlib.util import find_spec

import torch
from torch import Tensor

from megatron_cp_plugin.kernels.base import Problem, SoftmaxKernel, Statistics, gpu_reason


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
            q,
            k,
            v,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
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
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv
