"""Layouts: every token on exactly one rank, and shard / unshard as inverses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.layout import LAYOUTS, positions, shard, unshard
from megatron_cp_plugin.core.layouts.document_layout import Balanced

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
    layout = Balanced().within(tuple(sorted({n for n in starts if n < seq_len})))
    held = [positions(layout, rank, size, seq_len).tolist() for rank in range(size)]
    assert sorted(token for mine in held for token in mine) == list(range(seq_len))
    assert all(mine == sorted(mine) for mine in held)
    if layout.documents:
        assert {len(mine) for mine in held} <= {seq_len // size, -(-seq_len // size)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("contiguous", [2, 3]), ("zigzag", [1, 6]), ("cyclic", [1, 5])],
)
def test_what_rank_1_of_4_holds_of_8_tokens(name, expected):
    assert positions(LAYOUTS[name], 1, 4, 8).tolist() == expected
