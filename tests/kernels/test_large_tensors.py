"""Offsets beyond int32: in tensors of 2^31 elements, in smaller ones, and in those that are made.

On a GPU with 80 GiB, which nobody else uses: pytest -m gpu tests/kernels/test_large_tensors.py
"""

import pytest
import torch
from torch import Tensor

from megatron_cp_plugin.core.kernel import Packing, Problem, SoftmaxKernel, Statistics
from megatron_cp_plugin.core.linear.states import Decay
from megatron_cp_plugin.core.partial import delta_of
from megatron_cp_plugin.token_losses import token_losses
from tests.kernel_calls import backward_of, forward_of
from tests.kernels.test_chunked import run
from tests.kernels.test_kernels import GPU_KERNELS, resolved
from tests.oracle import naive_attention, relative_error

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
HEADS, DIM = 64, 128
# Offsets of the last rows are beyond int32: 2^31 elements and some, 4 GiB each in bfloat16.
LARGE, FEW = 2**18 + 384, 384
LAST = slice(LARGE - FEW, LARGE)
SETTINGS = {"scale": DIM**-0.5, "causal": False}


def kernel_called(name: str, heads: int, kv_heads: int, *, packs: bool = False) -> SoftmaxKernel:
    return resolved(name, Problem(GPU, torch.bfloat16, heads, kv_heads, DIM, documents=packs))


def normal(*shape: int) -> Tensor:
    return torch.empty(shape, device=GPU, dtype=torch.bfloat16).normal_()


def assert_near(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], bound: float = 1e-3) -> None:
    errors = [relative_error(x, y) for x, y in zip(found, wanted, strict=True)]
    assert max(errors) < bound, errors


@pytest.mark.parametrize(
    ("large", "tokens"),
    [
        ("queries", LARGE),
        ("keys", LARGE),
        # 2^29 elements and some, which float32 sums have 2^31 bytes of; 2^30 and some, which
        # bfloat16 has; almost 2^31.
        *(("queries", tokens) for tokens in (2**16 + FEW, 2**17 + FEW, 2**18 - FEW)),
    ],
)
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_tensors_of_more_than_int32_counts(name: str, large: str, tokens: int) -> None:
    """The last rows of a large tensor are computed as they are in a small one."""
    kernel, last = kernel_called(name, HEADS, HEADS), slice(tokens - FEW, tokens)
    q, dout = (normal(1, tokens if large == "queries" else FEW, HEADS, DIM) for _ in "qd")
    k, v = (normal(1, FEW if large == "queries" else tokens, HEADS, DIM) for _ in "kv")
    out, lse = forward_of(kernel, q, k, v, **SETTINGS)
    dq, dk, dv = backward_of(kernel, dout, q, k, v, Statistics(lse, out=out), **SETTINGS)
    if large == "queries":
        rows = q[:, last], dout[:, last], out[:, last].contiguous(), lse[:, :, last]
        want, want_lse = forward_of(kernel, rows[0], k, v, **SETTINGS)
        assert relative_error(rows[2], want) < 1e-3
        assert relative_error(rows[3], want_lse) < 1e-5
        statistics = Statistics(rows[3].contiguous(), out=rows[2])
        want = backward_of(kernel, rows[1], rows[0], k, v, statistics, **SETTINGS)
        assert relative_error(dq[:, last], want[0]) < 1e-3
        # What all other rows add to dk and dv, in pieces.
        sums = [torch.zeros(k.shape, device=GPU) for _ in "kv"]
        for start in range(0, tokens, 2**16):
            part = slice(start, min(start + 2**16, tokens))
            statistics = Statistics(lse[:, :, part].contiguous(), out=out[:, part])
            found = backward_of(kernel, dout[:, part], q[:, part], k, v, statistics, **SETTINGS)
            for total, x in zip(sums, found[1:], strict=True):
                total += x
        assert max(map(relative_error, (dk, dv), sums)) < 1e-2
        return
    part = k[:, last], v[:, last]
    found = backward_of(kernel, dout, q, *part, Statistics(lse, out=out), **SETTINGS)
    assert max(map(relative_error, (dk[:, last], dv[:, last]), found[1:])) < 1e-3
    partials = [
        forward_of(kernel, q, k[:, start : start + 2**16], v[:, start : start + 2**16], **SETTINGS)
        for start in range(0, tokens, 2**16)
    ]
    lses = torch.stack([each for _, each in partials])
    assert relative_error(lse, lses.logsumexp(0)) < 1e-5
    weights = (lses - lse).exp().transpose(2, 3).unsqueeze(-1)
    want = sum(x.float() * w for (x, _), w in zip(partials, weights, strict=True))
    assert relative_error(out, want) < 1e-2


