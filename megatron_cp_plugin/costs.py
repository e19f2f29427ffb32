"""What an attention layer costs with each algorithm, by its plan.

Nothing runs and no processes are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_cp_plugin import registry
from megatron_cp_plugin.algorithms.grid import GridAlgorithm
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask, visible_pairs
from megatron_cp_plugin.core.virtual import VirtualWorld

# A flash kernel's backward computes five products where its forward computes two.
_BACKWARD = 2.5


@dataclass(frozen=True)
class Cost:
    """What one attention layer costs.

    Attributes:
        layout: Name of the layout.
        forward_bytes, backward_bytes: Sent by the rank that sends most.
        messages: It sends, in both passes together.
        idle: Share of the forward's time in which ranks wait, a step being as long as its largest
            block.
        forward_flop: Of the whole layer.
        grid: Rows and columns, if there are any.
    """

    layout: str
    forward_bytes: int
    backward_bytes: int
    messages: int
    idle: float
    forward_flop: int
    grid: tuple[int, int] | None

    def least_seconds(self, size: int, flops: float, bandwidth: float) -> tuple[float, float]:
        """What computing and sending, each alone, take at least, both passes together.

        Args:
            size: Number of ranks.
            flops: FLOP/s of a rank's attention kernel.
            bandwidth: Bytes that a rank can send in a second.
        """
        work = self.forward_flop * (1 + _BACKWARD) / size / (1 - self.idle)
        return work / flops, (self.forward_bytes + self.backward_bytes) / bandwidth


def cost(
    algo: str,
    size: int,
    shape: Shape,
    mask: Mask | None = None,
    options: Mapping[str, object] | None = None,
) -> Cost:
    """Works out what a layer of softmax attention costs.

    Args:
        algo: A name of `available("softmax")`.
        size: Number of context-parallel ranks.
        shape: The whole problem.
        mask: Default: causal.
        options: Of the algorithm; values may be text.

    Raises:
        ConfigError: The algorithm cannot serve this, or a name or a value is unknown.
    """
    mask, options = mask or Mask(), options or {}
    algorithm = registry.create(algo, VirtualWorld(size).topology(0), options)
    algorithm.check(
        algorithm.options,
        size=size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        causal=mask.causal,
    )
    each = [algorithm.traffic(shape, mask, rank) for rank in range(size)]
    most = max(each, key=lambda traffic: traffic.forward_bytes + traffic.backward_bytes)
    return Cost(
        algorithm.layout.name,
        most.forward_bytes,
        most.backward_bytes,
        most.forward_messages + most.backward_messages,
        algorithm.plan(shape, mask).idle,
        2
        * shape.batch
        * (shape.query_width + shape.out_width)
        * visible_pairs(shape.seq_len, mask),
        algorithm.grid_shape(shape) if isinstance(algorithm, GridAlgorithm) else None,
    )
