"""`--cp-send-latents`: layers of multi-latent attention whose ranks send latents for K and V.

Megatron's layer makes K and V of its own tokens by `linear_kv_up_proj`, and hands them to the core
attention. Here that linear map keeps its input and makes nothing of it: the core attention takes
the latents, and the weight, with which it makes K and V of all tokens that come. The rotated part
of the keys, which all heads share, is in the keys that the layer still puts together.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from megatron_cp_plugin.core.autograd.latents import check_latents
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.attention import ContextParallelAttention
from megatron_cp_plugin.integration.settings import Settings


def send_latents(model: nn.Module) -> None:
    """Makes the layers of a model send latents, where there are other ranks.

    Raises: ContextParallelError: An algorithm cannot, or a projection is of another kind.
    """
    for owner in model.modules():
        if not isinstance(owner, MLASelfAttention):
            continue
        core: Any = owner.core_attention
        assert isinstance(core, ContextParallelAttention)
        if owner.pg_collection.cp.size() == 1 and not core.runtime.has_groups:
            continue
        settings, algorithm = Settings(owner.config), core.algorithm
        tokens = algorithm.layout.multiple(owner.pg_collection.cp.size())
        check_latents(algorithm, settings.shape_of_latents(tokens), Mask())
        linear: Any = owner.linear_kv_up_proj
        kinds = (ColumnParallelLinear, TEColumnParallelLinear, TELayerNormColumnParallelLinear)
        if type(linear) not in kinds:
            raise ContextParallelError(
                "--cp-send-latents needs Megatron's own linear_kv_up_proj, got "
                f"{type(linear).__name__}: leave it out"
            )
        linear.forward = partial(_keep_latents, owner, linear)


def _keep_latents(owner: Any, linear: Any, latent: Tensor) -> tuple[Tensor, None]:
    """Takes the place of the forward of a layer's map from latents to keys and values.

    Args: latent: [s,b,L], with sequence parallelism this rank's part of s.

    Returns: what stands for its results: zeros [s,b,n] that take no memory.
    """
    if type(linear) is TELayerNormColumnParallelLinear:
        latent = normed(linear, latent)
    if owner.config.sequence_parallel:
        latent = gather_from_sequence_parallel_region(latent, group=owner.tp_group)
    else:
        latent = copy_to_tensor_model_parallel_region(latent, group=owner.tp_group)
    owner.core_attention.latents = latent, linear.weight
    return latent.new_zeros(()).expand(*latent.shape[:-1], linear.weight.size(0)), None


def normed(linear: Any, x: Tensor) -> Tensor:
    """The norm of x [s,b,L] that Transformer Engine computes with a linear map, in float32."""
    wide, weight = x.float(), linear.layer_norm_weight.float()
    weight = 1 + weight if linear.zero_centered_gamma else weight
    size = x.shape[-1:]
    if linear.normalization == "RMSNorm":
        return nn.functional.rms_norm(wide, size, weight, linear.eps).to(x.dtype)
    bias = linear.layer_norm_bias.float()
    return torch.layer_norm(wide, size, weight, bias, linear.eps).to(x.dtype)
