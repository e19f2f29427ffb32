"""Stands for `mamba_ssm.ops.triton.layernorm_gated`."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean squares of groups of channels; without the gate, which Megatron does not give."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        scale = (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (groups * scale).flatten(-2) * self.weight
