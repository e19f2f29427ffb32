"""Compares all that the package relies on in Megatron with the running one.

For `megatron-cp hooks` and the tests: a run looks at what it replaces only, see
`integration.contract`. Here is what the package uses as it is, and what only Megatron's source
tells: attributes that methods use, and what a function returns.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_cp_plugin.integration import compat
from megatron_cp_plugin.integration.compat import differences, owner_of
from megatron_cp_plugin.integration.contract import NAMES, SETTINGS, SINCE, Name, Part, Version, row


def problems(*parts: Part) -> list[str]:
    """Returns what of the running Megatron is not as the tables say, one line each."""
    version, _ = compat.running_version()
    found = compat.problems(*parts)
    for used in USED:
        if used.part in ("any", *parts) and used.is_in(version):
            found += [*differences(used), *_differences_in_source(used)]
    return list(dict.fromkeys(found))


def report() -> tuple[str, list[str]]:
    """Returns the version of the running Megatron, and all that is not as the tables say."""
    from megatron.training.arguments import add_megatron_arguments

    version, text = compat.running_version()
    parts: tuple[Part, ...] = ("algorithm", "training", "cpu", "record", "script")
    had = [part for part in parts if version >= SINCE.get(part, ((0, 0),))[0]]
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    there = {action.dest for action in parser._actions} | {"rank", "world_size"}
    return text, problems(*had) + compat.missing_settings("args", there)


def _differences_in_source(used: Name) -> Iterator[str]:
    try:
        owner, name = owner_of(used)
        found = getattr(owner, name)
    except (ImportError, AttributeError):
        return  # said already
    if used.closed and isinstance(owner, type):
        yield from (
            f"{used.path} has another parameter {parameter}"
            for parameter in inspect.signature(found).parameters
            if parameter not in used.parameters
        )
    kind = owner if isinstance(owner, type) else found
    if used.attributes and isinstance(kind, type):
        names = _names_in_methods(kind)
        yield from (
            f"{used.module}.{kind.__name__} has no attribute {attribute}"
            for attribute in used.attributes
            if attribute not in names
        )
    if used.returned and not _returns(found, used.returned):
        want = ", ".join(name or "..." for name in used.returned)
        yield f"{used.path} does not return ({want}, ...)"


def _names_in_methods(kind: type) -> set[str]:
    """The names of attributes in the methods of a class and of Megatron's classes below it."""
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "megatron"]
    members = [member for base in bases for member in vars(base).values()]
    codes = (getattr(inspect.unwrap(m), "__code__", None) for m in members if callable(m))
    return {name for code in codes if code is not None for name in code.co_names}


