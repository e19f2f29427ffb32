"""YAML run files: converts every setting into its command-line flag.

A file has two sections::

    megatron:              # any Megatron flag by its name; dashes or underscores
      num_layers: 2
      swiglu: true         # a switch: true gives the flag, false leaves it out
      bias_swiglu_fusion: false  # true unless switched off: false gives --no-bias-swiglu-fusion
      data_path: [data/stdlib]
    context_parallel:
      algo: zigzag
      kernel: auto
      platform: auto
      layers: null         # or a pattern: zigzag*3, ring
      linear_model: null   # or what layers of linear attention are
      recompute_attention: false
      chunked_loss: null   # or how many tokens' logits there are at a time
      send_latents: false  # of multi-latent attention, in place of K and V
      machine: null        # these four with algo: auto: a machine by name or file,
      mean_document: null  # how long packed documents are, such as 8K or FILE.csv,
      example_spans: null  # a file with attention_spans of one batch,
      explain: false       # and whether to print from what was chosen
      backward: kv         # the other keys are options of the algorithm

The result is a list of arguments, so a file and a command line go through the same parser and the
same checks. Flags of the command line come first: they override the file, and a reference to
another value, ``${megatron.seq_length}``, gives what the flag says. A flag that chooses another
algorithm than the file takes the place of the file's algorithm and of all its options.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
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
    chosen_algorithm,
)

_SHIPPED = Path(__file__).parents[1] / "configs"
_SECTIONS = ("megatron", "context_parallel")
_OPTIONS_FLAG = "--cp-options"
_ON_COMMAND_LINE = ("--config", "--help", "--cp-record", "--cp-allow-untested-megatron")
# The keys of `context_parallel:` that have a flag of their own; all others are algorithm options.
_FLAGS = {
    option.removeprefix("--context-parallel-").removeprefix("--cp-").replace("-", "_"): option
    for option in FLAGS
    if option not in (_OPTIONS_FLAG, *_ON_COMMAND_LINE)
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
    """Translates a YAML run file into command-line arguments.

    Args:
        path: The YAML file.
        parser: Megatron's parser with this plugin's flags added; it says which flags exist and
            what each of them takes.
        words: The command line, which overrides the file.

    Returns:
        Arguments for `parser`, in the order of the file, those of `context_parallel` last. What
        `words` override may be among them.

    Raises:
        ConfigError: The file cannot be read, or a section, key or value is not one that exists.
    """
    flags = _Flags(parser)
    overrides = _given_values(words, parser)
    config = load_run_file(path)
    _check_references(_written(config, path), path, overrides)
    sections = _resolved(config, path, overrides, flags)
    argv: list[str] = []
    given: dict[str, str] = {}
    for key, value in (sections.get("megatron") or {}).items():
        where = f"{path}: megatron.{key}"
        candidates = flags.find(str(key), where)
        dest = candidates[0].dest
        if dest in given:
            raise ConfigError(f"{where} sets the same flag as megatron.{given[dest]}: keep one")
        given[dest] = str(key)
        if dest not in overrides:
            argv += _arguments(candidates, str(key), value, where, parser)
    return argv + _own_arguments(sections.get("context_parallel") or {}, path, parser, words)


def check_early(path: str | Path, words: Sequence[str]) -> None:
    """Checks what needs no import of Megatron, which takes every rank many seconds.

    Of a run file that is its sections, its keys, to what values refer, and the settings of the
    plugin; of the command line, which overrides it, the names of flags.

    Args:
        path: The YAML file.
        words: The command line.

    Raises:
        ConfigError: As `yaml_to_argv`, or a flag is neither Megatron's nor ours.
    """
    config = load_run_file(path)
    # What nobody has run may make its flags in other ways.
    names = frozenset() if "--cp-allow-untested-megatron" in words else flag_names()
    written = _written(config, path)
    parser = add_arguments(OneLineParser(add_help=False, allow_abbrev=False))
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    if names:
        for key in written.get("megatron") or ():
            _check_key(str(key), f"{path}: megatron.{key}", names)
        ours = parser._option_string_actions.keys()
        flags = ours | {f"--{name.replace('_', '-')}" for name in names}
        for flag in sorted(flag for flag in given - ours if _normal(flag) not in names):
            raise ConfigError(f"unknown flag {flag}{nearest(flag, flags)}: see --help")
    if names or not given:
        # Some flags are not spelled like their values, to which references refer.
        _check_references(written, path, names if given else ())
    try:
        sections = _followed(config, path)
    except ConfigError:
        if given:
            return  # values of the command line may take the place of the file's
        raise
    _own_arguments(sections.get("context_parallel") or {}, path, parser, words)


def flag_names() -> frozenset[str]:
    """Returns the names of Megatron's flags and of their values, read from its sources.

    One file of it spells flags out, or names classes whose fields become flags. Fields that do not,
    and flags that switch off what has none, may be among the names.

    Returns:
        No name at all if the sources are not like that.
    """
    found = [find_spec(f"megatron.{part}") for part in ("training", "core")]
    folders = [
        Path(place) for one in found if one for place in one.submodule_search_locations or ()
    ]
    arguments = [path.read_text() for folder in folders for path in folder.glob("arguments.py")]
    if not arguments:
        return frozenset()
    names = {*_FLAG.findall(arguments[0]), *re.findall(r"""dest\s*=\s*["'](\w+)""", arguments[0])}
    classes = list(dict.fromkeys(re.findall(r"ArgumentGroupFactory\(\s*(\w+)", arguments[0])))
    source = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    for name in classes:  # which grows
        shape = rf"\nclass {name}(?:\(([^)]*)\))?:\n((?:[ \t#].*\n|\n)*)"
        definition = re.search(shape, source)
        if definition is None:
            return frozenset()
        parents, body = definition.groups("")
        bases = [base for base in re.findall(r"\w+", parents) if f"\nclass {base}" in source]
        classes += [base for base in bases if base not in classes]
        names |= {*_FLAG.findall(body), *re.findall(r"^    ([a-z]\w*) *:", body, re.MULTILINE)}
    normal = set(map(_normal, names))
    return frozenset(normal.union(*({f"no_{name}", f"disable_{name}"} for name in normal)))


