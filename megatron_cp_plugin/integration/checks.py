"""What a run must satisfy, checked before training starts.

`FEATURES` is the one list of Megatron features that no algorithm here serves; the start-up checks
and the documentation both come from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.integration import gated_delta_net
from megatron_cp_plugin.kernels import Problem, resolve
from megatron_cp_plugin.kernels.linear import LinearProblem, resolve_linear


class Settings:
    """Megatron's settings by name; None where this version of Megatron has none of that name."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
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


def _documents(settings: Settings) -> str | None:
    """The flag that packs documents into a sequence, if it is given."""
    given = [name for name in ("sft", "dataloader_inter_document_masking") if _on(name)(settings)]
    return "--" + given[0].replace("_", "-") if given else None


def _latent(settings: Settings) -> bool:
    """Whether layers have multi-latent attention."""
    return bool(settings.multi_latent_attention) or "+" in (settings.hybrid_layer_pattern or "")


def _fused_latent_positions(settings: Settings) -> bool:
    """Whether the positions of multi-latent attention are cut in a fused kernel."""
    # Megatron fuses nothing with position embeddings of another type; a model has no such setting.
    rotary = settings.position_embedding_type in (None, "rope")
    return (
        _latent(settings)
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


_ZIGZAG = "Megatron cuts it by its own zigzag layout"
_STATE = "their state goes on across documents"
_PACKED = "its documents are cut and padded for Megatron's own layout"
_OTHER_GROUPS = "it takes other groups of ranks from sample to sample"
_KERNELS = "the attention kernels here do not compute it"
_BY_RANK = "each rank does it with its own tokens, so the split would change the result"
_UNTESTED = "never run together with the plugin"

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
        "it makes a mask of N x N",
        "use --dataloader-inter-document-masking",
    ),
    Feature(
        "documents of several samples in a pipeline",
        "micro_batch_size",
        lambda settings: (
            _documents(settings) is not None
            and (settings.micro_batch_size or 1) > 1
            and (settings.pipeline_model_parallel_size or 1) > 1
        ),
        "Megatron makes one sequence of them, and its stages expect several",
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
        "packed documents with multi-latent attention",
        "multi_latent_attention",
        lambda settings: _latent(settings) and _documents(settings) is not None,
        "Megatron drops the dimension of samples and cuts positions by its own layout",
        "leave --sft and --dataloader-inter-document-masking out",
    ),
    Feature(
        "position embeddings of the model beside those of multi-latent attention",
        "position_embedding_type",
        lambda settings: _latent(settings) and settings.position_embedding_type == "yarn",
        "Megatron's layers take no others than their own",
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
        "multi-token prediction", "mtp_num_layers", "Megatron builds no model of both"
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
        "hybrid models by their former flag",
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
        "Megatron weighs it by the tokens of each rank",
        "leave --calculate-per-token-loss out",
    ),
    _switch("FP8 attention", "fp8_dot_product_attention", _KERNELS),
    _switch("FP8 attention", "fp8_multi_head_attention", _KERNELS),
    _switch("Kitchen attention", "use_kitchen_attention", "it is another core attention"),
    Feature(
        "choice of Megatron's attention kernel",
        "attention_backend",
        _other_than("attention_backend", "auto"),
        "it would be ignored or take the plugin's place",
        "choose a kernel with --cp-kernel",
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
    # Modes of the whole program.
    Feature(
        "CUDA graphs",
        "cuda_graph_impl",
        _other_than("cuda_graph_impl", "none"),
        _UNTESTED,
        "leave --cuda-graph-impl out",
    ),
    _switch("CUDA graphs", "enable_cuda_graph", _UNTESTED),
    _switch("CUDA graphs", "external_cuda_graph", _UNTESTED),
    _switch(
        "overlap of expert-parallel communication",
        "overlap_moe_expert_parallel_comm",
        _UNTESTED,
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
        "Megatron's backward never ends: it recomputes for the bias, again and again",
        "add --disable-bias-linear, or leave mlp out",
    ),
    _switch("batch-invariant mode", "batch_invariant_mode", _KERNELS),
    _switch("quantization with ModelOpt", "restore_modelopt_state", _UNTESTED),
    _switch("quantization with ModelOpt", "modelopt_enabled", _UNTESTED),
    Feature(
        "Megatron's own YAML configuration",
        "yaml_cfg",
        _on("yaml_cfg"),
        "it takes the place of all command-line flags",
        "use scripts/pretrain_gpt.py --config",
    ),
)


