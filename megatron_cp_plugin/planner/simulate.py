"""Simulates an attention layer on a machine: what each rank does and waits for.

What a rank does is what its own code does without data (`planner.trace`), which follows the plan.
How long that takes is played on the machine (`planner.event_simulation`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import lcm

from megatron_cp_plugin import registry
from megatron_cp_plugin.algorithms.attention2d import (
    GatheredPlacement,
    GridAlgorithm,
    GridRingPlacement,
)
from megatron_cp_plugin.algorithms.ulysses import Ulysses
from megatron_cp_plugin.algorithms.usp import Usp
from megatron_cp_plugin.core.algorithm import Algorithm, PointToPoint
from megatron_cp_plugin.core.linear.algorithm import LinearAlgorithm, LinearShape
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.event_simulation import (
    Interval,
    PassTime,
    Timeline,
    launched,
    play,
    tile_seconds,
)
from megatron_cp_plugin.planner.machine import Machine, Pass
from megatron_cp_plugin.planner.trace import Trace, alone, trace_linear, trace_softmax

__all__ = [
    "PASSES",
    "Interval",
    "PassTime",
    "Timeline",
    "host_seconds",
    "simulate",
    "tile_seconds",
]

PASSES: tuple[Pass, ...] = ("forward", "backward")


def simulate(
    algo: str,
    options: Mapping[str, object],
    shape: Shape | LinearShape,
    mask: Mask,
    machine: Machine,
    nodes: Sequence[int],
    *,
    transport: str = "auto",
    kernel: str | None = None,
    captured: bool = False,
) -> Timeline:
    """One layer, forward and backward.

    Up to 16 ranks all are simulated. Of more, where all exchange in collective operations
    (allgather, attention2d, ulysses over the process group), three are, at the true size: the
    others are taken to come when these do. All else is simulated on 16 and on 32 ranks, or two and
    four nodes or teams, with as many tokens a rank, and goes on from there in a straight line: with
    every further rank, or team, there are as many steps more, each like the others. Of a grid by
    blocks eight ranks are, evenly spaced. Of a team of usp one rank stands for all.

    Args:
        algo, options: as `registry.create`. shape: of the whole problem. mask: of softmax
            attention. nodes: the node of each rank. transport: "auto", by copy engines where the
            machine has them and all ranks are on one node; or "group". kernel: one of the
            machine's; default: its first.
        captured: in a CUDA graph, so that the host launches nothing.

    Raises: ConfigError if the algorithm cannot serve this, or a name or value is unknown.
    """
    nodes, size = tuple(nodes), len(nodes)
    kernel = kernel or next(iter(machine.kernels))
    peer_access = transport != "group" and machine.copy is not None and len(set(nodes)) == 1
    ranks: tuple[int, ...] = tuple(range(size))
    if size > _ALL:
        options = pinned(algo, options, shape, mask, nodes, peer_access=peer_access)
        if by_collectives(algo, options, shape, mask, nodes, peer_access=peer_access):
            ranks = (0, size // 2, size - 1)
        elif counts := _smaller(algo, options, nodes):
            tokens = shape.seq_len // size
            few, more = (
                simulate(
                    algo,
                    options,
                    replace(shape, seq_len=tokens * count),
                    within(mask, tokens * count),
                    machine,
                    nodes[:count],
                    transport=transport if peer_access else "group",
                    kernel=kernel,
                    captured=captured,
                )
                for count in counts
            )
            return _extended(few, more, counts, size)
        else:
            team = int(str(options.get("ulysses", 1)))
            sampled = "rows" in options and size // team > _OF_GRID
            ranks = tuple(range(0, size, size // _OF_GRID if sampled else team))
    traces = traces_of(algo, tuple(options.items()), shape, mask, nodes, ranks, peer_access)
    return play(machine, nodes, traces, kernel, captured=captured)


_ALL, _OF_GRID = 16, 8  # so many ranks are simulated one by one; of a larger grid by blocks
_MOST = 64  # of a grid by blocks


def _smaller(
    algo: str, options: Mapping[str, object], nodes: tuple[int, ...]
) -> tuple[int, int] | None:
    """Two numbers of ranks that stand for more; none where all have to be simulated.

    Raises: ConfigError if those are too many.
    """
    size, per_node = len(nodes), nodes.count(nodes[0])
    team = int(str(options.get("ulysses", 1)))
    step = lcm(per_node if per_node < size else 1, team)
    few = step * max(2, _ALL // step)
    by_blocks = "rows" in options
    if not by_blocks and 2 * few < size:
        return few, 2 * few
    if by_blocks and size // team > _MOST:
        what = "teams" if team > 1 else "ranks"
        advice = "route ring" if team > 1 else "transport group and another variant than overlap"
        raise ConfigError(
            f"{algo} by blocks on a grid is simulated on up to {_MOST} {what}, got {size // team}: "
            f"use {advice}"
        )
    return None


def within(mask: Mask, tokens: int) -> Mask:
    """A mask of the first tokens.

    Raises: ConfigError for spans, of which the first tokens may see others than later ones.
    """
    if mask.slices is not None:
        raise ConfigError(
            f"spans are simulated on up to {_ALL} ranks where these exchange block by block: use "
            "an algorithm whose ranks gather"
        )
    return replace(mask, documents=tuple(start for start in mask.documents if start < tokens))


def _extended(few: Timeline, more: Timeline, counts: tuple[int, int], size: int) -> Timeline:
    """What two numbers of ranks say of a third one."""
    factor = (size - counts[1]) / (counts[1] - counts[0])

    def line(a: float, b: float) -> float:
        return b + max(0.0, b - a) * factor

    def one(a: PassTime, b: PassTime) -> PassTime:
        return PassTime(
            line(a.seconds, b.seconds),
            line(a.computing, b.computing),
            line(a.exposed_communication, b.exposed_communication),
            {link: round(line(a.bytes.get(link, 0), b.bytes[link])) for link in b.bytes},
        )

    forward, backward = one(few.forward, more.forward), one(few.backward, more.backward)
    return Timeline(forward, backward, more.intervals, more.ranks)


def host_seconds(
    algo: str,
    options: Mapping[str, object],
    shape: Shape,
    mask: Mask,
    machine: Machine,
    nodes: Sequence[int],
) -> tuple[float, float]:
    """Seconds of the host for what rank 0 launches in forward and backward."""
    peer_access = machine.copy is not None and len(set(nodes)) == 1
    trace = _trace(algo, options, shape, mask, 0, nodes, peer_access=peer_access)
    return launched(machine, trace.forward), launched(machine, trace.backward)


@lru_cache(maxsize=256)  # what ranks do is the same on every machine
def traces_of(
    algo: str,
    options: tuple[tuple[str, object], ...],
    shape: Shape | LinearShape,
    mask: Mask,
    nodes: tuple[int, ...],
    ranks: tuple[int, ...],
    peer_access: bool,
) -> dict[int, Trace]:
    """Of some ranks."""
    of_all = algo, dict(options), shape, mask
    return {rank: _trace(*of_all, rank, nodes, peer_access=peer_access) for rank in ranks}


def pinned(
    algo: str,
    options: Mapping[str, object],
    shape: Shape | LinearShape,
    mask: Mask | None,
    nodes: tuple[int, ...],
    *,
    peer_access: bool,
) -> Mapping[str, object]:
    """Options with what follows from the number of ranks set to what it is for so many."""
    if isinstance(shape, LinearShape):
        return options
    algorithm = _made(algo, options, shape, nodes, peer_access=peer_access)
    pinned = dict(options)
    if isinstance(algorithm, Ulysses):
        pinned["chunks"] = len(algorithm.exchanged_groups(shape, mask or Mask()))
        if "ulysses" in registry.option_names(algo):
            pinned["ulysses"] = team = algorithm.degree(shape.kv_heads)
            if isinstance(algorithm, Usp) and algorithm.options.route == "grid":
                pinned["rows"] = algorithm.grid_shape(shape, team)[0]
    elif isinstance(algorithm, PointToPoint):
        pinned["chunks"] = len(algorithm.head_groups(shape, mask or Mask()))
        if isinstance(algorithm, GridAlgorithm) and "rows" in registry.option_names(algo):
            pinned["rows"], pinned["cols"] = algorithm.grid_shape(shape)
            if algorithm.kind(mask or Mask()) is GridRingPlacement:
                pinned["chunks"] = 0
    return pinned


def by_collectives(
    algo: str,
    options: Mapping[str, object],
    shape: Shape | LinearShape,
    mask: Mask,
    nodes: tuple[int, ...],
    *,
    peer_access: bool,
) -> bool:
    """Whether ranks meet in collective operations only, so that each stands for the others."""
    if isinstance(shape, LinearShape):
        cls = registry.algorithm_class(algo)
        assert issubclass(cls, LinearAlgorithm)
        return cls.collective
    algorithm = _made(algo, options, shape, nodes, peer_access=peer_access)
    if isinstance(algorithm, Ulysses):
        return algorithm.degree(shape.kv_heads) == len(nodes)
    return isinstance(algorithm, GridAlgorithm) and algorithm.kind(mask) is GatheredPlacement


def _made(
    algo: str,
    options: Mapping[str, object],
    shape: Shape,
    nodes: tuple[int, ...],
    *,
    peer_access: bool,
) -> Algorithm:
    algorithm = registry.create(algo, alone(0, nodes, peer_access=peer_access), options)
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
    algorithm.check(algorithm.options, size=len(nodes), **heads, causal=True)
    return algorithm


def _trace(
    algo: str,
    options: Mapping[str, object],
    shape: Shape | LinearShape,
    mask: Mask,
    rank: int,
    nodes: Sequence[int],
    *,
    peer_access: bool,
) -> Trace:
    if isinstance(shape, LinearShape):

        def make_linear(topology: Topology) -> LinearAlgorithm:
            algorithm = registry.create_linear(algo, topology, options)
            algorithm.check(algorithm.options, size=len(nodes), heads=shape.heads)
            return algorithm

        return trace_linear(make_linear, rank, nodes, shape, causal=mask.causal)

    def make(topology: Topology) -> Algorithm:
        algorithm = registry.create(algo, topology, options)
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
        algorithm.check(algorithm.options, size=len(nodes), **heads, causal=mask.causal)
        return algorithm

    return trace_softmax(make, rank, nodes, shape, mask, peer_access=peer_access)
