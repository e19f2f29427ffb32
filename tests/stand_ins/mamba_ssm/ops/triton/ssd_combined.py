"""Stands for `mamba_ssm.ops.triton.ssd_combined`: the recurrence of Mamba-2, token by token."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def mamba_chunk_scan_combined(*args: Any, **kwargs: Any) -> Tensor:
    """Only looked up."""
    raise NotImplementedError


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,  # noqa: N803
    *,
    D: Tensor,  # noqa: N803
    chunk_size: int,
    activation: str,
    headdim: int | None,
    ngroups: int,
    norm_before_gate: bool,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """[b,s,z x B C dt] -> [b,s,h*p]; a new number in seq_idx [b,s] begins a document."""
    assert activation == "silu"
    assert not norm_before_gate
    batch, tokens, _ = zxbcdt.shape
    heads, channels = len(A), conv1d_weight.shape[0]
    inner = zxbcdt.shape[-1] - channels - heads
    width = inner // heads if headdim is None else headdim
    z, mixed, dt = zxbcdt.split([inner, channels, heads], -1)
    if seq_idx is None:
        seq_idx = torch.zeros(batch, tokens, dtype=torch.int32)
    taps = conv1d_weight.shape[1]
    convolved = conv1d_bias.expand_as(mixed)
    for back in range(taps):
        before = functional.pad(mixed, (0, 0, back, 0))[:, :tokens]
        same = functional.pad(seq_idx, (back, 0), value=-1)[:, :tokens] == seq_idx
        convolved = convolved + before * same[..., None] * conv1d_weight[:, taps - 1 - back]
    states = (channels - inner) // 2
    x, keys, queries = functional.silu(convolved).split([inner, states, states], -1)
    x = x.unflatten(-1, (heads, width))
    keys, queries = (one.unflatten(-1, (ngroups, -1)) for one in (keys, queries))
    keys, queries = (one.repeat_interleave(heads // ngroups, 2) for one in (keys, queries))
    dt = functional.softplus(dt + dt_bias)
    state, outs = x.new_zeros(batch, heads, keys.shape[-1], width), []
    for token in range(tokens):
        if token:
            state = state * (seq_idx[:, token] == seq_idx[:, token - 1])[:, None, None, None]
        step = dt[:, token, :, None, None]
        state = state * (step * A[:, None, None]).exp()
        state = state + step * keys[:, token, :, :, None] * x[:, token, :, None]
        outs.append((queries[:, token, :, :, None] * state).sum(2))
    skip = D if D.dim() == 2 else D[:, None]
    return (torch.stack(outs, 1) + x * skip).flatten(2) * functional.silu(z)
