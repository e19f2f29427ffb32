"""Chooses an algorithm: the fastest in simulation that supports a model and fits.

The choice depends on the arguments alone, so that all ranks with the same arguments choose the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from statistics import median
from typing import NamedTuple

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.placement import HeadPlacement
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.layers import options_by_name
from megatron_cp_plugin.planner.call_memory import peak_bytes
from megatron_cp_plugin.planner.candidates import (
    Candidate,
    Options,
    Refusal,
    candidates,
    label,
    linear_candidates,
)
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.planner.estimate import Estimate, Estimator
from megatron_cp_plugin.planner.layer import Layer
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.simulate import simulate

# Simulations take time; these bounds keep a choice to a few seconds. Work is in pairs of blocks,
# plus a constant for each simulation.
_WORK, _BESIDE = 1200, 16
_FEWEST, _SHARE = 4, 80  # number of simulations: at least this, or this by the number of ranks
_CHECKS = 3  # further simulations, of candidates that are best by their estimate alone
_ALGORITHMS = 12  # algorithms and layouts of which the best candidate is always simulated
_NEAR = 1.3  # times the fastest: error of an estimate
# Candidates slower than this, in times of the best estimate, are not simulated; the bound is lower
# for many ranks.
_FAR, _FAR_OF_MANY, _MANY = 1.6, 1.3, 64
_ALIKE = 1.002  # times as slow: too little to justify further options
GIB = 2**30


@dataclass(frozen=True)
class Kind:
    """Attention layers of a model with equal computations.

    Attributes:
        shape: sizes of the whole sequence.
        mask: of a typical batch.
        count: number of layers.
        measured: masks of several batches, which a measurement takes; empty: `mask`.
    """

    name: str
    shape: Shape | LinearShape
    mask: Mask
    count: int = 1
    measured: tuple[Mask, ...] = ()


@dataclass(frozen=True)
class Site:
    """The machine, ranks and kernel that run the layers.

    Attributes:
        nodes: node of each context-parallel rank.
        kernel: name of a kernel in the machine file.
        memory_bytes: memory of a GPU that attention may take; None: no bound.
    """

    machine: Machine
    nodes: tuple[int, ...]
    kernel: str
    memory_bytes: float | None = None

    @property
    def peer(self) -> bool:
        """Whether ranks can access each other's memory."""
        return self.machine.copy is not None and len(set(self.nodes)) == 1


@dataclass(frozen=True)
class Row:
    """Time, bytes and memory of one layer with one candidate.

    Attributes:
        forward, backward: seconds.
        exposed: seconds of these in which the slowest rank waits for messages.
        inside, between: bytes that a rank sends inside its node, and to other nodes.
        simulated: whether it was simulated; otherwise it was estimated.
        peak_bytes: peak memory of the GPU that needs most; None: not computed.
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
        """Name and options, as on a command line."""
        return label(self.algo, self.options)

    @property
    def seconds(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward


class Table(NamedTuple):
    """All candidates for one kind of layers, and reasons why others were refused."""

    kind: Kind
    rows: tuple[Row, ...]
    refused: tuple[Refusal, ...]


@dataclass(frozen=True)
class Combination:
    """An algorithm for each kind of layers, compatible in one model.

    Attributes:
        rows: by kind.
        lead: number of the kind whose algorithm takes the options.
        seconds: time of all layers, both passes.
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
        """Options that differ from their defaults."""
        return self.rows[self.lead].options

    @property
    def name(self) -> str:
        """Names of all different rows."""
        return ", ".join(dict.fromkeys(row.name for row in self.rows))


@dataclass(frozen=True)
class Choice:
    """A choice, with all that it was chosen from.

    Attributes: combinations: combinations that fit and are not refused, the fastest first.
    """

    site: Site
    tables: tuple[Table, ...]
    combinations: tuple[Combination, ...]
    refused: tuple[Refusal, ...]

    @property
    def best(self) -> Combination:
        """The chosen combination."""
        return self.combinations[0]


