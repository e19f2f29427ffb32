"""What the plugin replaces in Megatron, and the settings that it reads: one table, as data.

`compat` compares them with the running Megatron at start-up, installs the replacements from them,
and `Settings` reads nothing else. What the plugin uses as it is, and what only Megatron's source
tells, is in `harness/used.md`, for `megatron-cp hooks` and the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Major and minor number.
type Version = tuple[int, int]

# Which runs need a row: all that use the plugin, or those with one of its algorithms, of
# these the ones on Megatron's training loop, on the CPU platform, with --cp-record, or of
# scripts/pretrain_gpt.py.
type Part = Literal["any", "algorithm", "training", "cpu", "record", "script"]

# Where a setting is: on the parsed command line; there once Megatron has validated it; in the
# configuration of a model, or of one with multi-latent attention; or not always anywhere.
type Place = Literal["args", "validated args", "config", "latent config", "nowhere for sure"]

# The versions that were run. The last one is the main branch of 22 August 2026, which calls itself
# so before its release.
VERSIONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.2", "0.20.0")


@dataclass(frozen=True)
class Name:
    """A function, method, class or other object of Megatron.

    Attributes:
        module: Where it is defined, or first to be had.
        name: In the module; that of a method begins with its class.
        why: What the plugin does with it.
        part: Which runs need it.
        parameters: Those that the plugin gives or reads by name, in any order.
        first: Parameters that come first, in this order.
        since: The first version that has it; None: all.
        before: The first version that lacks it again; None: none does.
        closed: It has no other parameters: a class of the plugin is called in its place.
        attributes: What methods of the class call, or keep in, `self`.
        returned: What the returned tuple holds, by the names of the variables; "" is any.
    """

    module: str
    name: str
    why: str = ""
    part: Part = "algorithm"
    parameters: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    since: Version | None = None
    before: Version | None = None
    closed: bool = False
    attributes: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Its name with its module."""
        return f"{self.module}.{self.name}"

    def is_in(self, version: Version) -> bool:
        """Whether a version has it."""
        return _within(version, self.since, self.before)


@dataclass(frozen=True)
class Setting:
    """A setting of Megatron that the plugin reads.

    Attributes:
        name: As an attribute.
        places: Where it is.
        since: The first version that has it; None: all.
    """

    name: str
    places: tuple[Place, ...]
    since: Version | None = None

    def is_in(self, version: Version, place: Place) -> bool:
        """Whether a version has it in a place."""
        return place in self.places and _within(version, self.since, None)


def _within(version: Version, since: Version | None, before: Version | None) -> bool:
    return (since is None or version >= since) and (before is None or version < before)


# What needs a later version than the first one: its name, and what to do in an earlier one.
SINCE: dict[Part, tuple[Version, str, str]] = {
    "record": ((0, 18), "--cp-record", "leave it out"),
    "script": (
        (0, 19),
        "this script",
        "start the pretrain_gpt.py of your Megatron-LM with python -m megatron_cp_plugin.launch",
    ),
}

_CORE = "megatron.core"
_LAYERS = "megatron.core.transformer"
_EMBEDDINGS = "megatron.core.models.common.embeddings"
_TRAINING = "megatron.training"


def _row(
    module: str,
    name: str,
    why: str = "",
    *,
    part: Part = "algorithm",
    first: str = "",
    takes: str = "",
    since: Version | None = None,
) -> Name:
    """A row; parameters are words."""
    return Name(module, name, why, part, tuple(takes.split()), tuple(first.split()), since)


