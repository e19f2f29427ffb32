"""Public models as Megatron's settings: what `check` takes a recipe's model for, and cards tell of.

The numbers are those of the models' published configurations. Settings that say neither how tokens
meet nor how large a model is are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PublicModel:
    """A model.

    Attributes:
        name: Of its card.
        known_as: What names of it contain, in lower case, without anything but letters and digits.
        settings: Megatron's.
        beyond: Why no GPTModel or HybridModel is built of it; empty: one is.
    """

    name: str
    known_as: tuple[str, ...]
    settings: Mapping[str, object] = field(default_factory=dict)
    beyond: str = ""


_SIZES = "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels"
_COMMON: dict[str, object] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


_KINDS = _COMMON | {"position_embedding_type": "none", "swiglu": False, "squared_relu": True}


def _dense(*sizes: int, vocabulary: int, tied: bool = False, **others: object) -> dict[str, object]:
    """Args: sizes: as in `_SIZES`."""
    named = dict(zip(_SIZES.split(), sizes, strict=True))
    rest = {"vocab_size": vocabulary, "untie_embeddings_and_output_weights": not tied}
    return _COMMON | named | rest | others


def _experts(
    count: int, active: int, width: int, dense: int = 0, shared: int = 0, **others: object
) -> dict[str, object]:
    """Args: dense: first layers without experts."""
    found: dict[str, object] = {
        "num_experts": count,
        "moe_router_topk": active,
        "moe_ffn_hidden_size": width,
    }
    if dense:
        found["first_dense_layers"] = dense  # a word of ours: Megatron's is a list of all layers
    if shared:
        found["moe_shared_expert_intermediate_size"] = shared
    return found | others


def _latent(queries: int | None, head: int, rotary: int, value: int) -> dict[str, object]:
    """Multi-latent attention with keys and values of 512 numbers."""
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": queries,
        "kv_lora_rank": 512,
        "qk_head_dim": head,
        "qk_pos_emb_head_dim": rotary,
        "v_head_dim": value,
        "apply_rope_fusion": False,
    }


def _hybrid(pattern: str, *sizes: int) -> dict[str, object]:
    """Of Mamba-2, attention and other layers. Args: sizes: as in `_SIZES`, from the second on."""
    return (
        _dense(len(pattern), *sizes, 128, vocabulary=131072)
        | _KINDS
        | {"hybrid_layer_pattern": pattern, "mamba_state_dim": 128, "mamba_num_groups": 8}
    )


_SIGMOID: dict[str, object] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
_QWEN3: dict[str, object] = {"qk_layernorm": True}
_MOE_128 = _experts(128, 8, 768)
_GATED: dict[str, object] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_num_key_heads": 16,
    "attention_output_gate": True,
    "qk_layernorm": True,
    "rotary_percent": 0.25,
}
_QWEN35 = _GATED | {"position_embedding_type": "mrope"}
_SPARSE: dict[str, object] = {
    "experimental_attention_variant": "dsa",
    "cp_comm_type": "allgather",
    "dsa_indexer_n_heads": 32,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048,
}
_SINKS: dict[str, object] = {
    "softmax_type": "learnable",
    "window_size": (128, 0),
    "window_attn_skip_freq": 2,
    "add_bias_linear": True,
    "position_embedding_type": "yarn",
}
_DEEPSEEK_MOE = _experts(256, 8, 2048, 3, 2048) | _SIGMOID

# A table is read by rows.
# fmt: off
MODELS: tuple[PublicModel, ...] = (
    PublicModel("llama-2-7b", ("llama27b",),
                _dense(32, 4096, 11008, 32, 32, 128, vocabulary=32000)),
    PublicModel("llama-3-8b", ("llama38b", "llama318b"),
                _dense(32, 4096, 14336, 32, 8, 128, vocabulary=128256)),
    PublicModel("llama-3-70b", ("llama370b", "llama3170b"),
                _dense(80, 8192, 28672, 64, 8, 128, vocabulary=128256)),
    PublicModel("llama-3-405b", ("llama31405b", "llama3405b"),
                _dense(126, 16384, 53248, 128, 8, 128, vocabulary=128256)),
    PublicModel("qwen2.5-7b", ("qwen257b",),
                _dense(28, 3584, 18944, 28, 4, 128, vocabulary=152064, add_qkv_bias=True)),
    PublicModel("qwen3-0.6b", ("qwen306b", "qwen3600m"),
                _dense(28, 1024, 3072, 16, 8, 128, vocabulary=151936, tied=True) | _QWEN3),
    PublicModel("qwen3-4b", ("qwen34b",),
                _dense(36, 2560, 9728, 32, 8, 128, vocabulary=151936, tied=True) | _QWEN3),
    PublicModel("qwen3-8b", ("qwen38b",),
                _dense(36, 4096, 12288, 32, 8, 128, vocabulary=151936) | _QWEN3),
    PublicModel("qwen3-30b-a3b", ("qwen330ba3b",),
                _dense(48, 2048, 6144, 32, 4, 128, vocabulary=151936) | _QWEN3 | _MOE_128),
    PublicModel("qwen3-235b-a22b", ("qwen3235ba22b",),
                _dense(94, 4096, 12288, 64, 4, 128, vocabulary=151936) | _QWEN3
                | _experts(128, 8, 1536)),
    PublicModel("qwen3-next-80b-a3b", ("qwen3next",),
                _dense(48, 2048, 5120, 16, 2, 256, vocabulary=151936) | _GATED
                | _experts(512, 10, 512, shared=512, linear_num_value_heads=32)),
    PublicModel("qwen3.5-35b-a3b", ("qwen3535ba3b", "qwen3635ba3b", "qwen35vl35ba3b"),
                _dense(40, 2048, 512, 16, 2, 256, vocabulary=248320) | _QWEN35
                | _experts(256, 8, 512, shared=512, linear_num_value_heads=32)),
    PublicModel("qwen3.5-122b-a10b", ("qwen35122ba10b", "qwen35vl122ba10b"),
                _dense(48, 3072, 1024, 32, 2, 256, vocabulary=248320) | _QWEN35
                | _experts(256, 8, 1024, shared=1024, linear_num_value_heads=64)),
    PublicModel("qwen3.5-397b-a17b", ("qwen35397ba17b", "qwen35vl397ba17b"),
                _dense(60, 4096, 1024, 32, 2, 256, vocabulary=248320) | _QWEN35
                | _experts(512, 10, 1024, shared=1024, linear_num_value_heads=64)),
    PublicModel("qwen3-vl-30b-a3b", ("qwen3vl30ba3b",),
                _dense(48, 2048, 6144, 32, 4, 128, vocabulary=151936) | _QWEN3 | _MOE_128
                | {"position_embedding_type": "mrope"}),
    PublicModel("qwen3-vl-235b-a22b", ("qwen3vl235ba22b",),
                _dense(94, 4096, 12288, 64, 4, 128, vocabulary=151936) | _QWEN3
                | _experts(128, 8, 1536) | {"position_embedding_type": "mrope"}),
    PublicModel("gpt-oss-20b", ("gptoss20b",),
                _dense(24, 2880, 2880, 64, 8, 64, vocabulary=201088) | _SINKS
                | _experts(32, 4, 2880)),
    PublicModel("gpt-oss-120b", ("gptoss120b",),
                _dense(36, 2880, 2880, 64, 8, 64, vocabulary=201088) | _SINKS
                | _experts(128, 4, 2880)),
    PublicModel("mixtral-8x7b", ("mixtral8x7b",),
                _dense(32, 4096, 14336, 32, 8, 128, vocabulary=32000) | _experts(8, 2, 14336)),
    PublicModel("mimo-7b", ("mimo7b",),
                _dense(36, 4096, 11008, 32, 8, 128, vocabulary=151680, add_qkv_bias=True,
                       mtp_num_layers=1)),
    PublicModel("glm-4-9b", ("glm49b", "glmz19b"),
                _dense(40, 4096, 13696, 32, 2, 128, vocabulary=151552, add_qkv_bias=True,
                       rotary_percent=0.5, rotary_interleaved=True, apply_rope_fusion=False)),
    PublicModel("glm-4.7-355b-a32b", ("glm45355b", "glm47355b"),
                _dense(92, 5120, 12288, 96, 8, 128, vocabulary=151552, add_qkv_bias=True,
                       rotary_percent=0.5, qk_layernorm=True)
                | _experts(160, 8, 1536, 3, 1536) | _SIGMOID),
    PublicModel("deepseek-v3", ("deepseekv3", "deepseekr1"),
                _dense(61, 7168, 18432, 128, 128, 192, vocabulary=129280)
                | _latent(1536, 128, 64, 128) | _DEEPSEEK_MOE),
    PublicModel("kimi-k2", ("kimik2",),
                _dense(61, 7168, 18432, 64, 64, 192, vocabulary=163840)
                | _latent(1536, 128, 64, 128) | _experts(384, 8, 2048, 1, 2048) | _SIGMOID),
    PublicModel("glm-4.7-flash", ("glm47flash", "glm4730ba3b"),
                _dense(47, 2048, 10240, 20, 20, 256, vocabulary=154880)
                | _latent(768, 192, 64, 256) | _experts(64, 4, 1536, 1, 1536) | _SIGMOID),
    PublicModel("glm-5", ("glm5744b", "glm52", "zaiorgglm5", "glm5"),
                _dense(78, 6144, 12288, 64, 64, 256, vocabulary=154880)
                | _latent(2048, 192, 64, 256) | _DEEPSEEK_MOE | _SPARSE),
    PublicModel("moonlight-16b-a3b", ("moonlight16b",),
                _dense(27, 2048, 11264, 16, 16, 192, vocabulary=163840)
                | _latent(None, 128, 64, 128) | _experts(64, 6, 1408, 1, 2816) | _SIGMOID),
    PublicModel("minimax-m2", ("minimaxm2",),
                _dense(62, 3072, 1536, 48, 8, 128, vocabulary=200064, rotary_percent=0.5,
                       qk_layernorm=True, apply_rope_fusion=False)
                | _experts(256, 8, 1536) | _SIGMOID | {"moe_router_load_balancing_type": "none"}),
    PublicModel("step-3.5-flash", ("step35",),
                _dense(45, 4096, 11264, 64, 8, 128, vocabulary=128815, qk_layernorm=True,
                       window_size=(511, 0), window_attn_skip_freq=4)
                | _experts(288, 8, 1280, 3, 1280) | _SIGMOID),
    PublicModel("hy3", ("tencenthy3", "hyv3"),
                _dense(80, 4096, 13312, 64, 8, 128, vocabulary=120832, qk_layernorm=True)
                | _experts(192, 8, 1536, 1, 1536) | _SIGMOID),
    PublicModel("minimax-m3", ("minimaxm3",),
                _dense(60, 6144, 12288, 64, 4, 128, vocabulary=200064, rotary_percent=0.5,
                       qk_layernorm=True, apply_rope_fusion=False,
                       layernorm_zero_centered_gamma=True, glu_linear_offset=1.0,
                       activation_func_clamp_value=7.0)
                | _experts(128, 4, 3072, 3, 3072) | _SIGMOID),
    PublicModel("nemotron-3-nano-30b-a3b", ("nemotron3nano", "nemotron35lightning"),
                _hybrid("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 2688, 1856, 32, 2)
                | _experts(128, 6, 1856, shared=3712) | _SIGMOID
                | {"mamba_num_heads": 64, "mamba_head_dim": 64}),
    PublicModel("nemotron-3-nano-4b", ("nemotron3nano4b",),
                _hybrid("M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-", 3136, 12544, 40, 8)
                | {"mamba_num_heads": 96, "mamba_head_dim": 80}),
    # Of these only the kinds of layers.
    PublicModel("nemotron-3-super-120b-a12b", ("nemotron3super",),
                _KINDS | {"hybrid_layer_pattern": "ME*"}),
    PublicModel("nemotron-3-nano-omni", ("nemotronomni",),
                _KINDS | {"hybrid_layer_pattern": "ME*"}),
    PublicModel("kimi-k3", ("kimik3",),
                beyond="of Kimi delta attention, which Megatron does not have, and whose layers in "
                "Megatron-Bridge refuse context parallelism"),
    PublicModel("wan", ("wan13b", "wan14b", "wan2"), beyond="a diffusion transformer for video"),
)
# fmt: on


def model_named(text: str) -> PublicModel | None:
    """Returns the model that a name, path or recipe means; None: it is not known.

    Args:
        text: Such as "Qwen/Qwen3-30B-A3B" or "llama3_8b_pretrain_config".
    """
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    found = [(len(key), model) for model in MODELS for key in model.known_as if key in plain]
    return max(found, key=lambda pair: pair[0])[1] if found else None
