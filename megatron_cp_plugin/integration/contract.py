"""What the plugin relies on in Megatron: one table, as data.

Three kinds of rows: names that the plugin replaces, names that it uses, settings that it reads.
`compat` checks them against the running Megatron at start-up, installs the replacements from them,
and `Settings` reads nothing else. `megatron-cp hooks` prints patches/README.md from them.
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
        replaced: The plugin puts a function of its own in its place, here and wherever modules of
            Megatron have imported it.
        part: Which runs need it.
        parameters: Those that the plugin gives or reads by name, in any order.
        first: Parameters that come first, in this order.
        closed: It has no other parameters: the plugin's own class is called in its place.
        attributes: What methods of the class call, or keep in, `self`.
        returned: What the returned tuple holds, by the names of the variables; "" is any.
        since: The first version that has it; None: all.
        before: The first version that lacks it again; None: none does.
    """

    module: str
    name: str
    why: str = ""
    replaced: bool = False
    part: Part = "algorithm"
    parameters: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    closed: bool = False
    attributes: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    since: Version | None = None
    before: Version | None = None

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

# Parameters of Megatron's attention, which the plugin's own classes take.
_CORE_ATTENTION = (
    "self",
    "config",
    "layer_number",
    "attn_mask_type",
    "attention_type",
    "attention_dropout",
    "softmax_scale",
    "cp_comm_type",
    "pg_collection",
)
_CORE_ATTENTION_CALL = (
    "self",
    "query",
    "key",
    "value",
    "attention_mask",
    "attn_mask_type",
    "attention_bias",
    "packed_seq_params",
)
# What Transformer Engine's takes besides; num_splits is for the batch-invariant mode, refused.
_BY_TE = ("k_channels", "v_channels", "num_splits")
_SELF_ATTENTION = (
    "self",
    "config",
    "submodules",
    "layer_number",
    "attn_mask_type",
    "cp_comm_type",
    "pg_collection",
)
_SELF_ATTENTION_CALL = (
    "self",
    "hidden_states",
    "attention_mask",
    "key_value_states",
    "inference_context",
    "rotary_pos_emb",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "rotary_pos_cos_sin",
    "attention_bias",
    "packed_seq_params",
    "sequence_len_offset",
    "inference_params",
)
_MODEL_CALL = (
    "input_ids",
    "position_ids",
    "decoder_input",
    "labels",
    "packed_seq_params",
    "loss_mask",
    "inference_context",
    "inference_params",
)
_ROTARY_LENGTH = (
    "self",
    "inference_context",
    "transformer",
    "transformer_input",
    "transformer_config",
    "packed_seq_params",
    "inference_params",
)
# What a step of training returns; "" is of no interest.
TRAIN_STEP = ("loss_reduced", "skipped_iter", "", "", "", "grad_norm")