def test_merges_and_sums_of_more_elements_than_int32_counts() -> None:
    from megatron_cp_plugin.kernels import fused

    a, b = (normal(1, LARGE, HEADS, DIM) for _ in "ab")
    a_lse, b_lse = (torch.randn((1, HEADS, LARGE), device=GPU) for _ in "ab")
    out, lse = torch.empty_like(a), torch.empty_like(a_lse)
    small = [x[:, LAST].contiguous() for x in (a, b)]
    small_lse = [x[:, :, LAST].contiguous() for x in (a_lse, b_lse)]
    want, want_lse = torch.empty_like(small[0]), torch.empty_like(small_lse[0])

    fused.merge_into(out, lse, a, a_lse, b, b_lse)
    fused.merge_into(want, want_lse, small[0], small_lse[0], small[1], small_lse[1])
    assert torch.equal(out[:, LAST], want)
    assert torch.equal(lse[:, :, LAST], want_lse)
    every, own = slice(0, LARGE), slice(0, FEW)
    fused.sum_rows((out,), [(every, (a,)), (every, (b,))], in_place=False)
    fused.sum_rows((want,), [(own, (x,)) for x in small], in_place=False)
    assert torch.equal(out[:, LAST], want)
    assert torch.equal(fused.delta_of(a, b)[:, :, LAST], fused.delta_of(*small))
    assert torch.equal(
        fused.placeholder_out(a, lse)[:, LAST], fused.placeholder_out(small[0], want_lse)
    )
    rows = torch.arange(LARGE - FEW, LARGE, device=GPU, dtype=torch.int32)
    assert torch.equal(fused.rows_at(a, rows), small[0])


@pytest.mark.parametrize("name", GPU_KERNELS)
def test_keys_that_query_heads_share(name: str) -> None:
    """2^28 elements, whose gradients kernels have for each of 64 query heads before they sum."""
    kernel = kernel_called(name, HEADS, 8)
    q, dout = normal(1, FEW, HEADS, DIM), normal(1, FEW, HEADS, DIM)
    k, v = normal(1, LARGE, 8, DIM), normal(1, LARGE, 8, DIM)
    out, lse = forward_of(kernel, q, k, v, **SETTINGS)
    found = backward_of(kernel, dout, q, k, v, Statistics(lse, out=out), **SETTINGS)
    dq = torch.zeros(q.shape, device=GPU)
    for start in range(0, LARGE, 2**15):
        part = slice(start, min(start + 2**15, LARGE))
        given = dout, q, k[:, part], v[:, part], Statistics(lse, out=out)
        more, *wanted = backward_of(kernel, *given, **SETTINGS)
        assert_near((found[1][:, part], found[2][:, part]), tuple(wanted), 1e-2)
        dq += more
    assert_near((found[0],), (dq,), 1e-2)


@pytest.mark.parametrize("large", ["queries", "keys"])
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_heads_of_large_tensors(name: str, large: str) -> None:
    """The last 8 of 64 heads, where they are: 2^28 elements, the last of them 2^31 from the first;
    as if they were copied together.
    """
    kernel, some = kernel_called(name, 8, 8), slice(HEADS - 8, HEADS)

    def heads(tokens: int) -> Tensor:
        return normal(1, tokens, HEADS, DIM)[:, :, some]

    q, dout, place, dq = (heads(LARGE if large == "queries" else FEW) for _ in range(4))
    k, v, dk, dv = (heads(LARGE if large == "keys" else FEW) for _ in range(4))
    whole = tuple(x.contiguous() for x in (q, k, v))
    want, want_lse = forward_of(kernel, *whole, **SETTINGS)
    out, lse = forward_of(kernel, q, k, v, **SETTINGS)
    assert_near((out, lse), (want, want_lse))
    wanted = backward_of(
        kernel, dout.contiguous(), *whole, Statistics(want_lse, out=want), **SETTINGS
    )
    given = dout, q, k, v, Statistics(want_lse, out=place.copy_(want))
    assert_near(backward_of(kernel, *given, **SETTINGS), wanted)
    if kernel.places_outputs:
        forward_of(kernel, q, k, v, into=(place, lse), **SETTINGS)
        assert_near((place, lse), (want, want_lse))
    if kernel.places_gradients:
        backward_of(kernel, *given, into=(dq, dk, dv), **SETTINGS)
        assert_near((dq, dk, dv), wanted)


