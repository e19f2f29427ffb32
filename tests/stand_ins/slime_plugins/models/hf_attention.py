"""As in slime: a layer gathers each document on all ranks, computes it whole, and keeps its part.

Chunks p and 2P-1-p of each document are on rank p. Here its attention is the mean of what came
before.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Gather(torch.autograd.Function):
    """The tokens of all ranks, whose gradients are summed over the ranks, unlike slime's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> tuple[Tensor, ...]:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = torch.stack(grads)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None


class HuggingfaceAttention(nn.Module):
    """Takes and returns [S,1,H]."""

    def __init__(self, config: Any, layer_number: int, pg_collection: Any, **others: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size, config.hidden_size))
        config.init_method(self.weight)
        self.group = pg_collection.cp

    def forward(self, x: Tensor, *args: Any, packed_seq_params: Any = None, **others: Any) -> Any:
        size = self.group.size()
        if size == 1:
            return _mean(x) @ self.weight, None
        bounds = packed_seq_params.cu_seqlens_q_padded.tolist()
        halves = [(stop - start) // 2 // size for start, stop in pairwise(bounds)]
        parts = [
            each.split([n for n in halves for _ in range(2)])
            for each in _Gather.apply(x, self.group)
        ]
        out = []
        for document in range(len(halves)):
            first = [part[2 * document] for part in parts]
            second = [part[2 * document + 1] for part in reversed(parts)]
            chunks = (_mean(torch.cat(first + second)) @ self.weight).chunk(2 * size)
            out += [chunks[self.group.rank()], chunks[2 * size - 1 - self.group.rank()]]
        return torch.cat(out), None


def _mean(x: Tensor) -> Tensor:
    return x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None, None]
