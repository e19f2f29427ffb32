"""A plain softmax attention: any device and dtype, quadratic memory.

The oracle of the tests, and what "auto" takes where nothing faster runs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp_plugin.core.kernel import Gradients, KernelCall, Problem, SoftmaxKernel, Statistics
from megatron_cp_plugin.core.partial import accumulation_dtype


class Reference(SoftmaxKernel):
    """Scores in float32 (float64 for float64)."""

    name = "reference"
    deterministic = True
    rectangular_causal = windows = True
    packs = gaps = True  # one sequence after the other, but called as kernels for GPUs are
    places_outputs = places_gradients = True

    def unsupported(self, problem: Problem) -> str | None:
        return None

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        if call.packing is not None:
            return forward_by_sequence(self, call)
        q, v = call.q, call.v
        scores = _masked_scores(call)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse.unsqueeze(-1))
        out = torch.einsum("bgnst,btgd->bsgnd", p, v.to(p.dtype))
        return call.placed((out.flatten(2, 3).to(q.dtype), lse.flatten(1, 2)))

    def backward(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> Gradients:
        if call.packing is not None:
            return backward_by_sequence(self, call, dout, statistics)
        q, k, v, kv_heads = call.q, call.k, call.v, call.k.shape[2]
        scores = _masked_scores(call)
        p = torch.exp(scores - _by_group(statistics.lse, kv_heads).to(scores.dtype))
        wide_q, wide_k, wide_v = [x.to(p.dtype) for x in (q, k, v)]
        dout_g = dout.to(p.dtype).unflatten(2, (kv_heads, -1))
        delta = _by_group(statistics.delta_for(dout), kv_heads).to(p.dtype)
        dp = torch.einsum("bsgnd,btgd->bgnst", dout_g, wide_v)
        ds = p * (dp - delta) * call.scale
        dq = torch.einsum("bgnst,btgd->bsgnd", ds, wide_k).flatten(2, 3)
        dk = torch.einsum("bgnst,bsgnd->btgd", ds, wide_q.unflatten(2, (kv_heads, -1)))
        dv = torch.einsum("bgnst,bsgnd->btgd", p, dout_g)
        return call.placed((dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)))


def _by_group(row_values: Tensor, kv_heads: int) -> Tensor:
    """[B,H,S] -> [B,G,H/G,S,1]."""
    return row_values.unflatten(1, (kv_heads, -1)).unsqueeze(-1)


def _masked_scores(call: KernelCall) -> Tensor:
    """Masked scores [B,G,H/G,S,T]."""
    q, k = call.q, call.k
    dtype = accumulation_dtype(q.dtype)
    grouped = q.to(dtype).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bsgnd,btgd->bgnst", grouped, k.to(dtype)) * call.scale
    rows, cols = scores.shape[-2:]
    if call.causal:
        hidden = torch.ones(rows, cols, dtype=torch.bool, device=q.device).triu(cols - rows + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if call.window:
        before = torch.ones(rows, cols, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(before.tril(cols - rows - call.window), -torch.inf)
    return scores


def forward_by_sequence(kernel: SoftmaxKernel, call: KernelCall) -> tuple[Tensor, Tensor]:
    """The forward of packed sequences, with one call for each sequence."""
    assert call.packing is not None
    q, k, v, packing = call.q, call.k, call.v, call.packing
    pieces = [
        kernel.forward(call._replace(q=q[:, rows], k=k[:, cols], v=v[:, cols], packing=None))
        for rows, cols in zip(packing.q, packing.kv, strict=True)
    ]
    outs, lses = zip(*pieces, strict=True)
    return _together(outs, packing.q, 1), _together(lses, packing.q, 2)


def backward_by_sequence(
    kernel: SoftmaxKernel, call: KernelCall, dout: Tensor, statistics: Statistics
) -> Gradients:
    """The backward of packed sequences, with one call for each sequence."""
    assert call.packing is not None
    q, k, v, packing, found = call.q, call.k, call.v, call.packing, list[Gradients]()
    for rows, cols in zip(packing.q, packing.kv, strict=True):
        one = call._replace(q=q[:, rows], k=k[:, cols], v=v[:, cols], packing=None)
        found.append(kernel.backward(one, dout[:, rows], statistics.rows(rows)))
    places = packing.q, packing.kv, packing.kv
    dq, dk, dv = (
        _together(gradients, place, 1)
        for gradients, place in zip(zip(*found, strict=True), places, strict=True)
    )
    return dq, dk, dv


def _together(pieces: Sequence[Tensor], places: Sequence[slice], dim: int) -> Tensor:
    """Pieces where they belong along a dimension; no numbers between them."""
    shape = [*pieces[0].shape[:dim], places[-1].stop, *pieces[0].shape[dim + 1 :]]
    whole = pieces[0].new_full(shape, torch.nan)
    for piece, place in zip(pieces, places, strict=True):
        whole.narrow(dim, place.start, piece.shape[dim]).copy_(piece)
    return whole
