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
        loss_func = over_sequence(loss_func, group, divided=not config.calculate_per_token_loss)
    return original(model, output, loss_func, config, *args, **kwargs)


def over_sequence(
    loss_func: Callable[..., Any], group: Any, *, divided: bool
) -> Callable[..., Any]:
    """Returns a loss function of the whole sequence.

    Its loss, divided as Megatron does, is a part of the whole mean. Without gradients, it reports
    sums over all ranks.

    Args:
        loss_func: returns the sum of this rank's losses [], the number of its tokens that count
            [] and what to log, in which a sum and a number of tokens are a pair [2]. Other
            results, such as a mean of a script's own, stay as they are.
        divided: whether Megatron divides the loss by the number of this rank's tokens.
    """

    def summed(value: Any) -> Any:
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    def of_sequence(*args: Any, **kwargs: Any) -> Any:
        outputs = loss_func(*args, **kwargs)
        if not isinstance(outputs, tuple):
            return outputs
        if divided and len(outputs) == 3:
            loss, tokens, report = outputs
            # Megatron divides by this rank's tokens, by one where it has none, and averages over
            # ranks.
            factor = group.size() * torch.clamp(tokens, min=1) / torch.clamp(summed(tokens), min=1)
            outputs = loss * factor, tokens, report
        *others, report = outputs
        if torch.is_grad_enabled() or not isinstance(report, dict):
            return outputs
        pairs = {k: x for k, x in report.items() if isinstance(x, torch.Tensor) and x.numel() == 2}
        return (*others, report | {name: summed(pair) for name, pair in pairs.items()})

    return of_sequence
