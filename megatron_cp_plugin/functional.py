"""The functional interface, which needs torch but not Megatron.

B batch, S local tokens, N tokens of the whole sequence, H query heads, G KV heads, D head dim of
queries and keys, E that of values, P ranks. Positions and lengths are in tokens.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial, wraps
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin import registry
from megatron_cp_plugin.arguments import (
    SpanMask,
    check_eager,
    check_tensors,
    chosen,
    dimension,
    fixed_number,
    flag,
    followed_by,
    length,
    on_host,
    word,
)
from megatron_cp_plugin.core import layout as layouts
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.autograd.autocast import cast_inputs
from megatron_cp_plugin.core.autograd.function import Attention, called, check_shapes
from megatron_cp_plugin.core.chunked_loss import CHUNK_TOKENS, losses_and_predictions
from megatron_cp_plugin.core.comm import CommunicatingIn
from megatron_cp_plugin.core.communication.lengths import agreed_length
from megatron_cp_plugin.core.communication.process_groups import release_topologies, topology_of
from megatron_cp_plugin.core.communication.same_calls import SameCall, compared
from megatron_cp_plugin.core.layout import Documents, Layout
from megatron_cp_plugin.core.layouts.layout_check import describe_mismatch
from megatron_cp_plugin.core.linear.algorithm import LinearAlgorithm
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.function import attend_linearly, check_linear_shapes
from megatron_cp_plugin.core.masks.slices import starts_and_slices
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ContextParallelError, brief, whole_number
from megatron_cp_plugin.kernels import resolver
from megatron_cp_plugin.kernels.linear import resolve_linear

Group = dist.ProcessGroup | Topology | None


def _not_compiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """The function as torch.compile leaves it alone: a break between two graphs.

    Nothing of it could be one: it plans in Python, and messages travel while kernels run.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@_not_compiled
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    algo: str,
    group: Group = None,
    causal: bool = True,
    scale: float | None = None,
    kernel: str = "auto",
    seq_len: int | None = None,
    window: int | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    spans: SpanMask | None = None,
    sink: Tensor | None = None,
    **options: object,
) -> Tensor:
    """Softmax attention over a sequence that is split among the ranks of a group.

    A collective operation: all ranks of the group call it with the same settings, and agree in
    whether q requires a gradient and whether k or v does. Gradients that are not required are not
    sent, except by `attention2d` with variant "overlap".

    Ranks compare what they call it with, documents and spans included, and how many tokens they
    hold, and refuse on all of them what differs or what one of them refuses. Over gloo they do so
    in each call, in a message of 16 bytes. Over NCCL, where the host would have to wait for it,
    they do so at the first call with such settings and with such a number; later calls they compare
    16 at a time without waiting, so that another call of one rank is refused up to 31 calls later,
    or leaves the others waiting for the group's timeout. Only `check_layout` compares which tokens
    a rank holds.

    Under torch.autocast q, k and v are cast to autocast's dtype, as torch's
    scaled_dot_product_attention does. Under torch.compile the call is a graph break.

    Args:
        q: [B,S,H,D]; k: [B,S,G,D]; v: [B,S,G,E], G dividing H; of one dtype and on one device;
            this rank's shards as `shard` gives them. float16 or bfloat16; on CPUs also float32 and
            float64. On GPUs only kernel "reference" takes those two, with quadratic memory.
        algo: a name of `available("softmax")`; or "auto": the planner chooses, once for each shape,
            among the algorithms for the layout that option `layout` names (default "zigzag"; give
            `shard` the same), on the machine that option `machine` names (default: rank 0's GPU).
        group: process group of the context-parallel ranks; None: all processes. The first call
            makes further groups of these ranks. Unless all ranks of the job make equally many of
            them, make your own groups before that call: `torch.distributed.new_group` hangs after
            it.
        causal: queries attend to no later keys.
        scale: factor of the scores, above 0; None: D**-0.5. Not differentiable.
        kernel: "auto" or a name of `kernels.kernel_names`.
        seq_len: N; needed only where ranks hold unequal numbers of tokens: all ranks raise
            ContextParallelError there if it is missing. Over NCCL, with shards that `shard` has not
            made, and equal ones before, some may wait for the group's timeout instead and raise
            CommunicationError.
        window: queries see the last `window` keys up to their own position, which counts: one more
            than `left` of Transformer Engine's and flash-attn's `window_size` (left, 0). Beside
            spans: of what these name no keys that are `window` or more positions earlier.
        cu_seqlens: cumulative lengths of the documents in the whole sequence, 0, n1, n1 + n2, ...,
            N, the same for every entry of the batch: queries see keys of their own document only.
            A tensor on a GPU is copied to the host at every call.
        spans: which keys each query sees, in place of `causal`, the same for every entry of the
            batch; beside `cu_seqlens` and `window`, the keys that all of these allow. Each is
            (q_start, q_stop, k_start, k_stop, kind), with global positions, half-open; or a row of
            an integer tensor [n,5], with kinds 0 to 3 in this order. Query i of [q_start, q_stop)
            sees key j of [k_start, k_stop)
            - "full": always;
            - "causal": if k_stop - j >= q_stop - i;
            - "inverse_causal": if j - k_start >= i - q_start;
            - "bi_causal": if both hold.
            No two spans have the same query and key. A query that sees no key has out 0.
            `megatron_cp_plugin.spans` makes such lists.
        sink: [H], differentiable: the score, for each head, of a further key that every query sees
            and that has no value (Megatron's `softmax_offset`). Its whole gradient is the sum of
            the ranks' gradients.
        options: of the algorithm.

    Returns: out [B,S,H,E] in q's dtype; differentiable: gradients of q, k and v are those of the
    sum of all ranks' losses, for this rank's shards.
    Raises: ConfigError for an unknown name or option, ContextParallelError for shapes that do not
    fit, KernelUnavailableError if the kernel cannot serve them, CommunicationError if another rank
    cannot be reached any more.
    """
    topology = _topology(group)
    with SameCall(topology, "attention") as made:
        check_tensors(q=q, k=k, v=v, sink_or_none=sink)
        check_eager("attention", q, k, v)
        q, k, v = cast_inputs(q, k, v)
        causal, scale = flag("causal", causal), fixed_number("scale", scale)
        window = None if window is None else whole_number("window", window)
        cu_seqlens, spans = on_host("cu_seqlens", cu_seqlens), on_host("spans", spans)
        check_shapes(q, k, v)
        if spans is not None and not causal:
            raise ContextParallelError("spans replace causal=False, got both: leave causal out")
        layout, settings = registry.layout_of(algo, options), chosen(options)
        seq_len = length("seq_len", seq_len)
        sequence = _Sequence(topology, layout, q.shape[1], seq_len, cu_seqlens, spans)
        made.lengths = sequence.held
        trained = torch.is_grad_enabled()
        made.settings = {
            "algo": algo,
            "options": settings,
            **_described(q, k, v),
            "causal": causal,
            "scale": scale,
            "window": window,
            "kernel": word("kernel", kernel),
            "documents": cu_seqlens is not None,
            "span mask": spans is not None,
            "sink": None if sink is None else (sink.dtype, *sink.shape),
            "requires_grad of q": trained and q.requires_grad,
            "requires_grad of k or v": trained and (k.requires_grad or v.requires_grad),
        }
        made.changing = {"cu_seqlens": cu_seqlens, "spans": spans}
    if algo != registry.AUTO:
        algorithm = _algorithm(algo, topology, settings)
    seq_len, followed = sequence.agreed()
    documents, slices = starts_and_slices(followed)
    if window is not None:
        window = min(window, max(seq_len, 1))  # sys.maxsize is too large to be added to
    if algo == registry.AUTO:
        shape = Shape.of(q, k, v, seq_len)
        mask = Mask(causal, window, documents) if slices is None else Mask.of(slices, window)
        algorithm = _algorithm(*_choose(topology, shape, mask, kernel, options))
    of_mask = causal, window, documents, slices
    algorithm, call = called(algorithm, q, k, v, sink, seq_len, *of_mask, scale, resolver(kernel))
    out: Tensor = Attention.apply(q, k, v, sink, algorithm, call, None)
    return out


