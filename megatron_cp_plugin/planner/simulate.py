"""Simulates an attention layer on a machine: operations and waits of each rank.

The operations are recorded from a rank's own code without data (`planner.meta`).
How long that takes is played on the machine (`planner.event_simulation`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import lcm

from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.event_simulation import PassTime, Timeline, play
from megatron_cp_plugin.planner.layer import AnyShape, Layer
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.meta import Trace, trace_of


def simulate(
    algo: str,
    options: Mapping[str, object],
    shape: AnyShape,
    mask: Mask,
    machine: Machine,
    nodes: Sequence[int],
    *,
    kernel: str | None = None,
    captured: bool = False,
) -> Timeline:
    """One layer, forward and backward.

    Up to 16 ranks all are simulated. Of more, where all exchange in collective operations
    (allgather, attention2d, ulysses over the process group), three are, at the true size: the
    others are taken to come when these do. All else is simulated on 16 and on 32 ranks, or two and
    four nodes or teams, with as many tokens a rank, and goes on from there in a straight line: with
    every further rank, or team, there are as many steps more, each like the others. Under windows,
    documents and spans steps are unlike each other: there up to 64 ranks are simulated. Under other
    masks eight ranks of a grid by blocks are, evenly spaced. Of a team of usp one rank stands for
    all.

    Args:
        kernel: one of the machine's; default: its first.
        captured: in a CUDA graph, so that the host launches nothing.

    Raises: ConfigError if the algorithm cannot serve this, or a name or value is unknown.
    """
    of_layer = tuple(options.items()), shape, mask, tuple(nodes)
    layer = Layer(algo, *of_layer, peer_access=machine.copy is not None)
    return _simulated_layer(
        layer, machine, kernel or next(iter(machine.kernels)), captured=captured
    )


# The most ranks that are simulated one by one; of a larger grid blocks are.
_ALL, _OF_GRID = 16, 8
_MOST = 64  # of a grid by blocks, and of ranks under a mask that hides much, unequally


def _simulated_layer(layer: Layer, machine: Machine, kernel: str, *, captured: bool) -> Timeline:
    size = layer.size
    ranks: tuple[int, ...] = tuple(range(size))
    if size > _ALL:
        layer, at_once = layer.pinned()
        if at_once:
            ranks = (0, size // 2, size - 1)
        elif counts := _smaller(layer):
            few, more = (
                _simulated_layer(layer.of_fewer(count), machine, kernel, captured=captured)
                for count in counts
            )
            return _extended(few, more, counts, size)
        else:
            step = layer.number("ulysses")
            if "rows" in dict(layer.options) and not layer.mask.special:
                step = max(step, size // _OF_GRID)
            ranks = tuple(range(0, size, step))
    traces = traces_of(layer, ranks)
    return play(machine, layer.nodes, traces, kernel, captured=captured)


def _smaller(layer: Layer) -> tuple[int, int] | None:
    """Two numbers of ranks that stand for more; none where all have to be simulated.

    Raises: ConfigError if there are too many ranks to simulate.
    """
    size, per_node = layer.size, layer.nodes.count(layer.nodes[0])
    team = layer.number("ulysses")
    step = lcm(per_node if per_node < size else 1, team)
    few = step * max(2, _ALL // step)
    by_blocks = "rows" in dict(layer.options)
    unequal = layer.mask.special and size <= _MOST
    if not by_blocks and not unequal and 2 * few < size:
        return few, 2 * few
    if by_blocks and size // team > _MOST:
        what = "teams" if team > 1 else "ranks"
        advice = "route ring" if team > 1 else "transport group and another variant than overlap"
        raise ConfigError(
            f"{layer.algo} by blocks on a grid is simulated on up to {_MOST} {what}, got "
            f"{size // team}: use {advice}"
        )
    return None


def _extended(few: Timeline, more: Timeline, counts: tuple[int, int], size: int) -> Timeline:
    """The extrapolation from two numbers of ranks to a third one."""
    factor = (size - counts[1]) / (counts[1] - counts[0])

    def line(a: float, b: float) -> float:
        return b + max(0.0, b - a) * factor

    def one(a: PassTime, b: PassTime) -> PassTime:
        return PassTime(
            line(a.seconds, b.seconds),
            line(a.exposed_communication, b.exposed_communication),
            {link: round(line(a.bytes.get(link, 0), b.bytes[link])) for link in b.bytes},
        )

    forward, backward = one(few.forward, more.forward), one(few.backward, more.backward)
    return Timeline(forward, backward, more.ranks)


@lru_cache(maxsize=256)  # what ranks do is the same on every machine
def traces_of(layer: Layer, ranks: tuple[int, ...]) -> dict[int, Trace]:
    """Of some ranks. Raises: ConfigError if the algorithm cannot serve this."""
    several = len(ranks) > 1
    return {
        rank: trace_of(layer.on(rank, plans_all=several), layer.shape, layer.mask) for rank in ranks
    }
