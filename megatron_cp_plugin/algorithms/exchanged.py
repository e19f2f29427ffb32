"""Attention by heads inside a team of ranks: all tokens of a head meet on one rank and go back.

B batch, S local tokens, H query heads, G KV heads, D head dim, U ranks of a team, V KV heads that
are sent. H and G are filled up with zero heads where U ranks could not split them.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from megatron_cp_plugin.algorithms.filled_heads import FilledHeads
from megatron_cp_plugin.algorithms.ring import Ring
from megatron_cp_plugin.core import collective
from megatron_cp_plugin.core.algorithm import Call
from megatron_cp_plugin.core.assembly import assemble
from megatron_cp_plugin.core.comm import Communicator
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.partial import GradientSum, accumulation_dtype
from megatron_cp_plugin.core.pipeline import HeadGroup
from megatron_cp_plugin.core.plan import Plan
from megatron_cp_plugin.core.team import ExchangingTeam, Found, Named, Team

_KEPT = ("q", "k", "v", "lse")


class Exchanged:
    """What one rank does, for one length.

    Attributes: ring: attention over the tokens of all teams, for some heads of this rank.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[HeadGroup],
        ring: Ring,
        channels: tuple[Communicator, Communicator],
        rank: int,
        heads: FilledHeads,
    ) -> None:
        """Args: plan: of forward or backward, under any mask. groups: exchanged at a time."""
        self.ring, self._heads = ring, heads
        first = rank // plan.shares * plan.shares
        members = range(first, first + plan.shares)
        width = max(sum(map(len, spans)) for spans in plan.spans)
        team = ExchangingTeam(
            *channels, assemble([plan.spans[member] for member in members], width)
        )
        self._teams: dict[bool, Team] = {False: team, True: team}
        mine = (m for m in plan.moves if m.source == rank and m.target in members)
        self._rounds = collective.rounds(mine, groups)
        self._sent_kv_heads = plan.heads.kv_heads * plan.shares

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, keep: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Out and lse of the own queries; what was exchanged, if it is to be kept."""
        kept: list[Tensor] = []

        def attend(_: HeadGroup, x: Named, sums: Sequence[GradientSum]) -> Iterator[Found]:
            out, lse = self.ring.forward(x["q"], x["k"], x["v"], call)[:2]
            if keep:
                kept.extend((x["q"], x["k"], x["v"], lse))
            yield slice(0, out.shape[1]), (out, lse)

        heads = self._heads
        q, k, v = heads.fill_queries(q), self._sent(k), self._sent(v)
        out, lse = collective.forward(self._rounds, self._teams, q, k, v, attend)
        return heads.own_queries(out), heads.own_queries(lse, 1), kept

    def backward(
        self, dout: Tensor, given: dict[str, Tensor], kept: Sequence[Tensor], call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the own q, k and v. Args: given: these, out and lse; of what is kept only
        the number of heads counts.
        """

        def differentiate(
            heads: HeadGroup, x: Named, sums: Sequence[GradientSum]
        ) -> Iterator[Found]:
            statistics = Statistics(x["lse"], out=x.get("out"), delta=x.get("delta"))
            dq, *of_keys = self.ring.differentiate(
                x["dout"], x["q"], x["k"], x["v"], statistics, call
            )
            if call.dkv:
                for total, gradient in zip(sums, of_keys, strict=True):
                    total.add(slice(0, gradient.shape[1]), gradient)
            yield slice(0, dq.shape[1]), (dq,)

        heads, sent = self._heads, self._sent_kv_heads
        gradients = {
            name: dout.new_empty((*dout.shape[:2], count, given[name[1]].shape[3]))
            for name, count in (("dq", heads.heads), ("dk", sent), ("dv", sent))
        }
        wanted = {
            name: x for name, x in gradients.items() if (call.dq if name == "dq" else call.dkv)
        }
        filled = {"out": heads.fill_queries(given["out"])}
        if not kept:
            filled["q"] = heads.fill_queries(given["q"])
            filled |= {name: self._sent(given[name]) for name in ("k", "v")}
            filled["lse"] = heads.fill_queries(given["lse"], 1)
        by_group = [
            dict(zip(_KEPT, kept[start : start + len(_KEPT)], strict=True))
            for start in range(0, len(kept), len(_KEPT))
        ]
        dout = heads.fill_queries(dout)
        collective.backward(
            self._rounds, self._teams, dout, filled, wanted, differentiate, by_group
        )
        dk, dv = (self._summed(gradients[name]) for name in ("dk", "dv"))
        return heads.own_queries(gradients["dq"]), dk, dv

    def _sent(self, x: Tensor) -> Tensor:
        """[B,S,G,D] -> [B,S,V,D]."""
        x = self._heads.fill_keys(x)
        copies = self._sent_kv_heads // x.shape[2]
        return x.repeat_interleave(copies, 2) if copies > 1 else x

    def _summed(self, gradient: Tensor) -> Tensor:
        """[B,S,V,D] -> [B,S,G,D]."""
        kv_heads = self._heads.all_kv_heads
        if gradient.shape[2] != kv_heads:
            wide = accumulation_dtype(gradient.dtype)
            parts = gradient.unflatten(2, (kv_heads, -1))
            gradient = parts.sum(3, dtype=wide).to(gradient.dtype)
        return self._heads.own_keys(gradient)
