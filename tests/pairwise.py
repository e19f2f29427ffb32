"""Few rows of a table instead of all: every two values of two columns meet in one of them."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(
    *columns: Sequence[Any], allowed: Callable[..., bool] = lambda *row: True
) -> list[tuple[Any, ...]]:
    """Rows of the product of `columns`, each the one that adds most pairs of values.

    Args: allowed: whether a row may be taken; pairs that no allowed row has are left out.
    """
    products = product(*map(range, map(len, columns)))
    rows = [r for r in products if allowed(*(c[i] for c, i in zip(columns, r, strict=True)))]
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        chosen.append(tuple(c[i] for c, i in zip(columns, best, strict=True)))
    return chosen
