"""Reads recordings of training runs (`harness.recorder`), and compares two of them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from megatron_cp_plugin.errors import ContextParallelError

# The position of a rank's model shard: (pipeline, tensor, expert) parallel rank.
Shard = tuple[int, int, int]


@dataclass(frozen=True)
class Iteration:
    """One iteration of one rank; the losses are on the ranks of the last pipeline stage."""

    iteration: int
    losses: dict[str, float]
    grad_norm: float | None
    skipped: bool
    seconds: float


@dataclass(frozen=True)
class RankRecording:
    """The record of one rank.

    Attributes:
        weights: Digests by parameter name.
        gradients: Digests by iteration and parameter name.
        replays: By iteration, how many CUDA graphs were replayed.
        sent_bytes: By iteration and pass, sent for attention outside of CUDA graphs.
    """

    settings: dict[str, Any]
    shard: Shard
    weights: dict[str, str]
    gradients: dict[int, dict[str, str]]
    iterations: list[Iteration]
    replays: dict[int, int] = field(default_factory=dict)
    sent_bytes: dict[int, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """The records of all ranks of a run.

    Attributes:
        ranks: By global rank.
        gradients: By iteration, model shard and parameter name.
    """

    ranks: list[RankRecording]
    gradients: dict[int, dict[Shard, dict[str, Tensor]]]

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Reads the recording in a folder.

        Raises: ContextParallelError: Nothing was recorded there, or files are missing.
        """
        folder = Path(folder)
        paths = sorted(folder.glob("rank*.json"))
        if not paths:
            raise ContextParallelError(
                f"no recording in {folder}: the run ended before its first iteration did"
            )
        ranks = []
        gradients: dict[int, dict[Shard, dict[str, Tensor]]] = {}
        for path in paths:
            content = json.loads(path.read_text())
            shard = (content["shard"][0], content["shard"][1], content["shard"][2])
            lines = path.with_suffix(".jsonl").read_text().splitlines()
            for name in ("gradients", "replays", "sent_bytes"):
                content[name] = {int(step): value for step, value in content.get(name, {}).items()}
            content.update(
                shard=shard, iterations=[Iteration(**json.loads(line)) for line in lines]
            )
            ranks.append(RankRecording(**content))
            for step in content["gradients"]:
                tensors = path.with_suffix(f".{step}.pt")
                found = gradients.setdefault(step, {})
                if tensors.is_file() and shard not in found:
                    found[shard] = torch.load(tensors, map_location="cpu", weights_only=True)
        world = ranks[0].settings["world_size"]
        if len(ranks) != world:
            raise ContextParallelError(f"{folder} holds {len(ranks)} of {world} ranks")
        shards = {rank.shard for rank in ranks}
        for step, found in gradients.items():
            if missing := shards - found.keys():
                raise ContextParallelError(
                    f"{folder} holds no gradients of shards {sorted(missing)} at iteration {step}"
                )
        return cls(ranks, gradients)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run."""
        return self.ranks[0].settings

    def losses(self) -> dict[str, list[float]]:
        """Returns every loss by name, one value an iteration."""
        for rank in self.ranks:
            if rank.iterations and rank.iterations[0].losses:
                names = rank.iterations[0].losses
                return {n: [i.losses.get(n, math.nan) for i in rank.iterations] for n in names}
        return {}

    def grad_norms(self) -> list[float]:
        """Returns the norm of all gradients, one value an iteration."""
        return [math.nan if i.grad_norm is None else i.grad_norm for i in self.ranks[0].iterations]

    def seconds(self) -> float:
        """Returns the median time of an iteration, without the first."""
        times = sorted(i.seconds for i in self.ranks[0].iterations[1:]) or [math.nan]
        return times[len(times) // 2]

    def sent_bytes(self) -> int:
        """Returns how much the busiest rank sent for attention in the first iteration."""
        return max(sum(rank.sent_bytes[1].values()) for rank in self.ranks)


@dataclass(frozen=True)
class Tolerances:
    """Relative errors that count as equal; the defaults hold for float32.

    Attributes:
        loss: Of every loss of every iteration.
        grad_norm: Of the gradient norm of every iteration.
        gradient: Of every parameter's gradient at the first iteration: the larger of the relative
            errors in the Euclidean and in the maximum norm.
        later_gradient: The same at later iterations, where rounding has made the weights of the
            two runs different, by up to two steps of Adam where a gradient is all but zero.
    """

    loss: float = 1e-5
    grad_norm: float = 1e-4
    gradient: float = 1e-4
    later_gradient: float = 1e-4

    @classmethod
    def of(cls, dtype: str) -> Self:
        """What counts as equal in a dtype: 1, 5, 20 and 40 roundings of it.

        Weights that differ by a hair are rounded apart too: hence the last number.
        """
        unit = {"bfloat16": 2**-9, "float16": 2**-11}.get(dtype)
        return cls() if unit is None else cls(unit, 5 * unit, 20 * unit, 40 * unit)


@dataclass(frozen=True)
class Worst:
    """The largest relative error of one quantity, and where it is."""

    error: float = 0.0
    at: str = ""


@dataclass(frozen=True)
class Comparison:
    """How far a run is from its reference.

    Attributes:
        loss, grad_norm, gradient, later_gradient: The largest relative errors.
        gradients: Relative error of every parameter's gradient, by name and iteration.
        euclidean: The same, in the Euclidean norm alone.
        problems: One line for each error above its tolerance and for everything that makes the
            runs incomparable; empty if the run passed.
    """

    loss: Worst
    grad_norm: Worst
    gradient: Worst
    later_gradient: Worst
    gradients: dict[str, float] = field(default_factory=dict)
    euclidean: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the run equals its reference within the tolerances."""
        return not self.problems


