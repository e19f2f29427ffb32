"""The plugin's own command-line flags."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, override

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import (
    LINEAR_MODELS,
    MEAN_DOCUMENT,
    ContextParallelConfig,
    RunSettings,
    setting,
)
from megatron_cp_plugin.document_lengths import Lengths, lengths_of
from megatron_cp_plugin.errors import ConfigError, nearest
from megatron_cp_plugin.integration import example_spans
from megatron_cp_plugin.integration.comm_type import CommType
from megatron_cp_plugin.kernels.choice import kernel_called, kernel_names
from megatron_cp_plugin.kernels.linear import linear_kernel_names
from megatron_cp_plugin.layers import leading_algorithm, parse_layers
from megatron_cp_plugin.terminal import flag_of

# Stays on Megatron's command line: a process that reads it without the plugin, such as a worker
# that a script starts, is refused by Megatron's parser instead of training without the algorithm.
ALGORITHM = "--context-parallel-algo"

# Prints the plugin's flags alone; --help prints Megatron's too.
HELP = "--help-cp"

# Its value that means "Megatron's own path, untouched".
MEGATRON = "megatron"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the plugin's flags to a parser and returns it (an `extra_args_provider` of Megatron)."""
    group = parser.add_argument_group("megatron_cp_plugin")
    for flag, how in FLAGS.items():
        of_argparse = how.keys() - {"needs", "in_files"}
        group.add_argument(flag, **{key: how[key] for key in of_argparse})
    return parser