@pytest.mark.parametrize("kv_heads", [HEADS, 1])
@pytest.mark.parametrize("tokens", [512, 96])
@pytest.mark.parametrize("name", ["flash4", "torch_flash", "flash2"])
def test_packed_documents(name: str, tokens: int, kv_heads: int) -> None:
    """The last two of 513, or of 2735, against attention written out in float64.

    FlashAttention-2 pads each by 128 rows, and its offsets in them are int32.
    """
    kernel = kernel_called(name, HEADS, kv_heads, packs=True)
    bounds = (*range(0, LARGE, tokens), LARGE)
    packing, settings = Packing.adjacent(bounds, bounds), {"scale": DIM**-0.5, "causal": True}
    q, dout = (normal(1, LARGE, HEADS, DIM) for _ in "qd")
    k, v = (normal(1, LARGE, kv_heads, DIM) for _ in "kv")
    out, lse = forward_of(kernel, q, k, v, packing=packing, **settings)
    statistics = Statistics(lse, out=out)
    found = out, *backward_of(kernel, dout, q, k, v, statistics, packing=packing, **settings)
    for start, stop in zip(bounds[-3:], bounds[-2:], strict=False):
        rows = slice(start, stop)
        inputs = [x[:, rows].double().requires_grad_() for x in (q, k, v)]
        want = naive_attention(*inputs, **settings)
        wanted = want, *torch.autograd.grad(want, inputs, dout[:, rows].double())
        assert_near(tuple(x[:, rows] for x in found), wanted, 1e-2)


@pytest.mark.parametrize("name", GPU_KERNELS)
def test_entries_of_a_batch(name: str) -> None:
    """Three of 2^30 elements and some: the last of them as if it were alone."""
    kernel, tokens = kernel_called(name, HEADS, HEADS), 2**17 + FEW
    q, dout = (normal(3, tokens, HEADS, DIM) for _ in "qd")
    k, v = (normal(3, FEW, HEADS, DIM) for _ in "kv")
    out, lse = forward_of(kernel, q, k, v, **SETTINGS)
    found = backward_of(kernel, dout, q, k, v, Statistics(lse, out=out), **SETTINGS)
    last = [x[2:].clone() for x in (dout, q, k, v)]
    want = forward_of(kernel, *last[1:], **SETTINGS)
    assert_near((out[2:], lse[2:]), want)
    statistics = Statistics(want[1], out=want[0])
    wanted = backward_of(kernel, *last, statistics, **SETTINGS)
    assert_near(tuple(x[2:] for x in found), wanted)


def test_some_rows_of_large_tensors() -> None:
    """Merged, added, multiplied; each row as in a small tensor."""
    from megatron_cp_plugin.kernels import fused

    total, b = normal(1, LARGE, HEADS, DIM), normal(1, LARGE, HEADS, DIM)
    lse, b_lse = (torch.randn(1, HEADS, LARGE, device=GPU) for _ in "ab")
    rows = torch.arange(LARGE - FEW, LARGE, device=GPU, dtype=torch.int32)
    own = torch.arange(FEW, device=GPU, dtype=torch.int32)
    small, few = total[:, LAST].contiguous(), b[:, LAST].contiguous()
    small_lse, few_lse = lse[:, :, LAST].contiguous(), b_lse[:, :, LAST].contiguous()

    fused.merge_rows_into(total, lse, rows, b, b_lse, rows)
    fused.merge_rows_into(small, small_lse, own, few, few_lse, own)
    assert torch.equal(total[:, LAST], small)
    assert torch.equal(lse[:, :, LAST], small_lse)
    fused.add_rows_into(total, rows, b, rows)
    fused.add_rows_into(small, own, few, own)
    assert torch.equal(total[:, LAST], small)
    out, few_out = torch.empty_like(b), torch.empty_like(few)
    fused.sum_rows((out,), [(slice(0, LARGE), (x,)) for x in (b, b, total)], in_place=False)
    fused.sum_rows((few_out,), [(slice(0, FEW), (x,)) for x in (few, few, small)], in_place=False)
    assert torch.equal(out[:, LAST], few_out)
    scale = torch.rand(1, LARGE, device=GPU)
    some = scale[:, LAST].contiguous()
    fused.product_into(out, total, b, scale, (b, scale))
    fused.product_into(few_out, small, few, some, (few, some))
    assert torch.equal(out[:, LAST], few_out)
    assert torch.equal(delta_of(total, out)[:, :, LAST], delta_of(small, few_out))


