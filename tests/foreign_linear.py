"""Linear attention that is not ours: states by prefix doubling, in log2 P rounds."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_cp_plugin.core.layout import Contiguous
from megatron_cp_plugin.core.linear.algorithm import LocalWork, StatePassing
from megatron_cp_plugin.core.linear.states import Decay, Route, RunStates


class Doubling(StatePassing):
    """In round i the sum of 2^i ranks' states goes 2^i ranks on.

    Source: Hillis and Steele, Data Parallel Algorithms (1986). Differs: a rank keeps also the sum
    without its own state.
    """

    layout = Contiguous()

    def carry(
        self,
        states: RunStates,
        first: Tensor | None,
        route: Route,
        local_work: LocalWork,
        *,
        to_the_end: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        chain = self._chain(route)
        place = chain.index(self.topology.rank)
        ((start, stop),) = route.runs[self.topology.rank]
        (end,), decay = states.added, states.through
        assert isinstance(decay, Decay)
        # `end` is the sum at the end of this run, `before` at its beginning.

        def added(state: Tensor, came: Tensor, since: int, until: int) -> Tensor:
            return RunStates(state.unsqueeze(0), decay).passed(0, until - since, came)

        before = first if not place and route.lasts(0, start) else None
        if before is not None and route.lasts(start, stop - 1):
            end = added(end, before, start, stop)
        for distance in self._distances():
            later, earlier = place + distance, place - distance
            sends = [(end, chain[later])] if later < len(chain) else []
            came = torch.empty_like(end)
            receives = [(came, chain[earlier])] if earlier >= 0 else []
            self._states.exchange(sends, receives).wait()
            since = route.runs[chain[earlier]][0][1] if receives else stop
            if receives and route.lasts(since, start):
                before = torch.zeros_like(came) if before is None else before
                before = added(before, came, since, start)
                if route.lasts(start, stop - 1):
                    end = added(end, came, since, stop)
        local_work()
        return None if before is None else before.unsqueeze(0), end

    def _chain(self, route: Route) -> list[int]:
        return sorted(range(self.topology.size), key=lambda rank: route.runs[rank])

    def _distances(self) -> Iterator[int]:
        distance = 1
        while distance < self.topology.size:
            yield distance
            distance *= 2

    def messages(self, route: Route, rank: int) -> int:
        """How many states a rank sends in `carry`."""
        chain = self._chain(route)
        return sum(chain.index(rank) + distance < len(chain) for distance in self._distances())
