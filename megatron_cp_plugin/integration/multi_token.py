"""Multi-token prediction: shifts tokens along the sequence under any layout.

Megatron's `roll_tensor` knows its own zigzag layout only, and counts the tokens of each rank, by
which the losses of a rank are then divided; the mean of such means is not that of the sequence
where ranks have unequally many tokens that count, and the last one always has fewer. A loss per
token (`--calculate-per-token-loss`) is weighted by the rank's own tokens besides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megatron_cp_plugin.core.layout import unshard
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.documents import DocumentMask
from megatron_cp_plugin.integration.runtime import Runtime

_PER_RANK = "_counts_for_all_ranks"


def roll_tensor(
    original: Callable[..., Any], runtime: Runtime, *args: Any, **kwargs: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Takes the place of Megatron's function of this name.

    Args: args, kwargs: a tensor [..., S] of this rank's tokens, such as ids, labels or the loss
        mask; shifts and dims, both -1; cp_group; packed_seq_params, None or a `DocumentMask`.

    Returns: The next token's values, 0 for the last token of the sequence or of a sample; and the
        sum of the result over all ranks, divided by their number. A loss mask, which is known by
        its floating dtype, counts each token once for every rank: divided by its sum, the losses of
        a rank are a part of the mean over the sequence, as Megatron averages gradients over the
        ranks, and the sum is below one only if there is no token at all.

    Raises: ContextParallelError: Another shift, or packed sequences of another kind.
    """
    from megatron.core import parallel_state

    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    tensor, group = given["tensor"], given["cp_group"]
    if group is None:
        group = parallel_state.get_context_parallel_group()
    packed = given["packed_seq_params"]
    group = getattr(packed, "group", None) or group
    if tensor is None or (group.size() == 1 and packed is None):
        return original(*args, **kwargs)
    if packed is not None and not isinstance(packed, DocumentMask):
        raise ContextParallelError(f"packed sequences need a GPTModel or HybridModel, got {packed}")
    if given["shifts"] != -1 or given["dims"] not in (-1, tensor.dim() - 1):
        raise ContextParallelError(
            f"tokens are shifted by one to the left along the last dimension, got shifts "
            f"{given['shifts']} along {given['dims']}"
        )
    is_mask = tensor.is_floating_point()
    if is_mask and not hasattr(tensor, _PER_RANK):
        tensor = tensor * group.size()
    rolled, total = next_tokens(tensor, group, runtime, packed)
    if is_mask:
        setattr(rolled, _PER_RANK, True)
    return rolled, total / group.size()


def process_mtp_loss(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Takes the place of Megatron's function of this name.

    With a loss per token, gradients are summed over all ranks, and divided by the tokens that count
    for the next token. So Megatron weights the mean loss of a further token by that number, but of
    one rank, where ranks have unequally many. Here all of them share the mean over the sequence,
    and each gives it an equal part of the weight, as where gradients are averaged.

    Args: args, kwargs: labels and loss mask [B,S] of this rank's tokens, input_ids [B,S] where
        there are no labels, the model's config, cp_group and packed_seq_params.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    config, ids = given["config"], given["labels"]
    group = getattr(given["packed_seq_params"], "group", None) or given["cp_group"]
    if config.calculate_per_token_loss and group is not None and group.size() > 1:
        derives = ids is None
        ids = given.get("input_ids") if derives else ids
        if ids is not None:
            given["config"] = shared = copy(config)
            shared.calculate_per_token_loss = False
            total = _counting(given["loss_mask"], ids, group, given["packed_seq_params"], derives)
            shared.mtp_loss_scaling_factor = config.mtp_loss_scaling_factor * total / group.size()
    return original(*call.args, **call.kwargs)


def _counting(
    loss_mask: Tensor | None, ids: Tensor, group: dist.ProcessGroup, packed: Any, derives: bool
) -> Tensor:
    """Number of tokens of all ranks that count for the next token: float32 []."""
    from megatron.core.transformer import multi_token_prediction

    mask = torch.ones_like(ids, dtype=torch.float32) if loss_mask is None else loss_mask.float()
    if derives:  # the last token of a document has nothing to predict
        return multi_token_prediction.roll_tensor(mask, cp_group=group, packed_seq_params=packed)[1]
    total = mask.sum()
    dist.all_reduce(total, group=group)
    return total


def next_tokens(
    tensor: Tensor, group: dist.ProcessGroup, runtime: Runtime, mask: DocumentMask | None
) -> tuple[Tensor, Tensor]:
    """Gives each token [..., S] of a rank the values of the next token in its sample.

    Args: mask: documents or spans; None: the sequence is one sample.

    Returns: [..., S], 0 for the last token of the sequence and of each sample; the sum over all
    ranks [].
    """
    seq_len = tensor.size(-1) * group.size()
    starts = mask.sample_starts(seq_len) if mask else ()
    resolved = mask.resolved(seq_len) if mask else ()
    local = tensor.contiguous()
    parts = [local]
    if group.size() > 1:
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local, group=group)
    whole = unshard(parts, -1, runtime.config.layout.for_documents(resolved))
    following = functional.pad(whole[..., 1:], (0, 1))
    if starts:  # a list of places is copied to the GPU, and the host waits for it
        following[..., [start - 1 for start in starts]] = 0
    mine = runtime.positions(group, seq_len, whole.device, resolved)
    return following[..., mine], following.sum()
