"""Division by the Euclidean norm."""

import torch
from torch import Tensor


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / |x| over the last dimension."""
    wide = x.float()
    out = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return out.to(output_dtype or x.dtype)
