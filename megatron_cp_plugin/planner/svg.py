"""Schedules and matrices of scores as SVG, which needs no other package."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.drawing import WHOSE, Picture, Queries, below, lines_of
from megatron_cp_plugin.planner.token_picture import Scores, scores_of

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .mono { font-family: monospace }
.title { font-weight: 600; font-size: 13px } .back { fill: #eceff2 } .cell { fill: #1f2328 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .back { fill: #2a3038 } }
"""
_LINE, _LETTER = 18, 7.3  # pixels: between lines, and of a letter of the monospaced font
_CELLS: dict[Queries, str] = {"own": "#9ecae1", "others": "#fdd0a2", "both": "#dadaeb"}
_SIDE, _SMALL, _BAR = 340, 116, 8  # the matrix, that of one step, who holds a token


def check_ending(path: Path, ending: str = ".svg") -> None:
    """Raises: ConfigError: The path has another ending."""
    if path.suffix != ending:
        raise ConfigError(f"--output is a {ending} file, got {path.name!r}: change its ending")


def _svg(
    title: str, width: float, height: float, body: Iterable[str], definitions: str = ""
) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(title)}">'
        f"<style>{_STYLE}</style><defs>{definitions}</defs>{''.join(body)}</svg>\n"
    )


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text{of_kind} x="{x:.5g}" y="{y:.5g}">{escape(words, quote=False)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" fill="{fill}"/>'
    )


def _legend(keys: Iterable[tuple[str, str]], x: float, y: float) -> Iterator[str]:
    """Args: keys: names and colours, from left to right."""
    for name, fill in keys:
        yield _rect(x, y - 10, 12, 12, fill) + _text(x + 18, y, name)
        x += 34 + _LETTER * len(name)


def schedule(drawn: Picture) -> str:
    """A row for each rank, a column for each step; a bar is as wide as the rank is busy."""
    steps, ranks = range(len(drawn.steps)), range(drawn.size)
    cells = {(step, rank): lines_of(drawn, step, rank) for step in steps for rank in ranks}
    uneven = max(drawn.times, default=0) - min(drawn.times, default=0) > 0.005
    heads = [f"step {n}" + (f", {drawn.times[n]:.0%} of time" if uneven else "") for n in steps]
    high = _LINE * max(map(len, cells.values()), default=1) + 8
    body = [_text(10, 18, drawn.title, "title"), _text(10, 36, drawn.subtitle)]
    top, x = 3 * _LINE + 12, 64.0
    body += [_text(10, top + rank * high + 14, f"rank {rank}") for rank in ranks]
    for step in steps:
        letters = max(map(len, (heads[step], *(s for rank in ranks for s in cells[step, rank]))))
        width = _LETTER * letters + 12
        body.append(_text(x + 4, top - 6, heads[step], "mono"))
        for rank in ranks:
            cell, y = drawn.steps[step][rank], top + rank * high
            body.append(f'<rect class="back" x="{x:.5g}" y="{y}" width="{width:.5g}" height="18"/>')
            if cell:
                share = width * drawn.shares[step][rank]
                body.append(_rect(x, y, share, 18, _CELLS[cell.queries]))
            first, *travels = cells[step, rank]
            body.append(_text(x + 4, y + 14, first, "mono cell" if cell else "mono"))
            body += [_text(x + 4, y + 14 + _LINE * n, s, "mono") for n, s in enumerate(travels, 1)]
        x += width + 8
    whose = dict.fromkeys(cell.queries for step in drawn.steps for cell in step if cell)
    y = top + drawn.size * high + _LINE
    body += _legend(((f"computes {WHOSE[each]}", _CELLS[each]) for each in whose), 10, y)
    words = list(below(drawn))
    body += [_text(10, y + _LINE * number, line) for number, line in enumerate(words, 1)]
    width = max(x, 20 + 6.5 * max(map(len, [drawn.title, drawn.subtitle, *words])), 520)
    return _svg(drawn.title, width, y + _LINE * (len(words) + 1), body)


