"""Looks at the attention_mask of a model's call, which the plugin's attention does not use.

Megatron's own unfused attention does, and left-padded batches rely on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp_plugin.errors import ContextParallelError


def refuse(found: Tensor, shape: Sequence[int]) -> None:
    """Raises: ContextParallelError for a mask that `differs`."""
    if found:
        raise ContextParallelError(
            f"attention_mask may only hide later tokens, got one {list(shape)} that differs: leave "
            "it out, pad samples at their ends, or use attention_spans (docs/spans.md)"
        )


def differs(
    mask: Tensor, places: Tensor, seq_len: int, starts: Sequence[int], *, causal: bool
) -> Tensor:
    """Whether a mask shows or hides other tokens than attention does, bool [] on its device.

    What padding sees, which the mask hides from itself, is ignored.

    Args:
        mask: [b,1,q,k], true where a query does not see a key, of all tokens or of this rank's; or
            [b,k] or [b,1,1,k] of padding; [b,k] is false for padding.
        places: int64 [S], the positions of this rank's tokens, on the mask's device.
        seq_len: tokens of the whole sequence.
        starts: where its documents begin.
        causal: whether tokens see earlier ones only.
    """
    if mask.numel() == 1:
        return mask.new_zeros((), dtype=torch.bool)
    if mask.dim() == 2 or (mask.dim() == 4 and mask.size(2) == 1):
        hidden = mask == 0 if mask.dim() == 2 else mask.bool().flatten(1)
        if starts:  # whose padding is known by documents
            return mask.new_zeros((), dtype=torch.bool)
        begins_hidden = hidden[:, :1].any() & (places[:1] == 0).any()
        return begins_hidden | (hidden[:, :-1] & ~hidden[:, 1:]).any()
    of_size = {places.numel(): places, seq_len: torch.arange(seq_len, device=mask.device)}
    if mask.dim() != 4 or not {mask.size(2), mask.size(3)} <= of_size.keys():
        return mask.new_ones((), dtype=torch.bool)
    queries, keys = of_size[mask.size(2)][:, None], of_size[mask.size(3)]
    hidden, own = mask.bool(), keys == queries
    shown = keys <= queries if causal else torch.ones_like(own)
    bounds = torch.tensor(starts, dtype=torch.int64, device=mask.device)
    same = torch.bucketize(keys, bounds, right=True) == torch.bucketize(queries, bounds, right=True)
    padding = (hidden & own).any(-1, keepdim=True)
    differs = (hidden & shown & ~padding) | (~hidden & ~shown)
    return (differs & same).any() | (padding & (queries == 0)).any()
