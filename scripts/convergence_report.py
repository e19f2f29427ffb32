"""What the convergence harness says of its runs: a table, a picture and all numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from convergence_runs import Outcome
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_cp_plugin.harness.parity import Tolerances

_LINEAR_TO = 1e-9
_DOTTED_TO = 100  # iterations, each of which is seen
Curve = tuple[str, Sequence[float]]


def show(outcomes: Sequence[Outcome], tolerances: Tolerances, console: Console) -> None:
    """Prints the table, and one line for every problem."""
    reference = outcomes[0].run.variant
    what = f"{reference.label} (CP 1)" if reference else "Megatron's own attention"
    table = Table(title=f"Relative errors against {what} on the unsplit sequence")
    table.add_column("algorithm", no_wrap=True)
    table.add_column("CP", justify="right")
    table.add_column("first loss", justify="right")
    table.add_column("last loss", justify="right")
    table.add_column(f"losses\n(≤ {tolerances.loss:g})", justify="right")
    table.add_column(f"grad norms\n(≤ {tolerances.grad_norm:g})", justify="right")
    table.add_column(f"gradients\n(≤ {tolerances.gradient:g})", justify="right")
    table.add_column("sent per rank\nand iteration", justify="right")
    table.add_column("ms per\niteration", justify="right")
    table.add_column("", justify="left")
    for outcome in outcomes:
        cells = [escape(outcome.run.label), str(outcome.run.cp)]
        recording, comparison = outcome.recording, outcome.comparison
        if recording is None:
            table.add_row(*cells, *[""] * 7, "[red]failed[/]")
            continue
        losses = next(iter(recording.losses().values()), [math.nan])
        cells += [f"{losses[0]:.5f}", f"{losses[-1]:.5f}"]
        if comparison is None:
            cells += ["", "", ""]
        else:
            gradient = max(comparison.gradient.error, comparison.later_gradient.error)
            errors = (comparison.loss.error, comparison.grad_norm.error, gradient)
            cells += [f"{error:.1e}" if error else "0" for error in errors]
        cells.append(_size(recording.sent_bytes()) if outcome.run.cp > 1 else "")
        cells.append(f"{recording.seconds() * 1e3:.0f}")
        verdict = "" if comparison is None else "[green]equal[/]"
        table.add_row(*cells, verdict if outcome.passed else "[red]DIFFERENT[/]")
    console.print(table)
    for outcome in outcomes:
        problems = outcome.comparison.problems if outcome.comparison else []
        for problem in [outcome.failure] if outcome.failure else problems:
            text = f"{outcome.run.label}, CP {outcome.run.cp}: {problem}"
            console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def write_report(
    outcomes: Sequence[Outcome], tolerances: Tolerances, about: Mapping[str, object], path: Path
) -> None:
    """Writes everything that was measured as JSON."""
    runs = []
    for outcome in outcomes:
        row: dict[str, object] = {
            "algorithm": outcome.run.label,
            "context_parallel_size": outcome.run.cp,
            "processes": outcome.run.processes,
            "passed": outcome.passed,
            "failure": outcome.failure,
        }
        if outcome.recording is not None:
            recording = outcome.recording
            row["settings"] = recording.settings
            row["losses"] = recording.losses()
            row["grad_norms"] = recording.grad_norms()
            row["seconds_per_iteration"] = recording.seconds()
            row["communication_by_rank"] = [rank.communication for rank in recording.ranks]
        if outcome.comparison is not None:
            row["comparison"] = outcome.comparison.as_dict()
        runs.append(row)
    passed = all(outcome.passed for outcome in outcomes)
    report = {**about, "passed": passed, "tolerances": asdict(tolerances), "runs": runs}
    path.write_text(json.dumps(_plain(report), indent=2, allow_nan=False) + "\n")


def curves_of(outcomes: Sequence[Outcome]) -> list[Curve]:
    """Returns the losses of the runs that finished, the reference first."""
    return [
        (
            o.run.label if o.run.is_reference else f"{o.run.label}, CP {o.run.cp}",
            next(iter(o.recording.losses().values()), []),
        )
        for o in outcomes
        if o.recording is not None
    ]


def draw(curves: Sequence[Curve], title: str, path: Path, allowed: float | None = None) -> None:
    """Draws loss curves, and their distances from the first one.

    Args:
        curves: What the runs are called, and their losses.
        title: Of the picture.
        path: Where it goes.
        allowed: The largest relative distance, if there is one.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    if not curves:
        return
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    (reference, expected), *others = curves
    steps = range(1, len(expected) + 1)
    marker = "." if len(expected) <= _DOTTED_TO else ""
    top.plot(steps, expected, color="0.75", linewidth=6 if marker else 3, label=reference)
    for number, (label, losses) in enumerate(others):
        steps = range(1, len(losses) + 1)
        style: dict[str, Any] = {"color": f"C{number}", "linewidth": 1.4 if marker else 0.7}
        style["linestyle"] = ("-", "--", ":", "-.")[number % 4]
        top.plot(steps, losses, label=label, **style)
        errors = [
            abs(got - want) / abs(want) if want else math.nan
            for got, want in zip(losses, expected, strict=False)
        ]
        bottom.plot(steps[: len(errors)], errors, marker=marker, **style)
    if allowed is not None:
        bottom.axhline(allowed, color="0.4", linestyle="--", linewidth=1)
        bottom.annotate("allowed", (1, allowed * 0.8), va="top", color="0.4")
    # Linear from 0 to less than one rounding of float32, so that exactly equal is drawn as 0.
    bottom.set_yscale("symlog", linthresh=_LINEAR_TO, linscale=0.5)
    bottom.set_ylim(bottom=-_LINEAR_TO / 2)
    bottom.set(ylabel=f"relative distance from {reference}", xlabel="iteration")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    top.set(ylabel="loss", title=title)
    top.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _plain(value: Any) -> Any:
    """Returns a value with NaN and infinities as text: JSON has none of them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
