"""torch's flash and cuDNN kernels, where they need help."""

from types import SimpleNamespace

import pytest
import torch

from megatron_cp_plugin.core.kernel import Problem, Statistics
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.kernels import base, torch_flash
from megatron_cp_plugin.kernels.reference import Reference
from tests.kernel_calls import backward_of, forward_of
from tests.kernels.test_kernels import CPU, GPU_KERNELS, THREE_ROUNDINGS, resolved
from tests.oracle import relative_error


def one_key(kernel, device):
    """Errors of all results where queries see one key."""
    generator = torch.Generator().manual_seed(0)

    def random(tokens, heads):
        x = torch.randn((2, tokens, heads, 64), generator=generator)
        return x.to(device, torch.bfloat16)

    q, k, v, dout = random(200, 4), random(1, 2), random(1, 2), random(200, 4)
    settings = {"scale": 0.125, "causal": False}
    want_out, want_lse = forward_of(Reference(), *(x.double() for x in (q, k, v)), **settings)
    out, lse = forward_of(kernel, q, k, v, **settings)
    assert max(relative_error(out, want_out), relative_error(lse, want_lse)) < 1e-2
    # As if there were other keys: of one alone the scores have no gradients.
    statistics = Statistics(lse + 1, out=random(200, 4))
    wide = Statistics(want_lse + 1, out=statistics.out.double())
    got = backward_of(kernel, dout, q, k, v, statistics, **settings)
    want = backward_of(Reference(), *(x.double() for x in (dout, q, k, v)), wide, **settings)
    return [relative_error(x, y) for x, y in zip(got, want, strict=True)]


def test_cudnn_is_not_called_with_one_key(monkeypatch):
    monkeypatch.setattr(torch_flash, "_aten", None)
    assert max(one_key(torch_flash.CudnnAttention(), CPU)) < THREE_ROUNDINGS


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_gpu_kernels_with_one_key(name):
    device = torch.device("cuda", 0)
    kernel = resolved(name, Problem(device, torch.bfloat16, 4, 2, 64))
    assert max(one_key(kernel, device)) < THREE_ROUNDINGS


@pytest.mark.parametrize(("heads", "kv_heads", "parts"), [(8, 4, 4), (4, 4, 2), (4, 1, 2)])
def test_cudnn_backward_of_large_tensors_is_in_parts(monkeypatch, heads, kv_heads, parts):
    """Each call has contiguous tensors of at most MOST_ELEMENTS elements, of views too."""
    monkeypatch.setattr(base, "MOST_ELEMENTS", 100 * 4 * 16)
    calls = []

    def backward(dout, q, k, v, out, lse, *others, scale):
        given = [x.transpose(1, 2) for x in (dout, q, k, v)]
        out = out.transpose(1, 2)
        assert all(x.is_contiguous() for x in (*given[:2], out))
        assert all(x.numel() <= base.MOST_ELEMENTS for x in (*given[:2], out))
        calls.append(q.shape)
        statistics = Statistics(lse.squeeze(-1), out=out)
        found = backward_of(Reference(), *given, statistics, scale=scale, causal=others[-1])
        return [x.transpose(1, 2) for x in found]

    operator = SimpleNamespace(_scaled_dot_product_cudnn_attention_backward=backward)
    monkeypatch.setattr(torch_flash, "_aten", operator)
    generator = torch.Generator().manual_seed(0)

    def random(n):
        wide = torch.randn((2, 100, 2 * n, 16), generator=generator, dtype=torch.float64)
        return wide[:, :, :n]  # as groups of heads are

    q, dout, k, v = random(heads), random(heads), random(kv_heads), random(kv_heads)
    settings = {"scale": 0.25, "causal": True}
    out, lse = forward_of(Reference(), q, k, v, **settings)
    for statistics in (
        Statistics(lse, out=out),
        Statistics(lse, delta=(dout * out).sum(3).transpose(1, 2)),
    ):
        calls.clear()
        got = backward_of(torch_flash.CudnnAttention(), dout, q, k, v, statistics, **settings)
        assert len(calls) == parts
        want = backward_of(Reference(), dout, q, k, v, Statistics(lse, out=out), **settings)
        assert max(map(relative_error, got, want)) < 1e-12
    monkeypatch.setattr(base, "MOST_ELEMENTS", 2 * 100 * 16 - 1)
    text = "cudnn needs at most 3199 elements a head, got 3200: use kernel flash4, or a larger"
    with pytest.raises(ContextParallelError, match=text):
        backward_of(
            torch_flash.CudnnAttention(), dout, q, k, v, Statistics(lse, out=out), **settings
        )
