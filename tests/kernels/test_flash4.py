"""The flash-attn 4 adapter over a stand-in that computes with the written-out reference.

What is tested is with which head dims the adapter calls it, and what becomes of the results.
"""

import sys
from types import ModuleType

import pytest
import torch

from megatron_cp_plugin.core.kernel import Packing, Problem, Statistics
from megatron_cp_plugin.core.partial import delta_of
from megatron_cp_plugin.kernels import flash4
from megatron_cp_plugin.kernels.flash4 import Flash4
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.kernels.torch_flash import CudnnAttention
from tests.kernel_calls import backward_of, forward_of
from tests.oracle import expected_attention, relative_error


@pytest.fixture
def called(monkeypatch):
    """Head dims of queries and values of every call of the stand-in."""
    dims = []
    flash4._dims_on.cache_clear()  # each test says what the GPU is

    def forward(q, k, v, *, return_lse, softmax_scale, causal, out=None, lse=None, **lengths):
        assert return_lse
        dims.append((q.shape[-1], v.shape[-1]))
        settings = {"scale": softmax_scale, **edges(lengths, causal=causal)}
        if out is not None:
            forward_of(Reference(), q, k, v, into=(out, lse), **settings)
            return out, lse
        if not lengths:
            return forward_of(Reference(), q, k, v, **settings)
        packing = packing_of(**lengths)
        out, lse = forward_of(
            Reference(), *(x[None] for x in (q, k, v)), packing=packing, **settings
        )
        return out[0], lse[0]

    def backward(
        q,
        k,
        v,
        out,
        dout,
        lse,
        *,
        dlse,
        deterministic,
        softmax_scale,
        causal,
        dq=None,
        dk=None,
        dv=None,
        **lengths,
    ):
        assert not deterministic
        assert out.shape == dout.shape
        dims.append((q.shape[-1], v.shape[-1]))
        settings = {"scale": softmax_scale, **edges(lengths, causal=causal)}
        if lengths:
            q, k, v, out, dout, lse = (x[None] for x in (q, k, v, out, dout, lse))
            dlse = None if dlse is None else dlse[None]
        delta = delta_of(dout, out) - (0 if dlse is None else dlse)
        statistics = Statistics(lse, delta=delta)
        if dq is not None:
            backward_of(Reference(), dout, q, k, v, statistics, into=(dq, dk, dv), **settings)
            return dq, dk, dv
        if not lengths:
            return backward_of(Reference(), dout, q, k, v, statistics, **settings)
        packing = packing_of(**lengths)
        gradients = backward_of(Reference(), dout, q, k, v, statistics, packing=packing, **settings)
        return tuple(x[0] for x in gradients)

    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    return dims


def edges(given, *, causal):
    """What its windows mean: how many keys a query sees before and behind its diagonal's."""
    left, right = (given.pop(f"window_size_{side}", None) for side in ("left", "right"))
    assert right in (None, 0)
    assert not (causal and left is not None)
    return {"causal": causal or right == 0, "window": 0 if left is None else left + 1}


def packing_of(
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None
):
    sides = []
    for starts, longest, used in (
        (cu_seqlens_q, max_seqlen_q, seqused_q),
        (cu_seqlens_k, max_seqlen_k, seqused_k),
    ):
        assert starts.dtype == torch.int32
        lengths = starts.diff() if used is None else used
        assert longest == lengths.max()
        stops = starts[:-1] + lengths
        sides.append(tuple(map(slice, starts[:-1].tolist(), stops.tolist())))
        assert sides[-1][-1].stop == starts[-1]
    return Packing.of(*sides)