@_not_compiled
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: float | Sequence[float] | Tensor,
    algo: str = "lasp",
    group: Group = None,
    causal: bool = True,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    kernel: str = "auto",
    seq_len: int | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    **options: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention with decay over a sequence that is split among the ranks of a group.

    With a head's rate l: kv_s = l kv_{s-1} + k_s v_s^T and o_s = kv_s^T q_s; nothing is scaled or
    normalised. A collective operation: all ranks of the group call it with the same settings.
    What ranks call it with is compared, and autocast and torch.compile served, as in `attention`.

    Args:
        q, k: [B,S,H,D]; v: [B,S,H,E]: this rank's shards as `shard` gives them.
        decay: rates in (0, 1], one for all heads or one per head; not differentiable. A tensor on
            a GPU is copied to the host at every call.
        algo: a name of `available("linear")`.
        group: process group of the context-parallel ranks; None: all processes.
        causal: False: o_s = sum over all i of l**|s - i| (q_s^T k_i) v_i.
        initial_state: kv_0 [B,H,D,E], the same on all ranks; None: 0.
        output_final_state: return kv_N too.
        kernel: "auto" or a name of `kernels.linear.linear_kernel_names`.
        seq_len: N; needed only where ranks hold unequal numbers of tokens, see `attention`.
        cu_seqlens: cumulative lengths of documents, see `attention`: every document begins with a
            state of 0, but the first with kv_0; kv_N is the state at the end of the last.
        options: of the algorithm.

    Returns: out [B,S,H,E] in q's dtype; with `output_final_state` also kv_N [B,H,D,E] float32
    (float64 for float64), the same on all ranks. Differentiable; gradients are those of the sum of
    the ranks' losses; the whole one of initial_state is the sum of the ranks' gradients.
    Raises: ConfigError for an unknown name or option or a rate out of range, ContextParallelError
    for shapes that do not fit, KernelUnavailableError if the kernel cannot serve them.
    """
    topology = _topology(group)
    with SameCall(topology, "linear_attention") as made:
        check_tensors(q=q, k=k, v=v, initial_state_or_none=initial_state)
        check_eager("linear_attention", q, k, v)
        q, k, v = cast_inputs(q, k, v)
        causal = flag("causal", causal)
        output_final_state = flag("output_final_state", output_final_state)
        cu_seqlens = on_host("cu_seqlens", cu_seqlens)
        check_linear_shapes(q, k, v)
        rates = Decay.of(decay, q.shape[2])
        layout, settings = registry.layout_of(algo, options), chosen(options)
        seq_len = length("seq_len", seq_len)
        sequence = _Sequence(topology, layout, q.shape[1], seq_len, cu_seqlens, None)
        made.lengths = sequence.held
        made.settings = {
            "algo": algo,
            "options": settings,
            **_described(q, k, v),
            "causal": causal,
            "kernel": word("kernel", kernel),
            "documents": cu_seqlens is not None,
            "initial_state": initial_state is not None,
            "output_final_state": output_final_state,
        }
        made.changing = {"decay": rates.rates, "cu_seqlens": cu_seqlens}
    algorithm = _linear_algorithm(algo, topology, settings)
    seq_len, followed = sequence.agreed()
    out, final_state = attend_linearly(
        q,
        k,
        v,
        algorithm=algorithm,
        seq_len=seq_len,
        decay=rates,
        causal=causal,
        kernel_for=partial(resolve_linear, kernel),
        initial_state=initial_state,
        output_final_state=output_final_state,
        documents=starts_and_slices(followed)[0],
    )
    return out if final_state is None else (out, final_state)


@_not_compiled
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    reduction: Literal["none", "sum", "mean"] = "none",
    into_main_grad: bool = False,
) -> Tensor:
    """Cross entropy of `hidden @ weight.T` and labels, without ever holding all the logits.

    With context parallelism each rank gives its own tokens, in any order; nothing is sent between
    those ranks. With reduction "none" a loss is the negative log-probability of its label.
    H hidden size, V vocabulary.

    Args:
        hidden: [..., H]; with `sequence_parallel` this rank's part of the tokens, cut along the
            first dimension.
        weight: [V,H] in hidden's dtype: the whole vocabulary, or this rank's part in a `tp_group`,
            all parts equally large and in the order of the ranks.
        labels: [...] integers, of all tokens: ids of the whole vocabulary. Any other number, such
            as -100, has a finite loss without a meaning: mask it.
        chunk_tokens: how many tokens' logits are in memory at a time.
        tp_group: the tensor-parallel ranks, which all make this call.
        sequence_parallel: `hidden` is split over `tp_group`, as by Megatron's sequence parallelism.
        reduction: "sum" and "mean" are over all tokens; a loss mask needs "none".
        into_main_grad: adds the gradient of the weight to `weight.main_grad` (float32), as
            Megatron's layers do. Autograd gets zeros for it, so that hooks run.

    Returns: the losses, [...] as labels or [], in float32 (float64 for float64); differentiable
    once.
    Raises: ContextParallelError for shapes, dtypes or settings that do not fit.
    """
    if not isinstance(reduction, str) or reduction not in ("none", "sum", "mean"):
        raise ContextParallelError(f"reduction must be none, sum or mean, got {brief(reduction)}")
    if not isinstance(tp_group, dist.ProcessGroup | None):
        raise ContextParallelError(f"tp_group needs a process group, got {brief(tp_group)}")
    check_tensors(hidden=hidden, weight=weight, labels=labels)
    check_eager("chunked_cross_entropy", hidden, weight)
    losses, _ = losses_and_predictions(
        hidden,
        weight,
        labels,
        chunk_tokens=whole_number("chunk_tokens", chunk_tokens),
        tp_group=tp_group,
        sequence_parallel=flag("sequence_parallel", sequence_parallel),
        into_main_grad=flag("into_main_grad", into_main_grad),
        predict=False,
    )
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()


@_not_compiled
def shard(
    x: Tensor,
    dim: int,
    *,
    algo: str,
    group: Group = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    spans: SpanMask | None = None,
    **options: object,
) -> Tensor:
    """This rank's part of a whole tensor, in the algorithm's layout.

    Args: x: the whole tensor, the same on all ranks; N tokens along `dim`. cu_seqlens, spans: as in
        `attention`; needed where the layout depends on them.

    Returns: S tokens along `dim`, contiguous; differentiable (the gradient is this rank's part).
    Raises: ConfigError for an unknown name or option.
    """
    topology = _topology(group)
    check_tensors(x=x)
    dim, layout = dimension(x, dim), registry.layout_of(algo, options)
    cu_seqlens, spans = on_host("cu_seqlens", cu_seqlens), on_host("spans", spans)
    layout = layout.within(followed_by(cu_seqlens, spans, x.shape[dim]))
    topology.lengths.unequal |= x.shape[dim] % topology.size > 0
    return layouts.shard(x, dim, layout, topology.rank, topology.size)


@_not_compiled
def unshard(
    x: Tensor,
    dim: int,
    *,
    algo: str,
    group: Group = None,
    seq_len: int | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    spans: SpanMask | None = None,
    **options: object,
) -> Tensor:
    """The whole tensor of all ranks' parts, in global order: the inverse of `shard`.

    Args: x: S tokens along `dim`. seq_len, cu_seqlens, spans: as in `attention` and `shard`.

    Returns: N tokens along `dim`, the same on all ranks. Not differentiable.
    Raises: ConfigError for an unknown name or option, ContextParallelError if the ranks' numbers of
    tokens do not fit.
    """
    topology = _topology(group)
    size = topology.size
    with SameCall(topology, "unshard") as made:
        check_tensors(x=x)
        dim, layout, settings = (
            dimension(x, dim),
            registry.layout_of(algo, options),
            chosen(options),
        )
        cu_seqlens, spans = on_host("cu_seqlens", cu_seqlens), on_host("spans", spans)
        seq_len = length("seq_len", seq_len)
        sequence = _Sequence(topology, layout, x.shape[dim], seq_len, cu_seqlens, spans)
        made.lengths = sequence.held
        made.settings = {
            "algo": algo,
            "options": settings,
            "dim": dim,
            "shape beside tokens": (*x.shape[:dim], -1, *x.shape[dim + 1 :]),
            "dtype": x.dtype,
        }
        made.changing = {"cu_seqlens": cu_seqlens, "spans": spans}
    total, followed = sequence.agreed()
    layout = layout.within(followed)
    moved = x.detach().movedim(dim, 0).contiguous()
    lengths = [layout.length(rank, size, total) for rank in range(size)]
    if x.shape[dim] != lengths[topology.rank]:
        raise ContextParallelError(
            f"rank {topology.rank} of {size} holds {lengths[topology.rank]} of {total} tokens "
            f"({layout.name} layout), got {x.shape[dim]}: shard with cp.shard"
        )
    parts = [moved.new_empty((length, *moved.shape[1:])) for length in lengths]
    others = [rank for rank in range(size) if rank != topology.rank]
    with CommunicatingIn("forward"):
        topology.channel("unshard").exchange(
            [(moved, rank) for rank in others], [(parts[rank], rank) for rank in others]
        ).wait()
    parts[topology.rank] = moved
    return layouts.unshard(parts, 0, layout).movedim(0, dim)


@_not_compiled
def check_layout(
    positions: Tensor,
    *,
    algo: str,
    group: Group = None,
    seq_len: int | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    spans: SpanMask | None = None,
    **options: object,
) -> None:
    """Checks that every rank holds the tokens that the layout gives it; one small message.

    `attention` sees how many tokens a rank holds, not which. A collective operation, which copies
    the positions to the host: for start-up and for tests, not for every step.

    Args:
        positions: of this rank's tokens in the whole sequence, counted from 0 and through all
            documents, in their local order: integers [S] or [B,S].
        algo, group, seq_len, cu_seqlens, spans, options: as in `attention`, of either kind.

    Raises: ContextParallelError on all ranks, with the same words: which rank is the first with
    other tokens, what it has, and whose tokens they look like.
    """
    topology = _topology(group)
    with SameCall(topology, "check_layout") as made:
        check_tensors(positions=positions)
        layout, settings = registry.layout_of(algo, options), chosen(options)
        cu_seqlens, spans = on_host("cu_seqlens", cu_seqlens), on_host("spans", spans)
        tokens = positions.shape[-1] if positions.dim() else 0
        seq_len = length("seq_len", seq_len)
        sequence = _Sequence(topology, layout, tokens, seq_len, cu_seqlens, spans)
        made.lengths = sequence.held
        made.settings = {"algo": algo, "options": settings}
        made.changing = {"cu_seqlens": cu_seqlens, "spans": spans}
    total, followed = sequence.agreed()
    layout, size = layout.within(followed), topology.size
    mine = describe_mismatch(positions, layout, topology.rank, size, total)
    found = compared(topology, "positions", "check_layout", mine)
    for rank, mismatch in enumerate(found):
        if mismatch is not None:
            raise ContextParallelError(
                f"{algo} on {size} ranks needs the {layout.name} layout of {total} tokens, got "
                f"others on rank {rank}: {mismatch}; shard with cp.shard(..., algo={algo!r})"
            )


def _described(*qkv: Tensor) -> dict[str, object]:
    """What q, k and v of all ranks have in common."""
    # Lists in between: generators are a call for each tensor, in every layer.
    return {
        "dtype of q, k, v": tuple([x.dtype for x in qkv]),
        "shape of q, k, v beside tokens": tuple([(*x.shape[:1], *x.shape[2:]) for x in qkv]),
    }


class _Sequence:
    """A sequence of which this rank holds some tokens.

    Attributes: held: what is the same on all ranks that hold the tokens of one layout.
    """

    def __init__(
        self,
        topology: Topology,
        layout: Layout,
        tokens: int,
        seq_len: int | None,
        cu_seqlens: Sequence[int] | Tensor | None,
        spans: SpanMask | None,
    ) -> None:
        """Raises: ContextParallelError if the layout cannot cut so many."""
        self._topology, self._layout, self._tokens = topology, layout, tokens
        self._seq_len, self._cu_seqlens, self._spans = seq_len, cu_seqlens, spans
        self.held: tuple[object, ...] = (tokens,)
        if seq_len is not None:
            self._followed = followed_by(cu_seqlens, spans, seq_len)
            self._layout = layout.within(self._followed)
            expected = self._layout.length(topology.rank, topology.size, seq_len)
            self.held = seq_len, tokens == expected

    def agreed(self) -> tuple[int, Documents]:
        """The global length and what layouts follow, once the ranks agree on their tokens."""
        seq_len = agreed_length(self._topology, self._layout, self._tokens, self._seq_len)
        if self._seq_len is None:
            self._followed = followed_by(self._cu_seqlens, self._spans, seq_len)
        return seq_len, self._followed


def _topology(group: Group) -> Topology:
    if isinstance(group, Topology):
        return group
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ContextParallelError(
            f"group needs a process group that this rank is in, got {brief(group)}: of a "
            "DeviceMesh pass get_group(), and call on the group's ranks alone"
        )
    topology = topology_of(group)
    if group is None and topology.size == 1 and not dist.is_initialized():
        processes = os.environ.get("WORLD_SIZE", "1")
        if processes != "1":
            raise ContextParallelError(
                f"{processes} processes (WORLD_SIZE) need a process group to split a sequence, got "
                "none: call torch.distributed.init_process_group first, or pass group="
            )
    return topology


def _choose(
    topology: Topology, shape: Shape, mask: Mask, kernel: str, given: Mapping[str, object]
) -> tuple[str, Topology, tuple[tuple[str, object], ...]]:
    from megatron_cp_plugin.planner.detected_machine import choose_for

    algo, options = choose_for(topology, shape, mask, kernel, given)
    return algo, topology, tuple(sorted(options))


@lru_cache(maxsize=256)
def _algorithm(algo: str, topology: Topology, options: tuple[tuple[str, object], ...]) -> Algorithm:
    return registry.create(algo, topology, dict(options))


@lru_cache(maxsize=256)
def _linear_algorithm(
    algo: str, topology: Topology, options: tuple[tuple[str, object], ...]
) -> LinearAlgorithm:
    return registry.create_linear(algo, topology, dict(options))


def release() -> None:
    """Frees the receive buffers in peer memory that earlier calls made, and the further groups of
    process groups that were destroyed since.

    All ranks call it, and replay no CUDA graph that was captured before: it writes to those
    buffers. A program that makes and destroys groups calls it after each `destroy_process_group`,
    and `dist.barrier` before: a message of `lasp` may still be under way. Outputs that the program
    keeps have no gradient any more.
    """
    _algorithm.cache_clear()
    _linear_algorithm.cache_clear()
    release_topologies()
