"""The autograd Function that joins ranks' parts of a tensor."""

from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.core.autograd.function import differentiable_once
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.record import PHASE, Phase, holding
from megatron_cp_plugin.core.layout import Layout, shard, unshard


def whole_of(x: Tensor, dim: int, layout: Layout, seq_len: int, topology: Topology) -> Tensor:
    """All ranks' parts of a tensor, in global order; a collective operation.

    The gradient of a part is the gradient of the sum of all ranks' losses: in the backward each
    rank sends every other rank's part of its gradient there, and sums the parts it receives in
    float32 or wider. So the backward is a collective operation too.

    Args:
        x: this rank's part, S tokens along `dim`.
        layout: within the documents.

    Returns: N tokens along `dim`, the same on all ranks.
    """
    whole: Tensor = _Whole.apply(x.movedim(dim, 0), layout, seq_len, topology)
    return whole.movedim(0, dim)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, seq_len: int, topology: Topology) -> Tensor:
        ctx.layout, ctx.topology = layout, topology
        size, own = topology.size, x.contiguous()
        lengths = [layout.length(rank, size, seq_len) for rank in range(size)]
        parts = [own.new_empty((length, *own.shape[1:])) for length in lengths]
        parts[topology.rank] = own
        _exchange(topology, "forward", [own] * size, parts)
        return unshard(parts, 0, layout)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor | None, ...]:
        topology, size = ctx.topology, ctx.topology.size
        parts = [shard(dwhole, 0, ctx.layout, rank, size) for rank in range(size)]
        own = parts[topology.rank]
        found = [torch.empty_like(own) for _ in range(size)]
        found[topology.rank] = own
        _exchange(topology, "backward", parts, found)
        total = own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
        for rank, part in enumerate(found):
            if rank != topology.rank:
                total += part
        return total.to(own.dtype), None, None, None


def _exchange(topology: Topology, phase: Phase, sent: list[Tensor], received: list[Tensor]) -> None:
    """Sends each other rank a tensor, and receives one from it."""
    others = [rank for rank in range(topology.size) if rank != topology.rank]
    with holding(PHASE, phase):
        topology.channel("unshard").exchange(
            [(sent[rank], rank) for rank in others], [(received[rank], rank) for rank in others]
        ).wait()
