"""All-to-alls that turn a part of the tokens into a part of the heads: what ulysses and usp share.

B batch, S local tokens, H query heads, G KV heads, D head dim, P ranks, U ranks of a team.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

from torch import Tensor

from megatron_cp_plugin.algorithms.ring import Ring
from megatron_cp_plugin.core.algorithm import Algorithm, Call, Saved
from megatron_cp_plugin.core.assembly import Assembly, assemble, padded
from megatron_cp_plugin.core.comm import Communicator, Pending, Phase
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.layout import Grouped, Layout
from megatron_cp_plugin.core.partial import GradientSum, accumulation_dtype, delta_of
from megatron_cp_plugin.core.pipeline import HeadGroup, group_count, head_groups, pipeline
from megatron_cp_plugin.core.placement import HeadPlacement
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError

Block = tuple[Tensor, ...]
EVERYTHING = slice(None)


class HeadExchange:
    """All-to-alls inside a team of U ranks: their tokens' heads come to where they are computed.

    Attributes:
        size: U. order: of the team's tokens.
    """

    def __init__(self, inward: Communicator, outward: Communicator, order: Assembly) -> None:
        """Args: inward, outward: flows of messages to where heads are computed, and back."""
        self.size = inward.size
        self.order = order
        self._inward, self._outward = inward, outward

    def come(self, x: Tensor, heads: slice = EVERYTHING) -> Pending[Tensor]:
        """[B,S,U*h,D] -> [B,tokens of the team,those of this rank's h heads,D], contiguous."""
        blocks = x.unflatten(2, (self.size, -1))[:, :, :, heads].movedim(2, 0)
        coming = self._inward.all_to_all(padded(blocks, 2, self.order.width))
        return coming.then(lambda received: self.order.join(received, 1).contiguous())

    def leave(self, x: Tensor, target: Tensor, heads: slice = EVERYTHING) -> Pending[None]:
        """Sends [B,tokens of the team,heads,D] back to where the tokens are: to those heads of
        every rank's share in target [B,S,U*h,D].
        """
        under_way = self._outward.all_to_all(self.order.split(x, 1))
        place = target.unflatten(2, (self.size, -1))[:, :, :, heads]

        def finish(received: Tensor) -> None:
            place.copy_(received.movedim(0, 2)[:, : place.shape[1]])

        return under_way.then(finish)

    def come_rows(self, x: Tensor) -> Pending[Tensor]:
        """[B,U*h,S] -> [B,h,tokens of the team]."""
        blocks = x.unflatten(1, (self.size, -1)).movedim(1, 0)
        coming = self._inward.all_to_all(padded(blocks, 3, self.order.width))
        return coming.then(lambda received: self.order.join(received, 2))

    def leave_rows(self, x: Tensor, target: Tensor, heads: slice = EVERYTHING) -> Pending[None]:
        """As `leave`, with x [B,heads,tokens of the team] and target [B,U*h,S]."""
        under_way = self._outward.all_to_all(self.order.split(x, 2))
        place = target.unflatten(1, (self.size, -1))[:, :, heads]

        def finish(received: Tensor) -> None:
            place.copy_(received.movedim(0, 1)[..., : place.shape[-1]])

        return under_way.then(finish)


class _Team:
    """Ranks that split the heads among themselves, and the ring of one rank of each team.

    Attributes:
        size: U. inward, outward: flows of messages to where heads are computed and back.
        ring: attention over the tokens of all teams, for the heads of this rank.
    """

    def __init__(
        self, topology: Topology, size: int, layout: Layout, options: Ring.Options
    ) -> None:
        first = topology.rank // size * size
        team = topology.subgroup(range(first, first + size), "team")
        self.size = size
        self.members = tuple(range(first, first + size))
        self.inward = team.channel("inward")
        self.outward = team.channel("outward")
        ring = topology.subgroup(range(topology.rank % size, topology.size, size), "ring")
        self.ring = Ring(ring, options)
        self.ring.layout = Grouped(layout, size)


class HeadSplit(Algorithm):
    """Attention by heads inside teams of ranks, and by a ring between teams.

    All pieces of one head meet on one rank by an all-to-all inside the team; results go back the
    same way. It is done by groups of heads: while one is computed, the next one comes and the last
    one's output leaves. KV heads that several ranks of a team need are sent to each, and their
    gradients are summed in float32.

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

        chunks: int = 0
        keep: Literal["exchanged", "local"] = "exchanged"

    options: Options
    windows = True
    ring_options = Ring.Options()

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self.layout = self.layout_for(options)
        self._teams: dict[int, _Team] = {}

    @abstractmethod
    def degree(self, kv_heads: int) -> int:
        """U, for a number of KV heads."""

    def make_channels(self, shape: Shape) -> None:
        """See Algorithm.make_channels."""
        self._split(shape).ring.make_channels(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward."""
        split = self._split(Shape.of(q, k, v, call.seq_len))
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
        kept: list[Tensor] = []

        def work(group: HeadGroup, block: Block) -> Pending[None]:
            part, part_lse, _ = split.ring.forward(*triple(block), call)
            if self.options.keep == "exchanged":
                kept.extend((*block, part_lse))
            return _both(
                split.exchange.leave(part, out, group.q),
                split.exchange.leave_rows(part_lse, lse, group.q),
            )

        pipeline(split.groups, split.arrivals(q, k, v), work)
        if self.options.keep == "local":
            return out, lse, (q, k, v, out, lse)
        return out, lse, (*(x.new_empty((0, *x.shape[1:])) for x in (q, k, v)), out, *kept)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward."""
        exchanged = self.options.keep == "exchanged"
        q, k, v, out = saved[:4]  # but for out empty, if they are kept exchanged
        split = self._split(replace(Shape.of(q, k, v, call.seq_len), batch=len(dout)))
        rows = [delta_of(dout, out)] if exchanged else [delta_of(dout, out), saved[4]]
        arriving_rows = [split.exchange.come_rows(x) for x in rows]
        dq, dk, dv = (
            dout.new_empty((*dout.shape[:2], heads, x.shape[3]))
            for heads, x in zip(
                (q.shape[2], split.kv_heads, split.kv_heads), (q, k, v), strict=True
            )
        )
        douts = split.queries(dout)
        inputs = None if exchanged else split.arrivals(q, k, v)
        key_sums: list[GradientSum] = []
        all_rows: list[Tensor] = []

        def arrive(group: HeadGroup) -> Pending[Block]:
            coming = douts(group)
            if inputs is None:
                start = 4 + 4 * split.groups.index(group)
                return coming.then(lambda block: (*block, *saved[start : start + 4]))
            others = inputs(group)
            return coming.then(lambda block: (*block, *others.wait()))

        def work(group: HeadGroup, block: Block) -> Pending[None]:
            if not all_rows:
                all_rows.extend(x.wait() for x in arriving_rows)
            group_dout, q, k, v = block[:4]
            delta, lse = (x[:, group.q].contiguous() for x in (all_rows[0], all_rows[-1]))
            statistics = Statistics(block[4] if exchanged else lse, delta=delta)
            group_dq, *of_keys = split.ring.differentiate(group_dout, q, k, v, statistics, call)
            leaving: Pending[None] = Pending(lambda: None)
            if call.dq:
                leaving = split.exchange.leave(group_dq, dq, group.q)
            if not call.dkv:
                return leaving
            if group.first:
                key_sums[:] = GradientSum(k), GradientSum(v)
            for total, gradient in zip(key_sums, of_keys, strict=True):
                total.add(slice(0, gradient.shape[1]), gradient)
            if not group.last:
                return leaving
            own = [
                split.exchange.leave(total.result(), target, group.kv)
                for total, target in zip(key_sums, (dk, dv), strict=True)
            ]
            return _both(leaving, _both(*own))

        pipeline(split.groups, arrive, work)
        return dq, split.summed(dk), split.summed(dv)

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> HeadPlacement:
        """See Algorithm.placement."""
        split = self._split(shape)
        groups: list[HeadGroup] = []
        exchanges: list[tuple[HeadGroup, int]] = []
        first = split.groups[0]
        of_group = replace(shape, heads=first.heads, kv_heads=first.kv_heads)
        between = split.ring.placement(of_group, mask, phase)
        for group in split.groups:
            groups += (inner.within(group) for inner in between.groups)
            exchanges.append((group, len(between.groups)))
        return HeadPlacement(
            self.layout,
            split.size,
            replace(between, groups=tuple(groups)),
            tuple(exchanges),
            keep=self.options.keep == "exchanged",
        )

    def _split(self, shape: Shape) -> "_Split":
        size = self.degree(shape.kv_heads)
        if size not in self._teams:
            self._teams[size] = _Team(self.topology, size, self.layout, self.ring_options)
        team = self._teams[size]
        total, layout = self.topology.size, self.layout
        seq_len = shape.seq_len
        width = max(layout.length(rank, total, seq_len) for rank in range(total))
        order = assemble([layout.spans(rank, total, seq_len) for rank in team.members], width)
        chunks = group_count(self.options.chunks, shape.flop(total))
        return _Split(team, order, shape.heads, shape.kv_heads, chunks)


class _Split:
    """One attention's heads, split among the ranks of a team.

    Attributes:
        size: U. ring: computes a group of heads. exchange: of tokens and heads. kv_heads: those
        that are sent, each to one rank; as many as G or a multiple. groups: of the heads of one
        rank.
    """

    def __init__(
        self, team: _Team, order: Assembly, heads: int, kv_heads: int, chunks: int
    ) -> None:
        self.size = team.size
        self.ring = team.ring
        self.exchange = HeadExchange(team.inward, team.outward, order)
        self.kv_heads = lcm(kv_heads, team.size)
        self._copies = self.kv_heads // kv_heads
        # A ring would send shared KV heads once for each group. Otherwise sharing them is worth
        # it only where there would be no second group.
        share_kv = team.ring.topology.size == 1 and self.kv_heads == team.size
        self.groups = head_groups(
            heads // team.size,
            self.kv_heads // team.size,
            chunks if team.size > 1 else 1,
            share_kv=share_kv,
        )

    def arrivals(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[HeadGroup], Pending[Block]]:
        """Posts the exchange of a group's q, k, v; of k and v once for all groups with them."""
        if self._copies > 1:
            k, v = (x.repeat_interleave(self._copies, 2) for x in (k, v))
        held: Block = ()

        def arrive(group: HeadGroup) -> Pending[Block]:
            queries = self.exchange.come(q, group.q)
            keys = [self.exchange.come(x, group.kv) for x in (k, v)] if group.first else []

            def finish() -> Block:
                nonlocal held
                if keys:
                    held = tuple(x.wait() for x in keys)
                return (queries.wait(), *held)

            return Pending(finish)

        return arrive

    def queries(self, x: Tensor) -> Callable[[HeadGroup], Pending[Block]]:
        """Posts the exchange of a group's heads of a tensor like q."""
        return lambda group: self.exchange.come(x, group.q).then(lambda whole: (whole,))

    def summed(self, gradient: Tensor) -> Tensor:
        """The gradients [B,S,kv_heads,D] of sent KV heads, summed over copies: [B,S,G,D]."""
        if self._copies == 1:
            return gradient
        wide = accumulation_dtype(gradient.dtype)
        return gradient.unflatten(2, (-1, self._copies)).sum(3, dtype=wide).to(gradient.dtype)


def triple(block: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """A block that is three tensors, as that."""
    q, k, v = block
    return q, k, v


def _both(a: Pending[None], b: Pending[None]) -> Pending[None]:
    def finish() -> None:
        a.wait()
        b.wait()

    return Pending(finish)


def check_heads(name: str, heads: int, degree: int, instead: str) -> None:
    """Raises: ConfigError if the heads cannot be split among `degree` ranks.

    Args: instead: what works in its place, as the error proposes it.
    """
    if heads % degree:
        raise ConfigError(
            f"{name} needs query heads divisible by the {degree} ranks that split them, got "
            f"{heads} heads: use {instead}"
        )
