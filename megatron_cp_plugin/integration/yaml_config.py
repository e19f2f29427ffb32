"""YAML run files: converts every setting into its command-line flag.

A file has two sections::

    megatron:              # any Megatron flag by its name; dashes or underscores
      num_layers: 2
      swiglu: true         # a switch: true gives the flag, false leaves it out
      bias_swiglu_fusion: false  # true unless switched off: false gives --no-bias-swiglu-fusion
      data_path: [data/stdlib]
    context_parallel:
      algo: zigzag         # any flag of the plugin by its name: --cp-chunked-loss
      chunked_loss: 4096
      backward: kv         # the other keys are options of the algorithm

The result is a list of arguments, so a file and a command line go through the same parser and the
same checks. Flags of the command line come first: they override the file, and a reference to
another value, ``${megatron.seq_length}``, gives what the flag says. A flag that chooses another
algorithm than the file takes the place of the file's algorithm and of all its options.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_cp_plugin import registry
from megatron_cp_plugin.errors import ConfigError, nearest
from megatron_cp_plugin.integration.args import (
    FLAGS,
    MEGATRON,
    OneLineParser,
    add_arguments,
    add_comm_type,
    chosen_algorithm,
    key_of,
    usage_error,
)

_SHIPPED = Path(__file__).parents[1] / "configs"
_SECTIONS = ("megatron", "context_parallel")
_SECTION_NAMES = f"the sections {' and '.join(_SECTIONS)}"
_OPTIONS_FLAG = "--cp-options"
_ON_COMMAND_LINE = (
    *("--config", "--help"),
    *(flag for flag, how in FLAGS.items() if not how.get("in_files", True)),
)
# The keys of `context_parallel:` that have a flag of their own; all others are algorithm options.
_FLAGS = {
    key_of(option): option for option in FLAGS if option not in (_OPTIONS_FLAG, *_ON_COMMAND_LINE)
}


def _normal(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


# Flags that the two sections must not set: they belong elsewhere, and where is said.
_ELSEWHERE = {
    **{_normal(option): "give it on the command line" for option in _ON_COMMAND_LINE},
    **{_normal(option): f"write context_parallel.{key}" for key, option in _FLAGS.items()},
    _normal(_OPTIONS_FLAG): "write the options under context_parallel",
    "yaml_cfg": "write Megatron's settings under megatron",
}


def yaml_to_argv(
    path: str | Path, parser: argparse.ArgumentParser, words: Sequence[str] = ()
) -> list[str]:
    """Translates a YAML run file into command-line arguments, those of `context_parallel` last.

    Args:
        parser: Megatron's with the plugin's flags: which there are and what they take.
        words: the command line, which overrides the file; what it overrides may be among the
            arguments.

    Raises: ConfigError if the file cannot be read, or for sections, keys or values of no use.
    """
    overrides = _given_values(words, parser)
    sections = _resolved(path, parser, overrides)
    argv: list[str] = []
    given: dict[str, str] = {}
    for where, key, value, candidates in _of_megatron(sections, path, parser):
        if not candidates:
            every = {action.dest for action in parser._actions}
            every |= set(map(_normal, parser._option_string_actions))
            near = nearest(_normal(key), every - _ELSEWHERE.keys())
            raise ConfigError(f"{where}: no such Megatron flag{near}")
        dest = candidates[0].dest
        if dest in given:
            raise ConfigError(f"{where} sets the same flag as megatron.{given[dest]}: keep one")
        given[dest] = key
        if dest not in overrides:
            argv += _arguments(candidates, key, value, where, parser)
    return argv + _own_arguments(sections.get("context_parallel") or {}, path, parser, words)


def own_arguments(path: str | Path, words: Sequence[str]) -> list[str]:
    """Translates the settings of a run file that choose and set an algorithm; needs no Megatron.

    References give the values of the file, also where the command line overrides them.

    Raises: ConfigError as `yaml_to_argv`, for these settings.
    """
    parser = add_comm_type(add_arguments(OneLineParser(add_help=False, allow_abbrev=False)))
    argv: list[str] = []
    try:
        sections = _resolved(path, parser, {})
    except ConfigError:
        if not parser.parse_known_args(list(words))[1]:
            raise
        # A flag of Megatron may be what it refers to: then the ranks follow the reference.
        written = as_written(path).get("context_parallel", {}).items()
        sections = {"context_parallel": {k: v for k, v in written if "${" not in str(v)}}
    for where, key, value, candidates in _of_megatron(sections, path, parser):
        if candidates:
            argv += _arguments(candidates, key, value, where, parser)
    return argv + _own_arguments(sections.get("context_parallel") or {}, path, parser, words)


def superseded(settings: Mapping[str, Any], words: Sequence[str]) -> dict[str, object]:
    """Returns the settings of a file's algorithm that the command line takes out of force.

    If it chooses another algorithm, the file's own and its options are not in force; with
    Megatron's own path only the platform is.
    """
    algo = chosen_algorithm(words)
    if algo is None or algo == settings.get("algo"):
        return {}
    kept = {"platform"} if algo == MEGATRON else _FLAGS.keys() - {"algo"}
    return {key: value for key, value in settings.items() if key not in kept}


def _given_values(words: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The values that a command line gives to flags of Megatron, by the names of the values."""
    alone = OneLineParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for action in parser._actions:
        if action.option_strings and action.nargs != 0 and action.dest not in _ELSEWHERE:
            alone.add_argument(
                *action.option_strings, dest=action.dest, nargs=action.nargs, type=_value_of
            )
    return vars(alone.parse_known_args(list(words))[0])


