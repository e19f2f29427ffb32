"""Kernels against attention written out in float64, and the choice among them."""

import pytest
import torch

from megatron_cp_plugin.core.kernel import Packing, Problem, SoftmaxKernel, Statistics
from megatron_cp_plugin.core.partial import delta_of
from megatron_cp_plugin.errors import KernelUnavailableError
from megatron_cp_plugin.kernels import kernel_names, resolve
from megatron_cp_plugin.kernels.reference import Reference
from tests.kernel_calls import backward_of, forward_of
from tests.oracle import expected_attention, relative_error

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GPU_KERNELS = ("flash4", "cudnn", "torch_flash", "flash2")


def resolved(name: str, problem: Problem) -> SoftmaxKernel:
    """A kernel; where it is not installed, or not for this problem, the test is skipped: which
    kernels there are is for each machine to say, and that one is refused is tested elsewhere.
    """
    try:
        return resolve(name, problem)
    except KernelUnavailableError as error:
        pytest.skip(str(error))


def problem_of(expected):
    q, k, v = expected.q, expected.k, expected.v
    return Problem(q.device, q.dtype, *(q.shape[2], k.shape[2], q.shape[3]), value_dim=v.shape[3])


def check(kernel: SoftmaxKernel, expected, bound: float, *, causal=True, bounds=(), device=CPU):
    """bounds: of documents."""
    q, k, v, dout = (x.to(device) for x in (expected.q, expected.k, expected.v, expected.dout))
    settings = {"causal": causal, "scale": q.shape[-1] ** -0.5}
    if bounds:
        settings["packing"] = Packing.adjacent(bounds, bounds)
    out, lse = forward_of(kernel, q, k, v, **settings)
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert relative_error(out.cpu(), expected.out) < bound
    # A strided lse and, besides out, delta alone: both rules of backward.
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    for statistics in (
        Statistics(strided, out=out),
        Statistics(strided, delta=delta_of(dout, out)),
    ):
        gradients = backward_of(kernel, dout, q, k, v, statistics, **settings)
        for got, want in zip(gradients, (expected.dq, expected.dk, expected.dv), strict=True):
            assert got.dtype == q.dtype
            assert relative_error(got.cpu(), want) < bound
    if not bounds:
        check_places(kernel, (dout, q, k, v, out, lse), expected, bound, settings)


def check_places(kernel: SoftmaxKernel, tensors, expected, bound: float, settings) -> None:
    """All tensors are some heads of wider ones; those beside the results stay as they are."""
    dout, q, k, v, out, lse = (among_others(x).copy_(x) for x in tensors)
    found = [among_others(out), *map(among_others, (q, k, v))]
    results = found[0], among_others(lse)
    if kernel.places_outputs:
        forward_of(kernel, q, k, v, into=results, **settings)
        torch.testing.assert_close(results[1], lse)
    else:
        found[0].copy_(forward_of(kernel, q, k, v, **settings)[0])
    given = dout, q, k, v, Statistics(lse, out=out)
    if kernel.places_gradients:
        backward_of(kernel, *given, into=tuple(found[1:]), **settings)
    else:
        for place, x in zip(found[1:], backward_of(kernel, *given, **settings), strict=True):
            place.copy_(x)
    for got, want in zip(found, (expected.out, expected.dq, expected.dk, expected.dv), strict=True):
        assert relative_error(got.cpu(), want) < bound
    for x in (*found, results[1] if kernel.places_outputs else found[0]):
        assert int(x._base.isnan().sum()) == x._base.numel() - x.numel()


def among_others(x):
    """Room for [B,S,H,D], or [B,H,S], as the middle heads of a NaN tensor with three times more."""
    dim = 2 if x.dim() == 4 else 1
    shape = [*x.shape[:dim], 3 * x.shape[dim], *x.shape[dim + 1 :]]
    return x.new_full(shape, torch.nan).narrow(dim, x.shape[dim], x.shape[dim])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("name", ["reference", "torch_cpu"])
def test_cpu_kernels(name, dtype, bound, causal, kv_heads):
    expected = expected_attention(
        batch=2, seq_len=65, heads=4, kv_heads=kv_heads, head_dim=16, causal=causal, dtype=dtype
    )
    kernel = resolve(name, problem_of(expected))
    check(kernel, expected, bound, causal=causal)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("value_dim", [16, 24])
