"""Pictures of plans as files: a lane for each rank, a column for each step, arrows for messages.

All lengths are inches, and every column is as wide as what is written in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron_cp_plugin.pictures import check_picture, write_picture
from megatron_cp_plugin.planner.drawing import (
    WHOSE,
    Cell,
    Collective,
    Kind,
    Picture,
    Queries,
    Transfer,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELLS: dict[Queries, str] = {"own": "#c6dbef", "others": "#fdd0a2", "both": "#dadaeb"}
_LINES: dict[Kind, str] = {
    "keys": "#1b7837",
    "queries": "#b35806",
    "results": "#762a83",
    "states": "#2166ac",
}
# Results of the last step first.
_ORDER: tuple[Kind, ...] = ("results", "queries", "keys", "states")
_INK, _BAND = "#1a1a1a", "#f5f5f5"
_VISIBLE = 0.02  # of a step: less waiting than that is not drawn

_LEFT, _EDGE = 0.62, 0.12
_LINE = 0.15  # a line of text
_CELL_POINTS, _LABEL_POINTS = 7.5, 7.0
_WIDE = 14.0  # steps that have no room beside the others go below them
_NARROW = 6.0  # no picture is wider only because of the texts above and below it
_LANE = 0.13  # between lines of collectives


@lru_cache(maxsize=4096)
def _width(text: str, points: float, *, bold: bool = False) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    font = FontProperties(family="sans-serif", weight="bold" if bold else "normal")
    box = TextPath((0, 0), text, size=points, prop=font).get_extents()
    return float(box.x1) / 72


def save(drawn: Picture, path: Path) -> None:
    """Writes a picture.

    Args:
        drawn: What to draw.
        path: Ends in .png or .svg.

    Raises:
        ConfigError: Another ending, or matplotlib is not installed.
    """
    check_picture(path)
    write_picture(figure(drawn), path)


@dataclass(frozen=True)
class _Arrows:
    """What goes from rank to rank, side by side. Attributes: label: width of the widest one."""

    transfers: tuple[Transfer, ...]
    label: float

    @property
    def length(self) -> float:
        """The steeper arrows are, the more room they have."""
        return 0.4 + 0.05 * mean(abs(t.source - t.target) for t in self.transfers)

    @property
    def width(self) -> float:
        """With the labels."""
        return self.length + self.label + 0.1


@dataclass(frozen=True)
class _Bundle:
    """Collectives of one name, each with its lane."""

    collectives: tuple[tuple[Collective, int], ...]
    width: float


@dataclass
class _Band:
    """Some steps, side by side, and all ranks.

    Attributes: right: where it ends. top: of the first rank's lane, under the names of steps. row:
        height of a lane.
    """

    right: float = _LEFT
    top: float = 0.0
    row: float = 0.0

    def middle(self, rank: int) -> float:
        """The height of a rank's lane."""
        return self.top + self.row * (rank + 0.5)

    def head(self, number: int, count: int) -> float:
        """The height of one of so many lines above the lanes."""
        return self.top - 0.06 - _LINE * (count - number - 0.5)


@dataclass
class _Gap:
    """What travels between two steps. Attributes: start: where it begins."""

    arrows: list[_Arrows]
    bundles: list[_Bundle]
    start: float = 0.0
    band: _Band = field(default_factory=_Band)

    @property
    def width(self) -> float:
        """Of all that travels."""
        widths = [arrows.width for arrows in self.arrows]
        return sum(widths) + sum(bundle.width for bundle in self.bundles) or 0.06


@dataclass(frozen=True)
class _Column:
    """A step. Attributes: start: where it begins."""

    start: float
    width: float
    band: _Band


