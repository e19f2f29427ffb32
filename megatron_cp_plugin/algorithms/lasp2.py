"""LASP with one all-gather of all states; each rank sums the decayed prefix itself.

B batch, H heads, D, E head dims, n runs of a rank, P ranks. States are [B,H,D,E].
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.linear.decay import Decay, combine
from megatron_cp_plugin.core.linear.route import Route
from megatron_cp_plugin.core.linear.state_passing import LocalWork, Message, StatePassing
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.registry import register


@register("lasp2")
class Lasp2(StatePassing):
    """All states in one all-gather, which the work within the runs hides.

    Serves the layouts of the softmax algorithms too: on zigzag a rank holds two runs, so that
    layers of both kinds can share one model and one slicing of the batch.

    Source: LASP, section 2.2, equation 11. Differs: one collective instead of P - 1 hops.
    """

    @dataclass(frozen=True)
    class Options(Algorithm.Options):
        """Options of lasp2. Attributes: layout: which tokens each rank holds."""

        layout: Literal["contiguous", "zigzag"] = "contiguous"

    options: Options
    collective = True

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self._states = topology.channel("states")

    def carry(
        self,
        states: Tensor,
        first: Tensor | None,
        route: Route,
        decay: Decay,
        local_work: LocalWork,
        *,
        to_the_end: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See StatePassing.carry."""
        gathering = self._states.all_gather(states)
        local_work()
        gathered = gathering.wait().flatten(0, 1)
        starts = [start for start, _ in route.runs[self.topology.rank]]
        if to_the_end:
            starts.append(route.length)
        distances = route.distances(starts)
        if first is not None:
            gathered = torch.cat((gathered, first.unsqueeze(0)))
        else:
            distances = tuple(row[:-1] for row in distances)
        weights = decay.weights(distances, gathered.dtype, gathered.device)
        arrived = combine(gathered, weights)
        if to_the_end:
            return arrived[:-1], arrived[-1]
        return arrived, None

    def hops(self, route: Route) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """See StatePassing.hops: from all to all."""
        for source, target in permutations(range(self.topology.size), 2):
            yield source, target, (source,)

    def share(self, end: Tensor | None, like: Tensor, route: Route) -> Tensor:
        """See StatePassing.share: every rank has computed it."""
        assert end is not None
        return end

    def collect(self, gradient: Tensor, route: Route) -> Tensor | None:
        """See StatePassing.collect."""
        return self._states.all_gather(gradient).wait().sum(0)

    def sharing(self, route: Route) -> Iterator[Message]:
        """See StatePassing.sharing: none."""
        return iter(())

    def collecting(self, route: Route) -> Iterator[Message]:
        """See StatePassing.collecting: from all to all."""
        return permutations(range(self.topology.size), 2)
