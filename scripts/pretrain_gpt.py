"""Pretrains a GPT with Megatron-LM's own training loop and a context-parallel algorithm.

torchrun --nproc-per-node 4 scripts/pretrain_gpt.py --config configs/tiny_zigzag.yaml [flags]

Takes any flag of Megatron-LM after the run file, and overrides the file by it. The same as
`torchrun --nproc-per-node 4 -m megatron_cp_plugin.cli train --config tiny_zigzag [flags]`.
"""

import sys

from megatron_cp_plugin.harness.train import train

if __name__ == "__main__":
    train(sys.argv[1:])
