"""Blocks of several ranks as one in ascending order: against index arithmetic on positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core import partial
from megatron_cp_plugin.core.blocks.assembly import assemble, padded
from megatron_cp_plugin.core.document_layout import PaddedDocuments
from megatron_cp_plugin.core.layout import LAYOUTS
from megatron_cp_plugin.core.ranges import Span
from tests.operators import Operators
from tests.random_tests import examples


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


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", ["tensor", "unequal"])
@examples(20)
@given(data=st.data())
def test_documents_cut_each_by_itself_are_joined_by_one_gather(dim, kind, data):
    """As many segments as there are documents, and more, in a fixed number of operations."""
    ranks = data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=17, max_size=40))
    starts = [2 * ranks * sum(lengths[:number]) for number in range(len(lengths) + 1)]
    layout = PaddedDocuments().for_documents(tuple(starts[1:-1]))
    spans = [layout.spans(rank, ranks, starts[-1]) for rank in range(ranks)]
    held = [[p for s in own for p in s.positions] for own in spans]
    order = assemble(spans, len(held[0]))
    blocks = [torch.tensor([own, own]).T for own in held]
    if dim:
        blocks = [block.T for block in blocks]
    whole = torch.stack(blocks)
    gathered = whole
    if kind == "unequal":  # the own block of a rank may be longer than what travels
        gathered = [padded(block, dim, order.width + number) for number, block in enumerate(blocks)]
    with Operators() as counted:
        joined = order.join(gathered, dim)
        target = torch.full_like(whole, -1)
        order.place(target, dim, slice(0, order.tokens), joined.double())
    assert joined.select(1 - dim, 1).tolist() == list(range(starts[-1]))
    assert torch.equal(target, whole)
    assert torch.equal(placed_in_two(order, whole, joined, dim, data), whole)
    if ranks > 1:
        assert counted.calls.total() <= 20 + 12 * ranks < 3 * len(lengths) * ranks


@pytest.mark.parametrize("members", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("shape", "dim", "most"),
    [((1, 120, 2, 3), 1, 1), ((2, 3, 120), 2, 2), ((2, 120, 2, 3), 1, None)],
    ids=["tensors of one entry", "rows", "tensors of a batch"],
)
def test_a_split_is_as_few_copies_as_can_be(members, shape, dim, most):
    order = assemble(
        [LAYOUTS["zigzag"].spans(r, members, 120) for r in range(members)], 120 // members
    )
    whole = torch.randn(shape)
    expected = torch.empty(members, *shape[:dim], 120 // members, *shape[dim + 1 :])
    order.place(expected, dim, slice(0, 120), whole)
    with Operators() as counting:
        blocks = order.split(whole, dim).contiguous()
    assert torch.equal(blocks, expected)
    copies = sum(counting.calls[name] for name in ("cat", "copy_", "clone"))
    assert copies == (most or 2 * members - 1)


def test_spans_that_leave_gaps_between_turns_are_refused():
    with pytest.raises(ValueError, match="evenly interleaved"):
        assemble([(Span(0, 12, 6),), (Span(1, 12, 6),)], 2)


class WritesRows:
    """The fused operation, by numbers that run on from block to block."""

    def __init__(self):
        self.calls = 0

    def write_rows(self, out, to, x):
        self.calls += 1
        rows = out.as_strided((len(out), int(to.max()) + 1, *out.shape[2:]), out.stride())
        for number, row in zip(to.tolist(), x.unbind(1), strict=True):
            rows[:, number] = row


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "documents"])
def test_rows_are_placed_in_one_pass_where_that_is_fused(monkeypatch, layout, batch):
    """Of blocks that travel beside others, with results that are wider than they."""
    if layout == "documents":  # of six tokens, each cut as a zigzag
        starts = [[6 * i + x for i in range(40) for x in (rank, 5 - rank)] for rank in range(3)]
        spans = [tuple(Span(start, start + 1) for start in own) for own in starts]
    else:
        spans = [LAYOUTS[layout].spans(rank, 3, 240) for rank in range(3)]
    width = max(sum(map(len, own)) for own in spans)
    order, fused = assemble(spans, width), WritesRows()
    values = torch.randn(batch, order.tokens, 2, 4)
    found = []
    for operations in ({}, {"cpu": lambda: fused}):
        monkeypatch.setattr(partial, "_fused", operations)
        blocks = torch.zeros((3, batch, width, 2, 6), dtype=torch.bfloat16)
        part = blocks[..., 2:]
        for rows in (slice(0, 9), slice(9, order.tokens)):
            order.place(part, 1, rows, values[:, rows])
        found.append(blocks)
    assert fused.calls == 2
    assert torch.equal(*found)
    assert found[0][..., 2:].count_nonzero() > values.numel() // 2
