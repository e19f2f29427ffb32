"""Imported by the process that `forks` forks: the CPU platform, and what training imports."""

import sys

from megatron_cp_plugin.integration import cpu


def _import_megatron() -> None:
    cpu.install()

    # What Megatron and the plugin import in functions, too.

    import megatron_cp_plugin.algorithms
    import megatron_cp_plugin.integration.checks
    import megatron_cp_plugin.integration.hooks
    import megatron_cp_plugin.integration.parity
    import megatron_cp_plugin.integration.pretrain
    import megatron_cp_plugin.integration.spec
    import megatron_cp_plugin.integration.yaml_config  # noqa: F401

    # It takes names of Megatron, and has to do so after the plugin has replaced them: once a rank.
    del sys.modules["megatron_cp_plugin.integration.pretrain"]


_import_megatron()
