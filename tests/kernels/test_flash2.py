"""The flash-attn 2 adapter over a stand-in with that package's public signatures.

The stand-in computes with the written-out reference; what is tested is how the adapter calls it.
"""

import sys
from functools import wraps
from types import ModuleType

import pytest
import torch

from megatron_cp_plugin.core.kernel import Packing, Statistics
from megatron_cp_plugin.core.partial import delta_of
from megatron_cp_plugin.kernels import base
from megatron_cp_plugin.kernels.flash2 import Flash2
from megatron_cp_plugin.kernels.reference import Reference
from tests.kernel_calls import backward_of, forward_of
from tests.oracle import expected_attention, relative_error

# What the adapter has to say of what no tile has.
PLAIN = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


def _flash_attn_forward(q, k, v, *, softmax_scale, causal, return_softmax, **others):
    assert others == PLAIN
    assert return_softmax is False
    out, lse = forward_of(Reference(), q, k, v, scale=softmax_scale, causal=causal)
    return out, lse, None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, *, softmax_scale, causal, deterministic, **others
):
    assert others == PLAIN
    assert softmax_lse.is_contiguous()
    # The real kernel has no other use of out than this sum.
    statistics = Statistics(softmax_lse, delta=delta_of(dout, out))
    gradients = backward_of(
        Reference(), dout, q, k, v, statistics, scale=softmax_scale, causal=causal
    )
    for buffer, gradient in zip((dq, dk, dv), gradients, strict=True):
        buffer.copy_(gradient)
    return statistics.delta


def _flash_attn_varlen_forward(q, k, v, *, softmax_scale, causal, return_softmax, **others):
    assert return_softmax is False
    settings = {"scale": softmax_scale, "causal": causal, "packing": packing_of(**others)}
    out, lse = forward_of(Reference(), *(x.unsqueeze(0) for x in (q, k, v)), **settings)
    return out[0], lse[0], None, None


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, *, softmax_scale, causal, deterministic, **others
):
    assert softmax_lse.is_contiguous()
    dout, q, k, v, out, lse = (x.unsqueeze(0) for x in (dout, q, k, v, out, softmax_lse))
    statistics = Statistics(lse, delta=delta_of(dout, out))
    settings = {"scale": softmax_scale, "causal": causal, "packing": packing_of(**others)}
    gradients = backward_of(Reference(), dout, q, k, v, statistics, **settings)
    for buffer, gradient in zip((dq, dk, dv), gradients, strict=True):
        buffer.copy_(gradient[0])


def packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **others):
    assert others == PLAIN
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    return Packing.adjacent(cu_seqlens_q.tolist(), cu_seqlens_k.tolist())


@pytest.fixture
def flash_attn(monkeypatch):
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward = _flash_attn_forward
    interface._flash_attn_backward = _flash_attn_backward
    interface._flash_attn_varlen_forward = _flash_attn_varlen_forward
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)


BOUNDS = (0, 1, 12, 30, 33)


def statistics_of(given, lse, out, dout):
    """With a strided lse."""
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    return Statistics(
        strided, **({"out": out} if given == "out" else {"delta": delta_of(dout, out)})
    )


@pytest.mark.parametrize(
    ("causal", "bounds", "batch"),
    [(True, (), 1), (False, (), 1), (True, BOUNDS, 1), (True, BOUNDS, 2)],
)
@pytest.mark.parametrize("given", ["out", "delta"])
@pytest.mark.usefixtures("flash_attn")
def test_forward_and_backward(given, causal, bounds, batch):
    """bounds: of documents."""
    sizes = {"batch": batch, "seq_len": 33, "heads": 4, "kv_heads": 2, "head_dim": 16}
    expected = expected_attention(**sizes, causal=causal, cu_seqlens=bounds or None)
    q, k, v, dout = expected.q, expected.k, expected.v, expected.dout
    settings = {"scale": 0.25, "causal": causal}
    if bounds:
        settings["packing"] = Packing.adjacent(bounds, bounds)
    out, lse = forward_of(Flash2(), q, k, v, **settings)
    assert relative_error(out, expected.out) < 1e-12
    statistics = statistics_of(given, lse, out, dout)
    gradients = backward_of(Flash2(), dout, q, k, v, statistics, **settings)
    for got, want in zip(gradients, (expected.dq, expected.dk, expected.dv), strict=True):
        assert relative_error(got, want) < 1e-12


@pytest.fixture
def short(monkeypatch):
    """Kernels take a fourth of the elements of float32 dQ that 4 heads have in the tests below."""

    def calls_of(function):
        @wraps(function)
        def called(dout, q, *tensors, **settings):
            tokens = q.shape[0] * (128 if q.dim() == 4 else 1)
            starts = settings.get("cu_seqlens_q", ())
            padding = 128 * max(0, len(starts) - 1)
            elements = (tokens + padding) * q.shape[-2] * 32
            assert elements <= base.MOST_ELEMENTS
            found.append(q.shape[-2])
            return function(dout, q, *tensors, **settings)

        return called

    found = []
    interface = sys.modules["flash_attn.flash_attn_interface"]
    for name in ("_flash_attn_backward", "_flash_attn_varlen_backward"):
        monkeypatch.setattr(interface, name, calls_of(getattr(interface, name)))

    def limit(elements):
        monkeypatch.setattr(base, "MOST_ELEMENTS", elements // 4)
        return found

    return limit


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("given", ["out", "delta"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.usefixtures("flash_attn")
def test_a_backward_beyond_int32_is_in_parts(short, kv_heads, given, packed):
    """Offsets in the float32 dQ are int32 in flash-attn 2.8.3 and in torch 2.11."""
    bounds = BOUNDS if packed else ()
    expected = expected_attention(
        batch=2,
        seq_len=33,
        heads=4,
        kv_heads=kv_heads,
        head_dim=16,
        causal=True,
        cu_seqlens=bounds or None,
    )
    q, k, v, dout = expected.q, expected.k, expected.v, expected.dout
    kernel, packing = Flash2(), Packing.adjacent(bounds, bounds) if packed else None
    settings = {"scale": 0.25, "causal": True, "packing": packing}
    out, lse = forward_of(kernel, q, k, v, **settings)
    statistics = statistics_of(given, lse, out, dout)
    heads_of_calls = short(2 * (33 + 4 * 128 if packed else 128) * 4 * 32)
    found = [backward_of(kernel, dout, q, k, v, statistics, **settings)]
    assert heads_of_calls == [1] * 4
    if not packed:
        found.append([torch.full_like(x, torch.nan) for x in (q, k, v)])
        backward_of(kernel, dout, q, k, v, statistics, into=tuple(found[-1]), **settings)
    for gradients in found:
        for got, want in zip(gradients, (expected.dq, expected.dk, expected.dv), strict=True):
            assert relative_error(got, want) < 1e-12
