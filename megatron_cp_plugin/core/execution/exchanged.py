"""Executes attention by heads inside a team: all tokens of a head meet on one rank.

B batch, S local tokens, H query heads, G KV heads, D head dim, U ranks of a team, V KV heads that
are sent. H and G are filled up with zero heads where U ranks could not split them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from megatron_cp_plugin.core.algorithm import Call, Saved
from megatron_cp_plugin.core.blocks.assembly import assemble
from megatron_cp_plugin.core.comm import Communicator
from megatron_cp_plugin.core.execution import collective
from megatron_cp_plugin.core.execution.filled_heads import FilledHeads
from megatron_cp_plugin.core.execution.team import ExchangingTeam, Found, Named, Team
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.partial import GradientSum
from megatron_cp_plugin.core.pipeline import HeadGroup
from megatron_cp_plugin.core.plans.plan import OF_KEYS, Plan

_KEPT = ("q", "k", "v", "lse")


class BetweenTeams(Protocol):
    """Attention over the tokens of all teams, for some heads of this rank."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """As of `Algorithm`."""

    def differentiate(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, statistics: Statistics, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, where either out or delta is at hand."""


class Exchanged:
    """What one rank does, for one length."""

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[HeadGroup],
        between: BetweenTeams,
        channels: tuple[Communicator, Communicator],
        rank: int,
        heads: FilledHeads,
    ) -> None:
        """Args: plan: of forward or backward, under any mask. groups: exchanged at a time."""
        self._between, self._heads = between, heads
        first = rank // plan.shares * plan.shares
        members = range(first, first + plan.shares)
        width = max(sum(map(len, spans)) for spans in plan.spans)
        team = ExchangingTeam(
            *channels, assemble([plan.spans[member] for member in members], width)
        )
        self._teams: dict[bool, Team] = {False: team, True: team}
        mine = (m for m in plan.moves if m.source == rank and m.target in members)
        self._rounds = collective.rounds(mine, groups)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, keep: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Out and lse of the own queries; what was exchanged, if it is to be kept."""
        kept: list[Tensor] = []

        def attend(_: HeadGroup, x: Named, sums: Sequence[GradientSum]) -> Iterator[Found]:
            out, lse = self._between.forward(x["q"], x["k"], x["v"], call)[:2]
            if keep:
                kept.extend((x["q"], x["k"], x["v"], lse))
            yield slice(0, out.shape[1]), (out, lse)

        filled = self._filled({"q": q, "k": k, "v": v})
        out, lse = collective.forward(self._rounds, self._teams, **filled, compute=attend)
        return self._heads.own_queries(out), self._heads.own_queries(lse), kept

    def backward(
        self, dout: Tensor, given: Mapping[str, Tensor], kept: Sequence[Tensor], call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the own q, k and v. Args: given: these, out and lse; of what is kept only
        the number of heads counts.
        """

        def differentiate(_: HeadGroup, x: Named, sums: Sequence[GradientSum]) -> Iterator[Found]:
            statistics = Statistics(x["lse"], out=x.get("out"), delta=x.get("delta"))
            dq, *of_keys = self._between.differentiate(
                x["dout"], x["q"], x["k"], x["v"], statistics, call
            )
            if call.dkv:
                for total, gradient in zip(sums, of_keys, strict=True):
                    total.add(slice(0, gradient.shape[1]), gradient)
            yield slice(0, dq.shape[1]), (dq,)

        heads = self._heads
        numbers = {"q": heads.heads, "k": heads.sent_kv_heads, "v": heads.sent_kv_heads}
        dq, dk, dv = [
            dout.new_empty((*dout.shape[:2], number, given[name].shape[3]))
            for name, number in numbers.items()
        ]
        filled = self._filled({"out": given["out"]} if kept else given)
        by_group = [
            dict(zip(_KEPT, kept[start : start + len(_KEPT)], strict=True))
            for start in range(0, len(kept), len(_KEPT))
        ]
        collective.backward(
            self._rounds,
            self._teams,
            heads.fill_queries(dout),
            filled,
            (dq, dk, dv),
            call,
            differentiate,
            by_group,
        )
        return heads.own_queries(dq), heads.own_keys(dk), heads.own_keys(dv)

    def _filled(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """With zero heads and copies of KV heads."""
        fill, fill_keys = self._heads.fill_queries, self._heads.fill_keys
        return {name: (fill_keys if name in OF_KEYS else fill)(x) for name, x in tensors.items()}
