"""Pictures of a plan: what every rank computes in every step, which blocks travel, and who waits.

Made from an algorithm's plan, so no process group and no tensor is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise, zip_longest

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.plans.plan import Compute, Move, Plan
from megatron_cp_plugin.core.ranges import Span
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.layer import planned
from megatron_cp_plugin.terminal import text_table

_TOKENS_PER_CHUNK = 256
_HEADS_PER_RANK = 4
# Letters of blocks by the first tensor of a message: v travels behind k, and lse behind out.
_LETTERS = {"v": "k", "dv": "dk", "out": "o"} | dict.fromkeys(("dout", "lse", "delta"), "q")


@dataclass(frozen=True)
class Cell:
    """The computation of one rank in one step.

    Attributes:
        text: which blocks meet, such as "q7 k2"; of several ranks and a part of the heads
            "q0-3 k0,2 1/4 heads"; half of the rows of a block "½q7 k2".
        pairs: number of (query, key) pairs, times the share of the heads.
    """

    text: str
    pairs: float


@dataclass(frozen=True)
class Picture:
    """One pass of a plan.

    Attributes: steps: cells by step and rank; None: the rank waits.
    """

    title: str
    subtitle: str
    steps: tuple[tuple[Cell | None, ...], ...]
    plan: Plan

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.plan.size

    @property
    def waiting(self) -> int:
        """Rank-steps without work."""
        return sum(cell is None for step in self.steps for cell in step)

    @property
    def idle_share(self) -> float:
        """Idle share of all ranks' time if a step takes as long as its largest cell."""
        time = sum(max((cell.pairs for cell in step if cell), default=0.0) for step in self.steps)
        return 1 - sum(self._work) / (self.size * time) if time else 0.0

    @property
    def balance(self) -> str:
        """The work of the busiest rank beside the mean."""
        mean = sum(self._work) / self.size
        return f"busiest rank: {max(self._work) / mean:.2f} of the mean" if mean else "no scores"

    @property
    def _work(self) -> list[float]:
        cells = [[step[rank] for step in self.steps] for rank in range(self.size)]
        return [sum(cell.pairs for cell in of_rank if cell) for of_rank in cells]

    @property
    def summary(self) -> tuple[str, str]:
        """How many steps and who waits; how much of the time is idle."""
        slots = len(self.steps) * self.size
        steps = "1 step" if len(self.steps) == 1 else f"{len(self.steps)} steps"
        return (
            f"{steps}, waiting in {self.waiting} of {slots} rank-steps "
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
    phase: Phase = "forward",
) -> Picture:
    """Plans one pass of an algorithm.

    Args: seq_len: global tokens; None: some hundreds a rank.

    Raises: ConfigError: The algorithm, an option or a value is unknown, or has no such mask.
    """
    if registry.kind_of(algo) == "linear":
        raise ConfigError(
            f"draw shows which queries meet which keys, got {algo}: use one of "
            f"{', '.join(registry.available('softmax'))}"
        )
    mask, options = mask or Mask(), options or {}
    if seq_len is None:
        seq_len = registry.layout_of(algo, options).multiple(size) * _TOKENS_PER_CHUNK
    title = ", ".join([algo, *(f"{name}={value}" for name, value in options.items())])
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    subtitle = f"{ranks} · {_words_of(mask)} · {seq_len} tokens · {phase}"
    # A number of heads that every algorithm can divide, and each part again.
    heads = _HEADS_PER_RANK * size
    shape = Shape(1, seq_len, heads, heads, 1)
    plan = planned(algo, size, shape, mask, options).plan(shape, mask, phase)
    return Picture(title, subtitle, _steps(plan), plan)


def _words_of(mask: Mask) -> str:
    if mask.slices is not None:
        return f"{len(mask.slices)} spans"
    words = ["causal" if mask.causal else "full attention"]
    if mask.window is not None:
        words.append(f"window {mask.window}")
    if mask.documents:
        words.append(f"{len(mask.documents) + 1} documents")
    return ", ".join(words)


def _steps(plan: Plan) -> tuple[tuple[Cell | None, ...], ...]:
    found: dict[tuple[int, int], list[Compute]] = {}
    for compute in plan.computes:
        if plan.tiles(compute):
            found.setdefault((compute.step, compute.rank), []).append(compute)
    count = max((step for step, _ in found), default=-1) + 1
    times = Counter(_pair(compute) for computes in found.values() for compute in computes)
    return tuple(
        tuple(_cell(plan, found.get((step, rank), []), times) for rank in range(plan.size))
        for step in range(count)
    )


def _pair(compute: Compute) -> tuple[object, ...]:
    return compute.queries.owners, compute.keys.owners, compute.heads.q.start, compute.share


