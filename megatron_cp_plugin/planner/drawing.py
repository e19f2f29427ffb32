"""Pictures of a plan: what every rank computes in every step, which blocks travel, and who waits.

Made from an algorithm's plan, so no process group and no tensor is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, zip_longest
from typing import Literal, NamedTuple

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

Kind = Literal["keys", "queries", "results"]


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


class DrawnTransfer(NamedTuple):
    """Tensors of a block from one rank to another.

    Attributes:
        before: the step that needs it, or, of results, the one after which it is sent, plus one.
        owners: of the block.
        share: which one of the heads.
    """

    before: int
    source: int
    target: int
    tensors: tuple[str, ...]
    owners: tuple[int, ...]
    share: int
    kind: Kind

    @property
    def text(self) -> str:
        """Which block, such as "k2"; outputs for rank 2 are "o2"."""
        first = self.tensors[0]
        names = {"v": "k", "dv": "dk", "out": "o"} | dict.fromkeys(("dout", "lse", "delta"), "q")
        return f"{names.get(first, first)}{_ranks(self.owners)}"


class Collective(NamedTuple):
    """An exchange of several ranks, each with all others.

    Attributes:
        before: as in DrawnTransfer.
        name: of the operation.
        tensors: such as "k, v".
    """

    before: int
    ranks: tuple[int, ...]
    name: str
    tensors: str
    kind: Kind


@dataclass(frozen=True)
class Picture:
    """One pass of a plan.

    Attributes:
        title: algorithm and options.
        subtitle: ranks, mask, tokens, pass.
        spans: tokens that each rank holds.
        steps: cells by step and rank; None: the rank waits.
        transfers, collectives: the messages.
        results: the meaning of results that are sent.
        plan: of all ranks.
    """

    title: str
    subtitle: str
    spans: tuple[Sequence[Span], ...]
    steps: tuple[tuple[Cell | None, ...], ...]
    transfers: tuple[DrawnTransfer, ...]
    collectives: tuple[Collective, ...]
    results: str
    plan: Plan

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.spans)

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

    Args:
        algo: A name of `available()`.
        size: Number of context-parallel ranks.
        seq_len: Global tokens; default: some hundreds a rank.
        mask: Default: causal.
        options: Of the algorithm; values may be text.
        phase: Which pass.

    Raises:
        ConfigError: The algorithm, an option or a value is unknown, or has no such mask.
    """
    if registry.kind_of(algo) == "linear":
        raise ConfigError(
            f"draw shows which queries meet which keys, got {algo}: use one of "
            f"{', '.join(registry.available('softmax'))}, or --machine for its times"
        )
    mask, options = mask or Mask(), options or {}
    if size < 1:
        raise ConfigError(f"size must be 1 or more, got {size}: give the number of ranks")
    if seq_len is None:
        seq_len = registry.layout_of(algo, options).multiple(size) * _TOKENS_PER_CHUNK
    if seq_len < 1:
        raise ConfigError(f"seq-len must be 1 or more, got {seq_len}: give the global tokens")
    title = ", ".join([algo, *(f"{name}={value}" for name, value in options.items())])
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    subtitle = f"{ranks} · {_words_of(mask)} · {seq_len} tokens · {phase}"
    # A number of heads that every algorithm can divide, and each part again.
    heads = _HEADS_PER_RANK * size
    shape = Shape(1, seq_len, heads, heads, 1)
    plan = planned(algo, size, shape, mask, options).plan(shape, mask, phase)
    messages = [_message(move) for move in plan.moves]
    partial = "partial " if plan.shares == 1 else ""  # else those of some heads, complete
    results = f"{partial}{'gradients' if phase == 'backward' else 'outputs'}"
    spans, steps = tuple(plan.spans), _steps(plan)
    return Picture(title, subtitle, spans, steps, *_travelling(messages), results, plan)


def _words_of(mask: Mask) -> str:
    if mask.slices is not None:
        return f"{len(mask.slices)} spans"
    words = ["causal" if mask.causal else "full attention"]
    if mask.window is not None:
        words.append(f"window {mask.window}")
    if mask.documents:
        words.append(f"{len(mask.documents) + 1} documents")
    return ", ".join(words)


def _message(move: Move) -> DrawnTransfer:
    before = move.posted + 1 if move.result else move.needed
    tensors = tuple(name for message in move.messages for name in message)
    kind: Kind = "results" if move.result else "keys" if move.side else "queries"
    ends, owners = (move.source, move.target), move.block.owners
    return DrawnTransfer(before, *ends, tensors, owners, move.share, kind)


def _travelling(
    messages: Sequence[DrawnTransfer],
) -> tuple[tuple[DrawnTransfer, ...], tuple[Collective, ...]]:
    """Messages, and exchanges of all ranks of a group with all others."""
    alike: dict[tuple[int, Kind, tuple[str, ...]], list[DrawnTransfer]] = {}
    for message in messages:
        alike.setdefault((message.before, message.kind, message.tensors), []).append(message)
    exchanged: dict[tuple[int, tuple[int, ...], str, Kind], list[str]] = {}
    single: list[DrawnTransfer] = []
    for (before, kind, tensors), group in alike.items():
        meshed: set[int] = set()
        for ranks in _meshes(group):
            meshed.update(ranks)
            name = _operation([message for message in group if message.source in ranks])
            exchanged.setdefault((before, ranks, name, kind), []).extend(tensors)
        single += [message for message in group if message.source not in meshed]
    collectives = (
        Collective(before, ranks, name, ", ".join(dict.fromkeys(tensors)), kind)
        for (before, ranks, name, kind), tensors in exchanged.items()
    )
    return tuple(sorted(single)), tuple(sorted(collectives))


