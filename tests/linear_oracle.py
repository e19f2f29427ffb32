"""Independent oracle of linear attention: the recurrence, token by token, gradients by autograd."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearExpected:
    """Whole tensors of an unsplit linear attention, float64."""

    rates: tuple[float, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    initial: Tensor
    dout: Tensor
    dfinal: Tensor
    out: Tensor
    final: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dinitial: Tensor


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: Tensor,
    initial: Tensor,
    *,
    causal: bool,
    documents: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """[B,N,H,D], [B,N,H,D], [B,N,H,E], [H], [B,H,D,E] -> out [B,N,H,E], kv_N [B,H,D,E].

    Args: documents: tokens before which the state becomes 0.
    """
    tokens = q.shape[1]
    rate = rates.view(1, -1, 1, 1)

    def outer(s: int) -> Tensor:
        return k[:, s, :, :, None] * v[:, s, :, None, :]

    def read(s: int, kv: Tensor) -> Tensor:
        return (q[:, s, :, :, None] * kv).sum(-2)

    kv, out = initial, []
    for s in range(tokens):
        if s in documents:
            kv = torch.zeros_like(kv)
        kv = rate * kv + outer(s)
        out.append(read(s, kv))
    if not causal:
        later = torch.zeros_like(initial)
        for s in reversed(range(tokens)):
            later = rate * later
            out[s] = out[s] + read(s, later)
            later = later + outer(s)
            if s in documents:
                later = torch.zeros_like(later)
    return torch.stack(out, 1), kv


@cache
def linear_expected(
    rates: tuple[float, ...],
    seq_len: int,
    *,
    causal: bool = True,
    documents: tuple[int, ...] = (),
    batch: int = 2,
    head_dim: int = 4,
    value_dim: int = 6,
    states: bool = True,
) -> LinearExpected:
    """Args: states: False: the initial one is 0, and the loss does not depend on the final one."""
    generator = torch.Generator().manual_seed(0)
    heads = len(rates)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (random(batch, seq_len, heads, head_dim) for _ in range(2))
    v, dout = (random(batch, seq_len, heads, value_dim) for _ in range(2))
    initial, dfinal = (states * random(batch, heads, head_dim, value_dim) for _ in range(2))
    inputs = [x.clone().requires_grad_() for x in (q, k, v, initial)]
    rate = torch.tensor(rates, dtype=torch.float64)
    out, final = recurrence(*inputs[:3], rate, inputs[3], causal=causal, documents=documents)
    gradients = torch.autograd.grad((out, final), inputs, (dout, dfinal))
    return LinearExpected(
        rates, q, k, v, initial, dout, dfinal, out.detach(), final.detach(), *gradients
    )


def gated_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    beta: Tensor | None,
    initial: Tensor,
    documents: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Token by token, with transitions as they are defined.

    Args: q: [B,N,*,D], k: [B,N,*,D], v: [B,N,*,E]; gate: [B,N,G] or [B,N,G,D], beta: [B,N,G];
        initial: [B,G,D,E]; documents: tokens before which the state becomes 0.

    Returns: out [B,N,H,E] and the last state [B,G,D,E].
    """
    states = initial.shape[1]
    heads = max(q.shape[2], states)
    k, v = (x.repeat_interleave(states // x.shape[2], 2) for x in (k, v))
    q = q.repeat_interleave(heads // q.shape[2], 2)
    state, out = initial, []
    for s in range(q.shape[1]):
        if s in documents:
            state = torch.zeros_like(state)
        if gate is not None:
            of_token = gate[:, s].unsqueeze(-1) if gate.dim() == 3 else gate[:, s]
            state = of_token.exp().unsqueeze(-1) * state
        value = v[:, s]
        if beta is not None:
            known = torch.einsum("bhd,bhde->bhe", k[:, s], state)
            value = beta[:, s].unsqueeze(-1) * (value - known)
        state = state + k[:, s, :, :, None] * value[:, :, None, :]
        shared = state.repeat_interleave(heads // states, 1)
        out.append(torch.einsum("bhd,bhde->bhe", q[:, s], shared))
    return torch.stack(out, 1), state


def passed_along(
    added: Tensor,
    through: Tensor,
    first: Tensor | None,
    bounds: Tensor,
    order: Tensor,
    begins: Tensor,
) -> Tensor:
    """See `kernels.decayed.passed_along`, run after run."""
    found = []
    for way, begin in enumerate(begins.tolist()):
        state = torch.zeros_like(added[0]) if first is None or begin < 0 else first[begin]
        for run in order[bounds[way] : bounds[way + 1]].tolist():
            of_run = through[run]
            is_matrix = of_run.dim() == state.dim()
            kept = of_run @ state if is_matrix else of_run.exp().unsqueeze(-1) * state
            state = kept + added[run]
        found.append(state)
    return torch.stack(found)
