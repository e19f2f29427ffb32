"""Arrays of ranges, element by element."""

from itertools import groupby, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.ranges import (
    Ranges,
    Span,
    expanded,
    first_fit,
    offsets,
    offsets_of_each,
    runs,
)
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


SPANS = st.lists(
    st.builds(Span, st.integers(0, 20), st.integers(0, 20), st.integers(1, 4)), max_size=6
)


@examples(100)
@given(SPANS)
def test_ranges_have_the_elements_of_their_spans(spans: list[Span]) -> None:
    found = Ranges.of(spans)
    elements = [n for span in spans for n in span.positions]
    assert list(found) == [span for span in spans if len(span)]
    assert found.elements.tolist() == elements
    assert (found.total, found.lengths.tolist()) == (len(elements), [len(one) for one in found])
    assert found.moved(3).elements.tolist() == [n + 3 for n in elements]
    assert found.packed.elements.tolist() == list(range(len(elements)))
    turned = found.backward
    wanted = [n for span in found for n in span.positions[::-1]]
    assert turned.elements.tolist() == wanted
    assert turned.extents.tolist() == [
        [one.start for one in found],
        [one.positions[-1] + 1 for one in found],
    ]
    assert found == Ranges.of(tuple(spans))
    assert hash(found) == hash(Ranges.of(tuple(spans)))


@examples(50)
@given(st.lists(st.integers(0, 12), max_size=12, unique=True))
def test_united_ranges(edges: list[int]) -> None:
    spans = [Span(n, n + 1) for n in edges]
    whole = Ranges.of(spans).united
    assert whole.elements.tolist() == sorted(edges)
    assert all(a.stop < b.start for a, b in pairwise(whole))


def test_elements_that_follow_each_other_are_a_group() -> None:
    begins, ends = np.array([[0, 2, 4, 6], [0, 9, 1, 9]]), np.array([[2, 4, 6, 8], [1, 12, 9, 12]])
    assert first_fit(begins, ends) == [[0, 1], [2, 3]]
    assert first_fit(begins[:1], ends[:1]) == [[0, 1, 2, 3]]
