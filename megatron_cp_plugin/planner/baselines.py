"""Bytes of other ways to split a layer, which the papers compare context parallelism with.

They are not algorithms of this package; Megatron runs the first one, nothing here the second. Bytes
are those of a rank in rings, which a collective operation cannot undercut: (P-1)/P of the tensor.
"""

from dataclasses import dataclass

from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask, visible_pairs
from megatron_cp_plugin.planner.costs import Cost


@dataclass(frozen=True)
class Baseline:
    """One of them.

    Attributes:
        name: As it is printed.
        forward, backward: Tensors of all tokens, as wide as the hidden states, that go round.
        skips: Whether pairs that a mask hides are left out.
    """

    name: str
    forward: int
    backward: int
    skips: bool

    def cost(self, size: int, shape: Shape, mask: Mask) -> Cost:
        """What a layer costs, the hidden states being as wide as the output of attention.

        Args:
            size: Number of ranks.
            shape: The whole problem.
            mask: Which keys a query sees.
        """
        whole = shape.batch * shape.seq_len * shape.out_width * shape.element_bytes
        one = whole * (size - 1) // size
        pairs = visible_pairs(shape.seq_len, mask if self.skips else Mask(False))
        return Cost(
            "",
            self.forward * one,
            self.backward * one,
            (self.forward + self.backward) * (size - 1),
            0.0,
            2 * shape.batch * (shape.query_width + shape.out_width) * pairs,
            None,
            shape.heads,
        )


# Tensor parallelism with sequence parallelism: before attention and before the MLP the hidden
# states are gathered and after them summed and scattered, the same in the backward, where two
# are gathered again for the gradients of weights. So the MLP is in it, which costs context
# parallelism nothing. Sources: Korthikanti et al.; DISTFLASHATTN, appendix C: 10 N d and 14 N d.
TENSOR = Baseline("tensor + sequence parallel", 4, 6, skips=True)
TENSOR_RECOMPUTED = Baseline("the same, full recompute", 4, 10, skips=True)
# Ring Self-Attention: K and V go round; in the backward again, and dK and dV of all tokens are
# all-reduced. It computes all scores whatever the mask, of as many KV heads as query heads.
# Sources: Li et al., section 3.2.2; BurstAttention, section 3.2: 2 and 6 B Z N d.
RING_SELF_ATTENTION = Baseline("Ring Self-Attention", 2, 6, skips=False)
BASELINES = (TENSOR, TENSOR_RECOMPUTED, RING_SELF_ATTENTION)
