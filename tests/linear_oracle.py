"""Independent oracle of linear attention: the recurrence, token by token, gradients by autograd."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache

import torch
from torch import Tensor

NAMES = "out", "final", "dq", "dk", "dv", "dgate", "dbeta", "dinitial"


@dataclass(frozen=True)
class Linear:
    """Whole tensors of an unsplit linear attention, float64.

    Attributes: q: [B,N,*,D], k: [B,N,*,D], v: [B,N,*,E]; gate: [B,N,G] or [B,N,G,D], beta: [B,N,G];
        initial: [B,G,D,E]; rates: of heads, in place of a gate; documents: tokens before which the
        state becomes 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None
    beta: Tensor | None
    initial: Tensor
    dout: Tensor
    dfinal: Tensor
    _: KW_ONLY
    rates: tuple[float, ...] | None = None
    causal: bool = True
    documents: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.dout.shape[1]

    def expected(self) -> "LinearExpected":
        """With the results of the recurrence."""
        gate = self.gate
        if self.rates is not None:
            logarithms = torch.tensor(self.rates, dtype=torch.float64).log()
            gate = logarithms.expand(1, self.tokens, -1)
        given = (self.q, self.k, self.v, gate, self.beta, self.initial)
        asked = [None if x is None else x.clone().requires_grad_() for x in given]
        out, final = recurrence(*asked, causal=self.causal, documents=self.documents)
        some = [x for x in asked if x is not None]
        results = iter(torch.autograd.grad((out, final), some, (self.dout, self.dfinal)))
        gradients = [None if x is None else next(results) for x in asked]
        return LinearExpected(**vars(self), results=(out.detach(), final.detach(), *gradients))


@dataclass(frozen=True)
class LinearExpected(Linear):
    """With its results, by the names of `NAMES`."""

    results: Sequence[Tensor | None] = ()

    def __getattr__(self, name: str) -> Tensor | None:
        if name not in NAMES:
            raise AttributeError(name)
        return self.results[NAMES.index(name)]


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    beta: Tensor | None,
    initial: Tensor,
    *,
    causal: bool = True,
    documents: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Token by token, with transitions as they are defined: see `Linear`.

    Returns: out [B,N,H,E] and the last state [B,G,D,E].
    """
    states = initial.shape[1]
    heads = max(q.shape[2], states)
    k, v = (x.repeat_interleave(states // x.shape[2], 2) for x in (k, v))
    q = q.repeat_interleave(heads // q.shape[2], 2)

    def kept(s: int, state: Tensor) -> Tensor:
        if gate is None:
            return state
        of_token = gate[:, s].unsqueeze(-1) if gate.dim() == 3 else gate[:, s]
        return of_token.exp().unsqueeze(-1) * state

    def added(s: int, state: Tensor) -> Tensor:
        value = v[:, s]
        if beta is not None:
            known = torch.einsum("bhd,bhde->bhe", k[:, s], state)
            value = beta[:, s].unsqueeze(-1) * (value - known)
        return state + k[:, s, :, :, None] * value[:, :, None, :]

    def read(s: int, state: Tensor) -> Tensor:
        shared = state.repeat_interleave(heads // states, 1)
        return torch.einsum("bhd,bhde->bhe", q[:, s], shared)

    state, out = initial, []
    for s in range(q.shape[1]):
        if s in documents:
            state = torch.zeros_like(state)
        state = added(s, kept(s, state))
        out.append(read(s, state))
    if not causal:
        later = torch.zeros_like(initial)
        for s in reversed(range(q.shape[1])):
            later = kept(s, later)
            out[s] = out[s] + read(s, later)
            later = added(s, later)
            if s in documents:
                later = torch.zeros_like(later)
    return torch.stack(out, 1), state


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
    how = {"rates": rates, "causal": causal, "documents": documents}
    return Linear(q, k, v, None, None, initial, dout, dfinal, **how).expected()


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
