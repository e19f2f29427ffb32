"""Creates the process groups of context parallelism at set-up, as Megatron does its own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.integration.latent_attention import shape_of_latents
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.settings import Settings


def set_up_groups(
    runtime: Runtime, args: Any | None, config: TransformerConfig, groups: Any, *, recurrent: bool
) -> None:
    """Makes all process groups that the run's algorithms need, by all ranks of the job.

    Raises:
        ConfigError: The model is configured for another number of context-parallel ranks.
    """
    own = parallel_state.get_context_parallel_group() if groups is None else groups.cp
    if config.context_parallel_size != own.size():
        raise ConfigError(
            "a model's context_parallel_size must be the size of its context-parallel group, "
            f"{own.size()}, got {config.context_parallel_size}: set it in the model's "
            "configuration before the model is built"
        )
    settings = Settings(config)
    sizes = shape_of_latents if runtime.config.send_latents else Settings.shape
    for group in (own, *_dynamic(settings)):
        shape = sizes(settings, runtime.config.layout.multiple(group.size()))
        runtime.set_up(group, shape, _new_group(args), recurrent=recurrent or settings.is_gated)


def _dynamic(settings: Settings) -> list[Any]:
    """Groups of data- and context-parallel ranks of which a micro-batch may have one, by size."""
    groups: dict[int, Any] = {}
    for name in ("_HYBRID_DP_CP_GROUPS", "_DYNAMIC_DP_CP_GROUPS"):  # the second one after 0.20
        groups |= getattr(parallel_state, name, {})
    # Of two ranks Megatron makes no further groups; verl sets groups up, but not the model.
    if not (groups or settings.hybrid_context_parallel or settings.dynamic_context_parallel):
        return []
    full = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return [*(groups[size] for size in sorted(groups)), full]


def _new_group(args: Any | None) -> Callable[[list[int]], object]:
    """Makes a group with the timeout and the NCCL options that context-parallel groups have."""
    options: dict[str, dict[str, Any]] = {}
    if args is None:
        return lambda ranks: parallel_state.create_group(ranks, group_desc="CONTEXT_PARALLEL_GROUP")
    if args.nccl_communicator_config_path is not None:
        text = Path(args.nccl_communicator_config_path).read_text()
        options = yaml.safe_load(text) or {}
    if "cp" in (Settings(args).high_priority_stream_groups or ()):
        options.setdefault("cp", {})["is_high_priority_stream"] = True
    timeout = timedelta(minutes=args.distributed_timeout_minutes)

    def new_group(ranks: list[int]) -> object:
        # Megatron keeps a list of the groups whose timeouts it changes after the first step. Torch
        # changes the options of a group, so that each needs its own.
        return parallel_state.create_group(
            ranks,
            timeout=timeout,
            pg_options=parallel_state.get_nccl_options("cp", options),
            group_desc="CONTEXT_PARALLEL_GROUP",
        )

    return new_group
