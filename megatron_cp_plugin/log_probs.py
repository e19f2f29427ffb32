"""Log-probabilities and entropies of tokens, as policies and distillation need them."""

from typing import Literal, overload

import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.arguments import fixed_number, flag, of_output_layer
from megatron_cp_plugin.context import not_compiled
from megatron_cp_plugin.core.chunked_loss import CHUNK_TOKENS, token_losses
from megatron_cp_plugin.errors import ContextParallelError, brief


@overload
def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = ...,
    entropy: Literal[False] = ...,
    chunk_tokens: int = ...,
    tp_group: dist.ProcessGroup | None = ...,
    sequence_parallel: bool = ...,
    into_main_grad: bool = ...,
) -> Tensor: ...


@overload
def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = ...,
    entropy: Literal[True],
    chunk_tokens: int = ...,
    tp_group: dist.ProcessGroup | None = ...,
    sequence_parallel: bool = ...,
    into_main_grad: bool = ...,
) -> tuple[Tensor, Tensor]: ...


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
    settings = of_output_layer(
        "chunked_log_probs",
        hidden,
        weight,
        labels,
        chunk_tokens=chunk_tokens,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        into_main_grad=into_main_grad,
    )
    settings |= {
        "temperature": _temperature(temperature, labels),
        "entropy": flag("entropy", entropy),
    }
    losses, entropies, _ = token_losses(hidden, weight, labels, **settings)
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
