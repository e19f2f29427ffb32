"""Linear attention with flash-linear-attention's Triton kernels, by the segments of `fla`.

The parts of fla.ops.kda and fla.ops.gated_delta_rule, and of fla.ops.gla and fla.ops.simple_gla.
Gates of heads become gates of channels where fla refuses its kernels of the former.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import zip_longest
from math import log

import torch
from torch import Tensor

from megatron_cp_plugin.core.linear.kernel import (
    Cache,
    Gradients,
    LinearInputs,
    LinearKernel,
    LinearProblem,
    Running,
)
from megatron_cp_plugin.core.linear.states import Decay, Gates
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.kernels import fla
from megatron_cp_plugin.kernels.fla import (
    WHOLE,
    Gated,
    KernelFamily,
    Rates,
    Sequences,
    log2_rates_of,
    sequences_of,
)

_WIDEST = 128  # head dim of documents that are cut: `passed_along` takes no more


def refuses_gates_of_heads() -> bool:
    """Whether fla refuses the backward of gates of heads: Triton's results would be wrong there."""
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    return bool(IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1)


class _Delta(KernelFamily):
    """The delta rule: what its two families have in common.

    Attributes:
        read, values: W and U of the chunks, see kernels/chunked.py.
        keys: as they are in the state.
        queries: as they read it.
        gated: sums of the gates in chunks by the name of fla's argument.
    """

    read: Tensor
    values: Tensor
    keys: Tensor
    queries: Tensor
    gated: dict[str, Tensor]

    def run_states(self) -> tuple[Tensor, Tensor]:
        from megatron_cp_plugin.kernels.decayed import run_states

        sequences, (sums,) = self.sequences, self.gated.values()
        given = self.read, self.keys, self.values, sums, sequences.starts, sequences.joined
        added, through = run_states(*given)
        assert through is not None
        return added, through

    def transitions(self) -> Tensor:
        sequences, through = self.sequences, self.through
        assert through is not None
        if not sequences.is_cut:
            return through.index_select(0, sequences.leaving.order)
        heads, head_dim, _ = through.shape[1:]
        identity = torch.eye(head_dim, device=through.device).expand(1, heads, -1, -1)
        nothing = through.new_zeros(1, 1, head_dim, head_dim).expand_as(through)
        return self.along(nothing, through, identity, sequences.leaving)

    def states(self) -> tuple[Tensor, Tensor]:
        """The states before all chunks, and u = U - W S_0 of all tokens."""
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

        states, values, _ = chunk_gated_delta_rule_fwd_h(
            k=self.keys,
            w=self.read,
            u=self.values,
            **self.gated,
            initial_state=self.of_all(self.before),
            chunk_offsets=self.sequences.offsets,
            **self.where,
        )
        return states, values

    def gradients_before(self, dout: Tensor, dvalues: Tensor) -> Tensor:
        """Of the states before the runs, if those behind them have none."""
        from megatron_cp_plugin.kernels.decayed import run_states

        sequences, (sums,) = self.sequences, self.gated.values()
        where = sequences.starts, sequences.joined
        added, _ = run_states(self.keys, self.read, dvalues, sums, *where, (self.queries, dout))
        assert self.through is not None
        return self.leaving_back(added, self.through.mT)

    def gradients_of_states(
        self, dout: Tensor, dvalues: Tensor, behind: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Of the states behind all chunks, and dU."""
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu

        dstates, _, dvalues = chunk_gated_delta_rule_bwd_dhu(
            q=self.queries,
            k=self.keys,
            w=self.read,
            do=dout,
            dv=dvalues,
            **self.gated,
            h0=None,
            dht=self.entering_back(behind),
            scale=1.0,
            chunk_offsets=self.sequences.offsets,
            **self.where,
        )
        return dstates, dvalues


class _GatedDeltaNet(_Delta):
    """fla.ops.gated_delta_rule."""

    def prepare(self) -> tuple[Tensor, ...]:
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra

        sums = self.cumsum(self.gate.contiguous(), scale=1 / log(2))
        self.gated, self.keys = {"g": sums}, self.k
        self.read, self.values, solved = chunk_gated_delta_rule_fwd_intra(
            k=self.k, v=self.v, g=sums, beta=self.beta, **self.where
        )
        return sums, solved

    def outputs(self) -> Tensor:
        from fla.ops.common.chunk_o import chunk_fwd_o

        states, values = self.states()
        out: Tensor = chunk_fwd_o(
            q=self.q, k=self.k, v=values, h=states, **self.gated, scale=1.0, **self.where
        )
        return out

    def restore(self, kept: tuple[Tensor, ...], dout: Tensor) -> Tensor:
        from fla.ops.common.chunk_o import chunk_bwd_dv_local
        from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd

        sums, self._solved = kept
        self.gated, self.keys, self.queries = {"g": sums}, self.k, self.q
        self.read, self.values = recompute_w_u_fwd(
            k=self.k, v=self.v, beta=self.beta, A=self._solved, g=sums, **self.places
        )
        self._dout = dout
        self._dvalues = chunk_bwd_dv_local(
            q=self.q, k=self.k, do=dout, **self.gated, scale=1.0, **self.where
        )
        return self.gradients_before(dout, self._dvalues)

    def gradients(self, behind: Tensor | None) -> tuple[Tensor, ...]:
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg
        from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd

        states, values = self.states()
        dstates, dvalues = self.gradients_of_states(self._dout, self._dvalues, behind)
        dq, dk, dread, dsums = chunk_bwd_dqkwg(
            q=self.q,
            k=self.k,
            v=values,
            w=self.read,
            h=states,
            dv=dvalues,
            do=self._dout,
            dh=dstates,
            **self.gated,
            scale=1.0,
            **self.where,
        )
        dk_read, dv, dbeta, dsums_read = prepare_wy_repr_bwd(
            k=self.k,
            v=self.v,
            beta=self.beta,
            A=self._solved,
            dw=dread,
            du=dvalues,
            **self.gated,
            **self.places,
        )
        dgate = self.cumsum(dsums.add_(dsums_read), reverse=True)
        return dq, dk.add_(dk_read), dv, dgate, dbeta


def _outputs(
    rule: KernelFamily, sums: Tensor, values: Tensor, scores: Tensor, states: Tensor
) -> Tensor:
    """out [1,T,H,E] with gates of channels."""
    from fla.ops.gla.chunk import chunk_gla_fwd_o_gk

    given = {"q": rule.q, "v": values, "g": sums, "A": scores, "h": states}
    out: Tensor = chunk_gla_fwd_o_gk(**given, scale=1.0, **rule.where)
    return out


class _Kda(_Delta):
    """fla.ops.kda."""

    def prepare(self) -> tuple[Tensor, ...]:
        from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra

        sums = self.cumsum(self.gate.contiguous(), scale=1 / log(2))
        self.gated = {"gk": sums}
        self.read, self.values, _, self.keys, self._scores, solved = chunk_kda_fwd_intra(
            q=self.q, k=self.k, v=self.v, gk=sums, beta=self.beta, scale=1.0, **self.where
        )
        return sums, self._scores, solved

    def outputs(self) -> Tensor:
        states, values = self.states()
        return _outputs(self, self.gated["gk"], values, self._scores, states)

    def restore(self, kept: tuple[Tensor, ...], dout: Tensor) -> Tensor:
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv
        from fla.ops.kda.wy_fast import recompute_w_u_fwd

        sums, scores, self._solved = kept
        self.gated = {"gk": sums}
        self.read, self.values, self.queries, self.keys = recompute_w_u_fwd(
            q=self.q, k=self.k, v=self.v, beta=self.beta, A=self._solved, gk=sums, **self.places
        )
        self._dout = dout
        self._states, self._new_values = self.states()
        self._dscores, self._dvalues = chunk_kda_bwd_dAv(
            q=self.q, k=self.k, v=self._new_values, do=dout, A=scores, scale=1.0, **self.where
        )
        return self.gradients_before(dout, self._dvalues)

    def gradients(self, behind: Tensor | None) -> tuple[Tensor, ...]:
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_wy_dqkg_fused
        from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra

        sums = self.gated["gk"]
        dstates, dvalues = self.gradients_of_states(self._dout, self._dvalues, behind)
        dq, dk, dv, dbeta, dsums, dsolved = chunk_kda_bwd_wy_dqkg_fused(
            q=self.q,
            k=self.k,
            v=self.v,
            v_new=self._new_values,
            g=sums,
            beta=self.beta,
            A=self._solved,
            h=self._states,
            do=self._dout,
            dh=dstates,
            dv=dvalues,
            scale=1.0,
            **self.where,
        )
        dq, dk, dbeta, dsums = chunk_kda_bwd_intra(
            q=self.q,
            k=self.k,
            g=sums,
            beta=self.beta,
            dAqk=self._dscores,
            dAkk=dsolved,
            dq=dq,
            dk=dk,
            db=dbeta,
            dg=dsums,
            **self.where,
        )
        return dq, dk, dv, self.cumsum(dsums, reverse=True), dbeta


class _SimpleGla(Gated):
    """fla.ops.simple_gla."""

    name = "g"

    def outputs(self) -> Tensor:
        from fla.ops.common.chunk_o import chunk_fwd_o

        out: Tensor = chunk_fwd_o(
            q=self.q, k=self.k, v=self.v, h=self.states(), **self.gated, scale=1.0, **self.where
        )
        return out

    def gradients(self, behind: Tensor | None) -> tuple[Tensor, ...]:
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv

        given = {**self.gated, "do": self._dout, "scale": 1.0, **self.where}
        dstates = self.gradients_of_states(behind)
        dq, dk, _, dsums = chunk_bwd_dqkwg(
            q=self.q, k=self.k, v=self.v, h=self._before_chunks, dh=dstates, **given
        )
        dv = chunk_bwd_dv(q=self.q, k=self.k, dh=dstates, **given)
        return dq, dk, dv, self.cumsum(dsums, reverse=True)


class _Gla(Gated):
    """fla.ops.gla."""

    name = "gk"

    def prepare(self) -> tuple[Tensor, ...]:
        from fla.ops.gla.chunk import chunk_gla_fwd_intra_gk

        (sums,) = super().prepare()
        self._scores = chunk_gla_fwd_intra_gk(q=self.q, k=self.k, g=sums, scale=1.0, **self.where)
        return sums, self._scores

    def outputs(self) -> Tensor:
        return _outputs(self, self.gated["gk"], self.v, self._scores, self.states())

    def gradients(self, behind: Tensor | None) -> tuple[Tensor, ...]:
        from fla.ops.gla.chunk import (
            chunk_gla_bwd_dA,
            chunk_gla_bwd_dqk_intra,
            chunk_gla_bwd_dqkg,
            chunk_gla_bwd_dv,
        )

        sums, scores = self._kept
        dout, where = self._dout, self.where
        dstates = self.gradients_of_states(behind)
        dv = chunk_gla_bwd_dv(k=self.k, g=sums, A=scores, do=dout, dh=dstates, **where)
        dscores = chunk_gla_bwd_dA(v=self.v, do=dout, scale=1.0, **where)
        dq, dk = chunk_gla_bwd_dqk_intra(q=self.q, k=self.k, g=sums, dA=dscores, **where)
        dq, dk, dgate = chunk_gla_bwd_dqkg(
            q=self.q,
            k=self.k,
            v=self.v,
            h=self._before_chunks,
            g=sums,
            do=dout,
            dh=dstates,
            dq=dq,
            dk=dk,
            scale=1.0,
            **where,
        )
        return dq, dk, dv, dgate


class _Folded:
    """A rule of folded tensors, and their results unfolded.

    Attributes: widened: gates of heads became gates of channels.
    """

    rule: KernelFamily
    widened = False

    def __init__(self, given: LinearInputs) -> None:
        self._given, transition = given, given.transition
        q, k, v = (self.fold(x) for x in given[:3])
        heads = k.shape[2]
        if isinstance(transition, Decay):
            rates = log2_rates_of(transition, accumulation_dtype(q.dtype), q.device)
            self.rule = Rates(q, k, v, rates, None, self._sequences(heads))
            return
        gate, beta = (None if x is None else self.fold(x) for x in transition)
        of_heads = gate is None or gate.dim() == 3
        if gate is None:
            gate = q.new_zeros(q.shape[:3], dtype=torch.float32)
        self.widened = of_heads and refuses_gates_of_heads()
        if self.widened:
            gate = gate.unsqueeze(3).expand(*k.shape)  # written out where it is read
        kinds: tuple[type[KernelFamily], type[KernelFamily]]
        kinds = (_Gla, _SimpleGla) if beta is None else (_Kda, _GatedDeltaNet)
        if beta is not None:  # half as many segments, or none: transitions fill a GPU too
            heads = 2 * heads if k.shape[3] <= _WIDEST else WHOLE
        kind = kinds[of_heads and not self.widened]
        self.rule = kind(q, k, v, gate, beta, self._sequences(heads))

    def _sequences(self, heads: int) -> Sequences:
        q, runs = self._given.q, self._given.runs
        return sequences_of(runs, len(q), heads, fla.CHUNK, q.device)

    def fold(self, x: Tensor) -> Tensor:
        """[B,S,...] -> [1,B*S,...], a view."""
        return x.flatten(0, 1).unsqueeze(0)

    def unfold(self, x: Tensor, like: Tensor) -> Tensor:
        """Folded -> [B,S,...], in another tensor's dtype."""
        return x.view(*like.shape[:2], *x.shape[2:]).to(like.dtype)

    def of_runs(self, x: Tensor) -> Tensor:
        """[n*B,...] -> [n,B,...], contiguous."""
        return x.contiguous().view(len(self._given.runs), len(self._given.q), *x.shape[1:])


class FlaLinear(LinearKernel):
    """All of fla's families.

    Not deterministic: each process measures which block sizes to use, and they decide in which
    order sums are formed.
    """

    name = "fla"

    def unsupported(self, problem: LinearProblem) -> str | None:
        if find_spec("fla") is None:
            return "needs the package fla-core, which is not installed"
        if problem.device.type != "cuda":
            return f"runs on cuda, got tensors on {problem.device.type}"
        if problem.dtype != torch.bfloat16:
            # float32 would be multiplied in TF32, and sums over many tokens overflow float16.
            return f"takes bfloat16, got {problem.dtype}"
        for dim in (problem.head_dim, problem.value_dim):
            if dim % 2 or dim > 256:
                return f"takes even head dims up to 256, got {dim}"
        return None

    def forward(self, given: LinearInputs) -> Running[tuple[Tensor, Cache]]:
        folded = _Folded(given)
        rule, transition = folded.rule, given.transition
        kept = rule.prepare()
        added, through = rule.summaries()
        if isinstance(transition, Gates) and folded.widened and transition.beta is None:
            through = through[..., :1]

        def finish(incoming: Tensor | None) -> tuple[Tensor, Cache]:
            entered = rule.entering(None if incoming is None else incoming.flatten(0, 1))
            return folded.unfold(rule.outputs(), given.q), (*kept, *entered)

        gated = folded.of_runs(through) if isinstance(transition, Gates) else None
        return Running(folded.of_runs(added), rule.intra_chunk, finish, gated)

    def backward(self, given: LinearInputs, dout: Tensor, cache: Cache) -> Running[Gradients]:
        folded = _Folded(given)
        rule, unfold = folded.rule, folded.unfold
        *kept, rule.before, rule.through = cache
        dstates = rule.restore(tuple(x for x in kept if x is not None), folded.fold(dout))

        def finish(doutgoing: Tensor | None) -> Gradients:
            behind = None if doutgoing is None else doutgoing.flatten(0, 1)
            dq, dk, dv, *dgates = rule.gradients(behind)
            if folded.widened:
                dgates[0] = dgates[0].sum(3)
            likes = () if isinstance(given.transition, Decay) else given.transition
            pairs = zip_longest(dgates, likes)
            of_gates = [None if like is None else unfold(x, like) for x, like in pairs]
            dq, dk, dv = map(unfold, (dq, dk, dv), given[:3])
            return dq, dk, dv, Gates(*of_gates)

        return Running(folded.of_runs(dstates), rule.intra_chunk_back, finish)
