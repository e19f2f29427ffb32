"""The flash kernels that torch itself ships: CPU, CUDA FlashAttention-2, cuDNN.

All take GQA without expanding and return the natural-log lse. Called as aten operators, for
scaled_dot_product_attention does not return lse.
"""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from megatron_cp_plugin.core.kernel import Lengths, Problem, SoftmaxKernel, Statistics
from megatron_cp_plugin.core.pipeline import head_groups
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.kernels.base import (
    PackingKernel,
    equal_dims_reason,
    flash2_workspace,
    gpu_reason,
    wide_heads_reason,
    with_stand_in,
)
from megatron_cp_plugin.kernels.reference import Reference

_aten = torch.ops.aten  # its attention takes [B,H,S,D]

# How far apart elements of q may be for cuDNN's backward: beyond that dq is wrong, and with it dk,
# without an error (cuDNN of torch 2.11 on an H200; its forward is right).
_CUDNN_ELEMENTS = 2**31


class CpuFlashAttention(SoftmaxKernel):
    """torch's CPU flash kernel: float64, float32, bfloat16, float16."""

    name = "torch_cpu"
    deterministic = True

    def unsupported(self, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return f"runs on cpu, got tensors on {problem.device.type}"
        return equal_dims_reason(problem)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, scale=scale
        )
        return out.transpose(1, 2), lse

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
            dout.transpose(1, 2),
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            statistics.out_for(dout).transpose(1, 2),
            lse,
            0.0,
            causal,
            scale=scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class CudaFlashAttention(PackingKernel):
    """torch's own build of FlashAttention-2 (CUDA, compute capability 8.0 and newer)."""

    name = "torch_flash"
    deterministic = True  # it looks at torch's setting itself

    def unsupported(self, problem: Problem) -> str | None:
        return equal_dims_reason(problem) or gpu_reason(problem, range(8, 257, 8), (8, 0))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        lengths = None, None, q.shape[1], k.shape[1]
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, causal, False, scale=scale
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
        lengths = None, None, q.shape[1], k.shape[1]
        return _differentiate(dout, q, k, v, statistics, lengths, scale=scale, causal=causal)

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
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *lengths[:4], 0.0, causal, False, scale=scale
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
        return _differentiate(dout, q, k, v, statistics, lengths[:4], scale=scale, causal=causal)


def _differentiate(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Statistics,
    lengths: tuple[Tensor | None, Tensor | None, int, int],
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = _aten._flash_attention_backward(
        dout,
        q,
        k,
        v,
        statistics.out_for(dout),
        statistics.lse.contiguous(),
        *lengths,
        0.0,
        causal,
        no_dropout,
        no_dropout,
        scale=scale,
    )
    return dq, dk, dv


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
        return gpu_reason(problem, range(8, 257, 8), (9, 0)) or wide_heads_reason(problem)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        if k.shape[1] == 1:
            return self._of_one_key.forward(q, k, v, scale=scale, causal=causal)
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            None,
            True,
            0.0,
            causal,
            False,
            scale=scale,
        )
        return out.transpose(1, 2), lse.squeeze(-1)

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
        if k.shape[1] == 1:
            return self._of_one_key.backward(dout, q, k, v, statistics, scale=scale, causal=causal)
        out = statistics.out_for(dout)
        if max(map(_extent, (q, dout, out))) <= _CUDNN_ELEMENTS:
            return self._differentiate(
                dout, q, k, v, out, statistics.lse, scale=scale, causal=causal
            )
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        for entry, heads, kv in _parts(dout, q, k):
            some_dout, some_q, some_out = (x[entry, :, heads].contiguous() for x in (dout, q, out))
            some_k, some_v = (x[entry, :, kv].contiguous() for x in (k, v))
            lse = statistics.lse[entry, heads]
            dq[entry, :, heads], dk[entry, :, kv], dv[entry, :, kv] = self._differentiate(
                some_dout, some_q, some_k, some_v, some_out, lse, scale=scale, causal=causal
            )
        return dq, dk, dv

    def _differentiate(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            dout.transpose(1, 2),
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            out.transpose(1, 2),
            lse.contiguous().unsqueeze(-1),
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
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

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
        """See SoftmaxKernel.workspace: float32 dQ and delta.

        With GQA also dK and dV of every query head.
        """
        if statistics is None:
            return 0
        batch, rows, heads, dim = q.shape
        (_, cols, kv_heads, _), value_dim = k.shape, v.shape[3]
        of_keys = cols * heads * (dim + value_dim) if heads > kv_heads else 0
        within = batch * (4 * rows * heads * (dim + 1) + of_keys * q.element_size())
        return with_stand_in(within, q, v, statistics)


def _extent(x: Tensor) -> int:
    """Elements from the first to the last in memory, those between included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _parts(dout: Tensor, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Batch entries, query heads and KV heads of which cuDNN's backward is right.

    Raises: ContextParallelError if one KV head's queries are too many.
    """
    (batch, rows, heads, _), kv_heads = q.shape, k.shape[2]
    elements = rows * heads * max(q.shape[3], dout.shape[3])
    counts = (n for n in range(1, kv_heads + 1) if not kv_heads % n)
    count = next((n for n in counts if elements <= n * _CUDNN_ELEMENTS), None)
    if count is None:
        raise ContextParallelError(
            f"kernel cudnn needs at most {_CUDNN_ELEMENTS} elements of queries a KV head, got "
            f"{elements // kv_heads}: use kernel flash4 or torch_flash"
        )
    for entry, group in product(range(batch), head_groups(heads, kv_heads, count, share_kv=False)):
        yield slice(entry, entry + 1), group.q, group.kv
