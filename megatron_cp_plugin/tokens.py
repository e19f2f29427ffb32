"""Parses and prints numbers of tokens such as 128K."""

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
