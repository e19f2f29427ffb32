"""Megatron's settings, and the meaning of several settings together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.autograd.latents import Wire
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.integration.contract import SETTINGS
from megatron_cp_plugin.terminal import flag_of

# The second is its name after Megatron 0.19.
GATED = ("gated_delta_net", "gdn")
MAMBA = "M"  # in the pattern of a hybrid model
# Those that pack documents into a sequence, and those that split a model among ranks.
PACKING = ("sft", "dataloader_inter_document_masking")
SIZES = ("context_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
SPARSE = "dsa"
_KNOWN = frozenset(setting.name for setting in SETTINGS)
# Short names of sizes, which are 1 where nobody says.
SHORT = {
    "tensor": "tensor_model_parallel_size",
    "stages": "pipeline_model_parallel_size",
    "ranks": "context_parallel_size",
    "samples": "micro_batch_size",
}


class Settings:
    """Megatron's settings by name, those that `contract.SETTINGS` lists.

    None where the source, or this version of Megatron, has none of that name; the table, which is
    checked at start-up, says where that may be.

    Attributes: device: the device of the run, if given.
    """

    def __init__(
        self,
        source: Any,
        config: ContextParallelConfig | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Args: source: Megatron's arguments or model configuration."""
        self._source = source
        self._config = config
        self.device: Any = device

    def __getattr__(self, name: str) -> Any:
        if name in SHORT:
            return getattr(self, SHORT[name]) or 1
        if name not in _KNOWN:
            raise KeyError(f"{name} is not in contract.SETTINGS")
        return getattr(self._source, name, None)

    @property
    def cp(self) -> ContextParallelConfig:
        """The run's configuration."""
        assert self._config is not None
        return self._config

    @property
    def runs_elsewhere(self) -> bool:
        """Whether the run is for GPUs, and this machine has none: `megatron-cp check` asks."""
        of_gpu = self.device is not None and self.device.type == "cuda"
        return of_gpu and not torch.cuda.is_available()

    @property
    def has_linear(self) -> bool:
        """Whether layers of the plugin compute linear attention."""
        return self.cp.algo != registry.AUTO and self.cp.has_linear_layers

    @property
    def is_all_linear(self) -> bool:
        """Whether all layers compute linear attention."""
        return self.has_linear and not self.cp.has_softmax_layers

    @property
    def layers(self) -> str:
        """The algorithms of the layers, as on the command line."""
        return ", ".join(self.cp.layers)

    @property
    def tokens(self) -> Any:
        """Tokens of a sequence; None: not known yet."""
        return self.seq_length or self.encoder_seq_length

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations."""
        by_flag = torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32
        return self.params_dtype or by_flag  # the first is not on the command line

    @property
    def packing(self) -> str | None:
        """The flag that packs documents into a sequence, if it is given."""
        return next((flag_of(name) for name in PACKING if getattr(self, name)), None)

    @property
    def graphs(self) -> str:
        """Who captures CUDA graphs, as --cuda-graph-impl names it."""
        if self.enable_cuda_graph:  # its former flags
            return "local"
        if self.external_cuda_graph:
            return "transformer_engine"
        return self.cuda_graph_impl or "none"

    @property
    def captured_modules(self) -> list[str]:
        """The modules of each layer that are captured; none: the layers are captured whole."""
        modules = [getattr(module, "name", module) for module in self.cuda_graph_modules or ()]
        if any(module.startswith("full") for module in modules):  # former names for whole layers
            return []
        # This one captures the layers of a GPT whole, whichever of these are named.
        local = self.graphs == "local" and not self.hybrid_layer_pattern
        return [] if local and {"attn", "mlp"} & {*modules} else modules

    @property
    def captures_attention(self) -> bool:
        """Whether attention is in the graphs."""
        modules = self.captured_modules
        return self.graphs != "none" and (not modules or "attn" in modules)

    @property
    def expert_ranks(self) -> int:
        """Ranks that split the experts of a layer."""
        tensor = self.expert_tensor_parallel_size or self.tensor
        return int((self.expert_model_parallel_size or 1) * tensor)

    @property
    def has_experts(self) -> bool:
        """Whether layers have a mixture of experts."""
        return (self.num_experts or 1) > 1

    @property
    def is_latent(self) -> bool:
        """Whether layers have multi-latent attention."""
        return bool(self.multi_latent_attention) or "+" in (self.hybrid_layer_pattern or "")

    @property
    def cuts_fused_rotary(self) -> bool:
        """Whether Megatron's fused rotary embeddings would cut multi-latent attention."""
        if not (self.is_latent and self.apply_rope_fusion) or self.ranks == 1:
            return False
        # It fuses nothing with position embeddings of another type; a model has no such setting.
        of_model = self.position_embedding_type in (None, "rope")
        return bool(of_model or self.use_rotary_position_embeddings)

    @property
    def is_gated(self) -> bool:
        """Whether Megatron's gated delta net layers are asked for."""
        return self.experimental_attention_variant in GATED

    @property
    def is_mamba(self) -> bool:
        """Whether Megatron's Mamba layers are asked for."""
        return MAMBA in (self.hybrid_layer_pattern or "")

    @property
    def is_recurrent(self) -> bool:
        """Whether layers are asked for whose states pass from rank to rank."""
        return self.is_gated or self.is_mamba

    @property
    def is_sparse(self) -> bool:
        """Whether Megatron's layers of sparse attention (DSA) are asked for."""
        return bool(self.experimental_attention_variant == SPARSE)

    @property
    def kv_heads(self) -> int:
        """KV heads of the whole model; on the command line a switch decides whether they count."""
        grouped = self.group_query_attention is not False and self.num_query_groups
        return int(grouped or self.num_attention_heads)

    @property
    def split_heads(self) -> tuple[int, int]:
        """Query heads and KV heads of a tensor-parallel rank."""
        heads, tensor = self.num_attention_heads, self.tensor
        return heads // tensor, max(1, self.kv_heads // tensor)

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head dim of q and k, and the head dim of v; needs the size of the model."""
        if self.is_latent:
            return self.qk_head_dim + self.qk_pos_emb_head_dim, self.v_head_dim
        head_dim = self.kv_channels or self.hidden_size // self.num_attention_heads
        return head_dim, head_dim

    def shape(self, tokens: int) -> Shape:
        """Shape of an attention layer of a tensor-parallel rank."""
        (heads, kv_heads), (head_dim, value_dim) = self.split_heads, self.head_dims
        kv_heads = heads if self.is_latent else kv_heads
        itemsizes = self.dtype.itemsize, accumulation_dtype(self.dtype).itemsize
        return Shape(self.samples, tokens, heads, kv_heads, head_dim, *itemsizes, value_dim)

    def shape_of_latents(self, tokens: int) -> Shape:
        """The shape that algorithms take if ranks send latents in place of K and V."""
        whole = self.shape(tokens)
        sizes = self.kv_lora_rank, self.qk_pos_emb_head_dim, whole.head_dim, whole.value_dim
        return replace(whole, kv_heads=Wire(whole.heads, *sizes).kv_heads)

    @property
    def recomputes(self) -> str | None:
        """Which --recompute-granularity runs attention again; None: activations of it are kept."""
        granularity = "selective" if self.recompute_activations else self.recompute_granularity
        all_modules = granularity is None or granularity == "full"
        attention = "core_attn" in (self.recompute_modules or ("core_attn",))
        return granularity if all_modules or attention else None

    @property
    def window(self) -> int | None:
        """How many keys a query sees, its own included, by `window_size`; None: all.

        Raises: ConfigError: It is not two numbers, keys to the right are asked for, or a number has
        no meaning.
        """
        if self.window_size is None:
            return None
        if len(self.window_size) != 2:
            last = self.window_size[0] - 1
            raise ConfigError(
                "--window-size takes two numbers, LEFT,0, got "
                f"{self.window_words}: use --window-size {max(last, 0)},0, in which a token sees "
                "itself and the LEFT tokens before it"
            )
        left, right = self.window_size
        if right != 0 or left < -1:
            raise ConfigError(
                f"--window-size needs LEFT,0 with LEFT >= 0, or -1 for all earlier tokens, got "
                f"{left},{right}: causal attention sees no later tokens, use --window-size "
                f"{max(left, -1)},0"
            )
        return None if left == -1 else int(left) + 1

    def window_of_layer(self, number: int) -> int | None:
        """The same of a layer, counted from 1. Raises: ConfigError, as `window`."""
        from megatron.core.transformer.utils import is_layer_window_attention

        windowed = is_layer_window_attention(self.window_size, self.window_attn_skip_freq, number)
        return self.window if windowed else None

    @property
    def window_words(self) -> str:
        """The window as on the command line."""
        return ",".join(map(str, self.window_size))
