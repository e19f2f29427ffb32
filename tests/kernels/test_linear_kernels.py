"""Kernels of linear attention against the recurrence in float64."""

import subprocess
import sys
from itertools import pairwise
from math import exp, prod

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp_plugin.core.layout import Zigzag
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.kernel import LinearInputs, LinearProblem
from megatron_cp_plugin.core.linear.route import Route, Runs
from megatron_cp_plugin.core.linear.states import RunStates
from megatron_cp_plugin.errors import KernelUnavailableError
from megatron_cp_plugin.kernels import fla
from megatron_cp_plugin.kernels.linear import linear_kernel_names, resolve_linear
from tests.linear_oracle import linear_expected
from tests.oracle import relative_error

CPU = torch.device("cpu")


def problem_of(q, v):
    return LinearProblem(q.device, q.dtype, q.shape[2], q.shape[3], v.shape[3])


def run(name, q, k, v, dout, decay, initial, dfinal):
    """out, final state, dq, dk, dv, dinitial of one run."""
    kernel = resolve_linear(name, problem_of(q, v))
    given = LinearInputs(q, k, v, decay, Runs.single(q.shape[1]))
    forward = kernel.forward(given)
    whole = decay.powers(torch.tensor([q.shape[1]], device=q.device))[0]
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


def test_chunked_kernel_without_states():
    expected = linear_expected((0.9, 1.0), 100)
    kernel = resolve_linear("chunked", problem_of(expected.q, expected.v))
    decay = Decay(expected.rates)
    zero = torch.zeros_like(expected.initial)
    qkv = expected.q, expected.k, expected.v
    want = run("chunked", *qkv, expected.dout, decay, zero, zero)
    given = LinearInputs(*qkv, decay, Runs.single(100))
    forward = kernel.forward(given)
    forward.intra()
    out, cache = forward.finish(None)
    assert torch.equal(out, want[0])
    backward = kernel.backward(given, expected.dout, cache)
    backward.intra()
    for x, y in zip(backward.finish(None)[:3], want[2:5], strict=True):
        assert torch.equal(x, y)


