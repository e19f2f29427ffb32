"""Algorithms that split the heads among ranks: what ulysses and usp share.

B batch, S local tokens, H query heads, G KV heads, D head dim, P ranks, U ranks of a team, V KV
heads that are sent.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

from torch import Tensor

from megatron_cp_plugin.algorithms.ring import Ring
from megatron_cp_plugin.core import collective
from megatron_cp_plugin.core.algorithm import Algorithm, Call, Saved
from megatron_cp_plugin.core.assembly import assemble
from megatron_cp_plugin.core.caching import cached_method
from megatron_cp_plugin.core.comm import Communicator, Phase
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.layout import Grouped
from megatron_cp_plugin.core.partial import GradientSum, accumulation_dtype
from megatron_cp_plugin.core.pipeline import HeadGroup, group_count, head_groups
from megatron_cp_plugin.core.placement import HeadPlacement
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError


class HeadSplit(Algorithm):
    """Attention by heads inside teams of ranks, and by a ring between teams.

    All tokens of one head meet on one rank by an all-to-all inside the team; results go back the
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
    ring_options = Ring.Options(keep="local")

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self.layout = self.layout_for(options)
        self._rings: dict[int, tuple[tuple[Communicator, Communicator], Ring]] = {}
        # Looked up once a pass: at short lengths a step of training is bound by the host.
        self._team = cached_method(self._make_team, 64)
        self._rounds = cached_method(self._make_rounds, 64)

    @abstractmethod
    def degree(self, kv_heads: int) -> int:
        """U, for a number of KV heads."""

    def make_channels(self, shape: Shape) -> None:
        """See Algorithm.make_channels."""
        self._ring(shape)[1].make_channels(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward."""
        shape = Shape.of(q, k, v, call.seq_len)
        ring, keeps = self._ring(shape)[1], self.options.keep == "exchanged"
        kept: list[Tensor] = []

        def attend(
            _: HeadGroup, x: collective.Named, sums: Sequence[GradientSum]
        ) -> Iterator[collective.Rows]:
            out, lse = ring.forward(x["q"], x["k"], x["v"], call)[:2]
            if keeps:
                kept.extend((x["q"], x["k"], x["v"], lse))
            yield slice(0, out.shape[1]), (out, lse)

        plan, teams = self._rounds(shape, "forward"), self._team(shape)
        k_sent, v_sent = self._copied(k, shape), self._copied(v, shape)
        out, lse = collective.forward(plan, teams, q, k_sent, v_sent, attend)
        if not keeps:
            return out, lse, (q, k, v, out, lse)
        return out, lse, (*(x.new_empty((0, *x.shape[1:])) for x in (q, k, v)), out, *kept)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward."""
        q, k, v, out = saved[:4]  # but for out empty, if they are kept exchanged
        shape = replace(Shape.of(q, k, v, call.seq_len), batch=len(dout))
        ring = self._ring(shape)[1]

        def differentiate(
            heads: HeadGroup, x: collective.Named, sums: Sequence[GradientSum]
        ) -> Iterator[collective.Rows]:
            statistics = Statistics(x["lse"], out=x.get("out"), delta=x.get("delta"))
            dq, *of_keys = ring.differentiate(x["dout"], x["q"], x["k"], x["v"], statistics, call)
            if call.dkv:
                for total, gradient in zip(sums, of_keys, strict=True):
                    total.add(slice(0, gradient.shape[1]), gradient)
            yield slice(0, dq.shape[1]), (dq,)

        plan, teams = self._rounds(shape, "backward"), self._team(shape)
        kept: list[dict[str, Tensor]] = []
        given = {"out": out}
        if self.options.keep == "local":
            given |= {"q": q, "k": self._copied(k, shape), "v": self._copied(v, shape)}
            given["lse"] = saved[4]
        else:
            each = [saved[start : start + 4] for start in range(4, len(saved), 4)]
            kept = [dict(zip(("q", "k", "v", "lse"), x, strict=True)) for x in each]
        sent = self._sent_kv_heads(shape)
        dq, dk, dv = (
            dout.new_empty((*dout.shape[:2], heads, x.shape[3]))
            for heads, x in ((shape.heads, q), (sent, k), (sent, v))
        )
        targets = {"dq": dq} if call.dq else {}
        targets |= {"dk": dk, "dv": dv} if call.dkv else {}
        collective.backward(plan, teams, dout, given, targets, differentiate, kept)
        return dq, self._summed(dk, shape), self._summed(dv, shape)

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> HeadPlacement:
        """See Algorithm.placement."""
        size, ring, sent = (
            self.degree(shape.kv_heads),
            self._ring(shape)[1],
            self._sent_kv_heads(shape),
        )
        most = group_count(self.options.chunks, shape.flop(self.topology.size)) if size > 1 else 1
        # A ring would send shared KV heads once for each group. Otherwise sharing them is worth
        # it only where there would be no second group.
        share_kv = ring.topology.size == 1 and sent == size
        exchanged = head_groups(shape.heads // size, sent // size, most, share_kv=share_kv)
        of_group = replace(shape, heads=exchanged[0].heads, kv_heads=exchanged[0].kv_heads)
        between = ring.placement(of_group, mask, phase)
        groups = tuple(inner.within(group) for group in exchanged for inner in between.groups)
        exchanges = tuple((group, len(between.groups)) for group in exchanged)
        keep = self.options.keep == "exchanged"
        return HeadPlacement(self.layout, size, replace(between, groups=groups), exchanges, keep)

    def _ring(self, shape: Shape) -> tuple[tuple[Communicator, Communicator], Ring]:
        """Channels of this rank's team, and attention over the tokens of all teams, for this rank's
        heads; a collective operation the first time.
        """
        size, topology = self.degree(shape.kv_heads), self.topology
        if size not in self._rings:
            team = topology.subgroup(self._members(size), "team")
            channels = team.channel("inward"), team.channel("outward")
            others = topology.subgroup(range(topology.rank % size, topology.size, size), "ring")
            ring = Ring(others, self.ring_options)
            ring.layout = Grouped(self.layout, size)
            self._rings[size] = channels, ring
        return self._rings[size]

    def _members(self, size: int) -> range:
        first = self.topology.rank // size * size
        return range(first, first + size)

    def _make_team(self, shape: Shape) -> dict[bool, collective.Team]:
        total, layout = self.topology.size, self.layout
        spans = [layout.spans(rank, total, shape.seq_len) for rank in range(total)]
        members = [spans[rank] for rank in self._members(self.degree(shape.kv_heads))]
        order = assemble(members, max(sum(map(len, own)) for own in spans))
        team = collective.ExchangingTeam(*self._ring(shape)[0], order)
        return {False: team, True: team}

    def _make_rounds(self, shape: Shape, phase: Phase) -> tuple[collective.Round, ...]:
        """What is exchanged inside the team, with every mask."""
        members, rank = self._members(self.degree(shape.kv_heads)), self.topology.rank
        moves = self.plan(shape, Mask(), phase).moves
        groups = [group for group, _ in self.placement(shape, Mask(), phase).exchanges]
        mine = (move for move in moves if move.source == rank and move.target in members)
        return collective.rounds(mine, groups)

    def _sent_kv_heads(self, shape: Shape) -> int:
        """V: each is sent to one rank; as many as G or a multiple."""
        return lcm(shape.kv_heads, self.degree(shape.kv_heads))

    def _copied(self, x: Tensor, shape: Shape) -> Tensor:
        """[B,S,G,D] -> [B,S,V,D]."""
        copies = self._sent_kv_heads(shape) // shape.kv_heads
        return x.repeat_interleave(copies, 2) if copies > 1 else x

    def _summed(self, gradient: Tensor, shape: Shape) -> Tensor:
        """[B,S,V,D] -> [B,S,G,D]."""
        if gradient.shape[2] == shape.kv_heads:
            return gradient
        wide = accumulation_dtype(gradient.dtype)
        copies = gradient.unflatten(2, (shape.kv_heads, -1))
        return copies.sum(3, dtype=wide).to(gradient.dtype)


def check_heads(name: str, heads: int, degree: int, instead: str = "usp with ulysses={}") -> None:
    """Raises: ConfigError if the heads cannot be split among `degree` ranks.

    Args: instead: another algorithm; {}: the largest degree that can.
    """
    if heads % degree:
        largest = max(n for n in range(1, degree) if heads % n == 0)
        raise ConfigError(
            f"{name} needs query heads divisible by the {degree} ranks that split them, got "
            f"{heads} heads: the largest usable degree is {largest}; use that, or "
            f"--context-parallel-algo {instead.format(largest)}"
        )
