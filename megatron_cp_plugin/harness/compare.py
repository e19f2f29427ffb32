"""`megatron-cp compare`: the same training run with Megatron's own attention and with the plugin.

Both are `megatron-cp train` with the same flags, one after the other. What is compared is what
Megatron itself prints, so that nothing disturbs the times; with `--gradients` both are recorded,
and with `--log-probs` nothing is trained.
"""

from __future__ import annotations

import re
import statistics
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import Any, Self

import torch

from megatron_cp_plugin.commands import parser_of
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.harness import train
from megatron_cp_plugin.harness.compare_log_probs import compare_log_probs, without_dtype
from megatron_cp_plugin.harness.parity import Recording, Tolerances, relative_error
from megatron_cp_plugin.harness.parity import compare as compare_gradients
from megatron_cp_plugin.harness.train import CommandLine
from megatron_cp_plugin.integration.args import MEGATRON
from megatron_cp_plugin.terminal import text_table

_REFERENCES = {"te": "Transformer Engine's context parallelism", "cp1": "one rank's whole sequence"}
_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|.* elapsed time per iteration \(ms\): ([\d.]+)")
_LOSS = re.compile(r"\| ([\w ]*loss): (\S+)")
_PEAK = re.compile(r"memory \(MB\).* max allocated: ([\d.]+)")
_KERNELS = (
    re.compile(r"megatron_cp_plugin: (context parallelism by .*)"),
    re.compile(r"(?:Selected backend =|DotProductAttention:Running with) (.*)"),
)


