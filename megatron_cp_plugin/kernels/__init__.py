"""Attention kernels behind one interface, and the choice among them.

The only folder that imports flash_attn, and only on use.
"""

from megatron_cp_plugin.kernels.base import (
    Problem,
    SoftmaxKernel,
    Statistics,
    kernel_names,
    resolve,
)

__all__ = ["Problem", "SoftmaxKernel", "Statistics", "kernel_names", "resolve"]