def _meshes(messages: Iterable[DrawnTransfer]) -> Iterator[tuple[int, ...]]:
    """Groups of three ranks or more in which each rank sends to all others."""
    targets: dict[int, set[int]] = {}
    for message in messages:
        targets.setdefault(message.source, set()).add(message.target)
    seen: set[int] = set()
    for source, others in targets.items():
        ranks = {source, *others}
        if source not in seen and len(ranks) > 2:
            seen |= ranks
            if all({rank, *targets.get(rank, ())} == ranks for rank in ranks):
                yield tuple(sorted(ranks))


def _operation(messages: Sequence[DrawnTransfer]) -> str:
    """The name of a collective operation in which each rank sends to all others."""
    if messages[0].kind == "results":
        target = messages[0].target
        shares = {message.share for message in messages if message.target == target}
        return "reduce-scatter" if len(shares) == 1 else "all-to-all"
    source = messages[0].source
    shares = {message.share for message in messages if message.source == source}
    return "all-gather" if len(shares) == 1 else "all-to-all"


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
    return Cell(text, float(sum(map(plan.pairs, computes))))


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


def _lines_of(drawn: Picture, step: int, rank: int) -> list[str]:
    """The computation of a rank in a step, what it receives for it, and sends back after it."""
    cell = drawn.steps[step][rank]
    lines = [cell.text if cell else "waits"]
    inputs = (t for t in drawn.transfers if t.kind != "results" and t.target == rank)
    if now := [f"{t.text} from {t.source}" for t in inputs if t.before == step]:
        lines.append("← " + ", ".join(dict.fromkeys(now)))
    results = (t for t in drawn.transfers if t.kind == "results" and t.source == rank)
    if back := [f"{t.text} to {t.target}" for t in results if t.before == step + 1]:
        lines.append("→ " + ", ".join(dict.fromkeys(back)))
    return lines


def text(drawn: Picture) -> str:
    """The picture for a terminal: a column for each step."""
    steps = range(len(drawn.steps))
    rows = []
    for rank in range(drawn.size):
        cells = [[str(rank)], *(_lines_of(drawn, step, rank) for step in steps)]
        rows += list(zip_longest(*cells, fillvalue=""))
    head = ("rank", *(f"step {step}" for step in steps))
    table = text_table(head, rows)
    return "\n".join([f"{drawn.title} · {drawn.subtitle}", table, *_below(drawn)])


def held(drawn: Picture) -> Iterator[str]:
    """A line for each rank: the tokens that it holds, in its order."""
    for rank, spans in enumerate(drawn.spans):
        yield f"rank {rank} holds tokens {', '.join(map(_run, spans))}"


def _run(span: Span) -> str:
    """Tokens 4 to 7 are "4-7", every second one of them "4-6:2"."""
    first, last = span.start, span.positions[-1]
    one = str(first) if first == last else f"{first}-{last}"
    return one + (f":{span.step}" if span.step > 1 and first != last else "")


def _below(drawn: Picture) -> Iterator[str]:
    """What stands below a picture: exchanges of several ranks, who waits, and the letters."""
    groups: dict[Collective, list[str]] = {}
    for collective in drawn.collectives:
        ranks = _ranks(collective.ranks)
        groups.setdefault(collective._replace(ranks=()), []).append(ranks)
    for (before, _, name, tensors, _), ranks_of in groups.items():
        when = f"before step {before}" if before < len(drawn.steps) else "at the end"
        yield f"{when}: {name} of {tensors} among ranks {' '.join(ranks_of)}"
    yield from drawn.summary
    if notes := _notes(drawn):
        yield notes


def _notes(drawn: Picture) -> str:
    """The meaning of the letters in this picture."""
    cells = [cell.text for step in drawn.steps for cell in step if cell]
    words = " ".join([*cells, *(transfer.text for transfer in drawn.transfers)])
    meanings = {
        r"\bq\d|½q": "q1: the queries of rank 1",
        r"\bk\d": "k1: its keys and values",
        r"\bo\d": f"o1: {drawn.results} of its queries",
        r"\bdq\d": "dq1: gradients of its queries",
        r"\bdk\d": "dk1: gradients of its keys and values",
        r"½": "½q1: half of its rows",
    }
    found = [meaning for pattern, meaning in meanings.items() if re.search(pattern, words)]
    if share := re.search(r"1/\d+ heads", words):
        found.append(f"{share[0]}: that part of the heads")
    if strided := re.search(r"(\d+)-(\d+):(\d+)", words):
        first, last, step = map(int, strided.groups())
        found.append(f"{strided[0]}: ranks {', '.join(map(str, range(first, last + 1, step)))}")
    return "; ".join(found)
