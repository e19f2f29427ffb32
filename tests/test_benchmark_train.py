"""The benchmark of training steps: its plan, and a job of several lengths on the CPU platform."""

import json
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import benchmark_train
import pytest
import torch
from benchmark_train_job import OUT_OF_MEMORY, Plan, Report, is_out_of_memory, read_reports

from tests.integration.megatron_job import Job, run_program

# The last length is more than memory holds. In a fork the CPU platform stands for a GPU at once.
JOB = """
import torch, benchmark_train_job as job
job.KERNEL_PACKAGES = ()
batch = job._batch
def limited(plan, tokens):
    if tokens > 64:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return batch(plan, tokens)
job._batch = limited
job.main()
"""


def arguments(monkeypatch: pytest.MonkeyPatch, words: str) -> Namespace:
    monkeypatch.setattr(sys, "argv", ["benchmark_train.py", *words.split()])
    return benchmark_train.parse()


def test_jobs_are_spread_over_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(
        monkeypatch,
        "--gpus 1,2,4 --runs zigzag,te:p2p --recompute full,full-twice --tokens 2K,1K --per-gpu",
    )
    cases = benchmark_train.plan_cases(args)
    assert [(case.name, case.recompute, case.devices) for case in cases] == [
        ("zigzag", "full", (0, 1, 2, 3)),
        ("te:p2p", "full", (0, 1, 2, 3)),
        ("zigzag", "full-twice", (0, 1, 2, 3)),
        ("zigzag", "full", (0, 1)),
        ("te:p2p", "full", (2, 3)),
        ("zigzag", "full-twice", (0, 1)),
        ("zigzag", "full", (2,)),
        ("te:p2p", "full", (3,)),
        ("zigzag", "full-twice", (0,)),
    ]
    assert {case.lengths for case in cases if len(case.devices) == 4} == {(4096, 8192)}
    assert {case.lengths for case in cases if len(case.devices) == 1} == {(1024, 2048)}