def color(rank: int, size: int) -> str:
    """A colour of a rank, as #rrggbb, other than the other ranks' colours."""
    light = 0.62 if rank % 2 == 0 else 0.45
    red, green, blue = colorsys.hls_to_rgb(rank / size + 0.58, light, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def matrix(drawn: Picture) -> str:
    """The whole matrix of scores, and below it one small matrix for each step.

    Raises: ConfigError: as `scores_of`.
    """
    scores = scores_of(drawn)
    assert drawn.plan is not None
    groups = len(drawn.plan.groups)
    subtitle = drawn.subtitle + (f" · 1 of {groups} head groups" if groups > 1 else "")
    steps = drawn.plan.steps // groups if drawn.plan.steps > groups else 0
    columns = max(1, min(steps, 6))
    rows = -(-steps // columns)
    ranks_high = -(-drawn.size // (3 if drawn.size > 16 else 2 if drawn.size > 8 else 1))
    ranks_wide = -(-drawn.size // ranks_high)
    width = max(_SIDE + 40 + 80 * ranks_wide, columns * (_SMALL + 14) + 20, 470)
    top = 3 * _LINE
    below = top + _SIDE + 26
    height = below + rows * (_SMALL + 30) + _LINE
    body = [
        _text(10, 18, drawn.title, "title"),
        _text(10, 36, f"{subtitle} · {drawn.balance}"),
        f'<g transform="translate(20 {top})">{_matrix(scores, drawn.size)}</g>',
    ]
    for rank in range(drawn.size):
        x, y = _SIDE + 44 + 80 * (rank // ranks_high), top + 8 + _LINE * (rank % ranks_high)
        body.append(_rect(x, y, 12, 12, color(rank, drawn.size)))
        body.append(_text(x + 18, y + 10, f"rank {rank}"))
    body.append(
        _text(20, top + _SIDE + 18, "rows: queries; columns: keys; bars: who holds a token")
    )
    for step in range(steps):
        x, y = 20 + step % columns * (_SMALL + 14), below + step // columns * (_SMALL + 30)
        small = "".join(
            f'<use href="#p{number}"{"" if part.step == step else faded}/>'
            for faded in (' opacity=".13"',)
            for number, part in enumerate(scores.parts)
        )
        scale = _SMALL / scores.tokens
        body.append(
            f'<text x="{x}" y="{y + 14}">step {step}</text>'
            f'<g transform="translate({x} {y + 20}) scale({scale:.5g})">{_back(scores)}{small}</g>'
        )
    return _svg(drawn.title, width, height, body, _definitions(scores, drawn.size))


def _definitions(drawn: Scores, size: int) -> str:
    """Each part as one path, in tokens, and stripes for parts of several ranks."""
    stripes = {part.ranks for part in drawn.parts if len(part.ranks) > 1}
    found = []
    for ranks in sorted(stripes):
        wide = max(1.0, drawn.tokens / 64)
        bars = "".join(
            f'<rect x="{wide * place:g}" width="{wide:g}" height="9" fill="{color(rank, size)}"/>'
            for place, rank in enumerate(ranks)
        )
        found.append(
            f'<pattern id="{_stripes(ranks)}" width="{wide * len(ranks):g}" height="9" '
            f'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">{bars}</pattern>'
        )
    for number, part in enumerate(drawn.parts):
        fill = (
            color(part.ranks[0], size) if len(part.ranks) == 1 else f"url(#{_stripes(part.ranks)})"
        )
        found.append(f'<path id="p{number}" fill="{fill}" d="{_outline(drawn.part == number)}"/>')
    return "".join(found)


def _stripes(ranks: tuple[int, ...]) -> str:
    return "r" + "-".join(map(str, ranks))


def _outline(cells: NDArray[np.bool_]) -> str:
    """Rectangles that cover some cells: runs of a row, joined with equal ones of the next rows."""
    return "".join(f"M{x} {y}h{w}v{h}h-{w}z" for x, y, w, h in _rectangles(cells))


def _rectangles(cells: NDArray[np.bool_]) -> Iterator[tuple[int, int, int, int]]:
    open_runs: dict[tuple[int, int], int] = {}
    edged = np.pad(cells, ((0, 1), (1, 1))).astype(np.int8)
    for y, row in enumerate(np.diff(edged, axis=1)):
        starts, stops = (row == 1).nonzero()[0].tolist(), (row == -1).nonzero()[0].tolist()
        now = dict.fromkeys(zip(starts, stops, strict=True), y)
        for run in list(open_runs):
            if run in now:
                now[run] = open_runs[run]
            else:
                yield run[0], open_runs[run], run[1] - run[0], y - open_runs[run]
        open_runs = now


def _back(drawn: Scores) -> str:
    return f'<rect class="back" width="{drawn.tokens}" height="{drawn.tokens}"/>'


def _matrix(drawn: Scores, size: int) -> str:
    """The matrix of all steps, and who holds the tokens of its rows and columns."""
    scale = _SIDE / drawn.tokens
    bars = []
    for rank in range(size):
        fill = color(rank, size)
        held = (drawn.owner == rank)[None]
        for x, _, w, _ in _rectangles(held):
            start, length = x * scale, w * scale
            bars.append(_rect(start, -_BAR - 2, length, _BAR, fill))
            bars.append(_rect(-_BAR - 2, start, _BAR, length, fill))
    uses = "".join(f'<use href="#p{number}"/>' for number in range(len(drawn.parts)))
    return f'{"".join(bars)}<g transform="scale({scale:.5g})">{_back(drawn)}{uses}</g>'
