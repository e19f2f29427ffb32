"""`megatron-cp compare --log-probs`: what is rounding in log-probabilities, and what is not."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from megatron_cp_plugin import cli
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.harness import compare, train
from megatron_cp_plugin.harness.compare_log_probs import (
    Report,
    Run,
    Spread,
    check_comparable,
    report_of,
    runs_of,
)
from megatron_cp_plugin.harness.token_log_probs import LogProbs
from megatron_cp_plugin.harness.train import CommandLine
from tests import forked_launch
from tests.integration.megatron_job import TINY, run_warm

JOB = Path(__file__).parent / "integration" / "faulty_log_probs_job.py"
CP = ("--context-parallel-algo", "zigzag", "--context-parallel-size", "2")
ROPE = (*TINY, "--position-embedding-type", "rope")
LINEAR = (*TINY, *"--context-parallel-algo lasp2 --cp-linear-model linear_transformer".split())
RUN = (*"--skip-train --eval-iters 1 --train-iters 1".split(),)


def computed(folder: Path, fault: str, size: int, *words: str) -> LogProbs:
    out = folder / "found"
    out.mkdir(parents=True)
    run_warm(folder, fault, str(out), *words, *RUN, ranks=size, script=JOB).succeeded()
    return LogProbs.load(out)


def report(reference: LogProbs, noise: LogProbs | None, ours: LogProbs) -> Report:
    check_comparable(ours, reference)
    found = {"reference": reference, "ours": ours} | ({} if noise is None else {"noise": noise})
    return report_of(found, torch.float32)


def test_positions_that_are_off_by_one_on_a_rank_are_found(tmp_path: Path) -> None:
    reference = computed(tmp_path / "cp1", "none", 1, *ROPE)
    noise = computed(tmp_path / "noise", "none", 1, *ROPE, *CP[:2])
    right = computed(tmp_path / "right", "none", 2, *ROPE, *CP)
    wrong = computed(tmp_path / "wrong", "position", 2, *ROPE, *CP)
    assert right.log_probs.shape == (2, 64)
    assert right.ranks[0].tolist() == [0] * 16 + [1] * 32 + [0] * 16
    good, bad = report(reference, noise, right), report(reference, noise, wrong)
    assert not good.problems
    (problem,) = bad.problems
    assert "; rank " in problem
    assert bad.ours.rms > 1000 * good.ours.rms
    # The first of zigzag's chunks is before those of rank 1.
    parts = [rms for *_, rms in bad.ours.sections]
    assert max(parts[:8]) < 1e-5 < 1e-3 < min(parts[-8:])


def test_a_state_in_bfloat16_is_found(tmp_path: Path) -> None:
    """Linear attention has no other kernel on CPUs: the dtype says what rounding is."""
    reference = computed(tmp_path / "cp1", "none", 1, *LINEAR)
    right = computed(tmp_path / "right", "none", 2, *LINEAR, *CP[2:])
    wrong = computed(tmp_path / "wrong", "state", 2, *LINEAR, *CP[2:])
    good, bad = report(reference, None, right), report(reference, None, wrong)
    assert not good.problems
    (problem,) = bad.problems
    assert "times what one rounding is taken for" in problem
    assert bad.ours.rms > 30 * good.ours.rms


def planned(words: Sequence[str], reference: str = "cp1") -> dict[str, Run]:
    return runs_of(CommandLine.read("compare", words), reference)


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
    runs = planned(words)
    assert [run.name for run in runs.values()] == [
        "CP 1, Megatron's own attention",
        "CP 1, kernel torch_cpu",
        "12 ranks, usp",
    ]
    assert [run.section for run in runs.values()] == [{}, {}, section]
    given = {name: flags(run.words) for name, run in runs.items()}
    for each in given.values():
        assert each["--seed"] == "3"
        assert each["--cp-platform"] == "cpu"
    algos = {name: each.get("--context-parallel-algo") for name, each in given.items()}
    assert algos == {"reference": "megatron", "noise": "zigzag", "ours": None}
    assert given["reference"]["--context-parallel-size"] == "1"
    assert given["noise"]["--context-parallel-size"] == "1"
    assert given["noise"]["--cp-kernel"] == "torch_cpu"
    engine = flags(planned(words, "te")["reference"].words)
    assert engine["--context-parallel-algo"] == "megatron"
    assert "--context-parallel-size" not in engine


def test_what_the_reference_is() -> None:
    def names(*words: str) -> list[str]:
        return [run.name for run in planned(words).values()][:-1]

    assert names(*CP) == ["CP 1, Megatron's own attention", "CP 1, kernel auto"]
    documents = "--dataloader-inter-document-masking"
    assert names(*CP, documents) == ["CP 1, kernel reference", "CP 1, kernel auto"]
    assert names(*LINEAR, *CP[2:]) == ["CP 1"]
    experts = planned([*CP, "--expert-model-parallel-size", "2", "--load", "x"])
    assert flags(experts["reference"].words)["--expert-model-parallel-size"] == "1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (CP[2:], "compare needs an algorithm of the plugin, got none: add --context-parallel"),
        (CP[:2], "compare --log-probs needs 2 or more context-parallel ranks, got 1: add"),
        ((*CP, "--log-probs", "float64"), "--log-probs takes float32,bfloat16, got float64"),
        ((*CP, "--gradients"), "--log-probs trains nothing, got --gradients: leave one of them"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "logged", forked_launch.logged)
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        compare.main(["--log-probs", *words])
    assert "\n" not in str(error.value)


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
    check_comparable(one, other)
    one.weights[0]["a"] = 2.0
    check_comparable(one, other, split="a")
    with pytest.raises(ContextParallelError, match="the run has other weights than the reference"):
        check_comparable(one, other, split=".experts.")
    one.labels[0, 0] = 9
    with pytest.raises(ContextParallelError, match="the run has other samples and weights than"):
        check_comparable(one, other)


# What is rounding, of log-probabilities that nobody computed.

B, S = 4, 256


def of(log_probs: Tensor, ranks: Tensor | None = None) -> LogProbs:
    ones, zeros = torch.ones(log_probs.shape), torch.zeros(log_probs.shape).long()
    return LogProbs([{}], log_probs, zeros, ones, zeros if ranks is None else ranks)


def given(noise: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Reference, and two runs that differ from it by as much rounding."""
    draw = torch.Generator().manual_seed(3)
    reference = -5 - torch.rand(B, S, generator=draw, dtype=torch.float64)
    errors = noise * torch.randn(2, B, S, generator=draw, dtype=torch.float64)
    return reference, reference + errors[0], reference + errors[1]


