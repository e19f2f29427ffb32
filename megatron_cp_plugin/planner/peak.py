"""Peak memory of a layer of attention, on any number of ranks: see `planner.call_memory`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm

from megatron_cp_plugin import registry
from megatron_cp_plugin.algorithms.work_placement import WorkPlacement
from megatron_cp_plugin.core.linear.algorithm import LinearCall, LinearShape, LinearTensors
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.kernels.choice import kernel_called, kernel_names
from megatron_cp_plugin.planner.call_memory import AllocationTracker, on_meta, peak_of
from megatron_cp_plugin.planner.linear_sizes import LinearSizes
from megatron_cp_plugin.planner.simulate import by_collectives, pinned, within
from megatron_cp_plugin.planner.trace import alone

_BOTH_ENDS = 16  # of so many ranks the first and the last are looked at, of more the last
_ALL, _FEW_TEAMS = 64, 4  # ranks, and teams of them, that stand for more
_USUAL = "flash4"  # whose memory stands for that of kernels that are not among ours


def peak_bytes(
    algo: str,
    options: Mapping[str, object],
    shape: Shape | LinearShape,
    mask: Mask,
    nodes: Sequence[int],
    kernel: str,
    *,
    peer_access: bool,
) -> int:
    """Bytes of the GPU that needs most, beside q, k, v and dout.

    Of more than 64 ranks, where these exchange block by block, it is that of 32 and of 64 (or of
    four and eight teams or nodes) with as many tokens each, and goes on in a straight line: what a
    rank holds at a time grows by as much with every further one, or not at all. Spans count as a
    causal mask there, or a full one. Who helps by work depends on the whole mask: there no fewer
    ranks stand for all.

    Args:
        algo, options: as `registry.create`. nodes: of each rank. kernel: name of one; where it is
            none of ours `flash4` stands for it. peer_access: ranks reach each other's memory.

    Raises: ConfigError if the algorithm cannot serve this.
    """
    nodes, size = tuple(nodes), len(nodes)
    if isinstance(shape, LinearShape):
        return _linear_peak(algo, options, shape, mask, nodes)
    if size > _ALL:
        options = pinned(algo, options, shape, mask, nodes, peer_access=peer_access)
        rows = int(str(options.get("rows", 1)))
        step = lcm(nodes.count(nodes[0]), int(str(options.get("ulysses", 1))) * rows)
        few = step * max(_FEW_TEAMS, _ALL // 2 // step)
        meet_at_once = by_collectives(algo, options, shape, mask, nodes, peer_access=peer_access)
        if not meet_at_once and 2 * few < size:
            mask = mask if mask.slices is None else Mask(mask.causal)
            made = registry.create(algo, alone(0, nodes, peer_access=peer_access), dict(options))
            if isinstance(made.placement(shape, mask, "forward"), WorkPlacement):
                return _peak(algo, options, shape, mask, nodes, kernel, peer_access=peer_access)
            tokens = shape.seq_len // size
            low, high = (
                _peak(
                    algo,
                    {**options, **({"cols": count // rows} if "cols" in options else {})},
                    replace(shape, seq_len=tokens * count),
                    within(mask, tokens * count),
                    nodes[:count],
                    kernel,
                    peer_access=peer_access,
                )
                for count in (few, 2 * few)
            )
            return high + max(0, high - low) * (size - 2 * few) // few
    return _peak(algo, options, shape, mask, nodes, kernel, peer_access=peer_access)


def _peak(
    algo: str,
    options: Mapping[str, object],
    shape: Shape,
    mask: Mask,
    nodes: tuple[int, ...],
    kernel: str,
    *,
    peer_access: bool,
) -> int:
    last = len(nodes) - 1  # sees the most
    found = [
        peak_of(
            lambda topology: registry.create(algo, topology, dict(options)),
            rank,
            nodes,
            shape,
            mask,
            kernel_called(kernel if kernel in kernel_names() else _USUAL),
            peer_access=peer_access,
        )
        for rank in sorted({0, last} if last < _BOTH_ENDS else {last})
    ]
    return max(max(one.forward, one.backward) for one in found)


# ---- linear attention


def _linear_peak(
    algo: str,
    options: Mapping[str, object],
    shape: LinearShape,
    mask: Mask,
    nodes: tuple[int, ...],
) -> int:
    """Of a rank in the middle, as all are; with fla's kernels."""
    rank, size = len(nodes) // 2, len(nodes)
    algorithm = registry.create_linear(algo, alone(rank, nodes, peer_access=False), options)
    algorithm.check(algorithm.options, size=size, heads=shape.heads)
    q, k, v, dout = on_meta(shape, algorithm.layout.length(rank, size, shape.seq_len))
    # Any rate below 1: so states are weighted, as most models have them.
    decay = Decay((0.5,) * shape.heads)
    decay.logarithms(q.device)  # kept for all calls
    call = LinearCall(shape.seq_len, mask.causal, decay, LinearSizes())
    with AllocationTracker([q, k, v, dout]) as living:
        out, _, saved = algorithm.forward(LinearTensors(q, k, v), call)
        gradients = algorithm.backward(dout, None, saved, call)
    del out, gradients
    return living.most
