"""Linear attention in plain torch: any device and dtype, memory linear in tokens.

Within chunks of 64 tokens scores are written out, between chunks states are passed on. All
arithmetic is float32 (float64 for float64).

B batch, C tokens, H heads, D, E head dims, n chunks of c tokens. In a chunk i = 1..c.
"""

from itertools import pairwise

import torch
from torch import Tensor

from megatron_cp_plugin.core.execution.partial import accumulation_dtype
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.kernel import (
    BackwardPass,
    ForwardPass,
    LinearKernel,
    LinearProblem,
)

_CHUNK = 64


class Chunked(LinearKernel):
    """Right products between chunks, left products within (LASP, equations 7 and 9)."""

    name = "chunked"
    deterministic = True

    def unsupported(self, problem: LinearProblem) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Decay) -> ForwardPass:
        return _Forward(q, k, v, decay)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Decay,
        cache: Tensor | None,
    ) -> BackwardPass:
        return _Backward(dout, q, k, v, decay, cache)


class _Forward(ForwardPass):
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, decay: Decay) -> None:
        self._dtype = q.dtype
        wide = accumulation_dtype(q.dtype)
        self._q, self._k, self._v = (x.to(wide) for x in (q, k, v))
        self._decay = decay
        self.state = _outer(self._k * _to_end(k, decay, wide), self._v)

    def intra(self) -> None:
        chunks = _Chunks(self._q, self._decay)
        q, k, v = (chunks.split(x) for x in (self._q, self._k, self._v))
        before = chunks.scan(_transposed(k * chunks.to_end) @ v)
        out = chunks.masked(q @ _transposed(k)) @ v + (q * chunks.from_start) @ before
        self._out = chunks.join(out)

    def finish(self, incoming: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out = self._out
        if incoming is not None:
            weighted = self._q * _from_start(self._q, self._decay, out.dtype)
            out = out + _apply(weighted, incoming)
        return out.to(self._dtype), incoming


class _Backward(BackwardPass):
    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Decay,
        incoming: Tensor | None,
    ) -> None:
        self._dtypes = q.dtype, k.dtype, v.dtype
        wide = accumulation_dtype(q.dtype)
        self._dout, self._q, self._k, self._v = (x.to(wide) for x in (dout, q, k, v))
        self._decay = decay
        self._incoming = incoming
        self._from_start = _from_start(q, decay, wide)
        self.dstate = _outer(self._q * self._from_start, self._dout)

    def intra(self) -> None:
        chunks = _Chunks(self._q, self._decay)
        q, k, v, dout = (chunks.split(x) for x in (self._q, self._k, self._v, self._dout))
        before = chunks.scan(_transposed(k * chunks.to_end) @ v)
        dafter = chunks.scan(_transposed(q * chunks.from_start) @ dout, backwards=True)
        scores = chunks.masked(q @ _transposed(k))
        dscores = chunks.masked(dout @ _transposed(v))
        dq = dscores @ k + chunks.from_start * (dout @ _transposed(before))
        dk = _transposed(dscores) @ q + chunks.to_end * (v @ _transposed(dafter))
        dv = _transposed(scores) @ dout + chunks.to_end * (k @ dafter)
        self._dq, self._dk, self._dv = (chunks.join(x) for x in (dq, dk, dv))
        if self._incoming is not None:
            weighted = self._dout * self._from_start
            self._dq = self._dq + _apply(weighted, _transposed(self._incoming))

    def finish(self, doutgoing: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self._dq, self._dk, self._dv
        if doutgoing is not None:
            to_end = _to_end(self._k, self._decay, dk.dtype)
            dk = dk + _apply(self._v * to_end, _transposed(doutgoing))
            dv = dv + _apply(self._k * to_end, doutgoing)
        q_dtype, k_dtype, v_dtype = self._dtypes
        return dq.to(q_dtype), dk.to(k_dtype), dv.to(v_dtype)


class _Chunks:
    """Runs as n chunks of c tokens; zeros in front fill the first one, before which no state is.

    Attributes: from_start: rate**i, to_end: rate**(c - i); [H,1,c,1].
    """

    def __init__(self, like: Tensor, decay: Decay) -> None:
        """Args: like: [B,C,H,D]."""
        self._tokens = like.shape[1]
        self._length = min(_CHUNK, max(self._tokens, 1))
        self._front = -self._tokens % self._length
        i = torch.arange(1, self._length + 1, device=like.device)
        gap = (i[:, None] - i[None, :]).clamp_min(0)
        self._mask = decay.powers(gap).permute(2, 0, 1).unsqueeze(1).tril().to(like.dtype)
        self.from_start = decay.powers(i).T[:, None, :, None].to(like.dtype)
        self.to_end = decay.powers(self._length - i).T[:, None, :, None].to(like.dtype)
        self._whole = self.from_start[:, 0, -1:]

    def split(self, x: Tensor) -> Tensor:
        """[B,C,H,D] -> [B,H,n,c,D]."""
        if self._front:
            x = torch.cat([x.new_zeros(x.shape[0], self._front, *x.shape[2:]), x], 1)
        return x.unflatten(1, (-1, self._length)).permute(0, 3, 1, 2, 4).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """[B,H,n,c,D] -> [B,C,H,D]."""
        return x.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, self._front :].contiguous()

    def masked(self, scores: Tensor) -> Tensor:
        """Scores [B,H,n,c,c] times rate**(i - j) for j <= i, else 0."""
        return scores * self._mask

    def scan(self, states: Tensor, *, backwards: bool = False) -> Tensor:
        """What each chunk sees of the chunks before it (after it): [B,H,n,D,E] twice."""
        seen = torch.zeros_like(states)
        order = range(states.shape[2])
        steps = list(reversed(order)) if backwards else list(order)
        for source, target in pairwise(steps):
            torch.addcmul(
                states[:, :, source], seen[:, :, source], self._whole, out=seen[:, :, target]
            )
        return seen


def _from_start(x: Tensor, decay: Decay, dtype: torch.dtype) -> Tensor:
    """rate**t of tokens t = 1..C of x [B,C,...]: [C,H,1]."""
    t = torch.arange(1, x.shape[1] + 1, device=x.device)
    return decay.powers(t).unsqueeze(-1).to(dtype)


def _to_end(x: Tensor, decay: Decay, dtype: torch.dtype) -> Tensor:
    """rate**(C - t) of tokens t = 1..C of x [B,C,...]: [C,H,1]."""
    t = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)
    return decay.powers(t).unsqueeze(-1).to(dtype)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    """Sum of x_t y_t^T over tokens: [B,C,H,D], [B,C,H,E] -> [B,H,D,E]."""
    return torch.einsum("bthd,bthe->bhde", x, y)


def _apply(x: Tensor, state: Tensor) -> Tensor:
    """state^T x_t of every token: [B,C,H,D], [B,H,D,E] -> [B,C,H,E]."""
    return torch.einsum("bthd,bhde->bthe", x, state)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2)
