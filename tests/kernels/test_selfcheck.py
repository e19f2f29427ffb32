"""A kernel that computes something else is found before it trains a model."""

import pytest
import torch

from megatron_cp_plugin.core.kernel import Packing, Problem, Statistics
from megatron_cp_plugin.core.linear.kernel import LinearKernel, LinearProblem
from megatron_cp_plugin.core.linear.states import NO_GATES, Runs
from megatron_cp_plugin.errors import KernelUnavailableError
from megatron_cp_plugin.kernels import resolve
from megatron_cp_plugin.kernels.chunked import Chunked
from megatron_cp_plugin.kernels.linear import resolve_linear
from megatron_cp_plugin.kernels.reference import (
    Reference,
    backward_by_sequence,
    forward_by_sequence,
)
from megatron_cp_plugin.kernels.selfcheck import accuracy, check_kernel
from megatron_cp_plugin.kernels.torch_flash import CpuFlashAttention
from tests.kernels.test_kernels import resolved
from tests.pairwise import pairwise

CPU = torch.device("cpu")


class Planted(CpuFlashAttention):
    """Right but for one thing."""

    name = "planted"

    def __init__(self, fault):
        self.fault = fault

    def forward(self, call):
        if call.packing is not None:
            return forward_by_sequence(self, self.wrong(call))
        if self.fault == "crash":
            raise RuntimeError("no image for this device\nand more lines")
        out, lse = super().forward(call)
        if self.fault == "lse":
            lse = lse + 0.1
        if self.fault == "head dim" and call.q.shape[3] == 72:
            out = torch.roll(out, 1, 3)
        if self.fault == "full" and not call.causal:
            out = out * 1.02
        return out, lse

    def backward(self, call, dout, statistics):
        if call.packing is not None:
            return backward_by_sequence(self, call, dout, statistics)
        if self.fault == "delta" and statistics.delta is not None:
            statistics = Statistics(statistics.lse, delta=statistics.delta * 0.9)
        dq, dk, dv = super().backward(call, dout, statistics)
        if self.fault == "nan":
            dv[0, -1, -1, -1] = float("nan")
        if self.fault == "shared heads" and call.q.shape[2] != call.k.shape[2]:
            dk = dk / 2
        return dq, dk, dv

    def wrong(self, call):
        """Some sequences of a call see other keys."""
        packing, tokens = call.packing, call.k.shape[1]
        if self.fault == "documents" and packing.q == packing.kv:
            packing = Packing.adjacent((0, call.q.shape[1]), (0, tokens))
        if self.fault == "packed" and packing.q != packing.kv and not packing.gaps:
            first, *others = packing.kv
            packing = Packing.of(packing.q, (slice(0, first.stop // 2), *others))
        if self.fault == "gaps" and packing.gaps:
            packing = Packing.of(packing.q, (*packing.kv[:-1], slice(packing.kv[-2].stop, tokens)))
        return call._replace(packing=packing)


def problem(dtype=torch.float32, heads=8, kv_heads=2, head_dim=72, **others):
    return Problem(CPU, dtype, heads, kv_heads, head_dim, **others)


@pytest.mark.parametrize(
    ("dtype", "heads", "documents", "value_dim"),
    pairwise(
        (torch.float64, torch.float32, torch.bfloat16, torch.float16),
        ((1, 1), (8, 8), (8, 2), (3, 1)),
        (False, True),
        (24, 40),
    ),
)
def test_right_kernels_pass(dtype, heads, documents, value_dim):
    asked = problem(dtype, *heads, 24, documents=documents, value_dim=value_dim)
    if value_dim == 24:
        check_kernel(resolve("torch_cpu", asked), asked)
    assert accuracy(resolve("reference", asked), asked).right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("lse", "a causal tile"),
        ("head dim", "a causal tile"),
        ("full", "a full tile"),
        ("delta", " by delta of a "),
        ("nan", "dv of a causal tile is off by inf"),
        ("shared heads", "dk"),
        ("documents", " of documents is off by"),
        ("packed", " of packed full tiles is off by"),
    ],
)
def test_wrong_kernels_are_named(fault, where, dtype):
    kernel = Planted(fault)
    kernel.packs = documents = fault in ("documents", "packed")
    asked = problem(dtype, documents=documents)
    found = accuracy(kernel, asked)
    assert not found.right
    with pytest.raises(KernelUnavailableError) as refusal:
        check_kernel(kernel, asked)
    text = str(refusal.value)
    kind = str(dtype).removeprefix("torch.")
    assert text.startswith(
        f"kernel planted gives wrong results for attention here with 8:2 heads of 72 in {kind}: "
    )
    assert where in text
    assert text.endswith("; use kernel torch_cpu")
    assert "\n" not in text


def test_faults_elsewhere_do_not_matter():
    """A run with other head dims, without grouped heads and documents, may have that kernel."""
    for fault in ("head dim", "shared heads", "documents", "packed"):
        check_kernel(Planted(fault), problem(head_dim=64, kv_heads=8))


def test_kernels_that_pack_are_checked_for_windows_too():
    class Packs(Planted):
        packs = gaps = True

    for fault, tiles in (("packed", "packed full tiles"), ("gaps", "packed full tiles with gaps")):
        check_kernel(Planted(fault), problem(windows=True))
        with pytest.raises(KernelUnavailableError, match=tiles):
            check_kernel(Packs(fault), problem(windows=True))


@pytest.mark.parametrize("edge", ["causal", "other", "packed", ""])
def test_windows_of_kernels_that_know_them_are_checked(edge):
    class Windows(Planted):
        rectangular_causal = windows = packs = True

        def forward(self, call):
            kind = "packed" if call.packing else "causal" if call.causal else "other"
            call = call._replace(window=call.window + (call.window > 0 and kind == edge))
            return Reference().forward(call)

        def backward(self, call, dout, statistics):
            return Reference().backward(call, dout, statistics)

    names = {"causal": "a window", "other": "the edge of a window", "packed": "packed windows"}
    check_kernel(Windows(edge), problem())
    if not edge:
        check_kernel(Windows(edge), problem(windows=True))
        return
    with pytest.raises(KernelUnavailableError, match=f"of {names[edge]} is off"):
        check_kernel(Windows(edge), problem(windows=True))


def test_what_a_kernel_writes_where_it_is_told_is_checked():
    """Most tiles of a run are computed so, as some heads of wider tensors."""

    class Places(CpuFlashAttention):
        name = "places"
        places_outputs = places_gradients = True

        def __init__(self, wrong):
            self.wrong = wrong

        def forward(self, call):
            return self.placed(call, ("out", "lse"), super().forward(call))

        def backward(self, call, dout, statistics):
            found = super().backward(call, dout, statistics)
            return self.placed(call, ("dq", "dk", "dv"), found)

        def placed(self, call, names, found):
            for name, place, x in zip(names, call.into or (), found, strict=call.into is not None):
                self.write(name, place, x)
            return call.into or found

        def write(self, name, place, x):
            if name == self.wrong:  # as if the place were contiguous
                place = place.as_strided(x.shape, x.stride())
            place.copy_(x)

    check_kernel(Places(None), problem())
    for name in ("out", "lse", "dq", "dk", "dv"):
        with pytest.raises(KernelUnavailableError, match=f"{name} in its place of a .* off by"):
            check_kernel(Places(name), problem())


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_of_deterministic_runs_is_the_one_that_is_checked(deterministic):
    found = []

    class Asked(CpuFlashAttention):
        def backward(self, *given):
            found.append(torch.are_deterministic_algorithms_enabled())
            return super().backward(*given)

    check_kernel(Asked(), problem(deterministic=deterministic))
    assert set(found) == {deterministic}
    assert not torch.are_deterministic_algorithms_enabled()


def test_nothing_is_drawn_from_the_run_s_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    check_kernel(resolve("torch_cpu", problem()), problem())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("dims", [(64, 64), (72, 72), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("name", ["flash4", "cudnn", "torch_flash", "flash2"])
def test_kernels_for_gpus(name, dims, kv_heads):
    device = torch.device("cuda", 0)
    shape = device, torch.bfloat16, 8, kv_heads, dims[0]
    asked = Problem(*shape, documents=name != "cudnn", value_dim=dims[1])
    check_kernel(resolved(name, asked), asked)


def test_the_choice_is_said_in_words_by_the_first_rank(caplog, monkeypatch):
    caplog.set_level("INFO", "megatron_cp_plugin.kernels.choice")
    monkeypatch.setenv("RANK", "1")
    resolve("auto", Problem(CPU, torch.float32, 8, 2, 16, value_dim=4))
    assert not caplog.messages
    monkeypatch.setenv("RANK", "0")
    resolve("auto", Problem(CPU, torch.float32, 8, 2, 16, value_dim=8))
    assert caplog.messages == ["kernel: reference for 8:2 heads of 16 and 8 in float32"]


class PlantedLinear(LinearKernel):
    """`chunked`, right but for one thing."""

    name = "planted"

    def __init__(self, fault=""):
        self.fault = fault

    def unsupported(self, problem):
        return None

    def forward(self, given):
        if self.fault == "crash":
            raise RuntimeError("no image for this device\nand more lines")
        k, tokens = given.k, given.k.shape[1]
        if self.fault == "segments" and tokens == 2048:
            given = given._replace(k=torch.cat((torch.zeros_like(k[:, :1024]), k[:, 1024:]), 1))
        if self.fault == "documents":
            given = given._replace(runs=Runs.single(tokens))
        made = Chunked().forward(given)
        if self.fault == "state":
            made.states = made.states * 1.02
        if self.fault == "incoming":
            finish = made.finish
            made.finish = lambda incoming: (finish(None)[0], *finish(incoming)[1:])
        return made

    def backward(self, given, dout, cache):
        made = Chunked().backward(given, dout, cache)
        if self.fault == "nan":
            finish, nan = made.finish, torch.full_like(given.v, torch.nan)
            made.finish = lambda doutgoing: (*finish(doutgoing)[:2], nan, NO_GATES)
        if self.fault == "dstate":
            made.states = -made.states
        return made


def linear_problem(dtype=torch.bfloat16):
    return LinearProblem(CPU, dtype, 4, 24, 16, documents=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_right_kernels_of_linear_attention_pass(dtype):
    asked = linear_problem(dtype)
    check_kernel(PlantedLinear(), asked)
    assert accuracy(PlantedLinear(), asked).right


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("segments", "of 2048 tokens"),
        ("documents", "of 2300 tokens of documents"),
        ("state", "the last state of "),
        ("incoming", "out of "),
        ("nan", "dv of 100 tokens is off by inf"),
        ("dstate", "the gradient of the first state of "),
    ],
)
def test_wrong_kernels_of_linear_attention_are_named(fault, where):
    with pytest.raises(KernelUnavailableError) as refusal:
        check_kernel(PlantedLinear(fault), linear_problem())
    text = str(refusal.value)
    assert text.startswith(
        "kernel planted gives wrong results for linear attention here with 4 heads of 24 and "
        "16 in bfloat16: "
    )
    assert where in text
    assert text.endswith("; use kernel chunked")
    assert "\n" not in text


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_a_kernel_that_fails(kind):
    kernel, asked, words = {
        "softmax": (Planted, problem(), "8:2 heads of 72 in float32: use kernel torch_cpu"),
        "linear": (
            *(PlantedLinear, linear_problem()),
            "4 heads of 24 and 16 in bfloat16: use kernel chunked",
        ),
    }[kind]
    with pytest.raises(KernelUnavailableError) as refusal:
        check_kernel(kernel("crash"), asked)
    assert str(refusal.value) == (
        f"kernel planted fails here with {words} (RuntimeError: no image for this device)"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 128)])
def test_flash_linear_attention(dims):
    asked = LinearProblem(torch.device("cuda", 0), torch.bfloat16, 4, *dims, documents=True)
    try:
        kernel = resolve_linear("fla", asked)
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    check_kernel(kernel, asked)
