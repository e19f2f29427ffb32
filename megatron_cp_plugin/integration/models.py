"""Builds a Megatron model with the plugin's attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from megatron_cp_plugin.integration.groups import set_up_groups
from megatron_cp_plugin.integration.rope import use_layout
from megatron_cp_plugin.integration.rules import check_settings
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.spec import with_multi_token, with_plugin


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
