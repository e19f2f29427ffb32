"""Calls of linear attention on virtual ranks, and whether they give what the recurrence gives."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.record import CommunicationLog
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import Layout, document_starts, shard, unshard
from megatron_cp_plugin.registry import layout_of
from tests.linear_oracle import NAMES, Linear, LinearExpected
from tests.oracle import relative_error

Found = list[Tensor | None]  # by NAMES


@dataclass(frozen=True)
class LinearCall:
    """One call.

    Attributes: bounds: cu_seqlens, if it is given. begins, ends: whether there are an initial and a
        final state. wanted: whether q, k, v and the initial state require gradients. strided:
        inputs are not contiguous. dtype: of tokens.
    """

    algo: str
    options: tuple[tuple[str, object], ...]
    given: Linear
    bounds: tuple[int, ...] | None = None
    begins: bool = True
    ends: bool = True
    wanted: tuple[bool, ...] = (True,) * 4
    strided: bool = False
    kernel: str = "auto"
    dtype: torch.dtype = torch.float64

    @property
    def layout(self) -> Layout:
        """The layout, which may follow the documents."""
        tokens = self.given.tokens
        documents = document_starts(self.bounds or (0, tokens), tokens)
        return layout_of(self.algo, dict(self.options)).for_documents(documents)

    def on(self, topology: Topology) -> Found:
        """What one rank gets."""
        given, rank, size = self.given, topology.rank, topology.size

        def mine(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            part = shard(x, 1, self.layout, rank, size).to(self.dtype)
            return part.transpose(1, 2).contiguous().transpose(1, 2) if self.strided else part

        tokens = [mine(x) for x in (given.q, given.k, given.v, given.gate, given.beta)]
        initial = given.initial.clone() if self.begins else None
        wanted = (*self.wanted[:3], True, True, self.wanted[3])
        asked = [
            None if x is None else x.requires_grad_(want)
            for x, want in zip((*tokens, initial), wanted, strict=True)
        ]
        decay = None if given.rates is None else torch.tensor(given.rates, dtype=torch.float64)
        got = cp.linear_attention(
            *asked[:3],
            decay=decay,
            gate=asked[3],
            beta=asked[4],
            algo=self.algo,
            group=topology,
            causal=given.causal,
            initial_state=asked[5],
            output_final_state=self.ends,
            seq_len=given.tokens,
            cu_seqlens=self.bounds,
            kernel=self.kernel,
            **dict(self.options),
        )
        results = got if self.ends else (got,)
        # Every rank's loss takes an unequal part of the final state.
        part = 2 * (rank + 1) / (size * (size + 1))
        like = (mine(given.dout), part * given.dfinal)[: len(results)]
        inputs = [x for x in asked if x is not None and x.requires_grad]
        unused = {"allow_unused": True, "materialize_grads": True}
        gradients = iter(torch.autograd.grad(results, inputs, like, **unused) if inputs else ())
        found = [x.detach() for x in results] + [None] * (not self.ends)
        for x in asked:
            found.append(next(gradients) if x is not None and x.requires_grad else None)
        return found

    def whole(self, of_ranks: Sequence[Found]) -> Found:
        """The results of all ranks put together."""
        found: Found = []
        for name, parts in zip(NAMES, zip(*of_ranks, strict=True), strict=True):
            if parts[0] is None:
                assert all(x is None for x in parts)
                found.append(None)
            elif name == "final":
                assert all(map(parts[0].equal, parts))
                found.append(parts[0])
            else:
                found.append(
                    sum(parts) if name == "dinitial" else unshard(list(parts), 1, self.layout)
                )
        return found

    def assert_equals(self, of_ranks: Sequence[Found], expected: LinearExpected, bound: float):
        """Every result that there is."""
        for name, got, want in zip(NAMES, self.whole(of_ranks), expected.results, strict=True):
            if got is not None:
                assert got.isfinite().all(), name
                error = relative_error(got, want)
                assert error <= bound, f"{self.algo}: {name} is off by {error:.1e}"


def run(call: LinearCall, size: int) -> tuple[list[Found], CommunicationLog]:
    """What every virtual rank gets, and what they sent."""
    with cp.record_communication() as log:
        return run_virtual(size, call.on), log
