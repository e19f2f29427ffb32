"""Megatron's activation recomputation with attention that runs once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.autograd.host_memory import HostMemory
from megatron_cp_plugin.harness.parity import Recording
from megatron_cp_plugin.integration.args import split_flags
from megatron_cp_plugin.integration.checks import describe_recompute
from megatron_cp_plugin.integration.installer import checkpoint
from megatron_cp_plugin.integration.settings import Settings
from tests.integration.megatron_job import TINY, run_warm

ALGO = ["--context-parallel-algo", "distflash"]


def arguments(**changes: Any) -> SimpleNamespace:
    settings: dict[str, Any] = {
        "recompute_activations": False,
        "recompute_granularity": "full",
        "recompute_modules": None,
        "seq_length": 131072,
        "micro_batch_size": 1,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "kv_channels": None,
        "tensor_model_parallel_size": 2,
        "bf16": True,
        "fp16": False,
    }
    return SimpleNamespace(**(settings | changes))


def test_the_memory_of_out_and_lse_is_stated() -> None:
    line = describe_recompute(Settings(arguments(), ContextParallelConfig("ring", 4)))
    kept = 131072 / 4 * 16 * (128 * 2 + 4) / 2**20
    assert line is not None
    assert f"attention runs once, its output and lse are kept, {kept:g} MiB" in line


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_granularity": None},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    ],
)
def test_nothing_is_said_where_attention_is_not_recomputed(changes: dict[str, Any]) -> None:
    assert (
        describe_recompute(Settings(arguments(**changes), ContextParallelConfig("ring", 4))) is None
    )


def test_the_old_flag_for_selective_counts() -> None:
    settings = arguments(recompute_granularity=None, recompute_activations=True)
    line = describe_recompute(Settings(settings, ContextParallelConfig("ring", 4)))
    assert line is not None
    assert line.startswith("recompute (selective): attention runs once")


def test_the_memory_of_latent_attention_is_that_of_its_values() -> None:
    dims = {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 96}
    settings = arguments(multi_latent_attention=True, **dims)
    kept = 131072 / 4 * 16 * (96 * 2 + 4) / 2**20
    assert f"are kept, {kept:.3g} MiB" in str(
        describe_recompute(Settings(settings, ContextParallelConfig("ring", 4)))
    )


def test_running_twice_is_said() -> None:
    line = describe_recompute(
        Settings(arguments(), ContextParallelConfig("ring", 4, recompute_attention=True))
    )
    assert line == "recompute (full): attention and its communication run twice"


def test_the_flag_reaches_the_configuration() -> None:
    for words, wanted in ((ALGO, False), ([*ALGO, "--cp-recompute-attention"], True)):
        flags, rest = split_flags(words)
        assert flags.config(4).recompute_attention is wanted
        assert rest == []


def test_each_checkpoint_gets_a_function_of_its_own() -> None:
    given = []
    for _ in range(2):
        checkpoint(
            HostMemory(), lambda function, *args: given.append((function, args)), print, False, 1
        )
    (first, args), (second, _) = given
    assert first is not second
    assert args == (False, 1)


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
RUNS = {
    "none": "",
    "full": FULL,
    "full twice": f"{FULL} --cp-recompute-attention",
}
# Layers of both kinds on each pipeline stage: the first and third, the second and fourth.
LAYERS = ("--cp-layers", "lasp, distflash, distflash, lasp2", "--cp-linear-model", "transnormer")
# 2 micro-batches through an interleaved pipeline, and evaluation after each iteration.
PIPELINE = (
    "--context-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 "
    "--num-layers-per-virtual-pipeline-stage 1 --train-iters 2 "
    "--eval-interval 1 --eval-iters 1"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_gives_the_same_bits(tmp_path: Path) -> None:
    recordings = {}
    for name, flags in RUNS.items():
        words = [
            *TINY,
            *PIPELINE.split(),
            *LAYERS,
            *flags.split(),
            "--cp-record",
            str(tmp_path / name),
        ]
        run_warm(tmp_path / name, *words, ranks=4).succeeded()
        recordings[name] = Recording.load(tmp_path / name)
    want = recordings.pop("none")
    assert want.sent_bytes() > 0
    for name, got in recordings.items():
        times = 2 if name == "full twice" else 1
        for mine, other in zip(got.ranks, want.ranks, strict=True):
            assert mine.gradients == other.gradients
            assert [(i.losses, i.grad_norm) for i in mine.iterations] == [
                (i.losses, i.grad_norm) for i in other.iterations
            ]
            sent, once = mine.sent_bytes[1], other.sent_bytes[1]
            assert sent["forward"] == times * once["forward"]
            assert sent["backward"] == once["backward"]
