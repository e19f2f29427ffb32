"""`megatron-cp invariance`: log-probabilities with context parallelism and without."""

import json
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import megatron_cp_plugin as cp
from megatron_cp_plugin import cli
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.harness import invariance
from megatron_cp_plugin.harness.invariance import DtypeRuns, LogProbs, check_comparable, runs_of
from megatron_cp_plugin.harness.train import CommandLine
from megatron_cp_plugin.log_prob_report import LogProbReport
from tests import forked_launch
from tests.integration.megatron_job import TINY, run_warm

JOB = Path(__file__).parent / "integration" / "faulty_log_probs_job.py"
CP = ("--context-parallel-algo", "zigzag", "--context-parallel-size", "2")
ROPE = (*TINY, "--position-embedding-type", "rope")
LINEAR = (*TINY, *"--context-parallel-algo lasp2 --cp-linear-model linear_transformer".split())
RUN = (*"--skip-train --eval-iters 1 --train-iters 1".split(),)


def computed(folder: Path, fault: str, size: int, *words: str, batch: str = "-") -> LogProbs:
    out = folder / "found"
    out.mkdir(parents=True)
    run_warm(folder, fault, str(out), batch, *words, *RUN, ranks=size, script=JOB).succeeded()
    return LogProbs.load(out)


def report(reference: LogProbs, noise: LogProbs | None, **runs: LogProbs) -> LogProbReport:
    for name, run in runs.items():
        check_comparable(name, run, reference)
    return cp.log_prob_report(
        reference.log_probs,
        {name: run.log_probs for name, run in runs.items()},
        noise=None if noise is None else noise.log_probs,
        counts=reference.counts,
        ranks={name: run.ranks for name, run in runs.items()},
        dtype=torch.float32,
    )


def test_positions_that_are_off_by_one_on_a_rank_are_found(tmp_path: Path) -> None:
    reference = computed(tmp_path / "cp1", "none", 1, *ROPE)
    noise = computed(tmp_path / "noise", "none", 1, *ROPE, *CP[:2])
    right = computed(tmp_path / "right", "none", 2, *ROPE, *CP)
    wrong = computed(tmp_path / "wrong", "position", 2, *ROPE, *CP)
    assert right.log_probs.shape == (2, 64)
    assert right.ranks[0].tolist() == [0] * 16 + [1] * 32 + [0] * 16
    assert report(reference, noise, right=right).passed
    found = report(reference, noise, right=right, wrong=wrong)
    (problem,) = found.problems
    assert problem.startswith("wrong: ")
    assert found.runs["wrong"].rms > 1000 * found.runs["right"].rms
    # The first of zigzag's chunks is before those of rank 1.
    parts = found.runs["wrong"].positions
    assert max(part.rms for part in parts[:8]) < 1e-5 < 1e-3 < min(part.rms for part in parts[-8:])


def test_a_state_in_bfloat16_is_found(tmp_path: Path) -> None:
    """Linear attention has no other kernel on CPUs: the dtype says what rounding is."""
    reference = computed(tmp_path / "cp1", "none", 1, *LINEAR)
    right = computed(tmp_path / "right", "none", 2, *LINEAR, *CP[2:])
    wrong = computed(tmp_path / "wrong", "state", 2, *LINEAR, *CP[2:])
    found = report(reference, None, right=right, wrong=wrong)
    (problem,) = found.problems
    assert re.match(r"wrong: .* times what one rounding is taken for", problem)
    assert found.runs["wrong"].rms > 30 * found.runs["right"].rms


def known(**changes: Any) -> Namespace:
    settings = {"samples": 4, "also": "", "also_tensor": None, "batch": None}
    return Namespace(**(settings | changes))


def planned(words: Sequence[str], **changes: Any) -> DtypeRuns:
    return runs_of(CommandLine.read("invariance", words), known(**changes))


def flags(words: tuple[str, ...]) -> dict[str, str]:
    """The last value of each."""
    pairs = zip(words, (*words[1:], "--"), strict=True)
    return {one: "" if value.startswith("--") else value for one, value in pairs if one[:2] == "--"}


