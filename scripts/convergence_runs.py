"""What the convergence harness runs: algorithms, sizes, and the run file of each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.harness.parity import Comparison, Recording
from megatron_cp_plugin.harness.train import CommandLine
from megatron_cp_plugin.integration.args import MEGATRON

_DOCUMENTS = "dataloader_inter_document_masking"


@dataclass(frozen=True)
class Variant:
    """An algorithm with options, as in `--algos ring,zigzag:backward=kv`."""

    algo: str
    options: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The words that it was made of."""
        return ":".join([self.algo, *(f"{name}={value}" for name, value in self.options)])


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        variant: The algorithm; None for Megatron's own path.
        cp: context_parallel_size.
        processes: World size.
        is_reference: Whether the others are compared with it.
    """

    variant: Variant | None
    cp: int
    processes: int
    is_reference: bool = False

    @property
    def label(self) -> str:
        """For tables: the algorithm."""
        name = self.variant.label if self.variant else "Megatron"
        return f"{name} (reference)" if self.is_reference else name

    @property
    def algo(self) -> str:
        """The name for --context-parallel-algo."""
        return self.variant.algo if self.variant else MEGATRON

    @property
    def folder(self) -> str:
        """Name of the folder for what the run writes."""
        if self.is_reference or self.variant is None:
            return f"reference-cp{self.cp}"
        return f"{self.variant.label.replace(':', '-')}-cp{self.cp}"


@dataclass(frozen=True)
class Outcome:
    """What became of a run; `failure` is one line if it did not finish."""

    run: Run
    recording: Recording | None = None
    comparison: Comparison | None = None
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether it finished and, unless it is the reference, equals the reference."""
        return not self.failure and (self.comparison is None or self.comparison.passed)


def parse_variants(text: str) -> list[Variant]:
    """Reads `ring,zigzag:backward=kv`.

    Raises:
        ConfigError: An algorithm or an option does not exist, or one is named twice.
    """
    variants = []
    for word in filter(None, (w.strip() for w in text.split(","))):
        algo, *pairs = word.split(":")
        options = []
        for pair in pairs:
            name, equals, value = pair.partition("=")
            if not equals:
                raise ConfigError(f"--algos: write NAME:OPTION=VALUE, got {word!r}")
            options.append((name, value))
        registry.layout_of(algo, dict(options))
        variants.append(Variant(algo, tuple(options)))
    if not variants:
        raise ConfigError(f"--algos needs a name, got {text!r}: {', '.join(registry.available())}")
    if len(set(variants)) != len(variants):
        raise ConfigError(f"--algos names an algorithm twice: {text}")
    return variants


def parse_sizes(text: str) -> list[int]:
    """Reads `1,2,4`.

    Raises:
        ConfigError: It is not a list of different positive whole numbers.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--cp takes whole numbers from 1, such as 1,2,4, got {text!r}")
    sizes = [int(word) for word in words]
    if len(set(sizes)) != len(sizes):
        raise ConfigError(f"--cp names a size twice: {text}")
    return sizes


def number(line: CommandLine, name: str, default: int = 0) -> int:
    """A positive number among the settings of Megatron. Raises: ConfigError if it is none."""
    value = line.given(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"megatron.{name} must be a whole number from 1, got {value!r}")
    return value


def plan(
    variants: Sequence[Variant],
    sizes: Sequence[int],
    line: CommandLine,
    dp: int,
    own_model: bool = False,
) -> list[Run]:
    """Lists the runs, the reference first.

    Args:
        variants: The algorithms.
        sizes: Of the context-parallel group.
        line: The run file, and flags that override it.
        dp: Data-parallel size.
        own_model: Megatron's own path does not have the model.

    Raises:
        ConfigError: A sequence cannot be split that way.
    """
    shards = number(line, "tensor_model_parallel_size", 1)
    shards *= number(line, "pipeline_model_parallel_size", 1)
    runs = [Run(variants[0] if own_model else None, 1, shards * dp, is_reference=True)]
    for variant in variants:
        for cp in sizes:
            if own_model and (variant, cp) == (variants[0], 1):
                continue
            config = ContextParallelConfig(variant.algo, cp, options=variant.options)
            config.check_sequence(number(line, "seq_length"))
            runs.append(Run(variant, cp, shards * dp * cp))
    return runs


def run_file(config: DictConfig, run: Run, iterations: int) -> DictConfig:
    """Returns the run file of one run: the given one with another algorithm, size and length.

    Options that the given file sets for its own algorithm are kept for that algorithm alone.
    Megatron's own attention, which needs Transformer Engine for packed documents, gets a mask of
    all pairs that ends where documents do.
    """
    made = config.copy()
    for name in ("context_parallel_size", "train_iters", "save"):
        for key in [k for k in made.megatron if str(k).replace("-", "_") == name]:
            del made.megatron[key]
    made.megatron.context_parallel_size = run.cp
    made.megatron.train_iters = iterations
    for key in [k for k in made.megatron if str(k).replace("-", "_") == _DOCUMENTS]:
        if run.variant is None and made.megatron[key]:
            del made.megatron[key]
            made.megatron.reset_attention_mask = made.megatron.reset_position_ids = True
    given = made.get("context_parallel") or {}
    section = {"algo": run.algo}
    if "platform" in given:
        section["platform"] = given["platform"]
    # They say what the model is.
    section.update({key: given[key] for key in ("layers", "linear_model") if key in given})
    if run.variant is not None:
        kept = ("kernel", "chunked_loss", "recompute_attention", "send_latents")
        section.update({key: given[key] for key in kept if key in given})
        if given.get("algo") == run.algo:
            section = {**given, **section}
        section.update(run.variant.options)
    made.context_parallel = section
    return made
