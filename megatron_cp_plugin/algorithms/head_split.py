"""Algorithms that split the heads among ranks: the base of ulysses and usp.

B batch, S local tokens, H query heads, G KV heads, D head dim, P ranks, U ranks of a team.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from torch import Tensor

from megatron_cp_plugin.algorithms.ring import Ring
from megatron_cp_plugin.core.algorithm import Algorithm, Call, Saved, group_counts, number
from megatron_cp_plugin.core.caching import cached_method
from megatron_cp_plugin.core.comm import Communicator, Phase
from megatron_cp_plugin.core.execution.exchanged import Exchanged
from megatron_cp_plugin.core.execution.filled_heads import FilledHeads
from megatron_cp_plugin.core.layout import Grouped
from megatron_cp_plugin.core.pipeline import HeadGroup, group_count, head_groups
from megatron_cp_plugin.core.placement import HeadPlacement
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology


class HeadSplit(Algorithm):
    """Attention by heads inside teams of ranks, and by a ring between teams.

    All tokens of one head meet on one rank by an all-to-all inside the team; results go back the
    same way. It is done by groups of heads: while one is computed, the next one comes and the last
    one's output leaves. KV heads that several ranks of a team need are sent to each, and their
    gradients are summed in float32. Where the ranks of a team cannot split the heads, heads of
    zeros are added to what is exchanged and computed, and taken off again.

    Attributes: ring_options: of the ring between teams.
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
    ring_options = Ring.Options(keep="local")

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self._rings: dict[int, tuple[tuple[Communicator, Communicator], Ring]] = {}

    @cached_property
    def _exchanged(self) -> Callable[[Shape, Phase], Exchanged]:
        # Looked up once a pass: at short lengths a step of training is bound by the host.
        return cached_method(self._make_exchanged, 64)

    @abstractmethod
    def degree(self, kv_heads: int) -> int:
        """U, for a number of KV heads."""

    def make_channels(self, shape: Shape) -> None:
        """See Algorithm.make_channels."""
        self._ring(shape)[1].make_channels(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward."""
        exchanged = self._exchanged(Shape.of(q, k, v, call.seq_len), "forward")
        keep = self.options.keep == "exchanged"
        out, lse, kept = exchanged.forward(q, k, v, call, keep=keep)
        if not keep:
            return out, lse, (q, k, v, out, lse)
        return out, lse, (*[x.new_empty((0, *x.shape[1:])) for x in (q, k, v)], out, *kept)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward."""
        q, k, v, out, *rest = saved  # but for out empty, if they are kept exchanged
        shape = replace(Shape.of(q, k, v, call.seq_len), batch=len(dout))
        given = {"q": q, "k": k, "v": v, "out": out}
        if self.options.keep == "local":
            given["lse"], rest = rest[0], []
        return self._exchanged(shape, "backward").backward(dout, given, rest, call)

    def computed(self, shape: Shape) -> Shape:
        """See Algorithm.computed."""
        filled = self._filled(shape)
        return replace(shape, heads=filled.heads, kv_heads=filled.all_kv_heads)

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> HeadPlacement:
        """See Algorithm.placement."""
        size, ring = self.degree(shape.kv_heads), self._ring(shape)[1]
        exchanged = self.exchanged_groups(shape)
        of_group = replace(shape, heads=exchanged[0].heads, kv_heads=exchanged[0].kv_heads)
        between = ring.placement(of_group, mask, phase)
        groups = tuple(inner.within(group) for group in exchanged for inner in between.groups)
        exchanges = tuple((group, len(between.groups)) for group in exchanged)
        keep = self.options.keep == "exchanged"
        return HeadPlacement(self.layout, size, replace(between, groups=groups), exchanges, keep)

    def exchanged_groups(self, shape: Shape) -> tuple[HeadGroup, ...]:
        """Of one rank's heads, exchanged one after another."""
        size, total = self.degree(shape.kv_heads), self.topology.size
        filled = self._filled(shape)
        most = group_count(self.options.chunks, shape.flop(total)) if size > 1 else 1
        # A ring would send shared KV heads once for each group. Otherwise sharing them is worth
        # it only where there would be no second group.
        of_rank = filled.heads // size, filled.sent_kv_heads // size
        return head_groups(*of_rank, most, share_kv=size == total and of_rank[1] == 1)

    def _filled(self, shape: Shape) -> FilledHeads:
        return FilledHeads.of(shape.heads, shape.kv_heads, self.degree(shape.kv_heads))

    def _ring(self, shape: Shape) -> tuple[tuple[Communicator, Communicator], Ring]:
        """Channels of this rank's team, and attention over the tokens of all teams, for this rank's
        heads; a collective operation the first time.
        """
        size, topology = self.degree(shape.kv_heads), self.topology
        if size not in self._rings:
            first = topology.rank // size * size
            team = topology.subgroup(range(first, first + size), "team")
            channels = team.channel("inward"), team.channel("outward")
            others = topology.subgroup(range(topology.rank % size, topology.size, size), "ring")
            ring = Ring(others, self.ring_options)
            ring.layout = Grouped(self.layout, size)
            self._rings[size] = channels, ring
        return self._rings[size]

    def _make_exchanged(self, shape: Shape, phase: Phase) -> Exchanged:
        channels, ring = self._ring(shape)
        plan = self.plan(shape, Mask(), phase, rank=self.topology.rank)
        groups, heads = self.exchanged_groups(shape), self._filled(shape)
        return Exchanged(plan, groups, ring, channels, self.topology.rank, heads)