def test_a_chunk_of_logits() -> None:
    """2^31 and some: losses and gradients of the last tokens in float64, that of the weight as
    small chunks give it.
    """
    tokens, vocabulary, size = 2**14 + 1024, 2**17, 64
    hidden, weight = normal(tokens, size), normal(vocabulary, size) / 8
    labels = torch.randint(vocabulary, (tokens,), device=GPU)
    dlosses = torch.randn(tokens, device=GPU)

    def gradients(chunk_tokens: int) -> tuple[Tensor, ...]:
        x, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        losses, _, predicted = token_losses(
            x,
            head,
            labels,
            chunk_tokens=chunk_tokens,
            tp_group=None,
            sequence_parallel=False,
            into_main_grad=False,
            predict=True,
        )
        assert predicted is not None
        losses.backward(dlosses)
        return losses.detach(), predicted, x.grad, head.grad

    losses, predicted, dhidden, dweight = gradients(tokens)
    assert_near((dweight,), (gradients(2048)[3],), 6e-3)
    last = slice(tokens - FEW, tokens)
    x = hidden[last].double().requires_grad_()
    logits = x @ weight.double().t()
    want = torch.nn.functional.cross_entropy(logits, labels[last], reduction="none")
    (dx,) = torch.autograd.grad(want, x, dlosses[last].double())
    assert_near((losses[last], dhidden[last]), (want.detach(), dx), 6e-3)
    chosen = logits.gather(1, predicted[last, None])[:, 0]
    assert (logits.amax(1) - chosen).max() < 2**-5  # as near as bfloat16 can tell


def test_what_a_state_adds() -> None:
    """At rates of 1 each token as if it were one of a few."""
    pytest.importorskip("triton")
    from megatron_cp_plugin.kernels.decayed import add_decayed_

    out, x = normal(1, LARGE, HEADS, DIM), normal(1, LARGE, HEADS, DIM)
    states, rates = torch.randn(1, 1, HEADS, DIM, DIM, device=GPU), torch.zeros(HEADS, device=GPU)
    want, few = out[:, LAST].contiguous(), x[:, LAST].contiguous()
    add_decayed_(out, x, states, rates, [(0, LARGE)])
    add_decayed_(want, few, states, rates, [(0, FEW)])
    assert_near((out[:, LAST],), (want,))


def test_linear_attention() -> None:
    """Queries, and states between chunks, of more than 2^31 elements in 16 segments. All heads
    forget so much that the last tokens have what they have alone.
    """
    pytest.importorskip("fla")
    tokens, heads, dim, alone = 2**21 + 2**18, 16, 64, 8192
    decay, none = Decay((0.5,) * heads), torch.zeros(1, heads, dim, dim, device=GPU)
    tensors = [normal(1, tokens, heads, dim) for _ in range(4)]
    found = run("fla", *tensors, decay, none, none)
    few = [x[:, -alone:].contiguous() for x in tensors]
    wanted = run("fla", *few, decay, none, none)
    last = slice(-alone // 2, None)
    for number in (0, 2, 3, 4):  # out, dq, dk, dv
        assert_near((found[number][:, last],), (wanted[number][:, last],), 1e-2)
    assert_near((found[1],), (wanted[1],), 1e-2)  # the state at the end