def add_comm_type(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds Megatron's flags that select some algorithms too to a parser and returns it."""
    # Megatron's default is p2p, which must not be taken for something that the user asked for.
    parser.add_argument("--cp-comm-type", nargs="+", default=())
    parser.add_argument("--hierarchical-context-parallel-sizes", nargs="+", type=int, default=())
    return parser


def key_of(flag: str) -> str:
    """The name of a flag of the plugin in a run file: --cp-linear-model is linear_model."""
    return flag.removeprefix("--context-parallel-").removeprefix("--cp-").replace("-", "_")


def document_lengths(given: str | int | None, name: str) -> Lengths:
    """How long packed documents are, as `lengths_of` reads it; None: `MEAN_DOCUMENT` on average.

    Raises: ConfigError, with the name of the setting, if it is no such thing.
    """
    try:
        return lengths_of(str(MEAN_DOCUMENT if given is None else given))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{name} {error}: leave it out for {MEAN_DOCUMENT}") from None


@dataclass(frozen=True, kw_only=True)
class PluginFlags(RunSettings):
    """The plugin's flags as given on one command line.

    Attributes:
        algo: None for Megatron's own path.
        comm_type: the same in Megatron's spelling.
    """

    algo: str | None = setting(
        None,
        "context-parallel attention algorithm, such as ring or zigzag; auto: the fastest one "
        "according to the planner; megatron: Megatron's own context parallelism, the default; "
        "Megatron's --cp-comm-type selects some algorithms too",
        metavar="NAME",
    )
    comm_type: CommType = field(default_factory=CommType)
    platform: str | None = setting(
        None,
        "cpu: run Megatron without a GPU; default auto: cpu if there is no GPU",
        choices=("auto", "cpu", "cuda"),
    )
    machine: str | None = setting(
        None,
        "for auto: a machine of configs/machines, such as h200 or h100, or a file written by "
        "megatron-cp calibrate; default: found by the name of the GPU",
        needs="auto",
        metavar="NAME|FILE",
    )
    example_spans: str | None = setting(
        None,
        "for auto: attention_spans of one batch as an example of all, a JSON list of slices; "
        "default: batches have none",
        needs="auto",
        metavar="FILE",
    )
    explain: bool = setting(
        False, "print the candidates of auto and their predicted times", needs="auto"
    )
    record: str | None = setting(
        None,
        "write losses of all iterations and gradients of the first, the middle and the last one "
        "into a folder, for comparison with another run",
        in_files=False,
        metavar="DIR",
    )
    allow_untested_megatron: bool = setting(
        False,
        "run a Megatron version that was never tested with the plugin, if it has everything that "
        "`megatron-cp hooks` lists; default: refuse it",
        in_files=False,
    )

    @property
    def is_auto(self) -> bool:
        """Whether the algorithm is yet to be chosen."""
        return self.algo == registry.AUTO

    def check(self) -> None:
        """Raises ContextParallelError for an unknown name, and for settings that clash."""
        if self.kernel not in ("auto", *kernel_names(), *linear_kernel_names()):
            kernel_called(self.kernel)
        if self.is_auto:
            self._check_auto()
        elif self.algo is not None:
            self.comm_type.check(self.algo, self.layers, self.options)
            registry.layout_of(self.algo, dict(self.options))
            self.config(1).check_layers()
        for flag, how in FLAGS.items():
            value = getattr(self, key_of(flag))
            unset = value is None or value is False or value in ((), "auto")
            if "needs" not in how or unset or self.is_auto:
                continue
            if how["needs"] == "auto":
                needed, example, got = "--context-parallel-algo auto", "auto", self.algo or MEGATRON
            elif self.algo is None:
                needed, example, got = "an algorithm of the plugin", "zigzag", "none"
            else:
                continue
            raise ConfigError(
                f"{flag} needs {needed}, got {got}: add --context-parallel-algo {example}, or "
                f"leave {flag} out"
            )

    def _check_auto(self) -> None:
        self.comm_type.check(registry.AUTO, self.layers, self.options)
        if self.options:
            name, value = self.options[0]
            raise ConfigError(
                f"auto chooses options too, got --cp-options {name}={value}: leave it out, or name "
                "an algorithm"
            )
        linear = "linear" in self.layers or not self.layers
        if self.linear_model is not None and not linear:
            raise ConfigError(
                f"--cp-linear-model {self.linear_model} needs layers of linear attention, got "
                f"{', '.join(dict.fromkeys(self.layers))}: write linear for some, or leave it out"
            )
        if "linear" in self.layers and self.linear_model is None:
            raise ConfigError(
                "linear layers in --cp-layers need a model, got no --cp-linear-model: choose "
                f"--cp-linear-model {' or '.join(LINEAR_MODELS)}"
            )
        document_lengths(self.mean_document, "--cp-mean-document")
        if self.example_spans is not None:
            example_spans.read(self.example_spans)

    def config(self, size: int) -> ContextParallelConfig:
        """Returns the configuration for `size` context-parallel ranks; needs an algorithm."""
        of_all = {field.name for field in fields(ContextParallelConfig)} & vars(self).keys()
        given = {name: getattr(self, name) for name in of_all}
        return ContextParallelConfig(size=size, for_spans=self.example_spans is not None, **given)


def _flags() -> Iterator[tuple[str, dict[str, Any]]]:
    """The plugin's flags: what they are to argparse, and what else `setting` takes."""
    for option in sorted(fields(PluginFlags), key=lambda option: option.name != "algo"):
        if option.metadata:
            flag = ALGORITHM if option.name == "algo" else flag_of(f"cp_{option.name}")
            switch = option.default is False
            how = {"action": "store_true"} if switch else {"default": option.default or None}
            yield flag, how | dict(option.metadata)


# In the order of the help and of run files' keys.
FLAGS = dict(_flags())


def split_flags(argv: Sequence[str]) -> tuple[PluginFlags, list[str]]:
    """Separates the plugin's flags from Megatron's, which keep their order.

    Raises: ConfigError if a flag of the plugin has no value, or one that is not allowed.
    """
    parser = add_arguments(OneLineParser(add_help=False, allow_abbrev=False))
    known, others = parser.parse_known_args(list(argv))
    parser = add_comm_type(OneLineParser(add_help=False, allow_abbrev=False))
    theirs, rest = parser.parse_known_args(others)
    comm_type = CommType(
        tuple(theirs.cp_comm_type), tuple(theirs.hierarchical_context_parallel_sizes)
    )
    algo, pattern = known.context_parallel_algo, known.cp_layers
    layers = () if pattern is None else parse_layers(pattern, of_kinds=algo == registry.AUTO)
    if layers and algo == MEGATRON:
        raise ConfigError(f"--cp-layers needs algorithms of the plugin, got {algo}: leave one out")
    if layers and algo is None:
        algo = leading_algorithm(layers)
    elif comm_type.types and algo is None:
        algo, layers = comm_type.algo, comm_type.layers
    if algo in (None, MEGATRON):
        algo, rest, comm_type = None, others, CommType()
    ours = {key_of(flag): getattr(known, flag[2:].replace("-", "_")) for flag in FLAGS}
    options = (*comm_type.options, *(known.cp_options or ()))
    ours |= {"algo": algo, "options": options, "layers": layers}
    return PluginFlags(**ours, comm_type=comm_type), rest


def chosen_algorithm(argv: Sequence[str]) -> str | None:
    """Returns the algorithm that a command line chooses by any spelling; None: it chooses none.

    Raises: ConfigError: As `split_flags`.
    """
    parser = add_arguments(OneLineParser(add_help=False, allow_abbrev=False))
    algo = parser.parse_known_args(list(argv))[0].context_parallel_algo
    return MEGATRON if algo == MEGATRON else split_flags(argv)[0].algo


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    _words: Sequence[str] = ()

    @override
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = tuple(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    @override
    def error(self, message: str) -> NoReturn:
        if "are required" in message:
            # Rather the misspelt flag than the one that is missing for it.
            flags = (word.partition("=")[0] for word in self._words if word.startswith("--"))
            unknown = [flag for flag in flags if flag not in self._option_string_actions]
            if unknown:
                message = f"unrecognized arguments: {unknown[0]}"
        raise ConfigError(usage_error(self, message))


def speak_in_one_line(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Makes a parser of Megatron's refuse a command line as `OneLineParser` does, and returns it.

    It would print all of its usage, some seven hundred lines on every rank.
    """

    def error(message: str) -> NoReturn:
        raise ConfigError(usage_error(parser, message))

    parser.error = error  # type: ignore[method-assign]
    return parser


def make_help_printable(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Repairs texts of Megatron's help that argparse cannot format, and returns the parser."""
    for action in parser._actions:
        try:
            parser._get_formatter()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
    return parser


def usage_error(parser: argparse.ArgumentParser, message: str) -> str:
    """What is wrong with a command line, from argparse's words for it."""
    ours = add_arguments(argparse.ArgumentParser(add_help=False))._option_string_actions
    known = parser._option_string_actions
    flags = {**known, **ours}
    _, unrecognized, words = message.partition("unrecognized arguments: ")
    if unrecognized:
        first = words.split()[0].partition("=")[0]
        if not first.startswith("-"):
            return f"{first!r} belongs to no flag: write flags as --name value, or see --help"
        near = nearest(first, flags)
        is_ours = any(repr(name) in near for name in ours) and ALGORITHM in known
        return f"unknown flag {first}{near}: see {HELP if is_ours else '--help'}"
    flag, _, why = message.removeprefix("argument ").partition(": ")
    if message.startswith("argument ") and flag.split("/")[0] in flags:
        page = HELP if flag in ours and ALGORITHM in known else "--help"
        return f"{flag} {_TYPES.sub(_type_name, why)}: see {page}"
    return f"{message}: see --help"


_TYPES = re.compile(r"invalid (\w+) value: (.+)")
_TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "tuple_type": "whole numbers separated by commas",
}


def _type_name(found: re.Match[str]) -> str:
    kind = _TYPE_NAMES.get(found[1], f"a value that {found[1]} can read")
    return f"takes {kind}, got {found[2]}"
