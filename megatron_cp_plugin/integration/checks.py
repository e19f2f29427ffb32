"""Checks a run's arguments before training starts, and says what they come to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.kernel import Problem, SoftmaxKernel
from megatron_cp_plugin.core.linear.kernel import LinearKernel, LinearProblem
from megatron_cp_plugin.integration.rules import check, replaced
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.kernels import resolve
from megatron_cp_plugin.kernels.linear import resolve_linear
from megatron_cp_plugin.kernels.selfcheck import check_kernel


def check_arguments(args: Any, config: ContextParallelConfig, device: torch.device) -> str | None:
    """Checks Megatron's arguments as parsed, before Megatron validates them.

    Returns: the name of the attention kernel; None where the arguments do not say enough, or no
    GPU of the run is here.
    """
    settings = Settings(args, config, device)
    config.layout  # noqa: B018  (an unknown algorithm or option is the first thing to say)
    config.check_layers()
    check("sizes", settings)
    if settings.tokens is not None:
        config.check_sequence(settings.tokens)
    if settings.num_attention_heads is not None:  # else nobody knows what ranks are to split
        heads, kv_heads = settings.split_heads
        for name in config.algorithms:
            algorithm = registry.algorithm_class(name)
            options = registry.read_options(name, dict(config.options_of(name)))
            algorithm.check(options, size=config.size, heads=heads, kv_heads=kv_heads, causal=True)
    check("arguments", settings)
    return _check_kernel(settings)


def _check_kernel(settings: Settings) -> str | None:
    unknown = settings.num_attention_heads is None or settings.hidden_size is None
    if unknown or settings.runs_elsewhere:
        return None
    config, device, dtype = settings.cp, settings.device, settings.dtype
    head_dim, value_dim = settings.head_dims
    heads, kv_heads = settings.split_heads
    fixed, packed = bool(settings.deterministic_mode), settings.packing is not None
    kernel: SoftmaxKernel | LinearKernel
    problem: Problem | LinearProblem
    if registry.kind_of(config.algo) == "linear":
        features = config.features(head_dim)
        problem = LinearProblem(device, dtype, heads, features, head_dim, fixed, packed)
        kernel = resolve_linear(config.kernel, problem)
    else:
        shape, windowed = (heads, kv_heads, head_dim), settings.window is not None
        more: dict[str, Any] = {"documents": packed, "value_dim": value_dim, "windows": windowed}
        problem = Problem(device, dtype, *shape, fixed, **more)
        kernel = resolve(config.kernel, problem)
    if device.type == "cuda":
        with torch.cuda.device(device):
            check_kernel(kernel, problem)
    return kernel.name


def used_features(settings: Settings, kernel: str | None) -> Iterator[str | None]:
    """Returns lines on what a run uses, None for what it does not."""
    yield describe(settings.cp, kernel)
    yield describe_heads(settings)
    yield describe_recompute(settings)
    yield from replaced("arguments", settings)


def describe_heads(settings: Settings) -> str | None:
    """Returns one line on heads of zeros that fill up those that ranks cannot split; None: none."""
    if settings.num_attention_heads is None:
        return None
    config, (heads, kv_heads) = settings.cp, settings.split_heads
    shape = Shape(1, 1, heads, kv_heads, 1)
    topology = VirtualWorld(config.size).topology(0)
    filled = []
    for name in config.algorithms:
        if issubclass(registry.algorithm_class(name), Algorithm):
            algorithm = registry.create(name, topology, dict(config.options_of(name)))
            if (computed := algorithm.computed(shape).heads) != heads:
                filled.append(
                    f"{name} computes {computed} query heads instead of {heads}: zero heads are "
                    "added so that the ranks can split them"
                )
    return "; ".join(filled) or None


def describe_recompute(settings: Settings) -> str | None:
    """Returns one line on what is kept and how much memory it takes; None: Megatron recomputes no
    attention.
    """
    s, granularity = settings, settings.recomputes
    if granularity is None:
        return None
    if s.cp.recompute_attention:
        return f"recompute ({granularity}): attention and its communication run twice"
    if None in (s.seq_length, s.num_attention_heads, s.hidden_size):
        return f"recompute ({granularity}): attention runs once, its output and lse are kept"
    heads, _ = s.split_heads
    tokens = s.samples * s.seq_length // s.cp.size
    # out [B,S,H,E] in the model's dtype, lse [B,H,S] in float32.
    row_bytes = s.head_dims[1] * s.dtype.itemsize + 4
    return (
        f"recompute ({granularity}): attention runs once, its output and lse are kept, "
        f"{tokens * heads * row_bytes / 2**20:.3g} MiB for each layer and micro-batch, on the host "
        "while the GPU is short of memory; --cp-recompute-attention runs it twice instead"
    )


def describe_graphs(settings: Settings) -> str | None:
    """Returns one line on what is captured in CUDA graphs; None: nothing."""
    captured = settings.graphs
    if captured == "none":
        return None
    if captured == "full_iteration":
        what = f"whole iterations after {settings.cuda_graph_warmup_steps}"
    else:
        modules = settings.captured_modules
        what = f"of each layer {', '.join(modules)}" if modules else "whole layers"
    attention = "captured" if settings.captures_attention else "not captured"
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
