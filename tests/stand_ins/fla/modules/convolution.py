"""Short causal convolutions."""

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """x [B, T, D], weight [D, W]: each channel's own sum over its last W tokens."""
    assert residual is None
    assert initial_state is None
    assert cu_seqlens is None
    assert not output_final_state
    assert activation in (None, "silu", "swish")
    assert weight is not None
    tokens, width = x.size(1), weight.size(1)
    padded = functional.pad(x, (0, 0, width - 1, 0))
    out = torch.zeros_like(x)
    for tap in range(width):
        out = out + padded[:, tap : tap + tokens] * weight[:, tap]
    if bias is not None:
        out = out + bias
    return (out if activation is None else functional.silu(out)), None
