"""Sequence lengths as the benchmarks take them on the command line."""

_UNITS = {"K": 1024, "M": 1024**2}


def tokens_of(text: str) -> int:
    """128K -> 131072."""
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text)
