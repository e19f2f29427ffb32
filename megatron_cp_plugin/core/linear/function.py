"""The autograd Function of linear attention over a split sequence.

B batch, S local tokens, H heads, D head dim of q and k, E head dim of v.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_cp_plugin.core.autograd.function import (
    cast_inputs,
    check_devices,
    check_dtypes,
    differentiable_once,
    dtypes_as_given,
)
from megatron_cp_plugin.core.autograd.recompute import computed_once
from megatron_cp_plugin.core.communication.record import PHASE, holding
from megatron_cp_plugin.core.layout import unfit
from megatron_cp_plugin.core.linear.algorithm import LinearAlgorithm, LinearCall, LinearTensors
from megatron_cp_plugin.core.linear.kernel import LinearKernel, LinearProblem
from megatron_cp_plugin.core.linear.states import NO_GATES, Decay, Gates
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.errors import ConfigError, ContextParallelError


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None,
        beta: Tensor | None,
        initial: Tensor | None,
        algorithm: LinearAlgorithm,
        call: LinearCall,
        recompute_key: Hashable | None,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        gates = Gates(gate, beta).each(Tensor.contiguous)

        def compute() -> tuple[Tensor | None, ...]:
            given = LinearTensors(q, k, v, gates, initial)
            out, final, saved = algorithm.forward(given, call)
            return (out, final, *saved)

        inputs = tuple([x for x in (q, k, v, *gates, initial) if x is not None])
        with holding(PHASE, "forward"), dtypes_as_given(q.device):
            out, final, *saved = computed_once(recompute_key, inputs, compute)
        assert out is not None
        ctx.save_for_backward(*saved)
        ctx.algorithm, ctx.call = algorithm, call
        return out, final

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        with holding(PHASE, "backward"), dtypes_as_given(dout.device):
            dq, dk, dv, dinitial, dgates = ctx.algorithm.backward(
                dout.contiguous(), dfinal, ctx.saved_tensors, ctx.call
            )
        return dq, dk, dv, *dgates, dinitial, None, None, None


def attend_linearly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    algorithm: LinearAlgorithm,
    seq_len: int,
    kernel_for: Callable[[LinearProblem], LinearKernel],
    decay: Decay | None = None,
    gate: Tensor | None = None,
    beta: Tensor | None = None,
    causal: bool = True,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: tuple[int, ...] = (),
    recompute_key: Hashable | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention of the local queries over all ranks' tokens; differentiable.

    H is the largest number of heads of q, k and v; G, the number of states, is the larger number of
    k's and v's. A head that serves several heads serves successive ones.

    Args:
        q, k: [B,S,*,D]; v: [B,S,*,E]: this rank's shards, in the order of algorithm.layout; each
            number of heads divides H.
        seq_len: global N.
        kernel_for: the choice of a kernel, such as
            `partial(kernels.linear.resolve_linear, "auto")`.
        decay: rates of the G states; None: 1.
        gate: natural logarithms, at most 0, [B,S,G] or [B,S,G,D]; without decay.
        beta: [B,S,G]: the delta rule; without decay.
        causal: tokens see themselves and earlier ones; needed with gate and beta.
        initial_state: before the first token [B,G,D,E], the same on all ranks.
        output_final_state: the state after the last token is wanted.
        documents: as of `document_starts`: tokens see others of their own document only.
        recompute_key: as in `recompute.computed_once`.

    Under autocast q, k and v are taken in its dtype. Gates are taken in float32 (float64 beside
    float64).

    Returns: out [B,S,H,E] in q's dtype; the final state [B,G,D,E], the same on all ranks, or None.
    Gradients are those of the sum of all ranks' losses: the whole gradient of initial_state is the
    sum over the ranks.
    Raises: ContextParallelError if shapes or dtypes do not fit; KernelUnavailableError if the
    kernel cannot serve them.
    """
    check_linear_shapes(q, k, v, gate, beta)
    q, k, v = cast_inputs(q, k, v)
    _check_call(q, k, v, initial_state, algorithm, seq_len, documents)
    wide = accumulation_dtype(q.dtype)
    states = max(k.shape[2], v.shape[2])
    heads, size = max(q.shape[2], states), algorithm.topology.size
    algorithm.check(algorithm.options, size=size, heads=heads, kv_heads=states, causal=causal)
    gates = Gates(gate, beta).each(lambda x: x.to(wide))
    if gates.some and (decay is not None or not causal):
        raise ContextParallelError(
            f"gate and beta take the place of decay and need causal=True, got decay {decay} and "
            f"causal={causal}: give the logarithms of rates as gate, and leave both out"
        )
    rates = (1.0,) * states if decay is None else decay.rates
    if initial_state is not None:
        initial_state = _repeated(initial_state.to(wide), heads, 1)
    q, k, v = (_repeated(x, heads) for x in (q, k, v))
    gates = gates.each(lambda x: _repeated(x, heads))
    kernel = kernel_for(
        LinearProblem(
            *(q.device, q.dtype, heads, q.shape[3], v.shape[3]),
            documents=bool(documents),
            gate=_kind(gates),
            delta=beta is not None,
        )
    )
    shared = heads // states
    call = LinearCall(
        seq_len,
        Decay(tuple(rate for rate in rates for _ in range(shared))),
        kernel,
        output_final_state,
        documents,
        shared,
        initial_state is not None,
    )
    out, final = _LinearAttention.apply(
        q, k, v, *gates, initial_state, algorithm, call, recompute_key
    )
    if not causal:
        of_later = replace(call, output_final_state=False, initial=False, reverse=True)
        later, _ = _LinearAttention.apply(
            q, k, v, *NO_GATES, None, algorithm, of_later, recompute_key
        )
        # Both directions hold each token's own term.
        own = (q.to(wide) * k.to(wide)).sum(-1, keepdim=True) * v.to(wide)
        out = (out.to(wide) + later.to(wide) - own).to(q.dtype)
    return out, final if final is None or shared == 1 else final[:, ::shared]


