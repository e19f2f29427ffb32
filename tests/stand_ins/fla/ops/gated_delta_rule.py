"""The gated delta rule."""

import torch
from torch import Tensor


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Token t: S = exp(g) S, then S = S + beta k (v - S^T k)^T, and the output S^T q.

    Args: q, k: [B, T, H, K]. v: [B, T, H, V]. g, beta: [B, T, H]; g is the logarithm of the decay.
    """
    assert g is not None
    assert beta is not None
    assert initial_state is None
    assert cu_seqlens is None
    assert not output_final_state
    assert not use_qk_l2norm_in_kernel
    assert g.dtype == torch.float32  # fla sums it up
    scale = q.size(-1) ** -0.5 if scale is None else scale
    batch, tokens, heads, features = q.shape
    query, key, value, write = (x.float() for x in (q, k, v, beta))
    state = value.new_zeros(batch, heads, features, v.size(-1))
    out = []
    for t in range(tokens):
        state = state * g[:, t].exp()[..., None, None]
        seen = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        change = (value[:, t] - seen) * write[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], change)
        out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t] * scale))
    return torch.stack(out, dim=1).to(v.dtype), None
