"""The matrix of scores, coloured by the rank that computes each part, as a picture or a page.

A row is a query token, a column a key token. Beside the rows and above the columns stands which
rank owns the token. Made from an algorithm's plan, as the schedule of `drawing` is.
"""

from __future__ import annotations

import colorsys
import html
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.plans.plan import Plan
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.drawing import (
    Collective,
    DrawnTransfer,
    check_size,
    collective_lines,
    plan_to_draw,
    titles,
    travelling_of,
)

MOST_TOKENS, MOST_RANKS = 512, 32
_TOKENS = 64  # of a picture whose number of tokens was not asked for, about
_SIDE, _SMALL, _BAR = 340, 116, 8  # pixels: the matrix, that of one step, who owns a token
_LINE = 18


class StepPart(NamedTuple):
    """Computations of some ranks in one step; each rank computes its share of the heads."""

    step: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class TokenPicture:
    """Who computes which scores, and when.

    Attributes:
        title, subtitle: algorithm and options; ranks, mask, tokens, pass.
        size: number of ranks.
        steps: number of steps of a head group.
        owner: int [N], the rank that holds a token.
        part: int [N,N], the number of the part that computes a score; -1: hidden by the mask.
        parts: all parts.
        transfers, collectives: messages of these steps.
    """

    title: str
    subtitle: str
    size: int
    steps: int
    owner: NDArray[np.int64]
    part: NDArray[np.int64]
    parts: tuple[StepPart, ...]
    transfers: tuple[DrawnTransfer, ...]
    collectives: tuple[Collective, ...]

    @property
    def tokens(self) -> int:
        """N, the number of tokens."""
        return len(self.owner)

    @property
    def scores(self) -> tuple[float, ...]:
        """Of each rank, how many scores it computes, for all heads together."""
        count = np.zeros(self.size)
        for number, (_, ranks) in enumerate(self.parts):
            count[list(ranks)] += np.count_nonzero(self.part == number) / len(ranks)
        return tuple(count.tolist())

    @property
    def balance(self) -> str:
        """The work of the busiest rank beside the mean."""
        mean = sum(self.scores) / self.size
        return f"busiest rank: {max(self.scores) / mean:.2f} of the mean" if mean else "no scores"


