"""Gates and the delta rule with flash-linear-attention's Triton kernels (package fla-core).

The parts of fla.ops.kda and fla.ops.gated_delta_rule, and of fla.ops.gla and fla.ops.simple_gla,
are called one by one, so that states travel between them. fla's sequences are the documents of all
batch entries one after another; those of a delta rule are cut into segments that are computed side
by side, as ranks are (`decayed.run_states`, `passed_along`). The host knows where they begin, and
nothing waits for the device.

Gates of heads become gates of channels where fla refuses its kernels of the former.

B batch, S tokens in n runs, H heads, D, E head dims, m documents of all batch entries. "Folded" are
all batch entries one after another, [1,B*S,H,...].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.kernel import BackwardPass, Cache, ForwardPass
from megatron_cp_plugin.core.linear.runs import Runs
from megatron_cp_plugin.core.linear.states import Gates, Ways
from megatron_cp_plugin.kernels.fla import CHUNK, Cut, FlaLinear, cut_of, measured_blocks

_WHOLE = 2**30  # more tokens than any document has; of so many heads none is cut
_WIDEST = 128  # head dim of documents that are cut: `passed_along` takes no more


def refuses_gates_of_heads() -> bool:
    """Whether fla refuses the backward of gates of heads: Triton's results would be wrong there."""
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    return bool(IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1)


@dataclass(frozen=True)
class _Sequences:
    """Where fla's sequences are, segments of documents: int32 on the device.

    Attributes:
        count: of sequences, m. is_cut: a document has several.
        starts: where they begin, and the last one ends [m+1].
        chunks: of each chunk its sequence and its number there [chunks,2].
        offsets: how many chunks come before each sequence [m+1]. nowhere: zeros [m+1].
        ends: the last token of each chunk [chunks].
        firsts, lasts: the first and the last sequence of each run [n*B], those of a run's batch
            entries together.
        joined: the sequences of documents that are cut, or the first or last one of a run [j].
        leaving: ways through the joined ones of each run's last document, from a beginning.
        arriving: those to each joined one, from the beginning that its run has, if any.
        leaving_back, arriving_back: the same for gradients.
    """

    count: int
    is_cut: bool
    starts: Tensor
    chunks: Tensor
    offsets: Tensor
    nowhere: Tensor
    ends: Tensor
    firsts: Tensor
    lasts: Tensor
    joined: Tensor
    leaving: Ways
    arriving: Ways
    leaving_back: Ways
    arriving_back: Ways


@kept_on_device(maxsize=64)  # of some micro-batches: they take memory of the device
def _sequences(cut: Cut, chunk: int, device: torch.device) -> _Sequences:
    bounds, each, joins = cut.bounds, len(cut.segments), len(cut.joined)
    counts = (bounds.diff() + chunk - 1) // chunk
    offsets = torch.cat((bounds[:1], counts.cumsum(0)))
    sequence = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    number = torch.arange(len(sequence), device="cpu") - offsets[sequence]
    ends = torch.minimum(bounds[sequence] + (number + 1) * chunk, bounds[sequence + 1]) - 1
    entries = range(cut.batch)
    place = {number: at for at, number in enumerate(cut.joined)}

    def leaving(way: Callable[[Sequence[range]], Sequence[int]]) -> Ways:
        return Ways.of(
            [
                ([entry * joins + place[one] for one in way(run)], 0)
                for run in cut.parts
                for entry in entries
            ],
            device,
        )

    def arriving(outer: int, step: int) -> Ways:
        found: dict[int, tuple[range, int | None]] = {}
        for number, run in enumerate(cut.parts):
            for part in run:
                way = part[::step]
                begin = number * cut.batch if part == run[outer] else None
                found |= {one: (way[:at], begin) for at, one in enumerate(way)}
        ways = []
        for entry in entries:
            for one in cut.joined:
                way, begin = found[one]
                over = [entry * joins + place[other] for other in way]
                ways.append((over, -1 if begin is None else begin + entry))
        return Ways.of(ways, device)

    def numbers(x: Sequence[int]) -> Tensor:
        return uploaded(torch.tensor(x, dtype=torch.int32, device="cpu"), device)

    return _Sequences(
        len(counts),
        each > sum(map(len, cut.parts)),
        starts=uploaded(bounds, device),
        chunks=uploaded(torch.stack((sequence, number), 1), device),
        offsets=uploaded(offsets, device),
        nowhere=uploaded(torch.zeros_like(offsets), device),
        ends=uploaded(ends, device),
        firsts=numbers([run[0][0] + entry * each for run in cut.parts for entry in entries]),
        lasts=numbers([run[-1][-1] + entry * each for run in cut.parts for entry in entries]),
        joined=numbers([number + entry * each for entry in entries for number in cut.joined]),
        leaving=leaving(lambda run: run[-1]),
        arriving=arriving(0, 1),
        leaving_back=leaving(lambda run: run[0][::-1]),
        arriving_back=arriving(-1, -1),
    )


