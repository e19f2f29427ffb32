"""Linear attention over a split sequence: what its algorithms are, and their autograd Function.

B batch, S local tokens, H heads, D head dim of q and k, E head dim of v, n runs of consecutive
tokens that a rank holds. States are [B,H,D,E], float32 (float64 for float64).

Where states travel (`StatePassing`), runs compute on their own (core/linear_kernel.py); what an
algorithm adds is the way of states from run to run. The gradient of a state goes the same way in
the other direction, and so does everything where tokens see later ones: one function carries them
all.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_cp_plugin.core.algorithm import Algorithm, Traffic
from megatron_cp_plugin.core.autocast import as_written, cast_inputs
from megatron_cp_plugin.core.comm import communicating_in
from megatron_cp_plugin.core.decay import Decay, Distances
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.linear_kernel import LinearKernel, LinearProblem
from megatron_cp_plugin.core.linear_runs import (
    Caches,
    by_run,
    fold,
    runs_backward,
    runs_forward,
)
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.core.recompute import computed_once
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError, ContextParallelError

Interval = tuple[int, int]


@dataclass(frozen=True)
class LinearCall:
    """One linear attention over the whole split sequence.

    Attributes:
        seq_len: global N. causal: tokens see themselves and earlier ones; otherwise all, with
            rate**|distance|. decay: rates per head. kernel: computes the runs.
        output_final_state: the state after the last token is wanted. documents: as of
        `document_starts`; each begins with a state of 0, but the first.
    """

    seq_len: int
    causal: bool
    decay: Decay
    kernel: LinearKernel
    output_final_state: bool = False
    documents: tuple[int, ...] = ()


@dataclass(frozen=True)
class LinearShape:
    """What the volume of communication depends on.

    Attributes: seq_len: global N. element_bytes: of q, k, v. wide_bytes: of states.
    """

    batch: int
    seq_len: int
    heads: int
    head_dim: int
    value_dim: int
    element_bytes: int = 2
    wide_bytes: int = 4

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of all heads."""
        return self.batch * self.heads * self.head_dim * self.value_dim * self.wide_bytes


@dataclass(frozen=True)
class LinearWork:
    """What one rank computes in one step of the forward.

    Attributes: step, host: when and where. state_owners: the ranks whose state meets the host's
        queries; (): its own runs, each by itself. products: of a token with a state, D x E each.
        share: of the heads; less than 1 where the host has some heads of all ranks' tokens.
    """

    step: int
    host: int
    state_owners: tuple[int, ...]
    products: int
    share: Fraction = Fraction(1)


@dataclass(frozen=True)
class LinearMove:
    """What one rank sends to another in the forward.

    Attributes: needed: in which step. tensors: letters of what travels, S for a state. owners:
        whose tokens they are of. share: which share of the heads. result: it is an output.
    """

    needed: int
    source: int
    target: int
    tensors: tuple[str, ...]
    owners: tuple[int, ...]
    share: int = 0
    result: bool = False


