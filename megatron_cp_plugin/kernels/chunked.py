"""Linear attention in plain torch: any device, dtype and transition, memory linear in tokens.

Scores are computed within chunks, and states are passed between chunks, for all documents at once.
All arithmetic is float32 (float64 for float64); sums of logarithms are float64. An exponent is
never above 0.

B batch, S tokens, H heads, D, E head dims, n chunks of c tokens. In a chunk with the state S_0
before it, tokens i = 1..c, and b_i the sum of the gates of its tokens up to i:

    S_i = exp(b_i) S_0 + sum over j <= i of exp(b_i - b_j) k_j u_j^T

where u = v without the delta rule. With it, u_i = beta_i (v_i - what S_{i-1} has for k_i), so that
(I + L) u = beta (v - (k exp(b)) S_0) with L_ij = beta_i (k_i exp(b_i - b_j) k_j) for j < i: a
triangular system, whose solution is u = U - W S_0 (the WY form).

Source: LASP, equations 7 and 9; Parallelizing Linear Transformers with the Delta Rule (Yang et al.,
2024), section 3; Kimi Linear (2025), equation 6. Differs: exact for any gates.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.linear.kernel import (
    Cache,
    Gradients,
    LinearInputs,
    LinearKernel,
    LinearProblem,
    Running,
)
from megatron_cp_plugin.core.linear.states import NO_GATES, Decay, Gates, Runs
from megatron_cp_plugin.core.partial import accumulation_dtype

_CHUNK = 64
_CHUNK_OF_CHANNELS = 16  # where scores are sums over channels that each have weights of their own


class Chunked(LinearKernel):
    """Right products between chunks, left products within; gradients by autograd."""

    name = "chunked"
    deterministic = True

    def unsupported(self, problem: LinearProblem) -> str | None:
        return None

    def forward(self, given: LinearInputs) -> Running[tuple[Tensor, Cache]]:
        chunks = _Chunks(given)
        states, through = chunks.run_states()
        return Running(
            states,
            lambda: chunks.intra_chunk,
            lambda incoming: (chunks.outputs(incoming), (incoming,)),
            None if isinstance(given.transition, Decay) else through,
        )

    def backward(self, given: LinearInputs, dout: Tensor, cache: Cache) -> Running[Gradients]:
        q, k, v, transition, runs = given
        (incoming,) = cache
        if incoming is None:
            wide = accumulation_dtype(q.dtype)
            shape = len(runs), q.shape[0], *q.shape[2:], v.shape[3]
            incoming = q.new_zeros(shape, dtype=wide)
        gates = NO_GATES if isinstance(transition, Decay) else transition
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v, *gates) if x is not None]
            incoming = incoming.detach().requires_grad_()
            (q, k, v), others = leaves[:3], leaves[3:]
            if isinstance(transition, Gates):
                transition = transition.each(lambda _: others.pop(0))
            chunks = _Chunks(LinearInputs(q, k, v, transition, runs))
            out = chunks.outputs(incoming)
        (dstates,) = torch.autograd.grad(
            out, incoming, dout, retain_graph=True, materialize_grads=True
        )

        def finish(doutgoing: Tensor | None) -> Gradients:
            results, gradients = [out], [dout]
            if doutgoing is not None:
                results.append(chunks.ends)
                gradients.append(doutgoing)
            dq, dk, dv, *dgates = torch.autograd.grad(
                results, leaves, gradients, materialize_grads=True
            )
            return dq, dk, dv, gates.each(lambda _: dgates.pop(0))

        return Running(dstates, lambda: None, finish)


@dataclass(frozen=True)
class _Places:
    """Places of tokens in chunks. Chunks do not cross documents; zeros in front fill the first
    chunk of each document, before which the state is 0. A document without tokens has a chunk of
    zeros.

    The first chunks of all documents come first, then the second chunks of documents that have
    them, in the same order, and so on; the longest documents come first.

    Attributes:
        length: c.
        rounds: number of first chunks, of second chunks, ...
        tokens: token at each place in a chunk [n*c]; S for a zero.
        chunked: the place of each token [S].
        firsts: number of each run's first document, in this order.
        lasts: last chunk of each run's last document.
    """

    length: int
    rounds: tuple[int, ...]
    tokens: Tensor
    chunked: Tensor
    firsts: Tensor
    lasts: Tensor


@kept_on_device(maxsize=64)  # of some micro-batches: they take memory of the device
def _chunk_places(runs: Runs, chunk: int, device: torch.device) -> _Places:
    intervals = [interval for documents in runs.documents for interval in documents]
    starts, stops = torch.tensor(intervals, device="cpu").unbind(1)
    total = int(stops[-1])
    length = min(chunk, max(int((stops - starts).max()), 1))
    counts = ((stops - starts + length - 1) // length).clamp_min(1)
    chunks, order = counts.sort(descending=True, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device="cpu")
    starts, stops = starts[order], stops[order]
    rounds = tuple(int((chunks > number).sum()) for number in range(int(chunks[0])))
    before = torch.tensor([0, *accumulate(rounds)], device="cpu")
    document = torch.cat([torch.arange(count, device="cpu") for count in rounds])
    number = torch.repeat_interleave(torch.tensor(rounds, device="cpu"))
    later = chunks[document] - number
    tokens = (stops[document] - later * length)[:, None] + torch.arange(length, device="cpu")
    inside = (tokens >= starts[document, None]) & (tokens < stops[document, None])
    chunked = torch.empty(total, dtype=torch.long, device="cpu")
    chunked[tokens[inside]] = inside.flatten().nonzero()[:, 0]
    tokens = tokens.where(inside, total).flatten()
    edges = torch.tensor([0, *accumulate(map(len, runs.documents))], device="cpu")
    firsts, lasts = place[edges[:-1]], place[edges[1:] - 1]
    lasts = before[chunks[lasts] - 1] + lasts
    found = [uploaded(x, device) for x in (tokens, chunked, firsts, lasts)]
    return _Places(length, rounds, *found)


class _Chunks:
    """All documents of a rank in chunks. Everything is differentiable."""

    def __init__(self, given: LinearInputs) -> None:
        q, k, v, transition, runs = given
        if isinstance(transition, Decay):
            transition = Gates(transition.logarithms(q.device).expand(q.shape[:3]))
        gate, beta = transition
        if gate is None:
            gate = q.new_zeros(q.shape[:3], dtype=torch.float64)
        self._of_channels = gate.dim() == 4
        chunk = _CHUNK_OF_CHANNELS if self._of_channels else _CHUNK
        self._places, self._lasts = _chunk_places(runs, chunk, q.device), runs.lasts
        self._dtype, self._wide = q.dtype, accumulation_dtype(q.dtype)
        self._q, self._k, self._v = (self._split(x.to(self._wide)) for x in (q, k, v))
        self._logs = gate if self._of_channels else gate.unsqueeze(3)
        sums = self._split(self._logs).double().cumsum(3)
        whole = sums[..., -1:, :]
        self._from_start = sums.exp().to(self._wide)
        self._gaps = (sums.unsqueeze(4) - sums.unsqueeze(3)).masked_fill(
            _above(self._places.length, q.device)[..., None], -torch.inf
        )
        self._totals = whole.transpose(-1, -2)  # [B,H,n,1 or D,1]
        self._keys = self._k * (whole - sums).exp().to(self._wide)  # as they are in the state
        self._values, self._read = self._v, None  # U, W
        if beta is not None:
            beta = self._split(beta.unsqueeze(3).to(self._wide))
            system = beta * self._scores(self._k, self._k)
            both = torch.cat((beta * self._v, beta * self._k * self._from_start), -1)
            solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
            self._values, self._read = solved.split((v.shape[3], k.shape[3]), -1)
        self._added = self._keys.mT @ self._values

    def run_states(self) -> tuple[Tensor, Tensor]:
        """Effect of runs on the state: added states, and transitions, see `RunStates`."""
        shape = self._added.shape
        count = self._places.rounds[0]
        if self._read is None:
            state, _ = self._scan(self._added.new_zeros(*shape[:2], count, *shape[3:]), self._added)
            logs = (self._logs[:, slice(*last)] for last in self._lasts)
            through = torch.stack([x.sum(1, dtype=torch.float64) for x in logs])
            return self._of_runs(state), through.to(self._wide)
        identity = torch.eye(shape[3], dtype=self._wide, device=self._added.device)
        before = self._added.new_zeros(*shape[:2], count, shape[3], shape[4] + shape[3])
        before[:, :, self._places.firsts, :, shape[4] :] = identity
        added = torch.cat((self._added, self._added.new_zeros(*shape[:4], shape[3])), -1)
        behind, _ = self._scan(before, added)
        state, through = self._of_runs(behind).split((shape[4], shape[3]), -1)
        return state.contiguous(), through.contiguous()

    @cached_property
    def intra_chunk(self) -> Tensor:
        """Scores of queries and keys in a chunk [B,H,n,c,c]."""
        return self._scores(self._q, self._k)

    def outputs(self, incoming: Tensor | None) -> Tensor:
        """out [B,S,H,E] in q's dtype; then `ends` are the states behind the runs [n,B,H,D,E]."""
        shape = self._added.shape
        before = self._added.new_zeros(*shape[:2], self._places.rounds[0], *shape[3:])
        if incoming is not None:
            before = before.index_copy(2, self._places.firsts.long(), incoming.movedim(0, 2))
        behind, seen = self._scan(before, self._added)
        self.ends = self._of_runs(behind)
        values = self._values if self._read is None else self._values - self._read @ seen
        out = (self._q * self._from_start) @ seen + self.intra_chunk @ values
        out = out.permute(0, 2, 3, 1, 4).flatten(1, 2).index_select(1, self._places.chunked)
        return out.to(self._dtype)

    def _split(self, x: Tensor) -> Tensor:
        """[B,S,H,D] -> [B,H,n,c,D]."""
        zeros = x.new_zeros(x.shape[0], 1, *x.shape[2:])
        x = torch.cat([x, zeros], 1).index_select(1, self._places.tokens)
        x = x.unflatten(1, (-1, self._places.length))
        return x.permute(0, 3, 1, 2, 4).contiguous()

    def _scores(self, x: Tensor, y: Tensor) -> Tensor:
        """x_i y_j times the gates' decay from j to i, for i >= j, else 0: [B,H,n,c,c]."""
        weights = self._gaps.exp().to(self._wide)
        if self._of_channels:
            return torch.einsum("bhnid,bhnjd,bhnijd->bhnij", x, y, weights)
        return x @ y.mT * weights.squeeze(-1)

    def _scan(self, before: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """The states [B,H,n,D,*] behind all chunks, and before them.

        Args: before: states before the documents, documents with the most chunks first.
        """
        kept = self._totals.exp().to(self._wide)
        seen, state, start = [], before, 0
        behind = []
        for count in self._places.rounds:
            state, places = state[:, :, :count], slice(start, start + count)
            seen.append(state)
            passed = kept[:, :, places] * state
            if self._read is not None:
                passed = passed - self._keys[:, :, places].mT @ (self._read[:, :, places] @ state)
            state = passed + added[:, :, places]
            behind.append(state)
            start += count
        return torch.cat(behind, 2), torch.cat(seen, 2)

    def _of_runs(self, behind: Tensor) -> Tensor:
        """Selects the last chunks of runs: [B,H,n,*] -> [runs,B,H,*], contiguous."""
        return behind.index_select(2, self._places.lasts).movedim(2, 0).contiguous()


@kept_on_device(maxsize=8)
def _above(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
