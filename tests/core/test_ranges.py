"""Arrays of ranges, element by element."""

from itertools import groupby

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.ranges import expanded, offsets, offsets_of_each, runs
from tests.random_tests import examples

COUNTS = st.lists(st.integers(0, 4), max_size=8)


@examples(30)
@given(COUNTS)
def test_expanded(counts: list[int]) -> None:
    whose, number = expanded(np.array(counts, np.int64))
    elements = [(one, n) for one, count in enumerate(counts) for n in range(count)]
    assert list(zip(whose.tolist(), number.tolist(), strict=True)) == elements


@examples(30)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=8))
def test_offsets(ranges: list[tuple[int, int]]) -> None:
    ranges.sort(key=lambda one: one[0])
    whose, lengths = np.array(ranges, np.int64).reshape(-1, 2).T
    sums, of_each = [], []
    for number, (owner, _) in enumerate(ranges):
        sums.append(sum(length for _, length in ranges[:number]))
        of_each.append(sum(length for other, length in ranges[:number] if other == owner))
    assert offsets(lengths).tolist() == sums
    assert offsets_of_each(whose, lengths).tolist() == of_each


@examples(30)
@given(st.lists(st.integers(0, 1), max_size=12))
def test_runs(values: list[int]) -> None:
    numbers = np.array(values, np.int64)
    first, last = runs(numbers[1:] != numbers[:-1], len(numbers))
    equal = [[n for n, _ in run] for _, run in groupby(enumerate(values), key=lambda x: x[1])]
    assert list(zip(first.tolist(), last.tolist(), strict=True)) == [
        (run[0], run[-1]) for run in equal
    ]