def check_settings(source: Any, config: ContextParallelConfig) -> None:
    """Refuses what no algorithm serves.

    Args:
        source: Megatron's arguments or model configuration.
        config: The run's configuration.

    Raises:
        ConfigError: One of `FEATURES` is asked for, or multi-latent attention of an algorithm of
            linear attention.
    """
    settings = Settings(source)
    for feature in FEATURES:
        if feature.asked(settings):
            value = getattr(settings, feature.setting)
            got = getattr(value, "name", value)
            raise ConfigError(
                f"--context-parallel-algo {config.algo} does not serve {feature.name}, got "
                f"{feature.flag} {got} ({feature.reason}): {feature.instead}"
            )
    if _latent(settings) and config.has_linear_layers:
        raise ConfigError(
            f"--cp-linear-model {config.linear_model} makes q, k and v of another kind, got "
            "--multi-latent-attention: leave it out, or use algorithms of softmax attention for "
            "all layers"
        )


def check_arguments(args: Any, config: ContextParallelConfig, device: torch.device) -> str | None:
    """Checks Megatron's arguments as parsed, before Megatron validates them.

    Args:
        args: Megatron's namespace.
        config: The run's configuration.
        device: Where the run computes.

    Returns:
        The name of the attention kernel; None where the arguments do not say enough.

    Raises:
        ContextParallelError: One line that says what is wrong, and what to do.
    """
    config.layout  # noqa: B018  (an unknown algorithm or option is the first thing to say)
    config.check_layers()
    _check_world(args)
    _check_heads(args)
    _check_linear_layers(args, config)
    _check_hybrid_model(args, config)
    check_settings(args, config)
    gated_delta_net.check_arguments(args, config)
    _check_documents(args)
    _check_sequence(args, config)
    _check_algorithms(args, config)
    _check_window(args, config)
    return _check_kernel(args, config, device)


def check_interleaving(args: Any) -> None:
    """Checks the number of micro-batches of an interleaved pipeline.

    Megatron does so in the first step only.

    Args:
        args: Megatron's namespace, validated.

    Raises:
        ConfigError: There are too few, or too few are left over.
    """
    stages = args.pipeline_model_parallel_size
    settings = Settings(args)
    if not settings.virtual_pipeline_model_parallel_size or settings.rampup_batch_size:
        return
    group = settings.microbatch_group_size_per_vp_stage or stages
    samples = args.micro_batch_size * args.data_parallel_size
    count = args.global_batch_size // samples
    if stages <= group <= count and not 0 < count % group < stages:
        return
    if group < stages:
        instead = f"--microbatch-group-size-per-virtual-pipeline-stage {stages}"
    else:
        instead = f"--global-batch-size {-(-count // group) * group * samples}"
    raise ConfigError(
        f"an interleaved pipeline of {stages} stages that takes {group} micro-batches at a time "
        f"needs a multiple of them, and groups of at least {stages}, got {count} micro-batches: "
        f"use {instead}"
    )


def _check_world(args: Any) -> None:
    sizes = {
        "context_parallel_size": args.context_parallel_size,
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}")
    product = 1
    for size in sizes.values():
        product *= size
    if args.world_size % product:
        large = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        factors = " * ".join(large) + (f" = {product}" if len(large) > 1 else "")
        per_rank = product // args.context_parallel_size
        usable = [
            str(size)
            for size in range(1, args.world_size + 1)
            if args.world_size % (size * per_rank) == 0
        ]
        fitting = f", or use context_parallel_size {' or '.join(usable)}" if usable else ""
        raise ConfigError(
            f"{factors} must divide the number of processes, got {args.world_size}: "
            f"start a multiple of {product} processes{fitting}"
        )


