"""Peak memory of an attention call, found by following its plan on one rank without computing.

Tensors are on torch's meta device, where they have sizes but no storage, and each is counted as
long as it lives: outputs, partial sums, blocks that came, messages until they have left, tensors
saved for the backward, and workspaces of kernels (`SoftmaxKernel.workspace`). So no algorithm
has a formula of its own for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.algorithms.work_placement import WorkPlacement
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.kernel import SoftmaxKernel
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.kernels.choice import kernel_called, kernel_names
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.planner.layer import AnyAlgorithm, AnyShape, Layer, passes
from megatron_cp_plugin.planner.meta import OnMeta, run_on_meta
from megatron_cp_plugin.planner.sizes import SizesWithin

_BOTH_ENDS = 16  # from this number of ranks on the last alone is looked at, else the first too
_ALL, _FEW_TEAMS = 64, 4  # ranks, and teams of them, that stand for more
_USUAL = "flash4"  # whose memory stands for that of kernels that are not among ours


class Peak(NamedTuple):
    """Bytes of a rank beside q, k, v, dout and buffers of all layers, from the second call on.

    Attributes:
        forward, backward: the most at a time in either pass. Each has its results, tensors saved
            for the backward and the receive buffers in peer memory, which live on, among them.
        saved: tensors that live between the two passes, out among them.
        peer: receive buffers in peer memory, which torch's own statistics do not show.
    """

    forward: int
    backward: int
    saved: int
    peer: int


def peak_of(algorithm: AnyAlgorithm, shape: AnyShape, mask: Mask, kernel: SoftmaxKernel) -> Peak:
    """The peak memory of a rank in one attention layer.

    Args:
        algorithm: on a `DryRunGroup`.
        kernel: of the tiles, which need not be able to run here.
    """
    topology = algorithm.topology
    assert isinstance(topology, DryRunGroup)
    # Any rate below 1: so states are weighted, as most models have them.
    both = passes(algorithm, shape, mask, SizesWithin(kernel), rate=0.5)
    with AllocationTracker(both.inputs):
        both.backward(both.forward()[2])  # receive buffers have their final size now
    with AllocationTracker([*both.inputs, *topology.slabs()]) as living:
        out, lse, saved = both.forward()
        forward, living.most = living.most, 0
        del lse
        between = living.now
        gradients = both.backward(saved)
    del out, gradients
    peer = topology.peer_bytes
    return Peak(forward + peer, living.most + peer, between, peer)


def peak_bytes(layer: Layer, kernel: str) -> int:
    """Bytes of the GPU that needs most, beside q, k, v and dout.

    Of more than 64 ranks, where these exchange block by block, it is that of 32 and of 64 (or of
    four and eight teams or nodes) with as many tokens each, and goes on in a straight line: what a
    rank holds at a time grows by as much with every further one, or not at all. Spans count as a
    causal mask there, or a full one. Who helps by work depends on the whole mask: there no fewer
    ranks stand for all.

    Args: kernel: name of one; where it is none of ours `flash4` stands for it.

    Raises: ConfigError if the algorithm cannot serve this.
    """
    size, shape, mask = layer.size, layer.shape, layer.mask
    if size <= _ALL or isinstance(shape, LinearShape):
        return _most(layer, kernel)
    layer, at_once = layer.pinned()
    step = lcm(layer.nodes.count(layer.nodes[0]), layer.number("ulysses") * layer.number("rows"))
    few = step * max(_FEW_TEAMS, _ALL // 2 // step)
    if at_once or 2 * few >= size:
        return _most(layer, kernel)
    algorithm = layer.on(0)
    assert isinstance(algorithm, Algorithm)
    if isinstance(algorithm.placement(shape, mask, "forward"), WorkPlacement):
        return _most(layer, kernel)
    if mask.slices is not None:
        layer = replace(layer, mask=Mask(mask.causal))
    low, high = (_most(layer.of_fewer(count), kernel) for count in (few, 2 * few))
    return high + max(0, high - low) * (size - 2 * few) // few


def _most(layer: Layer, kernel: str) -> int:
    """Of the ranks that are looked at."""
    last = layer.size - 1  # sees the most
    ranks = {0, last} if last < _BOTH_ENDS else {last}
    if isinstance(layer.shape, LinearShape):
        ranks = {layer.size // 2}  # as all
    tiles = kernel_called(kernel if kernel in kernel_names() else _USUAL)
    found = (peak_of(layer.on(rank), layer.shape, layer.mask, tiles) for rank in ranks)
    return max(max(one.forward, one.backward) for one in found)


class AllocationTracker(OnMeta):
    """Adds up the storages that are made while the mode is on, as long as they live.

    Attributes:
        now: bytes at present.
        most: bytes at most, at a time.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Args: known: tensors that are not counted, and are there all the time."""
        super().__init__()
        self._known = {x.untyped_storage()._cdata for x in known}
        self._living: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # `reshape` gives the copy that it has made another shape by `_unsafe_view`.
        view = func.is_view or func is torch.ops.aten._unsafe_view.default
        result = func(*args, **kwargs) if view else run_on_meta(func, args, kwargs)
        for x in result if isinstance(result, list | tuple) else (result,):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._living and key not in self._known:
                    self._living.add(key)
                    self.now += size
                    weakref.finalize(storage, self._freed, key, size)
        self.most = max(self.most, self.now)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._living.discard(key)
        self.now -= size
