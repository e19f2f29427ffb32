"""Algorithms that split the heads among ranks: the base of ulysses and usp.

B batch, S local tokens, H query heads, G KV heads, D head dim, P ranks, U ranks of a team.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

from megatron_cp_plugin.algorithms.ring_routes import Rules, nodes_for, ring_placement
from megatron_cp_plugin.core.algorithm import Algorithm, group_counts, number
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.execution.padded_heads import PaddedHeads
from megatron_cp_plugin.core.head_groups import (
    HeadGroup,
    group_count,
    head_groups,
    successive_groups,
)
from megatron_cp_plugin.core.layout import Grouped
from megatron_cp_plugin.core.placement import HeadPlacement
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask


class HeadSplit(Algorithm):
    """Attention by heads inside teams of ranks, and by a ring between teams.

    All tokens of one head meet on one rank by an all-to-all inside the team; results go back the
    same way. It is done by groups of heads: while one is computed, the next one comes and the last
    one's output leaves. KV heads that several ranks of a team need are sent to each, and their
    gradients are summed in float32. Where the ranks of a team cannot split the heads, heads of
    zeros are added to what is exchanged and computed, and taken off again.

    Attributes: rules: of the ring between teams.
    """

    @dataclass(frozen=True)
    class Options(Algorithm.Options):
        """Options of all that split heads.

        Attributes:
            chunks: groups of heads that are pipelined, at most; 0: 4, or fewer where that would be
                too little work for each.
            keep: what is kept for the backward: q, k, v as "exchanged", or the "local" ones, which
                are exchanged again. Local ones cost nothing where checkpointing recomputes them.
        """

        chunks: int = number(0, group_counts, least=0)
        keep: Literal["exchanged", "local"] = "exchanged"

    options: Options
    windows = True
    rules = Rules()

    @abstractmethod
    def degree(self, kv_heads: int) -> int:
        """U, for a number of KV heads."""

    def computed(self, shape: Shape) -> Shape:
        """See Algorithm.computed."""
        filled = self._filled(shape)
        return replace(shape, heads=filled.heads, kv_heads=filled.all_kv_heads)

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> HeadPlacement:
        """See Algorithm.placement."""
        size, exchanged = self.degree(shape.kv_heads), self.exchanged_groups(shape)
        nodes = nodes_for(self.name, self.topology, self.rules.route, size)
        of_group = replace(shape, heads=exchanged[0].heads, kv_heads=exchanged[0].kv_heads)
        elements = 0 if mask.special else of_group.elements(len(nodes))
        inner = successive_groups(of_group.heads, of_group.kv_heads, 0, elements)
        groups = tuple(part.within(group) for group in exchanged for part in inner)
        layout = Grouped(self.layout, size)
        between = ring_placement(layout, nodes, groups, of_group, mask, phase, self.rules)
        exchanges = tuple((group, len(inner)) for group in exchanged)
        keep = self.options.keep == "exchanged"
        return HeadPlacement(self.layout, size, between, exchanges, keep)

    def exchanged_groups(self, shape: Shape) -> tuple[HeadGroup, ...]:
        """Of one rank's heads, exchanged one after another."""
        size, total = self.degree(shape.kv_heads), self.topology.size
        filled = self._filled(shape)
        most = group_count(self.options.chunks, shape.flop(total)) if size > 1 else 1
        # A ring would send shared KV heads once for each group. Otherwise sharing them is worth
        # it only where there would be no second group.
        of_rank = filled.heads // size, filled.sent_kv_heads // size
        return head_groups(*of_rank, most, share_kv=size == total and of_rank[1] == 1)

    def _filled(self, shape: Shape) -> PaddedHeads:
        return PaddedHeads.of(shape.heads, shape.kv_heads, self.degree(shape.kv_heads))