@dataclass(frozen=True)
class Route:
    """Which part of the way each run covers, for states that travel over the whole sequence.

    Attributes: runs: for each rank (start, stop) of its runs in their local order, counted from
    where the way begins. length: of the way, the global N. documents: where others than the first
    begin; no state goes on there.
    """

    runs: tuple[tuple[Interval, ...], ...]
    length: int
    documents: tuple[int, ...] = ()

    @staticmethod
    def of(layout: Layout, size: int, seq_len: int, documents: tuple[int, ...] = ()) -> "Route":
        """The way from the first token to the last."""
        return Route(
            tuple(
                tuple((span.start, span.stop) for span in layout.spans(rank, size, seq_len))
                for rank in range(size)
            ),
            seq_len,
            documents,
        )

    def back(self) -> "Route":
        """The same runs on the way in the other direction."""
        return Route(
            tuple(
                tuple((self.length - stop, self.length - start) for start, stop in runs)
                for runs in self.runs
            ),
            self.length,
            tuple(self.length - start for start in reversed(self.documents)),
        )

    def lasts(self, start: int, stop: int) -> bool:
        """Whether no document begins from one place on the way to another, both included."""
        after = bisect_left(self.documents, start)
        return after == len(self.documents) or self.documents[after] > stop

    def parts(self, rank: int) -> tuple[tuple[Interval, ...], ...]:
        """By run of a rank: local tokens (start, stop) of each document in it."""
        found, before = [], 0
        for start, stop in self.runs[rank]:
            inside = self.documents[
                bisect_right(self.documents, start) : bisect_left(self.documents, stop)
            ]
            edges = [before + place - start for place in (start, *inside, stop)]
            found.append(tuple(pairwise(edges)))
            before = edges[-1]
        return tuple(found)

    def distances(self, places: Sequence[int]) -> Distances:
        """How many tokens are between the ends of runs and places on the way.

        Returns: for each place one entry for each run, by rank, None for runs that end behind it
        or with another document; and last the distance from the beginning.
        """
        stops = [*(stop for runs in self.runs for _, stop in runs), 0]
        return tuple(
            tuple(
                place - stop if stop <= place and self.lasts(stop, place) else None
                for stop in stops
            )
            for place in places
        )

    def owners_before(self, place: int) -> tuple[int, ...]:
        """Ranks with tokens before a place between runs."""
        return tuple(
            rank
            for rank, runs in enumerate(self.runs)
            if any(start < stop <= place for start, stop in runs)
        )

    @property
    def last_rank(self) -> int:
        """The rank that holds the last run; of those without tokens the last one."""
        return max(range(len(self.runs)), key=lambda rank: (max(self.runs[rank]), rank))

    @property
    def first_rank(self) -> int:
        """The rank that holds the first run; of those without tokens the first one."""
        return min(range(len(self.runs)), key=lambda rank: (min(self.runs[rank]), rank))

    def flipped(self) -> "Route":
        """The way from the last token to the first, each rank's tokens in reverse order."""
        back = self.back()
        return replace(back, runs=tuple(runs[::-1] for runs in back.runs))


LocalWork = Callable[[], None]
Saved = tuple[Tensor | None, ...]