NAMES: tuple[Name, ...] = (
    # Replaced where an algorithm of the plugin is chosen.
    Name(
        f"{_TRAINING}.arguments",
        "add_megatron_arguments",
        "accepts `--context-parallel-algo`, which stays on the command line: Megatron's parser "
        "refuses it in a process without the plugin, such as a worker started by a script",
        replaced=True,
        part="training",
        first=("parser",),
    ),
    Name(
        f"{_TRAINING}.arguments",
        "validate_args",
        "checks the arguments first, and refuses in one line what the algorithm does not support",
        replaced=True,
        part="training",
        first=("args", "defaults"),
    ),
    Name(
        f"{_LAYERS}.transformer_config",
        "TransformerConfig.__post_init__",
        "reports in one line what Megatron refuses when it creates a model's configuration",
        replaced=True,
        part="training",
    ),
    Name(
        f"{_LAYERS}.transformer_config",
        "MLATransformerConfig.__post_init__",
        "the same for multi-latent attention",
        replaced=True,
        part="training",
    ),
    Name(
        f"{_CORE}.models.gpt.gpt_model",
        "GPTModel.__init__",
        "replaces `core_attention` in the given layer spec, local or Transformer Engine's, and "
        "wraps the `rotary_pos_emb` that it creates; then refuses tokens that the plugin has not "
        "split, and uses `packed_seq_params` as a mask",
        replaced=True,
        parameters=("config", "transformer_layer_spec", "mtp_block_spec", "vp_stage"),
        attributes=("rotary_pos_emb", "pg_collection"),
    ),
    Name(
        f"{_CORE}.models.hybrid.hybrid_model",
        "HybridModel.__init__",
        "the same for hybrid models",
        replaced=True,
        parameters=("config", "hybrid_stack_spec", "vp_stage"),
        attributes=("rotary_pos_emb", "pg_collection", "hybrid_layer_pattern"),
        since=(0, 18),
    ),
    Name(
        f"{_TRAINING}.training",
        "setup_model_and_optimizer",
        "refuses any other model, which would train without the algorithm, and runs of no steps",
        replaced=True,
        part="training",
        returned=("model",),
    ),
    Name(
        f"{_CORE}.utils",
        "get_batch_on_this_cp_rank",
        "splits batches, including position ids, by the algorithm's layout, and marks them",
        replaced=True,
        parameters=("cp_group",),
        first=("batch",),
    ),
    Name(
        f"{_LAYERS}.multi_token_prediction",
        "roll_tensor",
        "shifts the targets of multi-token prediction by the algorithm's layout, where "
        "Megatron assumes zigzag, and counts the tokens of all ranks, for the reason given for "
        "the mean loss below",
        replaced=True,
        parameters=("tensor", "shifts", "dims", "cp_group", "packed_seq_params"),
    ),
    Name(
        f"{_EMBEDDINGS}.yarn_rotary_pos_embedding",
        "YarnRotaryEmbedding._set_cos_sin_cache",
        "skips the table of fused kernels, which are refused: Megatron splits it by its own "
        "layout, and fails if the model's original length is no multiple of 2P",
        replaced=True,
        attributes=("cp_group",),
    ),
    Name(
        f"{_CORE}.pipeline_parallel.schedules",
        "forward_step_calc_loss",
        "averages the loss over the whole sequence, where Megatron averages the means of the "
        "ranks: with padding or another loss mask its gradients, and with `--sft` the evaluation "
        "losses, would differ from those of the unsplit sequence",
        replaced=True,
        first=("model", "output_tensor", "loss_func", "config"),
    ),
    Name(
        f"{_CORE}.tensor_parallel.random",
        "checkpoint",
        "activation recomputation keeps the output of attention instead of running it again; not "
        "with `--cp-recompute-attention`",
        replaced=True,
        first=("function", "distribute_saved_activations"),
    ),
    Name(
        f"{_CORE}.extensions.transformer_engine",
        "te_checkpoint",
        "the same for Megatron's recomputation in FP8 or FP4",
        replaced=True,
        first=("forward_func",),
    ),
    Name(
        f"{_LAYERS}.multi_token_prediction",
        "_compute_mtp_acceptance_counts",
        "counts correct predictions without storing all logits; only with `--cp-chunked-loss`",
        replaced=True,
        first=("mtp_logits", "mtp_labels", "loss_mask"),
        since=(0, 19),
    ),
    # Replaced in every run that uses the plugin.
    Name(
        f"{_CORE}.datasets.utils",
        "compile_helpers",
        "skips the compilation of dataset helpers if they are compiled already: the wheel has "
        "no Makefile",
        replaced=True,
        part="any",
    ),
    # Replaced by --cp-record.
    Name(
        f"{_TRAINING}.training",
        "train_step",
        "records losses, gradient norm and gradients",
        replaced=True,
        part="record",
        parameters=("model", "forward_backward_func"),
        returned=TRAIN_STEP,
    ),
    # Replaced on the CPU platform.
    Name(
        f"{_CORE}.tensor_parallel.random",
        "_get_cuda_rng_state",
        "reads the CPU generator",
        replaced=True,
        part="cpu",
        parameters=("device", "clone", "graph_safe"),
    ),
    Name(
        f"{_CORE}.tensor_parallel.random",
        "_set_cuda_rng_state",
        "sets the CPU generator",
        replaced=True,
        part="cpu",
        parameters=("device", "graph_safe"),
        first=("new_state",),
    ),
    Name(
        f"{_TRAINING}.initialize",
        "_warmup_jit_function",
        "draws no random numbers, whose count would depend on the tokens of a rank",
        replaced=True,
        part="cpu",
    ),
    Name(
        f"{_LAYERS}.torch_norm",
        "WrappedTorchNorm.__new__",
        "supports `--sequence-parallel`, for which Megatron needs the norms of Apex or "
        "Transformer Engine",
        replaced=True,
        part="cpu",
        first=("cls", "config"),
    ),
    Name(
        f"{_LAYERS}.moe.moe_utils",
        "maybe_move_tensor_to_cpu",
        "turns the sizes of experts that are distributed over ranks into numbers",
        replaced=True,
        part="cpu",
        parameters=("as_numpy", "record_stream"),
        first=("tensor",),
    ),
    Name(
        f"{_LAYERS}.dot_product_attention",
        "DotProductAttention.__init__",
        "lets multi-latent attention build it, for which Megatron needs Transformer Engine's",
        replaced=True,
        part="cpu",
        parameters=_CORE_ATTENTION,
        closed=True,
        attributes=("hidden_size_per_partition", "num_attention_heads_per_partition"),
    ),
    *(
        Name(
            f"{_CORE}.optimizer.distrib_optimizer",
            f"DistributedOptimizer.{method}",
            "loads a checkpoint into torch's own Adam",
            replaced=True,
            part="cpu",
            first=first,
            attributes=("optimizer",),
        )
        for method, first in (
            ("state_dict", ("self",)),
            ("load_state_dict", ("self", "state_dict")),
            ("_set_main_param_and_optimizer_states", ("self", "model_param", "tensors")),
        )
    ),
    Name(
        f"{_LAYERS}.multi_latent_attention",
        "TELinear",
        "is a class without Transformer Engine too: Megatron asks whether something is one",
        replaced=True,
        part="cpu",
    ),
    Name(
        f"{_CORE}.tensor_parallel.inference_layers",
        "is_inference_column_parallel_linear",
        "says no: Megatron asks it for multi-token prediction, and compares with classes of "
        "Transformer Engine",
        replaced=True,
        part="cpu",
        first=("module",),
        since=(0, 20),
    ),
    # Used with an algorithm. The plugin's classes are called as these are.
    Name(
        f"{_LAYERS}.dot_product_attention",
        "DotProductAttention.__init__",
        parameters=_CORE_ATTENTION,
        closed=True,
    ),
    Name(
        f"{_LAYERS}.dot_product_attention",
        "DotProductAttention.forward",
        parameters=_CORE_ATTENTION_CALL,
        closed=True,
    ),
    Name(
        f"{_CORE}.extensions.transformer_engine",
        "TEDotProductAttention.__init__",
        parameters=(*_CORE_ATTENTION, *_BY_TE),
        closed=True,
    ),
    Name(
        f"{_CORE}.extensions.transformer_engine",
        "TEDotProductAttention.forward",
        parameters=(*_CORE_ATTENTION_CALL, "num_splits"),
        closed=True,
    ),
    *(
        Name(
            f"{_LAYERS}.attention",
            "SelfAttention.__init__",
            parameters=(*_SELF_ATTENTION, *more),
            closed=True,
            since=since,
            before=before,
        )
        for more, since, before in (
            ((), None, (0, 17)),
            (("pp_layer_offset",), (0, 17), (0, 18)),
            (("pp_layer_offset", "name"), (0, 18), None),
        )
    ),
    Name(
        f"{_LAYERS}.attention",
        "SelfAttention.forward",
        parameters=_SELF_ATTENTION_CALL,
        closed=True,
    ),
    *(
        Name(f"{_EMBEDDINGS}.{module}", f"{kind}.{method}", parameters=parameters, closed=True)
        for module, kind in (
            ("rotary_pos_embedding", "RotaryEmbedding"),
            ("yarn_rotary_pos_embedding", "YarnRotaryEmbedding"),
        )
        for method, parameters in (
            ("forward", ("self", "max_seq_len", "offset", "packed_seq", "cp_group")),
            ("get_emb", ("self", "max_seq_len", "offset")),
            ("get_rotary_seq_len", _ROTARY_LENGTH),
        )
    ),
    # Layer specs.
    Name(f"{_LAYERS}.spec_utils", "ModuleSpec", parameters=("module", "params", "submodules")),
    Name(
        f"{_LAYERS}.transformer_block",
        "TransformerBlockSubmodules",
        parameters=("layer_specs", "layer_norm"),
    ),
    Name(
        f"{_LAYERS}.transformer_layer", "TransformerLayerSubmodules", parameters=("self_attention",)
    ),
    Name(
        f"{_LAYERS}.attention",
        "SelfAttentionSubmodules",
        parameters=("linear_qkv", "core_attention", "linear_proj"),
    ),
    Name(
        f"{_LAYERS}.multi_latent_attention",
        "MLASelfAttentionSubmodules",
        parameters=("core_attention",),
    ),
    Name(
        f"{_LAYERS}.multi_token_prediction",
        "MultiTokenPredictionBlockSubmodules",
        parameters=("layer_specs",),
    ),
    Name(f"{_LAYERS}.multi_token_prediction", "MultiTokenPredictionLayer"),
    *(
        Name(
            f"{_LAYERS}.multi_token_prediction",
            "MultiTokenPredictionLayerSubmodules",
            parameters=(layer,),
            since=since,
            before=before,
        )
        for layer, since, before in (
            ("transformer_layer", None, (0, 17)),
            ("mtp_model_layer", (0, 17), None),
        )
    ),
    *(
        Name(
            f"{_CORE}.models.hybrid.hybrid_block",
            "HybridStackSubmodules",
            parameters=(layer,),
            since=since,
        )
        for layer, since in (("attention_layer", (0, 18)), ("mla_layer", (0, 19)))
    ),
    # Models and what is in them.
    Name(f"{_CORE}.models.gpt.gpt_model", "GPTModel.forward", parameters=_MODEL_CALL),
    Name(
        f"{_CORE}.models.hybrid.hybrid_model",
        "HybridModel.forward",
        parameters=_MODEL_CALL,
        since=(0, 18),
    ),
    Name(
        f"{_CORE}.models.common.language_module.language_module",
        "LanguageModule.compute_language_model_loss",
        parameters=("self", "labels", "logits"),
        closed=True,
        attributes=("output_layer",),
    ),
    Name(
        f"{_CORE}.tensor_parallel",
        "ColumnParallelLinear.forward",
        parameters=("self", "input_", "weight", "runtime_gather_output"),
        closed=True,
        attributes=("weight", "bias", "gather_output", "sequence_parallel", "tp_group"),
    ),
    Name(
        f"{_LAYERS}.multi_latent_attention",
        "MultiLatentAttention",
        attributes=("rotary_pos_emb", "pg_collection"),
    ),
    Name(f"{_LAYERS}.multi_latent_attention", "MLASelfAttention"),
    Name(f"{_CORE}.ssm.gated_delta_net", "GatedDeltaNet"),
    Name(f"{_CORE}.ssm.gated_delta_net", "HAVE_FLA"),
    Name(
        f"{_CORE}.packed_seq_params",
        "PackedSeqParams",
        parameters=(
            "qkv_format",
            "cu_seqlens_q",
            "cu_seqlens_kv",
            "cu_seqlens_q_padded",
            "cu_seqlens_kv_padded",
            "max_seqlen_q",
            "cp_group",
        ),
    ),
    Name(
        f"{_CORE}.packed_seq_params",
        "PackedSeqParams",
        parameters=("tokens_per_sample",),
        since=(0, 19),
    ),
    Name(f"{_CORE}.utils", "flatten_batch_for_packed_sequences", first=("batch",), since=(0, 19)),
    Name(f"{_CORE}.utils", "unwrap_model", first=("model",)),
    # It imports MegatronFSDP, if einops is installed; nothing but that wrapper is opened besides.
    Name(f"{_CORE}.distributed.fsdp.mcore_fsdp_adapter", "HAVE_MEGATRON_FSDP"),
    # Helpers of layers.
    Name(f"{_LAYERS}.identity_op", "IdentityOp"),
    Name(f"{_LAYERS}.heterogeneous.linear_replacements", "ColumnParallelLinearGathered"),
    Name(f"{_LAYERS}.module", "MegatronModule", parameters=("config",)),
    Name(f"{_LAYERS}.enums", "AttnMaskType.causal"),
    Name(f"{_LAYERS}.enums", "AttnMaskType.no_mask"),
    Name(f"{_LAYERS}.enums", "AttnMaskType.padding_causal"),
    Name(f"{_LAYERS}.transformer_config", "TransformerConfig"),
    Name(f"{_LAYERS}.transformer_config", "MLATransformerConfig"),
    Name(f"{_LAYERS}.transformer_block", "LayerNormImpl"),
    Name(f"{_LAYERS}.transformer_block", "get_num_layers_to_build", first=("config", "vp_stage")),
    Name(
        f"{_LAYERS}.transformer_layer", "get_transformer_layer_offset", first=("config", "vp_stage")
    ),
    Name(
        f"{_LAYERS}.utils",
        "is_layer_window_attention",
        first=("window_size", "window_attn_skip_freq", "layer_number"),
    ),
    Name(f"{_LAYERS}.utils", "ensure_metadata_has_dp_cp_group", first=("metadata",)),
    Name(
        f"{_LAYERS}.utils",
        "make_sharded_tensors_for_checkpoint",
        parameters=("tp_group", "dp_cp_group"),
        first=("state_dict", "prefix", "tensor_parallel_layers_axis_map", "sharded_offsets"),
    ),
    Name(
        f"{_CORE}.tensor_parallel",
        "set_tensor_model_parallel_attributes",
        first=("tensor", "is_parallel", "dim", "stride"),
    ),
    Name(
        f"{_CORE}.tensor_parallel", "checkpoint", first=("function", "distribute_saved_activations")
    ),
    Name(
        f"{_CORE}.process_groups_config",
        "ProcessGroupCollection.use_mpu_process_groups",
        parameters=("required_pgs",),
    ),
    Name(f"{_CORE}.parallel_state", "get_context_parallel_group"),
    Name(f"{_CORE}.parallel_state", "get_context_parallel_world_size"),
    Name(f"{_CORE}.parallel_state", "model_parallel_is_initialized"),
    Name(
        f"{_CORE}.parallel_state",
        "create_group",
        parameters=("timeout", "pg_options", "group_desc"),
        first=("ranks",),
    ),
    Name(f"{_CORE}.parallel_state", "get_nccl_options", first=("pg_name", "nccl_comm_cfgs")),
    # Used with --cp-record.
    Name(f"{_TRAINING}", "get_args", part="record"),
    Name(f"{_CORE}.utils", "unwrap_model", part="record", first=("model",)),
    Name(f"{_CORE}.distributed.fsdp.mcore_fsdp_adapter", "HAVE_MEGATRON_FSDP", part="record"),
    Name(f"{_CORE}.num_microbatches_calculator", "get_num_microbatches", part="record"),
    Name(
        f"{_CORE}.parallel_state",
        "get_data_parallel_rank",
        part="record",
        parameters=("with_context_parallel",),
    ),
    *(
        Name(f"{_CORE}.parallel_state", name, part="record")
        for name in (
            "get_expert_data_parallel_rank",
            "get_expert_model_parallel_rank",
            "get_pipeline_model_parallel_rank",
            "get_pipeline_model_parallel_world_size",
            "get_tensor_model_parallel_rank",
        )
    ),
    Name(
        f"{_CORE}.distributed",
        "DistributedDataParallel",
        part="record",
        attributes=("bucket_groups", "expert_parallel_bucket_groups"),
    ),
    Name(
        f"{_CORE}.distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.start_grad_sync",
        part="record",
        parameters=("force_all_reduce",),
    ),
    Name(
        f"{_CORE}.distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup",
        part="record",
        attributes=(
            "ddp_config",
            "buckets",
            "intra_distributed_optimizer_instance_group",
            "intra_distributed_optimizer_instance_size",
            "intra_distributed_optimizer_instance_rank",
        ),
    ),
    Name(f"{_LAYERS}.moe.moe_logging", "get_moe_metrics_tracker", part="record"),
    Name(
        f"{_LAYERS}.moe.moe_logging",
        "MoEMetricsTracker",
        part="record",
        attributes=("_metrics",),
    ),
    Name(
        f"{_LAYERS}.moe.moe_logging",
        "MoEMetricsTracker._sync_metrics",
        part="record",
        first=("self", "metric_names"),
    ),
    Name(f"{_LAYERS}.multi_token_prediction", "MTPLossLoggingHelper.tracker", part="record"),
    Name(
        f"{_LAYERS}.attention",
        "SelfAttention",
        part="record",
        attributes=(
            "num_query_groups_per_partition",
            "hidden_size_per_attention_head",
            "num_attention_heads_per_partition",
        ),
    ),
    Name(
        f"{_LAYERS}.multi_latent_attention",
        "MultiLatentAttention",
        part="record",
        attributes=("num_attention_heads_per_partition",),
    ),
    Name(
        f"{_CORE}.ssm.gated_delta_net",
        "GatedDeltaNet",
        part="record",
        attributes=("qk_dim_local_tp", "v_dim_local_tp", "num_v_heads_local_tp"),
        since=(0, 19),
    ),
    # Used on the CPU platform.
    Name(f"{_CORE}.optimizer.distrib_optimizer", "HAVE_APEX_OR_TE", part="cpu"),
    # Used by scripts/pretrain_gpt.py; parts of it are as of 0.19.
    Name(
        f"{_CORE}.utils",
        "get_batch_on_this_tp_rank",
        part="script",
        parameters=(
            "has_cu_seqlens",
            "is_hybrid_cp",
            "create_attention_mask_in_dataloader",
            "broadcast_src_rank",
            "broadcast_group",
            "cp_size",
            "tp_rank",
            "micro_batch_size",
            "seq_length",
            "mtp_on_this_rank",
            "pipeline_model_parallel_size",
            "is_pipeline_first_stage",
            "is_pipeline_last_stage",
        ),
        first=("batch",),
    ),
    Name(
        f"{_CORE}.utils",
        "get_batch_on_this_cp_rank",
        part="script",
        parameters=("is_hybrid_cp", "cp_group"),
        first=("batch",),
    ),
    Name(f"{_CORE}.utils", "flatten_batch_for_packed_sequences", part="script", first=("batch",)),
    Name(f"{_CORE}.utils", "get_attr_wrapped_model", part="script", first=("model", "attr")),
    Name(
        f"{_TRAINING}",
        "pretrain",
        part="script",
        first=("cfg_container", "train_valid_test_dataset_provider", "model_type"),
    ),
    Name(f"{_TRAINING}.argument_utils", "gpt_config_from_args", part="script", first=("args",)),
    Name(f"{_TRAINING}.argument_utils", "hybrid_config_from_args", part="script", first=("args",)),
    Name(
        f"{_TRAINING}.argument_utils",
        "pretrain_cfg_container_from_args",
        part="script",
        first=("args", "model_cfg"),
    ),
    Name(f"{_TRAINING}.arguments", "add_megatron_arguments", part="script", first=("parser",)),
    Name(
        f"{_TRAINING}.arguments",
        "parse_and_validate_args",
        part="script",
        parameters=("args_defaults",),
    ),
    Name(
        f"{_CORE}.packed_seq_params",
        "PackedSeqParams",
        part="script",
        parameters=(
            "qkv_format",
            "cu_seqlens_q",
            "cu_seqlens_kv",
            "max_seqlen_q",
            "max_seqlen_kv",
        ),
    ),
    Name(
        f"{_CORE}.datasets.gpt_dataset",
        "GPTDatasetConfig",
        part="script",
        parameters=(
            "random_seed",
            "sequence_length",
            "blend",
            "blend_per_split",
            "split",
            "num_dataset_builder_threads",
            "path_to_cache",
            "mmap_bin_files",
            "tokenizer",
            "reset_position_ids",
            "reset_attention_mask",
            "eod_mask_loss",
            "inter_document_masking",
            "create_attention_mask",
            "mid_level_dataset_surplus",
            "context_parallel_size",
            "data_parallel_size",
        ),
    ),
    *(
        Name(f"{_CORE}.{module}", name, part="script")
        for module, names in (
            ("datasets.blended_megatron_dataset_builder", ("BlendedMegatronDatasetBuilder",)),
            ("datasets.gpt_dataset", ("GPTDataset", "MockGPTDataset")),
            ("datasets.indexed_dataset", ("IndexedDatasetBuilder",)),
            ("enums", ("ModelType.encoder_or_decoder",)),
            (
                "parallel_state",
                (
                    "get_context_parallel_group",
                    "get_tensor_model_parallel_group",
                    "get_tensor_model_parallel_rank",
                    "get_tensor_model_parallel_src_rank",
                    "is_pipeline_first_stage",
                    "is_pipeline_last_stage",
                ),
            ),
            ("rerun_state_machine", ("get_rerun_state_machine",)),
            ("tokenizers.utils.build_tokenizer", ("build_tokenizer",)),
        )
        for name in names
    ),
    *(
        Name(f"{_TRAINING}{module}", name, part="script")
        for module, name in (
            ("", "get_args"),
            ("", "get_timers"),
            (".datasets.sft_dataset", "SFTDataset"),
            (".utils", "get_blend_and_blend_per_split"),
            (".utils", "is_first_or_last_pipeline_stage"),
        )
    ),
)


