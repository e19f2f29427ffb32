"""The list of Megatron features that no algorithm supports.

The start-up checks and the documentation both come from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron_cp_plugin.integration import gated_delta_net
from megatron_cp_plugin.integration.contract import SETTINGS

_SETTINGS = frozenset(setting.name for setting in SETTINGS)


class Settings:
    """Megatron's settings by name, those that `contract.SETTINGS` lists.

    None where the source, or this version of Megatron, has none of that name; the table, which is
    checked at start-up, says where that may be.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if name not in _SETTINGS:
            raise KeyError(f"{name} is not in contract.SETTINGS")
        return getattr(self._source, name, None)


@dataclass(frozen=True)
class Feature:
    """A feature of Megatron that is refused.

    Attributes:
        name: As a user would call it.
        setting: The setting that asks for it, named like its flag.
        asked: Whether settings ask for it.
        reason: Why it is refused.
        instead: What to do.
    """

    name: str
    setting: str
    asked: Callable[[Settings], bool]
    reason: str
    instead: str

    @property
    def flag(self) -> str:
        """The command-line flag of the setting."""
        return _FLAGS.get(self.setting, "--" + self.setting.replace("_", "-"))


_FLAGS = {"fp8": "--fp8-format"}


def _on(setting: str) -> Callable[[Settings], bool]:
    return lambda settings: bool(getattr(settings, setting))


def _other_than(setting: str, *allowed: object) -> Callable[[Settings], bool]:
    def asked(settings: Settings) -> bool:
        value = getattr(settings, setting)
        return value is not None and getattr(value, "name", value) not in allowed

    return asked


def packs_documents(settings: Settings) -> str | None:
    """The flag that packs documents into a sequence, if it is given."""
    given = [name for name in ("sft", "dataloader_inter_document_masking") if _on(name)(settings)]
    return "--" + given[0].replace("_", "-") if given else None


def graphs(settings: Settings) -> str:
    """Who captures CUDA graphs, as --cuda-graph-impl names it."""
    if settings.enable_cuda_graph:  # its former flags
        return "local"
    if settings.external_cuda_graph:
        return "transformer_engine"
    return settings.cuda_graph_impl or "none"


def captured_modules(settings: Settings) -> list[str]:
    """The modules of each layer that are captured; none: the layers are captured whole."""
    modules = [getattr(module, "name", module) for module in settings.cuda_graph_modules or ()]
    if any(module.startswith("full") for module in modules):  # former names of whole layers
        return []
    # This one captures the layers of a GPT whole, whichever of these are named.
    local = graphs(settings) == "local" and not settings.hybrid_layer_pattern
    return [] if local and {"attn", "mlp"} & {*modules} else modules


def captures_attention(settings: Settings) -> bool:
    """Whether attention is in the graphs."""
    modules = captured_modules(settings)
    return graphs(settings) != "none" and (not modules or "attn" in modules)


def has_experts(settings: Settings) -> bool:
    """Whether layers have a mixture of experts."""
    return (settings.num_experts or 1) > 1


def _captures_documents(settings: Settings) -> bool:
    """Whether attention is in the graphs, and packed documents are in the sequence."""
    return captures_attention(settings) and packs_documents(settings) is not None


def is_latent(settings: Settings) -> bool:
    """Whether layers have multi-latent attention."""
    return bool(settings.multi_latent_attention) or "+" in (settings.hybrid_layer_pattern or "")


def _fused_latent_positions(settings: Settings) -> bool:
    """Whether the positions of multi-latent attention are cut in a fused kernel."""
    # Megatron fuses nothing with position embeddings of another type; a model has no such setting.
    rotary = settings.position_embedding_type in (None, "rope")
    return (
        is_latent(settings)
        and bool(settings.apply_rope_fusion)
        and (rotary or bool(settings.use_rotary_position_embeddings))
        and (settings.context_parallel_size or 1) > 1
    )


def _switch(name: str, setting: str, reason: str) -> Feature:
    flag = Feature(name, setting, _on(setting), reason, "").flag
    return Feature(name, setting, _on(setting), reason, f"leave {flag} out")


