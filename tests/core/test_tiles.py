"""The planner covers every visible pair exactly once, for any two blocks of any layout."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.document_layout import Balanced, PaddedDocuments
from megatron_cp_plugin.core.layout import (
    LAYOUTS,
    Contiguous,
    Grouped,
    Layout,
    TokenMap,
    Zigzag,
    positions,
)
from megatron_cp_plugin.core.ranges import Span
from megatron_cp_plugin.core.tiles import NO_TILES, Mask, plan_pairs, plan_tiles
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.errors import ContextParallelError
from tests.random_tests import TILE_KINDS, examples
from tests.span_masks import pairs_of, seen_by

masks = st.one_of(
    st.booleans().map(Mask), st.integers(1, 40).map(lambda window: Mask(window=window))
)
layouts = st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__)


def check(q_spans, kv_spans, mask, kinds):
    """Every pair that the mask shows once, by tiles of the kinds that a kernel takes."""
    tiles = plan_tiles(q_spans, kv_spans, mask, **kinds)
    rows, cols = (
        torch.tensor([p for span in spans for p in span.positions], dtype=torch.int64)
        for spans in (q_spans, kv_spans)
    )
    want = seen_by(mask, 64)[rows][:, cols]
    assert torch.equal(pairs_of(tiles, want.shape), want)
    for tile in tiles:
        assert not tile.causal or tile.rows <= tile.cols
        assert kinds["rectangular"] or not tile.causal or tile.rows == tile.cols
        assert "windows" in kinds or not tile.window
        assert not (tile.window and tile.reverse)


@examples(100)
@given(layouts, layouts, st.integers(1, 6), st.integers(1, 40), masks, TILE_KINDS)
def test_blocks_of_all_rank_pairs_cover_the_mask_once(
    q_layout, kv_layout, size, seq_len, mask, kinds
):
    for q_rank, kv_rank in product(range(size), repeat=2):
        q_spans = q_layout.spans(q_rank, size, seq_len)
        check(q_spans, kv_layout.spans(kv_rank, size, seq_len), mask, kinds)


@st.composite
def ascending_spans(draw):
    bounds = sorted(draw(st.lists(st.integers(0, 30), max_size=8, unique=True)))
    return tuple(Span(a, b) for a, b in list(pairwise(bounds))[::2])


@examples(100)
@given(ascending_spans(), ascending_spans(), masks, TILE_KINDS)
def test_any_ascending_spans(q_spans, kv_spans, mask, kinds):
    check(q_spans, kv_spans, mask, kinds)


def test_a_rank_of_zigzag_needs_one_call_a_step():
    spans = [LAYOUTS["zigzag"].spans(rank, 4, 64) for rank in range(4)]
    own = plan_tiles(spans[1], spans[1], Mask())
    assert [(t.q, t.kv, t.causal) for t in own] == [(slice(0, 16), slice(0, 16), True)]
    lower = plan_tiles(spans[2], spans[1], Mask())
    assert [(t.q, t.kv, t.causal) for t in lower] == [(slice(0, 16), slice(0, 8), False)]
    higher = plan_tiles(spans[1], spans[2], Mask())
    assert [(t.q, t.kv, t.causal) for t in higher] == [(slice(8, 16), slice(0, 16), False)]


def test_spans_that_do_not_ascend_are_refused():
    with pytest.raises(ValueError, match="ascending"):
        plan_tiles((Span(8, 16), Span(0, 8)), (Span(0, 8),), Mask())


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
    assert not plan_tiles((Span(16, 24),), (Span(0, 8),), mask)


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, -1), (False, 8)])
def test_windows_that_make_no_sense_are_refused(causal, window):
    with pytest.raises(ContextParallelError, match=f"got {window} with"):
        Mask(causal, window)


DOCUMENT_LAYOUTS = [
    Contiguous(),
    Zigzag(),
    Balanced(),
    PaddedDocuments(),
    Grouped(PaddedDocuments(), 2),
]


@examples(150)
@given(
    st.sampled_from(DOCUMENT_LAYOUTS),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 6),
    st.sampled_from([1, 3, 10, 40]),
    st.integers(0, 99),
    st.sampled_from([(True, None), (False, None), (True, 1), (True, 5)]),
    TILE_KINDS,
)
def test_documents_that_are_planned_together(
    layout: Layout,
    size: int,
    length: int,
    mean: int,
    seed: int,
    kind: tuple[bool, int | None],
    kinds: dict[str, bool],
) -> None:
    """The same tiles as one by one, and the pairs of the mask."""
    seq_len = length * 4 * size
    mask = Mask(*kind, random_documents(seq_len, mean, multiple=layout.multiple(size), seed=seed))
    tokens = TokenMap(layout.for_documents(mask.documents), size, seq_len)
    ranks = list(product(range(size), repeat=2))
    blocks = [(tokens[query], tokens[key]) for query, key in ranks]
    tables, whole = plan_pairs(blocks, mask, **{"windows": False, **kinds}), seen_by(mask, seq_len)
    for (query, key), (q_spans, kv_spans), table in zip(ranks, blocks, tables, strict=True):
        tiles = tuple(table)
        assert tiles == tuple(plan_tiles(q_spans, kv_spans, mask, **kinds))
        rows, cols = (positions(tokens.layout, n, size, seq_len) for n in (query, key))
        want = whole[rows][:, cols]
        assert torch.equal(pairs_of(table, want.shape), want)


def test_tables() -> None:
    """Each document has a tile."""
    documents = tuple(range(0, 64, 4))[1:]
    blocks = Contiguous().spans(0, 1, 64), Contiguous().spans(0, 1, 64)
    table = plan_tiles(*blocks, Mask(documents=documents), rectangular=True)
    assert len(table) == 16
    assert [one.area for one in table] == table.areas.tolist() == [10] * 16
    for rows, cols in ((8, 2), (0, 2), (8, 0)):
        first, *_ = table.moved(rows, cols)
        assert (first.q, first.kv) == (slice(rows, rows + 4), slice(cols, cols + 4))
    assert not NO_TILES
