"""Gradients of queries, keys and values from states between chunks."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .sequences import blocks, launched, powers, sequences


def _chunks(
    x: Tensor, cu_seqlens: Tensor | None, indices: Tensor | None, size: int
) -> Iterator[slice]:
    """The tokens of each chunk, in the order of their states."""
    places = list(sequences(x, x.shape[1], cu_seqlens))
    if cu_seqlens is None:
        assert indices is None
        indices = [
            (n, i) for n, at in enumerate(places) for i in range(blocks(at.stop - at.start, size))
        ]
    else:
        # fla would make them of cu_seqlens, for which the host waits for the device.
        assert indices is not None
        assert indices.dtype == cu_seqlens.dtype
        indices = indices.tolist()
    for number, chunk in indices:
        start = places[number].start + chunk * size
        yield slice(start, min(start + size, places[number].stop))


def _decays(g_gamma: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """From the start [C,H,1], to the end [C,H,1], and from token to token [H,C,C]."""
    at = torch.arange(length)
    gap = at[:, None] - at
    between = torch.exp2(g_gamma[:, None, None] * gap.clamp_min(0)) * (gap >= 0)
    return powers(g_gamma, at + 1), powers(g_gamma, at.flip(0)), between


def chunk_bwd_dqkwg(
    q, k, v, do, h, dh, w=None, g=None, g_gamma=None, dv=None, scale=None, state_v_first=False,
    cu_seqlens=None, chunk_size=64, chunk_indices=None,
):  # fmt: skip
    launched("chunk_bwd_dqkwg", locals())
    assert w is g is dv is None
    assert not state_v_first
    (heads, dim), value_dim = k.shape[2:], v.shape[3]
    queries, keys = q.view(-1, heads, dim), k.view(-1, heads, dim)
    values, douts = v.view(-1, heads, value_dim), do.view(-1, heads, value_dim)
    h, dh = h.view(-1, heads, dim, value_dim), dh.view(-1, heads, dim, value_dim)
    dq, dk = torch.full_like(queries, torch.nan), torch.full_like(keys, torch.nan)
    count = 0
    for number, at in enumerate(_chunks(q, cu_seqlens, chunk_indices, chunk_size)):
        count += 1
        start, end, between = _decays(g_gamma, at.stop - at.start)
        scores = torch.einsum("thv,shv->hts", douts[at], values[at]) * between * scale
        dq[at] = scale * start * torch.einsum("thv,hkv->thk", douts[at], h[number])
        dq[at] += torch.einsum("hts,shk->thk", scores, keys[at])
        dk[at] = end * torch.einsum("thv,hkv->thk", values[at], dh[number])
        dk[at] += torch.einsum("hts,thk->shk", scores, queries[at])
    assert count == len(h) == len(dh)
    return dq.view_as(q), dk.view_as(k), None, None


def chunk_bwd_dv(
    q, k, do, dh, g=None, g_gamma=None, scale=None, state_v_first=False, cu_seqlens=None,
    chunk_size=64, chunk_indices=None,
):  # fmt: skip
    launched("chunk_bwd_dv", locals())
    assert g is None
    assert not state_v_first
    (heads, dim), value_dim = k.shape[2:], do.shape[3]
    queries, keys, douts = (
        q.view(-1, heads, dim),
        k.view(-1, heads, dim),
        do.view(-1, heads, value_dim),
    )
    dh = dh.view(-1, heads, dim, value_dim)
    dv = torch.full_like(douts, torch.nan)
    for number, at in enumerate(_chunks(q, cu_seqlens, chunk_indices, chunk_size)):
        _, end, between = _decays(g_gamma, at.stop - at.start)
        scores = torch.einsum("thk,shk->hts", queries[at], keys[at]) * between * scale
        dv[at] = end * torch.einsum("thk,hkv->thv", keys[at], dh[number])
        dv[at] += torch.einsum("hts,thv->shv", scores, douts[at])
    return dv.view_as(do)
