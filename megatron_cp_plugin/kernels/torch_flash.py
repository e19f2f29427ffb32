"""The flash kernels that torch itself ships: CPU, CUDA FlashAttention-2, cuDNN.

All take GQA without expanding and return the natural-log lse. Called as aten operators, for
scaled_dot_product_attention does not return lse.
"""

import torch
from torch import Tensor

from megatron_cp_plugin.kernels.base import Packed, Problem, SoftmaxKernel, Statistics, gpu_reason

_aten = torch.ops.aten


def _swap(x: Tensor) -> Tensor:
    """[B,S,H,D] <-> [B,H,S,D], a view."""
    return x.transpose(1, 2)


class CpuFlashAttention(SoftmaxKernel):
    """torch's CPU flash kernel: float64, float32, bfloat16, float16."""

    name = "torch_cpu"
    deterministic = True

    def unsupported(self, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return f"runs on cpu, got tensors on {problem.device.type}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            _swap(q), _swap(k), _swap(v), 0.0, causal, scale=scale
        )
        return _swap(out), lse

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
        lse = statistics.lse.transpose(1, 2).contiguous().transpose(1, 2)  # as forward gives it
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _swap(dout),
            _swap(q),
            _swap(k),
            _swap(v),
            _swap(statistics.out_for(dout)),
            lse,
            0.0,
            causal,
            scale=scale,
        )
        return _swap(dq), _swap(dk), _swap(dv)


class CudaFlashAttention(SoftmaxKernel):
    """torch's own build of FlashAttention-2 (CUDA, compute capability 8.0 and newer)."""

    name = "torch_flash"
    deterministic = True  # it looks at torch's setting itself

    def unsupported(self, problem: Problem) -> str | None:
        return gpu_reason(problem, range(8, 257, 8), (8, 0))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
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
        tensors = dout, q, k, v, statistics.out_for(dout), statistics.lse.contiguous()
        return self._backward(
            tensors, (None, None, q.shape[1], k.shape[1]), scale=scale, causal=causal
        )

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], *, scale: float
    ) -> tuple[Tensor, Tensor]:
        documents = Packed.of(bounds, q.shape[0], q.device)
        out, lse, *_ = _aten._flash_attention_forward(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            *(documents.cu_seqlens, documents.cu_seqlens, documents.longest, documents.longest),
            0.0,
            True,
            False,
            scale=scale,
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
        documents, batch = Packed.of(bounds, q.shape[0], q.device), q.shape[0]
        out, lse = statistics.out_for(dout), statistics.flattened().lse
        tensors = (*(x.flatten(0, 1) for x in (dout, q, k, v, out)), lse.contiguous())
        lengths = documents.cu_seqlens, documents.cu_seqlens, documents.longest, documents.longest
        gradients = self._backward(tensors, lengths, scale=scale, causal=True)
        dq, dk, dv = (x.unflatten(0, (batch, -1)) for x in gradients)
        return dq, dk, dv

    def _backward(
        self,
        tensors: tuple[Tensor, ...],
        lengths: tuple[Tensor | None, Tensor | None, int, int],
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=tensors[0].device)
        dq, dk, dv = _aten._flash_attention_backward(
            *tensors, *lengths, 0.0, causal, no_dropout, no_dropout, scale=scale
        )
        return dq, dk, dv


class CudnnAttention(SoftmaxKernel):
    """cuDNN's fused attention (CUDA, compute capability 9.0 and newer).

    Not deterministic: torch does not ask cuDNN for its deterministic backward. Not for documents:
    it makes a plan for each new length, which takes some tenths of a second.
    """

    name = "cudnn"

    def unsupported(self, problem: Problem) -> str | None:
        if problem.documents:
            return "makes a plan for every new length, and documents have ever new ones"
        return gpu_reason(problem, range(8, 129, 8), (9, 0))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            _swap(q), _swap(k), _swap(v), None, True, 0.0, causal, False, scale=scale
        )
        return _swap(out), lse.squeeze(-1)

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
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            _swap(dout),
            _swap(q),
            _swap(k),
            _swap(v),
            _swap(statistics.out_for(dout)),
            statistics.lse.contiguous().unsqueeze(-1),
            no_dropout,
            no_dropout,
            None,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            scale=scale,
        )
        return _swap(dq), _swap(dk), _swap(dv)