def choose(
    kinds: Sequence[Kind],
    site: Site,
    *,
    layouts: tuple[str, ...] | None = None,
    runs_again: bool = False,
    quick: bool = False,
    refusal: Callable[[Combination], str | None] = lambda combination: None,
    among: frozenset[str] | None = None,
) -> Choice:
    """Finds the fastest algorithm of each kind of layers.

    Args:
        layouts: names of the layouts that tokens may have; None: all layouts that need no change in
            the code that cuts batches.
        runs_again: activation recomputation runs the forward a second time.
        quick: only estimate; do not simulate, and ignore memory.
        refusal: returns why a combination is refused, or None; called for the fastest in turn,
            until two algorithms are accepted.
        among: names of candidates of softmax attention; None: all.

    Raises: ConfigError if no combination is accepted.
    """
    tables = []
    for kind in kinds:
        if isinstance(kind.shape, LinearShape):
            # Few candidates and quick to simulate: all of them.
            found, refused = linear_candidates(kind.shape, len(site.nodes), layouts)
            rows = [_simulated(one, kind, site) for one in found]
            rows.sort(key=lambda row: (row.seconds, row.name))
            tables.append(Table(kind, tuple(rows), tuple(refused)))
        else:
            looked_at = _looked_at(kind.shape, kind.mask, site, layouts, among, _registered())
            tables.append(_table(kind, looked_at, site, 0 if quick else _WORK))
    taken: list[Combination] = []
    refusals = [one for table in tables for one in table.refused]
    ranked = _ranked(_combined(tables, runs_again))
    late: list[str] = []
    for combination in ranked:
        reason = None
        # The best one, and the best of another algorithm.
        algorithms = {one.algo for one in taken}
        if not quick and len(algorithms) < 2 and combination.algo not in algorithms:
            reason = refusal(combination)
            if reason is None:
                combination = with_memory(combination, kinds, site)
                reason = too_large(combination, site)
        if reason is None:
            taken.append(combination)
        else:
            refusals.append(Refusal(combination.name, reason))
            late.append(f"{combination.name}: {reason}")
    first: dict[str, Refusal] = {}  # of each algorithm
    for one in refusals:
        first.setdefault(one.name.split()[0], one)
    if not taken:
        reasons = [f"{one.name}: {one.reason}" for one in first.values()]
        raise ConfigError(
            f"auto found no algorithm that serves this and fits, of {len(ranked)}: "
            f"{next(iter(late + reasons), 'none has a layout in common with the others')}"
        )
    return Choice(site, tuple(tables), tuple(taken), tuple(first.values()))


class _LookedAt(NamedTuple):
    """Estimated candidates. Attributes: estimates: estimates of both passes, the best candidate
    first.
    """

    estimates: tuple[tuple[Candidate, tuple[Estimate, ...]], ...]
    refused: tuple[Refusal, ...]


_Classes = tuple[registry.AnyClass, ...]


def _registered() -> _Classes:
    """Settings on which candidates depend beside the question."""
    return tuple(map(registry.algorithm_class, registry.available("softmax")))


@lru_cache(maxsize=16)  # the same questions, with other bandwidths
def _candidates_for(
    shape: Shape,
    mask: Mask,
    nodes: tuple[int, ...],
    peer: bool,
    layouts: tuple[str, ...] | None,
    registered: _Classes,
) -> tuple[tuple[Candidate, ...], tuple[Refusal, ...]]:
    topology = DryRunGroup(0, nodes, peer_access=peer)
    found, refused = candidates(shape, mask, topology, layouts)
    return tuple(found), tuple(refused)


@lru_cache(maxsize=32)  # a quick choice comes before one that simulates
def _looked_at(
    shape: Shape,
    mask: Mask,
    site: Site,
    layouts: tuple[str, ...] | None,
    among: frozenset[str] | None,
    registered: _Classes,
) -> _LookedAt:
    found, refused = _candidates_for(shape, mask, site.nodes, site.peer, layouts, registered)
    chosen = [one for one in found if among is None or one.name in among]
    estimator = Estimator(shape, mask, site.machine, site.nodes, site.peer, site.kernel)
    estimates = _estimates(chosen, estimator)
    if among is None:
        kept = {candidate.algo for candidate, _ in estimates}
        refused += tuple(_far_off(chosen, kept, len(site.nodes)))
    return _LookedAt(tuple(estimates), refused)


