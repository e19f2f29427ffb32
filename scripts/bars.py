"""Bars side by side: the picture of the benchmarks.

A panel is one problem; from left to right they are longer, from top to bottom of another kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.console import Console

SHADES = ("#4c72b0", "#a3b8d9")


@dataclass(frozen=True)
class Bar:
    """What one contender needs. Attributes: parts: one after another. note: in place of a bar."""

    name: str
    parts: tuple[float, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """One problem. Attributes: limit: a dashed line, if there is one."""

    title: str
    bars: tuple[Bar, ...]
    limit: float | None = None


@dataclass(frozen=True)
class Legend:
    """What lengths mean. Attributes: parts: of a bar. limit: of the dashed line."""

    unit: str
    parts: tuple[str, ...]
    limit: str = ""


def save(grid: Sequence[Sequence[Panel]], legend: Legend, title: str, path: Path) -> None:
    """Draws `figure` to a file, if matplotlib is installed."""
    try:
        drawn = figure(grid, legend, title)
    except ImportError:
        Console(stderr=True).print("no picture: matplotlib is not installed")
        return
    drawn.savefig(path, dpi=200)


def figure(grid: Sequence[Sequence[Panel]], legend: Legend, title: str) -> Any:
    """The picture, as matplotlib's. Args: grid: lines of equally many panels."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(bar.name for line in grid for p in line for bar in p.bars))
    of_names = 0.5 + 0.07 * max(map(len, names), default=0)  # inches that they take on the left
    width = of_names + 2.6 * len(grid[0])
    height = 0.9 + len(grid) * (0.7 + 0.24 * len(names))
    drawn = Figure(figsize=(width, height), layout="constrained")
    places = drawn.subplots(len(grid), len(grid[0]), squeeze=False, sharey=True)
    for axes, line in zip(places, grid, strict=True):
        for axis, panel in zip(axes, line, strict=True):
            _draw(axis, panel, legend, names)
    places[0][0].invert_yaxis()
    for axis in places[-1]:
        axis.set_xlabel(legend.unit, fontsize=8)
    found = dict(
        zip(*reversed(places[0][0].get_legend_handles_labels()), strict=True)  # by label
    )
    if len(found) > 1:  # what a single part is, the axis says
        drawn.legend(
            found.values(), found, loc="outside lower center", ncols=3, fontsize=7, frameon=False
        )
    drawn.suptitle("\n".join(wrap(title, int(13 * width))), fontsize=9)
    return drawn


def _draw(axis: Any, panel: Panel, legend: Legend, names: Sequence[str]) -> None:
    timed = [bar for bar in panel.bars if bar.parts]
    places = [names.index(bar.name) for bar in timed]
    left = [0.0] * len(timed)
    for number, label in enumerate(legend.parts):
        lengths = [bar.parts[number] for bar in timed]
        drawn = axis.barh(places, lengths, 0.7, left=left, color=SHADES[number], label=label)
        left = [a + b for a, b in zip(left, lengths, strict=True)]
    axis.bar_label(drawn, [f"{total:.4g}" for total in left], padding=2, fontsize=6)
    for bar in panel.bars:
        if not bar.parts:
            note = f" {bar.note.split(',')[0][:36]}"  # where the log is, the table says
            axis.text(0, names.index(bar.name), note, va="center", fontsize=6)
    if panel.limit is not None:
        axis.axvline(panel.limit, color="black", linestyle="--", linewidth=0.8, label=legend.limit)
    axis.set_title(panel.title, fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.tick_params(axis="x", labelsize=7)
    axis.margins(x=0.18)
    axis.spines[["top", "right"]].set_visible(False)