def compare(reference: Recording, run: Recording, tolerances: Tolerances) -> Comparison:
    """Compares a run with a reference that has the same model shards."""
    problems = [*_disagreements(run), *_different_starts(reference, run)]
    kinds = ("loss", "grad_norm", "gradient", "later_gradient")
    errors: dict[str, list[Worst]] = {kind: [Worst()] for kind in kinds}
    expected_losses, losses = reference.losses(), run.losses()
    if not expected_losses:
        problems.append("the reference recorded no loss")
    if losses.keys() != expected_losses.keys():
        problems.append(f"losses are {sorted(losses)}, not {sorted(expected_losses)}")
    for name in expected_losses.keys() & losses.keys():
        wanted, got = expected_losses[name], losses[name]
        if len(got) != len(wanted):
            problems.append(f"{len(got)} iterations, the reference has {len(wanted)}")
        errors["loss"] += [
            Worst(relative_error(*pair), f"{name}, iteration {step}")
            for step, pair in enumerate(zip(got, wanted, strict=False), 1)
        ]
    norms = zip(run.grad_norms(), reference.grad_norms(), strict=False)
    errors["grad_norm"] += [
        Worst(relative_error(*pair), f"iteration {step}") for step, pair in enumerate(norms, 1)
    ]
    skipped = [i.iteration for i in run.ranks[0].iterations if i.skipped]
    if skipped:
        problems.append(f"iterations {skipped} were skipped: gradients not finite")
    gradients, euclidean = _gradient_errors(reference, run, problems)
    for label, error in gradients.items():
        kind = "gradient" if label.endswith(", iteration 1") else "later_gradient"
        errors[kind].append(Worst(error, label))
    worst = {kind: max(found, key=lambda one: one.error) for kind, found in errors.items()}
    for kind, one in worst.items():
        allowed: float = getattr(tolerances, kind)
        what = kind.removeprefix("later_").replace("_", " ")
        if one.error > allowed:
            problems.append(f"{what} is off by {one.error:.1e} (allowed {allowed:g}): {one.at}")
    return Comparison(**worst, gradients=gradients, euclidean=euclidean, problems=problems)