class _Sheet:
    """Where everything is.

    Attributes: gaps, columns, bands: of which the sheet is made up. titles: lines with points, and
        whether bold. legend, notes: under the last band. width, height: of the whole.
    """

    def __init__(self, drawn: Picture) -> None:
        self.drawn = drawn
        self._place_columns()
        self._place_texts()
        self._place_bands()

    def _place_columns(self) -> None:
        drawn, count = self.drawn, len(self.drawn.steps)
        times = [t.before for t in drawn.transfers] + [c.before for c in drawn.collectives]
        first, last = min(times, default=0), max(times, default=count)
        self.gaps = [_gap(drawn, index) for index in range(min(first, 0), max(last, count) + 1)]
        self.columns: list[_Column] = []
        self.bands = [_Band()]
        for index, gap in enumerate(self.gaps, min(first, 0)):
            width = _column_width(drawn, index) if 0 <= index < count else 0.0
            if index > 0 and self.bands[-1].right + gap.width + width > _WIDE:
                self.bands.append(_Band())
            band = self.bands[-1]
            gap.start, gap.band = band.right, band
            band.right += gap.width + width
            if width:
                self.columns.append(_Column(band.right - width, width, band))

    def _place_texts(self) -> None:
        drawn = self.drawn
        small = max(_width(text, 8.5) for text in (drawn.subtitle, *drawn.summary))
        needed = max(small, min(_NARROW, _width(drawn.title, 11, bold=True)))
        widest = max(band.right for band in self.bands)
        self.width = max(widest + _EDGE, min(_NARROW, needed + 2 * _EDGE))
        room = self.width - 2 * _EDGE + 1e-6
        self.titles = [(line, 11.0, True) for line in _wrapped(drawn.title, 11, room, bold=True)]
        for text in (drawn.subtitle, *drawn.summary):
            self.titles += [(line, 8.5, False) for line in _wrapped(text, 8.5, room)]
        self.legend = _rows(_legend(drawn), room)
        self.notes = [
            line for text in _notes(drawn) for line in _wrapped(text, _LABEL_POINTS, room)
        ]

    def _place_bands(self) -> None:
        """From top to bottom."""
        drawn = self.drawn
        came = (
            count
            for gap in self.gaps
            for arrows in gap.arrows
            for count in Counter(transfer.target for transfer in arrows.transfers).values()
        )
        row = max(0.34, 0.14 * max(came, default=1) + 0.1)
        bundled = 3 * any(gap.bundles for gap in self.gaps)
        lines = max([bundled, *(len(_step_lines(drawn, i)) for i in range(len(drawn.steps)))])
        self.bottom = _EDGE + 0.2 * len(self.titles) + 0.02
        for band in self.bands:
            band.row, band.top = row, self.bottom + 0.12 + _LINE * lines
            self.bottom = band.top + row * drawn.size
        texts = _LINE * (len(self.legend) + len(self.notes)) + 0.1
        self.height = self.bottom + 0.12 + texts + _EDGE


def _gap(drawn: Picture, index: int) -> _Gap:
    here = [t for t in drawn.transfers if t.before == index]
    results = tuple(t for t in here if t.kind == "results")
    inputs = tuple(t for t in here if t.kind != "results")
    arrows = [
        _Arrows(part, max(_width(t.text, _LABEL_POINTS) for t in part))
        for part in (results, inputs)
        if part
    ]
    named: dict[tuple[str, str, Kind], list[Collective]] = {}
    for collective in sorted(drawn.collectives, key=lambda c: _ORDER.index(c.kind)):
        if collective.before == index:
            key = collective.name, collective.tensors, collective.kind
            named.setdefault(key, []).append(collective)
    bundles = []
    for (name, tensors, _), group in named.items():
        placed: list[tuple[Collective, int]] = []
        free: list[int] = []  # by lane, the first rank that is below all lines
        for collective in sorted(group, key=lambda c: c.ranks):
            first, last = collective.ranks[0], collective.ranks[-1]
            lane = next((i for i, rank in enumerate(free) if rank <= first), len(free))
            free[lane : lane + 1] = [last + 1]
            placed.append((collective, lane))
        text = max(_width(line, _LABEL_POINTS) for line in (name, tensors))
        bundles.append(_Bundle(tuple(placed), max(text, _LANE * len(free)) + 0.16))
    return _Gap(arrows, bundles)


def _column_width(drawn: Picture, index: int) -> float:
    texts = [cell.text for cell in drawn.steps[index] if cell]
    widest = max((_width(text, _CELL_POINTS) for text in texts), default=0.0)
    lines = max(_width(line, _LABEL_POINTS, bold=True) for line in _step_lines(drawn, index))
    return max(widest + 0.16, lines + 0.1)


