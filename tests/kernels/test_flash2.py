"""The flash-attn 2 adapter over a stand-in with that package's public signatures.

The stand-in computes with the written-out reference; what is tested is how the adapter calls it.
"""

import sys
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


# Heads of the stand-in's backwards.
BACKWARDS = []


def note_backward(q, rows):
    """Offsets in the float32 dQ are int32 in flash-attn 2.8.3 and in torch 2.11."""
    assert rows * q.shape[-2] * 32 <= base.MOST_ELEMENTS
    BACKWARDS.append(q.shape[-2])


def _flash_attn_forward(q, k, v, *, softmax_scale, causal, return_softmax, **others):
    assert others == PLAIN
    assert return_softmax is False
    out, lse = forward_of(Reference(), q, k, v, scale=softmax_scale, causal=causal)
    return out, lse, None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, *, softmax_scale, causal, deterministic, **others
):
    assert others == PLAIN
    note_backward(q, q.shape[0] * 128)
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
    note_backward(q, len(q) + 128 * (len(others["cu_seqlens_q"]) - 1))
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


@pytest.fixture(autouse=True)
def _flash_attn(monkeypatch):
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward = _flash_attn_forward
    interface._flash_attn_backward = _flash_attn_backward
    interface._flash_attn_varlen_forward = _flash_attn_varlen_forward
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    BACKWARDS.clear()


BOUNDS = (0, 1, 12, 30, 33)


def statistics_of(given, lse, out, dout):
    """With a strided lse."""
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    return Statistics(
        strided, **({"out": out} if given == "out" else {"delta": delta_of(dout, out)})
    )


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("causal", "bounds", "batch"),
    [(True, (), 2), (False, (), 1), (True, BOUNDS, 1), (True, BOUNDS, 2)],
)
@pytest.mark.parametrize("given", ["out", "delta"])
def test_forward_and_backward(monkeypatch, given, causal, bounds, batch, kv_heads, parts):
    """bounds: of documents. parts: of a backward beyond int32."""
    elements = batch * (33 + 4 * 128 if bounds else 128) * 4 * 32
    monkeypatch.setattr(base, "MOST_ELEMENTS", elements // parts)
    sizes = {"batch": batch, "seq_len": 33, "heads": 4, "kv_heads": kv_heads, "head_dim": 16}
    expected = expected_attention(**sizes, causal=causal, cu_seqlens=bounds or None)
    q, k, v, dout = expected.q, expected.k, expected.v, expected.dout
    settings = {"scale": 0.25, "causal": causal}
    if bounds:
        settings["packing"] = Packing.adjacent(bounds, bounds)
    out, lse = forward_of(Flash2(), q, k, v, **settings)
    assert relative_error(out, expected.out) < 1e-12
    statistics = statistics_of(given, lse, out, dout)
    found = [backward_of(Flash2(), dout, q, k, v, statistics, **settings)]
    assert [4 // parts] * parts == BACKWARDS
    if not bounds:
        found.append([torch.full_like(x, torch.nan) for x in (q, k, v)])
        backward_of(Flash2(), dout, q, k, v, statistics, into=tuple(found[-1]), **settings)
    for gradients in found:
        for got, want in zip(gradients, (expected.dq, expected.dk, expected.dv), strict=True):
            assert relative_error(got, want) < 1e-12