def _cell(
    plan: Plan, computes: Sequence[Compute], times: Mapping[tuple[object, ...], int]
) -> Cell | None:
    if not computes:
        return None
    share = Fraction(computes[0].heads.heads, plan.heads.heads * plan.shares)
    heads = "" if share == 1 else f" {share} heads"
    keys: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for compute in computes:
        shared = times[_pair(compute)]
        part = "" if shared == 1 else "½" if shared == 2 else f"1/{shared} "
        keys.setdefault((part, compute.queries.owners), []).extend(compute.keys.owners)
    text = ", ".join(f"{part}q{_ranks(q)} k{_ranks(k)}{heads}" for (part, q), k in keys.items())
    return Cell(text, float(share * sum(int(plan.tiles(one).areas.sum()) for one in computes)))


def _ranks(owners: Sequence[int]) -> str:
    """Ranks 0, 1, 2, 3 and 6 are "0-3,6", every second one is "0-6:2"."""
    ranks = sorted(set(owners))
    strides = {b - a for a, b in pairwise(ranks)}
    if len(ranks) > 2 and len(strides) == 1 and strides != {1}:
        return f"{ranks[0]}-{ranks[-1]}:{strides.pop()}"
    runs = groupby(enumerate(ranks), lambda one: one[1] - one[0])  # equal of consecutive ranks
    pieces = ([rank for _, rank in run] for _, run in runs)
    return ",".join(str(x[0]) if len(x) == 1 else f"{x[0]}-{x[-1]}" for x in pieces)


def _joined(moves: Iterable[Move], end: str) -> str:
    """Blocks by their letters, and the ranks at the other ends, such as "q1-3 from 1-3"."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for move in moves:
        first = move.messages[0][0]
        owners, ranks = found.setdefault(_LETTERS.get(first, first), ([], []))
        owners += move.block.owners
        ranks.append(move.target if move.result else move.source)
    each = found.items()
    return ", ".join(f"{x}{_ranks(owners)} {end} {_ranks(ranks)}" for x, (owners, ranks) in each)


def text(drawn: Picture) -> str:
    """The picture for a terminal: a column for each step, with what a rank computes in it, what it
    receives for it, and sends back after it.
    """
    came, left = dict[tuple[int, int], list[Move]](), dict[tuple[int, int], list[Move]]()
    for move in drawn.plan.moves:
        if move.result:
            left.setdefault((move.posted, move.source), []).append(move)
        else:
            came.setdefault((max(0, move.needed), move.target), []).append(move)

    def lines(step: int, rank: int) -> Iterator[str]:
        cell = drawn.steps[step][rank]
        yield cell.text if cell else "waits"
        if moves := came.get((step, rank)):
            yield f"← {_joined(moves, 'from')}"
        if moves := left.get((step, rank)):
            yield f"→ {_joined(moves, 'to')}"

    steps = range(len(drawn.steps))
    rows = []
    for rank in range(drawn.size):
        cells = [[str(rank)], *(lines(step, rank) for step in steps)]
        rows += list(zip_longest(*cells, fillvalue=""))
    head = ("rank", *(f"step {step}" for step in steps))
    table = text_table(head, rows)
    notes = [line for line in (*drawn.summary, _notes(drawn, table)) if line]
    return "\n".join([f"{drawn.title} · {drawn.subtitle}", table, *notes])


def held(drawn: Picture) -> Iterator[str]:
    """A line for each rank: the tokens that it holds, in its order."""
    for rank, spans in enumerate(drawn.plan.spans):
        yield f"rank {rank} holds tokens {', '.join(map(_run, spans))}"


def _run(span: Span) -> str:
    """Tokens 4 to 7 are "4-7", every second one of them "4-6:2"."""
    first, last = span.start, span.positions[-1]
    one = str(first) if first == last else f"{first}-{last}"
    return one + (f":{span.step}" if span.step > 1 and first != last else "")


def _notes(drawn: Picture, words: str) -> str:
    """The meaning of the letters in a picture. Args: words: all of its words."""
    partial = "partial " if drawn.plan.shares == 1 else ""  # else those of some heads, complete
    meanings = {
        r"\bq\d|½q": "q1: the queries of rank 1",
        r"\bk\d": "k1: its keys and values",
        r"\bo\d": f"o1: {partial}outputs of its queries",
        r"\bdq\d": f"dq1: {partial}gradients of its queries",
        r"\bdk\d": f"dk1: {partial}gradients of its keys and values",
        r"½": "½q1: half of its rows",
    }
    found = [meaning for pattern, meaning in meanings.items() if re.search(pattern, words)]
    if share := re.search(r"1/\d+ heads", words):
        found.append(f"{share[0]}: that part of the heads")
    if strided := re.search(r"(\d+)-(\d+):(\d+)", words):
        first, last, step = map(int, strided.groups())
        found.append(f"{strided[0]}: ranks {', '.join(map(str, range(first, last + 1, step)))}")
    return "; ".join(found)