def test_runs_have_the_same_flags_but_those_of_the_plugin(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    section = {"algo": "usp", "ulysses": 2, "kernel": "torch_cpu", "chunked_loss": 64}
    megatron = {"context_parallel_size": 4, "tensor-model-parallel-size": 3, "lr": "${a.b}"}
    path.write_text(yaml.safe_dump({"megatron": megatron, "context_parallel": section}))
    words = ["--config", str(path), "--cp-platform", "cpu", "--seed", "3"]
    plan = planned(words, also="ring,megatron", also_tensor=2)
    ours, ring, own, tensor = plan.others
    assert [run.name for run in plan.others] == [
        "CP 4, usp",
        "CP 4, ring",
        "CP 4, megatron",
        "CP 4, TP 2, usp",
    ]
    assert ours.section == tensor.section == section
    assert plan.noise is not None
    assert not any(run.section for run in (plan.reference, plan.noise, ring, own))
    given = {run.file: flags(run.words) for run in (plan.reference, plan.noise, *plan.others)}
    for each in given.values():
        assert each["--seed"] == "3"
        assert each["--cp-platform"] == "cpu"
        assert "--use-cpu-initialization" in each
    algos = {name: each.get("--context-parallel-algo") for name, each in given.items()}
    assert algos == {
        "cp1": "megatron",
        "noise": "zigzag",
        "ours": None,
        "ring": "ring",
        "megatron": "megatron",
        "tensor": None,
    }
    assert given["cp1"]["--context-parallel-size"] == "1"
    assert given["noise"]["--context-parallel-size"] == "1"
    assert given["ring"]["--cp-kernel"] == given["noise"]["--cp-kernel"] == "torch_cpu"
    assert given["ring"]["--cp-chunked-loss"] == "64"
    # Equally many ids for both: 3 * 256 = 2 * 384.
    assert given["ours"]["--make-vocab-size-divisible-by"] == "256"
    assert given["tensor"]["--make-vocab-size-divisible-by"] == "384"


def test_what_the_reference_is(tmp_path: Path) -> None:
    def names(*words: str) -> list[str | None]:
        plan = planned(words)
        return [plan.reference.name, plan.noise and plan.noise.name]

    assert names(*CP) == ["CP 1, Megatron's own attention", "CP 1, kernel auto"]
    documents = "--dataloader-inter-document-masking"
    assert names(*CP, documents) == ["CP 1, kernel reference", "CP 1, kernel auto"]
    experts = planned([*CP, "--expert-model-parallel-size", "2", "--load", "x"])
    assert experts.split_experts
    sizes = [CommandLine.of(run.words).sizes for run in (experts.reference, *experts.others)]
    assert [size["context_parallel_size"] for size in sizes] == [1, 2]
    assert flags(experts.reference.words)["--expert-model-parallel-size"] == "1"
    assert names(*LINEAR, *CP[2:]) == ["CP 1", None]
    batch = tmp_path / "batch.pt"
    torch.save(cp.pack_rollouts([[1, 2, 3], [1, 2, 4]])[0].batch(), batch)
    plan = planned(CP, batch=batch)
    assert plan.reference.name == "CP 1, kernel reference"
    with pytest.raises(ConfigError, match="megatron knows no attention_spans, got --also megatron"):
        planned(CP, batch=batch, also="megatron")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (CP[2:], "invariance needs an algorithm of the plugin, got none: add --context-parallel"),
        (CP[:2], "invariance needs 2 or more context-parallel ranks, got 1: add --context-paralle"),
        (
            (*CP, "--expert-model-parallel-size", "2"),
            "expert_model_parallel_size 2: add --load",
        ),
        ((*CP, "--dtypes", "float64"), "--dtypes takes float32 or bfloat16, got float64: leave"),
        ((*CP, "--samples", "0"), "--samples must be at least 1, got 0"),
        ((*CP, "--batch", "no.pt"), 'a batch is a dict of "tokens" [b,s], and perhaps "labels"'),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(invariance, "logged", forked_launch.logged)
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        invariance.main(words)
    assert "\n" not in str(error.value)


def test_under_torchrun_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="invariance starts its own ranks, got those of torchrun"):
        invariance.main(CP)


def written(folder: Path, *numbers: list[int]) -> LogProbs:
    """Of ranks that hold these tokens of one micro-batch of 4."""
    folder.mkdir(exist_ok=True)
    for rank, own in enumerate(numbers):
        at = torch.tensor(own)
        part = (at, -at.float(), at, torch.ones(len(own)))
        content = {"weights": {"a": 1.0}, "parts": [part], "tokens": 4, "rank": rank}
        torch.save(content, folder / f"rank0000{rank}.pt")
    return LogProbs.load(folder)


