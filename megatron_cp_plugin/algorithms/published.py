"""The settings of the papers, by name: algorithms of this package with other defaults.

They are for comparisons with the papers. `available` does not list them and `auto` does not try
them; their options can be given as those of the algorithms that they are of.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_cp_plugin.algorithms.attention2d import Attention2D
from megatron_cp_plugin.algorithms.distflash import DistFlash
from megatron_cp_plugin.algorithms.ring import BurstRing, Rule
from megatron_cp_plugin.core.algorithm import group_counts, number
from megatron_cp_plugin.registry import register


@register("burst", listed=False)
class Burst(BurstRing):
    """ring:backward=query:gradients=model:keep=local:chunks=1.

    Source: BurstAttention, Algorithms 1 to 4.
    """

    @dataclass(frozen=True)
    class Options(BurstRing.Options):
        """Options of ring; queries and their gradients, in the model's dtype, travel back."""

        chunks: int = number(1, group_counts, least=0)
        backward: Rule = "query"
        keep: Literal["auto", "local"] = "local"
        gradients: Literal["float32", "model"] = "model"


@register("attention2d-no", listed=False)
class Attention2DNo(Attention2D):
    """attention2d:variant=no:chunks=1. Source: Attention2D, Algorithms 1 to 3."""

    @dataclass(frozen=True)
    class Options(Attention2D.Options):
        """Options of attention2d; all heads are gathered at once, by collective operations."""

        chunks: int = number(1, group_counts, least=0)
        variant: Literal["zigzag", "no", "overlap"] = "no"


@register("attention2d-o", listed=False)
class Attention2DO(Attention2D):
    """attention2d:variant=overlap. Source: Attention2D, Algorithms 4 to 11."""

    @dataclass(frozen=True)
    class Options(Attention2D.Options):
        """Options of attention2d; rings in the place of collective operations."""

        variant: Literal["zigzag", "no", "overlap"] = "overlap"


@register("distflash-paper", listed=False)
class DistFlashPaper(DistFlash):
    """distflash:last_step=owner:helpers=distance. Source: DISTFLASHATTN, Algorithm 2."""

    @dataclass(frozen=True)
    class Options(DistFlash.Options):
        """Options of distflash; helpers by distance, and none in the last step of an even P."""

        last_step: Literal["owner", "shared"] = "owner"
        helpers: Literal["work", "distance"] = "distance"


@register("distflash-unbalanced", listed=False)
class DistFlashUnbalanced(DistFlash):
    """distflash:balanced=false. Source: DISTFLASHATTN, section 3.2, before its balance."""

    @dataclass(frozen=True)
    class Options(DistFlash.Options):
        """Options of distflash; nobody helps."""

        balanced: bool = False
