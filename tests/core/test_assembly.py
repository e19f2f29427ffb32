"""Blocks of several ranks as one in ascending order: against index arithmetic on positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.assembly import assemble, padded
from megatron_cp_plugin.core.grid import column_major, row_major
from megatron_cp_plugin.core.layout import LAYOUTS, Grouped, Span


def members_of(layout_name, rows, cols, seq_len, rank):
    """The ranks whose queries and whose keys a rank gathers, and everybody's positions."""
    size = rows * cols
    layout = LAYOUTS[layout_name]
    grid = (
        column_major(rows, cols) if layout_name == "cyclic" else row_major(rows, cols, [0] * size)
    )
    spans = [layout.spans(r, size, seq_len) for r in range(size)]
    column = [grid.key_owners[r] for r in grid.column(rank)]
    return spans, (grid.row(rank), column)


@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(0, 1),
    st.data(),
)
def test_join_sorts_and_place_and_split_undo_it(layout, rows, cols, seq_len, dim, data):
    rank = data.draw(st.integers(0, rows * cols - 1))
    spans, groups = members_of(layout, rows, cols, seq_len, rank)
    width = max(sum(map(len, own)) for own in spans)
    for owners in groups:
        held = [[p for s in spans[r] for p in s.positions] for r in owners]
        order = assemble([spans[r] for r in owners], width)
        blocks = [torch.tensor([own, own], dtype=torch.long).T for own in held]
        if dim:
            blocks = [block.T for block in blocks]
        gathered = torch.stack([padded(block, dim, width) for block in blocks])
        joined = order.join(gathered, dim)
        expected = sorted(position for own in held for position in own)
        assert order.tokens == len(expected)
        assert [p for s in order.spans for p in s.positions] == expected
        assert joined.select(1 - dim, 1).tolist() == expected
        if not expected:
            continue
        for back in (order.split(joined, dim), placed_in_two(order, gathered, joined, dim, data)):
            for block, got in zip(blocks, back, strict=True):
                assert torch.equal(got.narrow(dim, 0, block.shape[dim]), block)


def placed_in_two(order, gathered, joined, dim, data):
    """Rows written in two pieces, as a plan's parts are."""
    cut = data.draw(st.integers(0, order.tokens))
    target = torch.full_like(gathered, -1)
    for rows in (slice(0, cut), slice(cut, order.tokens)):
        order.place(target, dim, rows, joined.narrow(dim, rows.start, rows.stop - rows.start))
    return target


def test_blocks_that_are_in_order_already_are_not_copied():
    order = assemble([(Span(0, 4),), (Span(4, 8),)], 4)
    gathered = torch.randn(2, 1, 4, 3)
    joined = order.join(gathered, 1)
    assert joined.data_ptr() == gathered.data_ptr()
    assert order.split(joined, 1).data_ptr() == gathered.data_ptr()


def test_spans_that_leave_gaps_between_turns_are_refused():
    with pytest.raises(ValueError, match="evenly interleaved"):
        assemble([(Span(0, 12, 6),), (Span(1, 12, 6),)], 2)


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 60),
    st.sampled_from(["zigzag", "contiguous"]),
)
def test_a_group_holds_what_its_ranks_hold(groups, members, seq_len, name):
    layout = Grouped(LAYOUTS[name], members)
    for group in range(groups):
        spans = layout.spans(group, groups, seq_len)
        ranks = range(group * members, (group + 1) * members)
        single = [
            p
            for r in ranks
            for s in LAYOUTS[name].spans(r, groups * members, seq_len)
            for p in s.positions
        ]
        assert [p for s in spans for p in s.positions] == sorted(single)
        if seq_len and seq_len % layout.multiple(groups) == 0:
            assert spans == merged(LAYOUTS[name].spans(group, groups, seq_len))


def merged(spans):
    return (Span(spans[0].start, spans[-1].stop),) if spans[0].stop == spans[-1].start else spans
