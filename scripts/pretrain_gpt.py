"""Pretrains a GPT with Megatron-LM's own training loop and a context-parallel algorithm.

torchrun --nproc-per-node 4 scripts/pretrain_gpt.py --config configs/tiny_zigzag.yaml [flags]

Takes any flag of Megatron-LM after the run file, and overrides the file by it.
"""

import sys

from megatron_cp_plugin.ending import whole_program
from megatron_cp_plugin.integration import launch


def main() -> None:
    """Runs the training program with the plugin in force."""
    with whole_program():
        sys.argv[1:] = launch.prepare(sys.argv[1:], run_file=True)
        # Not before: the plugin must be in force when Megatron's names are imported.
        from megatron_cp_plugin.harness.pretrain import run

        run()


if __name__ == "__main__":
    main()