def token_picture(
    algo: str,
    size: int,
    *,
    seq_len: int | None = None,
    mask: Mask | None = None,
    options: Mapping[str, object] | None = None,
    phase: Phase = "forward",
) -> TokenPicture:
    """Plans one pass of a softmax algorithm, and says which rank computes which score.

    Args:
        algo: A name of `available("softmax")`.
        size: Number of context-parallel ranks, at most 32.
        seq_len: Global tokens, at most 512; default: about 64.
        mask: Default: causal.
        options: Of the algorithm; values may be text.
        phase: Which pass.

    Raises:
        ConfigError: The algorithm computes no scores; too many tokens or ranks; or as `picture`.
    """
    mask, options = mask or Mask(), options or {}
    if registry.kind_of(algo) == "linear":
        raise ConfigError(f"{algo} computes no matrix of scores: leave --tokens out")
    check_size(size)
    if size > MOST_RANKS:
        raise ConfigError(
            f"--tokens draws at most {MOST_RANKS} ranks, got {size}: leave --tokens out"
        )
    if seq_len is None:
        multiple = registry.layout_of(algo, options).multiple(size)
        seq_len = -(-_TOKENS // multiple) * multiple
    if seq_len > MOST_TOKENS:
        raise ConfigError(
            f"--tokens draws each token, at most {MOST_TOKENS}, got {seq_len}: "
            "make --seq-len smaller"
        )
    plan = plan_to_draw(algo, size, seq_len, mask, options, phase)
    owner = np.zeros(seq_len, np.int64)
    for rank in range(size):
        owner[plan.spans[rank].elements] = rank
    part, parts = _step_parts(plan, seq_len)
    title, subtitle = titles(algo, size, seq_len, mask, options, phase)
    if len(plan.groups) > 1:
        subtitle += f" · 1 of {len(plan.groups)} head groups"
    steps = plan.steps // len(plan.groups)
    transfers, collectives = travelling_of(plan)
    # Messages of the first head group; results leave one step later.
    return TokenPicture(
        title,
        subtitle,
        size,
        steps,
        owner,
        part,
        parts,
        tuple(x for x in transfers if x.before <= steps),
        tuple(x for x in collectives if x.before <= steps),
    )


def _step_parts(plan: Plan, seq_len: int) -> tuple[NDArray[np.int64], tuple[StepPart, ...]]:
    first = min(compute.heads.q.start for compute in plan.computes)
    ranks = np.zeros((seq_len, seq_len), np.int64)  # one bit each
    step = np.zeros((seq_len, seq_len), np.int64)
    for compute in plan.computes:
        if compute.heads.q.start != first:
            continue
        queries = plan.positions(compute.queries).elements
        keys = plan.positions(compute.keys).elements
        for tile in plan.tiles(compute).single:
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
    named = np.where(ranks > 0, step << MOST_RANKS | ranks, -1)
    numbers, part = np.unique(named, return_inverse=True)
    part = part.reshape(named.shape) - (numbers[0] < 0)
    parts = tuple(
        StepPart(
            number >> MOST_RANKS,
            tuple(rank for rank in range(plan.size) if number >> rank & 1),
        )
        for number in numbers.tolist()
        if number >= 0
    )
    return part, parts


def color(rank: int, size: int) -> str:
    """A colour of a rank, as #rrggbb, other than the other ranks' colours."""
    light = 0.62 if rank % 2 == 0 else 0.45
    red, green, blue = colorsys.hls_to_rgb(rank / size + 0.58, light, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def text(drawn: TokenPicture) -> str:
    """For a terminal: of each score the rank that computes it; "*": all of them, some heads each.

    Columns are as wide as the largest rank.
    """
    width = len(str(drawn.size - 1))
    signs = [
        str(ranks[0]).rjust(width) if len(ranks) == 1 else "*".rjust(width)
        for _, ranks in drawn.parts
    ] + ["·".rjust(width)]
    lines = [
        f"{owner:>{width}} | " + (" " if width > 1 else "").join(signs[part] for part in row)
        for owner, row in zip(drawn.owner.tolist(), drawn.part.tolist(), strict=True)
    ]
    head = f"{drawn.title} · {drawn.subtitle}"
    legend = (
        "left: the rank that holds a query; in its row, by key, the rank that computes the score"
    )
    if any(len(ranks) > 1 for _, ranks in drawn.parts):
        legend += '; "*": several ranks, each for its share of the heads'
    return "\n".join([head, *lines, legend, drawn.balance])


def save_tokens(drawn: TokenPicture, path: Path) -> None:
    """Writes the picture (.svg), or the page that plays the steps (.html).

    Raises: ConfigError: another ending.
    """
    if path.suffix not in (".svg", ".html"):
        raise ConfigError(
            f"with --tokens a picture is a .svg or .html file, got {path.name!r}: change its ending"
        )
    path.write_text(svg(drawn) if path.suffix == ".svg" else page(drawn), encoding="utf-8")


_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 13px } .back { fill: #eceff2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .back { fill: #2a3038 } }
"""


def svg(drawn: TokenPicture) -> str:
    """The whole matrix, and below it one small matrix for each step."""
    columns = max(1, min(drawn.steps, 6))
    rows = -(-drawn.steps // columns) if drawn.steps > 1 else 0
    ranks_wide = 3 if drawn.size > 16 else 2 if drawn.size > 8 else 1
    width = max(_SIDE + 40 + 80 * ranks_wide, columns * (_SMALL + 14) + 20, 470)
    top = 3 * _LINE
    below = top + _SIDE + 26
    height = below + rows * (_SMALL + 30) + _LINE
    body = [
        f'<text class="title" x="10" y="18">{html.escape(drawn.title)}</text>',
        f'<text x="10" y="36">{html.escape(drawn.subtitle)} · {drawn.balance}</text>',
        f'<g transform="translate(20 {top})">{_matrix(drawn)}</g>',
        _legend_svg(drawn, _SIDE + 44, top + 8),
        f'<text x="20" y="{top + _SIDE + 18}">rows: queries; columns: keys; bars: who holds a '
        "token</text>",
    ]
    for step in range(drawn.steps if drawn.steps > 1 else 0):
        x, y = 20 + step % columns * (_SMALL + 14), below + step // columns * (_SMALL + 30)
        small = "".join(
            f'<use href="#p{number}"{"" if part.step == step else faded}/>'
            for faded in (' opacity=".13"',)
            for number, part in enumerate(drawn.parts)
        )
        scale = _SMALL / drawn.tokens
        body.append(
            f'<text x="{x}" y="{y + 14}">step {step}</text>'
            f'<g transform="translate({x} {y + 20}) scale({scale:.5g})">{_back(drawn)}{small}</g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{html.escape(drawn.title)}">'
        f"<style>{_STYLE}</style><defs>{_definitions(drawn)}</defs>{''.join(body)}</svg>\n"
    )


def _definitions(drawn: TokenPicture) -> str:
    """Each part as one path, in tokens, and stripes for parts of several ranks."""
    stripes = {part.ranks for part in drawn.parts if len(part.ranks) > 1}
    found = []
    for ranks in sorted(stripes):
        wide = max(1.0, drawn.tokens / 64)
        bars = "".join(
            f'<rect x="{wide * place:g}" width="{wide:g}" height="9" '
            f'fill="{color(rank, drawn.size)}"/>'
            for place, rank in enumerate(ranks)
        )
        found.append(
            f'<pattern id="{_stripes(ranks)}" width="{wide * len(ranks):g}" height="9" '
            f'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">{bars}</pattern>'
        )
    for number, part in enumerate(drawn.parts):
        fill = (
            color(part.ranks[0], drawn.size)
            if len(part.ranks) == 1
            else f"url(#{_stripes(part.ranks)})"
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


def _back(drawn: TokenPicture) -> str:
    return f'<rect class="back" width="{drawn.tokens}" height="{drawn.tokens}"/>'


def _matrix(drawn: TokenPicture) -> str:
    """The matrix of all steps, and who holds the tokens of its rows and columns."""
    scale = _SIDE / drawn.tokens
    bars = []
    for rank in range(drawn.size):
        fill = color(rank, drawn.size)
        held = (drawn.owner == rank)[None]
        for x, _, w, _ in _rectangles(held):
            start, length = f"{x * scale:.5g}", f"{w * scale:.5g}"
            bars.append(
                f'<rect x="{start}" y="-{_BAR + 2}" width="{length}" height="{_BAR}" '
                f'fill="{fill}"/>'
                f'<rect x="-{_BAR + 2}" y="{start}" width="{_BAR}" height="{length}" '
                f'fill="{fill}"/>'
            )
    uses = "".join(
        f'<use href="#p{number}" class="s{part.step}"/>' for number, part in enumerate(drawn.parts)
    )
    return f'{"".join(bars)}<g transform="scale({scale:.5g})">{_back(drawn)}{uses}</g>'


def _legend_svg(drawn: TokenPicture, x: int, y: int) -> str:
    rows = -(-drawn.size // (3 if drawn.size > 16 else 2 if drawn.size > 8 else 1))
    return "".join(
        f'<rect x="{x + 80 * (rank // rows)}" y="{y + _LINE * (rank % rows)}" width="12" '
        f'height="12" fill="{color(rank, drawn.size)}"/>'
        f'<text x="{x + 18 + 80 * (rank // rows)}" y="{y + 10 + _LINE * (rank % rows)}">'
        f"rank {rank}</text>"
        for rank in range(drawn.size)
    )


_PAGE = Template(Path(__file__).with_suffix(".html").read_text())


def page(drawn: TokenPicture) -> str:
    """A page that plays the steps: computations of each rank, and the messages before them."""
    sent = {one.before for one in drawn.transfers} | {one.before for one in drawn.collectives}
    steps = max(1, drawn.steps) + (drawn.steps in sent)
    return _PAGE.substitute(
        title=html.escape(f"{drawn.title} · {drawn.subtitle}"),
        style=_STYLE,
        heading=html.escape(drawn.title),
        subtitle=html.escape(drawn.subtitle),
        balance=drawn.balance,
        last=steps - 1,
        side=_SIDE + 24,
        definitions=_definitions(drawn),
        matrix=_matrix(drawn),
        ring=_ring(drawn),
        said=json.dumps([list(_captions(drawn, step)) for step in range(steps)]),
    )


def _captions(drawn: TokenPicture, step: int) -> Iterator[str]:
    if step < drawn.steps:
        busy = sorted({rank for part in drawn.parts if part.step == step for rank in part.ranks})
        yield f"step {step}: {len(busy)} of {drawn.size} ranks compute"
    else:
        yield "after the last step"
    yield from collective_lines(
        [one for one in drawn.collectives if one.before == step], drawn.steps
    )
    for one in drawn.transfers:
        if one.before == step:
            yield f"rank {one.source} sends {one.text} to rank {one.target}"


def _ring(drawn: TokenPicture) -> str:
    """The ranks in a circle, with an arrow for each message, shown in its step."""
    side, radius = 300, 115
    angle = 2 * np.pi * np.arange(drawn.size) / drawn.size - np.pi / 2
    places = np.stack((np.cos(angle), np.sin(angle)), 1) * radius + side / 2
    moves = {(one.before, one.source, one.target) for one in drawn.transfers}
    for one in drawn.collectives:
        moves |= {(one.before, a, b) for a in one.ranks for b in one.ranks if a != b}
    arrows = []
    for before, source, target in sorted(moves):
        start, stop = places[source], places[target]
        way = (stop - start) / max(1e-9, float(np.hypot(*(stop - start))))
        start, stop = start + 20 * way, stop - 24 * way
        arrows.append(
            f'<path class="move" data-before="{before}" marker-end="url(#tip)" '
            f'd="M{start[0]:.1f} {start[1]:.1f}L{stop[0]:.1f} {stop[1]:.1f}"/>'
        )
    ranks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="17" fill="{color(rank, drawn.size)}"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" style="fill:#fff;font-weight:600">'
        f"{rank}</text>"
        for rank, (x, y) in enumerate(places.tolist())
    )
    return (
        f'<svg width="{side}" height="{side}" viewBox="0 0 {side} {side}" role="img" '
        'aria-label="messages between ranks"><defs><marker id="tip" viewBox="0 0 8 8" refX="6" '
        'refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" '
        f'fill="#59636e"/></marker></defs>{"".join(arrows)}{ranks}</svg>'
    )