# A flag in Python's source.
_FLAG = re.compile(r"""["'](--?[A-Za-z][\w-]*)["']""")


def _own_arguments(
    settings: Mapping[Any, Any],
    path: str | Path,
    parser: argparse.ArgumentParser,
    words: Sequence[str],
) -> list[str]:
    """The section `context_parallel` as flags, but for what `words` take out of force."""
    argv = _context_parallel_arguments(settings, path, parser)
    dropped = superseded(settings, words)
    if not dropped:
        return argv
    kept = {key: value for key, value in settings.items() if key not in dropped}
    return _context_parallel_arguments(kept, path, parser)


def superseded(settings: Mapping[Any, Any], words: Sequence[str]) -> dict[str, object]:
    """Returns the settings of a file's algorithm that the command line takes out of force.

    Args:
        settings: The section `context_parallel` of a run file.
        words: The command line. If it chooses another algorithm, the file's own and its options
            are not in force; with Megatron's own path only the platform is.

    Raises:
        ConfigError: A flag of the plugin has no value or a value that is not allowed.
    """
    algo = chosen_algorithm(words)
    if algo is None or algo == settings.get("algo"):
        return {}
    kept = {"platform"} if algo == MEGATRON else _FLAGS.keys() - {"algo"}
    return {str(key): value for key, value in settings.items() if key not in kept}


