"""`megatron-cp compare --log-probs`: whether log-probabilities differ by more than rounding.

Context parallelism adds in another order, and so do other kernels. A third run, with another kernel
and without context parallelism, shows how much rounding does in the model. A fault, such as
positions that are off by one on a rank, is mostly far above it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin import registry
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.harness import train
from megatron_cp_plugin.harness.token_log_probs import MODULE, LogProbs
from megatron_cp_plugin.harness.train import CommandLine
from megatron_cp_plugin.integration.args import MEGATRON, OneLineParser
from megatron_cp_plugin.integration.settings import PACKING
from megatron_cp_plugin.terminal import flag_of, text_table

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Times the noise that count as rounding: of root mean squares, and of the largest difference.
RMS_FACTOR, LARGEST_FACTOR = 3.0, 5.0
NOISE_FACTOR = 30.0  # roundings that noise itself may have
_SECTIONS, _SECTION_TOKENS = 32, 16
# Megatron's settings that choose a dtype, or how much is trained.
_DROPPED = (
    *("bf16", "fp16", "fp8", "fp4", "fp8_format", "fp4_format", "save", "global_batch_size"),
    *("rampup_batch_size", "train_samples", "lr_decay_samples", "lr_warmup_samples"),
)
# A forward pass of the model at the start, in evaluation mode.
_FORWARD = "--train-iters 1 --skip-train --eval-iters 1 --eval-interval 1 --micro-batch-size 1"


@dataclass(frozen=True)
class Run:
    """A job. Attributes: name: for people. words: its flags. section: of its run file."""

    name: str
    words: tuple[str, ...]
    section: Mapping[str, Any]


def without_dtype(words: Sequence[str]) -> list[str]:
    """Flags without those that choose a dtype, or how much is trained."""
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    for name in _DROPPED:
        parser.add_argument(flag_of(name), nargs="*")
    return parser.parse_known_args(words)[1]


def runs_of(line: CommandLine, reference: str) -> dict[str, Run]:
    """The runs "reference", "noise", unless nothing has another kernel, and "ours".

    Args: reference: cp1 or te, as of `compare`.

    Raises: ConfigError: Nothing is split.
    """
    algo, kernel = line.flags.algo, line.flags.kernel
    if line.sizes["context_parallel_size"] < 2:
        raise ConfigError(
            "compare --log-probs needs 2 or more context-parallel ranks, got 1: add "
            "--context-parallel-size 2"
        )
    alone = ("--context-parallel-size", "1", "--expert-model-parallel-size", "1")

    def by(name: str, kernel: str, *more: str, algo: str = "zigzag") -> Run:
        own = ("--cp-kernel", kernel) if algo != MEGATRON else ()
        return Run(name, (*line.by(algo), *own, *more), {})

    ours = Run(f"{line.ranks} ranks, {algo}", tuple(line.rest), line.section)
    if reference == "te":
        first = by("Transformer Engine's context parallelism", "", algo=MEGATRON)
    elif line.flags.layers or algo in registry.available("linear"):
        first = Run("CP 1", (*line.rest, *alone), line.section)
        return {"reference": first, "ours": ours}
    elif any(line.given(name, 0) for name in PACKING):
        # Megatron's own needs Transformer Engine for documents.
        first = by("CP 1, kernel reference", "reference", *alone)
    else:
        first = by("CP 1, Megatron's own attention", "", *alone, algo=MEGATRON)
    return {"reference": first, "noise": by(f"CP 1, kernel {kernel}", kernel, *alone), "ours": ours}


def compare_log_probs(line: CommandLine, known: Any) -> int:
    """Runs all jobs, and prints the differences.

    Returns: 0, or 1 where rounding does not explain a difference.

    Raises: ContextParallelError: A job failed, or its weights or samples are not those of the
    reference.
    """
    dtypes = known.log_probs.split(",")
    if unknown := [each for each in dtypes if each not in DTYPES]:
        raise ConfigError(f"--log-probs takes {','.join(DTYPES)}, got {unknown[0]}: leave it out")
    runs = runs_of(line, "te" if known.reference == "te" else "cp1")
    split = ".experts." if line.given("expert_model_parallel_size", 1) > 1 else None
    known.output.mkdir(parents=True, exist_ok=True)
    reports = []
    for dtype in dtypes:
        found = {}
        for file, run in runs.items():
            print(f"{dtype}: {run.name}", flush=True)
            folder = known.output / f"{file}-{dtype}"
            found[file] = _run_job(run, folder, dtype, line, known)
        check_comparable(found["ours"], found["reference"], split=split)
        reports.append(report_of(found, DTYPES[dtype]))
    print(_table(reports))
    print("\n".join(line for report in reports for line in report.verdict()))
    return int(any(report.problems for report in reports))


def _run_job(run: Run, folder: Path, dtype: str, line: CommandLine, known: Any) -> LogProbs:
    """Starts a job, and reads its results."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("rank*.pt"):
        path.unlink()
    words = [
        *line.run_file(folder.with_suffix(".yaml"), run.section, _DROPPED),
        *(*run.words, *_FORWARD.split(), "--global-batch-size", str(known.iters)),
        *(["--bf16"] if dtype == "bfloat16" else []),
    ]
    ranks = ["--nproc-per-node", str(CommandLine.of(words).ranks)]
    train.logged(folder.with_suffix(".log"), (MODULE, str(folder), *ranks, *words), {})
    return LogProbs.load(folder)


