"""DeepSpeed-Ulysses: an all-to-all gives each rank all tokens of some of the heads.

B batch, S local tokens, H query heads, G KV heads, D head dim, P ranks, U ranks of a team.
"""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_cp_plugin.algorithms.ring import Ring, ring_placement
from megatron_cp_plugin.core.algorithm import Algorithm, number
from megatron_cp_plugin.core.call import (
    HeadGroup,
    Shape,
    flop_of_rank,
    group_count,
    head_groups,
    successive_groups,
)
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.execution.executor import Wanted
from megatron_cp_plugin.core.layout import Grouped
from megatron_cp_plugin.core.placement import BlockPlacement, HeadPlacement
from megatron_cp_plugin.core.plans.team_heads import PaddedHeads
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.registry import register


@register("ulysses")
class Ulysses(Algorithm):
    """DeepSpeed-Ulysses: all ranks are one team, and each computes H/P heads of all tokens.

    All tokens of one head meet on one rank by an all-to-all inside the team, of copy engines if
    the team is on one node; results go back the same way. It is done by groups of heads: while
    one is computed, the next one comes and the last one's output leaves. KV heads that several
    ranks of a team need are sent to each, and their gradients are summed in float32. Where the
    ranks of a team cannot split the heads, heads of zeros are added, exchanged and computed,
    and taken off again: 33:33 are 36:36 on 4 ranks, 33:11 are 36:12, 2:2 are 8:8 on 8. H and G
    count these heads too.

    With S = N/P tokens a rank, elements of e bytes, rows of w, and V = lcm(G, P) KV heads sent, a
    rank sends B*S*(P-1)/P times 2HDe + 2VDe + Hw, forward and backward alike; with keep=local
    HDe + 2VDe + Hw more in the backward. Memory: docs/algorithms.md.

    Source: DeepSpeed-Ulysses. Differs: pipelined by groups of heads; any number of heads.
    """

    @dataclass(frozen=True)
    class Options(Algorithm.Options):
        """Options of ulysses.

        Attributes:
            chunks: groups of heads that are pipelined, at most; 0: 4, or fewer where that would be
                too little work for each.
            keep: tensors kept for the backward: q, k, v as "exchanged", or the "local" ones, which
                are exchanged again. Local ones cost nothing where checkpointing recomputes them.
            layout: "contiguous", where nothing needs to be put in order; "zigzag", Megatron's own;
                or "thd", see ring.
            transport: see PointToPoint.
        """

        chunks: int = number(0, least=0)
        keep: Literal["exchanged", "local"] = "exchanged"
        layout: Literal["contiguous", "zigzag", "thd"] = "contiguous"
        transport: Wanted = "auto"

    options: Options
    windows = True
    rules = Ring.Options(keep="local")  # of the ring between teams

    def degree(self, kv_heads: int) -> int:
        """U, for a number of KV heads."""
        return self.topology.size

    def computed(self, shape: Shape) -> Shape:
        filled = self._filled(shape)
        return replace(shape, heads=filled.heads, kv_heads=filled.all_kv_heads)

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> HeadPlacement:
        alone = self.degree(shape.kv_heads) == self.topology.size
        return self._placement(shape, mask, phase, share_kv=alone or bool(mask.special))

    def _placement(
        self, shape: Shape, mask: Mask, phase: Phase, *, share_kv: bool
    ) -> HeadPlacement:
        size, total = self.degree(shape.kv_heads), self.topology.size
        # Of one rank's heads, exchanged one after another; fewer where the mask hides much.
        work = flop_of_rank(shape, mask, total), shape.elements(total)
        filled, most = self._filled(shape), group_count(self.options.chunks, *work)
        of_rank = filled.heads // size, filled.sent_kv_heads // size
        # Sharing KV heads is worth it only where there would be no second group.
        share_kv = share_kv and of_rank[1] == 1
        exchanged = head_groups(*of_rank, most if size > 1 else 1, share_kv=share_kv)
        of_group = replace(shape, heads=exchanged[0].heads, kv_heads=exchanged[0].kv_heads)
        elements = 0 if mask.special else of_group.elements(total // size)
        inner = successive_groups(of_group.heads, of_group.kv_heads, 0, elements)
        groups = tuple(part.offset_into(group) for group in exchanged for part in inner)
        # Keys cross once for all groups that share them.
        sharing = sum(group.kv == exchanged[0].kv for group in exchanged)
        of_all = replace(of_group, heads=sharing * of_group.heads)
        of_teams = self.between_teams(Grouped(self.layout, size), groups, of_all, mask, phase)
        if sharing > 1 and of_teams.size > 1 and of_teams.relay:
            # Ranks do not hold all blocks until the next groups of heads.
            return self._placement(shape, mask, phase, share_kv=False)
        exchanges = tuple((group, len(inner)) for group in exchanged)
        keep = self.options.keep == "exchanged"
        return HeadPlacement(self.layout, size, of_teams, exchanges, keep)

    def between_teams(
        self, layout: Grouped, groups: tuple[HeadGroup, ...], shape: Shape, mask: Mask, phase: Phase
    ) -> BlockPlacement:
        """The teams, as if each were one rank. Args: shape: of a group of heads."""
        of_call = shape, mask, phase, self.rules, layout.members
        return ring_placement(self, layout, groups, *of_call)

    def _filled(self, shape: Shape) -> PaddedHeads:
        return PaddedHeads.of(shape.heads, shape.kv_heads, self.degree(shape.kv_heads))