def test_pipelines_replicas_and_nodes_share_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Eight ranks on four GPUs: two stages of two replicas of two context-parallel ranks."""
    args = arguments(
        monkeypatch,
        "--net nodes --gpus 4 --pipeline 2 --data 2 --micro-batches 3 --runs zigzag,tp --tokens 1K",
    )
    for case, flag in zip(
        benchmark_train.plan_cases(args),
        ("--context-parallel-size", "--tensor-model-parallel-size"),
        strict=True,
    ):
        for node in range(2):
            words = benchmark_train.command(args, case, tmp_path, 0, node)
            given = dict(pairwise(words))
            assert (given["--nproc-per-node"], given["--nnodes"]) == ("4", "2")
            assert given["--node-rank"] == str(node)
            assert (given["--pipeline-model-parallel-size"], given[flag]) == ("2", "2")
            assert given["--global-batch-size"] == "6"
        row = benchmark_train.row(args, case, Report(1024, (500.0,)))
        assert row.tokens_per_s == pytest.approx(6 * 1024 / 0.5)


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("llama7b", 6.7384),
        ("llama13b", 13.0158),
        ("llama3-8b", 8.0303),
        ("gpt3-66b", 65.23 + 2 * 9216 * 32e-6),
        ("gpt3-175b", 173.95 + 2 * 12288 * 32e-6),
        ("tnl-0.4b", 0.4645),
        ("tnl-1b", 1.1512),
    ],
)
def test_operations_of_a_weight_are_six_a_token(shape: str, billions: float) -> None:
    """Parameters: Llama-2's as published; TransNormerLLM's with an output layer of its own."""
    model = benchmark_train.SHAPES[shape]
    embedding = model.hidden * model.vocabulary  # multiplies nothing
    width = 2 * model.hidden // model.heads if model.linear else 1
    attention = 6 * model.layers * model.hidden * width
    weights = (benchmark_train.work(model, (0, 1)) - attention) / 6 + embedding
    assert weights / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.timeout(300)
def test_a_job_measures_until_memory_is_exhausted(tmp_path: Path) -> None:
    plan, job = measure(tmp_path, "tnl-tiny", "lasp")
    assert [process.returncode for process in job.processes] == [OUT_OF_MEMORY], job.text[-3000:]
    short, long, exhausted = read_reports(job.text)
    assert (short.tokens, long.tokens, exhausted.tokens) == (32, 64, 128)
    assert exhausted.out_of_memory
    for report in (short, long):
        assert not report.out_of_memory
        assert {"before the forward", "after the forward"} < report.points_bytes.keys()
        assert (len(report.step_ms),) == plan.iters
        assert min(report.step_ms) > 0
        assert report.loss == pytest.approx(5.5, abs=0.3)  # untrained: log 256


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("shape", "name", "twin"),
    [
        ("tiny", "tp", "tp:zigzag"),
        ("tiny-3h", "tp-v1", "tp:zigzag"),
        ("tnl-tiny", "tp:lasp2", "tp:lasp"),
    ],
)
def test_tensor_parallel_ranks_measure_the_same_lengths(
    tmp_path: Path, shape: str, name: str, twin: str
) -> None:
    """Two ranks: each measures all lengths, though only the first gets Megatron's batches. The
    model is the same whoever computes attention, and however the rest is split among the ranks.
    """
    _, job = measure(tmp_path, shape, name, ranks=2)
    short, long, exhausted = read_reports(job.text)
    assert exhausted.out_of_memory, job.text[-3000:]
    others = read_reports(measure(tmp_path, shape, twin, ranks=2)[1].text)
    assert (short.tokens, long.tokens, exhausted.tokens) == (32, 64, 128)
    for report, other in zip((short, long), others, strict=False):
        assert report.loss == pytest.approx(other.loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_packed_documents_have_one_loss_however_they_are_split(tmp_path: Path) -> None:
    # Of 44 and 20 tokens in the long sequence: multiples of twice the ranks, be they one or two.
    found = []
    for name, ranks, documents in (
        ("zigzag", 1, ""),
        ("zigzag", 1, "23"),
        ("zigzag:layout=documents", 2, "23"),
        ("zigzag:layout=thd", 2, "23"),
    ):
        _, job = measure(tmp_path, "tiny", name, ranks, documents=documents)
        *lengths, exhausted = read_reports(job.text)
        assert exhausted.out_of_memory, job.text[-3000:]
        found.append([report.loss for report in lengths])
    without, whole, *split = found
    assert abs(without[1] - whole[1]) > 1e-5
    for losses in split:
        assert losses == pytest.approx(whole, rel=1e-6)


def test_the_work_of_packed_documents() -> None:
    model = benchmark_train.SHAPES["llama7b"]
    packed, whole = (
        benchmark_train.work(model, bounds) for bounds in ((0, 1000, 4000, 4096), (0, 4096))
    )
    squares = 4096**2 - 1000**2 - 3000**2 - 96**2
    assert whole - packed == pytest.approx(6 * 32 * 4096 * squares, rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_token_is_the_same_however_a_prompt_is_split(tmp_path: Path) -> None:
    """The largest logit of the last token, which the last rank has, the first, or all."""
    found = {}
    for name, ranks in (("zigzag", 1), ("zigzag", 2), ("distflash", 2), ("ulysses", 2)):
        _, job = measure(tmp_path, "tiny", name, ranks, prefill=True)
        short, long, exhausted = read_reports(job.text)
        assert exhausted.out_of_memory, job.text[-3000:]
        assert min(*short.step_ms, *long.step_ms) > 0
        found[name, ranks] = [short.loss, long.loss]
    whole = found.pop(("zigzag", 1))
    assert abs(whole[0] - whole[1]) > 1e-4
    for name, logits in found.items():
        assert logits == pytest.approx(whole, rel=1e-5), name
    for name in ("tp", "tp-v1"):
        _, job = measure(tmp_path, "tiny", name, 2, prefill=True)
        assert len([report for report in read_reports(job.text) if report.loss > 0]) == 2


def test_the_work_of_a_prompt() -> None:
    """Twice the weights of the layers a token, half of all scores, and logits of one token."""
    model = benchmark_train.SHAPES["llama7b"]
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    tokens = 2**15
    expected = 2 * tokens * layers + 32 * 2 * tokens**2 * 4096 + 2 * 4096 * 32000
    assert benchmark_train.prefill_work(model, tokens) == pytest.approx(expected, rel=1e-9)


def measure(
    folder: Path,
    shape: str,
    name: str,
    ranks: int = 1,
    *,
    prefill: bool = False,
    documents: str = "",
) -> tuple[Plan, Job]:
    """Lengths of 32, 64 and 128 tokens, for the last of which there is no memory."""
    gate = folder / "gate"
    gate.touch()
    plan = Plan((32, 64), True, (1,), (2,), 256, str(gate), False, prefill, documents)
    plan = replace(plan, multiple=2 * ranks)
    recompute = "none" if prefill else "full"
    case = benchmark_train.Case(name, recompute, tuple(range(ranks)), plan.lengths)
    args: Any = Namespace(
        shape=shape,
        layers=None,
        kv_heads=None,
        extra="",
        longest=True,
        warmup=(1,),
        iters=(2,),
        profile=False,
        micro_batches=1,
        pipeline=1,
        data=1,
        tensor=1,
        net="default",
        prefill=prefill,
        documents=documents,
        sharding="optimizer",
        states="float32",
        lean_loss=False,
    )
    words = benchmark_train.command(args, case, gate, 0)
    start = next(at for at, word in enumerate(words) if word.endswith("benchmark_train_job.py"))
    assert json.loads(words[start + 1]) == json.loads(json.dumps(asdict(plan)))
    program = f"import sys; sys.path.insert(0, {str(Path(words[start]).parent)!r}){JOB}"
    place = folder / f"{name.replace(':', '_')}-{ranks}{documents}"
    place.mkdir()
    flags = (*words[start + 1 :], "--cp-platform", "cpu")
    return plan, run_program(place, "-c", program, *flags, ranks=ranks)


def test_out_of_memory_in_other_libraries() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("NCCL error: Cuda failure 2 'out of memory'"))
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