def _settings(names: str, *places: Place, since: Version | None = None) -> tuple[Setting, ...]:
    return tuple(Setting(name, places, since) for name in names.split())


SETTINGS: tuple[Setting, ...] = (
    *_settings(
        "add_bias_linear add_qkv_bias apply_rope_fusion attention_backend attention_dropout "
        "attention_output_gate batch_invariant_mode bf16 calculate_per_token_loss "
        "context_parallel_size cp_comm_type cross_entropy_loss_fusion cuda_graph_impl "
        "defer_embedding_wgrad_compute deterministic_mode enable_cuda_graph "
        "experimental_attention_variant expert_model_parallel_size external_cuda_graph "
        "fine_grained_activation_offloading fp16 hidden_size hybrid_context_parallel kv_channels "
        "linear_attention_freq linear_num_key_heads linear_num_value_heads log_max_attention_logit "
        "microbatch_group_size_per_vp_stage moe_expert_capacity_factor "
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
        "cpu_offloading fp8_dot_product_attention fp8_multi_head_attention "
        "hetereogenous_dist_checkpoint init_method layernorm_epsilon output_layer_init_method",
        "config",
    ),
    *_settings("params_dtype virtual_pipeline_model_parallel_size", "validated args", "config"),
    *_settings("data_parallel_size", "validated args"),
    *_settings(
        "check_for_nan_in_loss_and_grad ckpt_format create_attention_mask_in_dataloader "
        "data_cache_path data_parallel_sharding_strategy "
        "data_path distributed_timeout_minutes encoder_seq_length eod_mask_loss eval_iters "
        "fake_process_group "
        "ffn_hidden_size fim_data finetune global_batch_size group_query_attention "
        "high_priority_stream_groups hybrid_override_pattern load micro_batch_size "
        "mid_level_dataset_surplus mmap_bin_files no_load_optim no_save_optim "
        "mock_data moe_ffn_hidden_size moe_layer_freq moe_router_topk "
        "moe_shared_expert_intermediate_size nccl_communicator_config_path "
        "num_dataset_builder_threads num_experts perform_rl_step "
        "position_embedding_type rampup_batch_size rank recompute_activations "
        "reset_attention_mask reset_position_ids rl_use_sequence_packing save seed seq_length "
        "sft skip_train spec split swiglu tensorboard_dir test_data_path train_data_path "
        "train_iters train_samples "
        "untie_embeddings_and_output_weights use_distributed_optimizer use_megatron_fsdp "
        "use_rotary_position_embeddings use_torch_fsdp2 use_tp_pp_dp_mapping valid_data_path "
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
