"""The flags that the scripts of the parity matrix have in common."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path


def make_parser(description: str | None, output: str, timeout_s: float) -> argparse.ArgumentParser:
    """A parser with --only, --list, --timeout and --output.

    Args:
        description: Of the script.
        output: Default of --output, in the folder of results.
        timeout_s: Default of --timeout.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PATTERN",
        help="run these, KEY/ALGORITHM with * for anything, and what they are judged by",
    )
    parser.add_argument("--list", action="store_true", help="list the runs and end")
    parser.add_argument(
        "--timeout", type=float, default=timeout_s, help="seconds for one run; default: %(default)s"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("results", output),
        metavar="DIR",
        help="where runs, or what is found, go; default: %(default)s",
    )
    return parser


def choose(
    names: Collection[str], args: argparse.Namespace, parser: argparse.ArgumentParser
) -> list[str]:
    """Returns those of some names that --only asks for; ends the script if there are none."""
    patterns: list[str] = args.only or ["*"]
    found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not found:
        parser.error(f"no run matches {' '.join(patterns)}: see --list")
    return found
