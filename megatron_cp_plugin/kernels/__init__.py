"""Attention kernels that implement the interfaces of `core`, and the choice among them.

The only folder that imports flash_attn, fla and Triton, and only on use.
"""

from functools import cache

from megatron_cp_plugin.core.fused import FusedOperations, register_fused
from megatron_cp_plugin.kernels.base import kernel_names, register_kernel, resolve, resolver

__all__ = ["kernel_names", "register_kernel", "resolve", "resolver"]


@cache
def _load_fused() -> FusedOperations:
    from megatron_cp_plugin.kernels import fused

    return fused


register_fused("cuda", _load_fused)
