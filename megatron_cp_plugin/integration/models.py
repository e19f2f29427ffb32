"""Builds a Megatron model with the plugin's attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.checks import check_settings
from megatron_cp_plugin.integration.groups import set_up_groups
from megatron_cp_plugin.integration.rope import use_layout
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.spec import with_multi_token, with_plugin
from megatron_cp_plugin.registry import AUTO


def build_model(
    original: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    runtime: Runtime,
    settings: Any | None,
) -> Any:
    """Calls the constructor of GPTModel or HybridModel with the plugin's attention in the spec.

    Args:
        original: Megatron's constructor.
        args: Its arguments, the model first.
        kwargs: The others.
        runtime: The run's layout and algorithms.
        settings: Megatron's namespace, validated; None where there is none.

    Returns:
        The model, whose position embeddings follow the layout. What it is given is not looked at.

    Raises:
        ContextParallelError: The model asks for what the algorithms do not serve.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    model, config = call.args[0], call.arguments["config"]
    check_settings(config, runtime.config)
    check_comm_type(config, runtime)
    given = call.arguments
    set_up_groups(runtime, settings, config, given.get("pg_collection"))
    name = "hybrid_stack_spec" if "hybrid_stack_spec" in given else "transformer_layer_spec"
    given[name] = with_plugin(given[name], config, given.get("vp_stage"), runtime)
    if given.get("mtp_block_spec") is not None:
        given["mtp_block_spec"] = with_multi_token(given["mtp_block_spec"], config, runtime)
    original(*call.args, **call.kwargs)
    pattern = getattr(model, "hybrid_layer_pattern", None)
    check_settings(SimpleNamespace(hybrid_layer_pattern=pattern), runtime.config)
    use_layout(model, runtime)
    return model


def comm_type(algo: str) -> str:
    """What model configurations say that the plugin serves.

    Transformer Engine refuses it, so that its own context parallelism never takes the place of ours
    where such a configuration reaches a process without the plugin installed.
    """
    return f"megatron_cp_plugin.{algo}"


def check_comm_type(config: Any, runtime: Runtime) -> None:
    """Checks that a model's configuration does not ask for another algorithm.

    Raises:
        ContextParallelError: It does, by Transformer Engine's name of it.
    """
    served = {comm_type(runtime.config.algo)}
    if runtime.config.by_auto:
        served.add(comm_type(AUTO))
    if config.cp_comm_type not in (None, "p2p", *served):  # p2p: the default
        raise ContextParallelError(
            f"the script sets cp_comm_type {config.cp_comm_type} by itself, which would be "
            "ignored: give --cp-comm-type on the command line"
        )