def _check_heads(args: Any) -> None:
    heads, tensor = args.num_attention_heads, args.tensor_model_parallel_size
    if heads is None:
        return
    if heads % tensor:
        raise ConfigError(
            f"num_attention_heads must be divisible by tensor_model_parallel_size {tensor}, got "
            f"{heads}: use {_near(heads, tensor)} heads or another tensor_model_parallel_size"
        )
    groups = _kv_heads(args)
    if heads % groups:
        raise ConfigError(
            f"num_attention_heads {heads} must be divisible by num_query_groups, got {groups}: "
            f"use {_divisors(heads)}"
        )
    # With fewer groups than ranks, Megatron gives each group to several ranks.
    if groups % tensor and tensor % groups:
        allowed = ", ".join(
            str(g)
            for g in range(1, heads + 1)
            if heads % g == 0 and (g % tensor == 0 or tensor % g == 0)
        )
        raise ConfigError(
            f"num_query_groups (GQA) must be divisible by tensor_model_parallel_size {tensor} or "
            f"divide it, got {groups}: use one of {allowed} or another tensor_model_parallel_size"
        )


def _check_linear_layers(args: Any, config: ContextParallelConfig) -> None:
    if not config.has_linear_layers:
        return
    model = f"--cp-linear-model {config.linear_model}"
    heads = args.num_attention_heads
    documents = _documents(Settings(args))
    if documents is not None:
        raise ConfigError(
            f"{model} carries its state on across documents, got {documents}: leave it out"
        )
    if heads is not None and _kv_heads(args) != heads:
        raise ConfigError(
            f"{model} has no grouped queries, got num_query_groups {_kv_heads(args)} for {heads} "
            "heads: leave --group-query-attention out"
        )
    for flag in ("qk_layernorm", "qk_l2_norm", "attention_output_gate"):
        if getattr(args, flag, False):
            name = flag.replace("_", "-")
            raise ConfigError(f"{model} does not serve --{name}: leave it out")
    if Settings(args).softmax_type not in (None, "vanilla") and not config.has_softmax_layers:
        raise ConfigError(
            f"{model} has no softmax, got --softmax-type {args.softmax_type}: leave it out"
        )
    rotary = args.position_embedding_type in ("rope", "yarn")
    if rotary and not config.has_softmax_layers:
        raise ConfigError(
            f"{model} rotates nothing, got --position-embedding-type "
            f"{args.position_embedding_type}: use none or learned_absolute"
        )


def _check_documents(args: Any) -> None:
    from megatron.core import __version__ as version
    from megatron.core import utils

    flag = _documents(Settings(args))
    if flag is not None and not hasattr(utils, "flatten_batch_for_packed_sequences"):
        raise ConfigError(
            f"Megatron {version} cuts packed documents by its own layout, got {flag}: use Megatron "
            "0.19 or later"
        )


def _check_hybrid_model(args: Any, config: ContextParallelConfig) -> None:
    if len(config.algorithms) > 1 and Settings(args).hybrid_layer_pattern:
        raise ConfigError(
            f"all attention layers of a hybrid model have one algorithm, got --cp-layers "
            f"{', '.join(config.layers)} and --hybrid-layer-pattern {args.hybrid_layer_pattern}: "
            "leave one of the two out"
        )


def _check_sequence(args: Any, config: ContextParallelConfig) -> None:
    seq_length = args.seq_length or args.encoder_seq_length
    if seq_length is None:
        return
    config.check_sequence(seq_length)
    tensor = args.tensor_model_parallel_size
    local = seq_length // config.size
    if args.sequence_parallel and local % tensor:
        step = config.layout.multiple(config.size) * tensor
        raise ConfigError(
            f"--sequence-parallel needs the {local} tokens of a context-parallel rank divisible by "
            f"tensor_model_parallel_size {tensor}, got seq_length {seq_length}: "
            f"use {_near(seq_length, step)}"
        )


