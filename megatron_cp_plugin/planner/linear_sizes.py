"""Shapes that fla's linear attention kernels return, for tensors without storage."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from megatron_cp_plugin.core.execution.partial import accumulation_dtype
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.kernel import BackwardPass, ForwardPass, LinearKernel
from megatron_cp_plugin.kernels.fla import CHUNK, segments_of


def _states(q: Tensor, v: Tensor, count: int, dtype: torch.dtype | None = None) -> Tensor:
    batch, _, heads, dim = q.shape
    shape = (batch * count, heads, dim, v.shape[3])
    return q.new_empty(shape, dtype=dtype or accumulation_dtype(q.dtype))


def _segments(q: Tensor) -> int:
    batch, tokens, heads, _ = q.shape
    return segments_of(batch, tokens, heads)


class ForwardSizes(ForwardPass):
    """Of a forward."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._q, self._v = q, v
        self._ends = _states(q, v, _segments(q))
        self.state = _states(q, v, 1)

    def intra(self) -> None:
        self._before = _states(self._q, self._v, _segments(self._q))
        self._out = torch.empty_like(self._v)

    def finish(self, incoming: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if incoming is not None:
            self._before = _states(self._q, self._v, _segments(self._q))
        return self._out, self._before


class BackwardSizes(BackwardPass):
    """Of a backward."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._of = q, k, v
        self._dstarts = _states(q, v, _segments(q))
        self.dstate = _states(q, v, 1)

    def intra(self) -> None:
        self._before_chunks = self._of_chunks()

    def finish(self, doutgoing: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._of
        dends, dafter_chunks = _states(q, v, _segments(q)), self._of_chunks()
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        del self._before_chunks
        dv = torch.empty_like(v)
        del dends, dafter_chunks
        return dq, dk, dv

    def _of_chunks(self) -> Tensor:
        q, _, v = self._of
        return _states(q, v, -(-q.shape[1] // CHUNK), q.dtype)


class LinearSizes(LinearKernel):
    """Computes nothing. Attributes: forward_pass, backward_pass: what it makes for them."""

    name = "sizes"
    forward_pass: ClassVar = ForwardSizes
    backward_pass: ClassVar = BackwardSizes

    def unsupported(self, problem: object) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Decay) -> ForwardPass:
        made: ForwardPass = self.forward_pass(q, k, v)
        return made

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Decay,
        cache: Tensor | None,
    ) -> BackwardPass:
        made: BackwardPass = self.backward_pass(q, k, v)
        return made
