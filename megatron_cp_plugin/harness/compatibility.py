"""Compares all that the package relies on in Megatron with the running one.

For `megatron-cp hooks --check` and the tests: a run looks at what it replaces only. Here is also
what only Megatron's source tells: attributes that methods use, and what a function returns.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from megatron_cp_plugin.integration import compat
from megatron_cp_plugin.integration.compat import differences, owner_of
from megatron_cp_plugin.integration.contract import SINCE, USED, Name, Part


def all_differences(*parts: Part) -> list[str]:
    """Returns differences of the running Megatron from the tables, one line each."""
    version, _ = compat.running_version()
    found = compat.problems(*parts)
    for used in USED:
        if used.part in ("any", *parts) and used.is_in(version):
            found += [*differences(used), *_differences_in_source(used)]
    return list(dict.fromkeys(found))


def report() -> tuple[str, list[str]]:
    """Returns the version of the running Megatron, and all that is not as the tables say."""
    from megatron.training.arguments import add_megatron_arguments

    version, text = compat.running_version()
    parts: tuple[Part, ...] = ("algorithm", "training", "cpu", "record", "script")
    had = [part for part in parts if version >= SINCE.get(part, ((0, 0),))[0]]
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    there = {action.dest for action in parser._actions} | {"rank", "world_size"}
    return text, all_differences(*had) + compat.missing_settings("args", there)


def _differences_in_source(used: Name) -> Iterator[str]:
    try:
        owner, name = owner_of(used)
        found = getattr(owner, name)
    except (ImportError, AttributeError):
        return  # said already
    if used.closed and isinstance(owner, type):
        yield from (
            f"{used.path} has another parameter {parameter}"
            for parameter in inspect.signature(found).parameters
            if parameter not in used.parameters
        )
    kind = owner if isinstance(owner, type) else found
    if used.attributes and isinstance(kind, type):
        names = _names_in_methods(kind)
        yield from (
            f"{used.module}.{kind.__name__} has no attribute {attribute}"
            for attribute in used.attributes
            if attribute not in names
        )
    if used.returned and not _returns(found, used.returned):
        want = ", ".join(name or "..." for name in used.returned)
        yield f"{used.path} does not return ({want}, ...)"


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