def _check_algorithms(args: Any, config: ContextParallelConfig) -> None:
    heads, tensor = args.num_attention_heads, args.tensor_model_parallel_size
    if heads is None:
        return
    for name in config.algorithms:
        algorithm = registry.algorithm_class(name)
        options = registry.read_options(name, dict(config.options_of(name)))
        local = heads // tensor
        if issubclass(algorithm, Algorithm):
            kv_heads = max(1, _kv_heads(args) // tensor)
            algorithm.check(options, size=config.size, heads=local, kv_heads=kv_heads, causal=True)
        else:
            algorithm.check(options, size=config.size, heads=local)


def window_of(window_size: Sequence[int] | None) -> int | None:
    """Returns how many keys a query sees, its own included; None: all.

    Args:
        window_size: Megatron's: keys to the left and to the right of the query, -1 for all.

    Raises:
        ConfigError: Keys to the right are asked for, or a number has no meaning.
    """
    if window_size is None:
        return None
    left, right = window_size
    if right != 0 or left < -1:
        raise ConfigError(
            f"--window-size needs LEFT,0 with LEFT >= 0, or -1 for all earlier tokens, got "
            f"{left},{right}: causal attention sees no later tokens, use --window-size "
            f"{max(left, -1)},0"
        )
    return None if left == -1 else left + 1


def _check_window(args: Any, config: ContextParallelConfig) -> None:
    window_size = Settings(args).window_size
    if window_of(window_size) is None:
        return
    serving = [
        name
        for name in registry.available("softmax")
        if getattr(registry.algorithm_class(name), "windows", False)
    ]
    got = f"got --window-size {','.join(map(str, window_size))}"
    if not config.has_softmax_layers:
        raise ConfigError(
            f"{config.algo} computes linear attention, which has no sliding window, {got}: "
            "leave it out"
        )
    for name in config.algorithms:
        if registry.kind_of(name) == "softmax" and name not in serving:
            raise ConfigError(
                f"{name} does not serve sliding windows, {got}: leave it out, or use "
                f"--context-parallel-algo {' or '.join(serving)}"
            )


def _check_kernel(args: Any, config: ContextParallelConfig, device: torch.device) -> str | None:
    heads, tensor = args.num_attention_heads, args.tensor_model_parallel_size
    if heads is None or args.hidden_size is None:
        return None
    head_dim, value_dim = head_dims(args)
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    local, fixed = heads // tensor, bool(args.deterministic_mode)
    if registry.kind_of(config.algo) == "linear":
        # Linearized positions double the features of q and k.
        features = head_dim * (2 if config.linear_model == "transnormer" else 1)
        linear = LinearProblem(device, dtype, local, features, head_dim, fixed)
        return resolve_linear(config.kernel, linear).name
    kv_heads = max(1, _kv_heads(args) // tensor)
    packed = _documents(Settings(args)) is not None
    shape = device, dtype, local, kv_heads, head_dim
    problem = Problem(*shape, fixed, documents=packed, value_dim=value_dim)
    return resolve(config.kernel, problem).name


def head_dims(args: Any) -> tuple[int, int]:
    """Returns the head dim of q and k, and that of v.

    Args:
        args: Megatron's namespace, as parsed or validated, with the size of the model in it.
    """
    if _latent(Settings(args)):
        return args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    head_dim = args.kv_channels or args.hidden_size // args.num_attention_heads
    return head_dim, head_dim


def _kv_heads(args: Any) -> int:
    """Returns the number of KV heads of the whole model; Megatron ignores it without the switch."""
    grouped = args.group_query_attention and args.num_query_groups
    return int(args.num_query_groups if grouped else args.num_attention_heads)


def _near(value: int, step: int) -> str:
    below = value - value % step
    return f"{below} or {below + step}" if below else str(step)


def _divisors(value: int) -> str:
    return ", ".join(str(d) for d in range(1, value + 1) if value % d == 0)


def describe(config: ContextParallelConfig, kernel: str | None) -> str:
    """Returns one line that says what is in force; `kernel` is what `check_arguments` gave."""
    chosen = f" ({kernel})" if config.kernel == "auto" and kernel else ""
    options = " ".join(f"{name}={value}" for name, value in config.options)
    layers = f", layers {', '.join(config.layers)}" if config.layers else ""
    model = f", linear attention of {config.linear_model}" if config.linear_model else ""
    return (
        f"context parallelism by {config.algo}{' ' + options if options else ''} on "
        f"{config.size} rank(s), {config.layout.name} layout, "
        f"kernel {config.kernel}{chosen}{layers}{model}"
    )
