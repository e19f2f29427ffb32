"""flash-attn 4 (flash_attn.cute), compiled for the device at first use of a shape."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.kernels.base import Packed, Problem, SoftmaxKernel, Statistics, gpu_reason


class Flash4(SoftmaxKernel):
    """flash_attn.cute.interface (Hopper and newer)."""

    name = "flash4"
    deterministic = True
    rectangular_causal = True

    def unsupported(self, problem: Problem) -> str | None:
        if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
            return "needs the package flash-attn-4, which is not installed"
        reason = gpu_reason(problem, (64, 128), (9, 0))
        if reason is not None or not problem.deterministic:
            return reason
        blackwell_12 = torch.cuda.get_device_capability(problem.device)[0] == 12
        return "has no deterministic backward on compute capability 12" if blackwell_12 else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
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
        return self._backward(dout, q, k, v, statistics, softmax_scale=scale, causal=causal)

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], *, scale: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            softmax_scale=scale,
            causal=True,
            return_lse=True,
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
        batch = q.shape[0]
        gradients = self._backward(
            dout.flatten(0, 1),
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            statistics.flattened(),
            softmax_scale=scale,
            causal=True,
            **Packed.of(bounds, batch, q.device).settings,
        )
        dq, dk, dv = (x.unflatten(0, (batch, -1)) for x in gradients)
        return dq, dk, dv

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        **settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_bwd

        out, dlse = statistics.out, None
        if out is None:
            # The kernel takes delta - dlse for delta, with delta = rowsum(dout * out) = 0 here.
            assert statistics.delta is not None
            out, dlse = torch.zeros_like(dout), statistics.delta.neg().contiguous()
        deterministic = torch.are_deterministic_algorithms_enabled()
        lse = statistics.lse.contiguous()
        dq, dk, dv, *_ = _flash_attn_bwd(
            q, k, v, out, dout, lse, dlse=dlse, deterministic=deterministic, **settings
        )
        return dq, dk, dv
