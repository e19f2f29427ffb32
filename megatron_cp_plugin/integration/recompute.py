"""Megatron's activation checkpointing, without a second run of attention.

Megatron checkpoints a layer, a group of layers (`--recompute-granularity full`) or the core
attention (`selective`) by giving one function to its `checkpoint`. Each such call is given a
`Checkpointed` function here, which keeps what attention computed until the recomputation uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_cp_plugin.core.autograd.recompute import Checkpointed
from megatron_cp_plugin.integration.settings import Settings


def checkpoint(original: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """Calls Megatron's or Transformer Engine's `checkpoint`; the function keeps attention."""
    return original(Checkpointed(function), *args)


def describe(settings: Settings) -> str | None:
    """Returns one line on what is kept and how much memory it takes.

    Returns:
        None where Megatron recomputes no attention.
    """
    s, granularity = settings, settings.recomputes
    if granularity is None:
        return None
    if s.cp.recompute_attention:
        return f"recompute ({granularity}): attention and its communication run twice"
    if None in (s.seq_length, s.num_attention_heads, s.hidden_size):
        return f"recompute ({granularity}): attention runs once, its output and lse are kept"
    heads, _ = s.split_heads
    tokens = s.samples * s.seq_length // s.cp.size
    # out [B,S,H,E] in the model's dtype, lse [B,H,S] in float32.
    row_bytes = s.head_dims[1] * s.dtype.itemsize + 4
    return (
        f"recompute ({granularity}): attention runs once, its output and lse are kept, "
        f"{tokens * heads * row_bytes / 2**20:.3g} MiB for each layer and micro-batch; "
        "--cp-recompute-attention runs it twice instead"
    )
