"""Data-parallel wrappers of models: how to unwrap them and reach their parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def unwrapped(model: Any) -> Any:
    """Opens all wrappers of a model, also the inner one of Megatron-FSDP, which Megatron leaves."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.utils import unwrap_model

    model = unwrap_model(model)
    if mcore_fsdp_adapter.HAVE_MEGATRON_FSDP:
        while isinstance(model, mcore_fsdp_adapter.MegatronFSDP):
            model = unwrap_model(model.module)
    return model


def gathered(parameter: DTensor, part: Tensor | None) -> Tensor:
    """Puts together what belongs to the rows of a sharded parameter, on the CPU.

    A collective operation of the data-parallel ranks, context parallelism included. The rows
    of a rank are as many as they are: Megatron-FSDP does not shard as DTensor has it.

    Args:
        parameter: [N, ...], of which this rank has [n, ...].
        part: Of these rows, such as their gradient; None if there are none.

    Returns:
        [N, ...]. With tensor parallelism N is what a tensor-parallel rank has.
    """
    local = parameter.to_local()
    if isinstance(part, DTensor):
        part = part.to_local()
    mine = local.new_empty(0, *local.shape[1:]) if part is None else part
    mine = mine.detach().cpu()
    # The first dimension of the mesh is data parallelism; Megatron-FSDP's second one is TP.
    if parameter.placements[0].is_replicate():
        return mine.clone()
    group = parameter.device_mesh.get_group(0)
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, mine, group=group)
    return torch.cat(parts)
