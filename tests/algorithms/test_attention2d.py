"""Grids of ranks, groups of heads, parts of a plan, merging many partials."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.algorithms.attention2d import cheapest, column_major, grid_shapes, row_major
from megatron_cp_plugin.core.call import head_groups
from megatron_cp_plugin.core.layout import LAYOUTS
from megatron_cp_plugin.core.partial import merge_all_into
from megatron_cp_plugin.core.tiles import Mask, plan_tiles


def test_positions_of_a_column_major_grid_are_evenly_spaced():
    """Attention2D, section 3.2: rows hold {r + i*R}, columns, once transposed, {c + i*C}."""
    rows, cols, seq_len = 2, 3, 36
    grid = column_major(rows, cols)
    cyclic = LAYOUTS["cyclic"]
    for rank in range(6):
        r, c = rank % rows, rank // rows
        held = {p for m in grid.row(rank) for s in cyclic.spans(m, 6, seq_len) for p in s.positions}
        assert held == set(range(r, seq_len, rows))
        owners = [grid.key_owners[m] for m in grid.column(rank)]
        keys = {p for m in owners for s in cyclic.spans(m, 6, seq_len) for p in s.positions}
        assert keys == set(range(c, seq_len, cols))


def test_shapes_and_the_cheapest():
    assert grid_shapes(6, 0) == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert grid_shapes(6, 2) == [(2, 3)]
    assert not grid_shapes(6, 4)
    assert cheapest(6, 0, (1, 2)) == (2, 3)
    assert cheapest(6, 0, (1, 2), transposes=2) == (1, 6)
    assert cheapest(6, 0, (1, 1)) == (3, 2)
    assert cheapest(6, 0, (0, 0)) == (6, 1)


@pytest.mark.parametrize("size", [4, 6, 8, 9, 16])
def test_zigzag_grids_are_balanced_to_the_token(size):
    zigzag, seq_len = LAYOUTS["zigzag"], 6 * size
    for rows, cols in grid_shapes(size, 0):
        grid = row_major(rows, cols, (0,) * size)
        work = [
            sum(
                tile.area
                for q in grid.row(rank)
                for k in grid.column(rank)
                for tile in plan_tiles(
                    zigzag.spans(q, size, seq_len), zigzag.spans(k, size, seq_len), Mask()
                )
            )
            for rank in range(size)
        ]
        assert len(set(work)) == 1


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 40), st.booleans())
def test_groups_cover_all_heads_and_split_no_kv_head_unevenly(per_kv, kv_heads, chunks, share):
    heads = per_kv * kv_heads
    groups = head_groups(heads, kv_heads, chunks, share_kv=share)
    assert len(groups) <= max(1, chunks)
    assert [h for g in groups for h in range(g.q.start, g.q.stop)] == list(range(heads))
    for group in groups:
        needed = {h // per_kv for h in range(group.q.start, group.q.stop)}
        assert needed == set(range(group.kv.start, group.kv.stop))
        assert group.heads % group.kv_heads == 0
    firsts = [g.kv for g in groups if g.first]
    assert [h for s in firsts for h in range(s.start, s.stop)] == list(range(kv_heads))
    assert firsts == [g.kv for g in groups if g.last]
    assert share or len(groups) == len(firsts)


def test_as_many_groups_as_asked_for():
    assert len(head_groups(32, 8, 4)) == 4
    assert len(head_groups(32, 1, 4)) == 4
    assert len(head_groups(32, 1, 4, share_kv=False)) == 1
    assert len(head_groups(12, 6, 4)) == 3


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_merging_many_partials(count, dtype):
    """Against the softmax over all keys; one row that no partial has a key for, one with a gap."""
    generator = torch.Generator().manual_seed(count)
    scores = torch.randn(count, 2, 3, 5, 7, generator=generator, dtype=torch.float64)  # [P,B,H,S,T]
    values = torch.randn(count, 2, 3, 7, 4, generator=generator, dtype=torch.float64)
    scores[:, :, :, 2] = -torch.inf
    scores[0, :, :, 3] = -torch.inf
    outs = torch.einsum("pbhst,pbhtd->pbshd", scores.softmax(-1).nan_to_num(0), values).to(dtype)
    lses = scores.logsumexp(-1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # Into a slice of the heads, as the algorithms do.
    out, lse = torch.zeros(2, 5, 6, 4, dtype=dtype), torch.zeros(2, 6, 5, dtype=wide)
    merge_all_into(out[:, :, 1:4], lse[:, 1:4], outs, lses.to(wide))
    whole = scores.movedim(0, -2).flatten(-2)
    weights = whole.softmax(-1).nan_to_num(0)
    expected = torch.einsum("bhst,bhtd->bshd", weights, values.movedim(0, 2).flatten(2, 3))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    assert torch.allclose(out[:, :, 1:4].double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.allclose(lse[:, 1:4].double(), whole.logsumexp(-1), atol=1e-5)
    assert not out[:, :, [0, 4, 5]].any()
    assert not lse[:, [0, 4, 5]].any()
