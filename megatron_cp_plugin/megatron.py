"""The plugin for programs that build megatron.core models: verl, slime, Bridge, ...

    from megatron_cp_plugin import megatron as cp_megatron

    cp_megatron.install("zigzag", layout="thd")    # in the worker, after Megatron's parallel state

Importing this imports megatron.core, and changes nothing.
"""

from megatron_cp_plugin.integration.documents import attention_spans
from megatron_cp_plugin.integration.install import adopt, install, serve, uninstall

__all__ = ["adopt", "attention_spans", "install", "serve", "uninstall"]
