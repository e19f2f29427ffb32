"""flash-attn 2, through the functions that its own autograd Function calls."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.core.kernel import Gradients, KernelCall, Lengths, Problem, Statistics
from megatron_cp_plugin.kernels.base import FlashAttention2, by_name, equal_dims_reason, gpu_reason


class Flash2(FlashAttention2):
    """flash_attn.flash_attn_interface (2.7 and newer)."""

    name = "flash2"
    deterministic = True
    rectangular_causal = True
    places_gradients = True

    def unsupported(self, problem: Problem) -> str | None:
        if find_spec("flash_attn") is None or find_spec("flash_attn.flash_attn_interface") is None:
            return "needs the package flash-attn (version 2), which is not installed"
        return equal_dims_reason(problem) or gpu_reason(problem, (8, 0))

    def attend(self, call: KernelCall, lengths: Lengths | None) -> tuple[Tensor, Tensor]:
        from flash_attn import flash_attn_interface as interface

        function = interface._flash_attn_forward
        if lengths is not None:
            function = interface._flash_attn_varlen_forward
        settings = _arguments(call, lengths)
        out, lse, *_ = function(call.q, call.k, call.v, return_softmax=False, **settings)
        return out, lse

    def differentiate(
        self, call: KernelCall, dout: Tensor, statistics: Statistics, lengths: Lengths | None
    ) -> Gradients:
        from flash_attn import flash_attn_interface as interface

        function = interface._flash_attn_backward
        if lengths is not None:
            function = interface._flash_attn_varlen_backward
        given = call.q, call.k, call.v
        dq, dk, dv = call.into or [torch.empty_like(x) for x in given]
        function(
            dout,
            *given,
            statistics.out_for(dout),
            statistics.lse.contiguous(),
            dq,
            dk,
            dv,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_arguments(call, lengths),
        )
        return dq, dk, dv


def _arguments(call: KernelCall, lengths: Lengths | None) -> dict[str, Any]:
    of_lengths = {} if lengths is None else by_name(lengths)
    return {"softmax_scale": call.scale, "causal": call.causal, **of_lengths, **_PLAIN}


# What no tile here has.
_PLAIN: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}