class _Rule:
    """What a family of kernels computes, of folded tensors.

    Attributes: q, k, v: [1,T,H,D or E] bfloat16. gate: [1,T,H] or [1,T,H,D], beta: [1,T,H], as in
        `Gates`. keeps: how many tensors `prepare` gives.
    """

    keeps: int

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        beta: Tensor | None,
        sequences: _Sequences,
    ) -> None:
        self.q, self.k, self.v, self.gate, self.beta = q, k, v, gate, beta
        self.sequences = sequences
        self.where: dict[str, Any] = {
            "cu_seqlens": sequences.starts,
            "chunk_size": CHUNK,
            "chunk_indices": sequences.chunks,
        }

    def cumsum(self, x: Tensor, **settings: Any) -> Tensor:
        """Sums within chunks."""
        from fla.ops.utils import chunk_local_cumsum

        found: Tensor = chunk_local_cumsum(x, **settings, **self.where)
        return found

    @abstractmethod
    def prepare(self) -> tuple[Tensor, ...]:
        """Begins the forward. Returns: what the backward keeps, as `restore` takes it."""

    @abstractmethod
    def summaries(self) -> tuple[Tensor, Tensor]:
        """What runs do to the state: [n*B,H,D,E], and transitions, see `RunStates`."""

    @abstractmethod
    def entering(self, incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        """Takes the states before the runs [n*B,H,D,E].

        Returns: what `restore` takes as `entered`.
        """

    @abstractmethod
    def outputs(self) -> Tensor:
        """out [1,T,H,E]."""

    @abstractmethod
    def restore(
        self, kept: tuple[Tensor, ...], entered: tuple[Tensor | None, ...], dout: Tensor
    ) -> Tensor:
        """Begins the backward. Returns: gradients of the states before the runs [n*B,H,D,E]."""

    @abstractmethod
    def gradients(self, behind: Tensor | None) -> tuple[Tensor, ...]:
        """dq, dk, dv, dgate, and dbeta if there is one; given those behind the runs [n*B,H,D,E]."""

    def placed(self, states: Tensor | None, sequences: Tensor) -> Tensor | None:
        """Those of all sequences, 0 but for some: [k,H,D,E] -> [m,H,D,E]."""
        if states is None:
            return None
        found = states.new_zeros((self.sequences.count, *states.shape[1:]))
        return found.index_copy_(0, sequences.long(), states)


class _Delta(_Rule):
    """The delta rule: what its two families have in common.

    Attributes:
        read, values: W and U of the chunks, see kernels/chunked.py.
        keys: as they are in the state. queries: as they read it.
        gated: sums of the gates in chunks by the name of fla's argument.
    """

    read: Tensor
    values: Tensor
    keys: Tensor
    queries: Tensor
    gated: dict[str, Tensor]
    before: Tensor | None

    def summaries(self) -> tuple[Tensor, Tensor]:
        from megatron_cp_plugin.kernels.decayed import run_states

        sequences, (sums,) = self.sequences, self.gated.values()
        given = self.read, self.keys, self.values, sums, sequences.starts, sequences.joined
        self._added, through = run_states(*given)
        assert through is not None
        self._through = through
        if not sequences.is_cut:
            order = sequences.leaving.order
            return self._added.index_select(0, order), self._through.index_select(0, order)
        head_dim = self.k.shape[3]
        identity = torch.eye(head_dim, device=self.k.device).expand(1, self.k.shape[2], -1, -1)
        nothing = self._through.new_zeros(1, 1, head_dim, head_dim).expand_as(self._through)
        return (
            self._along(self._added, self._through, None, sequences.leaving),
            self._along(nothing, self._through, identity, sequences.leaving),
        )

    def entering(self, incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        self.before = self._reaching(self._added, incoming, self._through, self.sequences.arriving)
        return self.before, self._through

    def _reaching(
        self, added: Tensor, outer: Tensor | None, through: Tensor, ways: Ways
    ) -> Tensor | None:
        """States that come to the joined sequences [j,H,D,E]; None: all are 0."""
        if outer is None and not self.sequences.is_cut:
            return None
        return self._along(added, through, outer, ways)

    def _along(self, added: Tensor, through: Tensor, first: Tensor | None, ways: Ways) -> Tensor:
        from megatron_cp_plugin.kernels.decayed import passed_along

        if first is not None and not self.sequences.is_cut:
            return torch.cat((first, torch.zeros_like(first[:1]))).index_select(
                0, ways.begins.remainder(len(first) + 1)
            )
        begin = None if first is None else first.unsqueeze(1)
        found = passed_along(added.unsqueeze(1), through.unsqueeze(1), begin, *ways)
        assert found is not None
        return found.squeeze(1)

    def _of_all(self, states: Tensor | None) -> Tensor | None:
        """Of the joined sequences -> of all [m,H,D,E]."""
        joined = self.sequences.joined
        return states if len(joined) == self.sequences.count else self.placed(states, joined)

    def states(self) -> tuple[Tensor, Tensor]:
        """The states before all chunks, and u = U - W S_0 of all tokens."""
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

        states, values, _ = chunk_gated_delta_rule_fwd_h(
            k=self.keys,
            w=self.read,
            u=self.values,
            **self.gated,
            initial_state=self._of_all(self.before),
            chunk_offsets=self.sequences.offsets,
            **self.where,
        )
        return states, values

    def gradients_before(
        self, dout: Tensor, dvalues: Tensor, entered: tuple[Tensor | None, ...]
    ) -> Tensor:
        """Of the states before the runs, if those behind them have none."""
        from megatron_cp_plugin.kernels.decayed import run_states

        sequences, (sums,), (_, through) = self.sequences, self.gated.values(), entered
        assert through is not None
        where = sequences.starts, sequences.joined
        back = self.queries, dout
        self._added, _ = run_states(self.keys, self.read, dvalues, sums, *where, back)
        self._through = through.mT
        if not sequences.is_cut:
            return self._added.index_select(0, sequences.leaving_back.order)
        return self._along(self._added, self._through, None, sequences.leaving_back)

    def gradients_of_states(
        self, dout: Tensor, dvalues: Tensor, behind: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Of the states behind all chunks, and dU."""
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu

        ways = self.sequences.arriving_back
        reaching = self._reaching(self._added, behind, self._through, ways)
        dstates, _, dvalues = chunk_gated_delta_rule_bwd_dhu(
            q=self.queries,
            k=self.keys,
            w=self.read,
            do=dout,
            dv=dvalues,
            **self.gated,
            h0=None,
            dht=self._of_all(reaching),
            scale=1.0,
            chunk_offsets=self.sequences.offsets,
            **self.where,
        )
        return dstates, dvalues


class _GatedDeltaNet(_Delta):
    """fla.ops.gated_delta_rule."""

    keeps = 2

    def prepare(self) -> tuple[Tensor, ...]:
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra

        sums = self.cumsum(self.gate, scale=1 / log(2))
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

    def restore(
        self, kept: tuple[Tensor, ...], entered: tuple[Tensor | None, ...], dout: Tensor
    ) -> Tensor:
        from fla.ops.common.chunk_o import chunk_bwd_dv_local
        from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd

        sums, self._solved = kept
        self.gated, self.keys, self.queries = {"g": sums}, self.k, self.q
        self.read, self.values = recompute_w_u_fwd(
            k=self.k,
            v=self.v,
            beta=self.beta,
            A=self._solved,
            g=sums,
            cu_seqlens=self.sequences.starts,
            chunk_indices=self.sequences.chunks,
        )
        self.before, self._dout = entered[0], dout
        self._dvalues = chunk_bwd_dv_local(
            q=self.q, k=self.k, do=dout, **self.gated, scale=1.0, **self.where
        )
        return self.gradients_before(dout, self._dvalues, entered)

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
            cu_seqlens=self.sequences.starts,
            chunk_indices=self.sequences.chunks,
        )
        dgate = self.cumsum(dsums.add_(dsums_read), reverse=True)
        return dq, dk.add_(dk_read), dv, dgate, dbeta


class _Kda(_Delta):
    """fla.ops.kda."""

    keeps = 3

    def prepare(self) -> tuple[Tensor, ...]:
        from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra

        sums = self.cumsum(self.gate, scale=1 / log(2))
        self.gated = {"gk": sums}
        self.read, self.values, _, self.keys, self._scores, solved = chunk_kda_fwd_intra(
            q=self.q, k=self.k, v=self.v, gk=sums, beta=self.beta, scale=1.0, **self.where
        )
        return sums, self._scores, solved

    def outputs(self) -> Tensor:
        from fla.ops.gla.chunk import chunk_gla_fwd_o_gk

        states, values = self.states()
        out: Tensor = chunk_gla_fwd_o_gk(
            q=self.q,
            v=values,
            g=self.gated["gk"],
            A=self._scores,
            h=states,
            scale=1.0,
            **self.where,
        )
        return out

    def restore(
        self, kept: tuple[Tensor, ...], entered: tuple[Tensor | None, ...], dout: Tensor
    ) -> Tensor:
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv
        from fla.ops.kda.wy_fast import recompute_w_u_fwd

        sums, scores, self._solved = kept
        self.gated = {"gk": sums}
        self.read, self.values, self.queries, self.keys = recompute_w_u_fwd(
            q=self.q,
            k=self.k,
            v=self.v,
            beta=self.beta,
            A=self._solved,
            gk=sums,
            cu_seqlens=self.sequences.starts,
            chunk_indices=self.sequences.chunks,
        )
        self.before, self._dout = entered[0], dout
        self._states, self._new_values = self.states()
        self._dscores, self._dvalues = chunk_kda_bwd_dAv(
            q=self.q, k=self.k, v=self._new_values, do=dout, A=scores, scale=1.0, **self.where
        )
        return self.gradients_before(dout, self._dvalues, entered)

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


class _Gated(_Rule):
    """Without the delta rule: what its two families have in common.

    Attributes: gated: as in `_Delta`. name: of fla's argument for the gates.
    """

    gated: dict[str, Tensor]
    name: str
    incoming: Tensor | None

    def summaries(self) -> tuple[Tensor, Tensor]:
        sequences = self.sequences
        (sums,) = self.gated.values()
        behind = self._behind()
        self._launch_states(None, self._unread(), behind, _WHOLE)
        # Of documents, from those of their chunks; fla's are to base 2.
        logs = sums.new_zeros((sequences.count, *sums.shape[2:]))
        logs.index_add_(0, sequences.chunks[:, 0], sums[0].index_select(0, sequences.ends))
        logs = logs.index_select(0, sequences.lasts) * log(2)
        through = logs if logs.dim() == 3 else logs.unsqueeze(2)
        return behind.index_select(0, sequences.lasts), through

    def entering(self, incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        self.incoming = incoming
        return (incoming,)

    def states(self, dtype: torch.dtype) -> Tensor:
        """Before all chunks [1,chunks,H,D,E]."""
        shape = 1, len(self.sequences.chunks), *self._behind_shape()
        found = self.k.new_empty(shape, dtype=dtype)
        before = self.placed(self.incoming, self.sequences.firsts)
        self._launch_states(before, found, None, CHUNK)
        return found

    def restore(
        self, kept: tuple[Tensor, ...], entered: tuple[Tensor | None, ...], dout: Tensor
    ) -> Tensor:
        self.gated = {self.name: kept[0]}
        (self.incoming,) = entered
        self._kept, self._dout = kept, dout
        found = self._behind()
        self._launch_gradients(None, self._unread(), found, _WHOLE)
        return found.index_select(0, self.sequences.firsts)

    def gradients_of_states(self, behind: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Of the states behind all chunks."""
        shape = 1, len(self.sequences.chunks), *self._behind_shape()
        found = self.k.new_empty(shape, dtype=dtype)
        self._launch_gradients(self.placed(behind, self.sequences.lasts), found, None, CHUNK)
        return found

    def _behind_shape(self) -> tuple[int, ...]:
        return self.k.shape[2], self.k.shape[3], self.v.shape[3]

    def _behind(self) -> Tensor:
        shape = self.sequences.count, *self._behind_shape()
        return self.k.new_empty(shape, dtype=torch.float32)

    def _unread(self) -> Tensor:
        return self.k.new_empty((1, 1, *self._behind_shape()))

    def _launch_states(
        self, before: Tensor | None, found: Tensor, behind: Tensor | None, every: int
    ) -> None:
        from fla.ops.common.chunk_h import chunk_fwd_kernel_h

        with measured_blocks(self.k, self.v):
            chunk_fwd_kernel_h[self._grid](
                k=self.k, v=self.v, h=found, h0=before, ht=behind, **self._settings(every)
            )

    def _launch_gradients(
        self, behind: Tensor | None, found: Tensor, before: Tensor | None, every: int
    ) -> None:
        from fla.ops.common.chunk_h import chunk_bwd_kernel_dh

        with measured_blocks(self.k, self.v):
            chunk_bwd_kernel_dh[self._grid](
                q=self.q,
                do=self._dout,
                dh=found,
                dht=behind,
                dh0=before,
                scale=1.0,
                HQ=self.q.shape[2],
                NG=1,
                **self._settings(every),
            )

    def _grid(self, meta: dict[str, int]) -> tuple[int]:
        heads, head_dim, value_dim = self._behind_shape()
        blocks = -(-head_dim // meta["BK"]) * -(-value_dim // meta["BV"])
        return (blocks * self.sequences.count * heads,)

    def _settings(self, every: int) -> dict[str, Any]:
        heads, head_dim, value_dim = self._behind_shape()
        given = {"g": None, "gk": None, **self.gated}
        return {
            **given,
            "g_gamma": None,
            "gv": None,
            "cu_seqlens": self.sequences.starts,
            "split_offsets": self.sequences.offsets if every == CHUNK else self.sequences.nowhere,
            "T": self.k.shape[1],
            "H": heads,
            "K": head_dim,
            "V": value_dim,
            "BT": CHUNK,
            "BS": every,
            "USE_G": given["g"] is not None,
            "USE_G_GAMMA": False,
            "USE_GK": given["gk"] is not None,
            "USE_GV": False,
            "STATE_V_FIRST": False,
        }


class _SimpleGla(_Gated):
    """fla.ops.simple_gla."""

    keeps = 1
    name = "g"

    def prepare(self) -> tuple[Tensor, ...]:
        self.gated = {"g": self.cumsum(self.gate, scale=1 / log(2))}
        return (self.gated["g"],)

    def outputs(self) -> Tensor:
        from fla.ops.common.chunk_o import chunk_fwd_o

        states = self.states(self.k.dtype)
        out: Tensor = chunk_fwd_o(
            q=self.q, k=self.k, v=self.v, h=states, **self.gated, scale=1.0, **self.where
        )
        return out

    def gradients(self, behind: Tensor | None) -> tuple[Tensor, ...]:
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv

        given = {**self.gated, "do": self._dout, "scale": 1.0, **self.where}
        dstates = self.gradients_of_states(behind, torch.float32)
        states = self.states(torch.float32)
        dq, dk, _, dsums = chunk_bwd_dqkwg(
            q=self.q, k=self.k, v=self.v, h=states, dh=dstates, **given
        )
        dv = chunk_bwd_dv(q=self.q, k=self.k, dh=dstates, **given)
        return dq, dk, dv, self.cumsum(dsums, reverse=True)


class _Gla(_Gated):
    """fla.ops.gla."""

    keeps = 2
    name = "gk"

    def prepare(self) -> tuple[Tensor, ...]:
        from fla.ops.gla.chunk import chunk_gla_fwd_intra_gk

        sums = self.cumsum(self.gate, scale=1 / log(2))
        self.gated = {"gk": sums}
        self._scores = chunk_gla_fwd_intra_gk(q=self.q, k=self.k, g=sums, scale=1.0, **self.where)
        return sums, self._scores

    def outputs(self) -> Tensor:
        from fla.ops.gla.chunk import chunk_gla_fwd_o_gk

        out: Tensor = chunk_gla_fwd_o_gk(
            q=self.q,
            v=self.v,
            g=self.gated["gk"],
            A=self._scores,
            h=self.states(self.k.dtype),
            scale=1.0,
            **self.where,
        )
        return out

    def gradients(self, behind: Tensor | None) -> tuple[Tensor, ...]:
        from fla.ops.gla.chunk import (
            chunk_gla_bwd_dA,
            chunk_gla_bwd_dqk_intra,
            chunk_gla_bwd_dqkg,
            chunk_gla_bwd_dv,
        )

        sums, scores = self._kept
        dout, where = self._dout, self.where
        dstates = self.gradients_of_states(behind, torch.float32)
        dv = chunk_gla_bwd_dv(k=self.k, g=sums, A=scores, do=dout, dh=dstates, **where)
        dscores = chunk_gla_bwd_dA(v=self.v, do=dout, scale=1.0, **where)
        dq, dk = chunk_gla_bwd_dqk_intra(q=self.q, k=self.k, g=sums, dA=dscores, **where)
        dq, dk, dgate = chunk_gla_bwd_dqkg(
            q=self.q,
            k=self.k,
            v=self.v,
            h=self.states(torch.float32),
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
    """Tensors of batch entries, folded and back."""

    def __init__(self, like: Tensor, runs: Runs) -> None:
        self.batch, self.tokens = like.shape[:2]
        self.runs = runs

    def rule_of(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> tuple[_Rule, bool]:
        """The kernels, and whether gates of heads became gates of channels."""
        gate, beta = (None if x is None else self.fold(x) for x in gates)
        q, k, v = (self.fold(x) for x in (q, k, v))
        of_heads = gate is None or gate.dim() == 3
        if gate is None:
            gate = q.new_zeros(q.shape[:3], dtype=torch.float32)
        widened = of_heads and refuses_gates_of_heads()
        if widened:
            gate = gate.unsqueeze(3).expand(*k.shape).contiguous()
        kinds: tuple[type[_Rule], type[_Rule]]
        kinds = (_Gla, _SimpleGla) if beta is None else (_Kda, _GatedDeltaNet)
        rule = kinds[of_heads and not widened]
        whole = beta is None or k.shape[3] > _WIDEST
        # Half as many segments as without transitions: more columns fill a GPU.
        cut = cut_of(self.runs, self.batch, _WHOLE if whole else 2 * k.shape[2])
        sequences = _sequences(cut, CHUNK, q.device)
        return rule(q, k, v, gate, beta, sequences), widened

    def fold(self, x: Tensor) -> Tensor:
        """[B,S,...] -> [1,B*S,...], a view."""
        return x.flatten(0, 1).unsqueeze(0)

    def unfold(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Folded -> [B,S,...]."""
        return x.view(self.batch, self.tokens, *x.shape[2:]).to(dtype)

    def of_runs(self, x: Tensor) -> Tensor:
        """[n*B,...] -> [n,B,...], contiguous."""
        return x.contiguous().view(len(self.runs), self.batch, *x.shape[1:])


class _Forward(ForwardPass):
    """A forward with gates."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, runs: Runs) -> None:
        self._folded = folded = _Folded(q, runs)
        self._dtype = q.dtype
        self._rule, widened = folded.rule_of(q, k, v, gates)
        self._kept = self._rule.prepare()
        added, through = self._rule.summaries()
        if widened and gates.beta is None:
            through = through[..., :1]
        self.states, self.through = folded.of_runs(added), folded.of_runs(through)

    def intra(self) -> None:
        pass

    def finish(self, incoming: Tensor | None) -> tuple[Tensor, Cache]:
        entered = self._rule.entering(None if incoming is None else incoming.flatten(0, 1))
        out = self._folded.unfold(self._rule.outputs(), self._dtype)
        return out, (*self._kept, *entered)


class _Backward(BackwardPass):
    """A backward with gates."""

    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates,
        runs: Runs,
        cache: Cache,
    ) -> None:
        self._folded = folded = _Folded(q, runs)
        self._gates, self._dtypes = gates, (q.dtype, k.dtype, v.dtype)
        self._rule, self._widened = folded.rule_of(q, k, v, gates)
        split = self._rule.keeps
        kept = tuple(x for x in cache[:split] if x is not None)
        found = self._rule.restore(kept, cache[split:], folded.fold(dout))
        self.dstates = folded.of_runs(found)

    def intra(self) -> None:
        pass

    def finish(self, doutgoing: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        folded = self._folded
        behind = None if doutgoing is None else doutgoing.flatten(0, 1)
        dq, dk, dv, dgate, *dbeta = self._rule.gradients(behind)
        gate, beta = self._gates
        if self._widened:
            dgate = dgate.sum(3)
        self.dgates = Gates(
            None if gate is None else folded.unfold(dgate, gate.dtype),
            None if beta is None else folded.unfold(dbeta[0], beta.dtype),
        )
        dq, dk, dv = (
            folded.unfold(x, dtype) for x, dtype in zip((dq, dk, dv), self._dtypes, strict=True)
        )
        return dq, dk, dv


class FlaRecurrent(FlaLinear):
    """All of fla's families: rates by `FlaLinear`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, transition: Decay | Gates, runs: Runs
    ) -> ForwardPass:
        if isinstance(transition, Gates):
            return _Forward(q, k, v, transition, runs)
        return super().forward(q, k, v, transition, runs)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        transition: Decay | Gates,
        runs: Runs,
        cache: Cache,
    ) -> BackwardPass:
        if isinstance(transition, Gates):
            return _Backward(dout, q, k, v, transition, runs, cache)
        return super().backward(dout, q, k, v, transition, runs, cache)
