"""flash-attn 4 (flash_attn.cute), compiled for the device at first use of a shape."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.kernels.base import Packed, PackingKernel, Problem, Statistics, gpu_reason

# Those with right results on an H200. With 40, 72 and 80, of which it says nothing, gradients are
# wrong by 100%; 112 it does not compile (4.0.0b36).
_HEAD_DIMS = (64, 96, 128, 192, 256)
_BEYOND_HOPPER = ((64, 64), (128, 128))


class Flash4(PackingKernel):
    """flash_attn.cute.interface (Hopper and newer)."""

    name = "flash4"
    deterministic = True
    rectangular_causal = True

    def unsupported(self, problem: Problem) -> str | None:
        if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
            return "needs the package flash-attn-4, which is not installed"
        reason = gpu_reason(problem, _HEAD_DIMS, (9, 0))
        if reason is not None:
            return reason
        capability, _ = torch.cuda.get_device_capability(problem.device)
        dims = problem.head_dim, problem.value_dim
        if capability != 9 and dims not in _BEYOND_HOPPER:
            return f"was tried on Hopper only with head dims {dims[0]}, {dims[1]}"
        if dims[0] != dims[1] and problem.heads != problem.kv_heads:
            return "takes values as wide as keys where query heads share them"
        if problem.deterministic and capability == 12:
            return "has no deterministic backward on compute capability 12"
        return None

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
