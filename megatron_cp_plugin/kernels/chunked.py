"""Linear attention in plain torch: any device and dtype, memory linear in tokens.

Within chunks of 64 tokens scores are written out, between chunks states are passed on, in all
documents at once. All arithmetic is float32 (float64 for float64).

B batch, S tokens, H heads, D, E head dims, n chunks of c tokens. In a chunk i = 1..c.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.kernel import (
    BackwardPass,
    ForwardPass,
    LinearKernel,
    LinearProblem,
)
from megatron_cp_plugin.core.linear.runs import Interval, Runs
from megatron_cp_plugin.core.partial import accumulation_dtype

_CHUNK = 64


class Chunked(LinearKernel):
    """Right products between chunks, left products within (LASP, equations 7 and 9)."""

    name = "chunked"
    deterministic = True

    def unsupported(self, problem: LinearProblem) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Decay, runs: Runs) -> ForwardPass:
        return _Forward(q, k, v, decay, runs)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Decay,
        runs: Runs,
        cache: Tensor | None,
    ) -> BackwardPass:
        return _Backward(dout, q, k, v, decay, runs, cache)


class _Forward(ForwardPass):
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, decay: Decay, runs: Runs) -> None:
        self._dtype = q.dtype
        wide = accumulation_dtype(q.dtype)
        self._q, self._k, self._v = (x.to(wide) for x in (q, k, v))
        self._decay, self._runs = decay, runs
        self.states = _outer(
            _weighted(self._k, decay, runs.lasts, to_end=True), self._v, runs.lasts
        )

    def intra(self) -> None:
        chunks = _Chunks(self._q, self._decay, self._runs)
        q, k, v = (chunks.split(x) for x in (self._q, self._k, self._v))
        before = chunks.scan(_transposed(k * chunks.to_end) @ v)
        out = chunks.masked(q @ _transposed(k)) @ v + (q * chunks.from_start) @ before
        self._out = chunks.join(out)

    def finish(self, incoming: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out = self._out
        if incoming is not None:
            firsts = self._runs.firsts
            weighted = _weighted(self._q, self._decay, firsts, to_end=False)
            _add_products(out, weighted, incoming, firsts)
        return out.to(self._dtype), incoming


class _Backward(BackwardPass):
    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Decay,
        runs: Runs,
        incoming: Tensor | None,
    ) -> None:
        self._dtypes = q.dtype, k.dtype, v.dtype
        wide = accumulation_dtype(q.dtype)
        self._dout, self._q, self._k, self._v = (x.to(wide) for x in (dout, q, k, v))
        self._decay, self._runs = decay, runs
        self._incoming = incoming
        weighted = _weighted(self._q, decay, runs.firsts, to_end=False)
        self.dstates = _outer(weighted, self._dout, runs.firsts)

    def intra(self) -> None:
        chunks = _Chunks(self._q, self._decay, self._runs)
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
            firsts = self._runs.firsts
            weighted = _weighted(self._dout, self._decay, firsts, to_end=False)
            _add_products(self._dq, weighted, _transposed(self._incoming), firsts)

    def finish(self, doutgoing: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self._dq, self._dk, self._dv
        if doutgoing is not None:
            lasts = self._runs.lasts
            k, v = (_weighted(x, self._decay, lasts, to_end=True) for x in (self._k, self._v))
            _add_products(dk, v, _transposed(doutgoing), lasts)
            _add_products(dv, k, doutgoing, lasts)
        q_dtype, k_dtype, v_dtype = self._dtypes
        return dq.to(q_dtype), dk.to(k_dtype), dv.to(v_dtype)


@dataclass(frozen=True)
class _Places:
    """Where the tokens of chunks are. A chunk begins and ends with a document; zeros in front fill
    the first one of each, before which no state is.

    The first chunks of all documents come first, then the second ones of those that have any, in
    the same order, and so on: the longest documents are the first.

    Attributes: count: n. length: c. links: which first chunks are before which second ones, which
        second ones before which third ones, ... tokens: of each place in a chunk [n*c], S for a
        zero; chunked: the place of each token [S]; both int32.
    """

    count: int
    length: int
    links: list[tuple[slice, slice]]
    tokens: Tensor
    chunked: Tensor


@kept_on_device(maxsize=64)  # of some micro-batches: they take memory of the device
def _places(runs: Runs, device: torch.device) -> _Places:
    intervals = [interval for documents in runs.documents for interval in documents]
    starts, stops = torch.tensor(intervals, device="cpu").unbind(1)
    total = int(stops[-1])
    length = min(_CHUNK, max(int((stops - starts).max()), 1))
    chunks, order = ((stops - starts + length - 1) // length).sort(descending=True, stable=True)
    starts, stops = starts[order], stops[order]
    # How many chunks are first ones, second ones, ...
    rounds = [int((chunks > number).sum()) for number in range(int(chunks[0]))]
    edges = [0, *accumulate(rounds)]
    links = [
        (slice(start, start + count), slice(then, then + count))
        for start, then, count in zip(edges, edges[1:], rounds[1:], strict=False)
    ]
    document = torch.cat([torch.arange(count, device="cpu") for count in (*rounds, 0)])
    number = torch.repeat_interleave(torch.tensor(rounds, dtype=torch.long, device="cpu"))
    later = chunks[document] - number
    tokens = (stops[document] - later * length)[:, None] + torch.arange(length, device="cpu")
    inside = tokens >= starts[document, None]
    chunked = torch.empty(total, dtype=torch.long, device="cpu")
    chunked[tokens[inside]] = inside.flatten().nonzero()[:, 0]
    tokens = tokens.where(inside, total).flatten()
    placed = uploaded(tokens, device), uploaded(chunked, device)
    return _Places(len(document), length, links, *placed)


class _Chunks:
    """Documents as n chunks of c tokens.

    Attributes: from_start: rate**i, to_end: rate**(c - i); [H,1,c,1].
    """

    def __init__(self, like: Tensor, decay: Decay, runs: Runs) -> None:
        """Args: like: [B,S,H,D]."""
        self._places = _places(runs, like.device)
        length = self._places.length
        i = torch.arange(1, length + 1, device=like.device)
        gap = (i[:, None] - i[None, :]).clamp_min(0)
        self._mask = decay.powers(gap).permute(2, 0, 1).unsqueeze(1).tril().to(like.dtype)
        self.from_start = decay.powers(i).T[:, None, :, None].to(like.dtype)
        self.to_end = decay.powers(length - i).T[:, None, :, None].to(like.dtype)
        self._whole = self.from_start[:, :, -1:]

    def split(self, x: Tensor) -> Tensor:
        """[B,S,H,D] -> [B,H,n,c,D]."""
        zeros = x.new_zeros(x.shape[0], 1, *x.shape[2:])
        x = torch.cat([x, zeros], 1).index_select(1, self._places.tokens)
        x = x.unflatten(1, (self._places.count, self._places.length))
        return x.permute(0, 3, 1, 2, 4).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """[B,H,n,c,D] -> [B,S,H,D]."""
        return x.permute(0, 2, 3, 1, 4).flatten(1, 2).index_select(1, self._places.chunked)

    def masked(self, scores: Tensor) -> Tensor:
        """Scores [B,H,n,c,c] times rate**(i - j) for j <= i, else 0."""
        return scores * self._mask

    def scan(self, states: Tensor, *, backwards: bool = False) -> Tensor:
        """What each chunk sees of those before it (after it) in its document: [B,H,n,D,E] twice."""
        seen = torch.zeros_like(states)
        for places in self._places.links[:: -1 if backwards else 1]:
            source, target = places[:: -1 if backwards else 1]
            torch.addcmul(
                states[:, :, source], seen[:, :, source], self._whole, out=seen[:, :, target]
            )
        return seen


def _weighted(
    x: Tensor, decay: Decay, intervals: Sequence[Interval], *, to_end: bool
) -> list[Tensor]:
    """Tokens t = 1..C of intervals of x [B,S,H,D], times rate**t or rate**(C - t): [B,C,H,D]."""
    longest = max(stop - start for start, stop in intervals)
    exponents = torch.arange(longest, device=x.device)
    powers = decay.powers(exponents.flip(0) if to_end else exponents + 1).unsqueeze(-1).to(x.dtype)
    return [
        x[:, start:stop] * (powers[longest - stop + start :] if to_end else powers[: stop - start])
        for start, stop in intervals
    ]


def _outer(x: Sequence[Tensor], y: Tensor, intervals: Sequence[Interval]) -> Tensor:
    """Sums of x_t y_t^T over intervals of y [B,S,H,E]: n times [B,C,H,D] -> [n,B,H,D,E]."""
    parts = (y[:, start:stop] for start, stop in intervals)
    pairs = zip(x, parts, strict=True)
    return torch.stack([torch.einsum("bthd,bthe->bhde", *pair) for pair in pairs])


def _add_products(
    out: Tensor, x: Sequence[Tensor], states: Tensor, intervals: Sequence[Interval]
) -> None:
    """Adds state^T x_t of every token to intervals of out [B,S,H,E]. Args: states: [n,B,H,D,E]."""
    for (start, stop), tokens, state in zip(intervals, x, states, strict=True):
        out[:, start:stop] += torch.einsum("bthd,bhde->bthe", tokens, state)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2)