@pytest.mark.parametrize("bounds", [(), (0, 1, 20, 21, 64, 65)], ids=["causal", "documents"])
def test_the_reference_with_documents_and_values_of_another_width(
    bounds, value_dim, kv_heads, batch
):
    sizes = {"batch": batch, "seq_len": 65, "heads": 4, "kv_heads": kv_heads, "head_dim": 16}
    sizes |= {"value_dim": value_dim, "cu_seqlens": bounds or None}
    expected = expected_attention(**sizes, causal=True)
    check(Reference(), expected, 1e-12, bounds=bounds)
    if value_dim != 16:
        problem = problem_of(expected)
        assert resolve("auto", problem).name == "reference"
        with pytest.raises(KernelUnavailableError, match="torch_cpu: takes values as wide as keys"):
            resolve("torch_cpu", problem)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("shape", ["causal", "full", "documents"])
@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (40, 72)]
)
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_gpu_kernels(name, dims, shape, kv_heads):
    head_dim, value_dim = dims
    settings = {"causal": shape != "full"}
    bounds = (0, 1, 130, 131, 384, 512) if shape == "documents" else ()
    expected = expected_attention(
        batch=2,
        seq_len=512,
        heads=8,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        cu_seqlens=bounds or None,
        dtype=torch.bfloat16,
        **settings,
    )
    shape = torch.device("cuda", 0), torch.bfloat16, 8, kv_heads, head_dim
    problem = Problem(*shape, documents=bool(bounds), value_dim=value_dim)
    kernel = resolved(name, problem)
    check(kernel, expected, 1e-2, bounds=bounds, device=problem.device, **settings)


@pytest.mark.parametrize("name", kernel_names())
def test_rectangular_causal_tiles_are_aligned_at_the_bottom_right(name):
    device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float64
    kernel = resolved(name, Problem(device, dtype, 4, 2, 64))
    if not kernel.rectangular_causal:
        pytest.skip(f"{name} takes square causal tiles only")
    whole = expected_attention(seq_len=96, head_dim=64, causal=True, dtype=dtype)
    q, k, v = (x.to(device) for x in (whole.q, whole.k, whole.v))
    out, _ = forward_of(kernel, q[:, 64:], k, v, scale=64**-0.5, causal=True)
    assert relative_error(out.cpu(), whole.out[:, 64:]) < 1e-2


# Of a score, or of its gradient, of the gradients of each query head, and of those of a KV head.
THREE_ROUNDINGS = 3 * 2**-9


