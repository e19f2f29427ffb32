"""The plugin for programs that build megatron.core models: verl, slime, Bridge, ...

    from megatron_cp_plugin import megatron as cp_megatron

    cp_megatron.install("zigzag", layout="thd")    # in the worker, after Megatron's parallel state

Importing this imports megatron.core, and changes nothing.
"""

from megatron_cp_plugin.integration.documents import attention_spans
from megatron_cp_plugin.integration.install import install, uninstall

__all__ = ["attention_spans", "install", "uninstall"]
