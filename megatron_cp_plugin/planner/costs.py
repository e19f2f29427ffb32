"""Bytes, messages and waiting of an attention layer with each algorithm, from its plan.

Nothing runs and no processes are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_cp_plugin.algorithms.attention2d import GridAlgorithm
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.kernels.choice import kernel_called
from megatron_cp_plugin.planner.call_memory import Peak, peak_of
from megatron_cp_plugin.planner.layer import Layer, planned


@dataclass(frozen=True)
class Cost:
    """The cost of one attention layer.

    Attributes:
        layout: Name of the layout.
        forward_bytes, backward_bytes: Sent by the rank that sends most.
        messages: It sends, in both passes together.
        idle: Share of the forward's time in which ranks wait, a step being as long as its largest
            block.
        grid: Rows and columns, if there are any.
        heads: Query heads that are computed: more than there are where ranks could not split them,
            filled up with zeros. Bytes are of all heads.
    """

    layout: str
    forward_bytes: int
    backward_bytes: int
    messages: int
    idle: float
    grid: tuple[int, int] | None
    heads: int


def cost(
    algo: str,
    size: int,
    shape: Shape,
    mask: Mask | None = None,
    options: Mapping[str, object] | None = None,
) -> Cost:
    """Works out the cost of a layer of softmax attention.

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
    algorithm = planned(algo, size, shape, mask, options)
    each = [algorithm.traffic(shape, mask, rank) for rank in range(size)]
    most = max(each, key=lambda traffic: traffic.forward_bytes + traffic.backward_bytes)
    return Cost(
        algorithm.layout.name,
        most.forward_bytes,
        most.backward_bytes,
        most.forward_messages + most.backward_messages,
        algorithm.plan(shape, mask).idle,
        algorithm.grid_shape(shape) if isinstance(algorithm, GridAlgorithm) else None,
        algorithm.computed(shape).heads,
    )


def peak(
    algo: str,
    size: int,
    rank: int,
    shape: Shape,
    mask: Mask | None = None,
    options: Mapping[str, object] | None = None,
    *,
    kernel: str = "flash4",
    peer_access: bool = True,
) -> Peak:
    """Works out the memory that a rank's GPU needs for a layer of softmax attention.

    Args:
        algo, size, shape, mask, options: As of `cost`.
        rank: One of the ranks.
        kernel: Name of the kernel, which need not run here.
        peer_access: Whether ranks reach each other's memory, as GPUs of one node do.

    Raises:
        ConfigError: As `cost`.
        KernelUnavailableError: No kernel has that name.
    """
    mask, options = mask or Mask(), options or {}
    layer = Layer(algo, tuple(options.items()), shape, mask, (0,) * size, peer_access)
    return peak_of(layer.on(rank), shape, mask, kernel_called(kernel))


# ---- other ways to split a layer, which the papers compare context parallelism with. They are not
# algorithms of this package; Megatron runs the first one, nothing here the second.


@dataclass(frozen=True)
class Baseline:
    """Another way to split a layer; bytes are of a rank in rings, which a collective
    operation cannot undercut: (P-1)/P of the tensor.

    Attributes:
        name: As it is printed.
        forward, backward: Tensors of all tokens, as wide as the hidden states, that go round.
    """

    name: str
    forward: int
    backward: int

    def cost(self, size: int, shape: Shape) -> Cost:
        """The cost of a layer whose hidden states are as wide as the output of attention.

        Args:
            size: Number of ranks.
            shape: The whole problem.
        """
        whole = shape.batch * shape.seq_len * shape.out_width * shape.element_bytes
        one = whole * (size - 1) // size
        return Cost(
            "",
            self.forward * one,
            self.backward * one,
            (self.forward + self.backward) * (size - 1),
            0.0,
            None,
            shape.heads,
        )


# Tensor parallelism with sequence parallelism: before attention and before the MLP the hidden
# states are gathered and after them summed and scattered, the same in the backward, where two
# are gathered again for the gradients of weights. So the MLP is in it, which costs context
# parallelism nothing. Sources: Korthikanti et al.; DISTFLASHATTN, appendix C: 10 N d and 14 N d.
BASELINES = (
    Baseline("tensor + sequence parallel", 4, 6),
    Baseline("the same, full recompute", 4, 10),
    # K and V go round; in the backward again, and dK and dV of all tokens are all-reduced. It
    # computes all scores under any mask, of as many KV heads as query heads. Sources: Li et al.,
    # section 3.2.2; BurstAttention, section 3.2: 2 and 6 B Z N d.
    Baseline("Ring Self-Attention", 2, 6),
)
