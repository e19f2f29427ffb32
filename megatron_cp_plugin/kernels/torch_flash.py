"""The flash kernels that torch itself ships: CPU, CUDA FlashAttention-2, cuDNN.

All take GQA without expanding and return the natural-log lse. Called as aten operators, for
scaled_dot_product_attention does not return lse.
"""

import torch
from torch import Tensor

from megatron_cp_plugin.core.kernel import (
    Gradients,
    KernelCall,
    Lengths,
    Problem,
    SoftmaxKernel,
    Statistics,
)
from megatron_cp_plugin.kernels.base import (
    FlashAttention2,
    by_heads,
    equal_dims_reason,
    far_apart,
    gpu_reason,
    wide_heads_reason,
    with_placeholder_out,
)
from megatron_cp_plugin.kernels.reference import Reference

_aten = torch.ops.aten  # its attention takes [B,H,S,D]


class CpuFlashAttention(SoftmaxKernel):
    """torch's CPU flash kernel: float64, float32, bfloat16, float16."""

    name = "torch_cpu"
    deterministic = True

    def unsupported(self, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return f"runs on cpu, got tensors on {problem.device.type}"
        return equal_dims_reason(problem)

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        swapped = [x.transpose(1, 2) for x in call[:3]]
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *swapped, 0.0, call.causal, scale=call.scale
        )
        return out.transpose(1, 2), lse

    def backward(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> Gradients:
        lse = statistics.lse.transpose(1, 2).contiguous().transpose(1, 2)  # as forward gives it
        given = dout, *call[:3], statistics.out_for(dout)
        swapped = [x.transpose(1, 2) for x in given]
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *swapped, lse, 0.0, call.causal, scale=call.scale
        )
        dq, dk, dv = [x.transpose(1, 2) for x in found]
        return dq, dk, dv


class CudaFlashAttention(FlashAttention2):
    """torch's own build of FlashAttention-2 (CUDA, compute capability 8.0 and newer)."""

    name = "torch_flash"
    deterministic = True  # it looks at torch's setting itself

    def unsupported(self, problem: Problem) -> str | None:
        return equal_dims_reason(problem) or gpu_reason(problem, (8, 0))

    def attend(self, call: KernelCall, lengths: Lengths | None) -> tuple[Tensor, Tensor]:
        q, k, v, scale, causal, *_ = call
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *_lengths_for(call, lengths), 0.0, causal, False, scale=scale
        )
        return out, lse

    def differentiate(
        self, call: KernelCall, dout: Tensor, statistics: Statistics, lengths: Lengths | None
    ) -> Gradients:
        q, k, v, scale, causal, *_ = call
        given = dout, q, k, v, statistics.out_for(dout), statistics.lse.contiguous()
        no_dropout = [torch.zeros(2, dtype=torch.uint64, device=q.device)] * 2
        dq, dk, dv = _aten._flash_attention_backward(
            *given, *_lengths_for(call, lengths), 0.0, causal, *no_dropout, scale=scale
        )
        return dq, dk, dv


def _lengths_for(
    call: KernelCall, lengths: Lengths | None
) -> tuple[Tensor | None, Tensor | None, int, int]:
    if lengths is None:
        return None, None, call.q.shape[1], call.k.shape[1]
    return lengths[:4]


class CudnnAttention(SoftmaxKernel):
    """cuDNN's fused attention (CUDA, compute capability 9.0 and newer).

    Not deterministic: torch does not ask cuDNN for its deterministic backward. Not for documents:
    it makes a plan for each new length, which takes some tenths of a second. Not for one key, for
    which PyTorch does not call it either: a softmax of one score is written out. The backward of
    queries of more than 2^31 elements is called for some heads at a time.
    """

    name = "cudnn"
    _of_one_key = Reference()

    def unsupported(self, problem: Problem) -> str | None:
        if problem.documents:
            return "builds a plan for every new length, and documents keep having new ones"
        return gpu_reason(problem, (9, 0)) or wide_heads_reason(problem)

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        if call.k.shape[1] == 1:
            return self._of_one_key.forward(call)
        swapped = [x.transpose(1, 2) for x in call[:3]]
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            *swapped, None, True, 0.0, call.causal, False, scale=call.scale
        )
        return out.transpose(1, 2), lse.squeeze(-1)

    def backward(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> Gradients:
        if call.k.shape[1] == 1:
            return self._of_one_key.backward(call, dout, statistics)
        statistics = Statistics(statistics.lse, out=statistics.out_for(dout))
        elements = max(call.q.numel(), dout.numel())
        return by_heads(self.name, elements, self._differentiate, call, dout, statistics)

    def _differentiate(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> Gradients:
        q, k, v, scale, causal, *_ = call
        assert statistics.out is not None
        # Else dq is wrong, and with it dk, without an error (torch 2.11 on an H200; the forward is
        # right).
        q, dout, out = (x.contiguous() if far_apart(x) else x for x in (q, dout, statistics.out))
        swapped = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        lse = statistics.lse.contiguous().unsqueeze(-1)
        no_dropout = [torch.zeros((), dtype=torch.int64, device=q.device)] * 2
        no_lengths = None, None, None, q.shape[1], k.shape[1]
        found = _aten._scaled_dot_product_cudnn_attention_backward(
            *swapped, lse, *no_dropout, *no_lengths, 0.0, causal, scale=scale
        )
        dq, dk, dv = [x.transpose(1, 2) for x in found]
        return dq, dk, dv

    def workspace(self, call: KernelCall, statistics: Statistics | None) -> int:
        """See SoftmaxKernel.workspace: float32 dQ and delta.

        With GQA also dK and dV of every query head.
        """
        if statistics is None:
            return 0
        batch, rows, heads, dim = call.q.shape
        (_, cols, kv_heads, _), value_dim = call.k.shape, call.v.shape[3]
        of_keys = cols * heads * (dim + value_dim) if heads > kv_heads else 0
        within = batch * (4 * rows * heads * (dim + 1) + of_keys * call.q.element_size())
        return with_placeholder_out(within, call, statistics)