def _repeated(x: Tensor, heads: int, dim: int = 2) -> Tensor:
    """Repeats each head, so that there are `heads` of them."""
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)


def _kind(gates: Gates) -> Literal["rates", "heads", "channels"]:
    if gates.gate is None:
        return "heads" if gates.some else "rates"
    return "heads" if gates.gate.dim() == 3 else "channels"


def check_linear_shapes(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None, beta: Tensor | None = None
) -> None:
    """Raises: ContextParallelError for shapes that no linear attention has, for several devices, or
    for another GPU than the current one.
    """
    check_devices("q, k, v", q, k, v)
    fit = q.dim() == k.dim() == v.dim() == 4 and q.shape[3] == k.shape[3]
    if not fit or not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ContextParallelError(
            "linear attention needs q, k [B,S,H,D] and v [B,S,H,E], got q "
            f"{tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    counts = [x.shape[2] for x in (q, k, v)]
    states = max(counts[1:])
    largest = max(counts)
    uneven = any(count == 0 or largest % count for count in counts)
    if (uneven and largest) or states % (min(counts[1:]) or 1):
        raise ContextParallelError(
            "linear attention needs heads of q, k and v of which each number divides the largest, "
            f"and those of k and v each other, got {counts}: repeat those of one"
        )
    of_states = (*q.shape[:2], states)
    for name, x, shapes in (
        ("gate", gate, (of_states, (*of_states, q.shape[3]))),
        ("beta", beta, (of_states,)),
    ):
        if x is None:
            continue
        if x.shape not in shapes or not x.is_floating_point() or x.device != q.device:
            channels = " or [B,S,H,D]" * (len(shapes) - 1)
            raise ContextParallelError(
                f"{name} needs a floating dtype, q's device and the shape [B,S,H]{channels} with "
                f"the {states} heads of k and v, {of_states}, got {x.dtype} {tuple(x.shape)} on "
                f"{x.device}"
            )


def _check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    algorithm: LinearAlgorithm,
    seq_len: int,
    documents: tuple[int, ...],
) -> None:
    check_dtypes(q, k, v)
    state = (q.shape[0], max(k.shape[2], v.shape[2]), q.shape[3], v.shape[3])
    x = initial_state
    if x is not None and not (x.shape == state and x.is_floating_point() and x.device == q.device):
        raise ContextParallelError(
            f"initial_state needs a floating dtype, q's device and the shape [B,H,D,E] = {state}, "
            f"got {x.dtype} {tuple(x.shape)} on {x.device}"
        )
    rank, size = algorithm.topology.rank, algorithm.topology.size
    layout = algorithm.layout.for_documents(documents) if documents else algorithm.layout
    lengths = [len(span) for span in layout.spans(rank, size, seq_len)]
    if q.shape[1] != sum(lengths):
        raise unfit(layout, rank, size, seq_len, sum(lengths), q.shape[1])
    multiple = layout.multiple(size)
    if len(lengths) > 1 and seq_len % multiple and not layout.follows_documents:
        raise ConfigError(
            f"{algorithm.name} on the {layout.name} layout needs seq_len divisible by "
            f"{multiple}, got {seq_len}: use {seq_len - seq_len % multiple + multiple}, or the "
            "option layout=contiguous"
        )
