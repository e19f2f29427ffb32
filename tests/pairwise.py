"""Few rows of a table instead of all: every two values of two columns meet in one of them."""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import Any


def pairwise(
    *columns: Sequence[Any], allowed: Callable[..., bool] = lambda *row: True
) -> list[tuple[Any, ...]]:
    """Rows of the product of `columns`, each the first of those that add most pairs of values.

    Args: allowed: whether a row may be taken; pairs that no allowed row has are left out.
    """
    products = product(*map(range, map(len, columns)))
    rows = [r for r in products if allowed(*(c[i] for c, i in zip(columns, r, strict=True)))]
    pairs = [set(combinations(enumerate(row), 2)) for row in rows]
    missing = set().union(*pairs)
    # How many pairs a row adds only falls, so that most rows need not be counted again.
    best = [(-len(added), number) for number, added in enumerate(pairs)]
    heapify(best)
    chosen = []
    while missing:
        number = heappop(best)[1]
        added = -len(pairs[number] & missing)
        if best and (added, number) > best[0]:
            heappush(best, (added, number))
            continue
        missing -= pairs[number]
        chosen.append(tuple(c[i] for c, i in zip(columns, rows[number], strict=True)))
    return chosen
