"""The configuration of a run: read and validated once, then passed down."""

from dataclasses import dataclass, field
from typing import Any

from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.errors import ConfigError, near_multiples
from megatron_cp_plugin.layers import check_balance, options_by_name
from megatron_cp_plugin.registry import kind_of, layout_of
from megatron_cp_plugin.terminal import option_of
from megatron_cp_plugin.token_losses import CHUNK_TOKENS

LINEAR_MODELS = ("transnormer", "linear_transformer")

# Tokens of a packed document, where nobody says.
MEAN_DOCUMENT = 4096


def setting(default: Any, text: str, **how: Any) -> Any:
    """A setting of a run: a field with a flag and a key of run files of its name.

    Args:
        default: False for a switch.
        text: What it is, for --help.
        how: What argparse takes; and `needs`: "algorithm" where it says nothing without one of the
            plugin, "auto" without that; `in_files`: false where it has no key.
    """
    return field(default=default, metadata={"help": text, **how})


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run, as the command line, a run file and `install` have them.

    Attributes:
        options: (name, value) pairs of the algorithm's own options.
        layers: the algorithm of each layer, repeated over the depth; (): `algo` for all.
        tokens: of a micro-batch on all context-parallel ranks, where a program cuts it for `auto`.
        by_auto: whether `auto` has chosen the algorithm.
    """

    kernel: str = setting(
        "auto",
        "attention kernel; default auto: the fastest one that supports the model",
        needs="algorithm",
        metavar="NAME",
    )
    options: tuple[tuple[str, object], ...] = setting(
        (),
        "options of the algorithm",
        needs="algorithm",
        metavar="KEY=VALUE",
        nargs="+",
        type=option_of,
        action="extend",
    )
    layers: tuple[str, ...] = setting(
        (),
        "algorithm of each layer, repeated over the depth, such as 'lasp2*7, attention2d'; "
        "default: --context-parallel-algo for all; with auto, the kind of each layer, such as "
        "'linear*7, softmax'",
        metavar="PATTERN",
    )
    linear_model: str | None = setting(
        None,
        "model of the linear attention layers; required with algorithms such as lasp",
        needs="algorithm",
        choices=LINEAR_MODELS,
    )
    recompute_attention: bool = setting(
        False,
        "recompute attention too when Megatron recomputes activations, which saves the memory of "
        "its output; default: keep its output and run it once",
        needs="algorithm",
    )
    chunked_loss: int | None = setting(
        None,
        f"compute logits and losses in chunks of this many tokens, default {CHUNK_TOKENS}: no rank "
        "holds all logits, and the backward pass recomputes them",
        needs="algorithm",
        metavar="TOKENS",
        nargs="?",
        type=int,
        const=CHUNK_TOKENS,
    )
    send_latents: bool = setting(
        False,
        "with multi-latent attention, send latents and make K and V of them where they arrive, "
        "which sends fewer bytes and keeps less for the backward pass",
        needs="algorithm",
    )
    tokens: int | None = None
    mean_document: str | int | None = setting(
        None,
        "for auto: length of packed documents: the mean in tokens, lognormal:MEAN:SIGMA, or a "
        "histogram, FILE.csv or FILE.json, as for `plan --documents`; default "
        f"{MEAN_DOCUMENT}",
        needs="auto",
        metavar="LENGTHS",
    )
    by_auto: bool = False

    def features(self, head_dim: int) -> int:
        """The head dim of q and k in layers of linear attention: linearized positions double it."""
        return head_dim * (2 if self.linear_model == "transnormer" else 1)

    def __post_init__(self) -> None:
        if self.chunked_loss is not None and self.chunked_loss < 1:
            raise ConfigError(
                f"chunked_loss must be at least 1, got {self.chunked_loss}: use for example "
                f"{CHUNK_TOKENS}, or leave it out"
            )


@dataclass(frozen=True)
class ContextParallelConfig(RunSettings):
    """Which algorithm splits the sequence, over how many ranks, with which kernel.

    Attributes: for_spans: for an example of span masks.
    """

    algo: str
    size: int
    for_spans: bool = field(default=False, kw_only=True)

    @property
    def layout(self) -> Layout:
        """Raises: ConfigError if the algorithm or an option is unknown."""
        return layout_of(self.algo, dict(self.options))

    def algo_of_layer(self, number: int) -> str:
        """The algorithm of a layer, counted from 1 over the whole depth."""
        return self.layers[(number - 1) % len(self.layers)] if self.layers else self.algo

    def options_of(self, algo: str) -> tuple[tuple[str, object], ...]:
        """The options of one of the algorithms. Raises: as `check_layers`."""
        return options_by_name(self.layers, self.algo, self.options)[algo]

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms of all layers, each once."""
        return tuple(dict.fromkeys(self.layers or (self.algo,)))

    @property
    def has_linear_layers(self) -> bool:
        """Whether layers of linear attention are among them."""
        return any(kind_of(name) == "linear" for name in self.algorithms)

    @property
    def has_softmax_layers(self) -> bool:
        """Whether layers of softmax attention are among them."""
        return any(kind_of(name) == "softmax" for name in self.algorithms)

    def check_layers(self) -> None:
        """Raises: ConfigError if the layers do not go together, or a setting does not fit them."""
        options_by_name(self.layers, self.algo, self.options)
        if self.layers and self.algo not in self.layers:
            raise ConfigError(
                f"layers must have a layer of --context-parallel-algo {self.algo}, got "
                f"{', '.join(self.algorithms)}: leave --context-parallel-algo out"
            )
        if self.has_linear_layers and self.linear_model is None:
            raise ConfigError(
                f"{self.algorithms[0]} computes linear attention, which is another model: choose "
                f"--cp-linear-model {' or '.join(LINEAR_MODELS)}, or an algorithm of softmax "
                "attention"
            )
        if not self.by_auto:  # the planner knows what its choice costs
            check_balance(self.layers, self.algo, self.options)
        if not self.has_linear_layers and self.linear_model is not None:
            raise ConfigError(
                f"--cp-linear-model {self.linear_model} needs layers of linear attention, got "
                f"{', '.join(self.algorithms)}: add --context-parallel-algo lasp2, or leave it out"
            )

    def check_sequence(self, seq_length: int) -> None:
        """Raises: ConfigError if the ranks cannot hold equally many tokens in equal chunks."""
        multiple = self.layout.multiple(self.size)
        if seq_length % multiple == 0:
            return
        factor = multiple // self.size
        needs = "context_parallel_size" if factor == 1 else f"{factor} * context_parallel_size"
        other = ""
        if factor > 1 and seq_length % self.size == 0:
            other = ", or --context-parallel-algo ring"
        raise ConfigError(
            f"{self.algo} needs seq_length divisible by {needs} = {multiple}, got {seq_length}: "
            f"use {near_multiples(seq_length, multiple)}{other}"
        )
