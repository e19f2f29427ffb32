"""Linear attention algorithms over a split sequence: their interface, and the base of those whose
ranks exchange the states of runs of tokens.

B batch, S local tokens, H heads, D head dim of q and k, E head dim of v, n runs of consecutive
tokens that a rank holds. States are [B,H,D,E], float32 (float64 for float64).

A kernel computes the runs (core/linear/kernel.py); `StatePassing` carries states from run to run.
The gradient of a state takes the same route in the other direction, and so do states if tokens see
later tokens in place of earlier ones: one function carries them all.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import Registered
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.linear.kernel import LinearInputs, LinearKernel
from megatron_cp_plugin.core.linear.states import NO_GATES, Decay, Gates, Route, RunStates


@dataclass(frozen=True)
class LinearCall:
    """One linear attention over the whole split sequence.

    Attributes:
        seq_len: global N.
        decay: rates per head; 1 if there are gates.
        kernel: computes the runs.
        output_final_state: the state after the last token is wanted.
        documents: positions as of `document_starts`; each document but the first begins with a
            state of 0.
        shared: how many successive heads differ only in their queries, and so share one state.
        initial: whether a state before the first token is given.
        reverse: tokens see themselves and later ones, not earlier ones; without gates.
    """

    seq_len: int
    decay: Decay
    kernel: LinearKernel
    output_final_state: bool = False
    documents: tuple[int, ...] = ()
    shared: int = 1
    initial: bool = False
    reverse: bool = False


@dataclass(frozen=True)
class LinearShape:
    """The sizes of one linear attention.

    Attributes:
        seq_len: global N.
        heads: of states.
        element_bytes: of q, k, v.
        wide_bytes: of states.
    """

    batch: int
    seq_len: int
    heads: int
    head_dim: int
    value_dim: int
    element_bytes: int = 2
    wide_bytes: int = 4

    @property
    def kv_heads(self) -> int:
        """All heads."""
        return self.heads


class LinearTensors(NamedTuple):
    """A rank's tensors of one attention; contiguous.

    Attributes:
        q, k: [B,S,H,D].
        v: [B,S,H,E].
        initial: the state before the first token [B,H,D,E]; None: 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates = NO_GATES
    initial: Tensor | None = None


Saved = tuple[Tensor | None, ...]