class LinearAlgorithm(ABC):
    """Linear attention over a sequence that is split among the ranks of a topology.

    Subclasses are made by `registry.create_linear` with a topology and an instance of their own
    `Options` (Algorithm.Options where they have none).

    Attributes:
        name: set by the registry. layout: which tokens each rank holds.
    """

    name: str = ""
    layout: Layout

    Options = Algorithm.Options

    def __init__(self, topology: Topology, options: Algorithm.Options) -> None:
        self.topology = topology
        self.options = options
        self.layout = self.layout_for(options)

    @classmethod
    def layout_for(cls, options: Algorithm.Options) -> Layout:
        """The layout that an instance with these options has."""
        return cls.layout

    @classmethod  # noqa: B027  (most algorithms serve everything)
    def check(cls, options: Algorithm.Options, *, size: int, heads: int) -> None:
        """Raises: ConfigError if the algorithm cannot serve this; needs no processes."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None, call: LinearCall
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """Linear attention of the local queries.

        Args: q, k: [B,S,H,D]; v: [B,S,H,E]; contiguous. initial: the state before the first token.

        Returns: out [B,S,H,E] in q's dtype, the final state if wanted, and what `backward` needs.
        """

    @abstractmethod
    def backward(
        self, dout: Tensor, dfinal: Tensor | None, saved: Saved, call: LinearCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of the local shards, and of the initial state.

        Args: dout: [B,S,H,E] contiguous. dfinal: this rank's gradient of the final state.

        Returns: dq, dk, dv in the dtypes of q, k, v; dinitial [B,H,D,E], whose sum over ranks is
        the whole one; None: 0.
        """

    @abstractmethod
    def traffic(
        self,
        shape: LinearShape,
        rank: int,
        *,
        causal: bool,
        final_state: bool,
        decays: bool = True,
    ) -> Traffic:
        """What `rank` sends, by closed formula; the tests hold it against the counters.

        Args: decays: not all rates are 1, which matters where attention is not causal.
        """

    @abstractmethod
    def trace(self, seq_len: int, *, causal: bool) -> tuple[LinearWork, ...]:
        """The forward's plan for all ranks, with decay."""

    @abstractmethod
    def moves(self, seq_len: int, *, causal: bool) -> tuple[LinearMove, ...]:
        """What travels in that plan."""


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
        """Which rank sends which a state on a route, and of whose tokens it is."""

    def moves(self, seq_len: int, *, causal: bool) -> tuple[LinearMove, ...]:
        """See LinearAlgorithm.moves."""
        route = Route.of(self.layout, self.topology.size, seq_len)
        return tuple(
            LinearMove(2 * sweep + 1, source, target, ("S",), owners)
            for sweep, way in enumerate((route,) if causal else (route, route.flipped()))
            for source, target, owners in self.hops(way)
        )

    def trace(self, seq_len: int, *, causal: bool) -> tuple[LinearWork, ...]:
        """See LinearAlgorithm.trace. States travel while ranks do their own runs.

        A token makes one product for its rank's state and one for its output.
        """
        route = Route.of(self.layout, self.topology.size, seq_len)
        work = []
        for sweep, way in enumerate((route,) if causal else (route, route.flipped())):
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
        out, final, caches = self._sweep(
            q, k, v, initial, route, call, output_final_state=call.output_final_state
        )
        if call.causal:
            return out, final, (q, k, v, *caches)
        later, _, later_caches = self._sweep(
            q.flip(1), k.flip(1), v.flip(1), None, route.flipped(), call, output_final_state=False
        )
        # Both sweeps hold each token's own term.
        wide = accumulation_dtype(q.dtype)
        own = (q.to(wide) * k.to(wide)).sum(-1, keepdim=True) * v.to(wide)
        out = (out.to(wide) + later.flip(1).to(wide) - own).to(q.dtype)
        return out, final, (q, k, v, *caches, *later_caches)

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
            dtotal = self._total(q, dout, None, dfinal, route.back(), call)
            dq, dk = _products(dout, total.mT), _products(v, dtotal.mT)
            first = self.topology.rank == route.back().last_rank
            return dq, dk, _products(k, dtotal), dtotal if first else None
        count = len(caches) if call.causal else len(caches) // 2
        dq, dk, dv, dinitial = self._sweep_back(dout, q, k, v, caches[:count], dfinal, route, call)
        if call.causal:
            return dq, dk, dv, dinitial
        mirrored = (dout.flip(1), q.flip(1), k.flip(1), v.flip(1))
        *gradients, _ = self._sweep_back(*mirrored, caches[count:], None, route.flipped(), call)
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
        runs = len(route.runs[self.topology.rank])
        x, y = (fold(z, runs) for z in (x, y))
        states = by_run(call.kernel.forward(x, x, y, call.decay).state, runs)
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
    ) -> tuple[Tensor, Tensor | None, Caches]:
        """Every token and what is before it on the route. Returns: out, final state, caches."""
        parts = route.parts(self.topology.rank)
        running = runs_forward(call.kernel, q, k, v, call.decay, parts)
        states = running.states
        arrived, end = self.carry(
            states, initial, route, call.decay, running.intra, to_the_end=output_final_state
        )
        final = self.share(end, states[0], route) if output_final_state else None
        out, caches = running.finish(arrived)
        return out, final, caches

    def _sweep_back(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        caches: Caches,
        dfinal: Tensor | None,
        route: Route,
        call: LinearCall,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of `_sweep`: those of states travel from the end of the route."""
        parts = route.parts(self.topology.rank)
        running = runs_backward(call.kernel, dout, q, k, v, call.decay, parts, caches)
        back = route.back()
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


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        initial: Tensor | None,
        algorithm: LinearAlgorithm,
        call: LinearCall,
        site: Hashable | None,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()

        def compute() -> tuple[Tensor | None, ...]:
            out, final, saved = algorithm.forward(q, k, v, initial, call)
            return (out, final, *saved)

        inputs = (q, k, v) if initial is None else (q, k, v, initial)
        with communicating_in("forward"), as_written(q.device):
            out, final, *saved = computed_once(site, inputs, compute)
        assert out is not None
        ctx.save_for_backward(*saved)
        ctx.algorithm, ctx.call, ctx.initial = algorithm, call, initial is not None
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        with communicating_in("backward"), as_written(dout.device):
            dq, dk, dv, dinitial = ctx.algorithm.backward(
                dout.contiguous(), dfinal, ctx.saved_tensors, ctx.call
            )
        return dq, dk, dv, dinitial if ctx.initial else None, None, None, None


def attend_linearly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    algorithm: LinearAlgorithm,
    seq_len: int,
    decay: Decay,
    kernel_for: Callable[[LinearProblem], LinearKernel],
    causal: bool = True,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: tuple[int, ...] = (),
    site: Hashable | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention of the local queries over all ranks' tokens; differentiable.

    Args:
        q, k: [B,S,H,D]; v: [B,S,H,E]: this rank's shards, in the order of algorithm.layout.
        seq_len: global N. decay: rates per head. kernel_for: the choice of a kernel, such as
            `partial(kernels.linear.resolve_linear, "auto")`.
        initial_state: before the first token [B,H,D,E], the same on all ranks.
        output_final_state: the state after the last token is wanted.
        documents: as of `document_starts`: tokens see others of their own document only.
        site: as in `recompute.computed_once`.

    Under autocast q, k and v are taken in its dtype.

    Returns: out [B,S,H,E] in q's dtype; the final state, the same on all ranks, or None. Gradients
    are those of the sum of all ranks' losses, so that of initial_state, summed over the ranks, is
    whole.
    Raises: ContextParallelError if shapes or dtypes do not fit; KernelUnavailableError if the
    kernel cannot serve them.
    """
    q, k, v = cast_inputs(q, k, v)
    _check(q, k, v, initial_state, algorithm, seq_len)
    problem = LinearProblem(q.device, q.dtype, q.shape[2], q.shape[3], v.shape[3])
    kernel = kernel_for(problem)
    call = LinearCall(seq_len, causal, decay, kernel, output_final_state, documents)
    if initial_state is not None:
        initial_state = initial_state.to(accumulation_dtype(q.dtype))
    return _LinearAttention.apply(q, k, v, initial_state, algorithm, call, site)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    algorithm: LinearAlgorithm,
    seq_len: int,
) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or q.shape != k.shape or v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise ContextParallelError(
            f"linear attention needs q, k [B,S,H,D] and v [B,S,H,E], {shapes}: repeat the KV heads "
            "if there are fewer"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ContextParallelError(
            f"q, k, v need one dtype, got {q.dtype}, {k.dtype}, {v.dtype}: cast them first"
        )
    state = (q.shape[0], *q.shape[2:], v.shape[3])
    if initial_state is not None and initial_state.shape != state:
        raise ContextParallelError(
            f"initial_state needs the shape [B,H,D,E] = {state}, got {tuple(initial_state.shape)}"
        )
    rank, size = algorithm.topology.rank, algorithm.topology.size
    algorithm.check(algorithm.options, size=size, heads=q.shape[2])
    lengths = [len(span) for span in algorithm.layout.spans(rank, size, seq_len)]
    if q.shape[1] != sum(lengths):
        raise ContextParallelError(
            f"rank {rank} of {size} holds {sum(lengths)} of {seq_len} tokens "
            f"({algorithm.layout.name} layout), got {q.shape[1]}: pass seq_len=, or shard with "
            "cp.shard"
        )
    multiple = algorithm.layout.multiple(size)
    if len(lengths) > 1 and seq_len % multiple:
        raise ConfigError(
            f"{algorithm.name} on the {algorithm.layout.name} layout needs seq_len divisible by "
            f"{multiple}, got {seq_len}: use {seq_len - seq_len % multiple + multiple}, or the "
            "option layout=contiguous"
        )