def _given_values(words: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The values that a command line gives to flags of Megatron, by the names of the values."""
    alone = OneLineParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for action in parser._actions:
        if action.option_strings and action.nargs != 0 and action.dest not in _ELSEWHERE:
            alone.add_argument(
                *action.option_strings, dest=action.dest, nargs=action.nargs, type=_plain
            )
    return vars(alone.parse_known_args(list(words))[0])


def _plain(text: str) -> object:
    """A value as it would be if a file had it."""
    with suppress(yaml.YAMLError):
        value = yaml.safe_load(text)
        if isinstance(value, (int, float, bool)):
            return value
    return text


def load_run_file(path: str | Path) -> DictConfig:
    """Reads a YAML run file without following its references or looking at its keys.

    Args:
        path: The file, or the name of one that this package ships.

    Raises:
        ConfigError: The file cannot be read, is not YAML or has an unknown section.
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
        raise ConfigError(
            f"{path}: a run file is a mapping with the sections {' and '.join(_SECTIONS)}, "
            f"got a {type(config).__name__.removesuffix('Config').lower()}"
        )
    for section in config:
        if section not in _SECTIONS:
            raise ConfigError(
                f"{path}: unknown section {section!r}{nearest(str(section), _SECTIONS)}: "
                f"a run file has the sections {' and '.join(_SECTIONS)}"
            )
    return config


class _Flags:
    """The flags of a parser, by option name and by the name that the parsed value gets."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._by_dest: dict[str, list[argparse.Action]] = {}
        self._by_option: dict[str, list[argparse.Action]] = {}
        for action in parser._actions:
            if not action.option_strings:
                continue
            self._by_dest.setdefault(action.dest, []).append(action)
            for option in action.option_strings:
                self._by_option.setdefault(_normal(option), []).append(action)

    def of_option(self, option: str) -> list[argparse.Action]:
        """Returns the flags that are spelled `option`."""
        return self._by_option[_normal(option)]

    def of_name(self, key: str) -> list[argparse.Action]:
        """Returns the flags that `key` can stand for, or none."""
        name = _normal(key)
        return self._by_dest.get(name) or self._by_option.get(name) or []

    def find(self, key: str, where: str) -> list[argparse.Action]:
        """Returns the flags that `key` can stand for; all of them set the same value."""
        _check_key(key, where, {*self._by_dest, *self._by_option})
        # The value's name first: `ckpt_fully_parallel_save: false` means what Megatron calls so,
        # although a deprecated switch of another meaning is spelled like it.
        return self.of_name(key)


def _check_key(key: str, where: str, names: Iterable[str]) -> None:
    """Raises: ConfigError if a key is not among the names, or belongs elsewhere."""
    name, known = _normal(key), {*names} - _ELSEWHERE.keys()
    if name in _ELSEWHERE:
        raise ConfigError(f"{where} cannot be set there: {_ELSEWHERE[name]}")
    if name not in known:
        raise ConfigError(f"{where}: no such Megatron flag{nearest(name, known)}")


def as_written(path: str | Path) -> dict[str, Any]:
    """Returns the sections of a run file in plain types, references not followed."""
    return _written(load_run_file(path), path)


def _written(config: DictConfig, path: str | Path) -> dict[str, Any]:
    sections: Any = OmegaConf.to_container(config, resolve=False)
    for section, settings in sections.items():
        if settings is not None and not isinstance(settings, dict):
            raise ConfigError(
                f"{path}: {section} must be a mapping of names to values, got {settings!r}"
            )
    return sections


def _check_references(sections: Mapping[str, Any], path: str | Path, given: Container[str]) -> None:
    """Refuses references to keys of `megatron` that neither the file nor the command line has.

    Args: given: names of values that the command line may have.
    """
    there = [str(key) for key in sections.get("megatron") or ()]
    for section, settings in sections.items():
        for key, value in (settings or {}).items():
            for name in re.findall(r"(?<!\\)\$\{\s*megatron\.([\w-]+)", str(value)):
                if name not in there and name not in given:
                    others = [other for other in there if other != key]
                    raise ConfigError(
                        f"{path}: {section}.{key} refers to megatron.{name}, and the file has no "
                        f"such key{nearest(name, others)}: name one that it has"
                    )


def _followed(config: DictConfig, path: str | Path) -> dict[str, Any]:
    try:
        sections: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from None
    return sections


def _resolved(
    config: DictConfig, path: str | Path, overrides: Mapping[str, Any], flags: _Flags
) -> dict[str, dict[Any, Any] | None]:
    """Returns the sections in plain types, references followed.

    Args: overrides: values of flags of Megatron that references give in place of the file's.
    """
    referred = config.copy()
    keys = list(config.get("megatron") or {})
    for key in keys:
        for action in flags.of_name(str(key)):
            if action.dest in overrides:
                referred.megatron[key] = overrides[action.dest]
    if keys:
        for dest in overrides.keys() - {_normal(str(key)) for key in keys}:
            referred.megatron[dest] = overrides[dest]
    sections = _followed(referred, path)
    if keys:
        sections["megatron"] = {key: sections["megatron"][key] for key in keys}
    return sections


def _context_parallel_arguments(
    settings: Mapping[Any, Any], path: str | Path, parser: argparse.ArgumentParser
) -> list[str]:
    flags = _Flags(parser)
    argv: list[str] = []
    options: dict[str, object] = {}
    algo = settings.get("algo")
    if algo is not None and not isinstance(algo, str):
        raise ConfigError(f"{path}: context_parallel.algo must be a name, got {algo!r}")
    try:
        known = () if algo in (None, MEGATRON, registry.AUTO) else registry.option_names(algo)
    except ConfigError as error:
        raise ConfigError(f"{path}: context_parallel.algo: {error}") from None
    for key, value in settings.items():
        where = f"{path}: context_parallel.{key}"
        if key in _FLAGS:
            argv += _arguments(flags.of_option(_FLAGS[key]), str(key), value, where, parser)
        elif key == "size":
            raise ConfigError(f"{where} cannot be set there: write megatron.context_parallel_size")
        elif key not in known:
            allowed = (*_FLAGS, *known)
            raise ConfigError(
                f"{where}: unknown key{nearest(str(key), allowed)}; "
                f"{f'with algo {algo}' if algo else 'without an algo'} the keys are "
                f"{', '.join(allowed)}"
            )
        elif value is not None:
            options[key] = value
    if options and algo is not None:  # auto has none
        try:
            registry.read_options(algo, options)
        except ConfigError as error:
            raise ConfigError(f"{path}: context_parallel: {error}") from None
        argv += [_OPTIONS_FLAG, *(f"{key}={_text(value)}" for key, value in options.items())]
    return argv


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
    texts = [_checked_text(action, item, where) for item in values]
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


def _checked_text(action: argparse.Action, value: object, where: str) -> str:
    """Returns the text of a value after the flag's own type and choices have accepted it."""
    if isinstance(value, (dict, list)) or value is None:
        raise ConfigError(
            f"{where} takes text or numbers, got {value!r}: quote it to pass it as text"
        )
    kind = action.type
    if isinstance(value, bool):
        if kind is not bool:
            raise ConfigError(f"{where} takes {_kind_name(action)}, got {_text(value)}")
        # argparse applies bool() to the word, and only the empty word is false.
        return "true" if value else ""
    if kind is int and isinstance(value, float) and value.is_integer():
        # YAML reads 1e3 as a float.
        value = int(value)
    text = _text(value)
    try:
        converted = text if kind is None else kind(text) if callable(kind) else text
    except (ValueError, TypeError, KeyError, AttributeError, argparse.ArgumentTypeError):
        hint = nearest(text, _choice_names(action))
        raise ConfigError(f"{where} takes {_kind_name(action)}, got {value!r}{hint}") from None
    except AssertionError:
        raise ConfigError(f"{where} does not accept {value!r}") from None
    if action.choices is not None and converted not in action.choices:
        names = _choice_names(action)
        raise ConfigError(
            f"{where} must be one of {', '.join(names)}, got {value!r}{nearest(text, names)}"
        )
    return text


def _kind_name(action: argparse.Action) -> str:
    """Says what values a flag takes."""
    if action.choices is not None:
        return "one of " + ", ".join(_choice_names(action))
    for kind, name in ((int, "a whole number"), (float, "a number"), (bool, "true or false")):
        if action.type is kind:
            return name
    if action.type in (str, None):
        return "text"
    return f"a value that {getattr(action.type, '__name__', action.type)} can read"


def _choice_names(action: argparse.Action) -> list[str]:
    return [str(getattr(choice, "name", choice)) for choice in action.choices or ()]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _long_option(action: argparse.Action) -> str:
    return next((o for o in action.option_strings if o.startswith("--")), action.option_strings[0])


def _one_line(error: BaseException) -> str:
    lines = (line.strip() for line in _sentences(error))
    return "; ".join(line for line in lines if line)


def _sentences(error: BaseException) -> Iterator[str]:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        yield f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    elif isinstance(error, OSError):
        yield str(error.strerror)
    else:
        # OmegaConf adds lines that name the key and the class.
        yield from str(error).splitlines()
