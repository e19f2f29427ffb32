"""Cuts a batch to the tokens that a rank holds under the run's layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_cp_plugin.core.documents import document_starts
from megatron_cp_plugin.integration.runtime import Runtime

_OF_DOCUMENTS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")


def shard_batch(
    batch: dict[str, Any], group: dist.ProcessGroup, runtime: Runtime
) -> dict[str, Any]:
    """Keeps this rank's part of every tensor of a batch, position ids included.

    Args:
        batch: Tensors [b, N, ...]; `attention_mask` [b, 1, N, N]; None where a pipeline stage
            has no use for a key. What tells of documents stays as it is.
        group: The context-parallel group.
        runtime: The run's layout.

    Returns:
        The same dict.
    """
    if group.size() == 1:
        return batch
    documents: tuple[int, ...] = ()
    if runtime.follows_documents:
        documents = runtime.cut = _documents_of(batch)
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) or key in _OF_DOCUMENTS:
            continue
        dim = 2 if key == "attention_mask" else 1
        local = runtime.positions(group, value.size(dim), value.device, documents)
        batch[key] = value.index_select(dim, local)
    return batch


def _documents_of(batch: dict[str, Any]) -> tuple[int, ...]:
    """Where documents begin, as the model will be told: those of padded lengths if there are."""
    padded = batch.get("cu_seqlens_padded")
    lengths = batch.get("cu_seqlens") if padded is None else padded
    if lengths is None:
        return ()
    bounds = lengths.flatten().tolist()
    return document_starts(bounds, bounds[-1])
