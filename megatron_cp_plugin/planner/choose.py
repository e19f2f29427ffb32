"""The choice of an algorithm: the fastest by the simulator, of all that serve a model and fit.

Everything follows from the question alone, so that all ranks that ask it choose the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.linear import LinearShape
from megatron_cp_plugin.core.memory import Alone, peak_of
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels.base import kernel_called
from megatron_cp_plugin.layers import options_by_name
from megatron_cp_plugin.planner.candidates import (
    Candidate,
    Options,
    Question,
    Refusal,
    candidates,
    label,
    linear_candidates,
)
from megatron_cp_plugin.planner.estimate import Estimate, Estimator
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.simulate import simulate

# A simulation takes the longer the more ranks there are; these keep a choice to a few seconds.
_MOST_SIMULATED, _SIMULATED_WORK = 12, 600
_MOST_CELLS = 2**16  # of a plan whose memory is looked at
_FAR = 1.3  # times the best estimate: what is beyond is not worth a closer look
GIB = 2**30


@dataclass(frozen=True)
class Kind:
    """Attention layers of a model that compute alike.

    Attributes: shape: of the whole sequence. count: how many layers.
    """

    name: str
    shape: Shape | LinearShape
    mask: Mask
    count: int = 1


@dataclass(frozen=True)
class Place:
    """Where the layers run.

    Attributes: nodes: of each context-parallel rank. kernel: name of one that the machine knows.
        memory_bytes: that attention may take of a GPU; None: whatever it takes.
    """

    machine: Machine
    nodes: tuple[int, ...]
    kernel: str
    memory_bytes: float | None = None

    @property
    def peer(self) -> bool:
        """Whether ranks reach each other's memory."""
        return self.machine.copy is not None and len(set(self.nodes)) == 1


@dataclass(frozen=True)
class Row:
    """What one layer takes with one candidate.

    Attributes:
        forward, backward: seconds. exposed: of these, in which the slowest rank waits for messages.
        inside, between: bytes that a rank sends in its node, and to others. simulated: it was
            simulated; otherwise estimated. peak_bytes: of the GPU that needs most; None: unknown.
    """

    algo: str
    options: Options
    layout: str
    forward: float
    backward: float
    exposed: float
    inside: float
    between: float
    simulated: bool = False
    peak_bytes: int | None = None

    @property
    def name(self) -> str:
        """As on a command line."""
        return label(self.algo, self.options)

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.forward + self.backward


class Table(NamedTuple):
    """All candidates of one kind of layers, and why others are none."""

    kind: Kind
    rows: tuple[Row, ...]
    refused: tuple[Refusal, ...]


@dataclass(frozen=True)
class Combination:
    """An algorithm for each kind of layers, which a model can have together.

    Attributes: rows: by kind. lead: number of the kind whose algorithm has the options.
        seconds: of all layers, both passes.
    """

    rows: tuple[Row, ...]
    lead: int
    seconds: float

    @property
    def algo(self) -> str:
        """The algorithm that has the options."""
        return self.rows[self.lead].algo

    @property
    def options(self) -> Options:
        """Those that are not at their defaults."""
        return self.rows[self.lead].options

    @property
    def name(self) -> str:
        """All different rows in words."""
        return ", ".join(dict.fromkeys(row.name for row in self.rows))


@dataclass(frozen=True)
class Choice:
    """What was chosen, and from what.

    Attributes: combinations: that fit and are served, the fastest first.
    """

    place: Place
    tables: tuple[Table, ...]
    combinations: tuple[Combination, ...]
    refused: tuple[Refusal, ...]

    @property
    def best(self) -> Combination:
        """The one to be taken."""
        return self.combinations[0]


