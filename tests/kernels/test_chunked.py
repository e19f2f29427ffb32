"""The chunked kernel of linear attention against the recurrence in float64."""

from itertools import pairwise
from math import exp

import pytest
import torch

from megatron_cp_plugin.core.linear.kernel import LinearInputs, LinearProblem
from megatron_cp_plugin.core.linear.states import Decay, Runs
from megatron_cp_plugin.errors import KernelUnavailableError
from megatron_cp_plugin.kernels.linear import linear_kernel_names, resolve_linear
from tests.linear_oracle import linear_expected
from tests.operators import Operators
from tests.oracle import relative_error

CPU = torch.device("cpu")


def problem_of(q, v):
    return LinearProblem(q.device, q.dtype, q.shape[2], q.shape[3], v.shape[3])


def run(name, q, k, v, dout, decay, initial, dfinal):
    """out, final state, dq, dk, dv, dinitial of one run."""
    kernel = resolve_linear(name, problem_of(q, v))
    given = LinearInputs(q, k, v, decay, Runs.single(q.shape[1]))
    forward = kernel.forward(given)
    whole = torch.exp(decay.logarithms(q.device) * q.shape[1])
    lost = whole[None, :, None, None].to(initial.dtype)
    final = forward.states[0] + lost * initial
    forward.intra()
    out, cache = forward.finish(initial.unsqueeze(0))
    backward = kernel.backward(given, dout, cache)
    dinitial = backward.states[0] + lost * dfinal
    backward.intra()
    return out, final, *backward.finish(dfinal.unsqueeze(0))[:3], dinitial


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("rates", [(1.0, 1.0), (0.5, 0.5), (exp(-0.004), 1e-6)])
def test_chunked_kernel(rates, tokens):
    expected = linear_expected(rates, tokens)
    got = run(
        "chunked",
        expected.q,
        expected.k,
        expected.v,
        expected.dout,
        Decay(rates),
        expected.initial,
        expected.dfinal,
    )
    names = ("out", "final", "dq", "dk", "dv", "dinitial")
    for name, x in zip(names, got, strict=True):
        assert relative_error(x, getattr(expected, name)) < 1e-12, name


def test_chunked_kernel_takes_all_documents_in_one_call():
    """As many operations for 60 documents as for 3, also beside one that is longer than a chunk."""

    def operations(*starts):
        expected = linear_expected((0.9, 1.0), 180, documents=starts)
        kernel = resolve_linear("chunked", problem_of(expected.q, expected.v))
        runs = Runs((tuple(pairwise((0, *starts, 180))),))
        given = LinearInputs(expected.q, expected.k, expected.v, Decay((0.9, 1)), runs)

        def passes():
            forward = kernel.forward(given)
            forward.intra()
            _, cache = forward.finish(expected.initial.unsqueeze(0))
            backward = kernel.backward(given, expected.dout, cache)
            backward.intra()
            backward.finish(expected.dfinal.unsqueeze(0))

        passes()  # what all layers share is made
        with Operators() as counted:
            passes()
        return counted.calls.total()

    assert operations(60, 120) == operations(*range(3, 180, 3))
    assert operations(70, 140) == operations(70, *range(73, 178, 2))


def test_long_chunks_in_float32():
    """64K tokens in one run, at rates next to 1, of 1 and of 0.5: finite, and as in float64, which
    shorter ones are compared with.
    """
    rates = (1 - 1e-5, 0.5, 1.0)
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    q, k, v, dout = (random(1, 65536, 3, 4) for _ in range(4))
    initial, dfinal = (random(1, 3, 4, 4) for _ in range(2))
    got = run("chunked", q, k, v, dout, Decay(rates), initial, dfinal)
    wide = [x.double() for x in (q, k, v, dout, initial, dfinal)]
    want = run("chunked", *wide[:4], Decay(rates), *wide[4:])
    for name, x, y in zip(("out", "final", "dq", "dk", "dv", "dinitial"), got, want, strict=True):
        assert x.dtype == torch.float32
        assert x.isfinite().all(), name
        heads = (1 if name in ("final", "dinitial") else 2,)
        for a, b in zip(x.unbind(heads[0]), y.unbind(heads[0]), strict=True):
            assert relative_error(a, b) < 2e-5, name


def test_choice():
    problem = LinearProblem(CPU, torch.float32, 2, 4, 4)
    assert resolve_linear("auto", problem).name == "chunked"
    assert set(linear_kernel_names()) == {"fla", "chunked"}
    with pytest.raises(KernelUnavailableError, match="did you mean 'chunked'"):
        resolve_linear("chunk", problem)
    with pytest.raises(KernelUnavailableError, match="use kernel auto"):
        resolve_linear("fla", problem)