def _step_lines(drawn: Picture, index: int) -> list[str]:
    lines = [f"step {index}"]
    if drawn.head_groups > 1:
        each = -(-len(drawn.steps) // drawn.head_groups)
        lines.append(f"heads {index // each + 1} of {drawn.head_groups}")
    times = drawn.times
    if max(times) - min(times) > 0.005:
        lines.append(f"{times[index]:.0%} of time")
    return lines


def _wrapped(text: str, points: float, room: float, *, bold: bool = False) -> list[str]:
    """Lines that fit."""
    lines: list[str] = []
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and _width(longer, points, bold=bold) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


class _Key(NamedTuple):
    """An entry of the legend. Attributes: what: a cell's queries, a kind of message, or waiting."""

    text: str
    what: Queries | Kind | Literal["waits"]


def _shares(drawn: Picture) -> list[list[float]]:
    """By step and rank: how much of the time of a step the rank computes."""
    longest = [max((cell.pairs for cell in step if cell), default=1.0) for step in drawn.steps]
    return [
        [cell.pairs / most if cell else 0.0 for cell in step]
        for step, most in zip(drawn.steps, longest, strict=True)
    ]


def _legend(drawn: Picture) -> list[_Key]:
    cells = [cell for step in drawn.steps for cell in step if cell]
    whose = dict.fromkeys(cell.queries for cell in cells)
    found = [_Key(f"computes {WHOSE[queries]}", queries) for queries in whose]
    shares = _shares(drawn)
    if any(share < 1 - _VISIBLE for step in shares for share in step):
        found.append(_Key("waits", "waits"))
    kinds = {t.kind for t in drawn.transfers} | {c.kind for c in drawn.collectives}
    return found + [_Key(drawn.kinds[kind], kind) for kind in _LINES if kind in kinds]


def _notes(drawn: Picture) -> list[str]:
    """What the letters in this picture mean."""
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
    return ["; ".join(found)] if found else []


def _rows(keys: Sequence[_Key], room: float) -> list[list[tuple[float, _Key]]]:
    """The legend in lines, with where each entry begins."""
    rows: list[list[tuple[float, _Key]]] = [[]]
    x = 0.0
    for key in keys:
        width = 0.32 + _width(key.text, _LABEL_POINTS) + 0.22
        if rows[-1] and x + width > room:
            rows.append([])
            x = 0.0
        rows[-1].append((x, key))
        x += width
    return rows


def figure(drawn: Picture) -> Figure:
    """The picture; needs matplotlib."""
    from matplotlib.figure import Figure as NewFigure

    sheet = _Sheet(drawn)
    made = NewFigure(figsize=(sheet.width, sheet.height))
    axes = made.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, sheet.width)
    axes.set_ylim(sheet.height, 0)
    axes.axis("off")
    _draw_texts(axes, sheet)
    for band, rank in product(sheet.bands, range(drawn.size)):
        if rank % 2 == 0:
            top = band.top + band.row * rank
            _box(axes, _LEFT, top, band.right - _LEFT, band.row, _BAND)
        _write(axes, _EDGE, band.middle(rank), f"rank {rank}", _CELL_POINTS)
    shares = _shares(drawn)
    for index, step in enumerate(drawn.steps):
        for rank, cell in enumerate(step):
            _draw_cell(axes, sheet.columns[index], rank, cell, shares[index][rank])
    for gap in sheet.gaps:
        _draw_gap(axes, gap)
    return made


def _draw_texts(axes: Axes, sheet: _Sheet) -> None:
    for index, (line, points, bold) in enumerate(sheet.titles):
        _write(axes, _EDGE, _EDGE + 0.2 * (index + 0.5), line, points, bold=bold)
    for index, column in enumerate(sheet.columns):
        lines, middle = _step_lines(sheet.drawn, index), column.start + column.width / 2
        for number, line in enumerate(lines):
            y = column.band.head(number, len(lines))
            _write(axes, middle, y, line, _LABEL_POINTS, bold=not number, center=True)
    y = sheet.bottom + 0.2
    for row in sheet.legend:
        for x, key in row:
            _draw_key(axes, sheet.drawn, _EDGE + x, y, key)
            _write(axes, _EDGE + x + 0.32, y, key.text, _LABEL_POINTS)
        y += _LINE
    for line in sheet.notes:
        _write(axes, _EDGE, y + 0.03, line, _LABEL_POINTS)
        y += _LINE