# A table is read by rows.
# fmt: off
NAMES: tuple[Name, ...] = (
    # Where an algorithm of the plugin is chosen.
    _row(f"{_TRAINING}.arguments", "add_megatron_arguments",
              "accepts `--context-parallel-algo`, which stays on the command line: Megatron's "
              "parser refuses it in a process without the plugin, such as a worker started by a "
              "script", part="training", first="parser"),
    _row(f"{_TRAINING}.arguments", "validate_args",
              "checks the arguments first, and refuses in one line what the algorithm does not "
              "support", part="training", first="args defaults"),
    _row(f"{_LAYERS}.transformer_config", "TransformerConfig.__post_init__",
              "reports in one line what Megatron refuses when it creates a model's configuration",
              part="training"),
    _row(f"{_LAYERS}.transformer_config", "MLATransformerConfig.__post_init__",
              "the same for multi-latent attention", part="training"),
    _row(f"{_CORE}.models.gpt.gpt_model", "GPTModel.__init__",
              "replaces `core_attention` in the given layer spec, local or Transformer Engine's, "
              "and wraps the `rotary_pos_emb` that it creates; then refuses tokens that the "
              "plugin has not split, and uses `packed_seq_params` as a mask",
              takes="config transformer_layer_spec mtp_block_spec vp_stage"),
    _row(f"{_CORE}.models.hybrid.hybrid_model", "HybridModel.__init__",
              "the same for hybrid models", takes="config hybrid_stack_spec vp_stage",
              since=(0, 18)),
    _row(f"{_TRAINING}.training", "setup_model_and_optimizer",
              "refuses any other model, which would train without the algorithm, and runs of no "
              "steps", part="training"),
    _row(f"{_CORE}.utils", "get_batch_on_this_cp_rank",
              "splits batches, including position ids, by the algorithm's layout, and marks them",
              first="batch", takes="cp_group"),
    _row(f"{_LAYERS}.multi_token_prediction", "roll_tensor",
              "shifts the targets of multi-token prediction by the algorithm's layout, where "
              "Megatron assumes zigzag, and counts the tokens of all ranks, for the reason given "
              "for the mean loss below", takes="tensor shifts dims cp_group packed_seq_params"),
    _row(f"{_LAYERS}.multi_token_prediction", "process_mtp_loss",
              "weights the loss of further tokens by the tokens of all ranks with "
              "`--calculate-per-token-loss`, where Megatron takes those of one rank",
              takes="labels loss_mask config cp_group packed_seq_params", since=(0, 17)),
    _row(f"{_EMBEDDINGS}.yarn_rotary_pos_embedding", "YarnRotaryEmbedding._set_cos_sin_cache",
              "skips the table of fused kernels, which are refused: Megatron splits it by its own "
              "layout, and fails if the model's original length is no multiple of 2P"),
    _row(f"{_CORE}.pipeline_parallel.schedules", "forward_step_calc_loss",
              "averages the loss over the whole sequence, where Megatron averages the means of "
              "the ranks: with padding or another loss mask its gradients, and with `--sft` the "
              "evaluation losses, would differ from those of the unsplit sequence",
              first="model output_tensor loss_func config"),
    _row(f"{_CORE}.tensor_parallel.random", "checkpoint",
              "activation recomputation keeps the output of attention instead of running it "
              "again; not with `--cp-recompute-attention`",
              first="function distribute_saved_activations"),
    _row(f"{_CORE}.extensions.transformer_engine", "te_checkpoint",
              "the same for Megatron's recomputation in FP8 or FP4", first="forward_func"),
    _row(f"{_LAYERS}.multi_token_prediction", "_compute_mtp_acceptance_counts",
              "counts correct predictions without storing all logits; only with "
              "`--cp-chunked-loss`", first="mtp_logits mtp_labels loss_mask", since=(0, 19)),
    # In every run that uses the plugin, and by --cp-record.
    _row(f"{_CORE}.datasets.utils", "compile_helpers",
              "skips the compilation of dataset helpers if they are compiled already: the wheel "
              "has no Makefile", part="any"),
    _row(f"{_TRAINING}.training", "train_step", "records losses, gradient norm and gradients",
              part="record", takes="model forward_backward_func"),
    # On the CPU platform.
    _row(f"{_CORE}.tensor_parallel.random", "_get_cuda_rng_state", "reads the CPU generator",
              part="cpu", takes="device clone graph_safe"),
    _row(f"{_CORE}.tensor_parallel.random", "_set_cuda_rng_state", "sets the CPU generator",
              part="cpu", first="new_state", takes="device graph_safe"),
    _row(f"{_TRAINING}.initialize", "_warmup_jit_function",
              "draws no random numbers, whose count would depend on the tokens of a rank",
              part="cpu"),
    _row(f"{_LAYERS}.torch_norm", "WrappedTorchNorm.__new__",
              "supports `--sequence-parallel`, for which Megatron needs the norms of Apex or "
              "Transformer Engine", part="cpu", first="cls config"),
    _row(f"{_LAYERS}.moe.moe_utils", "maybe_move_tensor_to_cpu",
              "turns the sizes of experts that are distributed over ranks into numbers",
              part="cpu", first="tensor", takes="as_numpy record_stream"),
    _row(f"{_LAYERS}.dot_product_attention", "DotProductAttention.__init__",
              "lets multi-latent attention build it, for which Megatron needs Transformer Engine's",
              part="cpu"),
    _row(f"{_CORE}.optimizer.distrib_optimizer", "DistributedOptimizer.state_dict",
              "loads a checkpoint into torch's own Adam", part="cpu", first="self"),
    _row(f"{_CORE}.optimizer.distrib_optimizer", "DistributedOptimizer.load_state_dict",
              "loads a checkpoint into torch's own Adam", part="cpu", first="self state_dict"),
    _row(f"{_CORE}.optimizer.distrib_optimizer",
              "DistributedOptimizer._set_main_param_and_optimizer_states",
              "loads a checkpoint into torch's own Adam", part="cpu",
              first="self model_param tensors"),
    _row(f"{_LAYERS}.multi_latent_attention", "TELinear",
              "is a class without Transformer Engine too: Megatron asks whether something is one",
              part="cpu"),
    _row(f"{_CORE}.tensor_parallel.inference_layers", "is_inference_column_parallel_linear",
              "says no: Megatron asks it for multi-token prediction, and compares with classes of "
              "Transformer Engine", part="cpu", first="module", since=(0, 20)),
)
# fmt: on


