"""Independent oracles: attention written out over the whole sequence, gradients by autograd."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tests.span_masks import dense


@dataclass(frozen=True)
class Expected:
    """Whole tensors of an unsplit attention: inputs, output, gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None = None


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    sink: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """[B,N,H,D], [B,N,G,D], [B,N,G,E] -> [B,N,H,E], by the definition, head by head; sink: [H].

    seen: [N,N], true where a query sees a key; what sees none is 0.
    """
    heads_per_kv = q.shape[2] // k.shape[2]
    whole = [(0, q.shape[1], 0, k.shape[1], "causal" if causal else "full")]
    visible = dense(whole, q.shape[1], cu_seqlens, window).to(q.device) > 0
    out = []
    for head in range(q.shape[2]):
        keys, values = k[:, :, head // heads_per_kv], v[:, :, head // heads_per_kv]
        scores = q[:, :, head] @ keys.transpose(1, 2) * scale
        scores = scores.masked_fill(~visible, -torch.inf)
        some: Tensor | bool = True
        if seen is not None:
            some = seen.any(1, keepdim=True)
            scores = scores.masked_fill(some & ~seen, -torch.inf)
        if sink is not None:
            column = sink[head].expand(*scores.shape[:2], 1)
            weights = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        out.append((weights * some) @ values)
    return torch.stack(out, 2)


def expected_attention(
    *,
    batch: int = 1,
    seq_len: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    value_dim: int | None = None,
    causal: bool,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    sink: Tensor | None = None,
    seen: Tensor | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Expected:
    """Random inputs in `dtype`, and everything else in float64 from exactly those inputs.

    Many algorithms are compared on one problem, which a process computes once.

    Args: value_dim: of v and out; None: head_dim.
    """
    sizes = batch, seq_len, heads, kv_heads, head_dim, value_dim or head_dim
    documents = None if cu_seqlens is None else tuple(cu_seqlens)
    settings = causal, window, documents, scale, dtype, torch.device(device), seed
    if sink is None and seen is None:
        found = _without_tensors(*sizes, *settings)
        return Expected(*(x if x is None else x.clone() for x in vars(found).values()))
    return _expected(*sizes, *settings, sink, seen)


def _expected(
    batch: int,
    seq_len: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    of_values: int,
    causal: bool,
    window: int | None,
    cu_seqlens: tuple[int, ...] | None,
    scale: float | None,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    sink: Tensor | None = None,
    seen: Tensor | None = None,
) -> Expected:
    generator = torch.Generator(device).manual_seed(seed)

    def random(n_heads: int, dim: int) -> Tensor:
        shape = (batch, seq_len, n_heads, dim)
        x = torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
        return x.to(dtype)

    q, k = random(heads, head_dim), random(kv_heads, head_dim)
    v, dout = random(kv_heads, of_values), random(heads, of_values)
    wide = [x.double().requires_grad_() for x in (q, k, v, *([] if sink is None else [sink]))]
    scale = head_dim**-0.5 if scale is None else scale
    out = naive_attention(
        *wide[:3],
        causal=causal,
        scale=scale,
        window=window,
        cu_seqlens=cu_seqlens,
        sink=None if sink is None else wide[3],
        seen=seen,
    )
    return Expected(q, k, v, dout, out.detach(), *torch.autograd.grad(out, wide, dout.double()))


_without_tensors = lru_cache(maxsize=256)(_expected)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / max(|expected|, 1e-3); NaN counts as infinitely wrong."""
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-3)
    return float("inf") if error.isnan() else error.item()
