"""The functional interface, which needs torch but not Megatron.

B batch, S local tokens, N tokens of the whole sequence, H query heads, G KV heads, D head dim of
queries and keys, E head dim of values, P ranks. Positions and lengths are in tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin import process_exit
from megatron_cp_plugin.arguments import SpanMask, check_tensors, fixed_number, flag, process_group
from megatron_cp_plugin.context import (
    CallSettings,
    Group,
    linear_algorithm,
    not_compiled,
    softmax_algorithm,
)
from megatron_cp_plugin.core.communication.process_groups import release_topologies
from megatron_cp_plugin.errors import ContextParallelError, brief, whole_number
from megatron_cp_plugin.token_losses import CHUNK_TOKENS, token_losses


@not_compiled
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

    `Context` has the same function, with settings that are said once.

    In each call ranks compare their arguments, documents and spans included, and their numbers of
    tokens, before anything else is sent: the hosts exchange 16 bytes, one host in memory, and wait
    for no GPU, also while a CUDA graph is captured; its replays compare nothing. If arguments do
    not fit, or one rank refuses the call, all ranks refuse it, and the next one is served.

    Calls over one group come from one thread at a time, in the same order on all ranks.

    Tensors that `shard`, this function or `linear_attention` have made, and their views, are known
    to be split by a layout until they are changed in place; a call with another one, or with tokens
    in another dimension, is refused. The layout of other tensors, such as `proj(x)`, is not known:
    `check_layout` compares which tokens a rank holds. The first call with a number of tokens and
    without seq_len refuses an equal unknown q on all ranks, because it cannot have been split.

    Under torch.autocast q, k and v are cast to autocast's dtype, as torch's
    scaled_dot_product_attention does. Under torch.compile the call is a graph break.

    Args:
        q: [B,S,H,D]; k: [B,S,G,D]; v: [B,S,G,E], G dividing H; of one dtype and on one device;
            this rank's shards as `shard` gives them. float16 or bfloat16; on CPUs also float32 and
            float64. On GPUs only kernel "reference" takes these two, with quadratic memory.
        algo: a name of `available("softmax")`; or "auto": the planner chooses, once for each shape,
            among the algorithms for the layout that option `layout` names (default "zigzag"; give
            `shard` the same), on the machine that option `machine` names (default: rank 0's GPU).
        group: process group of the context-parallel ranks; None: all processes. The first call
            makes further groups of these ranks, by them alone.
        causal: queries attend to no later keys.
        scale: factor of the scores, above 0; None: D**-0.5. Not differentiable.
        kernel: "auto" or a name of `kernels.kernel_names`.
        seq_len: N; needed only where ranks hold unequal numbers of tokens: all ranks raise
            ContextParallelError there if it is missing.
        window: queries see the last `window` keys up to their own position, which counts: one more
            than `left` of Transformer Engine's and flash-attn's `window_size` (left, 0). Beside
            spans: keys that spans allow, unless they are `window` or more positions earlier.
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

    Returns: out [B,S,H,E] in q's dtype; differentiable: gradients of q, k and v are of the sum
    of all ranks' losses, for this rank's shards.
    Raises: ConfigError for an unknown name or option, ContextParallelError for shapes that do not
    fit, KernelUnavailableError if the kernel cannot serve them, CommunicationError if another rank
    cannot be reached any more.
    """
    settings = CallSettings(algo, group, seq_len, cu_seqlens, spans, options)
    return settings.attention(
        q, k, v, causal=causal, scale=scale, kernel=kernel, window=window, sink=sink
    )


