"""States between chunks, and their gradients."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .sequences import Kernel, blocks, powers, sequences


def _places(
    x: Tensor, T: int, cu_seqlens: Tensor | None, offsets: Tensor | None, BS: int
) -> Iterator:
    for number, tokens in enumerate(sequences(x, T, cu_seqlens)):
        count = tokens.stop - tokens.start
        if cu_seqlens is None:
            assert offsets is None
            yield number, tokens, number * blocks(count, BS)
        else:
            assert offsets.dtype in (torch.int32, torch.int64)
            yield number, tokens, int(offsets[number])


@Kernel
def chunk_fwd_kernel_h(
    k, v, h, g, g_gamma, gk, gv, h0, ht, cu_seqlens, split_offsets, T, H, K, V, BT, BS,
    USE_G, USE_G_GAMMA, USE_GK, USE_GV, STATE_V_FIRST,
):  # fmt: skip
    assert g is gk is gv is None
    assert (USE_G, USE_G_GAMMA, USE_GK, USE_GV, STATE_V_FIRST) == (False, True, False, False, False)
    assert BS % BT == 0
    keys, values, states = k.view(-1, H, K), v.view(-1, H, V), h.view(-1, H, K, V)
    count = 0
    for number, tokens, place in _places(k, T, cu_seqlens, split_offsets, BS):
        count += 1
        state = torch.zeros(H, K, V, dtype=g_gamma.dtype)
        if h0 is not None:
            state = state + h0.view(-1, H, K, V)[number]
        for chunk, start in enumerate(range(tokens.start, tokens.stop, BT)):
            if chunk % (BS // BT) == 0:
                states[place + chunk // (BS // BT)] = state
            inside = slice(start, min(start + BT, tokens.stop))
            length = inside.stop - start
            left = powers(g_gamma, torch.arange(length - 1, -1, -1))
            state = state * powers(g_gamma, torch.tensor([length]))[0][..., None]
            state = state + torch.einsum("thk,thv->hkv", left * keys[inside], values[inside])
        if ht is not None:
            ht.view(-1, H, K, V)[number] = state
    return blocks(K, 32) * blocks(V, 32) * count * H


@Kernel
def chunk_bwd_kernel_dh(
    q, g, g_gamma, gk, gv, do, dh, dht, dh0, cu_seqlens, split_offsets, scale, T, HQ, H, K, V,
    BT, BS, NG, USE_G, USE_G_GAMMA, USE_GK, USE_GV, STATE_V_FIRST,
):  # fmt: skip
    assert g is gk is gv is None
    assert (USE_G, USE_G_GAMMA, USE_GK, USE_GV, STATE_V_FIRST) == (False, True, False, False, False)
    assert BS % BT == 0
    assert (HQ, NG) == (H, 1)
    queries, gradients, states = q.view(-1, H, K), do.view(-1, H, V), dh.view(-1, H, K, V)
    count = 0
    for number, tokens, place in _places(q, T, cu_seqlens, split_offsets, BS):
        count += 1
        state = torch.zeros(H, K, V, dtype=g_gamma.dtype)
        if dht is not None:
            state = state + dht.view(-1, H, K, V)[number]
        for chunk, start in reversed([*enumerate(range(tokens.start, tokens.stop, BT))]):
            if chunk % (BS // BT) == 0:
                states[place + chunk // (BS // BT)] = state
            inside = slice(start, min(start + BT, tokens.stop))
            length = inside.stop - start
            kept = scale * powers(g_gamma, torch.arange(1, length + 1))
            state = state * powers(g_gamma, torch.tensor([length]))[0][..., None]
            state = state + torch.einsum("thk,thv->hkv", kept * queries[inside], gradients[inside])
        if dh0 is not None:
            dh0.view(-1, H, K, V)[number] = state
    return blocks(K, 32) * blocks(V, 32) * count * H
