"""How far log-probabilities of a policy are apart when they are computed in several ways.

Context parallelism adds in another order, and so do other kernels: log-probabilities differ by
rounding. Two runs without context parallelism, with two kernels, show how much that is. A fault,
such as positions that are off by one on a rank, is mostly far above it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.pictures import check_picture, write_picture
from megatron_cp_plugin.text_table import text_table

QUANTILES = (0.5, 0.9, 0.99, 0.999)
RATIO = 0.01  # of probabilities, around 1
# Times the noise that count as rounding: of root mean squares, and of the largest difference.
RMS_FACTOR, LARGEST_FACTOR = 3.0, 5.0
NOISE_FACTOR = 30.0  # roundings that noise itself may have
_BINS, _BINS_PRINTED, _BIN_TOKENS = 32, 8, 16


@dataclass(frozen=True)
class Section:
    """Tokens at positions [start, stop) of their samples. Attributes: rms, largest: of them."""

    start: int
    stop: int
    tokens: int
    rms: float
    largest: float


@dataclass(frozen=True)
class Spread:
    """Differences of one run's log-probabilities from the reference's, in nats.

    Attributes:
        tokens: how many were compared.
        largest, rms: of the differences d; infinite if one is no number.
        quantiles: of |d|: the least that a share of the tokens, of `QUANTILES`, do not exceed.
        mean_kl: mean of exp(d) - 1 - d, the estimate "k3" of the divergence of the two policies.
        outside: share of the ratios exp(d) outside 1 +- `RATIO`.
        positions: parts of the samples.
        ranks: root mean square of the tokens that each rank held.
        at: position of the largest difference in its sample.
    """

    tokens: int
    largest: float
    rms: float
    quantiles: dict[float, float]
    mean_kl: float
    outside: float
    positions: tuple[Section, ...]
    ranks: dict[int, float]
    at: int


@dataclass(frozen=True)
class LogProbReport:
    """Runs of one dtype against a reference.

    Attributes:
        dtype: in which the model computes.
        rounding: the dtype's epsilon times the root mean square of the reference's
            log-probabilities. A quarter of it is the least noise that is assumed; all of it is,
            where there is no noise.
        noise: differences of a run with another kernel alone; None: there was none.
        runs: by name.
        problems: a line for each run that rounding does not explain.
    """

    dtype: str
    rounding: float
    noise: Spread | None
    runs: dict[str, Spread]
    problems: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether rounding explains all differences."""
        return not self.problems

    def verdict(self) -> str:
        """One line, or one for each problem."""
        if self.problems:
            return "\n".join(f"{self.dtype}: NOT ROUNDING: {line}" for line in self.problems)
        worst = max((each.rms for each in self.runs.values()), default=0.0)
        return (
            f"{self.dtype}: rounding: at most {worst:.1e} (root mean square), "
            f"{worst / self._base:.1f} times {self._words_of_noise()}, {RMS_FACTOR:g} allowed"
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain types."""
        return {"passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        """Tables of all runs, and by positions, and the verdict."""
        return "\n".join((tables([self]), self.verdict()))

    def save(self, path: str | Path) -> None:
        """Draws root mean squares and largest differences by position.

        Args: path: ends in .svg or .png.

        Raises: ConfigError if matplotlib is not installed.
        """
        draw([self], Path(path))

    @property
    def _base(self) -> float:
        return max(self.rounding / 4, self.noise.rms) if self.noise else self.rounding

    def _words_of_noise(self) -> str:
        if self.noise is not None and self.noise.rms == self._base:
            return "the noise of another kernel"
        return f"what one rounding is taken for ({self._base:.1e})"

    def _found(self) -> Iterator[str]:
        """Differences that rounding does not explain."""
        if self.noise is not None and not self.noise.rms <= NOISE_FACTOR * self.rounding:
            yield (
                f"the noise: {self.noise.rms:.1e} (root mean square), "
                f"{self.noise.rms / self.rounding:.0f} times one rounding ({self.rounding:.1e}): "
                "two kernels disagree without context parallelism"
            )
        for name, run in self.runs.items():
            if said := self._said_of(run):
                yield f"{name}: {said}"

    def _said_of(self, run: Spread) -> str:
        base, words = self._base, self._words_of_noise()
        where = _where(run)
        if not run.rms <= RMS_FACTOR * base:
            return f"{run.rms:.1e} (root mean square), {run.rms / base:.0f} times {words}{where}"
        noises = self.noise.positions if self.noise else run.positions
        for part, noise in zip(run.positions, noises, strict=True):
            allowed = max(base, noise.rms if self.noise else 0.0)
            if part.tokens >= _BIN_TOKENS and part.rms > RMS_FACTOR * allowed:
                return (
                    f"{part.rms:.1e} at positions {part.start} to {part.stop - 1}, "
                    f"{part.rms / allowed:.0f} times {words}{where}"
                )
        largest = max(4 * base, self.noise.largest if self.noise else 8 * base)
        if not run.largest <= LARGEST_FACTOR * largest:
            return (
                f"{run.largest:.1e} at position {run.at}, {run.largest / largest:.0f} times the "
                f"largest that rounding gives ({largest:.1e}){where}"
            )
        return ""


def log_prob_report(
    reference: Tensor,
    runs: Mapping[str, Tensor],
    *,
    noise: Tensor | None = None,
    counts: Tensor | None = None,
    ranks: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> LogProbReport:
    """Compares log-probabilities of the same tokens, computed in several ways.

    B samples, S tokens of each, in their order: gather the ranks' tokens first (`cp.unshard`).

    Args:
        reference: [B,S], for example without context parallelism.
        runs: [B,S] each, by name, for example with context parallelism.
        noise: [B,S], for example without context parallelism and with another kernel: differences
            from the reference count as rounding. None: see `LogProbReport.rounding`.
        counts: [B,S], 0 for tokens that do not count; None: all count.
        ranks: [B,S] each: the ranks that held the tokens, for some of the runs.
        dtype: in which the model computes.

    Returns: the report; `passed` says whether rounding explains the differences, `print` shows it.
    Raises: ContextParallelError for shapes that differ, and for no tokens.
    """
    given = {"reference": reference, **runs} | ({} if noise is None else {"noise": noise})
    for name, x in given.items():
        if x.dim() != 2 or x.shape != reference.shape:
            raise ContextParallelError(
                f"log-probabilities [B,S] of the same tokens are compared, got {list(x.shape)} of "
                f"{name} and {list(reference.shape)} of the reference: gather and reshape them"
            )
    seen = torch.ones(reference.shape, dtype=torch.bool)
    if counts is not None:
        seen = counts.cpu() != 0
    if not seen.any():
        raise ContextParallelError(
            f"log-probabilities of some tokens are needed, got none that counts among "
            f"{reference.numel()}: check counts"
        )
    of_ranks = ranks or {}
    spreads = {name: _spread(x, reference, seen, of_ranks.get(name)) for name, x in runs.items()}
    size = float(reference.cpu().double()[seen].square().mean().sqrt())
    found = LogProbReport(
        str(dtype).removeprefix("torch."),
        torch.finfo(dtype).eps * (size if math.isfinite(size) else 1.0),
        None if noise is None else _spread(noise, reference, seen, None),
        spreads,
    )
    return replace(found, problems=tuple(found._found()))


def _spread(x: Tensor, reference: Tensor, seen: Tensor, ranks: Tensor | None) -> Spread:
    """Args:
    seen: which tokens count.
    ranks: who held them.
    """
    one, other = (each.detach().cpu().double() for each in (x, reference))
    every = torch.where(one == other, 0.0, one - other)
    places = torch.arange(every.size(1)).expand_as(every)[seen]
    d = every[seen]
    sizes = torch.where(d.isfinite(), d.abs(), math.inf)
    ordered = sizes.sort().values
    edges = torch.linspace(0, every.size(1), min(_BINS, every.size(1)) + 1).long().tolist()
    parts = []
    for start, stop in pairwise(edges):
        inside = sizes[(places >= start) & (places < stop)]
        parts.append(Section(start, stop, len(inside), _rms(inside), float(_largest(inside))))
    held = {} if ranks is None else {int(r): ranks.cpu()[seen] == r for r in ranks.unique()}
    return Spread(
        tokens=len(d),
        largest=float(_largest(sizes)),
        rms=_rms(sizes),
        quantiles={q: float(ordered[math.ceil(q * len(d)) - 1]) for q in QUANTILES},
        mean_kl=float((torch.expm1(d) - d).mean()),
        outside=float((~((torch.expm1(d)).abs() <= RATIO)).double().mean()),
        positions=tuple(parts),
        ranks={rank: _rms(sizes[own]) for rank, own in held.items()},
        at=int(places[sizes.argmax()]),
    )


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if len(x) else 0.0


def _largest(x: Tensor) -> Tensor:
    return x.max() if len(x) else x.new_zeros(())


def _where(run: Spread) -> str:
    """Which rank's tokens are off most, if ranks are known."""
    if len(run.ranks) < 2:
        return ""
    worst = max(run.ranks, key=lambda rank: run.ranks[rank])
    rest = max(rms for rank, rms in run.ranks.items() if rank != worst)
    return f"; tokens of rank {worst}: {run.ranks[worst]:.1e}, of others {rest:.1e} at most"


def tables(reports: Sequence[LogProbReport]) -> str:
    """All runs, and the root mean squares of parts of the samples."""
    rows, by_position = [], []
    for report in reports:
        named = {"noise: another kernel": report.noise, **report.runs}
        for name, run in named.items():
            if run is None:
                continue
            values = [run.rms, run.largest, *run.quantiles.values(), run.mean_kl]
            times = f"{run.rms / report._base:.1f}"
            shown = (f"{value:.1e}" for value in values)
            rows.append((report.dtype, name, *shown, f"{run.outside:.2%}", times))
            merged = [f"{part.rms:.1e}" for part in _merged_sections(run.positions)]
            by_position.append((report.dtype, name, *merged))
    quantiles = (f"{100 * q:g}%" for q in QUANTILES)
    columns = ("dtype", "run", "rms", "largest", *quantiles, "mean KL", "ratios off", "x noise")
    parts = _merged_sections(next(iter(reports[0].runs.values())).positions)
    spans = (f"{part.start}-{part.stop - 1}" for part in parts)
    return "\n".join(
        (
            text_table(columns, rows, right=range(2, len(columns))),
            "root mean square by position in the sample:",
            text_table(("dtype", "run", *spans), by_position, right=range(2, 2 + len(parts))),
        )
    )


def _merged_sections(parts: Sequence[Section]) -> list[Section]:
    """Fewer, larger parts."""
    step = -(-len(parts) // _BINS_PRINTED)
    found = []
    for at in range(0, len(parts), step):
        some = parts[at : at + step]
        tokens = sum(part.tokens for part in some)
        squares = sum(part.tokens * part.rms**2 for part in some)
        rms = math.sqrt(squares / tokens) if tokens else 0.0
        largest = max(part.largest for part in some)
        found.append(Section(some[0].start, some[-1].stop, tokens, rms, largest))
    return found


def draw(reports: Sequence[LogProbReport], path: Path) -> None:
    """Draws a panel for each report: differences by position, on a logarithmic axis.

    Args: path: ends in .svg or .png.

    Raises: ConfigError if it ends otherwise, or matplotlib is not installed.
    """
    check_picture(path)
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(5.2 * len(reports), 3.6), layout="constrained")
    panels = figure.subplots(1, len(reports), squeeze=False)[0]
    for axes, report in zip(panels, reports, strict=True):
        if report.noise is not None:
            middles, rms, largest = _curves(report.noise)
            axes.fill_between(middles, rms, color="#d9d9d9", label="noise of another kernel")
            axes.plot(middles, largest, color="#969696", linewidth=0.8, linestyle=":")
        for number, (name, run) in enumerate(report.runs.items()):
            middles, rms, largest = _curves(run)
            axes.plot(middles, rms, color=f"C{number}", linewidth=1.4, label=name)
            axes.plot(middles, largest, color=f"C{number}", linewidth=0.8, linestyle=":")
        limit = RMS_FACTOR * report._base
        axes.axhline(
            limit, color="#1a1a1a", linewidth=0.8, linestyle="--", label="allowed for lines"
        )
        axes.set_yscale("log")
        axes.set_ylim(*_decades([report.noise, *report.runs.values()], limit))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("position in the sample", fontsize=8)
        axes.set_title(f"{report.dtype}: {'' if report.passed else 'not '}rounding", fontsize=9)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("difference of log-probabilities, nats", fontsize=8)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize=7,
        frameon=False,
        title="lines: root mean square of parts of the samples; dotted: largest difference",
        title_fontsize=7,
    )
    write_picture(figure, path)


def _decades(runs: Sequence[Spread | None], limit: float) -> tuple[float, float]:
    """Powers of ten around all that is drawn."""
    seen = [limit] if math.isfinite(limit) else [1.0]
    for run in runs:
        for curve in [] if run is None else _curves(run)[1:]:
            seen += curve
    return 10.0 ** math.floor(math.log10(min(seen))), 10.0 ** math.ceil(math.log10(max(seen)))


def _curves(run: Spread) -> tuple[list[float], list[float], list[float]]:
    """Middles of parts, and the values to draw there; 0 has no logarithm."""
    parts = [part for part in run.positions if 0 < part.rms < math.inf]
    middles = [(part.start + part.stop - 1) / 2 for part in parts]
    return middles, [part.rms for part in parts], [part.largest for part in parts]