@not_compiled
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: float | Sequence[float] | Tensor | None = None,
    gate: Tensor | None = None,
    beta: Tensor | None = None,
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
    """Linear attention with decay, gates or the delta rule over a sequence that is split among the
    ranks of a group.

    With a head's rate l, or its gate g_s in place of log l, kv_s = l kv_{s-1} + k_s v_s^T and
    o_s = kv_s^T q_s; with beta b_s, the delta rule,

        kv_s = exp(g_s) kv_{s-1} + b_s k_s (v_s - (exp(g_s) kv_{s-1})^T k_s)^T

    as in flash-linear-attention's simple_gla and gla, gated_delta_rule and kda. Nothing is scaled
    or normalised: its functions scale q by D**-0.5. A collective operation: all ranks of the group
    call it with the same settings. Arguments are compared, and autocast and torch.compile are
    served, as in `attention`.

    H is the largest number of heads of q, k and v; G, the number of heads of states, is the larger
    one of k's and v's; each number divides H. Consecutive heads share a head of a tensor with fewer
    heads, as in Mamba-2 (q and k of groups) and in grouped queries.

    Args:
        q, k: [B,S,*,D]; v: [B,S,*,E]: this rank's shards as `shard` gives them.
        decay: rates in (0, 1], one for all states or one for each of the G; not differentiable. A
            tensor on a GPU is copied to the host at every call. None: 1.
        gate: natural logarithms, at most 0 and finite, [B,S,G], or [B,S,G,D] for each channel of k,
            in place of decay; this rank's, as q is. Differentiable; computed in float32 (float64
            beside float64). Their values are not looked at.
        beta: [B,S,G]: the delta rule, whose k should have norm 1; without decay. Otherwise as gate.
        algo: a name of `available("linear")`.
        group: process group of the context-parallel ranks; None: all processes.
        causal: False: o_s = sum over all i of l**|s - i| (q_s^T k_i) v_i; not with gate and beta.
        initial_state: kv_0 [B,G,D,E], the same on all ranks; None: 0.
        output_final_state: return kv_N too.
        kernel: "auto" or a name of `kernels.linear.linear_kernel_names`.
        seq_len: N; needed only where ranks hold unequal numbers of tokens, see `attention`.
        cu_seqlens: cumulative lengths of documents, see `attention`: every document begins with a
            state of 0, but the first with kv_0; kv_N is the state at the end of the last. Empty
            documents do not count: the first and the last are those with tokens.
        options: of the algorithm.

    Returns: out [B,S,H,E] in q's dtype; with `output_final_state` also kv_N [B,G,D,E] float32
    (float64 for float64), the same on all ranks. Differentiable; gradients are of the sum of the
    ranks' losses; the whole gradient of initial_state is the sum of the ranks' gradients.
    Raises: ConfigError for an unknown name or option or a rate out of range, ContextParallelError
    for shapes that do not fit, KernelUnavailableError if the kernel cannot serve them.
    """
    return CallSettings(algo, group, seq_len, cu_seqlens, None, options).linear_attention(
        q,
        k,
        v,
        decay=decay,
        gate=gate,
        beta=beta,
        causal=causal,
        initial_state=initial_state,
        output_final_state=output_final_state,
        kernel=kernel,
    )


@not_compiled
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
    these ranks. With reduction "none" a loss is the negative log-probability of its label.
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
    check_tensors("chunked_cross_entropy", hidden=hidden, weight=weight, labels=labels)
    losses, *_ = token_losses(
        hidden,
        weight,
        labels,
        chunk_tokens=whole_number("chunk_tokens", chunk_tokens),
        tp_group=process_group("tp_group", tp_group),
        sequence_parallel=flag("sequence_parallel", sequence_parallel),
        into_main_grad=flag("into_main_grad", into_main_grad),
    )
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()


