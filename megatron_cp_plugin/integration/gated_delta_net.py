"""Megatron's gated delta net layers next to softmax attention of the plugin.

They keep Megatron's own context parallelism: it exchanges tokens for heads, and puts the chunks of
Megatron's zigzag layout in order. So the run must have that layout.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.layout import Zigzag
from megatron_cp_plugin.errors import ConfigError, near_multiples
from megatron_cp_plugin.layers import layout_choices

# The second is its name after Megatron 0.19.
VARIANTS = ("gated_delta_net", "gdn")


def is_asked(settings: Any) -> bool:
    """Whether Megatron's arguments or model configuration ask for such layers."""
    return getattr(settings, "experimental_attention_variant", None) in VARIANTS


def is_layer(module: Any) -> bool:
    """Whether a module, or the class of one, is such a layer's attention."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    kind = module if isinstance(module, type) else type(module)
    return issubclass(kind, GatedDeltaNet)


def check_arguments(args: Any, config: ContextParallelConfig) -> None:
    """Checks Megatron's arguments as parsed; for what Megatron would say later, or never.

    Args:
        args: Megatron's namespace.
        config: The run's configuration.

    Raises:
        ConfigError: The layers cannot be had, or not split so.
    """
    if not is_asked(args):
        return
    check_layout(config)
    _check_heads(args, config.size)
    _check_model(args)
    _check_installed(config.size)


def describe(args: Any) -> str | None:
    """Returns one line on who splits such layers; None if there are none."""
    if not is_asked(args):
        return None
    return "gated delta net layers: Megatron's own all-to-all, run again by recompute"


def check_layout(config: ContextParallelConfig) -> None:
    """Raises: ConfigError if tokens are not where these layers take them to be."""
    if config.has_linear_layers:
        raise ConfigError(
            "gated delta net layers need softmax attention beside them, got --cp-linear-model "
            f"{config.linear_model}: leave it or --experimental-attention-variant out"
        )
    layout = config.layout.name
    if config.size == 1 or layout == Zigzag.name:
        return
    default = [
        name
        for name in registry.available("softmax")
        if registry.layout_of(name, {}).name == Zigzag.name
    ]
    choices = [f"--context-parallel-algo {' or '.join(default)}"]
    choices[:0] = [
        f"--cp-options {option}={choice}"
        for found, option, choice in layout_choices(config.algo)
        if found == Zigzag.name
    ]
    raise ConfigError(
        f"Megatron splits gated delta net layers by its own {Zigzag.name} layout, got the {layout} "
        f"layout of {config.algo}: use {', or '.join(choices)}"
    )


def has_layers(model: nn.Module) -> bool:
    """Whether such layers are in a model."""
    return any(map(is_layer, model.modules()))


def _check_model(args: Any) -> None:
    given = f"--experimental-attention-variant {args.experimental_attention_variant}"
    pattern = args.linear_attention_freq
    if pattern is None:
        raise ConfigError(
            f"{given} needs --linear-attention-freq, got none: add --linear-attention-freq 4 for "
            "softmax attention in every fourth layer"
        )
    if isinstance(pattern, list) and len(pattern) != args.num_layers:
        raise ConfigError(
            f"--linear-attention-freq as a list needs an entry for each of the {args.num_layers} "
            f"layers, got {len(pattern)}: use a number, or a list of {args.num_layers}"
        )
    if args.transformer_impl == "local" and args.spec is None:
        raise ConfigError(
            f"Megatron builds the layers of {given} from Transformer Engine's modules, got "
            "--transformer-impl local: use transformer_engine, or pass layers of your own by "
            "--spec"
        )
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise ConfigError(
            f"{given} needs --sequence-parallel, without which Megatron does not sum the gradients "
            "of the layers' output norms over the tensor-parallel ranks, got "
            f"tensor_model_parallel_size {args.tensor_model_parallel_size}: add --sequence-parallel"
        )


def _check_heads(args: Any, size: int) -> None:
    keys, values = args.linear_num_key_heads, args.linear_num_value_heads
    tensor = args.tensor_model_parallel_size
    ranks = tensor * size
    for name, heads in (("linear_num_key_heads", keys), ("linear_num_value_heads", values)):
        if heads % ranks:
            raise ConfigError(
                f"gated delta net layers need {name} divisible by tensor_model_parallel_size * "
                f"context_parallel_size = {ranks}, got {heads}: use "
                f"{near_multiples(heads, ranks)}, or fewer ranks"
            )
    if values % keys:
        raise ConfigError(
            f"gated delta net layers need linear_num_value_heads divisible by linear_num_key_heads "
            f"{keys}, got {values}: use {near_multiples(values, keys)}"
        )


def _check_installed(size: int) -> None:
    from megatron.core import __version__ as version
    from megatron.core.ssm import gated_delta_net

    # Before 0.18 it does not split them; 0.18 does, but its layers hand them an argument, this one,
    # that they do not take.
    if size > 1 and "cp_comm_type" not in signature(gated_delta_net.GatedDeltaNet).parameters:
        raise ConfigError(
            f"Megatron {version} cannot split gated delta net layers, got context_parallel_size "
            f"{size}: use Megatron 0.19 or later"
        )
    if not gated_delta_net.HAVE_FLA:
        raise ConfigError(
            "gated delta net layers need flash-linear-attention, got none: "
            "pip install flash-linear-attention"
        )
