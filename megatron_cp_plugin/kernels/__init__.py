"""Attention kernels that implement the interfaces of `core`, and the choice among them.

The only folder that imports flash_attn, fla and Triton, and only on use.
"""

from functools import cache, partial
from importlib import import_module

from megatron_cp_plugin.core.partial import register_fused
from megatron_cp_plugin.kernels.choice import kernel_names, register_kernel, resolve, resolver

__all__ = ["kernel_names", "register_kernel", "resolve", "resolver"]

register_fused("cuda", cache(partial(import_module, "megatron_cp_plugin.kernels.fused")))
