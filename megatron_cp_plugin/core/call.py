"""The description of one call of softmax attention."""

from dataclasses import dataclass
from functools import cached_property

from megatron_cp_plugin.core.kernel import SoftmaxKernel
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask


@dataclass(frozen=True)
class Call:
    """One attention over the whole split sequence.

    Attributes:
        shape: sizes of the whole problem.
        mask: of the whole sequence.
        scale: factor of the scores.
        kernel: computes the tiles.
        dq, dkv: whether the gradient of q, and those of k and v, are wanted; the same on all ranks.
    """

    shape: Shape
    mask: Mask
    scale: float
    kernel: SoftmaxKernel
    dq: bool = True
    dkv: bool = True

    @cached_property
    def packed(self) -> bool:
        """Whether one kernel call computes several tiles: with masks that make many of them."""
        return self.kernel.packs and bool(self.mask.special)

    @cached_property
    def places_outputs(self) -> bool:
        """Whether the kernel writes a block's first partial output where the merged one will be."""
        return self.kernel.places_outputs and not self.packed

    @cached_property
    def places_gradients(self) -> bool:
        """Whether the kernel writes a block's first gradients where their sums will be."""
        return self.kernel.places_gradients and not self.packed
