"""Pictures of a schedule: workers x steps, which queries against which keys, and who waits.

Drawn from an algorithm's plan, so no process group and no tensor is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.linear import LinearWork
from megatron_cp_plugin.core.plan import Compute, Plan
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.virtual import VirtualWorld
from megatron_cp_plugin.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import RenderableType

_TOKENS_PER_CHUNK = 256
_LETTER_INCHES = 0.07

_OWN, _OTHERS, _WAITS = "#3b6fb6", "#e08214", "#e9e9e9"
_INK = "#1a1a1a"


@dataclass(frozen=True)
class Cell:
    """What one rank does in one step.

    Attributes:
        text: which blocks meet, such as "q7 k2"; of several ranks and a part of the heads
            "q0-3 k0,2 1/4 heads"; queries and the state of ranks 0 to 6 "q7 S0-6".
        pairs: number of (query, key) pairs, times the share of the heads; with linear attention,
            of products of a token with a state.
        own: whether all queries are those of the rank itself.
    """

    text: str
    pairs: float
    own: bool


@dataclass(frozen=True)
class Picture:
    """The plan of one forward.

    Attributes:
        title: algorithm, ranks, mask, tokens.
        size: number of ranks.
        steps: cells by step and rank; None: the rank waits.
    """

    title: str
    size: int
    steps: tuple[tuple[Cell | None, ...], ...]

    @property
    def waiting(self) -> int:
        """Worker-steps without work."""
        return sum(cell is None for step in self.steps for cell in step)

    @property
    def idle_share(self) -> float:
        """Idle share of all workers' time if a step takes as long as its largest block."""
        work = sum(cell.pairs for step in self.steps for cell in step if cell)
        time = sum(_longest(step) for step in self.steps)
        return 1 - work / (self.size * time) if time else 0.0

    @property
    def summary(self) -> tuple[str, str]:
        """How many steps and who waits; how much of the time is idle."""
        slots = len(self.steps) * self.size
        steps = "1 step" if len(self.steps) == 1 else f"{len(self.steps)} steps"
        return (
            f"{steps}, waiting in {self.waiting} of {slots} worker-steps "
            f"({self.waiting / max(slots, 1):.1%})",
            f"idle {self.idle_share:.1%} of the time, a step being as long as its largest block",
        )


def picture(
    algo: str,
    size: int,
    *,
    seq_len: int | None = None,
    mask: Mask | None = None,
    options: Mapping[str, object] | None = None,
) -> Picture:
    """Plans one forward of an algorithm.

    Args:
        algo: A name of `available()`.
        size: Number of context-parallel ranks.
        seq_len: Global tokens; default: some hundreds a rank.
        mask: Default: causal.
        options: Of the algorithm; values may be text.

    Raises:
        ConfigError: The algorithm, an option or a value is unknown, or has no such window.
    """
    if size < 1:
        raise ConfigError(f"size must be 1 or more, got {size}: give the number of ranks")
    mask, options = mask or Mask(), options or {}
    if seq_len is None:
        seq_len = registry.layout_of(algo, options).multiple(size) * _TOKENS_PER_CHUNK
    if seq_len < 1:
        raise ConfigError(f"seq-len must be 1 or more, got {seq_len}: give the global tokens")
    topology = VirtualWorld(size).topology(0)
    if mask.special and not getattr(registry.algorithm_class(algo), "windows", False):
        raise ConfigError(f"{algo} does not serve {mask.special}: leave it out")
    settings = "".join(f", {name}={value}" for name, value in options.items())
    shape = "causal attention" if mask.causal else "full attention"
    if mask.window is not None:
        shape += f", window {mask.window}"
    if mask.documents:
        shape += f", {len(mask.documents) + 1} documents"
    title = f"{algo}{settings} · {size} ranks · {shape} · {seq_len} tokens"
    if registry.kind_of(algo) == "linear":
        states = registry.create_linear(algo, topology, options)
        return Picture(title, size, _linear_steps(states.trace(seq_len, causal=mask.causal), size))
    algorithm = registry.create(algo, topology, options)
    # As many heads as ranks: every algorithm can divide them.
    plan = algorithm.plan(Shape(1, seq_len, size, size, 1), mask)
    return Picture(title, size, _steps(plan))


