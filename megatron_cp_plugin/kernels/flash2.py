"""flash-attn 2, through the functions that its own autograd Function calls."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.core.kernel import Lengths, Problem, Statistics
from megatron_cp_plugin.kernels.base import (
    PackingKernel,
    by_name,
    equal_dims_reason,
    flash2_workspace,
    gpu_reason,
)


class Flash2(PackingKernel):
    """flash_attn.flash_attn_interface (2.7 and newer)."""

    name = "flash2"
    deterministic = True
    rectangular_causal = True
    places_gradients = True

    def unsupported(self, problem: Problem) -> str | None:
        if find_spec("flash_attn") is None or find_spec("flash_attn.flash_attn_interface") is None:
            return "needs the package flash-attn (version 2), which is not installed"
        return equal_dims_reason(problem) or gpu_reason(problem, range(8, 257, 8), (8, 0))

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
        gradients = _like(q, k, v)
        self.backward_to(gradients, dout, q, k, v, statistics, scale=scale, causal=causal)
        return gradients

    def backward_to(
        self,
        gradients: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        *,
        scale: float,
        causal: bool,
    ) -> None:
        from flash_attn.flash_attn_interface import _flash_attn_backward

        settings = {"softmax_scale": scale, "causal": causal}
        _differentiate(_flash_attn_backward, gradients, dout, q, k, v, statistics, **settings)

    def workspace(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics | None,
        *,
        causal: bool,
        sequences: int = 1,
    ) -> int:
        """See SoftmaxKernel.workspace: that of FlashAttention-2."""
        return flash2_workspace(q, k, v, statistics, sequences)

    def forward_flat(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        settings = {"softmax_scale": scale, "causal": causal, **by_name(lengths)}
        out, lse, *_ = _flash_attn_varlen_forward(
            q, k, v, return_softmax=False, **settings, **_PLAIN
        )
        return out, lse

    def backward_flat(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        lengths: Lengths,
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        settings = {"softmax_scale": scale, "causal": causal, **by_name(lengths)}
        gradients = _like(q, k, v)
        function = _flash_attn_varlen_backward
        _differentiate(function, gradients, dout, q, k, v, statistics, **settings)
        return gradients


def _like(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _differentiate(
    function: Callable[..., object],
    gradients: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Statistics,
    **settings: Any,
) -> None:
    function(
        dout,
        q,
        k,
        v,
        statistics.out_for(dout),
        statistics.lse.contiguous(),
        *gradients,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **settings,
        **_PLAIN,
    )


# What no tile here has.
_PLAIN: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}