def test_statistics_are_those_of_their_definitions() -> None:
    reference = torch.full((1, 1000), -2.0, dtype=torch.float64)
    off = torch.zeros(1, 1000, dtype=torch.float64)
    off[0, :100] = 0.02
    off[0, 0] = -0.5
    first = of(reference)
    first.counts[0, 999] = 0
    found = Spread.of(of(reference + off, (off != 0).long()), first)
    assert (found.largest, found.at) == (0.5, 0)
    assert found.most == pytest.approx(0.02)
    assert found.rms == pytest.approx(math.sqrt((99 * 0.02**2 + 0.25) / 999))
    kl = (math.exp(-0.5) - 1 + 0.5 + 99 * (math.exp(0.02) - 1 - 0.02)) / 999
    assert found.mean_kl == pytest.approx(kl)
    assert found.ranks == pytest.approx({0: 0, 1: math.sqrt((99 * 0.02**2 + 0.25) / 100)})
    assert [part[:3] for part in found.sections[:2]] == [(0, 31, 31), (31, 62, 31)]
    assert found.sections[0][3] == pytest.approx(math.sqrt((0.25 + 0.012) / 31))
    assert found.sections[-1] == (968, 1000, 31, 0)


def test_rounding_passes_and_what_is_more_does_not() -> None:
    reference, noise, run = given()
    ranks = (torch.arange(S) >= S // 2).long().expand(B, S)

    def problems(ours: Tensor, held: Tensor | None = None) -> list[str]:
        return report(of(reference), of(noise), of(ours, held)).problems

    assert problems(run) == []
    assert report(of(reference), of(noise), of(run)).verdict() == [
        "float32: rounding: 9.9e-07 (root mean square), 1.0 times the noise of another kernel, 3 "
        "allowed"
    ]
    (many,) = problems(torch.where(ranks == 1, run + 1e-5, run), ranks)
    assert "7 times the noise of another kernel; rank 1's tokens 1.0e-05, others'" in many
    few = run.clone()
    few[2, 70:78] += 1e-5  # hardly seen among all tokens
    assert re.search(r"at positions (64 to 71|72 to 79), \d times the noise", problems(few)[0])
    one = run.clone()
    one[1, 9] -= 4e-5
    assert "positions 8 to 15" in problems(one)[0]
    short = [x[:1, :8] for x in (reference, noise, run)]  # sections of too few tokens
    short[2][0, 3] -= 1e-4 / 3
    found = report(*map(of, short))
    alone = replace(found, ours=replace(found.ours, rms=found.base))
    assert "3.5e-05 at position 3, 13 times the largest" in alone.problems[0]


def test_without_noise_the_dtype_says_what_rounding_is() -> None:
    reference, _, run = given()

    def found(ours: Tensor, dtype: torch.dtype) -> Report:
        return report_of({"reference": of(reference), "ours": of(ours)}, dtype)

    assert not found(run, torch.float32).problems
    assert found(run, torch.float64).problems
    wide = reference + 1e3 * (run - reference)
    (problem,) = found(wide, torch.float32).problems
    assert "times what one rounding is taken for (6.5e-07)" in problem
    assert not found(wide, torch.bfloat16).problems


def test_noise_that_is_no_rounding_hides_nothing() -> None:
    reference, noise, run = given(1e-3)
    problems = report(of(reference), of(noise), of(run)).problems
    assert problems[0].startswith("two kernels disagree without context parallelism, by 1.0e-03")


def test_no_number_is_not_rounding_and_equal_infinities_are() -> None:
    reference, noise, run = given()
    run[0, 0] = math.nan
    assert report(of(reference), of(noise), of(run)).problems[0].startswith("inf, inf times")
    reference[0, 0] = noise[0, 0] = run[0, 0] = -math.inf
    assert not report(of(reference), of(noise), of(run)).problems
    nothing = of(reference)
    nothing.counts.zero_()
    with pytest.raises(ContextParallelError, match="got none that count"):
        report(nothing, of(noise), of(run))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_experts_of_a_checkpoint_that_ranks_have_parts_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, with ulysses and tensor parallelism."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "logged", forked_launch.logged)
    experts = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
    words = (*ROPE, *experts.split(), "--disable-bias-linear")
    saved = ("--save", str(tmp_path / "weights"), "--save-interval", "3")
    run_warm(tmp_path / "train", *words, *saved).succeeded()
    split = ("--expert-model-parallel-size", "2", "--load", str(tmp_path / "weights"))
    given = (*words, *CP, *split, "--no-load-optim", "--no-load-rng", "--finetune", "--bf16")
    said = ("--context-parallel-algo", "ulysses", "--log-probs", "float32", "--iters", "2")
    assert cli.main(["compare", *given, *said]) == 0
    printed = capsys.readouterr().out
    assert "float32: 2 ranks, ulysses" in printed
    assert printed.splitlines()[-1].startswith("float32: rounding: ")
    with pytest.raises(SystemExit) as end:
        cli.main(["compare", "--log-probs", *ROPE, *CP, "--num-layers", "0.5"])
    assert end.value.code == 2
    assert "the run of reference-float32 failed, see comparison/reference-float32.log" in (
        capsys.readouterr().err
    )
