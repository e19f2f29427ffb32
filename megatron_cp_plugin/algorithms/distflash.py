"""DISTFLASHATTN: balanced causal attention on contiguous chunks; idle ranks help the others.

Tokens keep their order, so that everything else in a model stays as it is.

B batch, S local tokens, H query heads, G KV heads, D head dim, P ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_cp_plugin.algorithms.work_placement import WorkPlacement
from megatron_cp_plugin.core.algorithm import PointToPoint, number
from megatron_cp_plugin.core.call import Shape, head_groups
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.registry import register


@dataclass(frozen=True)
class HelpedPlacement(BlockPlacement):
    """In step t rank p takes the keys of rank p - t, straight from there.

    Where these keys are in its future, so that it has no work of its own, it helps: it takes the
    queries of rank p - t (mod P) against its own keys. So floor(P/2) + 1 steps are enough; without
    helpers there are P. With an even P helpers and owners would do the same pairs in the last step.

    Source: DISTFLASHATTN, Algorithm 2 (ranks there count from 1). Differs: line 14 as printed
    lets nobody help in the last step of an odd P either, which would leave pairs out; Figure 1 and
    section 3.2 do not.

    Attributes:
        helping: ranks that would wait help.
        shared: they do half of the last step of an even P.
    """

    helping: bool = True
    shared: bool = True
    cyclic = True

    def place(self, query: int, key: int) -> Iterator[Place]:
        distance = (query - key) % self.size
        if self.helping and self.shared and 0 < 2 * distance == self.size:
            yield Place(query, distance, part=(1, 2))
            yield Place(key, distance, part=(0, 2))
        elif self.helping and 2 * distance > self.size:
            yield Place(key, self.size - distance)
        else:
            yield Place(query, distance)


@register("distflash")
class DistFlash(PointToPoint):
    """DISTFLASHATTN with helpers in the forward and, in the same way, in the backward.

    An owner of queries fetches K, V and (backward) returns dK, dV. A helper fetches Q and returns
    (out, lse); in the backward it fetches Q, dO, delta, lse, returns dQ and keeps its own dK, dV.
    Everything goes straight from rank to rank. A returned gradient is of one pair of blocks, as the
    kernel gave it; its owner sums in float32.

    Under windows, documents and spans ranks help by work, see WorkPlacement. With layout "thd", in
    which all pairs of blocks are equal work but under spans, nobody helps: keys travel, in P steps.

    Source: DISTFLASHATTN, Algorithms 1 and 2, section 3.2. Differs: helpers by work; the paper has
    causal masks alone.
    """

    @dataclass(frozen=True)
    class Options(PointToPoint.Options):
        """Options of distflash, beside those of PointToPoint.

        Attributes:
            last_step: of an even number of ranks: "shared" by the owner of the queries and the rank
                that would wait, or computed by the "owner" alone while half of the ranks wait (the
                paper's rule; on 4 GPUs it takes 1.25 times as long).
            chunks: groups of heads that the backward takes one after another, at most as many as
                KV heads: two need less memory, and 1 to 2% more time.
            helpers: "work": under a window, documents or spans, ranks with more than the mean work
                give some of it to ranks with less, see `WorkPlacement`; "distance": who helps whom
                follows from their distance, as in the paper; "none": the paper's unbalanced
                ring (Algorithm 1). Under other masks "work" is "distance". No rank helps without a
                causal mask, under which ranks would wait, or with layout "thd".
            layout: "contiguous", or "thd", see ring.
        """

        chunks: int = number(1, least=0)
        last_step: Literal["owner", "shared"] = "shared"
        helpers: Literal["work", "distance", "none"] = "work"
        layout: Literal["contiguous", "thd"] = "contiguous"

    options: Options

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> BlockPlacement:
        options, chunks = self.options, 1 if phase == "forward" else self.options.chunks
        groups = head_groups(shape.heads, shape.kv_heads, chunks, share_kv=False)
        of_all = self.layout, self.topology.size, groups
        helpers = "none" if options.layout == "thd" else options.helpers
        if helpers == "work" and mask.special:
            nodes, row_bytes = self.topology.nodes, shape.travel_bytes()
            return WorkPlacement(
                *of_all, seq_len=shape.seq_len, mask=mask, nodes=nodes, row_bytes=row_bytes
            )
        helping, shared = helpers != "none" and mask.causal, options.last_step == "shared"
        return HelpedPlacement(*of_all, helping=helping, shared=shared)