def test_chunked_kernel_takes_all_documents_in_one_call():
    """As many operations for 60 documents as for 3, also beside one that is longer than a chunk."""

    class Counted(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

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
        with Counted() as counted:
            passes()
        return counted.count

    assert operations(60, 120) == operations(*range(3, 180, 3))
    assert operations(70, 140) == operations(70, *range(73, 178, 2))


def test_long_documents_are_cut_at_whole_chunks():
    runs = Runs((((0, 70), (70, 71)), ((71, 71 + 5000),)))
    with torch.device("meta"):  # made on the host, wherever tensors are made by default
        found = fla.sequences_of(runs, 2, 3, 64, CPU)
    lengths = [70, 1, 1280, 1280, 1280, 1160] * 2
    assert found.starts.tolist() == [0, *np.cumsum(lengths)]
    assert found.lengths.tolist() == lengths


def long_recurrence(q, k, v, dout, rates, initial, dfinal):
    """The recurrence and its reverse in NumPy: out, final, dq, dk, dv, dinitial, float64."""
    q, k, v, dout, initial, dfinal = (x.double().numpy() for x in (q, k, v, dout, initial, dfinal))
    rate = np.array(rates)[:, None, None]
    out, dq, dk, dv = (np.empty_like(x) for x in (v, q, k, v))
    kv = initial[0]
    for s in range(q.shape[1]):
        kv = rate * kv + k[0, s][:, :, None] * v[0, s][:, None, :]
        out[0, s] = (kv * q[0, s][:, :, None]).sum(1)
        dq[0, s] = (kv * dout[0, s][:, None, :]).sum(2)
    final, dkv = kv[None], dfinal[0]
    for s in reversed(range(q.shape[1])):
        dkv = dkv + q[0, s][:, :, None] * dout[0, s][:, None, :]
        dk[0, s] = (dkv * v[0, s][:, None, :]).sum(2)
        dv[0, s] = (dkv * k[0, s][:, :, None]).sum(1)
        dkv = rate * dkv
    return [torch.from_numpy(x) for x in (out, final, dq, dk, dv, dkv[None])]


def test_long_chunks_in_float32():
    """64K tokens in one run, at rates next to 1, of 1 and of 0.5: finite and right."""
    rates = (1 - 1e-5, 0.5, 1.0)
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    q, k, v, dout = (random(1, 65536, 3, 4) for _ in range(4))
    initial, dfinal = (random(1, 3, 4, 4) for _ in range(2))
    got = run("chunked", q, k, v, dout, Decay(rates), initial, dfinal)
    want = long_recurrence(q, k, v, dout, rates, initial, dfinal)
    for name, x, y in zip(("out", "final", "dq", "dk", "dv", "dinitial"), got, want, strict=True):
        assert x.dtype == torch.float32
        assert x.isfinite().all(), name
        heads = (1 if name in ("final", "dinitial") else 2,)
        for a, b in zip(x.unbind(heads[0]), y.unbind(heads[0]), strict=True):
            assert relative_error(a, b) < 2e-5, name


def test_powers_of_long_distances_vanish_and_nothing_else():
    decay = Decay((0.5, 1 - 1e-5, 1.0))
    powers = decay.powers(torch.tensor([0, 1, 65536, 10**9]))
    assert torch.equal(powers[0], torch.ones(3, dtype=torch.float64))
    assert torch.allclose(powers[1], torch.tensor(decay.rates, dtype=torch.float64), rtol=1e-15)
    assert powers[2, 0] == 0
    assert powers[2, 1].item() == pytest.approx((1 - 1e-5) ** 65536, rel=1e-10)
    assert powers[3].tolist() == [0, 0, 1]


def test_choice():
    problem = LinearProblem(CPU, torch.float32, 2, 4, 4)
    assert resolve_linear("auto", problem).name == "chunked"
    assert set(linear_kernel_names()) == {"fla", "chunked"}
    with pytest.raises(KernelUnavailableError, match="did you mean 'chunked'"):
        resolve_linear("chunk", problem)
    with pytest.raises(KernelUnavailableError, match="use kernel auto"):
        resolve_linear("fla", problem)


DECAYED = """
import torch
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.kernels.decayed import add_decayed_

torch.manual_seed(0)
decay = Decay((0.999, 0.5))
log2_rates = decay.logarithms(torch.device("cpu")).div(torch.log(torch.tensor(2.0))).float()
for x_dim, out_dim, *intervals in (
    (16, 16, (0, 1)),
    (20, 130, (0, 1100)),
    (16, 20, (3, 10), (20, 1060), (1200, 1201)),
):
    tokens = intervals[-1][1] + 5
    out, x = (torch.randn(2, tokens, 2, dim) for dim in (out_dim, x_dim))
    states = torch.randn(len(intervals), 2, 2, x_dim, out_dim)
    want = out.clone()
    for (start, stop), state in zip(intervals, states):
        kept = decay.powers(torch.arange(1, stop - start + 1)).float()[None, :, :, None]
        want[:, start:stop] += kept * torch.einsum("bthd,bhde->bthe", x[:, start:stop], state)
    add_decayed_(out, x, states, log2_rates, intervals)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
"""

PASSED = """
from megatron_cp_plugin.core.communication.devices import register_fused
from megatron_cp_plugin.core.layout import Contiguous, Zigzag
from megatron_cp_plugin.core.linear.route import Route
from megatron_cp_plugin.core.linear.states import RunStates
from megatron_cp_plugin.kernels import decayed

launched = []
register_fused("cpu", lambda: launched.append(1) or decayed)
for layout, documents, dim, first in (
    (Contiguous(), (), 20, None),
    (Zigzag(), (), 16, torch.randn(2, 2, 16, 40)),
    (Zigzag(), (24, 30, 31, 72), 16, torch.randn(2, 2, 16, 40)),
):
    for back, route in enumerate((way := Route.of(layout, 3, 120, documents), way.back)):
        runs = sum(route.counts)
        ways = (
            torch.randn(runs, 2, 2, dim, dim) / dim**0.5,
            -torch.rand(runs, 2, 2, dim),
            -torch.rand(runs, 2, 2, 1),
            decay,
        )
        for through in ways if documents else ways[back::2]:
            states = RunStates(torch.randn(runs, 2, 2, dim, 40), through)
            states = states.unpacked(states.packed(runs)[:, None], [1] * runs)
            through = states.through
            wide = RunStates(
                states.added.double(), through if through is decay else through.double()
            )
            places = range(2 if first is None else runs)
            want = wide.reaching(route, first, places, to_the_end=True)
            got = states.reaching(route, first, places, to_the_end=True)
            torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
assert sum(launched) == 16
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


def test_kernels_of_states_in_the_interpreter():
    """Triton reads its switch at import, so the kernels run in a process of their own."""
    pytest.importorskip("triton")
    command = f"import os; os.environ['TRITON_INTERPRET'] = '1'\n{DECAYED}{PASSED}{RUNS}"
    subprocess.run([sys.executable, "-c", command], check=True)


RUN = {"CHUNK": 64, "DIM": 128, "WIDTH": 32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("add", {"TILES": 16, "TOKENS": 64, "X_DIM": 128, "OUT_DIM": 128}),
        ("pass", {"MATRIX": True, "LONG": True, "DIM": 128, "WIDTH": 32}),
        ("run", {"dim": 128, "value_dim": 128, "OF_CHANNELS": True, "BACK": False} | RUN),
        ("run", {"dim": 128, "value_dim": 128, "OF_CHANNELS": False, "BACK": True} | RUN),
    ],
)
def test_kernels_of_states_compile_for_gpus(tmp_path, monkeypatch, name, constants):
    """As far as machine code, without a GPU."""
    triton = pytest.importorskip("triton")
    compiler = pytest.importorskip("triton.backends.compiler")
    from megatron_cp_plugin.kernels import decayed

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    kernel = getattr(decayed, f"_{name}_kernel")
    others = {"out_ptr": "*bf16", "x_ptr": "*bf16"}
    others |= dict.fromkeys(("interval_ptr", "bound_ptr"), "*i32") | {"sizes": ("i32",) * 3}
    strides = ("i32",) * 4
    others |= {"added": ("*fp32", *strides[:2]), "through": ("*fp32", *strides)}
    others |= {"ways": ("*i32",) * 3}
    tokens = ("read_ptr", "written_ptr", "value_ptr", "query_ptr", "dout_ptr")
    others |= dict.fromkeys(tokens, "*bf16") | {"which_ptr": "*i32"}
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= {name: kind for name, kind in others.items() if name in types}
    types |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(kernel, types, constants)
    compiled = triton.compile(source, target=compiler.GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 0
    assert compiled.metadata.shared <= 227 * 1024


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
    monkeypatch.setattr(decayed, "_on_device", lambda intervals, device: None)
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
