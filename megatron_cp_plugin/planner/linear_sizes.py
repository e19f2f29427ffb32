"""Shapes that fla's linear attention kernels return, for tensors without storage."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp_plugin.core.linear.kernel import (
    BackwardPass,
    Cache,
    ForwardPass,
    LinearInputs,
    LinearKernel,
)
from megatron_cp_plugin.core.linear.runs import Runs
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.kernels.fla import CHUNK, segments_of


def _states(q: Tensor, v: Tensor, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """So many for each batch entry."""
    batch, _, heads, dim = q.shape
    shape = (count, batch, heads, dim, v.shape[3])
    return q.new_empty(shape, dtype=dtype or accumulation_dtype(q.dtype))


def _segments(q: Tensor, runs: Runs) -> int:
    """Of a batch entry, whose runs are one document each."""
    batch, tokens, heads, _ = q.shape
    return len(runs) * segments_of(tokens // len(runs), batch * tokens, heads)


class ForwardSizes(ForwardPass):
    """Of a forward."""

    def __init__(self, given: LinearInputs) -> None:
        q, _, v, _, runs = given
        self._q, self._v = q, v
        self._segments = _segments(q, runs)
        self._ends = _states(q, v, self._segments)
        self.states = _states(q, v, len(runs))

    def intra(self) -> None:
        self._before = _states(self._q, self._v, self._segments)
        self._out = torch.empty_like(self._v)

    def finish(self, incoming: Tensor | None) -> tuple[Tensor, Cache]:
        if incoming is not None:
            self._before = _states(self._q, self._v, self._segments)
        return self._out, (self._before,)


class BackwardSizes(BackwardPass):
    """Of a backward."""

    def __init__(self, given: LinearInputs, dout: Tensor, cache: Cache) -> None:
        q, k, v, _, runs = given
        self._of, self._runs = (q, k, v), runs
        self._segments = _segments(q, runs)
        self._dstarts = _states(q, v, self._segments)
        self.dstates = _states(q, v, len(runs))

    def intra(self) -> None:
        self._before_chunks = self._of_chunks()

    def finish(self, doutgoing: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._of
        dends, dafter_chunks = _states(q, v, self._segments), self._of_chunks()
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        del self._before_chunks
        dv = torch.empty_like(v)
        del dends, dafter_chunks
        return dq, dk, dv

    def _of_chunks(self) -> Tensor:
        q, _, v = self._of
        runs = len(self._runs)
        return _states(q, v, runs * -(-q.shape[1] // runs // CHUNK), q.dtype)


class LinearSizes(LinearKernel):
    """Computes nothing."""

    name = "sizes"
    forward, backward = ForwardSizes, BackwardSizes

    def unsupported(self, problem: object) -> str | None:
        return None
