"""DeepSpeed-Ulysses: an all-to-all gives each rank all tokens of some of the heads."""

from dataclasses import dataclass
from typing import Literal

from megatron_cp_plugin.algorithms.head_split import HeadSplit
from megatron_cp_plugin.registry import register


@register("ulysses")
class Ulysses(HeadSplit):
    """DeepSpeed-Ulysses: all ranks are one team, and each computes H/P heads of all tokens.

    With S = N/P tokens a rank, elements of e bytes, rows of w, and V = lcm(G, P) KV heads sent, a
    rank sends B*S*(P-1)/P times 2HDe + 2VDe + Hw, forward and backward alike; with keep=local
    HDe + 2VDe + Hw more in the backward. Where P does not divide H, H and G are those that heads of
    zeros fill up to, here and below: 33:33 are 36:36 on 4 ranks, 33:11 are 36:12, 2:2 are 8:8 on 8.

    Kept for the backward: out of the rank's own tokens, and q, k, v, lse as they were exchanged,
    as large as the local ones (k and v V/G times as large); with keep=local the local ones. Beside
    these and its results a rank holds at most, with n groups of heads (`chunks`), B*S*D*e/n times

        forward   2 * (H + 2V) + 3 * H
        backward  2 * (2H + 2V) + 3 * (H + 2V)

    which are two groups that come, and results before, in and after the network. Where tokens must
    be put in order (zigzag) a group is there twice for a moment.

    Source: DeepSpeed-Ulysses. Differs: pipelined by groups of heads; any number of heads.
    """

    @dataclass(frozen=True)
    class Options(HeadSplit.Options):
        """Options of ulysses.

        Attributes: layout: "contiguous", where nothing needs to be put in order; "zigzag",
            Megatron's own; or "thd", see ring.
        """

        layout: Literal["contiguous", "zigzag", "thd"] = "contiguous"

    options: Options

    def degree(self, kv_heads: int) -> int:
        """See HeadSplit.degree."""
        return self.topology.size
