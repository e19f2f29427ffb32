"""The planner covers every visible pair exactly once, for any two blocks of any layout."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.layout import LAYOUTS, Span
from megatron_cp_plugin.core.tiles import Mask, plan_tiles

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
            if not tile.causal or j <= i + len(cols) - len(rows)
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
        if col <= row or not mask.causal
    ]


def check(q_spans, kv_spans, mask, rectangular):
    tiles = plan_tiles(q_spans, kv_spans, mask, rectangular=rectangular)
    pairs = computed_pairs(q_spans, kv_spans, tiles)
    assert sorted(pairs) == sorted(visible_pairs(q_spans, kv_spans, mask))
    for tile in tiles:
        assert not tile.causal or tile.rows <= tile.cols
        assert rectangular or not tile.causal or tile.rows == tile.cols


@given(layouts, layouts, st.integers(1, 6), st.integers(1, 40), st.booleans(), st.booleans())
def test_blocks_of_all_rank_pairs_cover_the_mask_once(
    q_layout, kv_layout, size, seq_len, causal, rectangular
):
    mask = Mask(causal)
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


@given(ascending_spans(), ascending_spans(), st.booleans(), st.booleans())
def test_any_ascending_spans(q_spans, kv_spans, causal, rectangular):
    check(q_spans, kv_spans, Mask(causal), rectangular)


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