def _draw_key(axes: Axes, drawn: Picture, x: float, y: float, key: _Key) -> None:
    what = key.what
    if what == "waits":
        _box(axes, x, y - 0.05, 0.26, 0.1, None)
    elif what == "own" or what == "others" or what == "both":
        _box(axes, x, y - 0.05, 0.26, 0.1, _CELLS[what])
    elif any(transfer.kind == what for transfer in drawn.transfers):
        _arrow(axes, (x, y), (x + 0.26, y), what)
    else:
        _joined(axes, [x + 0.04, x + 0.22], [y, y], what)


def _draw_cell(axes: Axes, column: _Column, rank: int, cell: Cell | None, share: float) -> None:
    start, width, band = column.start, column.width, column.band
    height = min(0.26, band.row * 0.76)
    y = band.middle(rank) - height / 2
    if share < 1 - _VISIBLE:
        _box(axes, start, y, width, height, None)
    if cell:
        _box(axes, start, y, width * share, height, _CELLS[cell.queries])
        _write(axes, start + width / 2, y + height / 2, cell.text, _CELL_POINTS, center=True)


def _draw_gap(axes: Axes, gap: _Gap) -> None:
    x = gap.start
    for arrows in gap.arrows:
        _draw_arrows(axes, gap.band, arrows, x)
        x += arrows.width
    for bundle in gap.bundles:
        _draw_bundle(axes, gap.band, bundle, x)
        x += bundle.width


def _draw_arrows(axes: Axes, band: _Band, arrows: _Arrows, x: float) -> None:
    slots = Counter[int]()
    came = Counter(transfer.target for transfer in arrows.transfers)
    end = x + arrows.length
    for transfer in sorted(arrows.transfers, key=lambda t: (_ORDER.index(t.kind), t.source)):
        offset = slots[transfer.target] - (came[transfer.target] - 1) / 2
        slots[transfer.target] += 1
        y = band.middle(transfer.target) + 0.14 * offset
        _arrow(axes, (x + 0.04, band.middle(transfer.source)), (end, y), transfer.kind)
        _write(axes, end + 0.03, y, transfer.text, _LABEL_POINTS, color=_LINES[transfer.kind])


def _draw_bundle(axes: Axes, band: _Band, bundle: _Bundle, x: float) -> None:
    first, middle = bundle.collectives[0][0], x + bundle.width / 2
    color = _LINES[first.kind]
    for number, line in enumerate((first.name, first.tensors)):
        _write(axes, middle, band.head(number, 2), line, _LABEL_POINTS, color=color, center=True)
    lanes = 1 + max(lane for _, lane in bundle.collectives)
    for collective, lane in bundle.collectives:
        at = middle + _LANE * (lane - (lanes - 1) / 2)
        heights = [band.middle(rank) for rank in collective.ranks]
        _joined(axes, [at] * len(heights), heights, first.kind)


def _joined(axes: Axes, x: Sequence[float], y: Sequence[float], kind: Kind) -> None:
    axes.plot(x, y, color=_LINES[kind], linewidth=1.2, marker="o", markersize=4)


def _box(axes: Axes, x: float, y: float, width: float, height: float, color: str | None) -> None:
    """A rectangle; hatched if it has no color."""
    from matplotlib.patches import Rectangle

    box = Rectangle((x, y), width, height, facecolor=color or "white", linewidth=0.0)
    if color is None:
        box.set(hatch="//////", edgecolor="#dedede")
    axes.add_patch(box)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], kind: Kind) -> None:
    style = {"arrowstyle": "-|>,head_length=0.4,head_width=0.18", "shrinkA": 0, "shrinkB": 0}
    line = {"linewidth": 0.9, "linestyle": (0, (4, 1.5)) if kind == "results" else "-"}
    axes.annotate("", end, start, arrowprops={"color": _LINES[kind], **line, **style})


def _write(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    points: float,
    *,
    bold: bool = False,
    color: str = _INK,
    center: bool = False,
) -> None:
    axes.text(
        x,
        y,
        text,
        fontsize=points,
        fontfamily="sans-serif",
        fontweight="bold" if bold else "normal",
        color=color,
        ha="center" if center else "left",
        va="center",
    )
