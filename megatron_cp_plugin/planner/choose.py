"""Chooses an algorithm: the fastest in simulation that supports a model and fits.

The choice depends on the arguments alone, so that all ranks with the same arguments choose the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import NamedTuple

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.placement import HeadPlacement
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.layers import Options, options_by_name
from megatron_cp_plugin.planner.call_memory import peak_bytes
from megatron_cp_plugin.planner.candidates import Candidate, Refusal, candidates, label
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.planner.estimate import Estimate, Estimator
from megatron_cp_plugin.planner.layer import AnyShape, Layer
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.simulate import simulate

_SIMULATED, _OF_MANY, _FEW = 8, 5, 8  # candidates; of more ranks than a few a simulation takes long
_NEAR = 1.1  # times the fastest: what is slower by its estimate is not simulated
_BLOCKS, _BLOCKS_MASKED = 16, 64  # of more that meet step by step a simulation takes long
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
    shape: AnyShape
    mask: Mask
    count: int = 1
    measured: tuple[Mask, ...] = ()


@dataclass(frozen=True)
class CallSite:
    """The machine, ranks and kernel that run the layers.

    Attributes: memory_bytes: memory of a GPU that attention may take; None: no bound.
    """

    machine: Machine
    nodes: tuple[int, ...]
    kernel: str
    memory_bytes: float | None = None

    @property
    def peer(self) -> bool:
        """Whether ranks of one node can access each other's memory."""
        return self.machine.copy is not None


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

    site: CallSite
    tables: tuple[Table, ...]
    combinations: tuple[Combination, ...]
    refused: tuple[Refusal, ...]

    @property
    def best(self) -> Combination:
        """The chosen combination."""
        return self.combinations[0]


def choose(
    kinds: Sequence[Kind],
    site: CallSite,
    *,
    layouts: tuple[str, ...] | None = None,
    runs_again: bool = False,
    quick: bool = False,
    refusal: Callable[[Combination], str | None] = lambda combination: None,
) -> Choice:
    """Finds the fastest algorithm of each kind of layers.

    Args:
        layouts: names of the layouts that tokens may have; None: all layouts that need no change in
            the code that cuts batches.
        runs_again: activation recomputation runs the forward a second time.
        quick: only estimate; do not simulate, and ignore memory.
        refusal: returns why a combination is refused, or None; called for the fastest in turn,
            until two algorithms are accepted.

    Raises: ConfigError if no combination is accepted.
    """
    tables = []
    for kind in kinds:
        topology = DryRunGroup(0, site.nodes, peer_access=site.peer)
        found, refused = candidates(kind.shape, kind.mask, topology, layouts)
        if isinstance(kind.shape, LinearShape):
            # Few candidates and quick to simulate: all of them.
            rows = [_simulated_row(one, kind, site) for one in found]
        else:
            estimates = _estimated(found, kind.shape, kind.mask, site)
            simulations = _SIMULATED if len(site.nodes) <= _FEW else _OF_MANY
            rows = _rows(estimates, kind, site, 0 if quick else simulations)
        rows.sort(key=lambda row: (row.seconds, len(row.options), row.name))
        tables.append(Table(kind, tuple(rows), tuple(refused)))
    taken: list[Combination] = []
    refusals = [one for table in tables for one in table.refused]
    ranked = _ranked(_combined(tables, runs_again))
    late: list[Refusal] = []
    for combination in ranked:
        reason = None
        # The best one, and the best of another algorithm.
        algorithms = {one.algo for one in taken}
        if not quick and len(algorithms) < 2 and combination.algo not in algorithms:
            reason = refusal(combination)
            if reason is None:
                combination, reason = with_memory(combination, kinds, site)
        if reason is None:
            taken.append(combination)
        else:
            late.append(Refusal(combination.name, reason))
    if not taken:
        reasons = (": ".join(one) for one in (*late, *refusals))
        raise ConfigError(
            f"auto found no algorithm that serves this and fits, of {len(ranked)}: "
            f"{next(reasons, 'none has a layout in common with the others')}"
        )
    first: dict[str, Refusal] = {}  # of each algorithm
    for one in (*refusals, *late):
        first.setdefault(one.name.split()[0], one)
    return Choice(site, tuple(tables), tuple(taken), tuple(first.values()))


_Estimates = tuple[tuple[Candidate, tuple[Estimate, ...]], ...]  # of both passes


def _estimated(found: Iterable[Candidate], shape: Shape, mask: Mask, site: CallSite) -> _Estimates:
    """All candidates, the best estimate first."""
    estimator = Estimator(shape, mask, site.machine, site.nodes, site.kernel)
    estimates: dict[object, tuple[Candidate, tuple[Estimate, ...]]] = {}
    for one in found:
        passes = tuple(estimator.passes(one.placements))
        # Of options that change nothing here the first ones are enough.
        estimates.setdefault((one.algo, one.layout.name, passes), (one, passes))
    return tuple(sorted(estimates.values(), key=lambda one: _seconds(one[1])))