@pytest.mark.parametrize("name", ["flash4", "cudnn"])
@pytest.mark.usefixtures("called")
def test_wide_heads_are_served_where_they_were_tried(name, monkeypatch):
    monkeypatch.setattr("megatron_cp_plugin.kernels.flash4.find_spec", lambda name: True)
    shape = torch.device("cuda", 0), torch.bfloat16, 4, 4, 192
    for capability, reason in (
        (9, None),
        (10, "was tried with head dims above 128 on Hopper only"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, n=capability: (n, 0))
        kernel = Flash4() if name == "flash4" else CudnnAttention()
        assert (kernel.unsupported(Problem(*shape)) or "").startswith(reason or "")
        assert (kernel.unsupported(Problem(*shape)) is None) == (reason is None)
        assert kernel.unsupported(Problem(*shape[:4], 128)) is None


@pytest.mark.parametrize(
    ("capability", "dims", "kv_heads", "served"),
    [
        (9, (64, 64), 1, (64, 64)),
        (9, (80, 80), 1, (96, 96)),
        (9, (8, 72), 2, (96, 96)),
        (9, (112, 112), 2, (128, 128)),
        (9, (192, 128), 2, (192, 128)),
        (9, (192, 128), 1, (192, 192)),
        (9, (136, 40), 2, (192, 128)),
        (10, (96, 96), 1, (128, 128)),
        (10, (40, 40), 1, (64, 64)),
    ],
)
def test_head_dims_are_filled_up(called, monkeypatch, capability, dims, kv_heads, served):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    head_dim, value_dim = dims
    expected = expected_attention(
        seq_len=9, heads=2, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, causal=True
    )
    settings = {"scale": head_dim**-0.5, "causal": True}
    inputs = expected.q, expected.k, expected.v
    out, lse = forward_of(Flash4(), *inputs, **settings)
    delta = delta_of(expected.dout, out)
    found = [out]
    for statistics in (Statistics(lse, out=out), Statistics(lse, delta=delta)):
        found += backward_of(Flash4(), expected.dout, *inputs, statistics, **settings)
    assert called == [served] * 3
    gradients = expected.dq, expected.dk, expected.dv
    for got, want in zip(found, (expected.out, *gradients, *gradients), strict=True):
        assert got.shape == want.shape
        assert got.is_contiguous() or served == dims
        assert relative_error(got, want) < 1e-12
    places = tuple(torch.full_like(x, torch.nan) for x in (*found[:4], lse))
    forward_of(Flash4(), *inputs, into=(places[0], places[4]), **settings)
    statistics = Statistics(places[4], out=places[0])
    backward_of(Flash4(), expected.dout, *inputs, statistics, into=places[1:4], **settings)
    for got, want in zip(places, (expected.out, *gradients, lse), strict=True):
        assert relative_error(got, want) < 1e-12


@pytest.mark.parametrize("given", ["out", "delta"])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 4), (False, 17)])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "packing",
    [
        Packing.adjacent((0, 3, 4, 9), (0, 7, 8, 20)),
        Packing.of((slice(0, 3), slice(5, 9)), (slice(0, 10), slice(12, 20))),
        None,
    ],
    ids=["adjacent", "gaps", "one"],
)
@pytest.mark.usefixtures("called")
def test_several_sequences(monkeypatch, packing, batch, causal, window, given):
    """They are handed over by the lengths, and the windows, that the interface has for them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shapes = (9, 4, 64), (20, 2, 64), (20, 2, 64), (9, 4, 64)
    q, k, v, dout = (torch.randn(batch, *shape, dtype=torch.float64) for shape in shapes)
    settings = {"scale": 0.1, "causal": causal, "window": window}
    results = []
    for kernel in (Flash4(), Reference()):
        out, lse = forward_of(kernel, q, k, v, packing=packing, **settings)
        out, lse = out.nan_to_num(0.0), lse.nan_to_num(0.0)
        statistics = Statistics(lse, out=out)
        if given == "delta":
            statistics = Statistics(lse, delta=delta_of(dout, out))
        gradients = backward_of(kernel, dout, q, k, v, statistics, packing=packing, **settings)
        results.append((out, lse, *gradients))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