def _linear_steps(trace: Sequence[LinearWork], size: int) -> tuple[tuple[Cell | None, ...], ...]:
    count = 1 + max(work.step for work in trace)
    cells: list[list[Cell | None]] = [[None] * size for _ in range(count)]
    for work in trace:
        whole = work.share == 1
        owners = _ranks([work.host] if whole else range(size))
        met = f"S{_ranks(work.state_owners)}" if work.state_owners else f"k{owners}"
        text = f"q{owners} {met}" + ("" if whole else f" {work.share} heads")
        cells[work.step][work.host] = Cell(text, float(work.products * work.share), own=whole)
    return tuple(map(tuple, cells))


def _steps(plan: Plan) -> tuple[tuple[Cell | None, ...], ...]:
    found: dict[tuple[int, int], list[Compute]] = {}
    for compute in plan.computes:
        if plan.tiles(compute):
            found.setdefault((compute.step, compute.rank), []).append(compute)
    count = max((step for step, _ in found), default=-1) + 1
    return tuple(
        tuple(_cell(plan, rank, found.get((step, rank), [])) for rank in range(plan.size))
        for step in range(count)
    )


def _cell(plan: Plan, rank: int, computes: Sequence[Compute]) -> Cell | None:
    if not computes:
        return None
    share = Fraction(computes[0].heads.heads, plan.heads.heads * plan.shares)
    heads = "" if share == 1 else f" {share} heads"
    keys: dict[tuple[int, ...], list[int]] = {}
    for compute in computes:
        keys.setdefault(compute.queries.owners, []).extend(compute.keys.owners)
    text = ", ".join(f"q{_ranks(q)} k{_ranks(k)}{heads}" for q, k in keys.items())
    return Cell(text, float(sum(map(plan.pairs, computes))), own=set(keys) == {(rank,)})


def _ranks(owners: Sequence[int]) -> str:
    """Ranks 0, 1, 2, 3 and 6 are "0-3,6", every second one is "0-6:2"."""
    ranks = sorted(set(owners))
    strides = {b - a for a, b in pairwise(ranks)}
    if len(ranks) > 2 and len(strides) == 1 and strides != {1}:
        return f"{ranks[0]}-{ranks[-1]}:{strides.pop()}"
    pieces: list[str] = []
    start = 0
    for index, rank in enumerate(ranks):
        if index + 1 == len(ranks) or ranks[index + 1] != rank + 1:
            first = ranks[start]
            pieces.append(str(rank) if first == rank else f"{first}-{rank}")
            start = index + 1
    return ",".join(pieces)


def _longest(step: Sequence[Cell | None]) -> float:
    return max((cell.pairs for cell in step if cell), default=0.0)


