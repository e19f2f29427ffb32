"""The few names of Megatron that are replaced, so that an unmodified training script is served.

Installed by the launcher only when an algorithm of the plugin is chosen. Everything else goes
through Megatron's own seams: a layer spec provider and a hook on the model configuration.
"""

from __future__ import annotations

import functools
import importlib.util
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration.args import PluginFlags
from megatron_cp_plugin.integration.runtime import Runtime


class Hooks:
    """Serves one process's run. Replaces, wherever scripts import them from:

    - `validate_args`: checks Megatron's arguments and makes the runtime;
    - `pretrain`: puts the plugin's attention and position embeddings into the model;
    - `get_batch_on_this_cp_rank`: cuts batches by the layout;
    - `forward_step_calc_loss`: takes the mean loss over the whole sequence;
    - `checkpoint`: keeps attention from running again in the backward.
    """

    def __init__(self, flags: PluginFlags, device: torch.device) -> None:
        self._flags = flags
        self._device = device
        self._runtime: Runtime | None = None

    def install(self) -> None:
        """Puts the hooks in force; call before the training script imports the names."""
        import megatron.core.pipeline_parallel.schedules
        import megatron.core.utils
        import megatron.training
        import megatron.training.arguments
        import megatron.training.training

        from megatron_cp_plugin.integration.loss import forward_step_calc_loss

        replace = _replace
        replace(self._validate_args, "validate_args", megatron.training.arguments)
        replace(self._pretrain, "pretrain", megatron.training.training, megatron.training)
        replace(
            self._get_batch,
            "get_batch_on_this_cp_rank",
            megatron.core.utils,
            megatron.training.training,
        )
        schedules = megatron.core.pipeline_parallel.schedules
        replace(forward_step_calc_loss, "forward_step_calc_loss", schedules)
        if not self._flags.recompute_attention:
            self._install_recompute()

    def _install_recompute(self) -> None:
        import megatron.core.recompute
        import megatron.core.tensor_parallel.random

        from megatron_cp_plugin.integration.recompute import checkpoint

        tensor_parallel = megatron.core.tensor_parallel
        _replace(checkpoint, "checkpoint", tensor_parallel.random, tensor_parallel)
        if megatron.core.recompute.te_checkpoint is not None:
            # What Megatron uses with FP8 and FP4; it is imported by name.
            _replace(checkpoint, "te_checkpoint", megatron.core.recompute)

    def _validate_args(self, original: Callable[..., Any], args: Any, defaults: Any = None) -> Any:
        from megatron_cp_plugin.integration.checks import (
            check_arguments,
            check_interleaving,
            describe,
        )
        from megatron_cp_plugin.integration.recompute import describe as describe_recompute

        self._flags.comm_type.check_model(args)
        config = self._flags.config(args.context_parallel_size)
        kernel = check_arguments(args, config, self._device)
        self._runtime = Runtime(config)
        if args.rank == 0:
            for line in filter(None, (describe(config, kernel), describe_recompute(args, config))):
                print(f"megatron_cp_plugin: {line}", flush=True)
        # Recorded in checkpoints and in Megatron's list of arguments.
        args.context_parallel_algo = config.algo
        args.cp_kernel = config.kernel
        args.cp_options = [f"{name}={value}" for name, value in config.options]
        args.cp_layers = ", ".join(config.layers) or None
        args.cp_linear_model = config.linear_model
        # The mask follows from the layout; Megatron would build one of N x N tokens.
        args.create_attention_mask_in_dataloader = False
        if args.seq_length is not None and args.seq_length % (2 * config.size):
            # Megatron demands a multiple of 2P of --seq-length, for its zigzag layout, but not of
            # --encoder-seq-length, its other name for the same quantity. The layout was checked.
            args.seq_length, args.encoder_seq_length = None, args.seq_length
        with _refusals_in_one_line():
            validated = original(args, {} if defaults is None else defaults)
        check_interleaving(validated)
        return validated

    def _pretrain(
        self, original: Callable[..., Any], cfg_container: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from megatron.training.models.gpt import GPTModelConfig

        from megatron_cp_plugin.integration.checks import check_settings
        from megatron_cp_plugin.integration.rope import use_layout
        from megatron_cp_plugin.integration.spec import layer_spec_provider

        model = getattr(cfg_container, "model", None)
        if not isinstance(model, GPTModelConfig) or self._runtime is None:
            raise ContextParallelError(
                f"--context-parallel-algo {self._flags.algo} needs a script that calls "
                "parse_and_validate_args and passes a GPTModelConfig to pretrain, got "
                f"{type(model).__name__}: use a pretrain_gpt.py of Megatron-LM 0.19"
            )
        check_settings(model, self._runtime.config)
        if model.cp_comm_type not in (None, "p2p"):  # Megatron's default
            raise ContextParallelError(
                f"the script sets cp_comm_type {model.cp_comm_type} by itself, which would be "
                "ignored: give --cp-comm-type on the command line"
            )
        base = model.transformer_layer_spec
        model.transformer_layer_spec = layer_spec_provider(base, self._runtime)
        model.pre_wrap_hooks.append(functools.partial(use_layout, runtime=self._runtime))
        return original(cfg_container, *args, **kwargs)

    def _get_batch(
        self,
        original: Callable[..., Any],
        batch: dict[str, Any],
        is_hybrid_cp: bool = False,
        cp_group: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        from megatron.core import parallel_state

        from megatron_cp_plugin.integration.batch import shard_batch

        assert self._runtime is not None
        group = parallel_state.get_context_parallel_group() if cp_group is None else cp_group
        return shard_batch(batch, group, self._runtime)


def skip_built_helpers() -> None:
    """Keeps Megatron from compiling its dataset helpers where they are there already.

    Megatron runs `make` at every start; the wheel has the compiled helpers and no Makefile.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return
    import megatron.core.datasets.utils

    _replace(lambda original: None, "compile_helpers", megatron.core.datasets.utils)


@contextmanager
def _refusals_in_one_line() -> Iterator[None]:
    """Turns what Megatron refuses by an assertion into an error of one line."""
    try:
        yield
    except (AssertionError, ValueError) as error:
        # Many of its assertions have no message, and speak for themselves.
        why = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line
        raise ConfigError(f"Megatron refuses these flags: {why}") from error


def _replace(hook: Callable[..., Any], name: str, *modules: Any) -> None:
    original = getattr(modules[0], name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    for module in modules:
        setattr(module, name, replacement)
