"""All algorithms by name: importing this package registers them."""

from megatron_cp_plugin.algorithms import ring

__all__ = ["ring"]
