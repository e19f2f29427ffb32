"""Pictures of plans and of timelines as files.

Of a plan: a lane for each rank, a column for each step, arrows for messages. Widths are inches, and
every column is as wide as its text; heights are lanes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.pictures import check_picture, write_picture
from megatron_cp_plugin.planner.drawing import (
    WHOSE,
    Collective,
    DrawnTransfer,
    Kind,
    Picture,
    Queries,
)
from megatron_cp_plugin.planner.event_simulation import Interval, Timeline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELLS: dict[Queries, str] = {"own": "#c6dbef", "others": "#fdd0a2", "both": "#dadaeb"}
_LINES: dict[Kind, str] = {
    "keys": "#1b7837",
    "queries": "#b35806",
    "results": "#762a83",
    "states": "#2166ac",
}
_WAITS: dict[str, Any] = {
    "facecolor": "white",
    "hatch": "//////",
    "edgecolor": "#dedede",
    "linewidth": 0,
}
_VISIBLE = 0.02  # of a step: less waiting than that is not drawn
_POINTS, _LINE, _LETTER = 7.0, 0.15, 7.0 / 72 * 0.61  # of texts, all in a monospaced font
_WIDE = 14.0  # steps that have no room beside the others go below them
_LANE = 0.13  # between lines of collectives
_COLUMNS = 88  # letters of a line under the picture


def save(drawn: Picture, path: Path) -> None:
    """Writes a picture.

    Args:
        drawn: The drawing.
        path: Ends in .png or .svg.

    Raises:
        ConfigError: Another ending, or matplotlib is not installed.
    """
    check_picture(path)
    write_picture(figure(drawn), path, tight=True)


def figure(drawn: Picture) -> Figure:
    """The picture; needs matplotlib. Titles and the legend stand beyond its edges."""
    from matplotlib.figure import Figure as NewFigure

    bands: list[list[_DrawnStep]] = [[]]
    nothing = _DrawnStep(["no query sees a key"], [None] * drawn.size, [], [])
    for part in list(_drawn_steps(drawn)) or [nothing]:
        if bands[-1] and sum(one.width for one in (*bands[-1], part)) > _WIDE:
            bands.append([])
        bands[-1].append(part)
    widths = [sum(part.width for part in band) for band in bands]
    came = Counter((one.before, one.target) for one in drawn.transfers)
    lane = max(0.34, 0.14 * max(came.values(), default=1) + 0.1)
    lines = max(len(part.head) for band in bands for part in band)
    width, above, lanes = max(widths), _LINE * max(lines, 2) + 0.1, lane * drawn.size
    height = len(bands) * (above + lanes)
    made = NewFigure(figsize=(width, height))
    for number, (band, right) in enumerate(zip(bands, widths, strict=True)):
        bottom = height - (number + 1) * (above + lanes)
        axes = made.add_axes((0, bottom / height, right / width, lanes / height))
        axes.set(xlim=(0, right), ylim=(drawn.size - 0.5, -0.5), xticks=[])
        axes.set_yticks(range(drawn.size), [f"rank {rank}" for rank in range(drawn.size)])
        axes.tick_params(length=0, labelsize=7.5)
        axes.spines[:].set_visible(False)
        for rank in range(0, drawn.size, 2):
            axes.axhspan(rank - 0.5, rank + 0.5, color="#f5f5f5", linewidth=0)
        x = 0.0
        for part in band:
            _draw_part(axes, part, x, 0.14 / lane)
            x += part.width
    below = [drawn.subtitle, *drawn.summary]
    for text, y, style in (
        (fill(drawn.title, _COLUMNS), 0.2 + 0.16 * len(below), {"weight": "bold", "size": 11}),
        ("\n".join(below), 0.1, {"size": 8.5}),
    ):
        made.text(-0.5 / width, 1 + y / height, text, va="bottom", **style)
    made.legend(
        handles=list(_legend(drawn)),
        title=fill(_notes(drawn), _COLUMNS) or None,
        loc="upper left",
        bbox_to_anchor=(-0.6 / width, -0.05 / height),
        ncols=2,
        alignment="left",
        frameon=False,
        fontsize=_POINTS,
        title_fontsize=_POINTS,
    )
    return made


@dataclass(frozen=True)
class _DrawnStep:
    """A step, and before it its messages, with collectives of one name side by side.

    Attributes:
        head: lines above the step.
        cells: of each rank its text, its color and the share of the step's time that it computes;
            None: it only waits.
        bundles: collectives, each with its lane.
    """

    head: list[str]
    cells: list[tuple[str, str, float] | None]
    transfers: list[DrawnTransfer]
    bundles: list[list[tuple[Collective, int]]]

    @property
    def arrows(self) -> float:
        """Their length: the steeper they are, the more room they have."""
        steep = [abs(one.source - one.target) for one in self.transfers]
        return 0.4 + 0.05 * sum(steep) / len(steep) if steep else 0.0

    @property
    def labels(self) -> float:
        """The width of their labels."""
        return max((_width(one.text) for one in self.transfers), default=0.0)

    @property
    def step(self) -> float:
        """The width of the column."""
        return max((_width(text) for text in (*self.head, *_texts(self.cells))), default=0.0)

    @property
    def width(self) -> float:
        """Of all."""
        return self.arrows + self.labels + sum(map(_bundle_width, self.bundles)) + self.step


def _texts(cells: list[tuple[str, str, float] | None]) -> Iterator[str]:
    return (cell[0] for cell in cells if cell)


def _width(text: str) -> float:
    return len(text) * _LETTER + 0.12


def _bundle_width(bundle: list[tuple[Collective, int]]) -> float:
    first, lanes = bundle[0][0], 1 + max(lane for _, lane in bundle)
    return max(_width(first.name), _width(first.tensors), _LANE * lanes) + 0.1


def _drawn_steps(drawn: Picture) -> Iterator[_DrawnStep]:
    times, count = drawn.times, len(drawn.steps)
    moments = {one.before for one in drawn.transfers} | {one.before for one in drawn.collectives}
    for index in sorted({*range(count), *moments}):
        head: list[str] = []
        cells: list[tuple[str, str, float] | None] = []
        if 0 <= index < count:
            head.append(f"step {index}")
            if drawn.head_groups > 1:
                each = -(-count // drawn.head_groups)
                head.append(f"heads {index // each + 1} of {drawn.head_groups}")
            if max(times) - min(times) > 0.005:
                head.append(f"{times[index]:.0%} of time")
            cells = [
                (cell.text, _CELLS[cell.queries], share) if cell else None
                for cell, share in zip(drawn.steps[index], drawn.shares[index], strict=True)
            ]
        named: dict[tuple[Kind, str, str], list[tuple[Collective, int]]] = {}
        for one in sorted(drawn.collectives, key=lambda one: (one.kind != "results", one)):
            if one.before == index:
                bundle = named.setdefault((one.kind, one.name, one.tensors), [])
                taken = {lane for other, lane in bundle if other.ranks[-1] > one.ranks[0]}
                lane = next(n for n in range(drawn.size) if n not in taken)
                bundle.append((one, lane))
        transfers = [one for one in drawn.transfers if one.before == index]
        yield _DrawnStep(head, cells, transfers, list(named.values()))


def _draw_part(axes: Axes, part: _DrawnStep, x: float, apart: float) -> None:
    """Args: apart: lines of text, in lanes."""
    came, slots = Counter(one.target for one in part.transfers), Counter[int]()
    end = x + part.arrows
    for one in sorted(part.transfers, key=lambda one: (one.kind != "results", one)):
        y = one.target + apart * (slots[one.target] - (came[one.target] - 1) / 2)
        slots[one.target] += 1
        _arrow(axes, (x + 0.04, one.source), (end, y), one.kind)
        _write(axes, end + 0.03, y, one.text, color=_LINES[one.kind])
    x = end + part.labels
    for bundle in part.bundles:
        first, lanes = bundle[0][0], 1 + max(lane for _, lane in bundle)
        middle, color = x + _bundle_width(bundle) / 2, _LINES[first.kind]
        _write(axes, middle, -0.6, f"{first.name}\n{first.tensors}", "bottom", color=color)
        for collective, lane in bundle:
            ranks = collective.ranks
            at = middle + _LANE * (lane - (lanes - 1) / 2)
            axes.plot([at] * len(ranks), ranks, "o-", color=color, lw=1.2, ms=4)
        x += _bundle_width(bundle)
    for rank, cell in enumerate(part.cells):
        text, color, share = cell or ("", "white", 0.0)
        if share < 1 - _VISIBLE:
            axes.barh(rank, part.step, 0.76, x, **_WAITS)
        axes.barh(rank, part.step * share, 0.76, x, color=color)
        _write(axes, x + part.step / 2, rank, text)
    _write(axes, x + part.step / 2, -0.6, "\n".join(part.head), "bottom")


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], kind: Kind) -> None:
    style = {"arrowstyle": "-|>,head_length=0.4,head_width=0.18", "shrinkA": 0, "shrinkB": 0}
    line = {"linewidth": 0.9, "linestyle": (0, (4, 1.5)) if kind == "results" else "-"}
    axes.annotate("", end, start, arrowprops={"color": _LINES[kind], **line, **style})


def _write(
    axes: Axes, x: float, y: float, text: str, va: str = "center", color: str | None = None
) -> None:
    """In the middle, or with a color of messages, from there on."""
    ha = "left" if color is not None and va == "center" else "center"
    if text:
        style = {"size": _POINTS, "family": "monospace", "color": color or "#1a1a1a"}
        axes.text(x, y, text, style, ha=ha, va=va)


def _legend(drawn: Picture) -> Iterator[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    for queries in dict.fromkeys(cell.queries for step in drawn.steps for cell in step if cell):
        yield Patch(color=_CELLS[queries], label=f"computes {WHOSE[queries]}")
    if any(share < 1 - _VISIBLE for step in drawn.shares for share in step):
        yield Patch(label="waits", **_WAITS)
    exchanged = {one.kind for one in drawn.collectives}
    travels = exchanged | {one.kind for one in drawn.transfers}
    for kind, color in _LINES.items():
        if kind in travels:
            marker = "o" if kind in exchanged else None
            dashed = "--" if kind == "results" and not marker else "-"
            label = drawn.kinds[kind]
            yield Line2D([], [], color=color, linestyle=dashed, marker=marker, ms=4, label=label)


def _notes(drawn: Picture) -> str:
    """The meaning of the letters in this picture."""
    cells = [cell.text for step in drawn.steps for cell in step if cell]
    words = " ".join([*cells, *(transfer.text for transfer in drawn.transfers)])
    meanings = {
        r"\bq\d|½q": "q1: the queries of rank 1",
        r"\bk\d": "k1: its keys and values",
        r"\bo\d": f"o1: {drawn.kinds['results'].removesuffix(' and lse')} of its queries",
        r"\bdq\d": "dq1: gradients of its queries",
        r"\bdk\d": "dk1: gradients of its keys and values",
        r"\bS\d": "S0-2: the state of the tokens of ranks 0 to 2",
        r"½": "½q1: half of its rows",
    }
    found = [text for pattern, text in meanings.items() if re.search(pattern, words)]
    if share := re.search(r"1/\d+ heads", words):
        found.append(f"{share[0]}: that part of the heads")
    if strided := re.search(r"(\d+)-(\d+):(\d+)", words):
        first, last, step = map(int, strided.groups())
        found.append(f"{strided[0]}: ranks {', '.join(map(str, range(first, last + 1, step)))}")
    return "; ".join(found)


# ---- timelines

_TIMES = {"attention": "#4292c6", "other": "#9ecae1", "messages": "#fdae6b"}
_TIME_LANE = 0.22  # inches of a lane


def save_timeline(found: Timeline, title: str, path: Path) -> None:
    """Writes a timeline.

    Args:
        title: above the picture.
        path: .json for a trace, .svg or .png for a picture.

    Raises: ConfigError if the name ends otherwise, or matplotlib is not installed.
    """
    if path.suffix == ".json":
        path.write_text(json.dumps(found.chrome_trace()) + "\n")
        return
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"a timeline is written as .json, .svg or .png, got {path.name}")
    check_picture(path)
    from matplotlib.figure import Figure as NewFigure
    from matplotlib.patches import Patch

    lanes = sorted({(one.rank, one.lane != "computation") for one in found.intervals})
    made = NewFigure(figsize=(9, 1.3 + _TIME_LANE * len(lanes)), layout="constrained")
    axes = made.subplots()
    for place, (rank, messages) in enumerate(lanes):
        of_lane = (
            one
            for one in found.intervals
            if one.rank == rank and messages == (one.lane != "computation")
        )
        for one in of_lane:
            _draw_time(axes, place, one)
    names = [f"rank {rank}" + (" sends" if messages else "") for rank, messages in lanes]
    axes.set_yticks(range(len(lanes)), names, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(found.forward.seconds * 1e3, color="#1a1a1a", linewidth=0.8)
    axes.set_xlim(0, found.seconds * 1e3)
    axes.set_xlabel("ms; the line is the end of the forward", fontsize=8)
    axes.set_title(title, fontsize=9)
    keys = [Patch(color=color, label=name) for name, color in _TIMES.items()]
    axes.legend(handles=keys, fontsize=7, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.12))
    write_picture(made, path)


def _draw_time(axes: Axes, place: int, one: Interval) -> None:
    kind = "messages" if one.lane != "computation" else "other"
    if "attention" in one.name:
        kind = "attention"
    width = (one.stop - one.start) * 1e3
    axes.broken_barh([(one.start * 1e3, width)], (place - 0.4, 0.8), color=_TIMES[kind])
