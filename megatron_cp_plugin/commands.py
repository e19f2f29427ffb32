"""The commands of `megatron-cp` and their flags, as `commands.toml` has them."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_cp_plugin.document_lengths import lengths_of
from megatron_cp_plugin.integration.args import OneLineParser
from megatron_cp_plugin.terminal import count_of, heads_of, option_of, tokens_of

_TYPES: dict[str, Callable[[str], Any]] = {
    "count": count_of,
    "heads": heads_of,
    "lengths": lengths_of,
    "option": option_of,
    "path": Path,
    "tokens": tokens_of,
}
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_COMMON: dict[str, dict[str, Any]] = _TABLE.pop("common")
COMMANDS: dict[str, dict[str, Any]] = _TABLE


def parser_of(command: str) -> OneLineParser:
    """The parser of a command alone, for commands that take further flags."""
    return add_flags_of(
        OneLineParser(prog=f"megatron-cp {command}", **settings_of(command)), command
    )


def settings_of(command: str) -> dict[str, Any]:
    """The arguments with which the parser of a command is made."""
    return {
        "description": COMMANDS[command]["description"].strip(),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def add_flags_of[P: argparse.ArgumentParser](parser: P, command: str) -> P:
    """Adds the flags of a command to a parser, and returns it."""
    for name, own in COMMANDS[command]["flags"].items():
        how = _COMMON.get(name, {}) | own
        dashes = "" if how.pop("positional", False) else "--"
        kind = {"type": _TYPES[how["type"]]} if "type" in how else {}
        parser.add_argument(dashes + name, **how | kind)
    return parser