def choose(
    kinds: Sequence[Kind],
    place: Place,
    *,
    layouts: tuple[str, ...] | None = None,
    runs_again: bool = False,
    quick: bool = False,
    refusal: Callable[[Combination], str | None] = lambda combination: None,
) -> Choice:
    """Finds the fastest algorithm of each kind of layers.

    Args:
        layouts: names of those that the tokens may have; None: all that need nothing of whoever
            cuts the batches.
        runs_again: activation recomputation runs the forward a second time.
        quick: nothing is simulated, and memory is not looked at.
        refusal: why a combination cannot be had, asked of the fastest ones in turn until there are
            two that can.

    Raises: ConfigError if none can be had.
    """
    most = min(_MOST_SIMULATED, _SIMULATED_WORK // len(place.nodes) ** 2)
    topology = Alone(0, place.nodes, peer_access=place.peer)
    tables = []
    for kind in kinds:
        if isinstance(kind.shape, LinearShape):
            tables.append(_linear_table(kind, kind.shape, place, layouts))
        else:
            question = Question(kind.shape, kind.mask, topology, layouts)
            tables.append(_table(kind, kind.shape, question, place, 0 if quick else most))
    taken: list[Combination] = []
    refused = [one for table in tables for one in table.refused]
    found = sorted(_combined(tables, runs_again), key=lambda one: (one.seconds, one.name))
    for combination in found:
        reason = None
        if not quick and (len(taken) < 2 or combination.algo not in {x.algo for x in taken}):
            reason = refusal(combination)
            if reason is None:
                combination = _with_memory(combination, kinds, place)
                reason = _too_large(combination, place)
        if reason is None:
            taken.append(combination)
        else:
            refused.append(Refusal(combination.name, reason))
    if not taken:
        reasons = dict.fromkeys(f"{one.name}: {one.reason}" for one in refused)
        raise ConfigError(
            f"auto found no algorithm that serves this and fits, of {len(found)}: "
            f"{next(iter(reasons), 'none has a layout in common with the others')}"
        )
    return Choice(place, tuple(tables), tuple(taken), tuple(dict.fromkeys(refused)))


def _table(kind: Kind, shape: Shape, question: Question, place: Place, most: int) -> Table:
    found, refused = candidates(question)
    estimates = _estimates(found, _estimator(kind, shape, place))
    chosen = _worth_simulating(estimates)[:most]
    simulated: dict[Candidate, Row] = {}
    ratios = [1.0]
    for candidate, passes in estimates:
        if candidate in chosen:
            row = _simulated(candidate, kind, place)
            simulated[candidate] = row
            ratios.append(row.seconds / sum(one.seconds for one in passes))
    # What a simulation adds to an estimate, it adds to most alike.
    scale = median(ratios[1:] or ratios)
    rows = [
        simulated.get(candidate) or _estimated(candidate, passes, scale)
        for candidate, passes in estimates
    ]
    rows.sort(key=lambda row: (row.seconds, len(row.options), row.name))
    return Table(kind, tuple(rows), tuple(refused))


def _estimator(kind: Kind, shape: Shape, place: Place) -> Estimator:
    return Estimator(shape, kind.mask, place.machine, place.nodes, place.peer, place.kernel)


def _estimates(
    found: Sequence[Candidate], estimator: Estimator
) -> list[tuple[Candidate, list[Estimate]]]:
    """Those that are not far from the best, the best first."""
    rows: list[tuple[float, int, Candidate, list[Estimate]]] = []
    best = float("inf")
    # Algorithms of heads and of grids are quick to look at and seldom bad: they come first.
    for number, candidate in sorted(enumerate(found), reverse=True):
        if estimator.least(candidate.placements) > _FAR * best:
            continue
        passes = estimator.passes(candidate.placements)
        seconds = sum(one.seconds for one in passes)
        best = min(best, seconds)
        rows.append((seconds, number, candidate, passes))
    # Of each algorithm the best one is kept, however far.
    rows.sort(key=lambda row: row[:2])
    seen: set[str] = set()
    kept = []
    for seconds, _, candidate, passes in rows:
        if seconds <= _FAR * best or candidate.algo not in seen:
            kept.append((candidate, passes))
        seen.add(candidate.algo)
    return kept


def _worth_simulating(
    estimates: Sequence[tuple[Candidate, list[Estimate]]],
) -> list[Candidate]:
    """The best of each algorithm and layout, then the best of all."""
    first: dict[tuple[str, str], Candidate] = {}
    for candidate, _ in estimates:
        first.setdefault((candidate.algo, candidate.layout.name), candidate)
    return list(dict.fromkeys((*first.values(), *(candidate for candidate, _ in estimates))))


def _simulated(candidate: Candidate, kind: Kind, place: Place) -> Row:
    timeline = simulate(
        candidate.algo,
        dict(candidate.options),
        kind.shape,
        kind.mask,
        place.machine,
        place.nodes,
        kernel=place.kernel,
    )
    sent = timeline.bytes
    return Row(
        candidate.algo,
        candidate.options,
        candidate.layout.name,
        timeline.forward.seconds,
        timeline.backward.seconds,
        timeline.exposed_communication,
        sent.get("copy", 0) + sent.get("inside", 0),
        sent.get("between", 0),
        simulated=True,
    )


def _estimated(candidate: Candidate, passes: Sequence[Estimate], scale: float) -> Row:
    forward, backward = passes
    return Row(
        candidate.algo,
        candidate.options,
        candidate.layout.name,
        forward.seconds * scale,
        backward.seconds * scale,
        sum(max(0.0, one.seconds - one.computing) for one in passes) * scale,
        forward.inside + backward.inside,
        forward.between + backward.between,
    )


def _linear_table(
    kind: Kind, shape: LinearShape, place: Place, layouts: tuple[str, ...] | None
) -> Table:
    """Few candidates and quick to simulate: all of them, on the ranks of a few nodes at most."""
    found, refused = linear_candidates(shape, len(place.nodes), layouts)
    rows = []
    for algo, options, layout in found:
        timeline = simulate(algo, dict(options), shape, kind.mask, place.machine, place.nodes)
        sent = timeline.bytes
        rows.append(
            Row(
                algo,
                options,
                layout,
                timeline.forward.seconds,
                timeline.backward.seconds,
                timeline.exposed_communication,
                sent.get("copy", 0) + sent.get("inside", 0),
                sent.get("between", 0),
                simulated=True,
            )
        )
    rows.sort(key=lambda row: (row.seconds, row.name))
    return Table(kind, tuple(rows), tuple(refused))


def _combined(tables: Sequence[Table], runs_again: bool) -> Iterator[Combination]:
    """All that a model can have together: one layout, and options for one algorithm."""

    def seconds(rows: Iterable[Row]) -> float:
        return sum(
            table.kind.count * (row.seconds + runs_again * row.forward)
            for table, row in zip(tables, rows, strict=True)
        )

    if len(tables) == 1:
        for row in tables[0].rows:
            yield Combination((row,), 0, seconds((row,)))
        return
    for lead, table in enumerate(tables):
        for row in table.rows:
            others = [
                [row] if number == lead else list(_beside(row, other.rows))
                for number, other in enumerate(tables)
            ]
            if all(others):
                best = tuple(min(rows, key=lambda one: one.seconds) for rows in others)
                yield Combination(best, lead, seconds(best))


def _beside(lead: Row, rows: Iterable[Row]) -> Iterator[Row]:
    """The rows that other layers can have: the same, or with the options that follow from it."""
    for row in rows:
        if row.layout != lead.layout:
            continue
        if row.algo == lead.algo:
            if row.options == lead.options:
                yield row
        elif row.options == _following(lead, row.algo):
            yield row


def _following(lead: Row, algo: str) -> Options | None:
    try:
        given = options_by_name((lead.algo, algo), lead.algo, lead.options)[algo]
    except ConfigError:
        return None
    return given


def _with_memory(combination: Combination, kinds: Sequence[Kind], place: Place) -> Combination:
    rows = tuple(
        replace(row, peak_bytes=_peak(row, kind, place))
        for row, kind in zip(combination.rows, kinds, strict=True)
    )
    return replace(combination, rows=rows)


def _peak(row: Row, kind: Kind, place: Place) -> int | None:
    """Beside q, k, v and dout; of linear attention, and of very many ranks, it is not known."""
    shape, nodes = kind.shape, place.nodes
    if isinstance(shape, LinearShape) or len(nodes) ** 2 > _MOST_CELLS:
        return None
    found = [
        peak_of(
            lambda topology: registry.create(row.algo, topology, dict(row.options)),
            rank,
            nodes,
            shape,
            kind.mask,
            kernel_called(place.kernel),
            peer_access=place.peer,
        )
        for rank in sorted({0, len(nodes) - 1})
    ]
    return max(max(one.forward, one.backward) for one in found)


def _too_large(combination: Combination, place: Place) -> str | None:
    peaks = [row.peak_bytes for row in combination.rows if row.peak_bytes is not None]
    if place.memory_bytes is None or max(peaks, default=0) <= place.memory_bytes:
        return None
    return (
        f"attention needs {max(peaks) / GIB:.1f} GiB of a GPU, of which it may take "
        f"{place.memory_bytes / GIB:.1f}"
    )