def _table(kind: Kind, looked_at: _LookedAt, site: Site, work: int) -> Table:
    """Args: work: of all simulations together, at most."""
    estimates = looked_at.estimates
    simulated: dict[Candidate, Row] = {}
    left, seen = list(estimates), set[tuple[str, str]]()
    ratios = _Ratios()
    most = max(_FEWEST, _SHARE // len(site.nodes))
    while left and len(simulated) < most + _CHECKS:
        # The best of several algorithms and layouts, then the others that may be the best.
        new = [one for one in left if (one[0].algo, one[0].layout.name) not in seen]
        fastest = min((row.seconds for row in simulated.values()), default=inf)
        if new and len(seen) < _ALGORITHMS and len(simulated) < most:
            candidate, passes = new[0]
        else:
            candidate, passes = min(left, key=lambda one: ratios.of(one[0]) * _seconds(one[1]))
            near = _NEAR if len(simulated) < most else 1.0
            if ratios.of(candidate) * _seconds(passes) >= near * fastest:
                break
        left.remove((candidate, passes))
        seen.add((candidate.algo, candidate.layout.name))
        needed = _simulation_work(candidate, len(site.nodes))
        if needed <= work:
            with suppress(ConfigError):  # of many ranks fewer are simulated, which may be too few
                simulated[candidate] = _simulated(candidate, kind, site)
                ratios.add(candidate, simulated[candidate].seconds / _seconds(passes))
                work -= needed
    rows = [
        simulated.get(candidate) or _estimated(candidate, passes, ratios.of(candidate))
        for candidate, passes in estimates
    ]
    rows.sort(key=lambda row: (row.seconds, len(row.options), row.name))
    return Table(kind, tuple(rows), looked_at.refused)


class _Ratios:
    """Ratios of simulated to estimated time, for one algorithm or for all."""

    def __init__(self) -> None:
        self._by_algo: dict[str, list[float]] = {}

    def add(self, candidate: Candidate, ratio: float) -> None:
        self._by_algo.setdefault(candidate.algo, []).append(ratio)

    def of(self, candidate: Candidate) -> float:
        every = [ratio for ratios in self._by_algo.values() for ratio in ratios]
        return median(self._by_algo.get(candidate.algo) or every or [1.0])


def _far_off(found: Iterable[Candidate], kept: Collection[str], size: int) -> Iterator[Refusal]:
    for algo in dict.fromkeys(one.algo for one in found):
        if algo not in kept:
            reason = (
                f"its busiest rank alone takes more than {_far(size)} times as long as the best"
            )
            yield Refusal(algo, reason)


def _simulation_work(candidate: Candidate, size: int) -> int:
    """Of a simulation, in pairs of blocks: of 16 and 32 ranks where there are more, see there."""
    placement = candidate.placements[0]
    members = 1
    if isinstance(placement, HeadPlacement):
        members, placement = placement.members, placement.of_teams
    if size > 16 and placement.assembled:
        return _BESIDE + 4 * size
    return _BESIDE + sum(
        (ranks // members) ** 2 * members for ranks in ((16, 32) if size > 16 else (size,))
    )


def _far(size: int) -> float:
    return _FAR if size <= _MANY else _FAR_OF_MANY


def _seconds(passes: Iterable[Estimate]) -> float:
    return sum(one.seconds for one in passes)


def _estimates(
    found: Sequence[Candidate], estimator: Estimator
) -> list[tuple[Candidate, tuple[Estimate, ...]]]:
    """Candidates that are not far from the best, the best first."""
    rows: list[tuple[float, int, Candidate, tuple[Estimate, ...]]] = []
    best, far = inf, _far(len(estimator.nodes))
    # Algorithms of heads and of grids are quick to look at and seldom bad: they come first.
    for number, candidate in sorted(enumerate(found), reverse=True):
        if estimator.least(candidate.placements) > far * best:
            continue
        passes = tuple(estimator.passes(candidate.placements))
        seconds = _seconds(passes)
        best = min(best, seconds)
        rows.append((seconds, number, candidate, passes))
    # The best candidate of each algorithm is kept, however slow.
    rows.sort(key=lambda row: row[:2])
    seen: set[str] = set()
    kept = []
    for seconds, _, candidate, passes in rows:
        if seconds <= far * best or candidate.algo not in seen:
            kept.append((candidate, passes))
        seen.add(candidate.algo)
    return kept


def _simulated(candidate: Candidate, kind: Kind, site: Site) -> Row:
    of_kind = kind.shape, kind.mask, site.machine, site.nodes
    timeline = simulate(candidate.algo, dict(candidate.options), *of_kind, kernel=site.kernel)
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
        (forward.exposed + backward.exposed) * scale,
        forward.inside + backward.inside,
        forward.between + backward.between,
    )


def _combined(tables: Sequence[Table], runs_again: bool) -> Iterator[Combination]:
    """All combinations that a model can have: one layout, and options for one algorithm."""

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


def _ranked(combinations: Iterable[Combination]) -> list[Combination]:
    """Sorts combinations, the fastest first; among nearly equal ones a simulated and simple one
    comes first.
    """
    found = sorted(combinations, key=lambda one: (one.seconds, one.name))
    alike = [one for one in found if one.seconds <= _ALIKE * found[0].seconds]

    def order(one: Combination) -> tuple[int, int, float, str]:
        estimated = sum(not row.simulated for row in one.rows)
        return estimated, sum(len(row.options) for row in one.rows), one.seconds, one.name

    alike.sort(key=order)
    return [*alike, *found[len(alike) :]]


def _beside(lead: Row, rows: Iterable[Row]) -> Iterator[Row]:
    """Rows that other layers can have beside a row: the same algorithm, or others with options that
    fit.
    """
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


def with_memory(combination: Combination, kinds: Sequence[Kind], site: Site) -> Combination:
    """The combination with the peak memory of all rows."""
    rows = tuple(
        replace(row, peak_bytes=peak_of_row(row, kind, site))
        for row, kind in zip(combination.rows, kinds, strict=True)
    )
    return replace(combination, rows=rows)


def peak_of_row(row: Row, kind: Kind, site: Site) -> int:
    """Peak memory of a GPU in bytes, beside q, k, v and dout."""
    layer = Layer(row.algo, row.options, kind.shape, kind.mask, site.nodes, site.peer)
    return peak_bytes(layer, site.kernel)


def too_large(combination: Combination, site: Site) -> str | None:
    """Why a combination with its peak memory does not fit; None if it does."""
    peaks = [row.peak_bytes for row in combination.rows if row.peak_bytes is not None]
    if site.memory_bytes is None or max(peaks, default=0) <= site.memory_bytes:
        return None
    return (
        f"attention needs {max(peaks) / GIB:.1f} GiB of a GPU, of which it may take "
        f"{site.memory_bytes / GIB:.1f}"
    )
