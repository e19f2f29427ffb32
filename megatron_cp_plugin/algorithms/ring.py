"""Ring attention: blocks travel around a ring, and each rank computes the pairs it can see.

B batch, S local tokens, H query heads, G KV heads, D head dim, P ranks.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_cp_plugin.algorithms.ring_routes import (
    RingPlacement,
    Route,
    Rule,
    Rules,
    nodes_for,
    ring_placement,
)
from megatron_cp_plugin.core.algorithm import PointToPoint
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.layout import Contiguous, Layout
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.registry import register


class Ring(PointToPoint):
    """BurstAttention: GAO forward (Algorithm 1), either rule of backward, double-buffered.

    The next block arrives while a rank computes with the present one; it never holds more than two.
    Where every rank sees every block, a forward is P-1 hops of K, V; a backward P-1 hops of K, V,
    dK, dV (rule "kv") or of Q, dO, dQ, delta, lse (rule "query").

    Kept for the backward: q, k, v, out and lse of the rank's own tokens, and what `keep` adds.

    Beside these and its results a rank holds at most, with elements of 2 bytes, q = 2*B*H*S*D bytes
    of queries and kv = 4*B*G*S*D of keys and values,

                            one group of heads    n > 1 groups (`chunks`)
        forward             3q + 2kv              (4q + 3kv) / n
        backward, "kv"      1.5q + 7kv            (2.5q + 9kv) / n
        backward, "query"   9q + 1.5kv            (12q + 2.5kv) / n

    without rows of lse and delta, and without what kernels need; less with kernels that write
    results where they belong (flash4). Over peer memory receive buffers stay between calls.

    Source: BurstAttention, Algorithms 1, 2 and 3. Differs: out and all gradients are summed in
    float32; blocks that are wholly in the causal future are not sent on; dQ travels on a channel
    of its own; a KV-rotating backward where that moves fewer bytes.
    """

    name = "ring"
    layout: Layout = Contiguous()

    @dataclass(frozen=True)
    class Options(PointToPoint.Options):
        """Options of the ring, beside those of PointToPoint.

        Attributes:
            backward: what travels in the backward: "kv" (K, V, dK, dV), "query" (Q, dO, delta,
                lse, dQ), or "auto", the one with fewer bytes for this ratio of heads.
            keep: what stays for the backward: "local", the rank's own tensors; "auto", also K and V
                of the block that came last, where `worth_retaining` says so. The backward begins
                with that block then, which saves a hop of K and V.
            gradients: dtype in which sums of gradients are passed on: "float32", or "model", the
                dtype of q. Gradients that are no sums, as between two ranks, travel in that of q.
            route: "ring", from each rank to the next; "straight", from the owner to every rank that
                needs the block, and its gradients straight back; "double", once to each other node
                and from rank to rank inside nodes.
        """

        backward: Rule = "auto"
        keep: Literal["auto", "local"] = "auto"
        gradients: Literal["float32", "model"] = "float32"
        route: Route = "ring"

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self._nodes = nodes_for(self.name, topology, options.route)

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> RingPlacement:
        """See Algorithm.placement."""
        options, groups = self.options, self.head_groups(shape, mask)
        rules = Rules(options.backward, options.keep, options.gradients, options.route)
        return ring_placement(self.layout, self._nodes, groups, shape, mask, phase, rules)


@register("ring")
class BurstRing(Ring):
    """BurstAttention's ring on contiguous chunks: no permutation, but unequal causal work."""

    @dataclass(frozen=True)
    class Options(Ring.Options):
        """Options of ring.

        Attributes: layout: "contiguous", or "thd": zigzag inside each document, all of lengths
            that are multiples of 2P (`core.layouts.document_layout.PaddedDocuments`).
        """

        layout: Literal["contiguous", "thd"] = "contiguous"

    options: Options


@register("zigzag")
class ZigzagRing(Ring):
    """The ring on chunks p and 2P-1-p: equal causal work; Megatron's own layout."""

    @dataclass(frozen=True)
    class Options(Ring.Options):
        """Options of zigzag.

        Attributes: layout: "zigzag"; "documents": equal work whatever the documents, or spans;
            documents are whole, or on few ranks (`core.layouts.balance`); "thd": as for ring;
            "contiguous".
        """

        layout: Literal["zigzag", "documents", "thd", "contiguous"] = "zigzag"

    options: Options
