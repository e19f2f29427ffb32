"""Sequence lengths as the benchmarks take them on the command line."""

_UNITS = {"K": 1024, "M": 1024**2}


def tokens_of(text: str) -> int:
    """128K -> 131072."""
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text)


def head_dims_of(word: str) -> tuple[int, int]:
    """Head dims of queries and keys, and of values: 128 -> (128, 128), 192:128 -> (192, 128)."""
    keys, _, values = word.partition(":")
    return int(keys), int(values or keys)
