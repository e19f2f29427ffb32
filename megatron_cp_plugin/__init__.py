"""Context parallelism for Megatron: each sequence is split over several GPUs.

    import megatron_cp_plugin as cp

    q, k, v = (cp.shard(x, dim=1, algo="zigzag") for x in (q, k, v))
    out = cp.attention(q, k, v, algo="zigzag")       # [B,S,H,D], differentiable
    whole = cp.unshard(out, dim=1, algo="zigzag")

Importing this needs torch alone and changes nothing. All exceptions are those of `errors`.
"""

from megatron_cp_plugin import algorithms as algorithms  # registers them all
from megatron_cp_plugin import spans
from megatron_cp_plugin.core.comm import record_communication
from megatron_cp_plugin.functional import (
    attention,
    check_layout,
    chunked_cross_entropy,
    linear_attention,
    release,
    shard,
    unshard,
)
from megatron_cp_plugin.registry import available, register

__version__ = "0.1.0.dev0"

__all__ = [
    "attention",
    "available",
    "check_layout",
    "chunked_cross_entropy",
    "linear_attention",
    "record_communication",
    "register",
    "release",
    "shard",
    "spans",
    "unshard",
]