def table(drawn: Picture) -> RenderableType:
    """The picture for a terminal; needs rich."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table()
    grid.add_column("rank", justify="right", style="bold", no_wrap=True)
    for step in range(len(drawn.steps)):
        grid.add_column(f"step {step}", justify="center", no_wrap=True)
    for rank in range(drawn.size):
        cells = [_text(step[rank]) for step in drawn.steps]
        grid.add_row(str(rank), *(Text(text, style) for text, style in cells))
    legend = Text("")
    legend.append("own queries", "cyan").append("   ")
    legend.append("queries of other ranks", "yellow").append("   ")
    legend.append("waits", "dim")
    for line in drawn.summary:
        legend.append(f"\n{line}", "default")
    return Group(Text(drawn.title, "bold"), grid, legend)


def _text(cell: Cell | None) -> tuple[str, str]:
    if cell is None:
        return "waits", "dim"
    return cell.text, "cyan" if cell.own else "yellow"


def table_width(drawn: Picture) -> int:
    """Columns of a terminal that show the table unbroken."""
    return 8 + sum(
        3 + max(len(f"step {index}"), *(len(_text(cell)[0]) for cell in step))
        for index, step in enumerate(drawn.steps)
    )


def save(drawn: Picture, path: Path) -> None:
    """Writes the picture as a time line: a step is as wide as its largest block is large.

    Args:
        drawn: What to draw.
        path: Ends in .png or .svg.

    Raises:
        ConfigError: Another ending, no such folder, or matplotlib is not installed.
    """
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"a picture is a .png or .svg file, got {path.name!r}: change its ending")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {str(path.parent)!r}: make it first")
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{path.name!r} needs matplotlib, which is not installed: "
            "pip install 'megatron-cp-plugin[report]', or leave --output out"
        )
    from matplotlib.figure import Figure

    unit = max((_longest(step) for step in drawn.steps), default=1)
    widths = [_longest(step) / unit for step in drawn.steps]
    letters = max((len(c.text) for step in drawn.steps for c in step if c), default=5)
    cell_inches = 0.35 + 1.2 * _LETTER_INCHES * letters / max(min(widths, default=1.0), 0.2)
    width = max(6.5, 1.2 + cell_inches * sum(widths))
    height = 1.75 + 0.34 * drawn.size
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    start = 0.0
    middles = []
    for step, step_width in zip(drawn.steps, widths, strict=True):
        for rank, cell in enumerate(step):
            _draw_idle(axes, rank, start, step_width)
            if cell:
                needed = _LETTER_INCHES * len(cell.text) / cell_inches
                _draw_cell(axes, cell, rank, start, cell.pairs / unit, needed)
        middles.append(start + step_width / 2)
        start += step_width
        axes.axvline(start, color="white", linewidth=2)
    axes.set_xlim(0, start or 1)
    axes.set_ylim(drawn.size - 0.5, -0.5)
    axes.set_xticks(middles, [str(step) for step in range(len(middles))])
    axes.set_yticks(range(drawn.size))
    axes.set_xlabel("step (width: time of its largest block)")
    axes.set_ylabel("rank")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"{drawn.title}\n", loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.annotate(
        f"{drawn.summary[0]}; idle {drawn.idle_share:.1%} of the time",
        (0, 1),
        xytext=(0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9,
        color=_INK,
    )
    _add_legend(axes, drawn)
    figure.savefig(path, dpi=160)


def _draw_idle(axes: Axes, rank: int, start: float, width: float) -> None:
    axes.barh(rank, width, left=start, height=0.82, color=_WAITS, hatch="////", edgecolor="white")


def _draw_cell(
    axes: Axes, cell: Cell, rank: int, start: float, length: float, text_length: float
) -> None:
    color = _OWN if cell.own else _OTHERS
    axes.barh(rank, length, left=start, height=0.82, color=color, edgecolor="white")
    fits = text_length < length
    axes.text(
        start + length / 2 if fits else start + length,
        rank,
        cell.text if fits else f" {cell.text}",
        ha="center" if fits else "left",
        va="center",
        fontsize=7.5,
        color="white" if cell.own and fits else _INK,
    )


def _add_legend(axes: Axes, drawn: Picture) -> None:
    from matplotlib.patches import Patch

    cells = [cell for step in drawn.steps for cell in step]
    entries = []
    if any(cell and cell.own for cell in cells):
        entries.append(Patch(color=_OWN, label="own queries"))
    if any(cell and not cell.own for cell in cells):
        entries.append(Patch(color=_OTHERS, label="queries of other ranks"))
    if drawn.idle_share > 0:
        entries.append(Patch(facecolor=_WAITS, hatch="////", edgecolor="white", label="idle"))
    axes.figure.legend(
        handles=entries, loc="outside lower right", ncols=3, frameon=False, fontsize=8.5
    )
