"""flash-attn 4 (flash_attn.cute), compiled for the device at first use of a shape."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.kernels.base import Packed, PackingKernel, Problem, Statistics, gpu_reason


class Flash4(PackingKernel):
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
        return self._forward(q, k, v, softmax_scale=scale, causal=causal)

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

    def forward_flat(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Packed, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, softmax_scale=scale, causal=True, **documents.settings)

    def backward_flat(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        documents: Packed,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        settings = {"softmax_scale": scale, "causal": True, **documents.settings}
        return self._backward(dout, q, k, v, statistics, **settings)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **settings)
        return out, lse

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
