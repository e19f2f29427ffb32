"""The registry of algorithms. Nothing outside this file compares names."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache, lru_cache
from textwrap import shorten
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.document_layout import NAMED
from megatron_cp_plugin.core.layout import Layout, Zigzag
from megatron_cp_plugin.core.linear.algorithm import LinearAlgorithm
from megatron_cp_plugin.errors import ConfigError, brief, nearest
from megatron_cp_plugin.packages import load_installed

Kind = Literal["softmax", "linear"]
AnyClass = type[Algorithm] | type[LinearAlgorithm]
Given = Mapping[str, object] | tuple[tuple[str, object], ...]  # options by name, or pairs

# Not an algorithm, but the choice of one: see planner.choose.
AUTO = "auto"
AUTO_OPTIONS = ("layout", "machine")

_PLAIN = int, float, str

_algorithms: dict[str, AnyClass] = {}
_unlisted: set[str] = set()


def register[A: AnyClass](name: str, *, listed: bool = True) -> Callable[[A], A]:
    """Class decorator: makes an algorithm available under a name.

    Its base class says which attention it is: Algorithm (softmax) or LinearAlgorithm (linear). From
    then on `cp.attention` or `cp.linear_attention` accepts the name.

    Args: listed: `available` has the name, and `auto` tries it.

    Raises: ConfigError if the name is taken, or the class lacks a layout, a method or a default.
    """

    def decorate(cls: A) -> A:
        if name in (*_algorithms, AUTO):
            raise ConfigError(f"algorithm {name!r} is registered already: choose another name")
        _check_class(name, cls)
        cls.name = name
        _algorithms[name] = cls
        if not listed:
            _unlisted.add(name)
        return cls

    return decorate


def _check_class(name: str, cls: AnyClass) -> None:
    for method in sorted(cls.__abstractmethods__):
        raise ConfigError(f"algorithm {name!r} has no method {method}: define it in {cls.__name__}")
    for option, kind in option_types(cls.Options).items():
        if not hasattr(cls.Options, option):
            raise ConfigError(f"option {option} of {name} has no default: give it one")
        if get_origin(kind) is not Literal and kind not in (bool, *_PLAIN):
            raise ConfigError(
                f"option {option} of {name} has the type {kind}: use a Literal, bool, int, float "
                "or str"
            )
    try:
        cls.layout_for(cls.Options())
    except (AttributeError, KeyError):
        raise ConfigError(
            f"algorithm {name!r} has no layout: set one in {cls.__name__}, as layout = Zigzag(), "
            "or define layout_for if its options name others than this package's"
        ) from None


def available(kind: Kind | None = None) -> tuple[str, ...]:
    """Names of all algorithms, other installed packages' included, without the papers' settings
    (`algorithms.published`).

    Args: kind: of attention that they compute; None: either.
    """
    load_installed()
    listed = _algorithms.keys() - _unlisted
    return tuple(sorted(name for name in listed if kind in (None, kind_of(name))))


def kind_of(name: str) -> Kind:
    """The attention that an algorithm computes. Raises: ConfigError if none has that name."""
    return "linear" if issubclass(algorithm_class(name), LinearAlgorithm) else "softmax"


def algorithm_class(name: str) -> AnyClass:
    """Raises: ConfigError if no algorithm has that name."""
    known = isinstance(name, str)  # users give other types too
    if known and name not in _algorithms:
        load_installed()
    if not known or name not in _algorithms:
        raise ConfigError(
            f"unknown context-parallel algorithm {brief(name)}{nearest(name, _algorithms)}: "
            f"use one of {', '.join(available())}"
        )
    return _algorithms[name]


def create(name: str, topology: Topology, options: Given) -> Algorithm:
    """Makes an algorithm of softmax attention; a collective operation of the topology's ranks.

    Args: options: by name, values as they are or as text; others have their defaults.

    Raises: ConfigError if the name, an option or a value is unknown, or it is linear attention.
    """
    made: Algorithm = _made("softmax", name, topology, options, "cp.linear_attention")
    return made


def create_linear(name: str, topology: Topology, options: Given) -> LinearAlgorithm:
    """As `create`, of linear attention."""
    made: LinearAlgorithm = _made("linear", name, topology, options, "cp.attention")
    return made


def _made(kind: Kind, name: str, topology: Topology, options: Given, instead: str) -> Any:
    """Args: instead: which function takes algorithms of the other kind."""
    if (found := kind_of(name)) != kind:
        raise ConfigError(
            f"{kind} attention got {name!r}, which is {found} attention: use one of "
            f"{', '.join(available(kind))}, or {instead}"
        )
    return algorithm_class(name)(topology, read_options(name, dict(options)))


def layout_of(name: str, options: Mapping[str, object]) -> Layout:
    """The layout that an algorithm will have; needs no processes. Raises: as `create`.

    With `AUTO` it is the layout of option "layout", because tokens are split before the choice.
    """
    if name == AUTO:
        return _layout_of_auto(options)
    try:
        return _layout(_algorithms[name], **options)
    except (KeyError, TypeError):  # a name or an option that is refused, or that is installed
        return _layout.__wrapped__(algorithm_class(name), **options)


@lru_cache(maxsize=256, typed=True)  # in every call of attention; 1 is no True
def _layout(cls: AnyClass, /, **options: object) -> Layout:
    return cls.layout_for(read_options(cls.name, options))


def _layout_of_auto(options: Mapping[str, object]) -> Layout:
    for option in options:
        if option not in AUTO_OPTIONS:
            raise ConfigError(
                f"{AUTO} has no option {option!r}{nearest(option, AUTO_OPTIONS)}: it takes "
                f"{', '.join(AUTO_OPTIONS)}, and chooses the others"
            )
    name = str(options.get("layout", Zigzag.name))
    found = NAMED if name in NAMED else layouts()
    if name not in found:
        raise ConfigError(
            f"{AUTO} option layout got {name!r}{nearest(name, found)}: use one of "
            f"{', '.join(found)}"
        )
    return found[name]


def layouts() -> dict[str, Layout]:
    """All layouts by name, also the default layouts of algorithms of other packages."""
    found = (layout_of(name, {}) for name in available())
    return NAMED | {layout.name: layout for layout in found}


def option_names(name: str) -> tuple[str, ...]:
    """Names of the options that an algorithm takes."""
    return tuple(field.name for field in fields(algorithm_class(name).Options))


@cache  # a tenth of a millisecond, in every call of attention
def option_types(options: type[Algorithm.Options]) -> Mapping[str, object]:
    """Declared types of an algorithm's options, by name."""
    return get_type_hints(options)


