"""Ulysses for linear attention, the baseline that LASP compares with.

B batch, S local tokens, H heads, D, E head dims of q and k, and of v, P ranks.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from megatron_cp_plugin.algorithms.lasp2 import Lasp2
from megatron_cp_plugin.core.blocks.assembly import assemble, padded
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.execution.team import ExchangingTeam
from megatron_cp_plugin.core.linear.algorithm import (
    LinearAlgorithm,
    LinearCall,
    LinearTensors,
    Saved,
)
from megatron_cp_plugin.core.linear.states import Decay, Gates
from megatron_cp_plugin.registry import register


@register("linear_ulysses")
class LinearUlysses(LinearAlgorithm):
    """All-to-alls give each rank H/P heads of all tokens, and their results go back the same way.

    With S = N/P tokens a rank and elements of e bytes, a rank sends 2 * B*S*H*(P-1)/P * (D+E) * e
    bytes, and B*S*H*(P-1)/P * 4 for each number of a head's gates in float32, forward and backward
    alike: more the longer the sequence is, while the bytes of lasp2 do not depend on it. Kept for
    the backward: the exchanged q, k, v, gates and their states. Not pipelined: linear attention is
    too fast to hide an exchange of its inputs. Heads that are shared are repeated before. Without a
    causal mask both directions do this.

    Where P does not divide H, heads of zeros are added, exchanged and computed, and taken
    off again: H is then the next multiple of P, 36 for 33 heads on 4 ranks.

    Source: DeepSpeed-Ulysses, as in LASP, section 4.1. Differs: any number of heads.
    """

    @dataclass(frozen=True)
    class Options(Lasp2.Options):
        """Options of linear_ulysses, those of lasp2."""

    options: Options
    collective = True

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self._inward, self._outward = topology.channel("inward"), topology.channel("outward")
        self._states = topology.channel("states")
        self._whole = Lasp2(topology.subgroup([topology.rank], "alone"), Lasp2.Options())

    def forward(
        self, given: LinearTensors, call: LinearCall
    ) -> tuple[Tensor, Tensor | None, Saved]:
        q, k, v, gates, initial = given
        exchange, heads, local = self._exchange(call), q.shape[2], q.shape[1]
        all_given = [_with_numbers(x) for x in (q, k, v, *gates) if x is not None]
        q, k, v, *came = exchange.come([(self._filled(x, 2), None) for x in all_given])()
        gates = gates.each(lambda x: came.pop(0).view(*q.shape[:3], *x.shape[3:]))
        if initial is not None:
            initial = self._filled(initial, 1)[:, self._mine(heads)].contiguous()
        of_share = self._of(call, heads)
        share = LinearTensors(q, k, v, gates, initial)
        part, final, saved = self._whole.forward(share, of_share)
        out = part.new_empty((len(part), local, self._all(heads), part.shape[3]))
        sending = exchange.send_results([(part, out, None)])
        if final is not None:
            final = self._states.all_gather(final).wait().movedim(0, 1).flatten(1, 2)
            final = final[:, :heads].contiguous()
        sending()
        return out[:, :, :heads].contiguous(), final, saved

    def backward(
        self, dout: Tensor, dfinal: Tensor | None, saved: Saved, call: LinearCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Gates]:
        """See LinearAlgorithm.backward: dinitial is 0 but for this rank's heads."""
        exchange, heads = self._exchange(call), dout.shape[2]
        dout = self._filled(dout, 2)
        arriving = exchange.come([(dout, None)])
        if dfinal is not None:
            by_rank = self._filled(dfinal, 1).unflatten(1, (self.topology.size, -1)).movedim(1, 0)
            dfinal = self._states.all_to_all(by_rank).wait()[0].sum(0)
        *parts, own, dgates = self._whole.backward(
            arriving()[0], dfinal, saved, self._of(call, heads)
        )
        parts += [_with_numbers(x) for x in dgates if x is not None]
        gradients = [part.new_empty((*dout.shape[:3], part.shape[3])) for part in parts]
        exchange.send_results([(*both, None) for both in zip(parts, gradients, strict=True)])()
        dq, dk, dv, *found = (x[:, :, :heads].contiguous() for x in gradients)
        returned = dgates.each(lambda x: found.pop(0).squeeze(3) if x.dim() == 3 else found.pop(0))
        if own is None:
            return dq, dk, dv, None, returned
        dinitial = own.new_zeros((own.shape[0], self._all(heads), *own.shape[2:]))
        dinitial[:, self._mine(heads)] = own
        return dq, dk, dv, dinitial[:, :heads].contiguous(), returned

    def _exchange(self, call: LinearCall) -> ExchangingTeam:
        size, seq_len = self.topology.size, call.seq_len
        layout = self.layout.for_documents(call.documents) if call.documents else self.layout
        spans = [layout.spans(rank, size, seq_len) for rank in range(size)]
        width = max(layout.length(rank, size, seq_len) for rank in range(size))
        ways = (lambda: self._inward), (lambda: self._outward)
        return ExchangingTeam(*ways, assemble(spans, width))

    def _all(self, heads: int) -> int:
        """Number of heads with those of zeros."""
        return heads + -heads % self.topology.size

    def _filled(self, x: Tensor, dim: int) -> Tensor:
        """x with heads of zeros. Args: dim: of the heads."""
        return padded(x, dim, self._all(x.shape[dim]))

    def _mine(self, heads: int) -> slice:
        """The heads that this rank computes."""
        share = self._all(heads) // self.topology.size
        return slice(self.topology.rank * share, (self.topology.rank + 1) * share)

    def _of(self, call: LinearCall, heads: int) -> LinearCall:
        """The same attention of this rank's heads; heads of zeros have no decay."""
        rates = call.decay.rates + (1.0,) * (self._all(heads) - heads)
        return replace(call, decay=Decay(rates[self._mine(heads)]), shared=1)


def _with_numbers(gate: Tensor) -> Tensor:
    """[B,S,H] or [B,S,H,D] -> [B,S,H,1 or D]."""
    return gate if gate.dim() == 4 else gate.unsqueeze(3)
