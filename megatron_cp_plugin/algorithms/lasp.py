"""LASP: linear attention that passes one state from rank to rank, independent of length.

B batch, H heads, D, E head dims, n runs of a rank, P ranks. States are [B,H,D,E].
"""

import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.comm import Pending, Topology
from megatron_cp_plugin.core.communication.devices import SideStream, capturing
from megatron_cp_plugin.core.layout import Contiguous
from megatron_cp_plugin.core.linear.algorithm import LocalWork, StatePassing
from megatron_cp_plugin.core.linear.states import Route, RunStates
from megatron_cp_plugin.registry import register


@register("lasp")
class Lasp(StatePassing):
    """One state travels along the chain of ranks, its gradient back.

    All ranks but the last send B*H*D*E numbers in the forward, all but the first in the backward,
    with any transitions: float32 ones (float64 for float64). A final state goes from all to all.

    Source: LASP, Algorithms 2 and 3. Differs: states are float32; within a rank's chunk the
    kernel works in chunks of its own; tokens may also see later ones; transitions other than
    constant rates.
    """

    layout = Contiguous()

    def __init__(self, topology: Topology, options: Algorithm.Options) -> None:
        super().__init__(topology, options)
        # The message that is under way, and the state.
        self._sent: tuple[Pending[None], Tensor] | None = None

    def carry(
        self,
        states: RunStates,
        first: Tensor | None,
        route: Route,
        local_work: LocalWork,
        *,
        to_the_end: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See StatePassing.carry. Source: LASP, Algorithm 2, lines 9 to 17.

        Differs: a rank passes the state on as soon as it comes, whether its own work is done or
        not.
        """
        chain = sorted(range(self.topology.size), key=lambda rank: route.runs[rank])
        place = chain.index(self.topology.rank)
        at_the_end = place + 1 == len(chain)
        ((start, stop),) = route.runs[self.topology.rank]
        (own,) = states.added
        beside = SideStream(own.device)
        before = self._sent  # which is waited for beside: its memory goes back to this stream
        arrived = first
        self._sit_out(place - 1)
        if place:
            received = torch.empty_like(own)  # kept until the streams join, used or not
            with beside():
                receiving = self._states.exchange([], [(received, chain[place - 1])])
            local_work()
            with beside():
                receiving.wait()
            arrived = received if route.lasts(start, start) else None
        with beside():
            end = own
            if arrived is not None and route.lasts(start, stop - 1):
                end = states.passed(0, stop - start, arrived)
            if capturing(end):
                self._sent = None  # sent before the capture, which began when all that was done
            self._finish_sending()  # the message before has long arrived
            if not at_the_end:
                self._sent = self._states.exchange([(end, chain[place + 1])], []), end
            if capturing(own):
                self._finish_sending()  # a graph has no work that goes on after it
        self._sit_out(len(chain) - place - 2)
        if not place:
            local_work()
        beside.join()
        del before
        return None if arrived is None else arrived.unsqueeze(0), end if at_the_end else None

    def _finish_sending(self) -> None:
        if self._sent is not None:
            self._sent[0].wait()
            self._sent = None

    def _sit_out(self, hops: int) -> None:
        """Takes no part in hops between other ranks; every rank posts the same operations."""
        for _ in range(hops):
            self._states.exchange([], [])
