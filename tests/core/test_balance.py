"""Layouts that give ranks equal work, whatever the documents or spans."""

from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate, pairwise, starmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.balance import TEAM, deal
from tests.random_tests import examples


def test_one_document_in_all_is_zigzag():
    """Where there is nothing light but its own beginning."""
    assert deal([(0, 64)], 4, lambda start, stop: (stop - start) * (start + stop + 1) // 2) == [
        [(24, 40)],
        [(40, 48), (16, 24)],
        [(48, 56), (8, 16)],
        [(56, 64), (0, 8)],
    ]


def test_equal_parts_stay_whole():
    dealt = deal([(n, n + 8) for n in range(0, 64, 8)], 4, lambda start, stop: stop - start)
    assert sorted(rows for rank in dealt for rows in rank) == [(n, n + 8) for n in range(0, 64, 8)]
    assert [len(rank) for rank in dealt] == [2] * 4


def test_the_document_that_fills_a_rank_up_is_cut_behind_the_heavy_one():
    """So that the rank gets rows of both, from the rank before, in the order of positions."""
    bounds = list(accumulate((10, 9, 60, 8, 7), initial=0))

    def work(start, stop):
        before = bounds[bisect_right(bounds, start) - 1]
        return (stop - start) * (start + stop + 1 - 2 * before) // 2

    first, second = deal(list(pairwise(bounds)), 2, work)
    cut = {bisect_right(bounds, start) - 1 for start, _ in first}
    cut &= {bisect_right(bounds, start) - 1 for start, _ in second}
    assert cut == {2, 3}


@examples(200)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
    st.integers(1, 8) | st.sampled_from((16, 24)),
    st.data(),
)
def test_any_work_is_dealt(lengths, size, data):
    """Of any mask: rows in all, and equally many; work of some of them may not divide."""
    weights = [data.draw(st.integers(1, 5)) for _ in lengths]
    bounds = list(accumulate(lengths, initial=0))

    def work(start, stop):
        part = bisect_right(bounds, start) - 1
        return 0 if start == stop else weights[part] * (stop - start)

    dealt = deal(list(pairwise(bounds)), size, work)
    rows = sorted(row for rank in dealt for start, stop in rank for row in range(start, stop))
    assert rows == list(range(bounds[-1]))
    counts = [sum(stop - start for start, stop in rank) for rank in dealt]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("longest", "cut"), [(0, 1), (12_000, 2 * (32 // TEAM))])
def test_documents_are_cut_between_teams_where_one_is_long(longest, cut):
    """Of 256 documents or more on 32 ranks; work as under a causal mask."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 400, 256).tolist() + [longest] * (longest > 0)
    bounds = list(accumulate(lengths, initial=0))

    def work(start, stop):
        before = bounds[bisect_right(bounds, start) - 1]
        return (stop - start) * (start + stop + 1 - 2 * before) // 2

    dealt = deal(list(pairwise(bounds)), 32, work)
    assert max(map(rows_of, dealt)) - min(map(rows_of, dealt)) <= 1
    works = [sum(starmap(work, rank)) for rank in dealt]
    assert max(works) < 1.01 * sum(works) / 32
    teams = defaultdict(set)
    for rank, rows in enumerate(dealt):
        for start, _ in rows:
            teams[bisect_right(bounds, start)].add(rank // TEAM)
    assert sum(len(of) > 1 for of in teams.values()) <= cut


def rows_of(rank):
    return sum(stop - start for start, stop in rank)
