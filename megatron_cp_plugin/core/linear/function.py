"""The autograd Function of linear attention over a split sequence.

B batch, S local tokens, H heads, D head dim of q and k, E head dim of v.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.core.autograd.function import check_dtypes
from megatron_cp_plugin.core.autograd.guards import as_written, cast_inputs, differentiable_once
from megatron_cp_plugin.core.autograd.recompute import computed_once
from megatron_cp_plugin.core.comm import CommunicatingIn
from megatron_cp_plugin.core.communication.devices import check_devices
from megatron_cp_plugin.core.layout import unfit
from megatron_cp_plugin.core.linear.algorithm import LinearAlgorithm, LinearCall
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.kernel import LinearKernel, LinearProblem
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.errors import ConfigError, ContextParallelError


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        initial: Tensor | None,
        algorithm: LinearAlgorithm,
        call: LinearCall,
        site: Hashable | None,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()

        def compute() -> tuple[Tensor | None, ...]:
            out, final, saved = algorithm.forward(q, k, v, initial, call)
            return (out, final, *saved)

        inputs = (q, k, v) if initial is None else (q, k, v, initial)
        with CommunicatingIn("forward"), as_written(q.device):
            out, final, *saved = computed_once(site, inputs, compute)
        assert out is not None
        ctx.save_for_backward(*saved)
        ctx.algorithm, ctx.call, ctx.initial = algorithm, call, initial is not None
        return out, final

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        with CommunicatingIn("backward"), as_written(dout.device):
            dq, dk, dv, dinitial = ctx.algorithm.backward(
                dout.contiguous(), dfinal, ctx.saved_tensors, ctx.call
            )
        return dq, dk, dv, dinitial if ctx.initial else None, None, None, None


def attend_linearly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    algorithm: LinearAlgorithm,
    seq_len: int,
    decay: Decay,
    kernel_for: Callable[[LinearProblem], LinearKernel],
    causal: bool = True,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: tuple[int, ...] = (),
    site: Hashable | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention of the local queries over all ranks' tokens; differentiable.

    Args:
        q, k: [B,S,H,D]; v: [B,S,H,E]: this rank's shards, in the order of algorithm.layout.
        seq_len: global N. decay: rates per head. kernel_for: the choice of a kernel, such as
            `partial(kernels.linear.resolve_linear, "auto")`.
        initial_state: before the first token [B,H,D,E], the same on all ranks.
        output_final_state: the state after the last token is wanted.
        documents: as of `document_starts`: tokens see others of their own document only.
        site: as in `recompute.computed_once`.

    Under autocast q, k and v are taken in its dtype.

    Returns: out [B,S,H,E] in q's dtype; the final state, the same on all ranks, or None. Gradients
    are those of the sum of all ranks' losses, so that of initial_state, summed over the ranks, is
    whole.
    Raises: ContextParallelError if shapes or dtypes do not fit; KernelUnavailableError if the
    kernel cannot serve them.
    """
    check_linear_shapes(q, k, v)
    q, k, v = cast_inputs(q, k, v)
    _check(q, k, v, initial_state, algorithm, seq_len)
    shape = q.device, q.dtype, q.shape[2], q.shape[3], v.shape[3]
    problem = LinearProblem(*shape, documents=bool(documents))
    kernel = kernel_for(problem)
    call = LinearCall(seq_len, causal, decay, kernel, output_final_state, documents)
    if initial_state is not None:
        initial_state = initial_state.to(accumulation_dtype(q.dtype))
    return _LinearAttention.apply(q, k, v, initial_state, algorithm, call, site)


def check_linear_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises: ContextParallelError for shapes that no linear attention has, for several devices, or
    for another GPU than the current one.
    """
    check_devices("q, k, v", q, k, v)
    if q.dim() != 4 or q.shape != k.shape or v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise ContextParallelError(
            "linear attention needs q, k [B,S,H,D] and v [B,S,H,E], got q "
            f"{tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: repeat the KV heads if "
            "there are fewer"
        )


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    algorithm: LinearAlgorithm,
    seq_len: int,
) -> None:
    check_dtypes(q, k, v)
    state = (q.shape[0], *q.shape[2:], v.shape[3])
    if initial_state is not None and initial_state.shape != state:
        raise ContextParallelError(
            f"initial_state needs the shape [B,H,D,E] = {state}, got {tuple(initial_state.shape)}"
        )
    if initial_state is not None and not initial_state.is_floating_point():
        raise ContextParallelError(
            f"initial_state needs a floating dtype, got {initial_state.dtype}: cast it first"
        )
    if initial_state is not None and initial_state.device != q.device:
        raise ContextParallelError(
            f"initial_state needs the device of q, {q.device}, got {initial_state.device}"
        )
    rank, size = algorithm.topology.rank, algorithm.topology.size
    algorithm.check(algorithm.options, size=size, heads=q.shape[2])
    lengths = [len(span) for span in algorithm.layout.spans(rank, size, seq_len)]
    if q.shape[1] != sum(lengths):
        raise unfit(algorithm.layout, rank, size, seq_len, sum(lengths), q.shape[1])
    multiple = algorithm.layout.multiple(size)
    if len(lengths) > 1 and seq_len % multiple:
        raise ConfigError(
            f"{algorithm.name} on the {algorithm.layout.name} layout needs seq_len divisible by "
            f"{multiple}, got {seq_len}: use {seq_len - seq_len % multiple + multiple}, or the "
            "option layout=contiguous"
        )
