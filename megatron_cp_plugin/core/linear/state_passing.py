"""Base of linear attention algorithms whose ranks exchange the states of runs of tokens.

B batch, S local tokens, H heads, D head dim of q and k, E head dim of v, n runs of consecutive
tokens that a rank holds. States are [B,H,D,E], float32 (float64 for float64).

A kernel computes the runs (core/linear/kernel.py); what an algorithm adds is the way of states from
run to run. The gradient of a state goes the same way in the other direction, and so does everything
where tokens see later ones: one function carries them all.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import Traffic
from megatron_cp_plugin.core.linear.algorithm import (
    LinearAlgorithm,
    LinearCall,
    LinearMove,
    LinearShape,
    LinearWork,
    Saved,
)
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.route import Route
from megatron_cp_plugin.core.partial import accumulation_dtype

LocalWork = Callable[[], None]
Message = tuple[int, int]  # from a rank to a rank


class StatePassing(LinearAlgorithm):
    """Ranks compute their own runs and exchange states: the volume does not grow with N."""

    @abstractmethod
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
        """Carries the states of all ranks' runs along a route.

        Args:
            states: [n,B,H,D,E] of the local runs, each as if nothing came before it.
            first: where the route begins [B,H,D,E], the same on all ranks; None: 0.
            local_work: what needs no other rank's state; called once.
            to_the_end: the state at the end of the route is wanted.

        Returns: the states that arrive at the local runs [n,B,H,D,E], None if all are 0; and, if
        wanted, the one at the end [B,H,D,E], at least on the rank whose run is the last.
        """

    @abstractmethod
    def share(self, end: Tensor | None, like: Tensor, route: Route) -> Tensor:
        """The state at the end, on all ranks, from what `carry` gave. Args: like: its shape."""

    @abstractmethod
    def collect(self, gradient: Tensor, route: Route) -> Tensor | None:
        """The sum of all ranks' gradients [B,H,D,E], at least where the route begins."""

    @abstractmethod
    def hops(self, route: Route) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Which rank sends which in `carry`, a state of each run, and of whose tokens it is."""

    @abstractmethod
    def sharing(self, route: Route) -> Iterable[Message]:
        """Which rank sends which a state in `share`."""

    @abstractmethod
    def collecting(self, route: Route) -> Iterable[Message]:
        """Which rank sends which a state in `collect`."""

    def traffic(
        self, shape: LinearShape, rank: int, *, causal: bool, final_state: bool, decays: bool = True
    ) -> Traffic:
        """See LinearAlgorithm.traffic: it does not depend on the number of tokens."""
        size, total = self.topology.size, not causal and not decays
        there = Route.of(self.layout, size, self.layout.multiple(size))
        ways = [there] if causal or total else [there, there.flipped]
        back, runs = there.back, len(there.runs[rank])

        def sent(ways: Iterable[Route], once: Iterable[Message]) -> tuple[int, int]:
            carried = sum(source == rank for way in ways for source, *_ in self.hops(way))
            others = sum(source == rank for source, _ in once)
            return (carried * runs + others) * shape.state_bytes, carried + others

        last = self.sharing(there) if total or final_state else ()
        first = self.sharing(back) if total else self.collecting(back) if final_state else ()
        return Traffic(*sent(ways, last), *sent([way.back for way in ways], first))

    def moves(self, seq_len: int, *, causal: bool) -> tuple[LinearMove, ...]:
        """See LinearAlgorithm.moves."""
        route = Route.of(self.layout, self.topology.size, seq_len)
        return tuple(
            LinearMove(2 * sweep + 1, source, target, ("S",), owners)
            for sweep, way in enumerate((route,) if causal else (route, route.flipped))
            for source, target, owners in self.hops(way)
        )

    def trace(self, seq_len: int, *, causal: bool) -> tuple[LinearWork, ...]:
        """See LinearAlgorithm.trace. States travel while ranks do their own runs.

        A token makes one product for its rank's state and one for its output.
        """
        route = Route.of(self.layout, self.topology.size, seq_len)
        work = []
        for sweep, way in enumerate((route,) if causal else (route, route.flipped)):
            for host, runs in enumerate(way.runs):
                tokens = sum(stop - start for start, stop in runs)
                work.append(LinearWork(2 * sweep, host, (), 2 * tokens))
                reached = [(start, stop, way.owners_before(start)) for start, stop in runs]
                owners = sorted({owner for _, _, before in reached for owner in before})
                products = sum(stop - start for start, stop, before in reached if before)
                work.append(LinearWork(2 * sweep + 1, host, tuple(owners), products))
        return tuple(one for one in work if one.products)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None, call: LinearCall
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """See LinearAlgorithm.forward."""
        route = self._route(call)
        if _one_state(call):
            total = self._total(k, v, initial, None, route, call)
            return _products(q, total), total if call.output_final_state else None, (q, k, v, total)
        out, final, cache = self._sweep(
            q, k, v, initial, route, call, output_final_state=call.output_final_state
        )
        if call.causal:
            return out, final, (q, k, v, cache)
        later, _, later_cache = self._sweep(
            q.flip(1), k.flip(1), v.flip(1), None, route.flipped, call, output_final_state=False
        )
        # Both sweeps hold each token's own term.
        wide = accumulation_dtype(q.dtype)
        own = (q.to(wide) * k.to(wide)).sum(-1, keepdim=True) * v.to(wide)
        out = (out.to(wide) + later.flip(1).to(wide) - own).to(q.dtype)
        return out, final, (q, k, v, cache, later_cache)

    def backward(
        self, dout: Tensor, dfinal: Tensor | None, saved: Saved, call: LinearCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See LinearAlgorithm.backward: dinitial is the first token's rank's alone."""
        q, k, v, *caches = saved
        assert q is not None
        assert k is not None
        assert v is not None
        route = self._route(call)
        if _one_state(call):
            (total,) = caches
            assert total is not None
            dtotal = self._total(q, dout, None, dfinal, route.back, call)
            dq, dk = _products(dout, total.mT), _products(v, dtotal.mT)
            first = self.topology.rank == route.back.last_rank
            return dq, dk, _products(k, dtotal), dtotal if first else None
        dq, dk, dv, dinitial = self._sweep_back(dout, q, k, v, caches[0], dfinal, route, call)
        if call.causal:
            return dq, dk, dv, dinitial
        mirrored = (dout.flip(1), q.flip(1), k.flip(1), v.flip(1))
        *gradients, _ = self._sweep_back(*mirrored, caches[1], None, route.flipped, call)
        wide = accumulation_dtype(q.dtype)
        dout, q, k, v = (x.to(wide) for x in (dout, q, k, v))
        down = (dout * v).sum(-1, keepdim=True)
        own = (down * k, down * q, (q * k).sum(-1, keepdim=True) * dout)
        dq, dk, dv = (
            (one.to(wide) + other.flip(1).to(wide) - twice).to(one.dtype)
            for one, other, twice in zip((dq, dk, dv), gradients, own, strict=True)
        )
        return dq, dk, dv, dinitial

    def _route(self, call: LinearCall) -> Route:
        return Route.of(self.layout, self.topology.size, call.seq_len, call.documents)

    def _total(
        self,
        x: Tensor,
        y: Tensor,
        first: Tensor | None,
        own: Tensor | None,
        route: Route,
        call: LinearCall,
    ) -> Tensor:
        """The sum of x y^T over all tokens, of `first`, and of all ranks' `own`: [B,H,D,E].

        Where nothing decays and tokens see all others, one state serves every token.
        """
        runs = route.local(self.topology.rank)
        states = call.kernel.forward(x, x, y, call.decay, runs).states
        if own is not None:
            states[0] += own
        _, end = self.carry(states, first, route, call.decay, lambda: None, to_the_end=True)
        return self.share(end, states[0], route)

    def _sweep(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        initial: Tensor | None,
        route: Route,
        call: LinearCall,
        *,
        output_final_state: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Every token and what is before it on the route. Returns: out, final state, cache."""
        running = call.kernel.forward(q, k, v, call.decay, route.local(self.topology.rank))
        states = running.states
        arrived, end = self.carry(
            states, initial, route, call.decay, running.intra, to_the_end=output_final_state
        )
        final = self.share(end, states[0], route) if output_final_state else None
        out, cache = running.finish(arrived)
        return out, final, cache

    def _sweep_back(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor | None,
        dfinal: Tensor | None,
        route: Route,
        call: LinearCall,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of `_sweep`: those of states travel from the end of the route."""
        runs = route.local(self.topology.rank)
        running = call.kernel.backward(dout, q, k, v, call.decay, runs, cache)
        back = route.back
        arrived, end = self.carry(
            running.dstates,
            None if dfinal is None else self.collect(dfinal, back),
            back,
            call.decay,
            running.intra,
            to_the_end=True,
        )
        dq, dk, dv = running.finish(arrived)
        return dq, dk, dv, end if self.topology.rank == back.last_rank else None


def _one_state(call: LinearCall) -> bool:
    """Whether all tokens read the same state: they see all others, and nothing decays."""
    return not call.causal and call.decay.none and not call.documents


def _products(x: Tensor, state: Tensor) -> Tensor:
    """state^T x of every token, in x's dtype: [B,S,H,D], [B,H,D,E] -> [B,S,H,E]."""
    # Sums over many tokens overflow float16.
    dtype = x.dtype if x.dtype == torch.bfloat16 else state.dtype
    return torch.einsum("bshd,bhde->bshe", x.to(dtype), state.to(dtype)).to(x.dtype)
