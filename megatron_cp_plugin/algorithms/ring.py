"""Ring attention: blocks travel around a ring, and each rank computes the pairs it can see.

B batch, S local tokens, H query heads, G KV heads, D head dim, P ranks.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from typing import Literal

import numpy as np

from megatron_cp_plugin.core.algorithm import Algorithm, PointToPoint
from megatron_cp_plugin.core.blocks.visible_rows import rows_met
from megatron_cp_plugin.core.call import HeadGroup, Shape
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.layout import Layout, TokenMap
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.ranges import row_count
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.registry import register

Travelling = Literal["kv", "query"]
BackwardRule = Literal["auto", "kv", "query"]  # of the backward
Route = Literal["auto", "ring", "straight", "double"]

_SHORT = 2**25  # elements of a rank's q, up to which time goes by messages more than by memory
# Bytes of K and V of others that stay from one merged step for the backward, on the rank with most:
# fewer cost the host more time than they save (two H200), more take memory.
_KEPT = 2**24, 2**26
# Pairs that a rank computes in a relay in the time in which a row crosses to another node and back:
# 32:8 heads of 128 on H100 with a card of 400 Gbit/s; a relay takes 2.4 times its kernels there.
_CROSSING = 1_300


@dataclass(frozen=True)
class RingPlacement(BlockPlacement):
    """Every block goes round the ring, and is computed with at every rank that receives it.

    KV blocks go up (rank r to r + 1), query blocks down, so that with a causal mask on a contiguous
    layout the ranks that need a block come first.

    Attributes:
        travelling: the blocks that go round.
        retains: every rank keeps the block of K and V that its forward has last; the backward
            begins with it, and blocks take the same hops in reverse.
        reverse: the placement is of such a backward.
    """

    travelling: Travelling = "kv"
    retains: bool = False
    reverse: bool = False
    relay = True
    cyclic = True

    def place(self, query: int, key: int) -> Iterator[Place]:
        """See BlockPlacement.place: after as many hops as the blocks are apart."""
        hops = (query - key) % self.size
        step = self.size - 1 - hops if self.reverse else hops
        yield Place(query if self.travelling == "kv" else key, step)

    def pairs_of(self, rank: int) -> Iterator[tuple[int, int]]:
        for other in range(self.size):
            yield (rank, other) if self.travelling == "kv" else (other, rank)

    def retained_by(self, owner: int) -> int | None:
        return (owner - 1) % self.size if self.retains else None


@dataclass(frozen=True)
class StraightPlacement(RingPlacement):
    """The same pairs in the same steps, but blocks and gradients go straight from rank to rank.

    With a causal mask on a contiguous layout the busiest one sends about half as much.
    """

    keeps_keys: range = range(0)
    relay = False


@dataclass(frozen=True)
class DoubleRingPlacement(RingPlacement):
    """Rings inside nodes, and rings of the ranks that have the same place in their nodes.

    A block goes once to each other node, during all the steps in which it is passed on inside one:
    so every network card of a node is used, and each carries a block a node, not one a step.

    Source: LoongTrain, Double-Ring-Attention. Differs: gradients are summed inside a node and sent
    straight to their owner.

    Attributes: nodes: of each rank; equally many ranks on each.
    """

    nodes: tuple[int, ...] = ()
    cyclic = False

    def place(self, query: int, key: int) -> Iterator[Place]:
        (of_query, first), (of_key, second) = self._places[query], self._places[key]
        outer = (of_query - of_key) % (self.size // self.latency)
        inner = (first - second) % self.latency
        yield Place(query if self.travelling == "kv" else key, outer * self.latency + inner)

    def node_segment(self, rank: int) -> int:
        """See BlockPlacement.node_segment: the node."""
        return self.nodes[rank]

    @cached_property
    def latency(self) -> int:
        """See BlockPlacement.latency: as many steps as a node has ranks."""
        return self.nodes.count(self.nodes[0])

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        """Of each rank the number of its node, and its place in there."""
        places = {node: (number, count()) for number, node in enumerate(dict.fromkeys(self.nodes))}
        return tuple((places[node][0], next(places[node][1])) for node in self.nodes)


@lru_cache(maxsize=16)  # both passes of a micro-batch have the same
def best_route(
    layout: Layout, size: int, seq_len: int, mask: Mask, nodes: tuple[int, ...]
) -> Literal["ring", "straight", "double"]:
    """The route of `auto`.

    Under a mask with documents, spans or a window a relay waits in every step for the rank with
    the most work: there it is "straight", unless the rows that some rank would exchange with other
    nodes are more than all other ranks of its node hold, and cross in more time than a relay takes.
    Then, and under all other masks, it is "double" between nodes and "ring" inside one.

    Args: nodes: of each rank.
    """
    of_nodes = Counter(nodes)
    local = max(of_nodes.values())
    relay: Literal["ring", "double"] = "ring"
    if 1 < len(of_nodes) < size and min(of_nodes.values()) == local:
        relay = "double"
    if not mask.special:
        return relay
    if relay == "ring":
        return "straight"
    rows = np.zeros((size, size), np.int64)  # [owner, other]
    layout = layout.for_documents(mask.resolved)
    for owner, others in enumerate(rows_met(layout, size, seq_len, mask, 1)):
        for other, met in others.items():
            if nodes[owner] != nodes[other]:
                rows[owner, other] = row_count(met)
    most = max(rows.sum(0).max(), rows.sum(1).max())
    least = max((local - 1) * seq_len, mask.bands.area(seq_len) / _CROSSING)
    return relay if most * size > least else "straight"


def ring_placement(
    algorithm: Algorithm,
    layout: Layout,
    groups: tuple[HeadGroup, ...],
    shape: Shape,
    mask: Mask,
    phase: Phase,
    rules: "Ring.Options",
    members: int = 1,
) -> RingPlacement:
    """A ring of ranks, or of teams. A collective operation the first time.

    Args: members: consecutive ranks that are a team.

    Raises: ConfigError if nodes have unequally many ranks, and the route does not serve that.
    """
    topology, e = algorithm.topology, shape.element_bytes
    size = topology.size // members
    nodes = topology.nodes[topology.rank % members :: members]
    backward, route = rules.backward, rules.route
    if route == "auto":
        route = best_route(layout, size, shape.seq_len, mask, nodes)
    passed_on = size > 2 and route != "straight"  # else gradients are no sums
    wide = passed_on and rules.gradients == "float32"
    if backward == "auto":
        # The blocks with fewer bytes a hop: K, V, dK, dV; or Q, dO, dQ and rows of lse and delta.
        g = shape.wide_bytes if wide else e
        of_queries = (shape.query_width + shape.out_width) * e + shape.query_width * g
        of_queries += 2 * shape.heads * shape.wide_bytes
        backward = "kv" if shape.kv_width * (e + g) <= of_queries else "query"
    retains = (
        (rules.keep, route, backward, len(groups), members) == ("auto", "ring", "kv", 1, 1)
        # It pays where all ranks save the same hop, and K and V are small.
        and size > 1
        and shape.elements(size) <= _SHORT
        and 4 * shape.kv_heads <= shape.heads
        and not mask.special
        and TokenMap.of(layout, size, shape.seq_len).all_see_all(mask.causal)
    )
    of_all = layout, size, groups, wide, "kv" if phase == "forward" else backward
    of_pass = *of_all, retains, retains and phase == "backward"
    if route == "straight":
        same = sum(group.first for group in groups) == 1  # all groups have the same keys
        stay = (rules.keep, backward, same) == ("auto", "kv", True)
        least, most = (n // (shape.batch * shape.kv_width * e) for n in _KEPT)
        return StraightPlacement(*of_pass, range(least, most + 1) if stay else range(0))
    if route == "ring":
        return RingPlacement(*of_pass)
    if len(set(ranks := Counter(nodes).values())) > 1:
        raise ConfigError(
            f"{algorithm.name} route double needs as many ranks on one node as on another, got "
            f"{', '.join(map(str, ranks))}: use route ring"
        )
    return DoubleRingPlacement(*of_pass, tuple(nodes))


@register("ring")
class Ring(PointToPoint):
    """BurstAttention on contiguous chunks: no permutation, but unequal causal work.

    The next block arrives while a rank computes with the present one; on route ring it never holds
    more than two.
    Where every rank sees every block, a forward is P-1 hops of K, V; a backward P-1 hops of K, V,
    dK, dV (rule "kv") or of Q, dO, dQ, delta, lse (rule "query"). Memory: docs/algorithms.md.

    Source: BurstAttention, Algorithms 1 (GAO), 2 and 3. Differs: out and all gradients are summed
    in float32; blocks that are wholly in the causal future are not sent on; dQ travels on a channel
    of its own; a KV-rotating backward where that moves fewer bytes.
    """

    @dataclass(frozen=True)
    class Options(PointToPoint.Options):
        """Options of the ring, beside those of PointToPoint.

        Attributes:
            backward: blocks that travel then: "kv" (K, V, dK, dV), "query" (Q, dO, delta, lse, dQ),
                or "auto", the one with fewer bytes for this ratio of heads.
            keep: tensors that stay for the backward: "local", the rank's own; "auto", also K and V
                of others, where that pays: of a causal relay the block that came last; under
                documents, spans and windows all that came, if the busiest rank gets 16 to 64 MiB.
            gradients: dtype in which sums of gradients are passed on: "float32", or "model", the
                dtype of q. Gradients that are no sums, as between two ranks, travel in q's dtype.
            layout: "contiguous", or "thd": zigzag inside each document, all of lengths that are
                multiples of 2P (`core.document_layout.PaddedDocuments`).
            route: "ring", from each rank to the next; "straight", from the owner to every rank that
                needs the block, and its gradients straight back; "double", once to each other node
                and from rank to rank inside nodes; "auto": see `best_route`.
        """

        backward: BackwardRule = "auto"
        keep: Literal["auto", "local"] = "auto"
        gradients: Literal["float32", "model"] = "float32"
        layout: Literal["contiguous", "thd"] = "contiguous"
        route: Route = "auto"

    options: Options

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> RingPlacement:
        groups = self.head_groups(shape, mask)
        return ring_placement(self, self.layout, groups, shape, mask, phase, self.options)


@register("zigzag")
class ZigzagRing(Ring):
    """The ring on chunks p and 2P-1-p: equal causal work; Megatron's own layout."""

    @dataclass(frozen=True)
    class Options(Ring.Options):
        """Options of zigzag.

        Attributes: layout: "zigzag"; "documents": equal work for any documents or spans;
            documents are whole, or on few ranks (`core.balance`); "thd": as for ring;
            "contiguous".
        """

        layout: Literal["zigzag", "documents", "thd", "contiguous"] = "zigzag"  # type: ignore[assignment]

    options: Options