def _seconds(passes: Iterable[Estimate]) -> float:
    return sum(one.seconds for one in passes)


def _rows(estimates: _Estimates, kind: Kind, site: CallSite, most: int) -> list[Row]:
    """Rows of all candidates: the best of each algorithm and then the next best are simulated, the
    others stay estimated.

    Args: most: number of simulations.
    """
    simulated: dict[Candidate, Row] = {}
    ratios: dict[str, list[float]] = {}  # of simulated to estimated time, by algorithm

    def ratio(candidate: Candidate, otherwise: Sequence[float] = ()) -> float:
        return median(ratios.get(candidate.algo) or otherwise or [1.0])

    left = [one for one in estimates if _is_quick(one[0], kind)]
    while len(simulated) < most:
        fastest = min((row.seconds for row in simulated.values()), default=inf)
        times = [ratio(candidate) * _seconds(passes) for candidate, passes in left]
        order = sorted(zip(times, left, strict=True), key=lambda one: one[0])
        left = [one for seconds, one in order if seconds < _NEAR * fastest]
        if not left:
            break
        new = [one for one in left if one[0].algo not in ratios]
        candidate, passes = (new or left)[0]
        left.remove((candidate, passes))
        of_algo = ratios.setdefault(candidate.algo, [])
        with suppress(ConfigError):  # of many ranks fewer are simulated, which may be too few
            simulated[candidate] = _simulated_row(candidate, kind, site)
            of_algo.append(simulated[candidate].seconds / _seconds(passes))
    every = [one for of_algo in ratios.values() for one in of_algo]
    return [
        simulated.get(candidate) or _estimated_row(candidate, passes, ratio(candidate, every))
        for candidate, passes in estimates
    ]


def _is_quick(candidate: Candidate, kind: Kind) -> bool:
    """Whether a simulation takes little: few blocks, or teams, meet step by step."""
    blocks = candidate.placements[0]
    if isinstance(blocks, HeadPlacement):
        blocks = blocks.of_teams
    hides = kind.mask.special and kind.mask.slices is None
    return blocks.assembled or blocks.size <= (_BLOCKS_MASKED if hides else _BLOCKS)


def _simulated_row(candidate: Candidate, kind: Kind, site: CallSite) -> Row:
    of_kind = kind.shape, kind.mask, site.machine, site.nodes
    timeline = simulate(candidate.algo, dict(candidate.options), *of_kind, kernel=site.kernel)
    sent = timeline.bytes
    return Row(
        *_named(candidate),
        *(timeline.forward.seconds, timeline.backward.seconds, timeline.exposed_communication),
        sent.get("copy", 0) + sent.get("inside", 0),
        sent.get("between", 0),
        simulated=True,
    )


def _estimated_row(candidate: Candidate, passes: Sequence[Estimate], scale: float) -> Row:
    forward, backward = passes
    return Row(
        *_named(candidate),
        *(forward.seconds * scale, backward.seconds * scale),
        (forward.exposed + backward.exposed) * scale,
        forward.inside + backward.inside,
        forward.between + backward.between,
    )


def _named(candidate: Candidate) -> tuple[str, Options, str]:
    return candidate.algo, candidate.options, candidate.layout.name


def _combined(tables: Sequence[Table], runs_again: bool) -> Iterator[Combination]:
    """All combinations that a model can have: one layout, and options for one algorithm."""

    def seconds(rows: Iterable[Row]) -> float:
        return sum(
            table.kind.count * (row.seconds + runs_again * row.forward)
            for table, row in zip(tables, rows, strict=True)
        )

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
        with suppress(ConfigError):  # no layout in common
            options = options_by_name((lead.algo, row.algo), lead.algo, lead.options)[row.algo]
            if row.layout == lead.layout and row.options == options:
                yield row


def with_memory(
    combination: Combination, kinds: Sequence[Kind], site: CallSite
) -> tuple[Combination, str | None]:
    """The combination with all rows' peak memory, and why it does not fit; None if it does."""
    each = list(zip(combination.rows, kinds, strict=True))
    peaks = [peak_at(row.algo, row.options, kind, site) for row, kind in each]
    rows = (replace(row, peak_bytes=peak) for (row, _), peak in zip(each, peaks, strict=True))
    reason = None
    if site.memory_bytes is not None and max(peaks) > site.memory_bytes:
        reason = (
            f"attention needs {max(peaks) / GIB:.1f} GiB of a GPU, of which it may take "
            f"{site.memory_bytes / GIB:.1f}"
        )
    return replace(combination, rows=tuple(rows)), reason


def peak_at(algo: str, options: Options, kind: Kind, site: CallSite) -> int:
    """Peak memory of a GPU in bytes, beside q, k, v and dout."""
    layer = Layer(algo, options, kind.shape, kind.mask, site.nodes, site.peer)
    return peak_bytes(layer, site.kernel)
