"""Layouts: every token on exactly one rank, and shard / unshard as inverses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.layout import LAYOUTS, positions, shard, unshard

layouts = st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__)


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [("contiguous", [2, 3]), ("zigzag", [1, 6]), ("cyclic", [1, 5])],
)
def test_what_rank_1_of_4_holds_of_8_tokens(name, expected):
    assert positions(LAYOUTS[name], 1, 4, 8).tolist() == expected