def _returns(function: Any, names: tuple[str, ...]) -> bool:
    """Whether one of a function's return statements has variables of these names."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            got = [e.id if isinstance(e, ast.Name) else "" for e in node.value.elts]
            if len(got) >= len(names) and all(
                name in ("", other) for name, other in zip(names, got, strict=False)
            ):
                return True
    return False


def _names(module: str, names: str, *, part: Part = "algorithm") -> tuple[Name, ...]:
    """Rows of names that need only be there."""
    return tuple(Name(module, name, part=part) for name in names.split())


_CORE = "megatron.core"
_LAYERS = "megatron.core.transformer"
_EMBEDDINGS = "megatron.core.models.common.embeddings"
_TRAINING = "megatron.training"
# Parameters of Megatron's attention, which the plugin's own classes take; num_splits is for the
# batch-invariant mode, refused.
_CORE_ATTENTION = (
    "self config layer_number attn_mask_type attention_type attention_dropout softmax_scale "
    "cp_comm_type pg_collection"
)
_CORE_ATTENTION_CALL = (
    "self query key value attention_mask attn_mask_type attention_bias packed_seq_params"
)
_SELF_ATTENTION = "self config submodules layer_number attn_mask_type cp_comm_type pg_collection"
_SELF_ATTENTION_CALL = (
    "self hidden_states attention_mask key_value_states inference_context rotary_pos_emb "
    "rotary_pos_cos rotary_pos_sin rotary_pos_cos_sin attention_bias packed_seq_params "
    "sequence_len_offset inference_params"
)
_ROTARY_LENGTH = (
    "self inference_context transformer transformer_input transformer_config packed_seq_params "
    "inference_params"
)
_MODEL_CALL = (
    "input_ids position_ids decoder_input labels packed_seq_params loss_mask inference_context "
    "inference_params"
)
# What a step of training returns; "" is of no interest.
TRAIN_STEP = ("loss_reduced", "skipped_iter", "", "", "", "grad_norm")

# A table is read by rows.
# fmt: off
USED: tuple[Name, ...] = (
    # Classes in whose place those of the plugin are called: num_splits is for the batch-invariant
    # mode, refused.
    row(f"{_LAYERS}.dot_product_attention", "DotProductAttention.__init__",
            only=_CORE_ATTENTION),
    row(f"{_LAYERS}.dot_product_attention", "DotProductAttention.forward",
            only=_CORE_ATTENTION_CALL),
    row(f"{_CORE}.extensions.transformer_engine", "TEDotProductAttention.__init__",
            only=_CORE_ATTENTION + " k_channels v_channels num_splits"),
    row(f"{_CORE}.extensions.transformer_engine", "TEDotProductAttention.forward",
            only=_CORE_ATTENTION_CALL + " num_splits"),
    row(f"{_LAYERS}.attention", "SelfAttention.__init__", only=_SELF_ATTENTION, before=(0, 17)),
    row(f"{_LAYERS}.attention", "SelfAttention.__init__",
            only=_SELF_ATTENTION + " pp_layer_offset", since=(0, 17), before=(0, 18)),
    row(f"{_LAYERS}.attention", "SelfAttention.__init__",
            only=_SELF_ATTENTION + " pp_layer_offset name", since=(0, 18)),
    row(f"{_LAYERS}.attention", "SelfAttention.forward", only=_SELF_ATTENTION_CALL),
    row(f"{_EMBEDDINGS}.rotary_pos_embedding", "RotaryEmbedding.forward",
            only="self max_seq_len offset packed_seq cp_group"),
    row(f"{_EMBEDDINGS}.rotary_pos_embedding", "RotaryEmbedding.get_emb",
            only="self max_seq_len offset"),
    row(f"{_EMBEDDINGS}.rotary_pos_embedding", "RotaryEmbedding.get_rotary_seq_len",
            only=_ROTARY_LENGTH),
    row(f"{_EMBEDDINGS}.yarn_rotary_pos_embedding", "YarnRotaryEmbedding.forward",
            only="self max_seq_len offset packed_seq cp_group"),
    row(f"{_EMBEDDINGS}.yarn_rotary_pos_embedding", "YarnRotaryEmbedding.get_emb",
            only="self max_seq_len offset"),
    row(f"{_EMBEDDINGS}.yarn_rotary_pos_embedding", "YarnRotaryEmbedding.get_rotary_seq_len",
            only=_ROTARY_LENGTH),
    # Layer specs.
    row(f"{_LAYERS}.spec_utils", "ModuleSpec", takes="module params submodules"),
    row(f"{_LAYERS}.transformer_block", "TransformerBlockSubmodules",
          takes="layer_specs layer_norm"),
    row(f"{_LAYERS}.transformer_layer", "TransformerLayerSubmodules", takes="self_attention"),
    row(f"{_LAYERS}.attention", "SelfAttentionSubmodules",
          takes="linear_qkv core_attention linear_proj"),
    row(f"{_LAYERS}.multi_latent_attention", "MLASelfAttentionSubmodules",
          takes="core_attention"),
    row(f"{_LAYERS}.multi_token_prediction", "MultiTokenPredictionBlockSubmodules",
          takes="layer_specs"),
    *_names(f"{_LAYERS}.multi_token_prediction", "MultiTokenPredictionLayer"),
    row(f"{_LAYERS}.multi_token_prediction", "MultiTokenPredictionLayerSubmodules",
          takes="transformer_layer", before=(0, 17)),
    row(f"{_LAYERS}.multi_token_prediction", "MultiTokenPredictionLayerSubmodules",
          takes="mtp_model_layer", since=(0, 17)),
    row(f"{_CORE}.models.hybrid.hybrid_block", "HybridStackSubmodules", takes="attention_layer",
          since=(0, 18)),
    row(f"{_CORE}.models.hybrid.hybrid_block", "HybridStackSubmodules", takes="mla_layer",
          since=(0, 19)),
    # Models and what is in them.
    row(f"{_CORE}.models.gpt.gpt_model", "GPTModel.forward", takes=_MODEL_CALL),
    row(f"{_CORE}.models.hybrid.hybrid_model", "HybridModel.forward", takes=_MODEL_CALL,
          since=(0, 18)),
    row(f"{_CORE}.models.common.language_module.language_module",
          "LanguageModule.compute_language_model_loss", only="self labels logits",
          has="output_layer"),
    row(f"{_CORE}.tensor_parallel", "ColumnParallelLinear.forward",
          only="self input_ weight runtime_gather_output",
          has="weight bias gather_output sequence_parallel tp_group"),
    row(f"{_LAYERS}.multi_latent_attention", "MultiLatentAttention",
          has="rotary_pos_emb pg_collection"),
    row(f"{_LAYERS}.multi_latent_attention", "MLASelfAttention",
          has="linear_kv_up_proj tp_group"),
    # With `--cp-send-latents`.
    *_names(f"{_CORE}.extensions.transformer_engine",
            "TEColumnParallelLinear TELayerNormColumnParallelLinear"),
    *_names(f"{_CORE}.ssm.gated_delta_net", "GatedDeltaNet HAVE_FLA"),
    row(f"{_CORE}.ssm.mamba_mixer", "MambaMixer", since=(0, 19),
          has="in_proj conv1d_weight conv1d_bias act dt_bias A_log D D_has_hdim norm rmsnorm "
          "out_proj headdim d_state d_inner_local_tp nheads_local_tp ngroups_local_tp"),
    row(f"{_CORE}.packed_seq_params", "PackedSeqParams",
          takes="qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded "
          "max_seqlen_q cp_group"),
    row(f"{_CORE}.packed_seq_params", "PackedSeqParams", takes="tokens_per_sample",
          since=(0, 19)),
    row(f"{_CORE}.utils", "flatten_batch_for_packed_sequences", first="batch", since=(0, 19)),
    row(f"{_CORE}.utils", "unwrap_model", first="model"),
    # It imports MegatronFSDP, if einops is installed; nothing but that wrapper is opened besides.
    *_names(f"{_CORE}.distributed.fsdp.mcore_fsdp_adapter", "HAVE_MEGATRON_FSDP"),
    # Helpers of layers.
    *_names(f"{_LAYERS}.identity_op", "IdentityOp"),
    *_names(f"{_LAYERS}.heterogeneous.linear_replacements", "ColumnParallelLinearGathered"),
    row(f"{_LAYERS}.module", "MegatronModule", takes="config"),
    *_names(f"{_LAYERS}.enums",
            "AttnMaskType.causal AttnMaskType.no_mask AttnMaskType.padding_causal"),
    *_names(f"{_LAYERS}.transformer_config", "TransformerConfig MLATransformerConfig"),
    *_names(f"{_LAYERS}.transformer_block", "LayerNormImpl"),
    row(f"{_LAYERS}.transformer_block", "get_num_layers_to_build", first="config vp_stage"),
    row(f"{_LAYERS}.transformer_layer", "get_transformer_layer_offset", first="config vp_stage"),
    row(f"{_LAYERS}.utils", "is_layer_window_attention",
          first="window_size window_attn_skip_freq layer_number"),
    row(f"{_LAYERS}.utils", "ensure_metadata_has_dp_cp_group", first="metadata"),
    row(f"{_LAYERS}.utils", "make_sharded_tensors_for_checkpoint",
          first="state_dict prefix tensor_parallel_layers_axis_map sharded_offsets",
          takes="tp_group dp_cp_group"),
    row(f"{_CORE}.tensor_parallel", "gather_from_sequence_parallel_region",
          takes="tensor_parallel_output_grad group", first="input_"),
    row(f"{_CORE}.tensor_parallel", "CheckpointWithoutOutput"),
    row(f"{_CORE}.tensor_parallel", "CheckpointWithoutOutput.checkpoint",
          first="self run_function"),
    row(f"{_CORE}.tensor_parallel",
          "CheckpointWithoutOutput.discard_output_and_register_recompute", first="self"),
    row(f"{_CORE}.tensor_parallel", "copy_to_tensor_model_parallel_region",
          takes="group", first="input_"),
    row(f"{_CORE}.tensor_parallel", "set_tensor_model_parallel_attributes",
          first="tensor is_parallel dim stride"),
    row(f"{_CORE}.tensor_parallel", "checkpoint", first="function distribute_saved_activations"),
    row(f"{_CORE}.process_groups_config", "ProcessGroupCollection.use_mpu_process_groups",
          takes="required_pgs"),
    *_names(f"{_CORE}.parallel_state",
            "get_context_parallel_group get_context_parallel_world_size "
            "get_data_parallel_group model_parallel_is_initialized"),
    row(f"{_CORE}.parallel_state", "create_group", first="ranks",
          takes="timeout pg_options group_desc"),
    row(f"{_CORE}.parallel_state", "get_nccl_options", first="pg_name nccl_comm_cfgs"),
    # With --cp-record.
    *_names(_TRAINING, "get_args", part="record"),
    row(f"{_CORE}.utils", "unwrap_model", part="record", first="model"),
    *_names(f"{_CORE}.distributed.fsdp.mcore_fsdp_adapter", "HAVE_MEGATRON_FSDP", part="record"),
    *_names(f"{_CORE}.num_microbatches_calculator", "get_num_microbatches", part="record"),
    row(f"{_CORE}.parallel_state", "get_data_parallel_rank", part="record",
          takes="with_context_parallel"),
    *_names(f"{_CORE}.parallel_state",
            "get_expert_data_parallel_rank get_expert_model_parallel_rank "
            "get_pipeline_model_parallel_rank get_pipeline_model_parallel_world_size "
            "get_tensor_model_parallel_rank", part="record"),
    row(f"{_CORE}.distributed", "DistributedDataParallel", part="record",
          has="bucket_groups expert_parallel_bucket_groups"),
    row(f"{_CORE}.distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup.start_grad_sync",
          part="record", takes="force_all_reduce"),
    row(f"{_CORE}.distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup", part="record",
          has="ddp_config buckets intra_distributed_optimizer_instance_group "
          "intra_distributed_optimizer_instance_size intra_distributed_optimizer_instance_rank"),
    *_names(f"{_LAYERS}.moe.moe_logging", "get_moe_metrics_tracker", part="record"),
    row(f"{_LAYERS}.moe.moe_logging", "MoEMetricsTracker", part="record", has="_metrics"),
    row(f"{_LAYERS}.moe.moe_logging", "MoEMetricsTracker._sync_metrics", part="record",
          first="self metric_names"),
    *_names(f"{_LAYERS}.multi_token_prediction", "MTPLossLoggingHelper.tracker", part="record"),
    row(f"{_LAYERS}.attention", "SelfAttention", part="record",
          has="num_query_groups_per_partition hidden_size_per_attention_head "
          "num_attention_heads_per_partition"),
    row(f"{_LAYERS}.multi_latent_attention", "MultiLatentAttention", part="record",
          has="num_attention_heads_per_partition"),
    row(f"{_CORE}.ssm.gated_delta_net", "GatedDeltaNet", part="record",
          has="qk_dim_local_tp v_dim_local_tp num_v_heads_local_tp", since=(0, 19)),
    # On the CPU platform.
    *_names(f"{_CORE}.optimizer.distrib_optimizer", "HAVE_APEX_OR_TE", part="cpu"),
    # By scripts/pretrain_gpt.py; parts of it are as of 0.19.
    row(f"{_CORE}.utils", "get_batch_on_this_tp_rank", part="script", first="batch",
          takes="has_cu_seqlens is_hybrid_cp create_attention_mask_in_dataloader "
          "broadcast_src_rank broadcast_group cp_size tp_rank micro_batch_size seq_length "
          "mtp_on_this_rank pipeline_model_parallel_size is_pipeline_first_stage "
          "is_pipeline_last_stage"),
    row(f"{_CORE}.utils", "get_batch_on_this_cp_rank", part="script", first="batch",
          takes="is_hybrid_cp cp_group"),
    row(f"{_CORE}.utils", "flatten_batch_for_packed_sequences", part="script", first="batch"),
    row(f"{_CORE}.utils", "get_attr_wrapped_model", part="script", first="model attr"),
    row(_TRAINING, "pretrain", part="script",
          first="cfg_container train_valid_test_dataset_provider model_type"),
    row(f"{_TRAINING}.argument_utils", "gpt_config_from_args", part="script", first="args"),
    row(f"{_TRAINING}.argument_utils", "hybrid_config_from_args", part="script", first="args"),
    row(f"{_TRAINING}.argument_utils", "pretrain_cfg_container_from_args", part="script",
          first="args model_cfg"),
    row(f"{_TRAINING}.arguments", "add_megatron_arguments", part="script", first="parser"),
    row(f"{_TRAINING}.arguments", "parse_and_validate_args", part="script",
          takes="args_defaults"),
    row(f"{_CORE}.packed_seq_params", "PackedSeqParams", part="script",
          takes="qkv_format cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv"),
    row(f"{_CORE}.datasets.gpt_dataset", "GPTDatasetConfig", part="script",
          takes="random_seed sequence_length blend blend_per_split split "
          "num_dataset_builder_threads path_to_cache mmap_bin_files tokenizer reset_position_ids "
          "reset_attention_mask eod_mask_loss inter_document_masking create_attention_mask "
          "mid_level_dataset_surplus context_parallel_size data_parallel_size"),
    *_names(f"{_CORE}.datasets.blended_megatron_dataset_builder",
            "BlendedMegatronDatasetBuilder", part="script"),
    *_names(f"{_CORE}.datasets.gpt_dataset", "GPTDataset MockGPTDataset", part="script"),
    *_names(f"{_CORE}.datasets.indexed_dataset", "IndexedDatasetBuilder", part="script"),
    *_names(f"{_CORE}.enums", "ModelType.encoder_or_decoder", part="script"),
    *_names(f"{_CORE}.parallel_state",
            "get_context_parallel_group get_context_parallel_rank "
            "get_tensor_model_parallel_group "
            "get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank "
            "is_pipeline_first_stage is_pipeline_last_stage", part="script"),
    *_names(f"{_CORE}.rerun_state_machine", "get_rerun_state_machine", part="script"),
    *_names(f"{_CORE}.tokenizers.utils.build_tokenizer", "build_tokenizer", part="script"),
    *_names(_TRAINING, "get_args get_timers", part="script"),
    *_names(f"{_TRAINING}.datasets.sft_dataset", "SFTDataset", part="script"),
    *_names(f"{_TRAINING}.utils",
            "get_blend_and_blend_per_split is_first_or_last_pipeline_stage", part="script"),
    # What is kept in, or returned by, what the plugin replaces.
    row(f"{_CORE}.models.gpt.gpt_model", "GPTModel.__init__",
          has="rotary_pos_emb pg_collection"),
    row(f"{_CORE}.models.hybrid.hybrid_model", "HybridModel.__init__",
          has="rotary_pos_emb pg_collection hybrid_layer_pattern", since=(0, 18)),
    row(f"{_TRAINING}.training", "setup_model_and_optimizer", part="training",
          returns=("model",)),
    row(f"{_EMBEDDINGS}.yarn_rotary_pos_embedding", "YarnRotaryEmbedding._set_cos_sin_cache",
          has="cp_group"),
    row(f"{_TRAINING}.training", "train_step", part="record",
          returns=TRAIN_STEP),
    row(f"{_LAYERS}.dot_product_attention", "DotProductAttention.__init__", part="cpu",
          has="hidden_size_per_partition num_attention_heads_per_partition"),
    row(f"{_CORE}.optimizer.distrib_optimizer", "DistributedOptimizer.state_dict", part="cpu",
          has="optimizer"),
    row(f"{_CORE}.optimizer.distrib_optimizer", "DistributedOptimizer.load_state_dict",
          part="cpu", has="optimizer"),
    row(f"{_CORE}.optimizer.distrib_optimizer",
          "DistributedOptimizer._set_main_param_and_optimizer_states", part="cpu",
          has="optimizer"),
)
# fmt: on

_PARTS: dict[Part, str] = {
    "algorithm": "With an algorithm of the plugin",
    "training": "With an algorithm of the plugin in Megatron's training loop, by the launcher",
    "any": "In every run that uses the plugin",
    "record": "With `--cp-record`, since Megatron 0.18",
    "cpu": "On the CPU platform",
    "script": "By `scripts/pretrain_gpt.py`, since Megatron 0.19",
}


def markdown() -> str:
    """The tables, as patches/README.md has them."""
    lines: list[str] = []
    for part, title in _PARTS.items():
        rows = [name for name in NAMES if name.part == part]
        if rows:
            lines += [f"{title}:", "", "| name | why | relied on | versions |"]
            lines += ["| --- | --- | --- | --- |"]
            lines += [f"| `{r.path}` | {r.why} | {_shape(r)} | {_range(r)} |" for r in rows]
            lines.append("")
    lines += ["## What is used as it is", ""]
    for part, title in _PARTS.items():
        rows = [name for name in USED if name.part == part]
        if rows:
            lines += [f"{title}:", "", "| name | relied on | versions |", "| --- | --- | --- |"]
            lines += [f"| `{r.path}` | {_shape(r)} | {_range(r)} |" for r in rows]
            lines.append("")
    lines += ["## Settings that are read", "", "| where | settings |", "| --- | --- |"]
    groups: dict[str, list[str]] = {}
    for setting in SETTINGS:
        since = f", from {_text(setting.since)}" if setting.since else ""
        groups.setdefault(" and ".join(setting.places) + since, []).append(setting.name)
    lines += [f"| {where} | {_words(names)} |" for where, names in groups.items()]
    return "\n".join(lines) + "\n"


def _shape(name: Name) -> str:
    said = []
    if name.first:
        said.append(f"first {_words(name.first)}")
    if name.parameters:
        takes = "only" if name.closed else "takes"
        said.append(f"{takes} {_words(name.parameters)}")
    if name.attributes:
        said.append(f"has {_words(name.attributes)}")
    if name.returned:
        said.append(f"returns {_words(name or '...' for name in name.returned)}")
    return "; ".join(said)


def _words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _range(name: Name) -> str:
    if name.before:
        return f"{_text(name.since) + ' to ' if name.since else ''}before {_text(name.before)}"
    return f"from {_text(name.since)}" if name.since else "all"


def _text(version: Version | None) -> str:
    return ".".join(map(str, version or ()))
