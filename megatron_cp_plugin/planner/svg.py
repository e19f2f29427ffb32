"""The matrix of scores as SVG: which rank holds which tokens, and computes which scores.

A row of the matrix is a query token, a column a key token. SVG needs no other package.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Mapping
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp_plugin import registry
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.drawing import Picture

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 13px } .back { fill: #eceff2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .back { fill: #2a3038 } }
"""
# In pixels: between lines; the matrix, that of one step, who holds a token.
_LINE, _SIDE, _SMALL, _BAR = 18, 340, 116, 8


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text{of_kind} x="{x:.5g}" y="{y:.5g}">{escape(words, quote=False)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" fill="{fill}"/>'
    )


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
        faded = ' opacity=".13"'
        small = "".join(
            f'<use href="#p{number}"{"" if part.step == step else faded}/>'
            for number, part in enumerate(scores.parts)
        )
        scale = _SMALL / scores.tokens
        body.append(
            f'<text x="{x}" y="{y + 14}">step {step}</text>'
            f'<g transform="translate({x} {y + 20}) scale({scale:.5g})">{_back(scores)}{small}</g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(drawn.title)}">'
        f"<style>{_STYLE}</style><defs>{_definitions(scores, drawn.size)}</defs>"
        f"{''.join(body)}</svg>\n"
    )


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
        cells = _rectangles(drawn.part == number)
        outline = "".join(f"M{x} {y}h{w}v{h}h-{w}z" for x, y, w, h in cells)
        found.append(f'<path id="p{number}" fill="{fill}" d="{outline}"/>')
    return "".join(found)


def _stripes(ranks: tuple[int, ...]) -> str:
    return "r" + "-".join(map(str, ranks))


def _rectangles(cells: NDArray[np.bool_]) -> Iterator[tuple[int, int, int, int]]:
    """Rectangles that cover some cells: runs of a row, joined with equal ones of the next rows."""
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


# ---- who computes what

_MOST_TOKENS, _MOST_RANKS = 512, 32
_TOKENS = 64  # of a picture whose number of tokens was not asked for, about


class StepPart(NamedTuple):
    """Computations of some ranks in one step; each rank computes its share of the heads."""

    step: int
    ranks: tuple[int, ...]


class Scores(NamedTuple):
    """Who computes which scores, and when.

    Attributes:
        owner: int [N], the rank that holds a token.
        part: int [N,N], the number of the part that computes a score; -1: hidden by the mask.
        parts: all parts.
    """

    owner: NDArray[np.int64]
    part: NDArray[np.int64]
    parts: tuple[StepPart, ...]

    @property
    def tokens(self) -> int:
        """N, the number of tokens."""
        return len(self.owner)


def scores_of(drawn: Picture) -> Scores:
    """Says which rank computes which score.

    Raises: ConfigError: More than 512 tokens or 32 ranks.
    """
    plan, tokens = drawn.plan, sum(drawn.plan.spans.lengths)
    if drawn.size > _MOST_RANKS:
        raise ConfigError(
            f"--tokens draws at most {_MOST_RANKS} ranks, got {drawn.size}: leave --tokens out"
        )
    if tokens > _MOST_TOKENS:
        raise ConfigError(
            f"--tokens draws each token, at most {_MOST_TOKENS}, got {tokens}: "
            "make --seq-len smaller"
        )
    owner = np.zeros(tokens, np.int64)
    for rank, spans in enumerate(plan.spans):
        owner[spans.elements] = rank
    first = min((compute.heads.q.start for compute in plan.computes), default=0)
    ranks = np.zeros((tokens, tokens), np.int64)  # one bit each
    step = np.zeros((tokens, tokens), np.int64)
    for compute in plan.computes:
        if compute.heads.q.start != first:
            continue
        queries = plan.positions(compute.queries).elements
        keys = plan.positions(compute.keys).elements
        for tile in plan.tiles(compute):
            rows, columns = queries[tile.q], keys[tile.kv]
            seen = np.ones((len(rows), len(columns)), np.bool_)
            if tile.causal:
                seen = np.tril(seen, len(columns) - len(rows))
            if tile.reverse:
                seen = seen[::-1, ::-1]
            row, column = seen.nonzero()
            at = rows[row], columns[column]
            ranks[at] |= 1 << compute.rank
            step[at] = compute.step
    named = np.where(ranks > 0, step << _MOST_RANKS | ranks, -1)
    numbers, part = np.unique(named, return_inverse=True)
    part = part.reshape(named.shape) - (numbers[0] < 0)
    parts = tuple(
        StepPart(
            number >> _MOST_RANKS, tuple(rank for rank in range(plan.size) if number >> rank & 1)
        )
        for number in numbers.tolist()
        if number >= 0
    )
    return Scores(owner, part, parts)


def some_tokens(algo: str, size: int, options: Mapping[str, object]) -> int:
    """About 64 tokens that the ranks can split."""
    multiple = registry.layout_of(algo, options).multiple(size)
    return -(-_TOKENS // multiple) * multiple
