"""fla's kernels: how their sequences are cut, and results with decays on a GPU."""

from math import exp

import numpy as np
import pytest
import torch

from megatron_cp_plugin.core.linear.states import Decay, Runs
from megatron_cp_plugin.kernels import fla
from tests.kernels.test_chunked import run
from tests.oracle import relative_error


def test_where_documents_are() -> None:
    """Two batch entries with two runs of 70 and 1, and of 29 tokens; chunks of 64."""
    runs = Runs((((0, 70), (70, 71)), ((71, 100),)))
    found = fla.sequences_of(runs, 2, 1, 64, torch.device("cpu"))
    assert (found.count, found.is_cut) == (6, False)
    assert found.starts.tolist() == [0, 70, 71, 100, 170, 171, 200]
    assert found.chunks.tolist() == [
        *([0, 0], [0, 1], [1, 0], [2, 0]),
        *([3, 0], [3, 1], [4, 0], [5, 0]),
    ]
    assert found.ends.tolist() == [63, 69, 70, 99, 163, 169, 170, 199]
    assert found.offsets.tolist() == [0, 2, 3, 4, 6, 7, 8]
    assert found.leaving_back.order.tolist() == [0, 3, 2, 5]
    assert found.leaving.order.tolist() == [1, 4, 2, 5]
    assert found.joined.tolist() == [*range(6)]
    assert [x.tolist() for x in found.arriving] == [[0] * 7, [], [0, -1, 2, 1, -1, 3]]
    assert [x.tolist() for x in found.arriving_back] == [[0] * 7, [], [-1, 0, 2, -1, 1, 3]]


def test_the_ways_of_states_through_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batch entries, documents of 256 tokens, cut into two, and of 60, which nothing joins."""
    monkeypatch.setattr(fla, "_SHORTEST_SEGMENT", 80)
    runs = Runs((((0, 256), (256, 316), (316, 320)),))
    found = fla.sequences_of(runs, 2, 1, 64, torch.device("cpu"))
    assert found.is_cut
    assert found.starts.tolist() == [0, 128, 256, 316, 320, 448, 576, 636, 640]
    assert found.joined.tolist() == [0, 1, 3, 4, 5, 7]
    ways = {
        "leaving": ([0, 1, 2], [2, 5], [0, 0]),
        "arriving": ([0, 0, 1, 1, 1, 2, 2], [0, 3], [0, 0, -1, 1, 1, -1]),
        "leaving_back": ([0, 2, 4], [1, 0, 4, 3], [0, 0]),
        "arriving_back": ([0, 1, 1, 1, 2, 2, 2], [1, 4], [-1, -1, 0, -1, -1, 1]),
    }
    for name, want in ways.items():
        assert tuple(x.tolist() for x in getattr(found, name)) == want


def test_long_documents_are_cut_at_whole_chunks():
    runs = Runs((((0, 70), (70, 71)), ((71, 71 + 5000),)))
    with torch.device("meta"):  # made on the host, wherever tensors are made by default
        found = fla.sequences_of(runs, 2, 3, 64, torch.device("cpu"))
    lengths = [70, 1, 1280, 1280, 1280, 1160] * 2
    assert found.starts.tolist() == [0, *np.cumsum(lengths)]
    assert found.lengths.tolist() == lengths


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 100, 1024, 8192])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(256, 128), (128, 128), (64, 80)])
def test_fla_kernel(head_dim, value_dim, tokens):
    """No worse than fla's own autograd Function, whether runs are cut into segments or not."""
    pytest.importorskip("fla")
    rates = (1.0, exp(-1 / 256), exp(-1 / 16), 0.5)
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k = (random(2, tokens, 4, head_dim).mul(head_dim**-0.5).bfloat16() for _ in range(2))
    v, dout = (random(2, tokens, 4, value_dim).bfloat16() for _ in range(2))
    states = [random(2, 4, head_dim, value_dim) for _ in range(2)]
    decay = Decay(rates)
    want = run(
        "chunked",
        *(x.double() for x in (q, k, v, dout)),
        decay,
        *(x.double() for x in states),
    )
    got = run("fla", q, k, v, dout, decay, *states)
    bounds = [1e-2] * len(want)
    if head_dim < 256:  # fla's float32 states take more shared memory than these blocks leave
        with fla.measured_blocks(k, v):
            theirs = fla_gradients(q, k, v, dout, decay, *states)
        own = [relative_error(*pair) for pair in zip(theirs, want, strict=True)]
        bounds = [min(1e-2, 1.5 * error + 1e-4) for error in own]
    names = ("out", "final", "dq", "dk", "dv", "dinitial")
    for name, x, y, bound in zip(names, got, want, bounds, strict=True):
        error = relative_error(x, y)
        assert error <= bound, f"{name} is off by {error:.2e}"
    # fla chooses its blocks itself for everybody else.
    assert all(len(tuner.configs) > 1 for tuner, _ in fla.tuners())


def fla_gradients(q, k, v, dout, decay, initial, dfinal):
    """out, final state, dq, dk, dv, dinitial by fla's autograd Function."""
    from fla.ops.simple_gla import chunk_simple_gla

    inputs = [x.clone().requires_grad_() for x in (q, k, v, initial)]
    out, final = chunk_simple_gla(
        *inputs[:3],
        g_gamma=decay.logarithms(q.device).float(),
        scale=1.0,
        initial_state=inputs[3],
        output_final_state=True,
    )
    return (out, final, *torch.autograd.grad((out, final), inputs, (dout, dfinal)))
