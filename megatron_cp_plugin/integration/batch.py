"""Cuts a batch to the tokens that a rank holds under the run's layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.runtime import Runtime


def shard_batch(
    batch: dict[str, Any], group: dist.ProcessGroup, runtime: Runtime
) -> dict[str, Any]:
    """Keeps this rank's part of every tensor of a batch, position ids included.

    Args:
        batch: Tensors [b, N, ...]; `attention_mask` [b, 1, N, N]; None where a pipeline stage
            has no use for a key.
        group: The context-parallel group.
        runtime: The run's layout.

    Returns:
        The same dict.

    Raises:
        ContextParallelError: The batch holds packed sequences.
    """
    if batch.get("cu_seqlens") is not None:
        raise ContextParallelError(
            "packed sequences are not supported: train on sequences of seq_length tokens"
        )
    if group.size() == 1:
        return batch
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            continue
        dim = 2 if key == "attention_mask" else 1
        local = runtime.positions(group, value.size(dim), value.device)
        batch[key] = value.index_select(dim, local)
    return batch
