"""Megatron's gated delta net layers next to softmax attention of the plugin.

They keep Megatron's own context parallelism: it exchanges tokens for heads, and puts the chunks of
Megatron's zigzag layout in order. So the run must have that layout.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.integration.rules import check
from megatron_cp_plugin.integration.settings import GATED, Settings


def is_layer(module: Any) -> bool:
    """Whether a module, or the class of one, is such a layer's attention."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    kind = module if isinstance(module, type) else type(module)
    return issubclass(kind, GatedDeltaNet)


def has_layers(model: nn.Module) -> bool:
    """Whether such layers are in a model."""
    return any(map(is_layer, model.modules()))


def check_layout(config: ContextParallelConfig) -> None:
    """Raises: ConfigError if tokens are not where these layers take them to be."""
    asked = SimpleNamespace(experimental_attention_variant=GATED[0])
    check("gated layer", Settings(asked, config))