class LinearAlgorithm(Registered):
    """Linear attention over a sequence that is split among the ranks of a topology.

    Subclasses are made by `registry.create_linear`.

    Attributes: collective: ranks communicate in collective operations only, so that a simulation of
        one rank is enough.
    """

    collective: ClassVar[bool] = False

    @abstractmethod
    def forward(
        self, given: LinearTensors, call: LinearCall
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """Linear attention of the local queries.

        Returns: out [B,S,H,E] in q's dtype, the final state if wanted, and what `backward` needs.
        """

    @abstractmethod
    def backward(
        self, dout: Tensor, dfinal: Tensor | None, saved: Saved, call: LinearCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Gates]:
        """Gradients of the local shards, and of the initial state.

        Args:
            dout: [B,S,H,E] contiguous.
            dfinal: this rank's gradient of the final state.

        Returns: dq, dk, dv in the dtypes of q, k, v; dinitial [B,H,D,E], whose sum over ranks is
        the whole one; None: 0; and the gradients of the gates.
        """


LocalWork = Callable[[], object]


class StatePassing(LinearAlgorithm):
    """Ranks compute their own runs and exchange states: the volume does not grow with N."""

    def __init__(self, topology: Topology, options: Registered.Options) -> None:
        super().__init__(topology, options)
        self._states = topology.channel("states")

    @abstractmethod
    def carry(
        self,
        states: RunStates,
        first: Tensor | None,
        route: Route,
        local_work: LocalWork,
        *,
        to_the_end: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Carries the states of all ranks' runs along a route.

        Args:
            states: states behind the local runs, each as if nothing came before the run.
            first: state at the beginning of the route [B,H,D,E], the same on all ranks; None: 0.
            local_work: work that needs no other rank's state; called once.
            to_the_end: the state at the end of the route is wanted.

        Returns: the states that arrive at the local runs [n,B,H,D,E], None if all are 0; and, if
        wanted, the state at the end [B,H,D,E], at least on the rank with the last run.
        """

    def share(self, end: Tensor | None, like: Tensor, route: Route) -> Tensor:
        """The state at the end, on all ranks, from the result of `carry`. Args: like: its shape."""
        mine = torch.zeros_like(like) if end is None else end
        return self._states.all_gather(mine).wait()[route.last_rank]

    def forward(
        self, given: LinearTensors, call: LinearCall
    ) -> tuple[Tensor, Tensor | None, Saved]:
        q, k, v, gates, initial = given
        if call.reverse:
            q, k, v = q.flip(1), k.flip(1), v.flip(1)
        route = self._route(call)
        transition = gates if gates.some else call.decay
        runs = route.local(self.topology.rank)
        running = call.kernel.forward(LinearInputs(q, k, v, transition, runs))
        through = running.through
        if through is not None and call.shared > 1:
            through = through[:, :, :: call.shared].contiguous()
        states = _of_shared(running.states, call, summed=False)
        arrived, end = self.carry(
            RunStates(states, _shared_decay(call) if through is None else through),
            None if initial is None else _of_shared(initial.unsqueeze(0), call, summed=False)[0],
            route,
            running.intra,
            to_the_end=call.output_final_state,
        )
        final = self.share(end, states[0], route) if call.output_final_state else None
        if call.shared > 1:
            arrived, final = (
                None if x is None else x.repeat_interleave(call.shared, -3)
                for x in (arrived, final)
            )
        out, cache = running.finish(arrived)
        return out.flip(1) if call.reverse else out, final, (*given[:3], *gates, through, *cache)

    def backward(
        self, dout: Tensor, dfinal: Tensor | None, saved: Saved, call: LinearCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Gates]:
        """See LinearAlgorithm.backward: only the rank of the first token returns dinitial.

        Gradients of states travel from the end of the route.
        """
        q, k, v, gate, beta, through, *cache = saved
        assert q is not None
        assert k is not None
        assert v is not None
        if call.reverse:
            dout, q, k, v = dout.flip(1), q.flip(1), k.flip(1), v.flip(1)
        route, gates = self._route(call), Gates(gate, beta)
        transition = gates if gates.some else call.decay
        inputs = LinearInputs(q, k, v, transition, route.local(self.topology.rank))
        running = call.kernel.backward(inputs, dout, tuple(cache))
        back = route.back
        states = _of_shared(running.states, call, summed=True)
        if dfinal is not None:
            gradient = _of_shared(dfinal.unsqueeze(0), call, summed=True)[0]
            dfinal = self._states.all_gather(gradient).wait().sum(0)
        arrived, end = self.carry(
            RunStates(states, _shared_decay(call) if through is None else through).back,
            dfinal,
            back,
            running.intra,
            to_the_end=call.initial,
        )
        dinitial = end if call.initial and self.topology.rank == back.last_rank else None
        if call.shared > 1:
            arrived, dinitial = (
                None if x is None else _to_first(x, call.shared) for x in (arrived, dinitial)
            )
        dq, dk, dv, dgates = running.finish(arrived)
        if call.reverse:
            dq, dk, dv = dq.flip(1), dk.flip(1), dv.flip(1)
        return dq, dk, dv, dinitial, dgates

    def route_of(self, seq_len: int, documents: tuple[int, ...] = ()) -> Route:
        """The route of a state through all ranks' tokens. Args: documents: as in `LinearCall`."""
        layout = self.layout.for_documents(documents) if documents else self.layout
        return Route.of(layout, self.topology.size, seq_len, documents)

    def _route(self, call: LinearCall) -> Route:
        route = self.route_of(call.seq_len, call.documents)
        return route.flipped if call.reverse else route


def _shared_decay(call: LinearCall) -> Decay:
    return call.decay if call.shared == 1 else Decay(call.decay.rates[:: call.shared])


def _of_shared(states: Tensor, call: LinearCall, *, summed: bool) -> Tensor:
    """One state for heads that share it, or the sum of their gradients: [n,B,H,D,E]."""
    if call.shared == 1:
        return states
    each = states.unflatten(2, (-1, call.shared))
    return each.sum(3) if summed else each.select(3, 0).contiguous()


def _to_first(gradient: Tensor, shared: int) -> Tensor:
    """The gradient of a shared state [...,G,D,E], given to its first head: [...,H,D,E]."""
    found = gradient.new_zeros(*gradient.shape[:-2], shared, *gradient.shape[-2:])
    found.select(-3, 0).copy_(gradient)
    return found.flatten(-4, -3)
