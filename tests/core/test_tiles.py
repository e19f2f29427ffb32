"""The planner covers every visible pair exactly once, for any two blocks of any layout."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.layout import LAYOUTS, Span
from megatron_cp_plugin.core.tiles import Mask, plan_tiles
from megatron_cp_plugin.core.tiles import visible_pairs as count_visible_pairs
from megatron_cp_plugin.errors import ContextParallelError
from tests.random_tests import examples

masks = st.one_of(
    st.booleans().map(Mask), st.integers(1, 40).map(lambda window: Mask(window=window))
)
layouts = st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__)


def computed_pairs(q_spans, kv_spans, tiles):
    """Global (query, key) positions that tiles compute, with repetitions."""
    q = [p for span in q_spans for p in span.positions]
    kv = [p for span in kv_spans for p in span.positions]
    pairs = []
    for tile in tiles:
        rows, cols = q[tile.q], kv[tile.kv]
        assert (len(rows), len(cols)) == (tile.rows, tile.cols)
        found = [
            (row, col)
            for i, row in enumerate(rows)
            for j, col in enumerate(cols)
            if not tile.causal or (i <= j if tile.reverse else j <= i + len(cols) - len(rows))
            if j >= max((start for start in tile.document_bounds if start <= i), default=0)
        ]
        assert len(found) == tile.area > 0
        pairs += found
    return pairs


def visible_pairs(q_spans, kv_spans, mask):
    return [
        (row, col)
        for q in q_spans
        for row in q.positions
        for kv in kv_spans
        for col in kv.positions
        if not mask.causal or 0 <= row - col < (mask.window or math.inf)
    ]


def check(q_spans, kv_spans, mask, rectangular):
    tiles = plan_tiles(q_spans, kv_spans, mask, rectangular=rectangular)
    pairs = computed_pairs(q_spans, kv_spans, tiles)
    assert sorted(pairs) == sorted(visible_pairs(q_spans, kv_spans, mask))
    for tile in tiles:
        assert not tile.causal or tile.rows <= tile.cols
        assert rectangular or not tile.causal or tile.rows == tile.cols


@examples(100)
@given(layouts, layouts, st.integers(1, 6), st.integers(1, 40), masks, st.booleans())
def test_blocks_of_all_rank_pairs_cover_the_mask_once(
    q_layout, kv_layout, size, seq_len, mask, rectangular
):
    pairs = []
    for q_rank in range(size):
        for kv_rank in range(size):
            q_spans = q_layout.spans(q_rank, size, seq_len)
            kv_spans = kv_layout.spans(kv_rank, size, seq_len)
            tiles = plan_tiles(q_spans, kv_spans, mask, rectangular=rectangular)
            pairs += computed_pairs(q_spans, kv_spans, tiles)
    whole = (Span(0, seq_len),)
    assert sorted(pairs) == sorted(visible_pairs(whole, whole, mask))


@st.composite
def ascending_spans(draw):
    bounds = sorted(draw(st.lists(st.integers(0, 30), max_size=8, unique=True)))
    return tuple(Span(a, b) for a, b in list(pairwise(bounds))[::2])


@examples(100)
@given(ascending_spans(), ascending_spans(), masks, st.booleans())
def test_any_ascending_spans(q_spans, kv_spans, mask, rectangular):
    check(q_spans, kv_spans, mask, rectangular)


@examples(100)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_rows_and_columns_of_a_grid_on_the_cyclic_layout(rows, cols, data):
    """Attention2D gathers positions r + i*R in a row and c + j*C in a column."""
    r, c = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    check((Span(r, 37, rows),), (Span(c, 37, cols),), Mask(), rectangular=False)


def test_a_rank_of_zigzag_needs_one_call_a_step():
    spans = [LAYOUTS["zigzag"].spans(rank, 4, 64) for rank in range(4)]
    own = plan_tiles(spans[1], spans[1], Mask())
    assert [(t.q, t.kv, t.causal) for t in own] == [(slice(0, 16), slice(0, 16), True)]
    lower = plan_tiles(spans[2], spans[1], Mask())
    assert [(t.q, t.kv, t.causal) for t in lower] == [(slice(0, 16), slice(0, 8), False)]
    higher = plan_tiles(spans[1], spans[2], Mask())
    assert [(t.q, t.kv, t.causal) for t in higher] == [(slice(8, 16), slice(0, 16), False)]


def test_the_future_needs_no_call():
    assert plan_tiles((Span(0, 8),), (Span(8, 16),), Mask()) == ()


def test_spans_that_do_not_ascend_are_refused():
    with pytest.raises(ValueError, match="ascending"):
        plan_tiles((Span(8, 16), Span(0, 8)), (Span(0, 8),), Mask())


@pytest.mark.parametrize(
    "mask", [Mask(), Mask(causal=False), *(Mask(window=w) for w in (1, 7, 99))]
)
def test_number_of_visible_pairs(mask):
    whole = (Span(0, 20),)
    assert count_visible_pairs(20, mask) == len(visible_pairs(whole, whole, mask))


def test_a_window_of_one_block_needs_two_calls_a_rank():
    """Its own causal square, and the triangle of the block before: DISTFLASHATTN, appendix D."""
    mask = Mask(window=8)
    own = plan_tiles((Span(16, 24),), (Span(16, 24),), mask)
    assert [(t.q, t.kv, t.causal, t.reverse) for t in own] == [
        (slice(0, 8), slice(0, 8), True, False)
    ]
    before = plan_tiles((Span(16, 24),), (Span(8, 16),), mask)
    assert [(t.q, t.kv, t.causal, t.reverse) for t in before] == [
        (slice(0, 7), slice(1, 8), True, True)
    ]
    assert plan_tiles((Span(16, 24),), (Span(0, 8),), mask) == ()


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, -1), (False, 8)])
def test_windows_that_make_no_sense_are_refused(causal, window):
    with pytest.raises(ContextParallelError, match=f"got {window} with"):
        Mask(causal, window)
