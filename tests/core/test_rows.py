"""Rows of blocks: sets of numbers as ranges."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.ranges import (
    Ranges,
    Rows,
    Span,
    clipped,
    common,
    positions_of,
    rows_of_all,
    union,
    united,
)
from tests.random_tests import examples


def of_numbers(numbers: set[int]) -> Rows:
    return union(((n, n + 1),) for n in numbers)


def numbers_of(rows: Rows) -> list[int]:
    return [n for start, stop in rows for n in range(start, stop)]


SETS = st.sets(st.integers(0, 30), max_size=20)


def test_ranges_within_others_are_united() -> None:
    assert united(np.array([[5, 0, 1], [8, 6, 2]]), 0) == ((0, 8),)
    assert united(np.array([[0, 4], [2, 6]]), 1) == ((0, 2), (4, 6))
    assert united(np.array([[0, 4], [2, 6]]), 2) == ((0, 6),)


@examples(200)
@given(SETS, SETS, st.integers(0, 30), st.integers(0, 30), st.integers(0, 4))
def test_rows_are_sets(a: set[int], b: set[int], start: int, stop: int, gap: int) -> None:
    here, there = of_numbers(a), of_numbers(b)
    assert numbers_of(here) == sorted(a)
    assert numbers_of(union((here, there))) == sorted(a | b)
    assert numbers_of(clipped(here, start, stop)) == [n for n in sorted(a) if start <= n < stop]
    filled = {n for x, y in pairwise(sorted(a)) if y - x - 1 <= gap for n in range(x, y)}
    assert numbers_of(union((here,), gap)) == sorted(a | filled)
    found = {}
    for in_here, in_there in common(here, there):
        mine, others = sorted(a)[in_here], sorted(b)[in_there]
        assert mine == others
        found |= dict.fromkeys(mine)
    assert found.keys() == a & b


@examples(200)
@given(SETS, st.lists(SETS, max_size=3))
def test_rows_of_several_blocks(wanted: set[int], owned: list[set[int]]) -> None:
    owned = [own.difference(*owned[:index]) for index, own in enumerate(owned)] + [set()]
    blocks = [tuple(Span(*one) for one in of_numbers(numbers)) for numbers in owned]
    rows = [of_numbers({i for i, n in enumerate(sorted(own)) if n in wanted}) for own in owned]
    for spans, own, some in zip(blocks, owned, rows, strict=True):
        found = [n for span in positions_of(Ranges.of(spans), some) for n in span.positions]
        assert found == sorted(own & wanted)
    both = list(zip(map(Ranges.of, blocks), rows, strict=True))
    joined = sorted(set().union(*owned))
    assert rows_of_all(both) == of_numbers({i for i, n in enumerate(joined) if n in wanted})
