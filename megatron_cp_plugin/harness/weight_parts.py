"""Fused weights as their parts, and sharded ones as wholes, for the parity harness.

Gradients of Q and K are often far smaller than of V: in the error of a whole fused projection
an error in them would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_cp_plugin.core.agree import gathered
from megatron_cp_plugin.integration.compat import unwrapped
from megatron_cp_plugin.integration.recurrent import is_gated_delta_net, is_mamba


@dataclass(frozen=True)
class Rows:
    """The meaning of the rows of a weight.

    Attributes:
        groups: So often do the parts follow one another.
        parts: Rows of each by name, in their order.
    """

    groups: int
    parts: Mapping[str, int]

    def split(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Returns a weight [groups * sum of the parts, ...] by parts; of another shape as it is."""
        sizes = list(self.parts.values())
        if weight.shape[0] != self.groups * sum(sizes):
            return {name: weight}
        parts = weight.unflatten(0, (self.groups, sum(sizes))).split(sizes, 1)
        return {
            f"{name}[{label}]": part.flatten(0, 1).contiguous()
            for label, part in zip(self.parts, parts, strict=True)
        }


def rows_of_weights(model: Any) -> dict[str, Rows]:
    """Returns the parts of the rows of every fused weight of this rank, by the parameter's name.

    Of the weights only: a bias of K moves all scores of a query alike, so its gradient is nothing
    but rounding, and has no relative error.
    """
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    found = {}
    for index, chunk in enumerate(model):
        prefix = f"chunk{index}." if len(model) > 1 else ""
        for name, module in unwrapped(chunk).named_modules():
            rows: dict[str, Rows] = {}
            if isinstance(module, SelfAttention):
                rows = _of_self_attention(module)
            elif isinstance(module, MultiLatentAttention):
                rows = _of_latent_attention(module)
            elif is_gated_delta_net(module):
                rows = _of_delta_net(module)
            elif is_mamba(module):
                rows = _of_mamba(module)
            found.update({f"{prefix}{name}.{part}.weight": rows[part] for part in rows})
    return found


def _of_self_attention(module: Any) -> dict[str, Rows]:
    groups, size = module.num_query_groups_per_partition, module.hidden_size_per_attention_head
    query = module.num_attention_heads_per_partition // groups * size
    gated = getattr(module.config, "attention_output_gate", False)
    queries = {"query": query, "gate": query} if gated else {"query": query}
    return {"linear_qkv": Rows(groups, {**queries, "key": size, "value": size})}


def _of_latent_attention(module: Any) -> dict[str, Rows]:
    """Where tensor parallelism splits latents they stay whole."""
    config, heads = module.config, module.num_attention_heads_per_partition
    positions = {"positions": config.qk_pos_emb_head_dim}
    query = Rows(heads, {"query": config.qk_head_dim} | positions)
    latents = {"latents": config.kv_lora_rank} | positions
    return {
        "linear_q_proj": query,
        "linear_q_up_proj": query,
        "linear_kv_up_proj": Rows(heads, {"key": config.qk_head_dim, "value": config.v_head_dim}),
        "linear_kv_down_proj": Rows(1, latents),
        "linear_qkv_down_proj": Rows(1, {"query": config.q_lora_rank or 0} | latents),
    }


def _of_delta_net(module: Any) -> dict[str, Rows]:
    keys, values = module.qk_dim_local_tp, module.v_dim_local_tp
    heads = module.num_v_heads_local_tp
    convolved = {"query": keys, "key": keys, "value": values}
    projected = {**convolved, "gate": values, "beta": heads, "alpha": heads}
    return {"conv1d": Rows(1, convolved), "in_proj": Rows(1, projected)}


def _of_mamba(module: Any) -> dict[str, Rows]:
    inner, states = module.d_inner_local_tp, module.ngroups_local_tp * module.d_state
    convolved = {"x": inner, "B": states, "C": states}
    return {"in_proj": Rows(1, {"z": inner, **convolved, "dt": module.nheads_local_tp})}


def joined_rows(parameter: DTensor, part: Tensor | None) -> Tensor:
    """Joins values of the rows of a sharded parameter, on the CPU.

    A collective operation of the data-parallel ranks, context parallelism included. The rows
    of a rank are as many as they are: Megatron-FSDP does not shard as DTensor has it.

    Args:
        parameter: [N, ...], of which this rank has [n, ...].
        part: Of these rows, such as their gradient; None if there are none.

    Returns: [N, ...]. With tensor parallelism N counts the rows of a tensor-parallel rank.
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
    return torch.cat(gathered(mine, group))