def gradient_errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Returns the relative errors in the Euclidean and in the maximum norm.

    The second one shows an error in few elements of a large tensor.
    """
    want = want.double()
    difference = got.double() - want
    found = []
    for order in (2.0, math.inf):
        size = torch.linalg.vector_norm(want, order).item()
        off = torch.linalg.vector_norm(difference, order).item()
        if not math.isfinite(size) or not math.isfinite(off):
            return math.inf, math.inf
        # Where the reference is exactly zero nothing but zero is right.
        found.append(off / size if size else math.inf if off else 0.0)
    return found[0], found[1]


def _gradient_errors(
    reference: Recording, run: Recording, problems: list[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns errors by label: the larger one of both norms, and that in the Euclidean norm."""
    errors: dict[str, float] = {}
    euclidean: dict[str, float] = {}
    wanted, recorded = sorted(reference.gradients), sorted(run.gradients)
    if wanted != recorded:
        problems.append(f"recorded the gradients of iterations {recorded}, not {wanted}")
    for step in sorted(reference.gradients.keys() & run.gradients.keys()):
        at_reference, at_run = reference.gradients[step], run.gradients[step]
        if at_reference.keys() != at_run.keys():
            problems.append(
                "the runs split the model differently: give both the same TP, PP and EP"
            )
        nothing = True
        for shard in sorted(at_reference.keys() & at_run.keys()):
            want, got = at_reference[shard], at_run[shard]
            where = "" if len(at_reference) == 1 else " (pp {} tp {} ep {})".format(*shard)
            for name in sorted(want.keys() ^ got.keys()):
                problems.append(f"only one of the runs has a gradient of {name}")
            for name in sorted(want.keys() & got.keys()):
                label = f"{name}{where}, iteration {step}"
                if want[name].shape != got[name].shape:
                    problems.append(
                        f"gradient of {label} has shape {tuple(got[name].shape)}, "
                        f"not {tuple(want[name].shape)}"
                    )
                    continue
                nothing = nothing and not want[name].any()
                euclidean[label], largest = gradient_errors(got[name], want[name])
                errors[label] = max(euclidean[label], largest)
        if nothing:
            problems.append(
                f"the reference has no gradient that is not zero at iteration {step}: "
                "nothing was compared"
            )
    return errors, euclidean


def _disagreements(run: Recording) -> list[str]:
    """Says where ranks that must hold the same values do not."""
    found = []
    first: dict[Shard, tuple[int, RankRecording]] = {}
    for number, rank in enumerate(run.ranks):
        other_number, other = first.setdefault(rank.shard, (number, rank))
        digests = [("weight", rank.weights, other.weights)]
        for step in sorted(rank.gradients.keys() | other.gradients.keys()):
            mine, theirs = rank.gradients.get(step, {}), other.gradients.get(step, {})
            digests.append((f"iteration {step} gradient", mine, theirs))
        for what, mine, theirs in digests:
            names = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
            if names:
                found.append(
                    f"ranks {other_number} and {number} hold different {what}s: {_few(names)}"
                )
        if [i.grad_norm for i in rank.iterations] != [i.grad_norm for i in other.iterations]:
            found.append(f"ranks {other_number} and {number} recorded different gradient norms")
    return found


def _different_starts(reference: Recording, run: Recording) -> list[str]:
    """Says whether the runs start from other weights; then nothing else can be equal."""
    starts = {rank.shard: rank.weights for rank in reference.ranks}
    for rank in run.ranks:
        want = starts.get(rank.shard, {})
        names = sorted(n for n in want.keys() & rank.weights.keys() if want[n] != rank.weights[n])
        if names:
            return [f"does not start from the weights of the reference: {_few(names)}"]
    return []


def relative_error(got: float, want: float) -> float:
    """How far a number is off; infinitely where one of them is none."""
    if not (math.isfinite(got) and math.isfinite(want)):
        return math.inf
    return abs(got - want) / abs(want) if want else math.inf if got else 0.0


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
