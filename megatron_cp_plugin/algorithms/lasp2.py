"""LASP with one all-gather of all states; each rank sums the decayed prefix itself.

B batch, H heads, D, E head dims, n runs of a rank, P ranks. States are [B,H,D,E].
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.linear.algorithm import LocalWork, StatePassing
from megatron_cp_plugin.core.linear.states import Route, RunStates
from megatron_cp_plugin.registry import register


@register("lasp2")
class Lasp2(StatePassing):
    """All states in one all-gather, which the work within the runs hides.

    Serves the layouts of the softmax algorithms too: on zigzag a rank holds two runs, with `thd`
    up to two of each document, so that layers of both kinds can share one model and one slicing of
    the batch. With n runs of the rank that has most, and states of `wide` bytes a number (4; 8 in
    float64), a rank sends in the forward, and again in the backward,

        (P-1) * n * B*H * (D*E + t) * wide bytes

    for any number of tokens; t is of a run's transition: 0 with constant rates, 1 with gates of
    heads, D with decays of channels, D*D for the delta rule.

    Source: LASP, section 2.2, equation 11. Differs: one collective instead of P - 1 hops;
    transitions other than constant rates.
    """

    @dataclass(frozen=True)
    class Options(Algorithm.Options):
        """Options of lasp2. Attributes: layout: which tokens each rank holds."""

        layout: Literal["contiguous", "zigzag", "thd", "documents"] = "contiguous"

    options: Options
    collective = True

    def carry(
        self,
        states: RunStates,
        first: Tensor | None,
        route: Route,
        local_work: LocalWork,
        *,
        to_the_end: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        counts, rank = route.counts, self.topology.rank
        gathering = self._states.all_gather(states.packed(max(counts)))
        local_work()
        gathered = states.unpacked(gathering.wait(), counts)
        before = sum(counts[:rank])
        arrived = gathered.reaching(
            route, first, range(before, before + counts[rank]), to_the_end=to_the_end
        )
        if to_the_end:
            return arrived[:-1], arrived[-1]
        return arrived, None

    def share(self, end: Tensor | None, like: Tensor, route: Route) -> Tensor:
        """See StatePassing.share: every rank has computed it."""
        assert end is not None
        return end
