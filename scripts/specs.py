"""What the benchmarks' command lines name."""

from typing import Any


def algo_of(word: str) -> tuple[str, dict[str, Any]]:
    """An algorithm and its options, as words: of `zigzag:layout=documents`."""
    name, *options = word.split(":")
    return name, dict(option.split("=", 1) for option in options)


def head_dims_of(word: str) -> tuple[int, int]:
    """Head dims of queries and keys, and of values: 128 -> (128, 128), 192:128 -> (192, 128)."""
    keys, _, values = word.partition(":")
    return int(keys), int(values or keys)
