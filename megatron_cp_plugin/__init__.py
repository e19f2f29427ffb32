"""Context parallelism for Megatron: each sequence is split over several GPUs.

    import megatron_cp_plugin as cp

    c = cp.Context(algo="zigzag")
    q, k, v = (c.shard(x) for x in (q, k, v))    # [B,N,H,D] -> [B,S,H,D]
    out = c.attention(q, k, v)                   # differentiable
    whole = c.unshard(out)

Importing this needs torch alone and changes nothing. All exceptions are in `errors`.
"""

from megatron_cp_plugin import algorithms as algorithms  # registers them all
from megatron_cp_plugin import spans
from megatron_cp_plugin.context import Context
from megatron_cp_plugin.core.communication.record import record_communication
from megatron_cp_plugin.decoding import decode_attention
from megatron_cp_plugin.functional import (
    attention,
    check_layout,
    chunked_cross_entropy,
    chunked_log_probs,
    linear_attention,
    one_line_errors,
    release,
    shard,
    unshard,
)
from megatron_cp_plugin.registry import available, register
from megatron_cp_plugin.rollouts import pack_rollouts

__version__ = "0.3.0"

__all__ = [
    "Context",
    "attention",
    "available",
    "check_layout",
    "chunked_cross_entropy",
    "chunked_log_probs",
    "decode_attention",
    "linear_attention",
    "one_line_errors",
    "pack_rollouts",
    "record_communication",
    "register",
    "release",
    "shard",
    "spans",
    "unshard",
]
