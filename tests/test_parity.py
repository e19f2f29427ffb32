"""Recordings and their comparison: equal runs pass, and every kind of wrong one is caught."""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.harness.parity import (
    Iteration,
    RankRecording,
    Recording,
    Tolerances,
    compare,
    gradient_errors,
)


def recording(ranks: int = 1, algo: str = "zigzag", sent: int = 100) -> Recording:
    """A recording of three iterations of a model of two parameters, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    names = ("layers.0.weight", "layers.0.bias")
    gradients = {
        step: {
            names[0]: torch.randn(64, 32, generator=generator),
            names[1]: torch.randn(32, generator=generator),
        }
        for step in (1, 2, 3)
    }
    settings = {"world_size": ranks, "context_parallel_size": ranks, "context_parallel_algo": algo}
    rank = RankRecording(
        settings=settings,
        shard=(0, 0, 0),
        weights={name: f"weights of {name}" for name in names},
        gradients={
            step: {name: f"{step}. gradient of {name}" for name in names} for step in gradients
        },
        sent_bytes={1: {"forward": sent, "backward": 0}},
        iterations=[
            Iteration(step, {"lm loss": 5.0 / step}, 2.0 / step, False, 0.1) for step in (1, 2, 3)
        ],
    )
    by_shard = {step: {(0, 0, 0): found} for step, found in gradients.items()}
    return Recording([copy.deepcopy(rank) for _ in range(ranks)], by_shard)


def problems(change: Callable[[Recording], None], ranks: int = 2) -> list[str]:
    """What `compare` finds after a change to a run that equals its reference otherwise."""
    run = recording(ranks)
    change(run)
    return compare(recording(), run, Tolerances()).problems


def set_iteration(run: Recording, index: int, **values: object) -> None:
    for rank in run.ranks:
        rank.iterations[index] = replace(rank.iterations[index], **values)  # type: ignore[arg-type]


def test_equal_runs_pass() -> None:
    comparison = compare(recording(), recording(3), Tolerances())
    assert comparison.passed
    assert comparison.gradients == {
        f"layers.0.{name}, iteration {step}": 0.0
        for name in ("weight", "bias")
        for step in (1, 2, 3)
    }
    assert (comparison.loss.error, comparison.grad_norm.error) == (0.0, 0.0)


def scale_gradient(name: str, factor: float, step: int = 1) -> Callable[[Recording], None]:
    def change(run: Recording) -> None:
        run.gradients[step][0, 0, 0][name] *= factor

    return change


@pytest.mark.parametrize("step", [1, 2, 3])
def test_gradient_error_is_relative_and_names_the_parameter(step: int) -> None:
    assert problems(scale_gradient("layers.0.bias", 1 + 0.5e-4, step)) == []
    (problem,) = problems(scale_gradient("layers.0.bias", 1 + 2e-4, step))
    where = f"layers.0.bias, iteration {step}"
    assert problem == f"gradient is off by 2.0e-04 (allowed 0.0001): {where}"


def test_later_gradients_have_a_bound_of_their_own() -> None:
    """Where rounding is coarse the weights of two runs differ after the first iteration."""
    for step, count in ((1, 1), (2, 0), (3, 0)):
        run = recording(2)
        scale_gradient("layers.0.bias", 1.03, step)(run)
        bounds = Tolerances(gradient=0.02, later_gradient=0.04)
        assert len(compare(recording(), run, bounds).problems) == count


def test_one_wrong_element_is_seen() -> None:
    # In the Euclidean norm of the tensor it is an error of 0.7e-4.
    def change(run: Recording) -> None:
        weight = run.gradients[1][0, 0, 0]["layers.0.weight"]
        weight[3, 4] += 0.7e-4 * weight.norm()

    (problem,) = problems(change)
    assert "layers.0.weight" in problem


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0, math.nan, math.inf])
def test_gross_gradient_errors(factor: float) -> None:
    (problem,) = problems(scale_gradient("layers.0.weight", factor))
    assert "gradient is off" in problem


def test_zero_reference_admits_zero_alone() -> None:
    zero = torch.zeros(3)
    assert gradient_errors(zero, zero) == (0.0, 0.0)
    assert gradient_errors(zero + 1e-30, zero) == (math.inf, math.inf)
    assert gradient_errors(zero, zero + 1) == (1.0, 1.0)
    few = torch.tensor([3.0, 4.0, 0.0])
    assert gradient_errors(few, few + torch.tensor([0.0, 0.0, 1.0])) == (26**-0.5, 0.25)


def test_reference_of_zeros_proves_nothing() -> None:
    reference, run = recording(), recording(2)
    for one in (reference, run):
        for gradient in one.gradients[2][0, 0, 0].values():
            gradient.zero_()
    (problem,) = compare(reference, run, Tolerances()).problems
    assert "at iteration 2: nothing was compared" in problem


@pytest.mark.parametrize("index", [0, 2])
def test_loss_error(index: int) -> None:
    loss = recording().losses()["lm loss"][index]
    close, far = {"lm loss": loss * (1 + 0.5e-5)}, {"lm loss": loss * (1 - 2e-5)}
    assert problems(lambda run: set_iteration(run, index, losses=close)) == []
    (problem,) = problems(lambda run: set_iteration(run, index, losses=far))
    assert problem == f"loss is off by 2.0e-05 (allowed 1e-05): lm loss, iteration {index + 1}"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"losses": {"lm loss": math.nan}}, "loss is off by inf"),
        ({"grad_norm": 1.001}, "grad norm is off by 1.0e-03 (allowed 0.0001): iteration 2"),
        ({"grad_norm": None}, "grad norm is off by inf"),
        ({"skipped": True}, "iterations [2] were skipped"),
    ],
)
def test_iteration_errors(values: dict[str, object], words: str) -> None:
    (problem,) = problems(lambda run: set_iteration(run, 1, **values))
    assert words in problem


def test_structure_errors() -> None:
    def drop_parameter(run: Recording) -> None:
        del run.gradients[1][0, 0, 0]["layers.0.bias"]

    def reshape(run: Recording) -> None:
        gradients = run.gradients[1][0, 0, 0]
        gradients["layers.0.weight"] = gradients["layers.0.weight"].T

    def drop_iteration(run: Recording) -> None:
        for rank in run.ranks:
            rank.iterations.pop()

    def rename_loss(run: Recording) -> None:
        for index in range(3):
            set_iteration(run, index, losses={"other loss": 1.0})

    def move_shard(run: Recording) -> None:
        run.gradients[1][0, 1, 0] = run.gradients[1].pop((0, 0, 0))

    def drop_gradients(run: Recording) -> None:
        del run.gradients[3]

    def other_start(run: Recording) -> None:
        for rank in run.ranks:
            rank.weights["layers.0.bias"] = "others"

    for change, words in (
        (drop_parameter, "only one of the runs has a gradient of layers.0.bias"),
        (reshape, "gradient of layers.0.weight, iteration 1 has shape (32, 64), not (64, 32)"),
        (drop_gradients, "recorded the gradients of iterations [1, 2], not [1, 2, 3]"),
        (drop_iteration, "2 iterations, the reference has 3"),
        (rename_loss, "losses are ['other loss'], not ['lm loss']"),
        (move_shard, "the runs split the model differently"),
        (other_start, "does not start from the weights of the reference: layers.0.bias"),
    ):
        found = problems(change)
        assert any(words in problem for problem in found), (words, found)


def test_ranks_that_disagree() -> None:
    def change(run: Recording) -> None:
        run.ranks[1].gradients[3]["layers.0.bias"] = "others"

    assert problems(change) == ["ranks 0 and 1 hold different iteration 3 gradients: layers.0.bias"]

    def drift(run: Recording) -> None:
        run.ranks[1].iterations[2] = replace(run.ranks[1].iterations[2], grad_norm=0.6)

    assert problems(drift) == ["ranks 0 and 1 recorded different gradient norms"]


def write(recorded: Recording, folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, rank in enumerate(recorded.ranks):
        content = dict(vars(rank))
        iterations = content.pop("iterations")
        (folder / f"rank{number:05d}.json").write_text(json.dumps(content))
        lines = [json.dumps(vars(iteration)) for iteration in iterations]
        (folder / f"rank{number:05d}.jsonl").write_text("\n".join(lines) + "\n")
    for step, shards in recorded.gradients.items():
        torch.save(shards[0, 0, 0], folder / f"rank00000.{step}.pt")


def test_recording_is_read_back(tmp_path: Path) -> None:
    write(recording(2), tmp_path / "a")
    loaded = Recording.load(tmp_path / "a")
    assert loaded.ranks == recording(2).ranks
    assert compare(recording(), loaded, Tolerances()).passed
    assert loaded.losses() == {"lm loss": [5.0, 2.5, 5.0 / 3]}
    assert loaded.seconds() == 0.1


def test_incomplete_recordings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ContextParallelError, match="no recording"):
        Recording.load(tmp_path)
    write(recording(2), tmp_path / "a")
    (tmp_path / "a" / "rank00001.json").unlink()
    with pytest.raises(ContextParallelError, match="1 of 2 ranks"):
        Recording.load(tmp_path / "a")
    write(recording(2), tmp_path / "b")
    (tmp_path / "b" / "rank00000.3.pt").unlink()
    with pytest.raises(ContextParallelError, match=r"no gradients .* at iteration 3"):
        Recording.load(tmp_path / "b")
