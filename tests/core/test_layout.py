"""Layouts: every token on exactly one rank, and shard / unshard as inverses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.document_layout import PerDocument
from megatron_cp_plugin.core.documents import random_documents
from megatron_cp_plugin.core.layout import LAYOUTS, Span, positions, shard, unshard
from megatron_cp_plugin.core.tiles import Mask, plan_tiles, visible_pairs

layouts = st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__)
documents = st.lists(st.integers(1, 200), max_size=12)


@given(layouts, st.integers(1, 9), st.integers(0, 90))
def test_every_token_is_on_exactly_one_rank(layout, size, seq_len):
    held = [
        position
        for rank in range(size)
        for span in layout.spans(rank, size, seq_len)
        for position in span.positions
    ]
    assert sorted(held) == list(range(seq_len))


@given(layouts, st.integers(1, 9), st.integers(1, 5))
def test_multiples_give_every_rank_the_same_number_of_tokens(layout, size, factor):
    seq_len = layout.multiple(size) * factor
    assert {layout.length(rank, size, seq_len) for rank in range(size)} == {seq_len // size}


@given(layouts, st.integers(1, 7), st.integers(1, 40), st.integers(-2, 1))
def test_unshard_is_the_inverse_of_shard(layout, size, seq_len, dim):
    x = torch.randn(seq_len, seq_len)
    parts = [shard(x, dim, layout, rank, size) for rank in range(size)]
    assert torch.equal(unshard(parts, dim, layout), x)
    for rank, part in enumerate(parts):
        assert torch.equal(part, x.index_select(dim, positions(layout, rank, size, seq_len)))


@given(documents, st.integers(1, 9), st.integers(1, 400))
def test_a_layout_that_follows_documents(starts, size, seq_len):
    """Each token on one rank, equally many on each if they can be, local ones in their order."""
    layout = PerDocument().within(tuple(sorted({n for n in starts if n < seq_len})))
    held = [positions(layout, rank, size, seq_len).tolist() for rank in range(size)]
    assert sorted(token for mine in held for token in mine) == list(range(seq_len))
    assert all(mine == sorted(mine) for mine in held)
    assert max(map(len, held)) <= -(-seq_len // size)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_have_equal_work_whatever_the_documents(size):
    """Of random documents; the zigzag layout leaves ranks waiting for a fifth to half of it."""
    seq_len = 2**15
    for mean in (256, 2048, 8192):
        mask = Mask(documents=random_documents(seq_len, mean))
        spans = [PerDocument(mask.documents).spans(rank, size, seq_len) for rank in range(size)]
        work = [
            sum(tile.area for keys in spans for tile in plan_tiles(queries, keys, mask))
            for queries in spans
        ]
        assert sum(work) == visible_pairs(seq_len, mask)
        assert max(work) <= 1.15 * sum(work) / size


def test_long_documents_are_split_and_short_ones_whole():
    layout = PerDocument((100, 110, 114))  # of 100, 10, 4 and 14 tokens
    spans = [layout.spans(rank, 2, 128) for rank in range(2)]
    assert spans[0] == (Span(0, 25), Span(75, 100), Span(114, 128))
    assert spans[1] == (Span(25, 75), Span(100, 114))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("contiguous", [2, 3]), ("zigzag", [1, 6]), ("cyclic", [1, 5])],
)
def test_what_rank_1_of_4_holds_of_8_tokens(name, expected):
    assert positions(LAYOUTS[name], 1, 4, 8).tolist() == expected
