"""Compares all that the package relies on in Megatron with the running one.

For `megatron-cp hooks` and the tests: a run looks at what it replaces only, see
`integration.contract`. What the package uses as it is, is in `used.md`; so is what only Megatron's
source tells: attributes that methods use, and what a function returns.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_cp_plugin.integration import compat
from megatron_cp_plugin.integration.compat import differences, owner_of
from megatron_cp_plugin.integration.contract import NAMES, SETTINGS, SINCE, Name, Part, Version


def problems(*parts: Part) -> list[str]:
    """Returns what of the running Megatron is not as the tables say, one line each."""
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
    return text, problems(*had) + compat.missing_settings("args", there)


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


_PARTS: dict[Part, str] = {
    "algorithm": "With an algorithm of the plugin",
    "training": "With an algorithm of the plugin in Megatron's training loop, by the launcher",
    "any": "In every run that uses the plugin",
    "record": "With `--cp-record`, since Megatron 0.18",
    "cpu": "On the CPU platform",
    "script": "By `scripts/pretrain_gpt.py`, since Megatron 0.19",
}
_PAGE = Path(__file__).with_name("used.md")


def _rows(page: str) -> Iterator[Name]:
    """Reads the tables of `used.md`."""
    parts: dict[str, Part] = {f"{title}:": part for part, title in _PARTS.items()}
    part: Part = "any"
    for line in page.splitlines():
        part = parts.get(line, part)
        if not line.startswith("| `"):
            continue
        path, relied, versions = line.strip("| ").split(" | ")
        (module, name), *_ = re.findall(r"`(.+?)\.(_?[A-Z].*|\w+)`", path)
        words = {said.split()[0]: said for said in relied.split("; ") if said}
        named = {how: tuple(re.findall(r"`(.+?)`", said)) for how, said in words.items()}
        since = re.search(r"^(?:from )?(\d+)\.(\d+)", versions)
        before = re.search(r"before (\d+)\.(\d+)", versions)
        yield Name(
            module,
            name,
            part=part,
            parameters=named.get("only", named.get("takes", ())),
            first=named.get("first", ()),
            since=_version(since),
            before=_version(before),
            closed="only" in named,
            attributes=named.get("has", ()),
            returned=tuple("" if name == "..." else name for name in named.get("returns", ())),
        )


def _version(found: re.Match[str] | None) -> Version | None:
    return None if found is None else (int(found[1]), int(found[2]))


USED = tuple(_rows(_PAGE.read_text()))


def replaced() -> str:
    """The tables of what the plugin replaces, as patches/README.md has them."""
    lines: list[str] = []
    for part, title in _PARTS.items():
        rows = [name for name in NAMES if name.part == part]
        if rows:
            lines += [f"{title}:", "", "| name | why | relied on | versions |"]
            lines += ["| --- | --- | --- | --- |"]
            lines += [f"| `{r.path}` | {r.why} | {_shape(r)} | {_range(r)} |" for r in rows]
            lines.append("")
    return "\n".join(lines)


def settings() -> str:
    """The table of settings, likewise."""
    lines = ["## Settings that are read", "", "| where | settings |", "| --- | --- |"]
    groups: dict[str, list[str]] = {}
    for setting in SETTINGS:
        since = f", from {_text(setting.since)}" if setting.since else ""
        groups.setdefault(" and ".join(setting.places) + since, []).append(setting.name)
    lines += [f"| {where} | {_words(names)} |" for where, names in groups.items()]
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """All tables, with what is used as it is in between."""
    return f"{replaced()}\n{_PAGE.read_text()}{settings()}"


def _shape(name: Name) -> str:
    said = []
    if name.first:
        said.append(f"first {_words(name.first)}")
    if name.parameters:
        said.append(f"takes {_words(name.parameters)}")
    return "; ".join(said)


def _words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _range(name: Name) -> str:
    return f"from {_text(name.since)}" if name.since else "all"


def _text(version: Version | None) -> str:
    return ".".join(map(str, version or ()))
