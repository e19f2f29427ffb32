"""The run files that need GPUs: held against our start-up checks and Megatron's, without them."""

import subprocess
import sys

import pytest

# With the stand-ins of the CPU platform, which stay for the rest of a process.
PROGRAM = """
import argparse, sys
import torch
from megatron_cp_plugin.integration import cpu, gated_delta_net
cpu.install()
from megatron.training.arguments import add_megatron_arguments, validate_args
from megatron_cp_plugin.integration.args import add_arguments, split_flags
from megatron_cp_plugin.integration.checks import check_arguments
from megatron_cp_plugin.integration.yaml_config import yaml_to_argv

gated_delta_net._check_installed = lambda size: None
for word in sys.argv[1:]:
    name, ranks, *more = word.split()
    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    flags, rest = split_flags([*yaml_to_argv(name, parser, more), *more])
    args = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(rest)
    args.world_size, args.rank = int(ranks), 0
    args._is_global_batch_size_explicitly_specified = True
    flags.check()
    check_arguments(args, flags.config(args.context_parallel_size), torch.device("cpu"))
    validate_args(args)
    print("ACCEPTED", word)
"""

RUNS = (
    "llama7b_zigzag_128k 8",
    "llama7b_zigzag_128k 4 --context-parallel-size 4 --num-layers 16",
    "llama3_8b_128k 8",
    "llama3_8b_128k 8 --tensor-model-parallel-size 1 --context-parallel-size 8",
    "llama3_70b_1m 128",
    "llama3_70b_1m 128 --grad-reduce-in-bf16",
    "llama3_8b_sft 8",
    "llama3_8b_sft 8 --context-parallel-algo zigzag --cp-options layout=documents",
    "qwen3_next_64k 8",
    "llama7b_zigzag_128k 8 --context-parallel-algo allgather",
    "llama3_8b_128k 8 --context-parallel-algo zigzag",
    "llama3_8b_128k 8 --context-parallel-algo usp",
    "llama3_8b_128k 8 --context-parallel-algo attention2d",
    "llama33h_distflash_256k 8",
    "llama33h_distflash_256k 2 --context-parallel-size 2 --num-layers 4 --seq-length 65536",
    "llama33h_distflash_256k 8 --context-parallel-algo ulysses",
    "gpt3_2b7_attention2d_128k 16",
    "gpt3_2b7_attention2d_128k 4 --context-parallel-size 4 --num-layers 8 --global-batch-size 1",
    "tnl1b_lasp2_512k 8",
    "tnl1b_lasp2_512k 2 --context-parallel-size 2 --seq-length 131072",
    "tnl1b_lasp2_512k 8 --context-parallel-algo lasp",
    "tnl1b_lasp2_512k 8 --context-parallel-algo linear_ulysses",
    "tnl1b_lasp2_512k 8 --cp-layers lasp2*3,zigzag --cp-options layout=zigzag",
    "llama13b_ring_128k 32",
    "llama13b_ring_128k 32 --context-parallel-algo zigzag",
    "llama13b_ring_128k 4 --context-parallel-size 4 --num-layers 8",
    "llama3_8b_fsdp_128k 8",
    "llama3_8b_fsdp_128k 8 --context-parallel-algo attention2d",
    "llama3_8b_fsdp_128k 2 --context-parallel-size 2 --num-layers 8",
)


@pytest.mark.slow
def test_run_files_and_what_they_propose_are_accepted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *RUNS],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    accepted = [line for line in done.stdout.splitlines() if line.startswith("ACCEPTED")]
    assert accepted == [f"ACCEPTED {run}" for run in RUNS], done.stderr[-3000:]