def check_comparable(one: LogProbs, reference: LogProbs, *, split: str | None = None) -> None:
    """Refuses to compare other tokens, or another model.

    Args: split: Substring of the names of parameters that are split among ranks.

    Raises: ContextParallelError if something differs.
    """
    different = []
    if one.labels.shape != reference.labels.shape or not torch.equal(one.labels, reference.labels):
        different.append("samples")
    first, *every = (
        {name: norm for name, norm in each.items() if split is None or split not in name}
        for each in (reference.weights[0], *one.weights)
    )
    if any(each != first for each in every):
        different.append("weights")
    if different:
        raise ContextParallelError(
            f"the run has other {' and '.join(different)} than the reference, so that its "
            "log-probabilities say nothing: load a checkpoint with --load"
        )


@dataclass(frozen=True)
class Spread:
    """Differences of one run's log-probabilities from the reference's, in nats.

    Attributes:
        rms, largest, most: Root mean square, largest, and what 99% do not exceed; infinite if one
            is no number.
        at: Position of the largest in its sample.
        mean_kl: Mean of exp(d) - 1 - d, the estimate "k3" of the divergence of the two policies.
        sections: (start, stop, tokens, rms) of parts of the samples.
        ranks: Root mean square of the tokens that each rank held.
    """

    rms: float
    largest: float
    most: float
    at: int
    mean_kl: float
    sections: tuple[tuple[int, int, int, float], ...]
    ranks: dict[int, float]

    @classmethod
    def of(cls, run: LogProbs, reference: LogProbs) -> Spread:
        """The differences of the tokens that count."""
        seen = reference.counts != 0
        one, other = (x.log_probs.double() for x in (run, reference))
        d = torch.where(one == other, 0.0, one - other)[seen]
        places = torch.arange(seen.size(1)).expand_as(seen)[seen]
        sizes, held = torch.where(d.isfinite(), d.abs(), math.inf), run.ranks[seen]
        edges = torch.linspace(0, seen.size(1), min(_SECTIONS, seen.size(1)) + 1).long().tolist()
        sections = []
        for start, stop in pairwise(edges):
            inside = sizes[(places >= start) & (places < stop)]
            sections.append((start, stop, len(inside), _rms(inside)))
        return cls(
            rms=_rms(sizes),
            largest=float(sizes.max()),
            most=float(sizes.sort().values[math.ceil(0.99 * len(d)) - 1]),
            at=int(places[sizes.argmax()]),
            mean_kl=float((torch.expm1(d) - d).mean()),
            sections=tuple(sections),
            ranks={int(rank): _rms(sizes[held == rank]) for rank in held.unique()},
        )


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if len(x) else 0.0