@not_compiled
def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    into_main_grad: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities of labels under `softmax(hidden @ weight.T / temperature)`, and entropies.

    All the logits are never in memory. As with `chunked_cross_entropy`, which are these
    log-probabilities negated, each rank gives its own tokens, in any order, and nothing is sent
    between context-parallel ranks.

    There is no `top_k`, because programs mean different things by it: NeMo-RL the softmax of the k
    largest logits of each token, slime (for top-p) the softmax of the ids that the rollout kept,
    and verl the log-probabilities of a teacher's k ids for distillation. The first needs the whole
    vocabulary of a token on one rank; the others need ids that the caller has.

    Args:
        hidden, weight, labels, chunk_tokens, tp_group, sequence_parallel, into_main_grad: as of
            `chunked_cross_entropy`.
        temperature: positive divisor of the logits: a number, or one a token, [...] as
            labels, whose values are not looked at. Not differentiable.
        entropy: returns the entropies too.

    Returns: the log-probabilities, [...] as labels, in float32 (float64 for float64); with
    `entropy` also the entropies in nats, of the same shape and dtype. Both are differentiable,
    once.
    Raises: ContextParallelError for shapes, dtypes or settings that do not fit.
    """
    check_tensors("chunked_log_probs", hidden=hidden, weight=weight, labels=labels)
    losses, entropies, _ = token_losses(
        hidden,
        weight,
        labels,
        chunk_tokens=whole_number("chunk_tokens", chunk_tokens),
        tp_group=process_group("tp_group", tp_group),
        sequence_parallel=flag("sequence_parallel", sequence_parallel),
        into_main_grad=flag("into_main_grad", into_main_grad),
        temperature=_temperature(temperature, labels),
        entropy=flag("entropy", entropy),
    )
    return -losses if entropies is None else (-losses, entropies)


def _temperature(given: object, labels: Tensor) -> float | Tensor:
    """A positive number, or one for each label; a tensor's numbers are not looked at."""
    if isinstance(given, Tensor) and given.shape == labels.shape and given.dim():
        if given.requires_grad or not given.is_floating_point():
            raise ContextParallelError(
                f"temperature needs floating numbers without a gradient, got {given.dtype}, "
                f"requires_grad={given.requires_grad}: detach or cast it"
            )
        return given
    number = fixed_number("temperature", given)
    if number is None or not 0 < number < float("inf"):
        raise ContextParallelError(
            f"temperature needs a positive number, or one for each of the labels "
            f"{list(labels.shape)}, got {brief(given)}"
        )
    return number


@not_compiled
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

    Args:
        x: the whole tensor, the same on all ranks; N tokens along `dim`.
        cu_seqlens, spans: as in `attention`; needed where the layout depends on them.

    Returns: S tokens along `dim`, contiguous; differentiable (the gradient is this rank's part).
    Raises: ConfigError for an unknown name or option.
    """
    return CallSettings(algo, group, None, cu_seqlens, spans, options).shard(x, dim)


@not_compiled
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

    A collective operation, and so is its backward, which all ranks run if one of them does. A loss
    of the result that is the same on all ranks counts once for each of them.

    Args:
        x: S tokens along `dim`.
        seq_len, cu_seqlens, spans: as in `attention` and `shard`.

    Returns: N tokens along `dim`, the same on all ranks; differentiable: the gradient is of the
    sum of all ranks' losses, for this rank's part, summed in float32 or wider.
    Raises: ConfigError for an unknown name or option, ContextParallelError if the ranks' numbers of
    tokens do not fit, or if x is known to be split in another way, see `attention`.
    """
    return CallSettings(algo, group, seq_len, cu_seqlens, spans, options).unshard(x, dim)


@not_compiled
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
    other tokens, its tokens, and whose tokens they look like.
    """
    CallSettings(algo, group, seq_len, cu_seqlens, spans, options).check_layout(positions)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Within this context, around a whole program, an error of the package ends the process with
    one line and exit code 2; under torchrun once for all ranks, at the end of its report.
    """
    with process_exit.one_line_errors():
        try:
            yield
        except ContextParallelError as error:
            package = Path(__file__).parent
            frames = [(Path(x.filename), x.lineno) for x in extract_tb(error.__traceback__)]
            file, line = next(x for x in reversed(frames) if package not in x[0].parents)
            raise type(error)(f"{error} ({file.name}, line {line})") from None


def release() -> None:
    """Frees the receive buffers in peer memory that earlier calls made, and the further groups of
    process groups that were destroyed since.

    All ranks call it, and replay no CUDA graph that was captured before: it writes to those
    buffers. A program that makes and destroys groups calls it after each `destroy_process_group`,
    and `dist.barrier` before: a message of `lasp` may still be under way. Outputs that the program
    keeps have no gradient any more.
    """
    softmax_algorithm.cache_clear()
    linear_algorithm.cache_clear()
    release_topologies()
