"""The plugin for programs that build megatron.core models and split batches themselves.

Nothing here needs a command line or `megatron.training`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import distributed as dist

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import ContextParallelConfig, RunSettings
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration.args import document_lengths
from megatron_cp_plugin.integration.auto import resolve_model
from megatron_cp_plugin.integration.checks import describe
from megatron_cp_plugin.integration.chunked_loss import serve_loss, serve_programs
from megatron_cp_plugin.integration.installer import Installer, LauncherInstaller
from megatron_cp_plugin.integration.rules import check
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.settings import Settings

# By which callers cut batches, see `install`.
_LAYOUTS = ("thd", "contiguous")


def install(
    algo: str,
    *,
    layout: str = "thd",
    kernel: str = "auto",
    recompute_attention: bool = False,
    chunked_loss: int | None = None,
    send_latents: bool = False,
    tokens: int | None = None,
    mean_document: str | int | None = None,
    allow_untested_megatron: bool = False,
    **options: object,
) -> None:
    """Installs an algorithm for all models that this process builds from now on.

    Call it in the process that builds and runs the models, such as a Ray worker, once Megatron's
    parallel state is set up and before the first model is built; on all ranks. Calling it again
    with the same settings does nothing, also in a process that the launcher has started with them.

    Batches, losses and the scaling of gradients stay the caller's. A model takes input_ids [b,S] of
    this rank's tokens and packed_seq_params of whole documents.

    Args:
        algo: A name of `megatron_cp_plugin.available("softmax")`; or "auto": the planner chooses
            one when the first model is built, for the GPU of rank 0 or the machine of option
            `machine`, and all models have it.
        layout: By which the caller cuts batches. "thd": each document padded to a multiple of 2P
            and cut by zigzag; without packed_seq_params each sample so. "contiguous": whole packs,
            or samples, in P consecutive parts.
        kernel: "auto" or a kernel's name.
        recompute_attention: Activation recomputation runs attention a second time.
        chunked_loss: How many tokens' logits there are at a time: losses, and the log-probabilities
            and entropies of verl, slime, NeMo-RL and SkyRL, are computed in chunks; None: as the
            caller does. A model that is given no labels returns what stands for logits then;
            whatever needs logits themselves is refused.
        send_latents: Ranks send latents of multi-latent attention in place of K and V.
        tokens: With auto, which needs it: of a micro-batch on all context-parallel ranks, about.
        mean_document: With auto: length of documents: the mean in tokens,
            "lognormal:MEAN:SIGMA", or a histogram, "FILE.csv" or "FILE.json"; default 4096.
        allow_untested_megatron: Run a version of Megatron that nobody ran with the plugin.
        options: Of the algorithm.

    Raises: ContextParallelError: There is no parallel state, another algorithm is installed, this
    Megatron is not as the plugin takes it to be, or a setting has no meaning.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise ContextParallelError(
            "the plugin needs Megatron's parallel state, got none in this process: call it in "
            "each worker that builds models, after initialize_model_parallel"
        )
    if layout not in _LAYOUTS:
        raise ConfigError(
            f"batches that the caller splits need the layout {' or '.join(_LAYOUTS)}, got "
            f"{layout!r}: use one of them, or the launcher"
        )
    config = ContextParallelConfig(
        algo,
        parallel_state.get_context_parallel_world_size(),
        options=tuple(sorted({**options, "layout": layout}.items())),
        kernel=kernel,
        recompute_attention=recompute_attention,
        chunked_loss=chunked_loss,
        send_latents=send_latents,
        tokens=tokens,
        mean_document=mean_document,
    )
    _check_config(config)
    found = _in_force()
    if found is None:
        ProgramInstaller(config).install(allow_untested=allow_untested_megatron)
    elif _read(before := found.config(config.size)) != _read(config):
        raise ConfigError(
            f"a process has one algorithm, got {_words(config)} after {_words(before)}: leave one "
            "of them out, or call uninstall first"
        )


def uninstall() -> None:
    """Takes back what `install` did; models that were built meanwhile keep their attention.

    Raises: ContextParallelError: The launcher, not `install`, installed the plugin.
    """
    found = _in_force()
    if isinstance(found, LauncherInstaller):
        raise ConfigError(
            "uninstall needs an algorithm set by install, got the launcher's, which stays for "
            "the whole process"
        )
    if found is not None:
        found.undo()


