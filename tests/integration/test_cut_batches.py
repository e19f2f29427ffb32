"""Packed batches as verl, slime, ms-swift and Megatron-Bridge cut them, each document by itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cut_batches_job import BATCHES, CASES, CHOSEN, FEW, INSTALLED, SERVED
from tests.integration.megatron_job import TINY, run_warm

JOB = Path(__file__).with_name("cut_batches_job.py")
BOUNDS = {"loss": 1e-5, "log-probs": 1e-4, "gradients": 1e-4}


def run(folder: Path, *words: str, ranks: int) -> list[dict[str, Any]]:
    """What each rank found."""
    job = run_warm(folder, *words, ranks=ranks, script=JOB).succeeded()
    return [json.loads(p.stdout.split("FOUND")[-1].splitlines()[0]) for p in job.processes]


def check(errors: dict[str, dict[str, float]], case: str) -> None:
    """Every batch gave what each of its documents gives alone."""
    assert len(errors) in (len(CASES), len(FEW))
    for batch, off in errors.items():
        for name, bound in BOUNDS.items():
            assert off[name] <= bound, f"{case}, {batch}: {name} is off by {off[name]:.1e}"


@pytest.mark.slow
def test_models(tmp_path: Path) -> None:
    """Other KV heads, which need other teams and grids; gated delta nets, whose states pass through
    the chunks of each document.
    """
    assert_equal(run(tmp_path, "models", "3", ranks=3), "models")


def assert_equal(found: list[dict[str, Any]], way: str) -> None:
    for rank, results in enumerate(found):
        rows = [f"{algo}, {name}" for algo, _, name in INSTALLED[way]]
        assert list(results["compared"]) == rows
        for case, errors in results["compared"].items():
            check(errors, f"{case} on rank {rank}")


@pytest.mark.slow
def test_install(tmp_path: Path) -> None:
    """Every algorithm, one after another in the same processes; `test_algorithms` has two."""
    size = 4
    found = run(tmp_path, "install", str(size), ranks=size)
    assert_equal(found, "install")
    for rank, results in enumerate(found):
        refused, without = results["refused"], results["without"]
        said = ["cp_comm_type a2a is replaced: attention is computed by zigzag, which was named"]
        assert results["logged"] == (said if rank == 0 else [])  # of two models, once
        # Once it is not installed any more, the process has Megatron's own attention.
        assert "Context parallelism is only supported by TEDotProductAttention" in without
        assert all("\n" not in line for line in refused.values())
        for name, words in {
            "another size": f"size of its context-parallel group, {size}, got {size + 1}: set it",
            "two algorithms": "got ring (layout=thd) after zigzag (layout=thd): leave one",
            "two choices": "got auto (layout=thd, tokens=128) after auto (layout=thd, tokens=64, ",
        }.items():
            assert words in refused[name], (name, refused[name])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tensor"), [(1, 1), (2, 2)])
def test_micro_batches_choose_their_ranks(tmp_path: Path, size: int, tensor: int) -> None:
    """Dynamic context-parallel sizes: groups of data- and context-parallel ranks."""
    words = "dynamic", str(size), str(tensor)
    for rank, results in enumerate(run(tmp_path, *words, ranks=4)):
        assert len(results["compared"]) == len(CHOSEN[tensor])
        for case, off in results["compared"].items():
            for name, bound in BOUNDS.items():
                assert off[name] <= bound, f"{case} on rank {rank}: {name} by {off[name]:.1e}"
        refused = results["refused"]
        assert "need a cp_group that was there when the model" in refused["another group"]
        said = f"local_cp_size 99, got one of {4 // tensor} ranks: pass"
        assert said in refused["another size"]


def test_micro_batches_of_a_pipeline_choose_their_ranks(tmp_path: Path) -> None:
    for off in run(tmp_path, "dynamic pipeline", "2", ranks=4):
        assert off["gradients"] <= BOUNDS["gradients"]


@pytest.mark.slow
def test_algorithms(tmp_path: Path) -> None:
    for results in run(tmp_path, "algorithms", "2", ranks=2):
        spanned = {f"{algo}, spans" for algo in SERVED}
        images = {f"{algo}, images" for algo in ("zigzag", "ulysses")}
        more = {"auto", "zigzag, latents", "zigzag, offloaded", "zigzag, layers offloaded"}
        assert results["compared"].keys() == SERVED.keys() | more | spanned | images
        for algo, errors in results["compared"].items():
            check(errors, algo)
        said = (
            "context parallelism does not support Megatron's KV cache, got inference_context with "
            "context_parallel"
        )
        assert said in results["generates"]
        # One or two of the last messages may be under way when they are counted.
        assert max(results["left"].values()) < 5


@pytest.mark.slow
def test_beside_pipeline_parallelism(tmp_path: Path) -> None:
    """Micro-batches of other documents follow one another; zigzag computes attention again."""
    for results in run(tmp_path, "pipeline", "2", ranks=4):
        seen = 2 * len(BATCHES) if results.pop("is last") else 0
        assert results.keys() == {f"{algo}, {1 + n % 2}" for n, algo in enumerate(SERVED)}
        for case, off in results.items():
            assert off.pop("seen") == seen
            for name, error in off.items():
                assert error <= BOUNDS[name], f"{case}: {name} is off by {error:.1e}"


@pytest.mark.slow
def test_launcher(tmp_path: Path) -> None:
    flags = "--context-parallel-algo zigzag --cp-options layout=thd --context-parallel-size 4"
    for results in run(tmp_path, "launcher", *TINY, *flags.split(), ranks=4):
        check(results["zigzag"], "zigzag by the launcher")
