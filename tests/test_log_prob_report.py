"""Differences of log-probabilities: what is rounding, and what is not."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.errors import ConfigError, ContextParallelError

B, S = 4, 256


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
    counts = torch.ones(1, 1000)
    counts[0, 999] = 0
    found = cp.log_prob_report(
        reference, {"run": reference + off}, counts=counts, ranks={"run": (off != 0).long()}
    ).runs["run"]
    assert found.tokens == 999
    assert found.largest == 0.5
    assert found.at == 0
    assert found.quantiles == pytest.approx({0.5: 0, 0.9: 0.02, 0.99: 0.02, 0.999: 0.5})
    assert found.rms == pytest.approx(math.sqrt((99 * 0.02**2 + 0.25) / 999))
    kl = (math.exp(-0.5) - 1 + 0.5 + 99 * (math.exp(0.02) - 1 - 0.02)) / 999
    assert found.mean_kl == pytest.approx(kl)
    assert found.outside == pytest.approx(100 / 999)
    assert found.ranks == pytest.approx({0: 0, 1: math.sqrt((99 * 0.02**2 + 0.25) / 100)})
    parts = found.positions
    assert [part.start for part in parts[:3]] == [0, 31, 62]
    assert (parts[0].rms, parts[0].largest) == pytest.approx((math.sqrt((0.25 + 0.012) / 31), 0.5))
    assert parts[-1].tokens == 999 - 968
    assert parts[-1].largest == 0


def test_rounding_passes_and_what_is_more_does_not() -> None:
    reference, noise, run = given()
    report = cp.log_prob_report(reference, {"right": run}, noise=noise, dtype=torch.float32)
    assert report.passed
    assert "float32: rounding: at most 9.9e-07 (root mean square), 1.0 times the noise" in str(
        report
    )
    ranks = (torch.arange(S) >= S // 2).long().expand(B, S)
    many = torch.where(ranks == 1, run + 1e-5, run)
    few = run.clone()
    few[2, 70:78] += 1e-5  # hardly seen among all tokens
    one = run.clone()
    one[1, 9] -= 4e-5
    wrong = {"many": many, "few": few, "one": one}
    report = cp.log_prob_report(
        reference,
        {"right": run, **wrong},
        noise=noise,
        ranks={"many": ranks},
        dtype=torch.float32,
    )
    assert not report.passed
    said = dict(line.split(": ", 1) for line in report.problems)
    assert said.keys() == wrong.keys()
    assert (
        "7 times the noise of another kernel; tokens of rank 1: 1.0e-05, of others" in said["many"]
    )
    assert " at positions 64 to 71, 5 times the noise" in said["few"] or "72 to 79" in said["few"]
    assert "positions 8 to 15" in said["one"] or "4.0e-05 at position 9" in said["one"]
    assert report.verdict().startswith("float32: NOT ROUNDING: many: ")


def test_without_noise_the_dtype_says_what_rounding_is() -> None:
    reference, _, run = given()
    assert cp.log_prob_report(reference, {"run": run}, dtype=torch.float32).passed
    assert not cp.log_prob_report(reference, {"run": run}, dtype=torch.float64).passed
    wide = reference + 1e3 * (run - reference)
    report = cp.log_prob_report(reference, {"run": wide}, dtype=torch.float32)
    assert "times what one rounding is taken for (6.5e-07)" in report.verdict()
    assert cp.log_prob_report(reference, {"run": wide}).passed  # in bfloat16


def test_noise_that_is_no_rounding_hides_nothing() -> None:
    reference, noise, run = given(1e-3)
    report = cp.log_prob_report(reference, {"run": run}, noise=noise, dtype=torch.float32)
    assert "two kernels disagree without context parallelism" in report.verdict()


def test_no_number_is_not_rounding_and_equal_infinities_are() -> None:
    reference, noise, run = given()
    run[0, 0] = math.nan
    report = cp.log_prob_report(reference, {"run": run}, noise=noise)
    assert "run: inf" in report.verdict()
    reference[0, 0] = noise[0, 0] = run[0, 0] = -math.inf
    assert cp.log_prob_report(reference, {"run": run}, noise=noise).passed


def test_it_is_written(tmp_path: Path) -> None:
    reference, noise, run = given()
    report = cp.log_prob_report(reference, {"CP 2": run}, noise=noise)
    content = json.loads(json.dumps(report.as_dict()))
    assert content["passed"] is True
    assert content["runs"]["CP 2"]["largest"] == report.runs["CP 2"].largest
    assert len(content["noise"]["positions"]) == 32
    pytest.importorskip("matplotlib")
    report.save(tmp_path / "a.svg")
    report.save(str(tmp_path / "b.svg"))
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "CP 2" in text
    assert "bfloat16: rounding" in text
    with pytest.raises(ConfigError, match=r"got 'a\.pdf': change its ending"):
        report.save(tmp_path / "a.pdf")


def test_what_cannot_be_compared_is_refused() -> None:
    reference, _, run = given()
    with pytest.raises(ContextParallelError, match=r"got \[4, 128\] of run and \[4, 256\]"):
        cp.log_prob_report(reference, {"run": run[:, :128]})
    with pytest.raises(ContextParallelError, match=r"got \[256\] of reference"):
        cp.log_prob_report(reference[0], {"run": run[0]})
    with pytest.raises(ContextParallelError, match="got none that counts among 1024"):
        cp.log_prob_report(reference, {"run": run}, counts=torch.zeros(B, S))
