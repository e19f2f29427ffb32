"""A training script with multi-latent attention whose projections to latents each tensor-parallel
rank has whole, as those of Transformer Engine's layers are.

`--spec latent_job layer`
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """A linear map that all tensor-parallel ranks have whole, which Megatron has of TE only."""

    def __init__(self, inputs: int, outputs: int, **settings: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        settings["init_method"](self.weight)
        self.weight.sequence_parallel = settings["config"].sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(x, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> Any:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(self.state_dict(), prefix, {}, sharded_offsets)


def with_whole(layer: Any) -> Any:
    """The spec of a local layer with such projections."""
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.TELinear = Linear  # which it knows to be whole
    attention = layer.submodules.self_attention
    whole = {"linear_q_down_proj": Linear, "linear_kv_down_proj": Linear}
    attention = replace(attention, submodules=replace(attention.submodules, **whole))
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))


def layer(config: Any) -> Any:
    """The spec of a layer, for Megatron to call."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    settings = {"qk_layernorm": config.transformer.qk_layernorm, "normalization": "RMSNorm"}
    return with_whole(get_gpt_layer_local_spec(multi_latent_attention=True, **settings))


if __name__ == "__main__":
    from megatron_cp_plugin.harness import pretrain

    pretrain.run()
