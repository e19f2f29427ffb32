"""Parses numbers of tokens such as 128K, of heads such as 32:8, and options such as a=1."""

import argparse
import re

_UNITS = {"": 1, "k": 2**10, "m": 2**20}


def tokens_of(text: str) -> int:
    """128K -> 131072, 1M -> 1048576. Raises: ArgumentTypeError if it is no such number."""
    found = re.fullmatch(r"(\d+)([kKmM]?)", text.strip().replace("_", ""))
    if found is None:
        raise argparse.ArgumentTypeError(
            f"takes a number of tokens, such as 131072 or 128K, got {text!r}"
        )
    return int(found[1]) * _UNITS[found[2].lower()]


def heads_of(text: str) -> tuple[int, int | None]:
    """32:8 -> (32, 8), 32 -> (32, None). Raises: ArgumentTypeError if it is neither."""
    found = re.fullmatch(r"(-?\d+)(?::(-?\d+))?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"takes query heads, or query heads:KV heads, such as 32 or 32:8, got {text!r}"
        )
    return int(found[1]), None if found[2] is None else int(found[2])


def option_of(text: str) -> tuple[str, str]:
    """KEY=VALUE -> (KEY, VALUE). Raises: ArgumentTypeError if it is none."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"takes KEY=VALUE, got {text!r}: write for example a=1")
    return key, value
