"""Triton kernels of states: for the interpreter, compiled for GPUs, and on one."""

from math import prod

import pytest
import torch

from megatron_cp_plugin.core.layout import Zigzag
from megatron_cp_plugin.core.linear.states import Route, RunStates
from tests.oracle import relative_error

DECAYED = """
import torch
from megatron_cp_plugin.core.linear.states import Decay
from megatron_cp_plugin.kernels.decayed import add_decayed_

torch.manual_seed(0)
decay = Decay((0.999, 0.5))
log2_rates = decay.logarithms(torch.device("cpu")).div(torch.log(torch.tensor(2.0))).float()
for x_dim, out_dim, *intervals in (
    (16, 16, (0, 1)),
    (20, 130, (0, 70)),
    (16, 20, (3, 10), (20, 1060), (1200, 1201)),
):
    tokens = intervals[-1][1] + 5
    out, x = (torch.randn(2, tokens, 2, dim) for dim in (out_dim, x_dim))
    states = torch.randn(len(intervals), 2, 2, x_dim, out_dim)
    want = out.clone()
    for (start, stop), state in zip(intervals, states):
        at = torch.arange(1, stop - start + 1)[:, None]
        kept = torch.exp(at * decay.logarithms(x.device)).float()[None, :, :, None]
        want[:, start:stop] += kept * torch.einsum("bthd,bhde->bthe", x[:, start:stop], state)
    add_decayed_(out, x, states, log2_rates, intervals)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
"""

PASSED = """
from megatron_cp_plugin.core.partial import register_fused
from megatron_cp_plugin.core.layout import Contiguous, Zigzag
from megatron_cp_plugin.core.linear.states import Route
from megatron_cp_plugin.core.linear.states import RunStates
from megatron_cp_plugin.kernels import decayed

launched = []
register_fused("cpu", lambda: launched.append(1) or decayed)
for layout, documents, dim, batch, first in (
    (Contiguous(), (), 20, 1, None),
    (Zigzag(), (), 16, 2, torch.randn(2, 2, 16, 40)),
    (Zigzag(), (24, 30, 31, 72), 16, 1, torch.randn(1, 2, 16, 40)),
):
    for back, route in enumerate((way := Route.of(layout, 3, 120, documents), way.back)):
        runs = sum(route.counts)
        ways = (
            torch.randn(runs, batch, 2, dim, dim) / dim**0.5,
            -torch.rand(runs, batch, 2, dim),
            -torch.rand(runs, batch, 2, 1),
            decay,
        )
        for through in ways[bool(documents) ^ back :: 2]:
            states = RunStates(torch.randn(runs, batch, 2, dim, 40), through)
            states = states.unpacked(states.packed(runs)[:, None], [1] * runs)
            through = states.through
            wide = RunStates(
                states.added.double(), through if through is decay else through.double()
            )
            places = range(2 if first is None else runs)
            want = wide.reaching(route, first, places, to_the_end=True)
            got = states.reaching(route, first, places, to_the_end=True)
            torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
assert sum(launched) == 12
"""


RUNS = """
def summed(read, written, values, sums, start, stop, queries, dout):
    \"\"\"Chunk after chunk, by the formulas of kernels/chunked.py.\"\"\"
    heads, dim = read.shape[2:]
    state = torch.zeros(heads, dim, values.shape[3])
    whole = torch.eye(dim).repeat(heads, 1, 1)
    places = range(start, stop, 64)
    for first in places if queries is None else reversed(places):
        at = slice(first, min(first + 64, stop))
        w, k, v = (x[0, at].transpose(0, 1) for x in (read, written, values))
        last = sums[0, at.stop - 1]
        if sums.dim() == 4:
            kept, left = last.exp2()[..., None], 1
        else:
            kept = last.exp2()[:, None, None]
            left = (last - sums[0, at]).exp2().T[..., None]
        if queries is None:
            state = kept * state + k.mT @ (left * (v - w @ state))
            whole = kept * whole - k.mT @ (left * (w @ whole))
        else:
            q, do = queries[0, at].transpose(0, 1), dout[0, at].transpose(0, 1)
            if sums.dim() == 3:
                do = do * sums[0, at].exp2().T[..., None]
            state = kept * state + q.mT @ do - k.mT @ (v + left * (w @ state))
    return state, whole


bounds = torch.tensor([0, 70, 70, 75, 145], dtype=torch.int32)
for of_channels, back in ((True, False), (False, False), (True, True), (False, True)):
    dim, value_dim = (16, 40) if of_channels == back else (48, 20)
    read, written, queries = (torch.randn(1, 145, 2, dim) / dim for _ in range(3))
    values, dout = (torch.randn(1, 145, 2, value_dim) for _ in range(2))
    sums = -torch.rand(1, 145, 2, *((dim,) if of_channels else ()))
    which = torch.tensor([3, 1, 0], dtype=torch.int32)
    others = (queries, dout) if back else None
    got = decayed.run_states(read, written, values, sums, bounds, which, others)
    for place, number in enumerate(which.tolist()):
        start, stop = bounds[number : number + 2].tolist()
        given = (read, written, values, sums, start, stop, *(others or (None, None)))
        state, whole = summed(*given)
        torch.testing.assert_close(got[0][place], state, rtol=1e-5, atol=1e-5)
        if not back:
            torch.testing.assert_close(got[1][place], whole, rtol=1e-5, atol=1e-5)
    assert (got[1] is None) == back
"""


STATES = DECAYED + PASSED + RUNS  # runs in test_fused.py


def test_any_number_of_sequences_fits_a_grid(monkeypatch):
    """CUDA takes 65535 in all dimensions of a grid but the first."""
    pytest.importorskip("triton")
    from megatron_cp_plugin.kernels import decayed

    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **settings: None

    monkeypatch.setattr(decayed, "_add_kernel", Kernel())
    monkeypatch.setattr(decayed, "_intervals_on", lambda intervals, device: None)
    x, states = (torch.empty(shape, device="meta") for shape in ((2048, 1024, 64, 128), (1, 1)))
    decayed.add_decayed_(x, x, states, states, [(0, 1024)])
    (grid,) = grids
    assert prod(grid) == 2048 * 64
    assert all(size <= 65535 for size in grid[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["matrices", "channels"])
@pytest.mark.parametrize(("dim", "value_dim"), [(128, 128), (64, 80)])
def test_states_that_pass_runs(dim, value_dim, kind):
    """As exact as float32, on the way through 64 ranks."""
    route = Route.of(Zigzag(), 64, 128 * 64, (300, 4000))
    generator = torch.Generator("cuda").manual_seed(0)
    added, through = (
        torch.randn(128, 1, 4, dim, width, generator=generator, device="cuda")
        for width in (value_dim, dim)
    )
    through = through / dim**0.5 if kind == "matrices" else -through[..., 0].abs()
    states = RunStates(added, through)
    wide = RunStates(added.double(), through.double())
    places = range(126, 128)
    got = states.reaching(route, added[0], places, to_the_end=True)
    want = wide.reaching(route, added[0].double(), places, to_the_end=True)
    assert relative_error(got, want) < 1e-5