def _settings(names: str, *places: Place, since: Version | None = None) -> tuple[Setting, ...]:
    return tuple(Setting(name, places, since) for name in names.split())


SETTINGS: tuple[Setting, ...] = (
    *_settings(
        "add_bias_linear add_qkv_bias apply_rope_fusion attention_backend attention_dropout "
        "attention_output_gate batch_invariant_mode bf16 calculate_per_token_loss "
        "context_parallel_size cp_comm_type cross_entropy_loss_fusion cuda_graph_impl "
        "defer_embedding_wgrad_compute deterministic_mode enable_cuda_graph "
        "experimental_attention_variant expert_model_parallel_size external_cuda_graph "
        "fp16 hidden_size hybrid_context_parallel kv_channels "
        "linear_attention_freq linear_num_key_heads linear_num_value_heads log_max_attention_logit "
        "microbatch_group_size_per_vp_stage moe_aux_loss_coeff moe_expert_capacity_factor "
        "moe_router_load_balancing_type mtp_num_layers multi_latent_attention num_attention_heads "
        "num_layers num_query_groups overlap_moe_expert_parallel_comm perform_initialization "
        "pipeline_model_parallel_size qk_clip qk_l2_norm qk_layernorm recompute_granularity "
        "recompute_modules sequence_parallel softmax_type tensor_model_parallel_size "
        "transformer_impl use_cpu_initialization use_kitchen_attention window_attn_skip_freq "
        "window_size",
        "args",
        "config",
    ),
    *_settings(
        "cache_mla_latents kv_lora_rank q_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim",
        "args",
        "latent config",
    ),
    *_settings("use_mup", "args", "config", since=(0, 17)),
    *_settings("cuda_graph_warmup_steps", "args", "config"),
    *_settings("expert_tensor_parallel_size", "args", "config"),
    *_settings(
        "flash_attention_version cuda_graph_modules tensor_parallel_num_weight_shards "
        "expert_tensor_parallel_num_weight_shards",
        "args",
        "config",
        since=(0, 19),
    ),
    *_settings(
        "fp8_dot_product_attention fp8_multi_head_attention "
        "hetereogenous_dist_checkpoint init_method layernorm_epsilon mtp_loss_scaling_factor "
        "output_layer_init_method",
        "config",
    ),
    *_settings("params_dtype virtual_pipeline_model_parallel_size", "validated args", "config"),
    *_settings("data_parallel_size", "validated args"),
    *_settings(
        "check_for_nan_in_loss_and_grad ckpt_format create_attention_mask_in_dataloader "
        "data_cache_path data_parallel_sharding_strategy "
        "data_path distributed_timeout_minutes encoder_seq_length eod_mask_loss "
        "fake_process_group "
        "ffn_hidden_size fim_data finetune global_batch_size group_query_attention "
        "high_priority_stream_groups hybrid_override_pattern load micro_batch_size "
        "mid_level_dataset_surplus mmap_bin_files no_load_optim no_save_optim "
        "mock_data moe_ffn_hidden_size moe_layer_freq moe_router_topk "
        "moe_shared_expert_intermediate_size nccl_communicator_config_path "
        "num_dataset_builder_threads num_experts perform_rl_step "
        "position_embedding_type rampup_batch_size rank recompute_activations "
        "reset_attention_mask reset_position_ids rl_use_sequence_packing save seed seq_length "
        "sft skip_train spec split swiglu tensorboard_dir "
        "train_iters train_samples "
        "untie_embeddings_and_output_weights use_distributed_optimizer use_megatron_fsdp "
        "use_rotary_position_embeddings use_torch_fsdp2 use_tp_pp_dp_mapping "
        "vocab_size world_size yaml_cfg",
        "args",
    ),
    *_settings("hybrid_layer_pattern", "args", since=(0, 17)),
    *_settings(
        "dataloader_inter_document_masking logits_load_dir logits_save_dir", "args", since=(0, 19)
    ),
    # Of ModelOpt, of a model's builder, of versions that nobody ran, and there once a model is.
    *_settings(
        "modelopt_enabled restore_modelopt_state dynamic_context_parallel iteration",
        "nowhere for sure",
    ),
)
