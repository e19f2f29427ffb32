"""What the plugin replaces and uses in Megatron, and the settings that it reads: `contract.md`.

`compat` compares what is replaced and read with the running Megatron at start-up and installs the
replacements; `Settings` reads nothing else. What the plugin uses as it is, is for
`megatron-cp hooks --check` and the tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

# Major and minor number.
type Version = tuple[int, int]

# Which runs need a row: all that use the plugin, or those with one of its algorithms, of
# these the ones on Megatron's training loop, on the CPU platform, with --cp-record, or of
# scripts/pretrain_gpt.py.
type Part = Literal["any", "algorithm", "training", "cpu", "record", "script"]

# Where a setting is: on the parsed command line; there once Megatron has validated it; in the
# configuration of a model, or of one with multi-latent attention; or not always anywhere.
type Place = Literal["args", "validated args", "config", "latent config", "nowhere for sure"]

# The versions that were run. The last one is the main branch of 22 August 2026, which calls itself
# so before its release.
VERSIONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.2", "0.20.0")


@dataclass(frozen=True)
class Name:
    """A function, method, class or other object of Megatron.

    Attributes:
        module: Where it is defined, or first to be had.
        name: In the module; that of a method begins with its class.
        part: Which runs need it.
        parameters: Those that the plugin gives or reads by name, in any order.
        first: Parameters that come first, in this order.
        since: The first version that has it.
        before: The first version that lacks it again; None: none does.
        closed: It has no other parameters: a class of the plugin is called in its place.
        attributes: What methods of the class call, or keep in, `self`.
        returned: What the returned tuple holds, by the names of the variables; "" is any.
    """

    module: str
    name: str
    part: Part = "algorithm"
    parameters: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    since: Version = (0, 0)
    before: Version | None = None
    closed: bool = False
    attributes: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Its name with its module."""
        return f"{self.module}.{self.name}"

    def is_in(self, version: Version) -> bool:
        """Whether a version has it."""
        return self.since <= version and (self.before is None or version < self.before)


@dataclass(frozen=True)
class Setting:
    """A setting of Megatron that the plugin reads, and the first version that has it."""

    name: str
    places: tuple[Place, ...]
    since: Version = (0, 0)

    def is_in(self, version: Version, place: Place) -> bool:
        """Whether a version has it in a place."""
        return place in self.places and self.since <= version


# What needs a later version than the first one: its name, and what to do in an earlier one.
SINCE: dict[Part, tuple[Version, str, str]] = {
    "record": ((0, 18), "--cp-record", "leave it out"),
    "script": (
        (0, 19),
        "this script",
        "start the pretrain_gpt.py of your Megatron-LM with python -m megatron_cp_plugin.launch",
    ),
}

# Which parts the tables of names are for, by their first words.
_PARTS: dict[str, Part] = {
    "With an algorithm of the plugin:": "algorithm",
    "With an algorithm of the plugin in Megatron's training loop, by the launcher:": "training",
    "In every run that uses the plugin:": "any",
    "With `--cp-record`, since Megatron 0.18:": "record",
    "On the CPU platform:": "cpu",
    "By `scripts/pretrain_gpt.py`, since Megatron 0.19:": "script",
}


def _names(tables: str) -> Iterator[Name]:
    """Rows of a name, why, where something takes its place, what is relied on, and versions."""
    part: Part = "any"
    for line in tables.splitlines():
        part = _PARTS.get(line, part)
        if not line.startswith("| `"):
            continue
        path, *_, relied, versions = line.strip("| ").split(" | ")
        (module, name), *_ = re.findall(r"`(.+?)\.(_?[A-Z].*|\w+)`", path)
        words = {said.split()[0]: _quoted(said) for said in relied.split("; ") if said}
        yield Name(
            module,
            name,
            part,
            parameters=words.get("only", words.get("takes", ())),
            first=words.get("first", ()),
            since=_version(r"^(?:from )?", versions) or (0, 0),
            before=_version("before ", versions),
            closed="only" in words,
            attributes=words.get("has", ()),
            returned=tuple("" if name == "..." else name for name in words.get("returns", ())),
        )


def _setting_rows(table: str) -> Iterator[Setting]:
    """Rows of places, with the first version, and names."""
    for line in table.splitlines()[4:]:
        where, names = line.strip("| ").split(" | ")
        places = cast("list[Place]", where.partition(",")[0].split(" and "))
        since = _version("from ", where) or (0, 0)
        yield from (Setting(name, tuple(places), since) for name in _quoted(names))


def _quoted(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`(.+?)`", text))


def _version(before: str, text: str) -> Version | None:
    found = re.search(before + r"(\d+)\.(\d+)", text)
    return None if found is None else (int(found[1]), int(found[2]))


PAGE = Path(__file__).with_suffix(".md").read_text()
_replaced, _used, _read = PAGE.split("\n## ")
NAMES = tuple(_names(_replaced))
USED = tuple(_names(_used))
SETTINGS = tuple(_setting_rows(_read))
