"""Megatron's core attention, split over the context-parallel ranks.

Shapes in Megatron's order: s local tokens, b batch, h query heads and g KV heads of this
tensor-parallel rank, d head dim of q and k, e of v.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor, nn

from megatron_cp_plugin.core.autograd.function import attend, check_shapes
from megatron_cp_plugin.core.autograd.latents import attend_latents
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.documents import DocumentMask, mask_of_layer
from megatron_cp_plugin.integration.largest_score import largest_scores
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.kernels import resolver

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}
# Transformer Engine's names of masks for packed documents.
_CAUSAL_IF_PACKED = _CAUSAL | {AttnMaskType.padding_causal: True}


class SplitByHeads(MegatronModule):
    """A module whose parameters are [h, ...].

    Attributes: tp_group: ranks among which the heads are split.
    """

    tp_group: dist.ProcessGroup

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Returns the parameters for a distributed checkpoint, as all modules of Megatron do."""
        parameters = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            parameters,
            prefix,
            dict.fromkeys(parameters, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


class ContextParallelAttention(SplitByHeads):
    """Replaces DotProductAttention or TEDotProductAttention in a layer spec.

    It has the parameters of the module that it replaces, so that checkpoints are the same with and
    without it: none, or softmax_offset [h] with `--softmax-type learnable`.
    """

    softmax_offset: Tensor | None
    # Of the forward pass that runs, where the layer around it does not hand it on.
    packed: DocumentMask | None = None
    # [h], of this rank's queries since Megatron has last read it; None where nobody asks for it.
    current_max_attn_logits: Tensor | None = None
    # Latents [s,b,L] of the forward pass that runs, and the weight that makes K and V of them.
    latents: tuple[Tensor, Tensor] | None = None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        *,
        runtime: Runtime,
    ) -> None:
        """Builds the module; a collective operation of the context-parallel ranks.

        Args: as Megatron's DotProductAttention. Without meaning are cp_comm_type, v_channels, which
            values say, and attention_dropout, with which rules refuse a model.
            layer_number: `apply_query_key_layer_scaling` divides the scores by it before and
                multiplies by it inside the softmax, so the result does not depend on it.
            softmax_scale: of the scores; None: 1 / sqrt(d).
            runtime: the run's layout and algorithm.

        Raises: ContextParallelError: The model asks for what no algorithm here computes.
        """
        super().__init__(config=config)
        self.runtime = runtime
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group = pg_collection.tp
        self.layer_number = layer_number
        self._causal = is_causal(attn_mask_type)
        head_dim = config.kv_channels if k_channels is None else k_channels
        self._scale = softmax_scale if softmax_scale is not None else head_dim**-0.5
        self._window = Settings(config).window_of_layer(layer_number)
        self._kernel_for = resolver(runtime.config.kernel)
        self._keeps_largest = config.qk_clip or config.log_max_attention_logit
        self._cp_group = pg_collection.cp
        self.algorithm = runtime.algorithm(pg_collection.cp)
        self.softmax_offset = None
        if config.softmax_type == "vanilla":
            return
        heads = config.num_attention_heads // pg_collection.tp.size()
        device = torch.cuda.current_device()
        self.softmax_offset = torch.zeros(heads, device=device, dtype=config.params_dtype)
        if config.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(self.softmax_offset)
            if config.perform_initialization:
                config.init_method(self.softmax_offset)

    @property
    def settings(self) -> tuple[bool, float, int | None, bool]:
        """Whether tokens see earlier ones only, the scale, the window, and whether there are sinks.

        All ranks have the same ones.
        """
        return self._causal, self._scale, self._window, self.softmax_offset is not None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Computes attention of the local queries over the keys of all context-parallel ranks.

        Args:
            query: [s,b,h,d].
            key: [s,b,g,d].
            value: [s,b,g,e].
            attention_mask: Ignored: the mask follows from the mask type and the layout.
            attn_mask_type: causal or no_mask; default: the constructor's.
            attention_bias: Must be None.
            packed_seq_params: A `DocumentMask`, or None.

        Returns: [s,b,h*e] in the query's dtype.

        Raises: ContextParallelError: A bias, another mask type or a cache of keys is asked for, a
        window without a causal mask, or documents of another number of tokens.
        """
        if attention_bias is not None:
            raise ContextParallelError("attention bias is not supported: leave attention_bias out")
        if key.size(0) != query.size(0):
            raise ContextParallelError(
                f"attention needs as many queries as keys, got {query.size(0)} and "
                f"{key.size(0)}, as with a KV cache: generate with a model without the plugin"
            )
        packed = self.packed if packed_seq_params is None else packed_seq_params
        group = getattr(packed, "group", None) or self._cp_group
        seq_len = query.size(0) * group.size()
        causal = self._causal
        if attn_mask_type is not None:
            causal = is_causal(attn_mask_type, packed=packed is not None)
        mask = mask_of_layer(packed, seq_len, causal=causal, window=self._window)
        q, k, v = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        check_shapes(q, k, v)
        if self._keeps_largest:
            layout = self.algorithm.layout.for_documents(mask.resolved)
            seen = mask if packed is None else packed.without_padding(mask)
            found = largest_scores(q, k, scale=self._scale, mask=seen, layout=layout, group=group)
            before = self.current_max_attn_logits
            self.current_max_attn_logits = found if before is None else torch.maximum(before, found)
        settings: dict[str, Any] = {
            "algorithm": self.runtime.algorithm(group),
            "seq_len": seq_len,
            "mask": mask,
            "scale": self._scale,
            "sink": self.softmax_offset,
            "kernel_for": self._kernel_for,
            "recompute_key": self,
        }
        if self.latents is None:
            out = attend(q, k, v, **settings)
        else:
            (latent, weight), self.latents = self.latents, None
            plain = weight.size(0) // q.size(2) - v.size(3)
            latent = torch.cat((latent.transpose(0, 1), k[:, :, 0, plain:]), dim=-1)
            out = attend_latents(q, latent, weight, value_dim=v.size(3), **settings)
        return out.transpose(0, 1).flatten(2)


def is_causal(mask_type: AttnMaskType, *, packed: bool = False) -> bool:
    """Whether tokens see earlier ones only.

    Args: packed: whether there are packed documents, of which all padding comes last.

    Raises: ContextParallelError for another mask type than causal and no_mask.
    """
    known = _CAUSAL_IF_PACKED if packed else _CAUSAL
    if mask_type not in known:
        allowed = " or ".join(allowed.name for allowed in _CAUSAL)
        raise ContextParallelError(
            f"attention mask type must be {allowed}, got {mask_type.name}: "
            "padding and arbitrary masks are not supported"
        )
    return known[mask_type]