def read_options(name: str, options: Mapping[str, object]) -> Algorithm.Options:
    """Checks option values, given as they are or as text. Raises: ConfigError naming the option."""
    cls = algorithm_class(name)
    types = option_types(cls.Options)
    values = {}
    for option, value in options.items():
        if option not in types:
            allowed = f"it takes {', '.join(types)}" if types else "it takes none"
            raise ConfigError(f"{name} has no option {option!r}{nearest(option, types)}: {allowed}")
        values[option] = _convert(name, option, value, types[option])
    read = cls.Options(**values)
    for field in fields(read):
        value, least = getattr(read, field.name), field.metadata.get("least")
        if least is not None and value < least:
            raise ConfigError(
                f"{name} needs {field.name} >= {least}, got {value}: leave it out for the default, "
                f"{field.default}"
            )
    return read


def _convert(name: str, option: str, value: object, kind: object) -> object:
    """`value` as the declared type: a Literal, bool, int, float or str."""
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if value == choice or str(value) == str(choice):
                return choice
        allowed = [str(choice) for choice in get_args(kind)]
        raise ConfigError(
            f"{name} option {option} got {brief(value)}{nearest(str(value), allowed)}: "
            f"use one of {', '.join(allowed)}"
        )
    text = str(value)
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for plain in _PLAIN:
        if kind is plain:
            with suppress(ValueError):
                return plain(text)
    needed, got = getattr(kind, "__name__", kind), shorten(text, 80, placeholder=" ...")
    raise ConfigError(f"{name} option {option} needs {needed}, got {got}")
