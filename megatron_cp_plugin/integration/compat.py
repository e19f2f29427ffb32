"""Checks the running Megatron against `contract`, and installs the replacements listed there.

A run looks at what it replaces and reads; `hooks --check` and the tests at all that is listed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import ModuleType
from typing import Any

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.contract import (
    NAMES,
    SETTINGS,
    SINCE,
    USED,
    VERSIONS,
    Name,
    Part,
    Place,
    Version,
)

_ALLOW = "--cp-allow-untested-megatron"
_WITHOUT_MEGATRON = {*sys.stdlib_module_names, "torch", "sympy", "numpy", "triton"}


def check_megatron(*parts: Part, allow_untested: bool) -> None:
    """Checks the running Megatron at start-up, before any of its names is replaced.

    Raises: ContextParallelError if nobody ran it, or Megatron is not as the table says.
    """
    version, text = running_version()
    if not allow_untested and version not in map(_as_version, VERSIONS):
        raise ContextParallelError(
            f"Megatron {text} was never tested with this plugin: use {_choices()}, or add "
            f"{_ALLOW} to run it if it has everything that the plugin relies on"
        )
    for part in parts:
        first, name, instead = SINCE.get(part, ((0, 0), "", ""))
        if version < first:
            raise ContextParallelError(
                f"{name} needs Megatron {first[0]}.{first[1]} or later, got {text}: {instead}"
            )
    _refuse_megatron(problems(*parts))


def check_args(args: Any, place: Place = "args") -> None:
    """Checks that Megatron's command line has the settings that the plugin reads.

    Raises: ContextParallelError: A setting is missing; it would read as if nobody had asked for it.
    """
    _refuse_megatron(missing_settings(place, vars(args)))


def running_version() -> tuple[Version, str]:
    """Returns the version of the Megatron that is imported: its first two numbers, and all."""
    import megatron.core

    # Without the commit of the folder around it, which Megatron adds, be it Megatron's or not.
    text: str = megatron.core.__version__.partition("+")[0]
    return _as_version(text), text


def problems(*parts: Part, tables: Sequence[Name] = NAMES) -> list[str]:
    """Returns what of the running Megatron is not as `contract` says, one line each."""
    version, _ = running_version()
    rows = [row for row in tables if row.part in ("any", *parts) and row.is_in(version)]
    found = [line for row in rows for line in differences(row)]
    if "algorithm" in parts:
        configuration = importlib.import_module("megatron.core.transformer.transformer_config")
        places: tuple[Place, ...] = ("config", "latent config")
        for place in places:
            config = getattr(configuration, _PLACES[place], None)  # itself a row of the table
            if config is not None:
                found += missing_settings(place, {field.name for field in fields(config)})
    return list(dict.fromkeys(found))


def report() -> tuple[str, list[str]]:
    """Returns the version of the running Megatron, and all that is not as the tables say."""
    from megatron.training.arguments import add_megatron_arguments

    version, text = running_version()
    parts: tuple[Part, ...] = ("algorithm", "training", "cpu", "record", "script")
    had = [part for part in parts if version >= SINCE.get(part, ((0, 0),))[0]]
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    there = {action.dest for action in parser._actions} | {"rank", "world_size"}
    return text, problems(*had, tables=(*NAMES, *USED)) + missing_settings("args", there)


class Replacement:
    """A name of Megatron with the plugin's function in its place, once `replace` has put it there.

    Attributes: hook: is called in place of Megatron's own, which it is given before the arguments.
    """

    def __init__(self, row: Name, hook: Callable[..., Any]) -> None:
        self.hook: Callable[..., Any] | None = hook
        self._owner, self._name = owner_of(row)
        self._original = getattr(self._owner, self._name)

        @functools.wraps(self._original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if self.hook is None:
                return self._original(*args, **kwargs)
            return self.hook(self._original, *args, **kwargs)

        replacement.replaced = self  # type: ignore[attr-defined]
        self._replacement = replacement

    @staticmethod
    def put(replacements: Iterable[Replacement]) -> None:
        """Installs them, here and wherever modules have imported the names.

        Also those of programs around Megatron, which may have done so long before.
        """
        _set((each, each._original, each._replacement) for each in replacements)

    @staticmethod
    def undo(replacements: Sequence[Replacement]) -> None:
        """Puts Megatron's own back; who imported a name meanwhile calls that one again too."""
        for each in replacements:
            each.hook = None
        _set((each, each._replacement, each._original) for each in replacements)


def _set(changes: Iterable[tuple[Replacement, Any, Any]]) -> None:
    """Sets the names of replacements, from one object to another, in all modules at once."""
    after: dict[Any, Any] = {}  # of functions and classes
    for each, before, value in changes:
        setattr(each._owner, each._name, value)
        if isinstance(each._owner, ModuleType):
            after[before] = value
    kinds = {type(before) for before in after}
    for name, module in list(sys.modules.items()):
        # Not Python's own modules and those of torch, most of all: a look at each takes time.
        if name.partition(".")[0] in _WITHOUT_MEGATRON or not isinstance(module, ModuleType):
            continue
        # A copy, for other threads import; a list of the items would take three times as long.
        for alias, value in vars(module).copy().items():
            # `id` would be slow: packages around Megatron audit each call of it.
            if type(value) in kinds and value in after:
                setattr(module, alias, after[value])


