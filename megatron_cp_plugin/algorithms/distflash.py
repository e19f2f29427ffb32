"""DISTFLASHATTN: balanced causal attention on contiguous chunks; idle ranks help the others.

Tokens keep their order, so that everything else in a model stays as it is.

B batch, S local tokens, H query heads, G KV heads, D head dim, P ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_cp_plugin.algorithms.work_placement import WorkPlacement
from megatron_cp_plugin.core.algorithm import PointToPoint, group_counts, number
from megatron_cp_plugin.core.blocks.visible_rows import rows_at_distances
from megatron_cp_plugin.core.call import Shape, head_groups
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.document_layout import PaddedDocuments
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.registry import register


@dataclass(frozen=True)
class HelpedPlacement(BlockPlacement):
    """In step t rank p takes the keys of rank p - t, straight from there.

    Where those are in its future, so that it has nothing of its own to do, it helps: it takes the
    queries of rank p - t (mod P) against its own keys. So floor(P/2) + 1 steps are enough; without
    helpers it is P. With an even P, the helpers of the last step would do what the owners do then.

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


@dataclass(frozen=True)
class EvenPlacement(BlockPlacement):
    """For documents that all ranks share evenly, so that all pairs of blocks are equal work.

    The pairs of rank p + t's queries and rank p's keys, for all p, are one step. In each step but
    the first, with a rank's own blocks, every rank computes one pair: either all queries go to the
    keys of their pairs, or all keys to the queries. So the work is equal either way, and what
    travels is what has fewer bytes. Blocks of queries come first: their results go back while
    others are computed.

    Attributes: helped: distances t of which the queries travel.
    """

    helped: frozenset[int] = frozenset()
    cyclic = True

    def place(self, query: int, key: int) -> Iterator[Place]:
        distance = (query - key) % self.size
        yield Place(key if distance in self.helped else query, self._steps[distance])

    @cached_property
    def _steps(self) -> dict[int, int]:
        """By distance: the rank's own blocks, then queries, then keys; neighbours first, to which a
        window reaches.
        """
        near = sorted(range(self.size), key=lambda t: min(t, self.size - t))
        order = sorted(near, key=lambda t: t > 0 and 1 + (t not in self.helped))
        return {distance: step for step, distance in enumerate(order)}


@register("distflash")
class DistFlash(PointToPoint):
    """DISTFLASHATTN with helpers in the forward and, in the same way, in the backward.

    An owner of queries fetches K, V and (backward) returns dK, dV. A helper fetches Q and returns
    (out, lse); in the backward it fetches Q, dO, delta, lse, returns dQ and keeps its own dK, dV.
    Everything goes straight from rank to rank. A returned gradient is that of one pair of blocks,
    as the kernel gave it; its owner sums in float32. Bytes of each rank: docs/data/bytes.md.

    Under windows, documents and spans ranks help by work, see WorkPlacement. With layout "thd"
    every rank computes one pair of blocks in each of P steps, see EvenPlacement; under span masks,
    of which nothing is known, it is helped by distance.

    Source: DISTFLASHATTN, Algorithms 1 and 2, section 3.2. Differs: helpers by work; the paper has
    causal masks alone.
    """

    @dataclass(frozen=True)
    class Options(PointToPoint.Options):
        """Options of distflash, beside those of PointToPoint.

        Attributes:
            balanced: ranks that wait under a causal mask help others (under others none waits);
                false gives the unbalanced ring of the paper (Algorithm 1).
            last_step: of an even number of ranks: "shared" by the owner of the queries and the rank
                that would wait, or computed by the "owner" alone while half of the ranks wait (the
                paper's rule; on 4 GPUs it takes 1.25 times as long).
            chunks: groups of heads that the backward takes one after another, at most as many as
                KV heads: two need less memory, and 1 to 2% more time.
            overlap: the next step's blocks come during the present one; false, for measurements:
                every message is waited for where it is posted.
            helpers: "work", ranks with more than the mean of what a window, documents or spans
                leave give some of it to ranks with less, see `WorkPlacement`; or "distance", who
                helps whom follows from their distance, as in the paper. The two are the same
                under other masks, and with layout "thd" or transport "peer", for which blocks
                must come from one rank at a time.
            layout: "contiguous", or "thd", see ring: no rank would wait, so that `balanced` says
                whether queries may travel in place of keys, and `last_step` is for spans alone, see
                EvenPlacement.
        """

        chunks: int = number(1, group_counts, least=0)
        balanced: bool = True
        overlap: bool = True
        last_step: Literal["owner", "shared"] = "shared"
        helpers: Literal["work", "distance"] = "work"
        layout: Literal["contiguous", "thd"] = "contiguous"

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self.overlap = options.overlap

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> BlockPlacement:
        chunks = 1 if phase == "forward" else self.options.chunks
        groups = head_groups(shape.heads, shape.kv_heads, chunks, share_kv=False)
        of_all = self.layout, self.topology.size, groups
        helping = self.options.balanced and mask.causal
        if isinstance(self.layout, PaddedDocuments) and mask.slices is None:
            helped = self._helped(shape, mask, phase) if helping else frozenset[int]()
            return EvenPlacement(*of_all, helped=helped)
        options = self.options
        of_work = options.balanced and options.helpers == "work" and options.transport != "peer"
        if of_work and mask.special and options.layout == "contiguous":
            return WorkPlacement(
                *of_all,
                seq_len=shape.seq_len,
                mask=mask,
                nodes=self.topology.nodes,
                row_bytes=shape.travel_bytes(),
            )
        shared = self.options.last_step == "shared"
        return HelpedPlacement(*of_all, helping=helping, shared=shared)

    def _helped(self, shape: Shape, mask: Mask, phase: Phase) -> frozenset[int]:
        """See EvenPlacement. Half way round the two are about equal, and what counts is what the
        rank sends that sends most.
        """
        there, back, keys = shape.query_width, shape.out_width, shape.kv_width
        if phase == "backward":
            there, back, keys = there + shape.out_width, shape.query_width, 2 * keys
        size = self.topology.size
        rows = rows_at_distances(self.layout.within(mask.followed), size, shape.seq_len, mask)
        found = []
        for distance, (of_queries, of_keys) in enumerate(rows):
            total = max if 2 * distance == size else sum
            # Rank p has sent the queries that rank p - t computes with.
            sent = of_queries[-distance:] + of_queries[:-distance]
            by_queries = (there * a + back * b for a, b in zip(sent, of_queries, strict=True))
            if distance and any(of_keys) and total(by_queries) <= total(keys * n for n in of_keys):
                found.append(distance)
        return frozenset(found)
