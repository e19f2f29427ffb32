"""The one autograd Function of all softmax algorithms."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_cp_plugin.core.algorithm import Algorithm, Call
from megatron_cp_plugin.core.comm import communicating_in
from megatron_cp_plugin.core.recompute import computed_once
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.kernels.base import Problem, resolve


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        algorithm: Algorithm,
        call: Call,
        site: Hashable | None,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()

        def compute() -> tuple[Tensor, ...]:
            out, _, saved = algorithm.forward(q, k, v, call)
            return (out, *saved)

        with communicating_in("forward"):
            out, *saved = computed_once(site, (q, k, v), compute)
        ctx.save_for_backward(*saved)
        ctx.algorithm, ctx.call = algorithm, call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        with communicating_in("backward"):
            gradients = ctx.algorithm.backward(dout.contiguous(), ctx.saved_tensors, ctx.call)
        return (*gradients, None, None, None)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    algorithm: Algorithm,
    seq_len: int,
    causal: bool = True,
    scale: float | None = None,
    kernel: str = "auto",
    window: int | None = None,
    site: Hashable | None = None,
) -> Tensor:
    """Attention of the local queries over the keys of all ranks; differentiable.

    Args:
        q: [B,S,H,D]; k, v: [B,S,G,D] with G dividing H: this rank's shards, in the order of
            algorithm.layout. seq_len: global N. scale: of the scores, default D**-0.5. window: as
            in Mask. site: as in `recompute.computed_once`.

    Returns: out [B,S,H,D] in q's dtype. Raises: ContextParallelError if shapes or dtypes do not
    fit; KernelUnavailableError if the kernel cannot serve them.
    """
    _check(q, k, v, algorithm, seq_len)
    heads, head_dim = q.shape[2:]
    problem = Problem(q.device, q.dtype, heads, k.shape[2], head_dim)
    algorithm.check(
        algorithm.options,
        size=algorithm.topology.size,
        heads=heads,
        kv_heads=k.shape[2],
        causal=causal,
    )
    mask = Mask(causal, window)
    if window is not None and not algorithm.windows:
        raise ContextParallelError(
            f"{algorithm.name} does not serve sliding windows, got window {window}: leave it out"
        )
    scale = head_dim**-0.5 if scale is None else scale
    call = Call(seq_len, mask, scale, resolve(kernel, problem))
    return _Attention.apply(q, k, v, algorithm, call, site)


def _check(q: Tensor, k: Tensor, v: Tensor, algorithm: Algorithm, seq_len: int) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ContextParallelError(f"attention needs q [B,S,H,D] and k, v [B,S,G,D], {shapes}")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ContextParallelError(f"q, k, v need equal batch, tokens and head dim, {shapes}")
    if q.shape[2] % k.shape[2]:
        raise ContextParallelError(f"query heads must be a multiple of KV heads, {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ContextParallelError(
            f"q, k, v need one dtype, got {q.dtype}, {k.dtype}, {v.dtype}: cast them first"
        )
    rank, size = algorithm.topology.rank, algorithm.topology.size
    expected = algorithm.layout.length(rank, size, seq_len)
    if q.shape[1] != expected:
        raise ContextParallelError(
            f"rank {rank} of {size} holds {expected} of {seq_len} tokens ({algorithm.layout.name} "
            f"layout), got {q.shape[1]}: pass seq_len=, or shard with cp.shard"
        )
