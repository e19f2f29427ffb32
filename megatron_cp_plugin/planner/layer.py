"""A layer of attention on ranks that need not exist: its algorithm and its two passes.

Tensors are on torch's meta device, where they have sizes but no storage, so the algorithm's own
code runs for one rank of any number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin import registry
from megatron_cp_plugin.algorithms.attention2d import (
    GatheredPlacement,
    GridAlgorithm,
    GridRingPlacement,
)
from megatron_cp_plugin.algorithms.ulysses import Ulysses
from megatron_cp_plugin.algorithms.usp import Usp
from megatron_cp_plugin.core.algorithm import Algorithm, Compiled, PointToPoint
from megatron_cp_plugin.core.call import Call, Shape
from megatron_cp_plugin.core.kernel import SoftmaxKernel
from megatron_cp_plugin.core.linear.algorithm import (
    LinearAlgorithm,
    LinearCall,
    LinearShape,
    LinearTensors,
)
from megatron_cp_plugin.core.linear.states import Decay
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.planner.sizes import LinearSizes

AnyAlgorithm = Algorithm | LinearAlgorithm
AnyShape = Shape | LinearShape
# By bytes of an element.
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class Layer:
    """An algorithm for a layer, and the nodes of its ranks.

    Attributes: peer_access: the ranks of one node reach each other's memory.
    """

    algo: str
    options: tuple[tuple[str, object], ...]
    shape: AnyShape
    mask: Mask
    nodes: tuple[int, ...]
    peer_access: bool

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    def on(self, rank: int, *, plans_all: bool = False) -> AnyAlgorithm:
        """The algorithm of a rank. Args: plans_all: see Topology.

        Raises: ConfigError if it cannot serve this.
        """
        shape, options = self.shape, dict(self.options)
        topology = DryRunGroup(rank, self.nodes, peer_access=self.peer_access, plans_all=plans_all)
        linear = isinstance(shape, LinearShape)
        create = registry.create_linear if linear else registry.create
        return checked(create(self.algo, topology, options), shape, self.mask)

    def of_fewer(self, count: int) -> Layer:
        """The same layer on the first ranks, with equally many tokens each.

        Raises: ConfigError for spans, whose first tokens may see other keys than later ones.
        """
        if self.mask.slices is not None:
            raise ConfigError(
                "spans are simulated on up to 64 ranks where these exchange block by block: use "
                "an algorithm whose ranks gather"
            )
        tokens = self.shape.seq_len // self.size * count
        documents = tuple(start for start in self.mask.documents if start < tokens)
        return replace(
            self,
            shape=replace(self.shape, seq_len=tokens),
            mask=replace(self.mask, documents=documents),
            nodes=self.nodes[:count],
        )

    def pinned(self) -> tuple[Layer, bool]:
        """The layer with options that depend on the number of ranks fixed to their values for this
        number.

        Returns: the layer, and whether ranks communicate in collective operations only, so that one
        rank represents all.
        """
        algorithm, shape, mask, options = self.on(0), self.shape, self.mask, dict(self.options)
        at_once, names = False, registry.option_names(self.algo)
        if isinstance(algorithm, LinearAlgorithm) or isinstance(shape, LinearShape):
            return self, getattr(algorithm, "collective", False)
        if isinstance(algorithm, Ulysses):
            team = algorithm.degree(shape.kv_heads)
            at_once = team == self.size
            options["chunks"] = len(algorithm.placement(shape, mask, "forward").exchanges)
            if "ulysses" in names:
                options["ulysses"] = team
                if isinstance(algorithm, Usp) and algorithm.options.route == "grid":
                    options["rows"] = algorithm.grid_shape(shape, team)[0]
        elif isinstance(algorithm, PointToPoint):
            options["chunks"] = len(algorithm.head_groups(shape, mask))
            if isinstance(algorithm, GridAlgorithm):
                at_once = algorithm.kind(mask) is GatheredPlacement
                if "rows" in names:
                    options["rows"] = algorithm.grid_shape(shape)[0]
                    if algorithm.kind(mask) is GridRingPlacement:
                        options["chunks"] = 0
        return replace(self, options=tuple(options.items())), at_once

    def number(self, option: str) -> int:
        """The value of an option; 1 if it is not given."""
        return int(str(dict(self.options).get(option, 1)))


def checked(algorithm: AnyAlgorithm, shape: AnyShape, mask: Mask) -> AnyAlgorithm:
    """The algorithm, in the documents' layout. Raises: ConfigError if it cannot serve this."""
    size, heads = algorithm.topology.size, {"heads": shape.heads, "kv_heads": shape.kv_heads}
    algorithm.check(algorithm.options, size=size, **heads, causal=mask.causal)
    if isinstance(algorithm, LinearAlgorithm):
        return algorithm
    if mask.special and not algorithm.windows:
        raise ConfigError(f"{algorithm.name} does not support {mask.special}: leave it out")
    return algorithm.for_documents(mask.resolved)


def planned(
    algo: str, size: int, shape: Shape, mask: Mask, options: Mapping[str, object]
) -> Algorithm:
    """A softmax algorithm that makes plans, on one node. Raises: ConfigError as `Layer.on`."""
    nodes = (0,) * size
    algorithm = Layer(algo, tuple(options.items()), shape, mask, nodes, peer_access=False).on(0)
    assert isinstance(algorithm, Algorithm)
    return algorithm


def input_sizes(shape: AnyShape, tokens: int) -> list[tuple[int, int, int, int]]:
    """Of q, k, v and dout, each [B,tokens,heads,dim]."""
    heads = shape.heads, shape.kv_heads, shape.kv_heads, shape.heads
    dims = shape.head_dim, shape.head_dim, shape.value_dim, shape.value_dim
    return [(shape.batch, tokens, n, d) for n, d in zip(heads, dims, strict=True)]


class Passes(NamedTuple):
    """The two passes of a rank.

    Attributes:
        inputs: q, k, v and dout.
        forward: its last result is the argument of `backward`.
    """

    inputs: list[Tensor]
    forward: Callable[[], tuple[Any, Any, Any]]
    backward: Callable[[Any], Any]


def passes(
    algorithm: AnyAlgorithm, shape: AnyShape, mask: Mask, kernel: SoftmaxKernel, rate: float = 1.0
) -> Passes:
    """Passes of the rank of the algorithm's topology.

    Args:
        kernel: of softmax attention.
        rate: by which states of linear attention decay; 1: they do not.
    """
    topology = algorithm.topology
    if isinstance(algorithm, Algorithm):
        algorithm = algorithm.for_documents(mask.resolved)
    tokens = algorithm.layout.length(topology.rank, topology.size, shape.seq_len)
    q, k, v, dout = inputs = [
        torch.empty(size, dtype=DTYPES[shape.element_bytes], device="meta")
        for size in input_sizes(shape, tokens)
    ]
    if isinstance(algorithm, LinearAlgorithm):
        decay = Decay((rate,) * shape.heads)
        linear, call = algorithm, LinearCall(shape.seq_len, decay, LinearSizes())
        calls = [call] if mask.causal else [call, replace(call, reverse=True)]
        given = LinearTensors(q, k, v)
        return Passes(
            inputs,
            lambda: (None, None, [(linear.forward(given, one), one) for one in calls]),
            lambda done: [linear.backward(dout, None, one[2], call) for one, call in done],
        )
    assert isinstance(shape, Shape)
    compiled = Compiled(algorithm, Call(shape, mask, shape.head_dim**-0.5, kernel))
    return Passes(
        inputs,
        lambda: compiled.forward.attend(q, k, v),
        lambda saved: compiled.backward().differentiate(dout, saved),
    )
