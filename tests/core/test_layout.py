"""Layouts: every token on exactly one rank, shard / unshard as inverses, and the recogniser of
tokens that are not those of a rank's layout.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.document_layout import Balanced, describe_mismatch
from megatron_cp_plugin.core.layout import LAYOUTS, positions, shard, unshard

layouts = st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__)
ZIGZAG = LAYOUTS["zigzag"]
any_layout = st.sampled_from([*LAYOUTS.values(), Balanced((7, 20))])


@given(layouts, st.integers(1, 9), st.integers(1, 5))
def test_multiples_give_every_rank_the_same_number_of_tokens(layout, size, factor):
    seq_len = layout.multiple(size) * factor
    assert {layout.length(rank, size, seq_len) for rank in range(size)} == {seq_len // size}


@given(layouts, st.integers(1, 9), st.integers(0, 60), st.integers(-2, 1))
def test_unshard_is_the_inverse_of_shard(layout, size, seq_len, dim):
    """And every token is on one rank."""
    x = torch.arange(seq_len**2).view(seq_len, seq_len)
    parts = [shard(x, dim, layout, rank, size) for rank in range(size)]
    assert torch.equal(unshard(parts, dim, layout), x)
    assert torch.equal(torch.cat(parts, dim).flatten().sort().values, x.flatten())
    for rank, part in enumerate(parts):
        assert torch.equal(part, x.index_select(dim, positions(layout, rank, size, seq_len)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("contiguous", [2, 3]), ("zigzag", [1, 6]), ("cyclic", [1, 5])],
)
def test_what_rank_1_of_4_holds_of_8_tokens(name, expected):
    assert positions(LAYOUTS[name], 1, 4, 8).tolist() == expected


@given(any_layout, st.integers(1, 9), st.integers(0, 90), st.integers(0, 3))
def test_a_rank_s_own_tokens_are_right(layout, size, seq_len, batch):
    for rank in range(size):
        own = positions(layout, rank, size, max(seq_len, 21))
        rows = own.expand(batch, -1) if batch else own
        assert describe_mismatch(rows, layout, rank, size, max(seq_len, 21)) is None


@given(st.data(), any_layout, st.integers(1, 9), st.integers(21, 90))
def test_one_wrong_position_is_found(data, layout, size, seq_len):
    rank = data.draw(st.integers(0, size - 1))
    held = positions(layout, rank, size, seq_len)
    token = data.draw(st.integers(0, len(held) - 1))
    right = int(held[token])
    held[token] += data.draw(st.sampled_from([-1, 1, seq_len]))
    found = describe_mismatch(held, layout, rank, size, seq_len)
    assert found is not None
    assert found.startswith(f"token {token} is at position {int(held[token])}, expected {right}")


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        # Rank 1 of 4 holds 4 to 7 and 24 to 27 of 32 tokens.
        (
            range(8, 16),
            "token 0 is at position 8, expected 4: these are the tokens of rank 1 in the "
            "contiguous layout",
        ),
        (
            range(1, 32, 4),
            "token 0 is at position 1, expected 4: these are the tokens of rank 1 in the cyclic "
            "layout",
        ),
        (
            [*range(8, 12), *range(20, 24)],
            "token 0 is at position 8, expected 4: these are the tokens of rank 2 in the zigzag "
            "layout",
        ),
        (
            range(8),
            "token 0 is at position 0, expected 4: these are the tokens of rank 0 in the "
            "contiguous layout",
        ),
        (range(32), "it holds 32 tokens, expected 8: these are all tokens, not split"),
        (
            [*range(24, 28), *range(4, 8)],
            "token 0 is at position 24, expected 4: these are the right tokens in another order",
        ),
        (
            [4, 5, 0, 1, 2, 3, 4, 5],
            "token 2 is at position 0, expected 6: they begin again at 0, but positions count "
            "through the whole sequence",
        ),
        ([4, 5, 6, 7, 24, 25, 26, 28], "token 7 is at position 28, expected 27"),
        ([], "it holds 0 tokens, expected 8"),
    ],
)
def test_what_it_says(held, expected):
    held = torch.tensor(list(held), dtype=torch.int64)
    assert describe_mismatch(held, ZIGZAG, 1, 4, 32) == expected


def test_every_entry_of_a_batch_is_looked_at():
    own = positions(ZIGZAG, 1, 4, 32)
    held = torch.stack((own, own + 1))
    assert describe_mismatch(held, ZIGZAG, 1, 4, 32) == (
        "token 0 of batch entry 1 is at position 5, expected 4"
    )


def test_positions_are_integers():
    found = describe_mismatch(torch.zeros(2, 4), ZIGZAG, 0, 2, 8)
    assert found == "positions need integers [S] or [B,S], got torch.float32 [2, 4]"
