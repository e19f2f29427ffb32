"""One rank of a job, as a fork of a process that has imported Megatron, which takes seconds.

The module is what multiprocessing's fork server imports. A fork is a process of its own, with its
own torch.distributed; it runs scripts/pretrain_gpt.py from the top and may be killed.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_cp_plugin.integration import cpu

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"


def _import_megatron() -> None:
    cpu.install()
    # What Megatron imports in its functions.

    import megatron_cp_plugin.algorithms
    import megatron_cp_plugin.integration.hooks
    import megatron_cp_plugin.integration.parity
    import megatron_cp_plugin.integration.pretrain
    import megatron_cp_plugin.integration.spec
    import megatron_cp_plugin.integration.yaml_config  # noqa: F401

    # It takes names of Megatron, and has to do so after the plugin has replaced them: once a rank.
    del sys.modules["megatron_cp_plugin.integration.pretrain"]


def main(
    arguments: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path
) -> None:
    """Runs the script as `python scripts/pretrain_gpt.py *arguments` would."""
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.update(environment)
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


_import_megatron()