def share_of_scores(kernel, problem, given, packed):
    """dq and dk where all keys have one value, which is the output: in theory 0. Relative to those
    where each has its own.
    """
    bounds = (0, 1, 2, 40, 41, 200)
    packing = Packing.adjacent(bounds, bounds)
    generator = torch.Generator().manual_seed(0)

    def random(tokens, heads, dim):
        x = torch.randn((2, tokens, heads, dim), generator=generator)
        return x.to(problem.device, problem.dtype)

    heads, kv_heads, dim = problem.heads, problem.kv_heads, problem.head_dim
    q, k, v = random(200, heads, dim), random(200, kv_heads, dim), random(200, kv_heads, dim)
    dout, settings = random(200, heads, dim), {"scale": dim**-0.5, "causal": True}
    if packed:
        settings["packing"] = packing
    wide = [x.double() for x in (q, k, v)]
    out, lse = forward_of(Reference(), *wide, **settings)
    usual = backward_of(Reference(), dout.double(), *wide, Statistics(lse, out=out), **settings)
    value = v[:, :1].expand_as(v).contiguous()
    out = value.repeat_interleave(heads // kv_heads, 2)
    statistics = Statistics(lse.float(), out=out)
    if given == "delta":
        statistics = Statistics(lse.float(), delta=delta_of(dout, out))
    found = backward_of(kernel, dout, q, k, value, statistics, **settings)
    return max(float(x.double().norm() / y.norm()) for x, y in zip(found[:2], usual, strict=False))


# Heads as elsewhere: flash4 is compiled for the number of them that share a KV head.
EQUAL_VALUES = [
    *(
        pytest.param(name, (CPU, dtype, 4, 2, 64), packed, id=f"{name}-{dtype}-{packed}")
        for name, packed in (("reference", False), ("reference", True), ("torch_cpu", False))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
    *(
        pytest.param(name, (GPU, dtype, 8, 2, dim), packed, marks=pytest.mark.gpu)
        for name in GPU_KERNELS
        for dtype, dim in (
            *((torch.bfloat16, dim) for dim in (64, 128, 256)),
            (torch.float16, 128),
        )
        for packed in (False, True)
    ),
]


@pytest.mark.parametrize("given", ["out", "delta"])
@pytest.mark.parametrize(("name", "shape", "packed"), EQUAL_VALUES)
def test_scores_of_equal_values_have_no_gradients(name, shape, packed, given):
    """Up to float32, whatever the dtype: delta is a sum of `head_dim` products."""
    problem = Problem(*shape, documents=packed)
    error = share_of_scores(resolved(name, problem), problem, given, packed)
    assert error < problem.head_dim * 2**-23


ON_DEVICES = [CPU, pytest.param(GPU, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", ON_DEVICES, ids=str)
@pytest.mark.parametrize("dim", [1, 2, 3, 8, 128])
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24), (torch.float64, 53)],
)
def test_a_stand_in_has_the_delta_of_the_output(dtype, bits, dim, device):
    """Of rows of all sizes, with one element, with few, with none that is not 0."""
    generator = torch.Generator().manual_seed(0)

    def random(spread):
        x = torch.randn((2, 50, 3, dim), generator=generator, dtype=torch.float64)
        sizes = torch.randn((2, 50, 3, dim), generator=generator, dtype=torch.float64)
        return (x * torch.exp(spread * sizes)).to(device, dtype)

    for dout, out in ((random(0), random(0)), (random(1), random(1)), (random(2), random(0))):
        dout[:, 0] = 0
        dout[:, 1, :, 1:] = 0
        dout[:, 2, :, 2:] = 0
        delta = delta_of(dout, out)
        found = Statistics(delta, delta=delta).out_for(dout)
        assert found.dtype == dtype
        error = (delta_of(dout, found) - delta).abs()
        size = delta_of(dout.abs(), out.abs())
        # What a sum of products leaves, each of numbers of few bits, a single product
        # nothing; what float32 does, in which sums are made; and what the least fp16 does.
        terms = (dout != 0).sum(-1).clamp(max=3).transpose(1, 2)
        left = torch.where(terms > 1, 2.0 ** -(bits * terms), 0.0)
        wide = 2.0**-22 if dtype != torch.float64 else 2.0**-51
        least = 2.0**-24 * dout.abs().amax(-1).transpose(1, 2) if dtype == torch.float16 else 0.0
        assert (error <= (left + wide) * size + least).all()
        assert (found[:, 0] == 0).all()


@pytest.mark.parametrize("device", ON_DEVICES, ids=str)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_stand_in_hides_no_delta_that_is_no_number(wrong, device):
    dout = torch.randn(1, 4, 2, 16, device=device).bfloat16()
    delta = torch.full((1, 2, 4), wrong, device=device)
    assert not delta_of(dout, Statistics(delta, delta=delta).out_for(dout)).isfinite().any()


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def results(kernel, q, k, v, dout, **settings):
    """Outputs and gradients of one forward and both rules of backward."""
    out, lse = forward_of(kernel, q, k, v, **settings)
    found = [out, lse]
    for statistics in (Statistics(lse, out=out), Statistics(lse, delta=delta_of(dout, out))):
        found += backward_of(kernel, dout, q, k, v, statistics, **settings)
    return found


def check_same_bits(kernel, problem, *, tokens, causal, runs):
    """Of documents of 1 to 600 tokens, if the problem has documents."""
    settings = {"scale": problem.head_dim**-0.5, "causal": causal}
    if problem.documents:
        lengths = torch.randint(1, 600, (tokens // 50,), generator=torch.Generator().manual_seed(0))
        bounds = (0, *lengths.cumsum(0).tolist())
        tokens, settings["packing"] = bounds[-1], Packing.adjacent(bounds, bounds)
    q, k, v, dout = (
        torch.randn(2, tokens, heads, problem.head_dim, dtype=problem.dtype, device=problem.device)
        for heads in (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    )
    first = results(kernel, q, k, v, dout, **settings)
    for _ in range(runs):
        for once, again in zip(first, results(kernel, q, k, v, dout, **settings), strict=True):
            assert torch.equal(once, again)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(
    ("name", "packed"), [("reference", False), ("reference", True), ("torch_cpu", False)]
)
def test_cpu_kernels_repeat_to_the_bit(name, packed, kv_heads, causal):
    problem = Problem(CPU, torch.float32, 4, kv_heads, 16, documents=packed)
    assert problem.deterministic
    threads = torch.get_num_threads()
    try:
        # Threads are what would change the order of sums.
        torch.set_num_threads(4)
        check_same_bits(resolve(name, problem), problem, tokens=257, causal=causal, runs=2)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("packed", [False, True], ids=["one", "packed"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [16, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_gpu_kernels_repeat_to_the_bit(name, head_dim, kv_heads, causal, packed):
    # Enough tokens for many blocks to add to one gradient at the same time.
    problem = Problem(GPU, torch.bfloat16, 16, kv_heads, head_dim, documents=packed)
    assert problem.deterministic
    try:
        kernel = resolve(name, problem)
    except KernelUnavailableError as error:
        if "deterministic mode" not in str(error):
            pytest.skip(str(error))
        assert name == "cudnn"
        return
    check_same_bits(kernel, problem, tokens=4096, causal=causal, runs=5 if packed else 10)
