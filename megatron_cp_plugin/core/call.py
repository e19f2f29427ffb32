"""What a call of softmax attention is made with, and what follows from it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from megatron_cp_plugin.core.kernel import Problem, SoftmaxKernel
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask


class Asked(NamedTuple):
    """What a call of attention is made with, see `core.autograd.function.attend`.

    Attributes: q, k, v: shapes. deterministic: torch's setting. seq_len: N, in tokens.
    """

    q: torch.Size
    k: torch.Size
    v: torch.Size
    dtype: torch.dtype
    device: torch.device
    deterministic: bool
    seq_len: int
    causal: bool
    window: int | None
    documents: tuple[int, ...]
    slices: Slices | None
    scale: float | None
    kernel_for: Callable[[Problem], SoftmaxKernel]


@dataclass(frozen=True, eq=False)  # what follows from it is kept by it
class Call:
    """One attention over the whole split sequence; equal only to itself.

    Attributes: seq_len: N, in tokens. mask: of the whole sequence. scale: factor of the scores.
        kernel: computes the tiles. dq, dkv: whether the gradient of q, and those of k and v, are
        wanted; the same on all ranks. shape: of the whole problem, where it is known.
    """

    seq_len: int
    mask: Mask
    scale: float
    kernel: SoftmaxKernel
    dq: bool = True
    dkv: bool = True
    shape: Shape | None = None

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

    def wanting(self, *, dq: bool, dkv: bool) -> "Call":
        """The same call, of which only some gradients are wanted."""
        if (dq, dkv) == (self.dq, self.dkv):
            return self
        if (dq, dkv) not in self._wanting:
            self._wanting[dq, dkv] = replace(self, dq=dq, dkv=dkv)
        return self._wanting[dq, dkv]

    @cached_property
    def _wanting(self) -> dict[tuple[bool, bool], "Call"]:
        return {}
