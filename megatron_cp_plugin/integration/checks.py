"""Checks a run's settings before training starts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.kernel import Problem
from megatron_cp_plugin.core.layout import Zigzag
from megatron_cp_plugin.core.layouts.document_layout import Balanced
from megatron_cp_plugin.core.linear.kernel import LinearProblem
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.errors import ConfigError, near_multiples
from megatron_cp_plugin.integration import chunked_loss, gated_delta_net
from megatron_cp_plugin.integration.compat import running_version
from megatron_cp_plugin.integration.features import (
    FEATURES,
    Settings,
    captured_modules,
    captures_attention,
    graphs,
    is_latent,
    packs_documents,
)
from megatron_cp_plugin.kernels import resolve
from megatron_cp_plugin.kernels.linear import resolve_linear
from megatron_cp_plugin.kernels.selfcheck import check_kernel, check_linear_kernel


def check_settings(source: Any, config: ContextParallelConfig) -> None:
    """Refuses what no algorithm serves.

    Args:
        source: Megatron's arguments or model configuration.
        config: The run's configuration.

    Raises:
        ConfigError: One of `FEATURES` is asked for, multi-latent attention of an algorithm of
            linear attention, or what does not go with `--cp-chunked-loss`.
    """
    settings = Settings(source)
    for feature in FEATURES:
        if feature.asked(settings):
            value = getattr(settings, feature.setting)
            got = getattr(value, "name", value)
            raise ConfigError(
                f"--context-parallel-algo {config.algo} does not support {feature.name}, got "
                f"{feature.flag} {got} ({feature.reason}): {feature.instead}"
            )
    if config.chunked_loss is not None:
        chunked_loss.check(settings)
    if is_latent(settings) and config.has_linear_layers:
        raise ConfigError(
            f"--cp-linear-model {config.linear_model} cannot be combined with multi-latent "
            "attention, got --multi-latent-attention: leave it out, or use softmax attention in "
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
    check_sizes(args)
    _check_linear_layers(args, config)
    _check_hybrid_model(args, config)
    check_settings(args, config)
    gated_delta_net.check_arguments(args, config)
    _check_documents(args)
    _check_kept_logits(args, config)
    _check_sharding(args, config)
    _check_sequence(args, config)
    _check_algorithms(args, config)
    _check_window(args, config)
    check_graphs(args, config, device)
    return _check_kernel(args, config, device)


def check_sizes(args: Any) -> None:
    """Checks what does not depend on the algorithm: numbers of ranks and of heads.

    Args:
        args: Megatron's namespace, as parsed.

    Raises:
        ConfigError: They do not divide each other.
    """
    _check_world(args)
    _check_order(args)
    _check_heads(args)


def check_steps(args: Any) -> None:
    """Checks that there is something to train, where a script trains.

    Args:
        args: Megatron's namespace, validated.

    Raises:
        ConfigError: There are no steps.
    """
    settings = Settings(args)
    given = {"--train-iters": settings.train_iters, "--train-samples": settings.train_samples}
    if not settings.skip_train and all((count or 0) < 1 for count in given.values()):
        got = " ".join(f"{flag} {count}" for flag, count in given.items() if count is not None)
        raise ConfigError(
            "training needs --train-iters or --train-samples of 1 or more, got "
            f"{got or 'neither'}: add --train-iters 1, or --skip-train to evaluate only"
        )


def check_stack(args: Any) -> None:
    """Checks that the layers of a hybrid model are installed.

    Args:
        args: Megatron's namespace, as parsed.

    Raises:
        ConfigError: They are Transformer Engine's, as in all stacks of Megatron's own, and it is
            not there.
    """
    settings = Settings(args)
    spec = (settings.spec or ("megatron.core.models.hybrid",))[0]
    if (
        settings.hybrid_layer_pattern
        and spec.startswith("megatron.core.models.")
        and find_spec("transformer_engine") is None
    ):
        raise ConfigError(
            "Megatron's hybrid models have layers of Transformer Engine, which is not installed, "
            f"got --hybrid-layer-pattern {settings.hybrid_layer_pattern}: install it, or name a "
            "stack of other layers with --spec"
        )


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
        f"an interleaved pipeline of {stages} stages needs micro-batches divisible by its "
        f"group size {group}, and a group size of at least {stages}, got {count} micro-batches: "
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


def _check_order(args: Any) -> None:
    """Megatron has no such order of the ranks where those of experts are grouped otherwise."""
    settings = Settings(args)
    if not settings.use_tp_pp_dp_mapping or args.pipeline_model_parallel_size == 1:
        return
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    experts = settings.expert_model_parallel_size or 1
    of_experts = experts * (settings.expert_tensor_parallel_size or tensor)
    if of_experts != tensor * context:
        raise ConfigError(
            "--use-tp-pp-dp-mapping in a pipeline needs expert tensor parallel * expert "
            f"parallel = tensor parallel * context parallel = {tensor * context}, got "
            f"{of_experts}: leave it out"
        )


def _check_heads(args: Any) -> None:
    heads, tensor = args.num_attention_heads, args.tensor_model_parallel_size
    if heads is None:
        return
    if heads % tensor:
        ranks = args.world_size // args.context_parallel_size // args.pipeline_model_parallel_size
        usable = [str(n) for n in range(1, heads + 1) if heads % n == 0 and ranks % n == 0]
        raise ConfigError(
            f"num_attention_heads must be divisible by tensor_model_parallel_size {tensor}, got "
            f"{heads}: use tensor_model_parallel_size {' or '.join(usable)}"
        )
    groups = kv_heads_of(args)
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
    if heads is not None and kv_heads_of(args) != heads:
        raise ConfigError(
            f"{model} has no grouped-query attention, got num_query_groups {kv_heads_of(args)} "
            f"for {heads} heads: leave --group-query-attention out"
        )
    for flag in ("qk_layernorm", "qk_l2_norm", "attention_output_gate"):
        if getattr(args, flag, False):
            name = flag.replace("_", "-")
            raise ConfigError(f"{model} does not support --{name}: leave it out")
    if Settings(args).softmax_type not in (None, "vanilla") and not config.has_softmax_layers:
        raise ConfigError(
            f"{model} has no softmax, got --softmax-type {args.softmax_type}: leave it out"
        )
    rotary = args.position_embedding_type in ("rope", "yarn")
    if rotary and not config.has_softmax_layers:
        raise ConfigError(
            f"{model} has no rotary embeddings, got --position-embedding-type "
            f"{args.position_embedding_type}: use none or learned_absolute"
        )


def _check_documents(args: Any) -> None:
    from megatron.core import __version__ as version
    from megatron.core import utils

    flag = packs_documents(Settings(args))
    if flag is not None and not hasattr(utils, "flatten_batch_for_packed_sequences"):
        raise ConfigError(
            f"Megatron {version} splits packed documents by its own layout, got {flag}: use "
            "Megatron 0.19 or later"
        )


def _check_kept_logits(args: Any, config: ContextParallelConfig) -> None:
    """Refuses orders of a rank's tokens that another run need not have.

    Megatron's files of log-probabilities have them by rank, and do not say in which order.
    """
    settings, packed = Settings(args), packs_documents(Settings(args))
    for name in ("logits_save_dir", "logits_load_dir"):
        if not getattr(settings, name) or config.size == 1:
            continue
        does = (
            f"--{name.replace('_', '-')} stores log-probabilities in the order of a rank's "
            "tokens, which needs to be Megatron's zigzag layout in all runs"
        )
        if packed:
            raise ConfigError(
                f"{does} without packed documents, got {packed}: leave one of the two out"
            )
        if not isinstance(config.layout, Zigzag):
            raise ConfigError(
                f"{does}, got {config.algo} with the {config.layout.name} layout: use "
                "--context-parallel-algo zigzag"
            )


def _check_sharding(args: Any, config: ContextParallelConfig) -> None:
    if not Settings(args).use_megatron_fsdp:
        return
    tensor = args.tensor_model_parallel_size
    if config.has_linear_layers and tensor > 1:
        raise ConfigError(
            f"--cp-linear-model {config.linear_model} with tensor parallelism does not work "
            "with --use-megatron-fsdp (which recognizes split parameters by the names of "
            f"Megatron's own classes), got tensor_model_parallel_size {tensor}: use "
            "--use-torch-fsdp2"
        )
    if find_spec("einops") is None:
        raise ConfigError(
            "--use-megatron-fsdp needs the package einops, got none: pip install einops, or use "
            "--use-torch-fsdp2"
        )


def _check_hybrid_model(args: Any, config: ContextParallelConfig) -> None:
    if len(config.algorithms) > 1 and Settings(args).hybrid_layer_pattern:
        raise ConfigError(
            "all attention layers of a hybrid model need the same algorithm, got --cp-layers "
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
            f"use {near_multiples(seq_length, step)}"
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
            kv_heads = max(1, kv_heads_of(args) // tensor)
            algorithm.check(options, size=config.size, heads=local, kv_heads=kv_heads, causal=True)
        else:
            algorithm.check(options, size=config.size, heads=local)


def window_of(window_size: Sequence[int] | None) -> int | None:
    """Returns how many keys a query sees, its own included; None: all.

    Args:
        window_size: Megatron's: keys to the left and to the right of the query, -1 for all.

    Raises:
        ConfigError: They are not two, keys to the right are asked for, or a number has no
            meaning.
    """
    if window_size is None:
        return None
    if len(window_size) != 2:
        last = window_size[0] - 1
        raise ConfigError(
            "--window-size takes two numbers, LEFT,0, got "
            f"{','.join(map(str, window_size))}: use --window-size {max(last, 0)},0, in which a "
            "token sees itself and the LEFT tokens before it"
        )
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
                f"{name} does not support sliding windows, {got}: leave it out, or use "
                f"--context-parallel-algo {' or '.join(serving)}"
            )


def _check_kernel(args: Any, config: ContextParallelConfig, device: torch.device) -> str | None:
    heads, tensor = args.num_attention_heads, args.tensor_model_parallel_size
    if heads is None or args.hidden_size is None:
        return None
    head_dim, value_dim = head_dims(args)
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    local, fixed = heads // tensor, bool(args.deterministic_mode)
    packed = packs_documents(Settings(args)) is not None
    if registry.kind_of(config.algo) == "linear":
        # Linearized positions double the features of q and k.
        features = head_dim * (2 if config.linear_model == "transnormer" else 1)
        linear = LinearProblem(device, dtype, local, features, head_dim, fixed, packed)
        recurrent = resolve_linear(config.kernel, linear)
        if device.type == "cuda":
            with torch.cuda.device(device):
                check_linear_kernel(recurrent, linear)
        return recurrent.name
    kv_heads = max(1, kv_heads_of(args) // tensor)
    shape = device, dtype, local, kv_heads, head_dim
    windowed = window_of(Settings(args).window_size) is not None
    problem = Problem(*shape, fixed, documents=packed, value_dim=value_dim, windows=windowed)
    kernel = resolve(config.kernel, problem)
    if device.type == "cuda":
        with torch.cuda.device(device):
            check_kernel(kernel, problem)
    return kernel.name


def head_dims(args: Any) -> tuple[int, int]:
    """Returns the head dim of q and k, and that of v.

    Args:
        args: Megatron's namespace, as parsed or validated, with the size of the model in it.
    """
    if is_latent(Settings(args)):
        return args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    head_dim = args.kv_channels or args.hidden_size // args.num_attention_heads
    return head_dim, head_dim


def kv_heads_of(args: Any) -> int:
    """Returns the number of KV heads of the whole model; Megatron ignores it without the switch.

    Args:
        args: Megatron's namespace, with the number of query heads in it.
    """
    grouped = args.group_query_attention and args.num_query_groups
    return int(args.num_query_groups if grouped else args.num_attention_heads)


def _divisors(value: int) -> str:
    return ", ".join(str(d) for d in range(1, value + 1) if value % d == 0)


def describe_window(args: Any) -> str | None:
    """Returns one line on sliding windows; None if there are none."""
    window = window_of(Settings(args).window_size)
    if window is None:
        return None
    return f"sliding windows of {window} tokens: a token sees itself and the {window - 1} before it"


def describe_heads(args: Any, config: ContextParallelConfig) -> str | None:
    """Returns one line on heads of zeros that fill up those that ranks cannot split; None: none.

    Args:
        args: Megatron's namespace, as parsed and checked.
        config: The run's configuration.
    """
    heads, tensor = args.num_attention_heads, args.tensor_model_parallel_size
    if heads is None:
        return None
    shape = Shape(1, 1, heads // tensor, max(1, kv_heads_of(args) // tensor), 1)
    topology = VirtualWorld(config.size).topology(0)
    filled = []
    for name in config.algorithms:
        if issubclass(registry.algorithm_class(name), Algorithm):
            algorithm = registry.create(name, topology, dict(config.options_of(name)))
            if (computed := algorithm.computed(shape).heads) != shape.heads:
                filled.append(
                    f"{name} computes {computed} query heads instead of {shape.heads}: zero "
                    "heads are added so that the ranks can split them"
                )
    return "; ".join(filled) or None


def check_graphs(args: Any, config: ContextParallelConfig, device: torch.device) -> None:
    """Checks what is to be captured in CUDA graphs.

    Args:
        args: Megatron's namespace, as parsed.
        config: The run's configuration.
        device: Where the run computes.

    Raises:
        ConfigError: It cannot be.
    """
    captured = graphs(Settings(args))
    if captured == "none":
        return
    version, text = running_version()
    if version < (0, 19):
        raise ConfigError(
            f"--cuda-graph-impl {captured} needs Megatron 0.19 or later, got {text}: leave it out"
        )
    if device.type != "cuda":
        raise ConfigError(
            f"--cuda-graph-impl {captured} needs GPUs, got the {device.type} platform: leave it out"
        )
    # None: Megatron has yet to read it from another flag.
    if captured == "transformer_engine" and (args.seq_length or 0) % config.size:
        raise ConfigError(
            "--cuda-graph-impl transformer_engine needs equally many tokens on all ranks, got "
            f"seq_length {args.seq_length} on {config.size}: use a multiple of {config.size}, or "
            "--cuda-graph-impl local"
        )
    if isinstance(config.layout, Balanced):
        raise ConfigError(
            f"--cuda-graph-impl {captured} needs the same layout for all batches, got one that "
            f"follows documents: leave the option layout=documents or --cuda-graph-impl out"
        )


def describe_graphs(args: Any) -> str | None:
    """Returns one line on what is captured in CUDA graphs; None: nothing.

    Args:
        args: Megatron's namespace, validated.
    """
    settings = Settings(args)
    captured = graphs(settings)
    if captured == "none":
        return None
    if captured == "full_iteration":
        what = f"whole iterations after {settings.cuda_graph_warmup_steps}"
    else:
        modules = captured_modules(settings)
        what = f"of each layer {', '.join(modules)}" if modules else "whole layers"
    attention = "captured" if captures_attention(settings) else "not captured"
    return f"CUDA graphs by Megatron ({captured}, {what}): attention {attention}"


def describe(config: ContextParallelConfig, kernel: str | None) -> str:
    """Returns one line that says what is used; `kernel` is what `check_arguments` gave."""
    chosen = f" ({kernel})" if config.kernel == "auto" and kernel else ""
    options = " ".join(f"{name}={value}" for name, value in config.options)
    layers = f", layers {', '.join(config.layers)}" if config.layers else ""
    model = f", linear attention of {config.linear_model}" if config.linear_model else ""
    loss = f", loss in chunks of {config.chunked_loss} tokens" if config.chunked_loss else ""
    return (
        f"context parallelism by {config.algo}{' ' + options if options else ''} on "
        f"{config.size} rank(s), {config.layout.name} layout, "
        f"kernel {config.kernel}{chosen}{layers}{model}{loss}"
    )