@dataclass(frozen=True)
class Report:
    """A run of one dtype against a reference.

    Attributes:
        dtype: In which the model computes.
        rounding: The dtype's epsilon times the root mean square of the reference's
            log-probabilities. A quarter of it is the least noise that is assumed; all of it is,
            where there is no noise.
        noise: Differences of a run with another kernel alone; None: there was none.
        ours: Differences of the run.
    """

    dtype: str
    rounding: float
    noise: Spread | None
    ours: Spread

    @property
    def base(self) -> float:
        """The root mean square that counts as noise."""
        return max(self.rounding / 4, self.noise.rms) if self.noise else self.rounding

    @property
    def problems(self) -> list[str]:
        """Differences that rounding does not explain."""
        noise, ours, base, found = self.noise, self.ours, self.base, []
        if noise is not None and not noise.rms <= NOISE_FACTOR * self.rounding:
            found.append(
                f"two kernels disagree without context parallelism, by {noise.rms:.1e} (root mean "
                f"square), {noise.rms / self.rounding:.0f} times one rounding"
            )
        where = ""
        if len(ours.ranks) > 1:
            worst = max(ours.ranks, key=lambda rank: ours.ranks[rank])
            rest = max(rms for rank, rms in ours.ranks.items() if rank != worst)
            where = f"; rank {worst}'s tokens {ours.ranks[worst]:.1e}, others' {rest:.1e} at most"
        if not ours.rms <= RMS_FACTOR * base:
            return [*found, f"{ours.rms:.1e}, {ours.rms / base:.0f} times {self._words}{where}"]
        pairs = zip(ours.sections, (noise or ours).sections, strict=True)
        for (start, stop, tokens, rms), (*_, of_noise) in pairs:
            allowed = max(base, of_noise) if noise else base
            if tokens >= _SECTION_TOKENS and rms > RMS_FACTOR * allowed:
                at = f"positions {start} to {stop - 1}"
                words = f"{rms:.1e} at {at}, {rms / allowed:.0f} times {self._words}{where}"
                return [*found, words]
        largest = max(4 * base, noise.largest if noise else 8 * base)
        if not ours.largest <= LARGEST_FACTOR * largest:
            found.append(
                f"{ours.largest:.1e} at position {ours.at}, {ours.largest / largest:.0f} times the "
                f"largest that rounding gives ({largest:.1e}){where}"
            )
        return found

    def verdict(self) -> list[str]:
        """One line, or one for each problem."""
        if problems := self.problems:
            return [f"{self.dtype}: NOT ROUNDING: {problem}" for problem in problems]
        return [
            f"{self.dtype}: rounding: {self.ours.rms:.1e} (root mean square), "
            f"{self.ours.rms / self.base:.1f} times {self._words}, {RMS_FACTOR:g} allowed"
        ]

    @property
    def _words(self) -> str:
        if self.noise is not None and self.noise.rms == self.base:
            return "the noise of another kernel"
        return f"what one rounding is taken for ({self.base:.1e})"


def report_of(found: Mapping[str, LogProbs], dtype: torch.dtype) -> Report:
    """The report of jobs by the names of `runs_of`.

    Raises: ContextParallelError: No token counts.
    """
    reference = found["reference"]
    size = _rms(reference.log_probs[reference.counts != 0].double())
    if not (reference.counts != 0).any():
        raise ContextParallelError("log-probabilities of tokens are compared, got none that count")
    spreads = {name: Spread.of(one, reference) for name, one in found.items()}
    rounding = torch.finfo(dtype).eps * (size if math.isfinite(size) else 1.0)
    name = str(dtype).removeprefix("torch.")
    return Report(name, rounding, spreads.get("noise"), spreads["ours"])


def _table(reports: Sequence[Report]) -> str:
    rows = []
    for report in reports:
        for name, run in ("noise: another kernel", report.noise), ("ours", report.ours):
            if run is not None:
                values = run.rms, run.largest, run.most, run.mean_kl
                shown = (f"{value:.1e}" for value in values)
                rows.append((report.dtype, name, *shown, f"{run.rms / report.base:.1f}"))
    columns = ("dtype", "run", "rms", "largest", "99%", "mean KL", "x noise")
    return text_table(columns, rows, right=range(2, len(columns)))