def _value_of(text: str) -> object:
    """A value as it would be if a file had it."""
    with suppress(yaml.YAMLError):
        value = yaml.safe_load(text)
        if isinstance(value, (int, float, bool)):
            return value
    return text


def load_run_file(path: str | Path) -> DictConfig:
    """Reads a YAML run file, or one that this package ships, but follows no references.

    Raises: ConfigError if it cannot be read, is not YAML or has an unknown section.
    """
    shipped = {file.stem: file for file in _SHIPPED.glob("*.yaml")}
    try:
        config = OmegaConf.load(shipped.get(str(path), path))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such run file{nearest(str(path), shipped)}: give a path, or the name of "
            f"one of {', '.join(sorted(shipped))}"
        ) from None
    except (OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read: {_one_line(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}") from None
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path}: a run file is a mapping with {_SECTION_NAMES}")
    if not config:
        raise ConfigError(f"{path}: a run file has {_SECTION_NAMES}, got an empty file")
    for section, written in config.items_ex(resolve=False):
        if section not in _SECTIONS:
            raise ConfigError(
                f"{path}: unknown section {section!r}{nearest(str(section), _SECTIONS)}: "
                f"a run file has {_SECTION_NAMES}"
            )
        if written is not None and not isinstance(written, DictConfig):
            raise ConfigError(f"{path}: {section} must be a mapping of names to values")
    return config


def as_written(path: str | Path) -> dict[str, Any]:
    """Returns the sections of a run file in plain types, references not followed."""
    sections: Any = OmegaConf.to_container(load_run_file(path), resolve=False)
    return {str(name): settings or {} for name, settings in sections.items()}


def _resolved(
    path: str | Path, parser: argparse.ArgumentParser, overrides: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Returns the sections in plain types, references followed.

    Args: overrides: values of flags of Megatron that references give in place of the file's.
    """
    config: Any = load_run_file(path)
    names = list(config.get("megatron") or ())
    for name in (*names, *overrides):
        for action in _named(parser, str(name)):
            if action.dest in overrides:
                config = OmegaConf.merge(config, {"megatron": {name: overrides[action.dest]}})
    try:
        sections: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from None
    if "megatron" in sections:
        sections["megatron"] = {str(name): sections["megatron"][name] for name in names}
    return {name: settings or {} for name, settings in sections.items()}


def _named(parser: argparse.ArgumentParser, key: str) -> list[argparse.Action]:
    """The flags that a key can stand for; all of them set the same value.

    The value's name first: `ckpt_fully_parallel_save: false` means what Megatron calls so, although
    a deprecated switch of another meaning is spelled like it.
    """
    name, flags = _normal(key), [action for action in parser._actions if action.option_strings]
    return [action for action in flags if action.dest == name] or [
        action for action in flags if name in map(_normal, action.option_strings)
    ]


def _of_megatron(
    sections: Mapping[str, Mapping[str, Any]], path: str | Path, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, str, Any, list[argparse.Action]]]:
    """The settings of Megatron: where each is, its key, its value, and its flags, as `_named`.

    Raises: ConfigError if a key belongs elsewhere.
    """
    for key, value in sections.get("megatron", {}).items():
        where, elsewhere = f"{path}: megatron.{key}", _ELSEWHERE.get(_normal(key))
        if elsewhere is not None:
            raise ConfigError(f"{where} cannot be set there: {elsewhere}")
        yield where, key, value, _named(parser, key)


def _own_arguments(
    settings: Mapping[str, Any],
    path: str | Path,
    parser: argparse.ArgumentParser,
    words: Sequence[str],
) -> list[str]:
    """The section `context_parallel` as flags, but for what `words` take out of force."""
    argv: list[str] = []
    options: dict[str, object] = {}
    algo, dropped = settings.get("algo"), superseded(settings, words)
    if algo is not None and not isinstance(algo, str):
        raise ConfigError(f"{path}: context_parallel.algo must be a name, got {algo!r}")
    try:
        known = () if algo in (None, MEGATRON, registry.AUTO) else registry.option_names(algo)
    except ConfigError as error:
        raise ConfigError(f"{path}: context_parallel.algo: {error}") from None
    for key, value in settings.items():
        where = f"{path}: context_parallel.{key}"
        if key in _FLAGS:
            given = _arguments(_named(parser, _FLAGS[key]), key, value, where, parser)
            argv += [] if key in dropped else given
        elif key == "size":
            raise ConfigError(f"{where} cannot be set there: write megatron.context_parallel_size")
        elif key not in known:
            allowed = (*_FLAGS, *known)
            raise ConfigError(
                f"{where}: unknown key{nearest(key, allowed)}; "
                f"{f'with algo {algo}' if algo else 'without an algo'} the keys are "
                f"{', '.join(allowed)}"
            )
        elif value is not None:
            options[key] = value
    if not options:
        return argv
    try:
        registry.read_options(str(algo), options)
    except ConfigError as error:
        raise ConfigError(f"{path}: context_parallel: {error}") from None
    given = [_OPTIONS_FLAG, *(f"{key}={_text(value)}" for key, value in options.items())]
    return argv if dropped else argv + given


def _arguments(
    candidates: list[argparse.Action],
    key: str,
    value: object,
    where: str,
    parser: argparse.ArgumentParser,
) -> list[str]:
    """Returns the arguments that give one flag its value; none where its default says the same."""
    if value is None:
        return []
    if all(action.nargs == 0 for action in candidates):
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is a switch: true or false, got {value!r}")
        return _switch_arguments(candidates, key, value, where)
    action = candidates[0]
    option = _long_option(action)
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and action.nargs is None:
        raise ConfigError(
            f"{where} takes one value, got the list {value!r}: quote it to pass it as text"
        )
    if isinstance(action.nargs, int) and len(values) != action.nargs:
        raise ConfigError(f"{where} takes a list of {action.nargs} values, got {value!r}")
    if action.nargs == "+" and not values:
        raise ConfigError(f"{where} takes at least one value, got an empty list")
    texts = [_checked_text(action, item, where, parser) for item in values]
    if len(texts) == 1 and action.nargs is None:
        # One word, so that a value that starts with a dash is not taken for a flag.
        return [f"{option}={texts[0]}"] if texts[0].startswith("-") else [option, texts[0]]
    for text in texts:
        if text.startswith("-") and not parser._negative_number_matcher.match(text):
            raise ConfigError(f"{where}: a value of a list cannot start with a dash, got {text!r}")
    return [option, *texts]


def _switch_arguments(
    candidates: list[argparse.Action], key: str, value: bool, where: str
) -> list[str]:
    # A key that is spelled like the option itself (`no_rope_fusion`) says whether it is given; one
    # that is spelled like the value (`rope_fusion`) says what the value is.
    spelled = [a for a in candidates if a.dest != _normal(key)]
    if spelled and not isinstance(spelled[0], argparse.BooleanOptionalAction):
        return [_long_option(spelled[0])] if value else []
    if spelled and _normal(key).startswith("no_"):
        value = not value
    for action in candidates:
        if isinstance(action, argparse.BooleanOptionalAction):
            wanted = [o for o in action.option_strings if o.startswith("--no-") is not value]
            return [wanted[0]]
        if getattr(action, "const", None) is value:
            return [] if action.default is value else [_long_option(action)]
    # No flag sets this value: it has to be what the parser gives by itself.
    default = candidates[0].default
    if default is value or (default in (None, argparse.SUPPRESS) and not value):
        return []
    raise ConfigError(f"{where} cannot be {_text(value)}: no flag of Megatron sets that")


def _checked_text(
    action: argparse.Action, value: object, where: str, parser: argparse.ArgumentParser
) -> str:
    """Returns the text of a value after the flag's own type and choices have accepted it."""
    if isinstance(value, (dict, list)) or value is None:
        raise ConfigError(
            f"{where} takes text or numbers, got {value!r}: quote it to pass it as text"
        )
    if isinstance(value, bool) and action.type is bool:
        # argparse applies bool() to the word, and only the empty word is false.
        return "true" if value else ""
    if action.type is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # YAML reads 1e3 as a float
    text = _text(value)
    try:
        parser._check_value(action, parser._get_value(action, text))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{where}: {usage_error(parser, str(error))}") from None
    except (KeyError, AttributeError, AssertionError):  # argparse lets them pass
        raise ConfigError(f"{where} does not accept {value!r}") from None
    return text


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _long_option(action: argparse.Action) -> str:
    return next((o for o in action.option_strings if o.startswith("--")), action.option_strings[0])


def _one_line(error: BaseException) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    # OmegaConf adds lines that name the key and the class.
    text = str(error.strerror) if isinstance(error, OSError) else str(error)
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
