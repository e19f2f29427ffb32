"""The run files that need GPUs: held against our start-up checks and Megatron's, without them, and
started on two of them with fewer and smaller layers.

    pytest -m gpu tests/integration/test_run_files.py
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.harness import prepare_data
from megatron_cp_plugin.planner.command import megatron_settings, write_run_file
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.model import MODELS, Split
from megatron_cp_plugin.planner.splits import Job
from tests.integration.conversations import write_conversations
from tests.integration.megatron_job import SCRIPT, run, run_program

# With the stand-ins of the CPU platform, which stay for the rest of a process.
PROGRAM = """
import argparse, sys
import torch
from megatron.core.ssm import gated_delta_net
from megatron.training.arguments import add_megatron_arguments, validate_args
from megatron_cp_plugin.integration.args import add_arguments, split_flags
from megatron_cp_plugin.integration.checks import check_arguments
from megatron_cp_plugin.integration.yaml_config import yaml_to_argv

gated_delta_net.HAVE_FLA = True
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

# Each on two GPUs: heads as a tensor-parallel rank has them, the layers narrower.
SMALL = (
    "--tensor-model-parallel-size 1 --num-layers 2 --hidden-size 1024 --ffn-hidden-size 2048 "
    "--seq-length 8192 --max-position-embeddings 8192 --global-batch-size 2 --train-iters 3 "
    "--lr-warmup-iters 1 --num-workers 0"
)
VOCABULARY = 8192
OF_RANDOM_TOKENS = f"{SMALL} --vocab-size {VOCABULARY}"
OF_A_RANK = "--kv-channels 128 --num-attention-heads"
SCALED = {
    "llama7b_zigzag_128k": f"{OF_RANDOM_TOKENS} {OF_A_RANK} 32",
    "llama3_8b_128k": f"{OF_RANDOM_TOKENS} {OF_A_RANK} 16 --num-query-groups 4",
    "llama3_70b_1m": f"{OF_RANDOM_TOKENS} {OF_A_RANK} 8 --num-query-groups 1",
    "llama3_8b_sft": f"{SMALL} {OF_A_RANK} 16 --num-query-groups 4",
    "qwen3_next_64k": f"{OF_RANDOM_TOKENS} --num-layers 4 --num-experts 8 --moe-router-topk 2 "
    "--expert-model-parallel-size 2",
    "llama33h_distflash_256k": f"{OF_RANDOM_TOKENS} {OF_A_RANK} 33",
    "gpt3_2b7_attention2d_128k": f"{OF_RANDOM_TOKENS} {OF_A_RANK} 32 --kv-channels 80",
    "llama13b_ring_128k": f"{OF_RANDOM_TOKENS} {OF_A_RANK} 40",
    "llama3_8b_fsdp_128k": f"{OF_RANDOM_TOKENS} {OF_A_RANK} 32",
    "tnl1b_lasp2_512k": f"{OF_RANDOM_TOKENS} --hidden-size 2048",
    "tnl400m_lasp2_16k": OF_RANDOM_TOKENS,
    "lt400m_lasp2_16k": OF_RANDOM_TOKENS,
}
# The same unsplit, by Megatron's own attention where it has the model. The weights of gated delta
# nets come from other numbers then, and those of experts from other generators.
UNSPLIT = dict.fromkeys(SCALED, "--context-parallel-algo megatron --context-parallel-size 1")
for _name in ("tnl1b_lasp2_512k", "tnl400m_lasp2_16k", "lt400m_lasp2_16k"):
    UNSPLIT[_name] = "--context-parallel-size 1"
del UNSPLIT["qwen3_next_64k"]

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
    "tnl400m_lasp2_16k 2",
    "tnl400m_lasp2_16k 1 --context-parallel-size 1",
    "lt400m_lasp2_16k 2",
    "llama13b_ring_128k 32",
    "llama13b_ring_128k 32 --context-parallel-algo zigzag",
    "llama13b_ring_128k 4 --context-parallel-size 4 --num-layers 8",
    "llama3_8b_fsdp_128k 8",
    "llama3_8b_fsdp_128k 8 --context-parallel-algo attention2d",
    "llama3_8b_fsdp_128k 2 --context-parallel-size 2 --num-layers 8",
    *(f"{name} 2 --context-parallel-size 2 {words}" for name, words in SCALED.items()),
)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_run_files_train_on_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten runs at once: most of the time is spent on starting."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, found {torch.cuda.device_count()}")
    write_conversations(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    readme, text = Path(__file__).parents[2] / "README.md", str(tmp_path / "text")
    assert prepare_data.main([str(readme), "--output", text]) == 0
    tokenizer = f"--tokenizer-model {tmp_path}/tokenizer"
    data = {
        "llama3_8b_sft": f"--data-path {tmp_path}/data.jsonl {tokenizer}",
        "tnl400m_lasp2_16k": f"--data-path {text}",
        "lt400m_lasp2_16k": f"--data-path {text}",
    }

    def losses(name: str, split: bool) -> list[float]:
        words = [*SCALED[name].split(), *data.get(name, "").split()]
        words += ["--context-parallel-size", "2"] if split else UNSPLIT[name].split()
        words += ["--data-cache-path", str(tmp_path / f"{name}-{split}")]
        command = (str(SCRIPT), "--config", name)
        more = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"} if "fsdp" in name else {}
        job = run(*words, ranks=1 + split, program=command, variables=more)
        return job.succeeded().losses

    with ThreadPoolExecutor(10) as pool:
        started = {name: pool.submit(losses, name, True) for name in SCALED}
        unsplit = {name: pool.submit(losses, name, False) for name in UNSPLIT}
        found = {name: job.result() for name, job in started.items()}
        expected = {name: job.result() for name, job in unsplit.items()}
    for name in UNSPLIT:
        assert len(found[name]) == 3
        assert found[name] == pytest.approx(expected[name], rel=2e-3), name
    assert found["qwen3_next_64k"][0] == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert all(map(math.isfinite, found["qwen3_next_64k"]))


def check_accepted(folder: Path, runs: Sequence[str]) -> None:
    done = run_program(folder, "-c", PROGRAM, *runs).processes[0]
    accepted = [line for line in done.stdout.splitlines() if line.startswith("ACCEPTED")]
    assert accepted == [f"ACCEPTED {run}" for run in runs], done.stderr[-3000:]


@pytest.mark.slow
def test_run_files_and_what_they_propose_are_accepted(tmp_path: Path) -> None:
    check_accepted(tmp_path, RUNS)


@pytest.mark.slow
def test_what_the_planner_writes_is_accepted(tmp_path: Path) -> None:
    """By Megatron too, once data, tokenizer and learning rate are given."""
    machine, runs = Machine.load("h100_400g"), []
    given = "--mock-data --tokenizer-type NullTokenizer --vocab-size 8192 --train-iters 3 --lr 1e-5"
    for name in ("llama3-8b", "mixtral-8x7b", "deepseek-v3"):
        split = Split(2, 4, 1, 2, 8 if MODELS[name].experts else 1, 1, 4, "full")
        for sharded in (False, True):
            one = replace(split, sharded=sharded)
            job = Job(MODELS[name], 65536, split.gpus, machine, "flash4", Mask(), 8)
            path = tmp_path / f"{name}-{sharded}.yaml"
            write_run_file(path, megatron_settings(job, one), "zigzag", ())
            runs.append(f"{path} {split.gpus} {given}")
    check_accepted(tmp_path, runs)
