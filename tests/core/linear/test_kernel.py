"""The three parts of a linear kernel's pass: what leaves, what needs no other run, and the rest."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron_cp_plugin.core.linear.kernel import LinearInputs, LinearProblem
from megatron_cp_plugin.core.linear.states import Decay, Gates, Runs
from megatron_cp_plugin.kernels.linear import linear_kernels
from tests.linear_oracle import gated_recurrence
from tests.oracle import relative_error

HEADS, DIM, VALUE_DIM = 2, 4, 3
RUNS = Runs((((0, 4),), ((4, 6), (6, 9)), ((9, 10),)))
EDGES = tuple(pairwise((0, 4, 9, 10)))
STARTS = ((), (2,), ())  # of further documents, counted from the first token of a run


def problem(gate: str, delta: bool) -> LinearProblem:
    sizes = torch.device("cpu"), torch.float64, HEADS, DIM, VALUE_DIM
    return LinearProblem(*sizes, documents=True, gate=gate, delta=delta)


def test_a_problem_in_words() -> None:
    assert str(problem("rates", False)) == "2 heads of 4 and 3 in float64"
    words = "2 heads of 4 and 3 in float64 with gates of channels and the delta rule"
    assert str(problem("channels", True)) == words


@pytest.mark.parametrize("comes", [False, True], ids=["nothing-before", "states-before"])
@pytest.mark.parametrize(
    ("gate", "delta"),
    [("rates", False), ("heads", False), ("channels", False), ("heads", True), ("channels", True)],
)
def test_runs_by_themselves_and_with_what_comes(gate: str, delta: bool, comes: bool) -> None:
    """Outputs, states and every gradient, of every kernel for CPUs, against the recurrence."""
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    q, k, dout = random(2, 10, HEADS, DIM), random(2, 10, HEADS, DIM), random(2, 10, HEADS, 3)
    k = k / k.norm(dim=-1, keepdim=True)
    v, before, dbehind = random(2, 10, HEADS, 3), *(random(3, 2, HEADS, DIM, 3) for _ in range(2))
    decay = Decay((0.5, 0.9))
    logs = torch.tensor(decay.rates, dtype=torch.float64).log().expand(2, 10, HEADS)
    if gate != "rates":
        logs = -random(2, 10, HEADS, *((DIM,) if gate == "channels" else ())).abs()
    beta = random(2, 10, HEADS).sigmoid() if delta else None
    given = [x if x is None else x.clone().requires_grad_() for x in (q, k, v, logs, beta, before)]

    def expected(first: Tensor) -> tuple[Tensor, Tensor]:
        runs = [
            gated_recurrence(*(x if x is None else x[:, a:b] for x in given[:5]), state, starts)
            for (a, b), state, starts in zip(EDGES, first, STARTS, strict=True)
        ]
        return torch.cat([out for out, _ in runs], 1), torch.stack([state for _, state in runs])

    first = given[5] if comes else torch.zeros_like(before)
    out, behind = expected(first)
    wanted = torch.autograd.grad(
        (out, behind), [x for x in given[:5] if x is not None], (dout, dbehind), retain_graph=True
    )
    transition = decay if gate == "rates" else Gates(logs, beta)
    inputs = LinearInputs(q, k, v, transition, RUNS)
    serving = [x for x in linear_kernels() if x.unsupported(problem(gate, delta)) is None]
    assert serving
    for kernel in serving:
        running = kernel.forward(inputs)
        assert relative_error(running.states, expected(torch.zeros_like(before))[1]) < 1e-10
        running.intra()
        got, cache = running.finish(before if comes else None)
        assert relative_error(got, out) < 1e-10
        running = kernel.backward(inputs, dout, cache)
        if comes:
            (dbefore,) = torch.autograd.grad(out, given[5], dout, retain_graph=True)
            assert relative_error(running.states, dbefore) < 1e-10
        running.intra()
        dq, dk, dv, dgates = running.finish(dbehind)
        found = [x for x in (dq, dk, dv, *dgates) if x is not None]
        assert len(found) == len(wanted) - (gate == "rates")  # of rates that tokens share
        for got, want in zip(found, wanted[: len(found)], strict=True):
            assert relative_error(got, want) < 1e-10
