"""flash-attn 2, through the functions that its own autograd Function calls."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.core.kernel import Lengths, Problem, Statistics
from megatron_cp_plugin.kernels.base import (
    MOST_ELEMENTS,
    FlashAttention2,
    Gradients,
    by_heads,
    by_name,
    equal_dims_reason,
    gpu_reason,
)


class Flash2(FlashAttention2):
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
        from flash_attn.flash_attn_interface import _flash_attn_backward

        settings: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
        call = partial(_differentiate, _flash_attn_backward, **settings)
        return by_heads(self.name, self.accumulated(q), call, dout, q, k, v, statistics)

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

        settings: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
        given = dout, q, k, v, statistics
        if self.accumulated(q) <= MOST_ELEMENTS:
            _differentiate(_flash_attn_backward, *given, gradients=gradients, **settings)
            return
        found = self.backward(*given, scale=scale, causal=causal)
        for place, x in zip(gradients, found, strict=True):
            place.copy_(x)

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

        settings: dict[str, Any] = {"softmax_scale": scale, "causal": causal, **by_name(lengths)}
        return _differentiate(_flash_attn_varlen_backward, dout, q, k, v, statistics, **settings)


def _differentiate(
    function: Callable[..., object],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Statistics,
    *,
    gradients: Gradients | None = None,
    **settings: Any,
) -> Gradients:
    """Gradients, where they belong, or in new tensors."""
    gradients = gradients or (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
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
    return gradients


# What no tile here has.
_PLAIN: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}