def test_parts_of_ranks_are_put_together(tmp_path: Path) -> None:
    found = written(tmp_path / "a", [3, 0], [1, 2])
    assert found.log_probs.tolist() == [[0, -1, -2, -3]]
    assert found.ranks.tolist() == [[0, 1, 1, 0]]
    with pytest.raises(ContextParallelError, match="are no partition: 2 are missing or there twi"):
        written(tmp_path / "b", [3, 0], [1, 0])
    with pytest.raises(ContextParallelError, match=r"no log-probabilities in .*: see .*c\.log"):
        LogProbs.load(tmp_path / "c")


def test_other_samples_and_weights_are_refused(tmp_path: Path) -> None:
    one, other = (written(tmp_path / name, [0, 1, 2, 3]) for name in "ab")
    check_comparable("it", one, other)
    one.weights[0]["a"] = 2.0
    check_comparable("it", one, other, split="a")
    with pytest.raises(ContextParallelError, match="the run it has other weights than the ref"):
        check_comparable("it", one, other, split=".experts.")
    one.labels[0, 0] = 9
    with pytest.raises(ContextParallelError, match="the run it has other samples and weights than"):
        check_comparable("it", one, other)


def test_rollouts_that_share_prefixes(tmp_path: Path) -> None:
    """Spans of a file: log-probs of a pack are those of its rollouts one by one."""
    draw = torch.Generator().manual_seed(0)
    prompt, *answers = torch.randint(1, 127, (5, 13), generator=draw).tolist()
    rollouts = [[*prompt, *answer] for answer in answers]
    (pack,) = cp.pack_rollouts(rollouts, multiple=4)
    packed, rows = str(tmp_path / "pack.pt"), str(tmp_path / "rows.pt")
    torch.save(pack.batch(), packed)
    torch.save({"tokens": torch.tensor(rollouts)}, rows)
    one, four = (
        (*ROPE, *CP[:2], "--seq-length", str(tokens), "--global-batch-size", str(samples))
        for tokens, samples in ((len(pack.tokens), 1), (26, 4))
    )
    alone = computed(tmp_path / "cp1", "none", 1, *one, "--cp-kernel", "reference", batch=packed)
    right = computed(tmp_path / "right", "none", 2, *one, *CP, batch=packed)
    each = computed(tmp_path / "rows", "none", 1, *four, batch=rows)
    assert report(alone, None, right=right).passed
    for found, row in zip(pack.per_rollout(right.log_probs), each.log_probs, strict=True):
        assert float((found - row[:-1]).abs().max()) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_saved_batch_another_algorithm_and_another_tensor_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(invariance, "logged", forked_launch.logged)
    torch.save({"tokens": torch.randint(127, (2, 48))}, "batch.pt")
    words = ["--batch", "batch.pt", "--also", "ulysses", "--also-tensor", "2"]
    assert cli.main(["invariance", *words, *ROPE, *CP, "--bf16", "--dtypes", "float32"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("float32: rounding: at most ")
    (content,) = json.loads(Path("invariance/report.json").read_text())
    names = ["CP 2, zigzag", "CP 2, ulysses", "CP 2, TP 2, zigzag"]
    assert list(content["runs"]) == names
    for run in content["runs"].values():
        assert run["tokens"] == 2 * 47
        assert 0 < run["rms"] < 2e-6
    assert "<svg" in Path("invariance/report.svg").read_text()
    with pytest.raises(SystemExit) as end:
        cli.main(["invariance", *ROPE, *CP, "--num-layers", "0.5"])
    assert end.value.code == 2
    assert (
        "the run of cp1-float32 failed, see invariance/cp1-float32.log" in capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_experts_of_a_checkpoint_that_ranks_have_parts_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(invariance, "logged", forked_launch.logged)
    experts = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
    words = (*ROPE, *experts.split(), "--disable-bias-linear")
    saved = ("--save", str(tmp_path / "weights"), "--save-interval", "3")
    run_warm(tmp_path / "train", *words, *saved).succeeded()
    split = ("--expert-model-parallel-size", "2", "--load", str(tmp_path / "weights"))
    given = (*words, *CP, *split, "--no-load-optim", "--no-load-rng", "--finetune")
    assert cli.main(["invariance", *given, "--dtypes", "float32", "--samples", "2"]) == 0
    assert "float32: rounding: at most " in capsys.readouterr().out
    (content,) = json.loads(Path("invariance/report.json").read_text())
    assert 0 < content["runs"]["CP 2, zigzag"]["rms"] < 2e-6
