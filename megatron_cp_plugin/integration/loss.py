"""The mean loss of a micro-batch over the whole sequence, however its tokens are split.

Without `--calculate-per-token-loss` Megatron divides each rank's sum of losses by that rank's own
number of tokens that count, and averages the gradients over the ranks. That is the mean over the
sequence where all context-parallel ranks have equally many such tokens; with padding or another
loss mask it is not, and the gradients are not those of the unsplit sequence.

When it evaluates, Megatron may average the ranks' own means (`--sft`): there each rank reports the
whole sequence's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def forward_step_calc_loss(
    original: Callable[..., Any],
    model: Any,
    output: Any,
    loss_func: Callable[..., Any] | None,
    config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls Megatron's function of this name with a loss that it divides rightly."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    if loss_func is not None and group.size() > 1:
        if not config.calculate_per_token_loss:
            loss_func = mean_over_sequence(loss_func, group)
        if not torch.is_grad_enabled():
            loss_func = reporting_for_all(loss_func, group)
    return original(model, output, loss_func, config, *args, **kwargs)


def mean_over_sequence(loss_func: Callable[..., Any], group: Any) -> Callable[..., Any]:
    """Returns a loss function whose loss, divided as Megatron does, is a part of the whole mean.

    Args: loss_func: returns the sum of this rank's losses [], the number of its tokens that count
        [] and what to log. Other results, such as a mean of a script's own, stay as they are.
    """

    def scaled(*args: Any, **kwargs: Any) -> Any:
        outputs = loss_func(*args, **kwargs)
        if not isinstance(outputs, tuple) or len(outputs) != 3:
            return outputs
        loss, tokens, report = outputs
        total = tokens.clone()
        dist.all_reduce(total, group=group)
        # Megatron divides by this rank's tokens, by one where it has none, and averages over ranks.
        factor = group.size() * torch.clamp(tokens, min=1) / torch.clamp(total, min=1)
        return loss * factor, tokens, report

    return scaled


def reporting_for_all(loss_func: Callable[..., Any], group: Any) -> Callable[..., Any]:
    """Returns a loss function that reports sums over all ranks.

    Args: loss_func: reports pairs of a sum and a number of tokens [2]; others stay as they are.
    """

    def summed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.numel() != 2:
            return value
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    def reporting(*args: Any, **kwargs: Any) -> Any:
        outputs = loss_func(*args, **kwargs)
        if not isinstance(outputs, tuple) or not isinstance(outputs[-1], dict):
            return outputs
        return (*outputs[:-1], {name: summed(value) for name, value in outputs[-1].items()})

    return reporting