class ProgramInstaller(Installer):
    """That of `install`, for models that a program builds."""

    def __init__(self, config: ContextParallelConfig) -> None:
        super().__init__()
        self._asked = config
        self.recomputes = config.recompute_attention

    def config(self, size: int) -> ContextParallelConfig:
        """Returns what was asked for, of the size of Megatron's parallel state."""
        return self._asked

    def install(self, *, allow_untested: bool) -> None:
        """As `Installer.install`; also replaces functions of the programs that take logits."""
        super().install(allow_untested=allow_untested)
        if self._asked.chunked_loss is not None:
            self._replaced += serve_programs()

    def _runtime_of(self, given: Mapping[str, Any]) -> Runtime:
        if self._runtime is not None:
            return self._runtime
        config, model, groups = self._asked, given["config"], given.get("pg_collection")
        if config.algo == registry.AUTO:
            check("model", Settings(model, config))
            group = parallel_state.get_context_parallel_group() if groups is None else groups.cp
            config = resolve_model(config, model, group)
        return Runtime(config, callers=True)

    def _serve(self, model: Any, runtime: Runtime) -> None:
        super()._serve(model, runtime)
        if dist.get_rank() == 0:  # of the job's ranks, or of a program's workers
            layers = model.config.num_layers
            said = describe(runtime.config, None)
            print(
                f"megatron_cp_plugin: {said}, in a {type(model).__name__} of {layers} layers",
                flush=True,
            )
        if self._asked.chunked_loss is not None:
            serve_loss(model, self._asked.chunked_loss, for_programs=True)


def _in_force() -> Installer | None:
    """Who has replaced the constructor of models; it holds all that there is to know."""
    replacement = getattr(GPTModel.__init__, "replaced", None)
    found = getattr(getattr(replacement, "hook", None), "__self__", None)
    return found if isinstance(found, Installer) else None


def _check_config(config: ContextParallelConfig) -> None:
    """Raises: ConfigError unless auto, and auto alone, is told of the batches of a program; or for
    linear attention, or an unknown option.
    """
    for name in ("tokens", "mean_document"):
        if getattr(config, name) is not None and config.algo != registry.AUTO:
            raise ConfigError(
                f"{name} needs algorithm {registry.AUTO}, got {config.algo}: choose "
                f"{registry.AUTO}, or leave {name} out"
            )
    document_lengths(config.mean_document, "mean_document")
    if config.tokens is not None and config.tokens < 1:
        raise ConfigError(f"tokens must be at least 1, got {config.tokens}")
    if config.algo == registry.AUTO and config.tokens is None:
        raise ConfigError(
            f"{config.algo} needs the tokens of a micro-batch on all context-parallel ranks, got "
            "none: pass for example tokens=65536, or name an algorithm"
        )
    if config.algo != registry.AUTO and registry.kind_of(config.algo) == "linear":
        raise ConfigError(
            f"batches that the caller splits need softmax attention, got {config.algo}: use one of "
            f"{', '.join(registry.available('softmax'))}"
        )
    config.layout  # noqa: B018  (an unknown option is the first thing to say)


def _read(config: ContextParallelConfig) -> ContextParallelConfig:
    """The same with the defaults of all options, however an algorithm was chosen."""
    if config.algo == registry.AUTO:
        return config
    options = vars(registry.read_options(config.algo, dict(config.options)))
    return replace(
        config,
        options=tuple(options.items()),
        layers=config.algorithms,
        by_auto=False,
        for_spans=False,
        mean_document=None,
    )


def _words(config: ContextParallelConfig) -> str:
    """The algorithm, and in brackets what is not as it is by default."""
    values = {f.name: (getattr(config, f.name), f.default) for f in fields(RunSettings)}
    del values["options"], values["by_auto"]
    given = [(name, value) for name, (value, default) in values.items() if value != default]
    options = ", ".join(f"{name}={value}" for name, value in (*config.options, *given))
    return f"{config.algo} ({options})" if options else config.algo
