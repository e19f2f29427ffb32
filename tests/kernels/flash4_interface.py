"""A stand-in for flash_attn.cute.interface: its backward in three steps, with the written-out
reference between them.

As there, a first step makes statistics and clears a wide dQ, the kernel adds to it, and a last step
converts it, and the wide dK and dV of shared heads.
"""

from types import SimpleNamespace

import torch

from megatron_cp_plugin.core.kernel import KernelCall, Statistics
from megatron_cp_plugin.core.partial import delta_of
from megatron_cp_plugin.kernels.reference import Reference

calls = SimpleNamespace(filled=0, converted=[])


def _rounded(x, multiple=8):
    """As many rows as fill tiles."""
    return -(-x.shape[1] // multiple) * multiple


def _bwd_preprocess(out, dout, delta, lse, lse_log2, dq_wide, dlse, *, scale):
    calls.filled += 1
    delta.copy_(delta_of(dout, out) - (0 if dlse is None else dlse))
    lse_log2.copy_(lse * scale)
    dq_wide.zero_()


def _bwd_postprocess_convert(wide, out, factor, *, name):
    """wide: [B, heads, rows * D], rows filled up."""
    calls.converted.append(name)
    batch, rows, heads, dim = out.shape
    out.copy_(wide.view(batch, heads, -1, dim)[:, :, :rows].transpose(1, 2) * factor)


def _added(wide, x):
    assert wide.shape == (x.shape[0], x.shape[2], _rounded(x) * x.shape[3])
    wide.unflatten(2, (-1, x.shape[3]))[:, :, : x.shape[1]] += x.transpose(1, 2)


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, deterministic=False,
    dq=None, dk=None, dv=None, dlse=None,
):  # fmt: skip
    dq = torch.empty_like(q) if dq is None else dq
    dk = torch.empty_like(k) if dk is None else dk
    dv = torch.empty_like(v) if dv is None else dv
    assert [x.shape for x in (dq, dk, dv)] == [x.shape for x in (q, k, v)]
    kind = {"dtype": torch.float32, "device": q.device}
    batch, _, heads, dim = q.shape
    dq_wide = torch.empty(batch, heads, _rounded(q) * dim, **kind)
    delta = torch.empty(batch, heads, q.shape[1], **kind)
    lse_log2 = torch.empty(batch, heads, q.shape[1], **kind)
    shared = heads > k.shape[2]
    if shared:
        dk_wide, dv_wide = (
            torch.zeros(batch, x.shape[2], _rounded(x) * x.shape[3], **kind) for x in (k, v)
        )
    semaphores = torch.zeros(batch, heads, dtype=torch.int32, device=q.device)
    _bwd_preprocess(out, dout, delta, lse, lse_log2, dq_wide, dlse, scale=2.0)
    call = KernelCall(q, k, v, softmax_scale, causal)
    found = Reference().backward(call, dout, Statistics(lse_log2 / 2, delta=delta))
    assert not semaphores.any()
    semaphores += 1
    _added(dq_wide, found[0] / softmax_scale)
    if shared:
        _added(dk_wide, found[1] / softmax_scale)
        _added(dv_wide, found[2])
    else:
        dk.copy_(found[1])
        dv.copy_(found[2])
    _bwd_postprocess_convert(dq_wide, dq, softmax_scale, name="dq")
    if shared:
        _bwd_postprocess_convert(dk_wide, dk, softmax_scale, name="dk")
        _bwd_postprocess_convert(dv_wide, dv, 1.0, name="dv")
    return dq, dk, dv