def _beside_gated_delta_net(name: str, setting: str, reason: str) -> Feature:
    feature = _switch(f"{name} with gated delta net layers", setting, reason)
    return replace(feature, asked=lambda s: feature.asked(s) and gated_delta_net.is_asked(s))


def _beside_graphs(name: str, setting: str) -> Feature:
    feature = _switch(f"{name} in CUDA graphs", setting, _UNTESTED)
    return replace(feature, asked=lambda s: feature.asked(s) and graphs(s) != "none")


_ZIGZAG = "Megatron splits it by its own zigzag layout"
_STATE = "their state is carried across documents"
_PACKED = "its documents are split and padded for Megatron's own layout"
_OTHER_GROUPS = "it changes the group of ranks from sample to sample"
_KERNELS = "the attention kernels here do not compute it"
_BY_RANK = "each rank does it with its own tokens, so the split would change the result"
_UNTESTED = "never tested with the plugin"
_ONE_BATCH = "a graph keeps the documents of the batch that was captured"
_FSDP_CHECKPOINTS = "Megatron's torch_dist does not save them, and its torch_dcp loads nothing"

FEATURES: tuple[Feature, ...] = (
    Feature(
        "attention dropout",
        "attention_dropout",
        lambda settings: (settings.attention_dropout or 0) > 0,
        _KERNELS,
        "add --attention-dropout 0",
    ),
    # What decides which tokens see which.
    _switch("packed sequences (RL)", "rl_use_sequence_packing", _PACKED),
    Feature(
        "resetting the attention mask at document ends",
        "reset_attention_mask",
        _on("reset_attention_mask"),
        "it builds an N x N mask",
        "use --dataloader-inter-document-masking",
    ),
    Feature(
        "documents of several samples in a pipeline",
        "micro_batch_size",
        lambda settings: (
            packs_documents(settings) is not None
            and (settings.micro_batch_size or 1) > 1
            and (settings.pipeline_model_parallel_size or 1) > 1
        ),
        "Megatron packs them into one sequence, but its stages expect several",
        "use --micro-batch-size 1",
    ),
    # What changes the scores.
    _switch("QK clipping", "qk_clip", "it needs the largest score, which the kernels keep"),
    _switch(
        "logging the largest attention logit",
        "log_max_attention_logit",
        "it needs the largest score, which the kernels keep",
    ),
    # Attention of another kind.
    Feature(
        "multi-latent attention with fused RoPE",
        "multi_latent_attention",
        _fused_latent_positions,
        _ZIGZAG,
        "add --no-rope-fusion",
    ),
    Feature(
        "position embeddings of the model besides those of multi-latent attention",
        "position_embedding_type",
        lambda settings: is_latent(settings) and settings.position_embedding_type == "yarn",
        "Megatron's layers support only their own",
        "use --position-embedding-type rope --rope-type yarn",
    ),
    _switch("a cache of latents", "cache_mla_latents", "it is for inference"),
    Feature(
        "experimental attention variants other than gated delta net (DSA)",
        "experimental_attention_variant",
        _other_than("experimental_attention_variant", *gated_delta_net.VARIANTS),
        _ZIGZAG,
        "leave --experimental-attention-variant out",
    ),
    _beside_gated_delta_net("packed documents", "dataloader_inter_document_masking", _STATE),
    _beside_gated_delta_net("packed conversations", "sft", _STATE),
    _beside_gated_delta_net(
        "multi-token prediction", "mtp_num_layers", "Megatron has no model with both"
    ),
    Feature(
        "layers other than attention, MLP and MoE in a hybrid model",
        "hybrid_layer_pattern",
        # Attention of both kinds, MLP, MoE; ends of stages and of what predicts one more token.
        lambda settings: not set(settings.hybrid_layer_pattern or "") <= set("*+-E|/"),
        _UNTESTED,
        "use *, +, - and E",
    ),
    Feature(
        "hybrid models selected by their old flag",
        "hybrid_override_pattern",
        _on("hybrid_override_pattern"),
        _UNTESTED,
        "use --hybrid-layer-pattern",
    ),
    Feature(
        "a loss per token with multi-token prediction",
        "calculate_per_token_loss",
        lambda settings: bool(
            settings.mtp_num_layers
            and settings.calculate_per_token_loss
            and (settings.context_parallel_size or 1) > 1
        ),
        "Megatron weights it by the tokens of each rank",
        "leave --calculate-per-token-loss out",
    ),
    _switch("FP8 attention", "fp8_dot_product_attention", _KERNELS),
    _switch("FP8 attention", "fp8_multi_head_attention", _KERNELS),
    _switch("Kitchen attention", "use_kitchen_attention", "it is a different core attention"),
    Feature(
        "choice of Megatron's attention kernel",
        "attention_backend",
        # All kernels here are what frameworks mean by flash.
        _other_than("attention_backend", "auto", "flash"),
        "it would be ignored or replace the plugin",
        "leave --attention-backend out, and choose a kernel with --cp-kernel",
    ),
    _switch(
        "choice of Transformer Engine's attention kernel",
        "flash_attention_version",
        "it would be ignored",
    ),
    Feature(
        "position embeddings of this type",
        "position_embedding_type",
        _other_than("position_embedding_type", "rope", "yarn", "learned_absolute", "none"),
        _ZIGZAG,
        "use rope, yarn, learned_absolute or none",
    ),
    # Other kinds of context parallelism.
    _switch("hybrid context parallelism", "hybrid_context_parallel", _OTHER_GROUPS),
    _switch("dynamic context parallelism", "dynamic_context_parallel", _OTHER_GROUPS),
    # What depends on which tokens are together on a rank.
    _switch("dropping tokens of full experts", "moe_expert_capacity_factor", _BY_RANK),
    Feature(
        "Sinkhorn routing",
        "moe_router_load_balancing_type",
        lambda settings: "sinkhorn" in (settings.moe_router_load_balancing_type or ()),
        _BY_RANK,
        "use aux_loss",
    ),
    Feature(
        "attention sinks split by tensor parallelism in Megatron-FSDP",
        "use_megatron_fsdp",
        lambda settings: (
            bool(settings.use_megatron_fsdp)
            and settings.softmax_type == "learnable"
            and (settings.tensor_model_parallel_size or 1) > 1
        ),
        "it recognizes split parameters by the names of Megatron's own classes",
        "use --use-torch-fsdp2",
    ),
    Feature(
        "Megatron-FSDP in a pipeline",
        "use_megatron_fsdp",
        lambda settings: (
            bool(settings.use_megatron_fsdp) and (settings.pipeline_model_parallel_size or 1) > 1
        ),
        "it treats all ranks of the job as one pipeline stage",
        "use --use-distributed-optimizer, or leave --pipeline-model-parallel-size out",
    ),
    # Checkpoints that Megatron begins and does not end, or never reads again.
    Feature(
        "optimizer states in checkpoints of FSDP",
        "save",
        lambda settings: (
            bool(settings.use_torch_fsdp2 and settings.save)
            and not (settings.ckpt_format == "torch_dist" and settings.no_save_optim)
        ),
        _FSDP_CHECKPOINTS,
        "add --no-save-optim --ckpt-format torch_dist, or leave --save out",
    ),
    Feature(
        "loading optimizer states with FSDP",
        "load",
        lambda settings: (
            bool(settings.use_torch_fsdp2 and settings.load)
            and not (
                settings.ckpt_format == "torch_dist"
                and (settings.no_load_optim or settings.finetune)
            )
        ),
        _FSDP_CHECKPOINTS,
        "add --no-load-optim --ckpt-format torch_dist, or leave --load out",
    ),
    # Modes of the whole program.
    Feature(
        "a mixture of experts in CUDA graphs of whole layers or iterations",
        "cuda_graph_impl",
        lambda settings: (
            graphs(settings) != "none"
            and has_experts(settings)
            and not captured_modules(settings)
            and packs_documents(settings) is None
        ),
        "the number of tokens per expert varies, which a graph cannot capture",
        "use --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router",
    ),
    Feature(
        "packed documents in CUDA graphs",
        "cuda_graph_impl",
        lambda settings: _captures_documents(settings) and not has_experts(settings),
        _ONE_BATCH,
        "use --cuda-graph-impl transformer_engine --cuda-graph-modules mlp, or leave "
        "--cuda-graph-impl out",
    ),
    Feature(
        "packed documents in CUDA graphs with a mixture of experts",
        "cuda_graph_impl",
        lambda settings: _captures_documents(settings) and has_experts(settings),
        _ONE_BATCH,
        "use --cuda-graph-impl transformer_engine --cuda-graph-modules moe_router, or leave "
        "--cuda-graph-impl out",
    ),
    Feature(
        "documents of several samples in CUDA graphs",
        "micro_batch_size",
        lambda settings: (
            graphs(settings) != "none"
            and packs_documents(settings) is not None
            and (settings.micro_batch_size or 1) > 1
        ),
        "Megatron packs them into one sequence, but captures several",
        "use --micro-batch-size 1",
    ),
    Feature(
        "gated delta net layers in CUDA graphs",
        "cuda_graph_impl",
        lambda settings: graphs(settings) != "none" and gated_delta_net.is_asked(settings),
        _UNTESTED,
        "leave --cuda-graph-impl out",
    ),
    _beside_graphs("Megatron-FSDP", "use_megatron_fsdp"),
    _beside_graphs("FSDP", "use_torch_fsdp2"),
    Feature(
        "full recompute in CUDA graphs of layers",
        "recompute_granularity",
        lambda settings: (
            settings.recompute_granularity == "full"
            and graphs(settings) in ("local", "transformer_engine")
        ),
        "Megatron captures it only with the whole iteration",
        "use --cuda-graph-impl full_iteration",
    ),
    Feature(
        "recomputed attention in local CUDA graphs",
        "cuda_graph_impl",
        lambda settings: (
            graphs(settings) == "local"
            and captures_attention(settings)
            and bool(settings.recompute_activations or settings.recompute_granularity)
            and "core_attn" in (settings.recompute_modules or ("core_attn",))
        ),
        "Megatron's checkpointing refuses the backward pass as it is captured",
        "use --cuda-graph-impl transformer_engine or full_iteration",
    ),
    Feature(
        "a whole iteration in a CUDA graph from the first one on",
        "cuda_graph_warmup_steps",
        lambda settings: (
            graphs(settings) == "full_iteration" and settings.cuda_graph_warmup_steps == 0
        ),
        "in the first iteration ranks compare batches, allocate buffers and build kernels",
        "use --cuda-graph-warmup-steps 3",
    ),
    _switch(
        "overlap of expert-parallel communication",
        "overlap_moe_expert_parallel_comm",
        _UNTESTED,
    ),
    Feature(
        "weights split further than by tensor parallelism",
        "tensor_parallel_num_weight_shards",
        # A model's configuration always says how many.
        lambda settings: (
            (settings.tensor_parallel_num_weight_shards or 1)
            > (settings.tensor_model_parallel_size or 1)
        ),
        _UNTESTED,
        "leave --tensor-parallel-num-weight-shards out",
    ),
    Feature(
        "weights of experts split further than by tensor parallelism",
        "expert_tensor_parallel_num_weight_shards",
        lambda settings: (
            (settings.expert_tensor_parallel_num_weight_shards or 1)
            > (settings.expert_tensor_parallel_size or settings.tensor_model_parallel_size or 1)
        ),
        _UNTESTED,
        "leave --expert-tensor-parallel-num-weight-shards out",
    ),
    _switch("activation offloading", "fine_grained_activation_offloading", _UNTESTED),
    _switch("activation offloading", "cpu_offloading", _UNTESTED),
    Feature(
        "recomputing the MLP of layers with biases",
        "recompute_modules",
        lambda settings: (
            "mlp" in (settings.recompute_modules or ())
            and settings.recompute_granularity != "full"
            and settings.add_bias_linear is not False
        ),
        "Megatron's backward pass never ends: it recomputes for the bias again and again",
        "add --disable-bias-linear, or leave mlp out",
    ),
    _switch("a fake process group", "fake_process_group", "ranks send nothing to each other"),
    _switch("batch-invariant mode", "batch_invariant_mode", _KERNELS),
    _switch("quantization with ModelOpt", "restore_modelopt_state", _UNTESTED),
    _switch("quantization with ModelOpt", "modelopt_enabled", _UNTESTED),
    Feature(
        "Megatron's own YAML configuration",
        "yaml_cfg",
        _on("yaml_cfg"),
        "it replaces all command-line flags",
        "use scripts/pretrain_gpt.py --config",
    ),
)
