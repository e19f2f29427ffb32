"""Replaces Megatron's functions by the plugin's, for the launcher and for `install`.

`contract` lists the names. Megatron is checked against it first, so that nothing is imported before
that a version of Megatron may lack.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.autograd.host_memory import HostMemory
from megatron_cp_plugin.core.autograd.recompute import Checkpointed
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration import compat
from megatron_cp_plugin.integration.args import ALGORITHM, PluginFlags, speak_in_one_line
from megatron_cp_plugin.integration.batch import Batches
from megatron_cp_plugin.integration.checks import check_arguments, describe_graphs, used_features
from megatron_cp_plugin.integration.contract import Part
from megatron_cp_plugin.integration.loss import forward_step_calc_loss
from megatron_cp_plugin.integration.rules import check, comm_type, replaced
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.process_exit import model_errors_in_one_line, refusals_in_one_line

if TYPE_CHECKING:
    from megatron_cp_plugin.integration.auto import Resolved

log = logging.getLogger(__name__)


class Installer(ABC):
    """Serves the models of one process, from `install` to `undo`.

    Attributes: recomputes: whether activation recomputation runs attention a second time.
    """

    parts: tuple[Part, ...] = ("algorithm",)
    recomputes: bool
    _args: Any = None  # Megatron's namespace, validated

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._replaced: list[compat.Replacement] = []
        self._said: set[str] = set()

    def install(self, *, allow_untested: bool) -> None:
        """Replaces Megatron's functions; call before others import their names.

        Raises: ContextParallelError: This version is not supported, or differs from `contract`.
        """
        compat.check_megatron(*self.parts, allow_untested=allow_untested)
        self._replaced = compat.replace(self._hooks(), *self.parts)

    def undo(self) -> None:
        """Puts Megatron's own back."""
        compat.Replacement.undo(self._replaced)

    @abstractmethod
    def config(self, size: int) -> ContextParallelConfig:
        """Returns what is installed for a number of context-parallel ranks."""

    def _hooks(self) -> dict[str, Callable[..., Any]]:
        """Replacements of Megatron's functions, by name."""
        from megatron_cp_plugin.integration.multi_token import process_mtp_loss
        from megatron_cp_plugin.integration.rope import set_cos_sin_cache

        hooks: dict[str, Callable[..., Any]] = {
            "GPTModel.__init__": self._build_model,
            "HybridModel.__init__": self._build_model,
            "roll_tensor": self._roll,
            "process_mtp_loss": process_mtp_loss,
            "YarnRotaryEmbedding._set_cos_sin_cache": set_cos_sin_cache,
        }
        if not self.recomputes:
            keeping = partial(checkpoint, HostMemory())
            hooks |= {"checkpoint": keeping, "te_checkpoint": keeping}
        return hooks

    @abstractmethod
    def _runtime_of(self, given: Mapping[str, Any]) -> Runtime:
        """The runtime of a model. Args: given: to its constructor, by name."""

    def _build_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        from megatron_cp_plugin.integration.spec import build_model

        call = inspect.signature(original).bind(*args, **kwargs)
        runtime = self._runtime = self._runtime_of(call.arguments)
        for line in replaced("model", Settings(call.arguments["config"], runtime.config)):
            if line not in self._said and torch.distributed.get_rank() == 0:
                log.info(line)
            self._said.add(line)
        self._serve(build_model(original, call, runtime, self._args), runtime)

    def _serve(self, model: Any, runtime: Runtime) -> None:
        """Prepares a built model for the batches that it will get."""
        from megatron_cp_plugin.integration.inputs import CutInputs

        CutInputs(model, runtime, model.pg_collection.cp)

    def _roll(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron_cp_plugin.integration.multi_token import roll_tensor

        assert self._runtime is not None  # a model calls it
        return roll_tensor(original, self._runtime, *args, **kwargs)


class LauncherInstaller(Installer):
    """The launcher's, for a run of Megatron's training loop."""

    parts = ("algorithm", "training")

    def __init__(self, flags: PluginFlags, device: torch.device) -> None:
        super().__init__()
        self._flags = flags
        self._device = device
        self._batches: Batches | None = None
        self._resolved: Resolved | None = None  # by auto, and not yet compared over the ranks
        self.recomputes = flags.recompute_attention

    def config(self, size: int) -> ContextParallelConfig:
        """Returns what is installed for a number of context-parallel ranks."""
        return self._flags.config(size)

    def _hooks(self) -> dict[str, Callable[..., Any]]:
        hooks = super()._hooks() | {
            "add_megatron_arguments": self._add_arguments,
            "validate_args": self.validate_args,
            "TransformerConfig.__post_init__": _check_model_config,
            "MLATransformerConfig.__post_init__": _check_model_config,
            "setup_model_and_optimizer": self._set_up_model,
            "get_batch_on_this_cp_rank": self._get_batch,
            "forward_step_calc_loss": forward_step_calc_loss,
        }
        if self._flags.chunked_loss is not None:
            from megatron_cp_plugin.integration.chunked_loss import acceptance_counts

            hooks |= {"_compute_mtp_acceptance_counts": acceptance_counts}
        return hooks

    def _add_arguments(
        self, original: Callable[..., Any], parser: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        parser = speak_in_one_line(original(parser))
        parser.add_argument(ALGORITHM, help=argparse.SUPPRESS)  # which the launcher leaves there
        return parser

    def validate_args(self, original: Callable[..., Any], args: Any, defaults: Any = None) -> Any:
        """Checks arguments as parsed, for the plugin and by Megatron's own `original`.

        Raises: ContextParallelError: They are refused.
        """
        compat.check_args(args)
        self._flags.comm_type.check_model(args)
        config = self._activate(args)
        _write_args(config, args)
        check("start", Settings(args, config, self._device))
        with refusals_in_one_line():
            validated = original(args, {} if defaults is None else defaults)
        compat.check_args(validated, "validated args")
        settings = Settings(validated, config, self._device)
        # Megatron has put the flags of today in the place of their former names.
        check("validated", settings)
        _say(validated, describe_graphs(settings))
        if config.size > 1:
            algo = registry.AUTO if config.by_auto else config.algo  # which may yet change
            ours = "allgather" if settings.is_sparse else comm_type(algo)
            validated.cp_comm_type = [ours]
        self._args = validated
        return validated

    def _activate(self, args: Any) -> ContextParallelConfig:
        """Checks the plugin's settings against Megatron's, and prints the result."""
        said: list[str] = []
        if self._flags.is_auto:
            from megatron_cp_plugin.integration import auto

            self._resolved = auto.resolve_auto(self._flags, args, self._device)
            self._flags, said = self._resolved.flags, self._resolved.said
        config = self._flags.config(args.context_parallel_size)
        kernel = check_arguments(args, config, self._device)
        self._runtime = Runtime(config)
        self._batches = Batches(self._runtime)
        _say(args, *said, *used_features(Settings(args, config), kernel))
        return config

    def _runtime_of(self, given: Mapping[str, Any]) -> Runtime:
        if self._runtime is None:
            raise ContextParallelError(
                f"--context-parallel-algo {self._flags.algo} needs a script that lets Megatron "
                "validate its arguments before it builds a model: call parse_and_validate_args or "
                "pretrain first"
            )
        if self._resolved is not None:
            self._compare(self._resolved, given)
            self._resolved = None
        return self._runtime

    def _compare(self, resolved: Resolved, given: Mapping[str, Any]) -> None:
        """Compares the choices of all ranks, and measures the best; a collective operation."""
        from megatron.core import parallel_state

        from megatron_cp_plugin.integration import auto

        auto.check_same_choice(self._flags)
        groups = given.get("pg_collection")
        group = parallel_state.get_context_parallel_group() if groups is None else groups.cp
        self._flags, said = auto.fastest(resolved, group, self._device)
        if said is None:
            return
        config = self._flags.config(self._args.context_parallel_size)
        self._runtime = Runtime(config)
        self._batches = Batches(self._runtime)
        _say(self._args, said)

    def _serve(self, model: Any, runtime: Runtime) -> None:
        from megatron_cp_plugin.integration.chunked_loss import serve_loss
        from megatron_cp_plugin.integration.inputs import SplitInputs

        assert self._batches is not None
        if runtime.is_cut_by_callers:
            super()._serve(model, runtime)
        else:
            SplitInputs(model, self._batches, model.pg_collection.cp)
        if self._flags.chunked_loss is not None:
            serve_loss(model, self._flags.chunked_loss)

    def _set_up_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._args is not None:  # else a model of ours says what is missing
            check("training", Settings(self._args))
        from megatron_cp_plugin.integration.checkpoints import damage_in_one_line

        load = None if self._args is None else Settings(self._args).load
        with model_errors_in_one_line(), damage_in_one_line(load):
            result = original(*args, **kwargs)
        from megatron_cp_plugin.integration.inputs import serves_inputs

        for model in map(compat.unwrapped, result[0]):
            if not serves_inputs(model):
                raise ContextParallelError(
                    f"--context-parallel-algo {self._flags.algo} supports GPTModel and "
                    f"HybridModel, got {type(model).__name__}: use pretrain_gpt.py or another "
                    "script that builds one"
                )
        return result

    def _get_batch(
        self, original: Callable[..., Any], batch: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        from megatron.core import parallel_state

        assert self._batches is not None
        given = inspect.signature(original).bind(batch, *args, **kwargs).arguments.get("cp_group")
        group = parallel_state.get_context_parallel_group() if given is None else given
        return self._batches.shard(batch, group)


def checkpoint(
    memory: HostMemory, original: Callable[..., Any], function: Callable[..., Any], *args: Any
) -> Any:
    """Calls Megatron's or Transformer Engine's `checkpoint` without a second run of attention.

    Megatron checkpoints a layer, some layers (`--recompute-granularity full`) or the core attention
    (`selective`) by giving one function to it. Each call is given a function of its own here, which
    keeps what attention computed until the recomputation uses it.

    Args: memory: where that and the function's inputs are while the GPU is short of memory.
    """
    with memory.keeping():
        return original(Checkpointed(function, memory), *args)


def skip_built_helpers() -> None:
    """Keeps Megatron from compiling its dataset helpers if they exist already.

    Megatron runs `make` at every start; the wheel has the compiled helpers and no Makefile.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        compat.replace({"compile_helpers": lambda original: None}, "any")


def _check_model_config(original: Callable[..., None], config: Any) -> None:
    with refusals_in_one_line():
        original(config)


def _write_args(config: ContextParallelConfig, args: Any) -> None:
    """Removes settings from Megatron's arguments that it would refuse or act on."""
    # The mask follows from the layout; Megatron would build one of N x N tokens.
    args.create_attention_mask_in_dataloader = False
    if Settings(args).cuts_fused_rotary:
        args.apply_rope_fusion = False
    if args.seq_length is not None and args.seq_length % (2 * config.size):
        # Megatron demands a multiple of 2P of --seq-length, for its zigzag layout, but not of
        # --encoder-seq-length, its other name for the same quantity. The layout was checked.
        args.seq_length, args.encoder_seq_length = None, args.seq_length


def _say(args: Any, *lines: str | None) -> None:
    """Prints lines on the first rank; None prints nothing."""
    if args.rank == 0:
        for line in filter(None, lines):
            print(f"megatron_cp_plugin: {line}", flush=True)