def replace(hooks: Mapping[str, Callable[..., Any]], *parts: Part) -> list[Replacement]:
    """Replaces names of Megatron, wherever they have been imported.

    Args: hooks: by `Name.name`; each is given Megatron's own before the arguments.
    """
    version, _ = running_version()
    rows = {row.name: row for row in NAMES if row.part in parts}
    named = [(rows[name], hook) for name, hook in hooks.items()]
    made = [Replacement(row, hook) for row, hook in named if row.is_in(version)]
    Replacement.put(made)
    return made


def owner_of(row: Name) -> tuple[Any, str]:
    """Returns the module or class that has a name, and the name in it."""
    owner: Any = importlib.import_module(row.module)
    *path, name = row.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def differences(row: Name) -> Iterator[str]:
    """Says in lines how Megatron differs from a row.

    In its name and its parameters; and in what only source tells: attributes that methods use, and
    what a function returns.
    """
    try:
        owner, name = owner_of(row)
        if not isinstance(owner, (type, ModuleType)):
            return  # Megatron's stand-in for a class of Transformer Engine, which is not installed.
        found = getattr(owner, name)
    except (ImportError, AttributeError):
        yield f"{row.path} is missing"
        return
    if row.parameters or row.first:
        has = tuple(inspect.signature(found).parameters)
        if has[: len(row.first)] != row.first:
            yield f"{row.path} takes ({', '.join(has)}), not ({', '.join(row.first)}, ...)"
        lacking = [parameter for parameter in row.parameters if parameter not in has]
        yield from (f"{row.path} has no parameter {parameter}" for parameter in lacking)
        others = [parameter for parameter in has if row.closed and parameter not in row.parameters]
        yield from (f"{row.path} has another parameter {parameter}" for parameter in others)
    kind = owner if isinstance(owner, type) else found
    if row.attributes and isinstance(kind, type):
        used, what = _names_in_methods(kind), f"{row.module}.{kind.__name__}"
        lacking = [attribute for attribute in row.attributes if attribute not in used]
        yield from (f"{what} has no attribute {attribute}" for attribute in lacking)
    if row.returned and not _returns(found, row.returned):
        want = ", ".join(name or "..." for name in row.returned)
        yield f"{row.path} does not return ({want}, ...)"


def _names_in_methods(kind: type) -> set[str]:
    """The names of attributes in the methods of a class and of Megatron's classes below it."""
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "megatron"]
    members = [member for base in bases for member in vars(base).values()]
    codes = (getattr(inspect.unwrap(m), "__code__", None) for m in members if callable(m))
    return {name for code in codes if code is not None for name in code.co_names}


def _returns(function: Any, names: tuple[str, ...]) -> bool:
    """Whether one of a function's return statements has variables of these names."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            got = [e.id if isinstance(e, ast.Name) else "" for e in node.value.elts]
            if len(got) >= len(names) and all(
                name in ("", other) for name, other in zip(names, got, strict=False)
            ):
                return True
    return False


def missing_settings(place: Place, there: Iterable[str]) -> list[str]:
    """Returns a line for each setting of `contract` that is missing in a place."""
    version, _ = running_version()
    names = set(there)
    return [
        f"{setting.name} is missing in its {_PLACES[place]}"
        for setting in SETTINGS
        if setting.is_in(version, place) and setting.name not in names
    ]


_PLACES: dict[Place, str] = {
    "args": "command-line arguments",
    "validated args": "validated arguments",
    "config": "TransformerConfig",
    "latent config": "MLATransformerConfig",
}


def _refuse_megatron(found: list[str]) -> None:
    if not found:
        return
    _, text = running_version()
    more = f" (and {len(found) - 1} more: megatron-cp hooks --check)" if len(found) > 1 else ""
    raise ContextParallelError(
        f"Megatron {text} differs from what the plugin relies on: {found[0]}{more}: use "
        f"{_choices()}"
    )


def _choices() -> str:
    return f"{', '.join(VERSIONS[:-1])} or {VERSIONS[-1]}"


def _as_version(text: str) -> Version:
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        raise ContextParallelError(f"Megatron's version must begin with two numbers, got {text}")
    return int(found[1]), int(found[2])


def unwrapped(model: Any) -> Any:
    """Opens all wrappers of a model, also the inner one of Megatron-FSDP, which Megatron leaves."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.utils import unwrap_model

    model = unwrap_model(model)
    if mcore_fsdp_adapter.HAVE_MEGATRON_FSDP:
        while isinstance(model, mcore_fsdp_adapter.MegatronFSDP):
            model = unwrap_model(model.module)
    return model