@dataclass(frozen=True)
class Printed:
    """The lines that Megatron printed in one run.

    Attributes:
        losses: By name, one value an iteration.
        ms: The time of each iteration.
        peak_mb: The most memory of any rank that says it; 0 on CPUs.
        kernel: In the words of who ran it; empty if nobody says it.
    """

    losses: dict[str, list[float]]
    ms: list[float]
    peak_mb: float
    kernel: str

    @classmethod
    def of(cls, lines: Sequence[str]) -> Self:
        """Reads a log."""
        losses: dict[str, list[float]] = {}
        ms, peaks, kernels = [], [0.0], []
        for line in lines:
            if found := _ITERATION.search(line):
                ms.append(float(found[2]))
                for name, value in _LOSS.findall(line):
                    losses.setdefault(name.strip(), []).append(float(value))
            if found := _PEAK.search(line):
                peaks.append(float(found[1]))
            kernels += [match[1].strip() for each in _KERNELS if (match := each.search(line))]
        return cls(losses, ms, max(peaks), "; ".join(dict.fromkeys(kernels)))

    @property
    def median_ms(self) -> float:
        """Of an iteration, without the first."""
        return statistics.median(self.ms[1:] or self.ms or [nan])


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises: ContextParallelError: A flag cannot be served, or a run failed.
    """
    parser = parser_of("compare")
    parser.add_argument("--save", help=SUPPRESS)
    known, words = parser.parse_known_args(argv)
    if known.iters < 2:
        raise ConfigError(f"--iters must be at least 2, got {known.iters}")
    line = CommandLine.read("compare", words if known.log_probs is None else without_dtype(words))
    if known.log_probs is not None:
        if known.gradients:
            raise ConfigError("--log-probs trains nothing, got --gradients: leave one of them out")
        return compare_log_probs(line, known)
    known.output.mkdir(parents=True, exist_ok=True)
    reference, ours = commands(line, known)
    first = _train("reference", reference, known.output)
    print(side_by_side(first, _train("ours", ours, known.output)))
    return _compare_gradients(known.output) if known.gradients else 0


def commands(line: CommandLine, known: Any) -> tuple[list[str], list[str]]:
    """The flags of both runs, the reference first; writes their run files.

    Raises: ConfigError: The run is recorded already, or the ranks do not fit.
    """
    if line.flags.record is not None:
        raise ConfigError("compare records runs itself, got --cp-record: use --gradients")
    size = line.sizes["context_parallel_size"]
    ranks = line.ranks if known.nproc_per_node is None else known.nproc_per_node
    if ranks % size:
        raise ConfigError(f"--nproc-per-node must be a multiple of {size} ranks, got {ranks}")
    against = known.reference
    if against == "auto":
        has_engine = torch.cuda.is_available() and find_spec("transformer_engine") is not None
        against = "te" if has_engine and line.flags.platform != "cpu" else "cp1"
    alone = ["--context-parallel-size", "1"] if against == "cp1" else []
    both = ["--train-iters", str(known.iters), "--log-interval", "1"]
    found = []
    for name, section, flags in (
        ("reference", {}, [*line.by(MEGATRON), *alone]),
        ("ours", line.section, line.rest),
    ):
        here = ranks // size if (name, against) == ("reference", "cp1") else ranks
        of_file = line.run_file(known.output / f"{name}.yaml", section, ("save",))
        record = ["--cp-record", str(known.output / name)] if known.gradients else []
        found.append(["--nproc-per-node", str(here), *of_file, *flags, *both, *record])
    print(f"reference: {_REFERENCES[against]}", flush=True)
    return found[0], found[1]


def _train(name: str, words: Sequence[str], folder: Path) -> Printed:
    """Trains as `megatron-cp train` does; its output goes to a file."""
    for path in (folder / name).glob("rank*"):  # of an earlier recording, of more ranks perhaps
        path.unlink()
    print(f"{name}: megatron-cp train {' '.join(words)}", flush=True)
    said = {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "1"} if name == "reference" else {}
    log = folder / f"{name}.log"
    printed = Printed.of(train.logged(log, ("megatron_cp_plugin.cli", "train", *words), said))
    if not printed.losses:
        raise ContextParallelError(f"the run of {name} printed no losses, see {log}")
    return printed


def side_by_side(reference: Printed, ours: Printed) -> str:
    """Both runs side by side."""
    names = [name for name in reference.losses if name in ours.losses]
    columns = ["iteration"]
    for name in names:
        columns += [name, "ours", "difference"]
    rows = []
    for number in range(min(len(reference.ms), len(ours.ms))):
        row = [str(number + 1)]
        for name in names:
            want, got = (x.losses[name][number] for x in (reference, ours))
            row += [f"{want:.6f}", f"{got:.6f}", f"{relative_error(got, want):.1e}"]
        rows.append((*row, f"{reference.ms[number]:.1f}", f"{ours.ms[number]:.1f}"))
    lines = [text_table((*columns, "ms", "ours"), rows), *_summary(reference, ours, names)]
    return "\n".join(lines)


def _summary(reference: Printed, ours: Printed, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        pairs = zip(reference.losses[name], ours.losses[name], strict=False)
        worst = max(relative_error(got, want) for want, got in pairs)
        yield f"largest difference of {name}: {worst:.1e}"
    times = reference.median_ms, ours.median_ms
    yield "median step without the first: {:.1f} and {:.1f} ms, ratio {:.2f}".format(
        *times, times[1] / times[0]
    )
    if reference.peak_mb and ours.peak_mb:
        peaks = reference.peak_mb / 1024, ours.peak_mb / 1024
        yield "peak memory: {:.2f} and {:.2f} GiB, ratio {:.2f}".format(*peaks, peaks[1] / peaks[0])
    yield f"kernel of the reference: {reference.kernel or "Megatron's own attention"}"
    yield f"kernel of ours: {ours.kernel}"


def _compare_gradients(folder: Path) -> int:
    """Prints the errors of gradients. Returns: 0, or 1 if they are more than rounding."""
    reference, ours = (Recording.load(folder / name) for name in ("reference", "ours"))
    found = compare_gradients(reference, ours, Tolerances.of(ours.settings["params_dtype"]))
    for what, worst in (("first iteration", found.gradient), ("later", found.later_gradient)):
        print(f"gradients, {what}: off by {worst.error:.1e} at most, {worst.at}")
    print("\n".join(found.problems) or "equal within the rounding of the dtype")
    return int(not found.passed)
