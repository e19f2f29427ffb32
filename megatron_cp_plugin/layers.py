"""Assigns an algorithm to each layer of a model by patterns such as "lasp2*7, attention2d"."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import get_args

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.layout import Contiguous
from megatron_cp_plugin.errors import ConfigError

Options = tuple[tuple[str, object], ...]


def parse_layers(text: str, *, of_kinds: bool = False) -> tuple[str, ...]:
    """Reads a pattern: "lasp2*7, attention2d" is seven layers of lasp2 and one of attention2d.

    Args: of_kinds: names are softmax and linear, for algorithms that are yet to be chosen.

    Returns: the algorithm of each layer; the pattern repeats over the depth of the model.
    Raises: ConfigError if a name or a number is not one.
    """
    names: list[str] = []
    for word in text.split(","):
        name, star, times = (part.strip() for part in word.partition("*"))
        count = times if star else "1"
        if not name or not count.isdecimal() or not int(count):
            raise ConfigError(
                f"layers takes NAME or NAME*COUNT, separated by commas, got {word.strip()!r}: "
                "write for example lasp2*7, attention2d"
            )
        if not of_kinds:
            registry.kind_of(name)
        elif name not in get_args(registry.Kind):
            raise ConfigError(
                f"layers whose algorithms auto chooses are softmax or linear, got {name!r}: write "
                "for example linear*7, softmax, or leave auto out"
            )
        names += [name] * int(count)
    return tuple(names)


def leading_algorithm(layers: Sequence[str]) -> str:
    """The algorithm whose layout the model takes.

    The first of softmax attention, if any, whose layout all the others can have; of several one
    whose layout gives all ranks equal causal work.
    """
    names = [name for name in layers if registry.kind_of(name) == "softmax"] or layers
    for name in sorted(names, key=lambda name: registry.layout_of(name, {}) == Contiguous()):
        with suppress(ConfigError):
            options_by_name(layers, name, ())
            return name
    return names[0]


def options_by_name(layers: Sequence[str], algo: str, options: Options) -> Mapping[str, Options]:
    """Options of every algorithm of a model, so that all have the layout of `algo`.

    Args: options: of `algo`; the others have their defaults, but for an option "layout".

    Raises: ConfigError if two algorithms cannot have one layout.
    """
    layout = registry.layout_of(algo, dict(options))
    chosen: dict[str, Options] = {algo: options}
    for name in dict.fromkeys(layers):
        if name == algo:
            continue
        chosen[name] = ()
        if layout.name in _layouts(name):
            chosen[name] = (("layout", layout.name),)
        other = registry.layout_of(name, dict(chosen[name]))
        if other.name != layout.name:
            raise ConfigError(
                f"layers of one model need one layout, got {algo} ({layout.name}) and {name} "
                f"({other.name}): {_advice(name, layout.name)}"
            )
    return chosen


def check_balance(layers: Sequence[str], algo: str, options: Options) -> None:
    """Checks that no layers lose their balance by the layout of the others.

    Args: options: of `algo`, whose layout all have.

    Raises: ConfigError if softmax layers whose own layout gives all ranks equal causal work would
    have contiguous chunks, which no option asks for.
    """
    if registry.layout_of(algo, dict(options)) != Contiguous() or "layout" in dict(options):
        return
    for name in dict.fromkeys(layers):
        own = registry.layout_of(name, {}).name
        if registry.kind_of(name) == "linear" or own == Contiguous.name:
            continue
        others = [x for x in dict.fromkeys(layers) if own not in _possible(x)]
        advice = _advice(others[0], own) if others else f"add --cp-options layout={own}"
        if Contiguous.name in _layouts(algo):
            advice += ", or add --cp-options layout=contiguous to have it so"
        raise ConfigError(
            f"layers {', '.join(dict.fromkeys(layers))} would all have the contiguous layout, in "
            f"which {name} gives the ranks unequal work: {advice}"
        )


def layout_choices(name: str) -> Iterator[tuple[str, str, str]]:
    """(layout, option, choice) for all choices of the options that decide an algorithm's layout."""
    for option, kind in registry.option_types(registry.algorithm_class(name).Options).items():
        # With "auto" other options decide.
        choices = [c for c in get_args(kind) if isinstance(c, str) and c != "auto"]
        layouts = [registry.layout_of(name, {option: choice}).name for choice in choices]
        if len(set(layouts)) > 1:
            yield from ((x, option, choice) for x, choice in zip(layouts, choices, strict=True))


def _layouts(name: str) -> tuple[str, ...]:
    """The layouts that an algorithm can be given by its option of that name."""
    hints = registry.option_types(registry.algorithm_class(name).Options)
    return get_args(hints["layout"]) if "layout" in hints else ()


def _possible(name: str) -> tuple[str, ...]:
    """The layouts that an algorithm can have beside others: its own, or by option `layout`."""
    return (registry.layout_of(name, {}).name, *_layouts(name))


def _advice(name: str, layout: str) -> str:
    kind = registry.kind_of(name)
    fitting = [other for other in registry.available(kind) if layout in _possible(other)]
    return f"in place of {name} use {' or '.join(fitting)}" if fitting else f"leave {name} out"
