"""Head dims as the benchmarks take them on the command line."""


def head_dims_of(word: str) -> tuple[int, int]:
    """Head dims of queries and keys, and of values: 128 -> (128, 128), 192:128 -> (192, 128)."""
    keys, _, values = word.partition(":")
    return int(keys), int(values or keys)
