"""What is particular to span masks beside packed documents and windows: a query sees what all of
them allow.
"""

from itertools import pairwise as pairs_of

import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import VirtualWorld, run_virtual
from megatron_cp_plugin.core.document_layout import Balanced
from megatron_cp_plugin.core.layout import positions
from megatron_cp_plugin.registry import create
from tests.span_masks import dense, mask_of


def test_all_pairs_of_documents_are_documents() -> None:
    """The plan of the same mask that is said otherwise: as many tiles, and bytes."""
    lengths, size, seq_len = [0, 24, 27, 32, 56, 60, 64], 4, 64
    shape = Shape(1, seq_len, 4, 2, 8)
    for algo in cp.available("softmax"):
        algorithm = create(algo, VirtualWorld(size).topology(0), {})
        whole = mask_of([(0, seq_len, 0, seq_len, "causal")], seq_len, lengths)
        alone = mask_of(cp.spans.documents(lengths), seq_len)
        for phase in ("forward", "backward"):
            plan, other = (algorithm.plan(shape, mask, phase) for mask in (whole, alone))
            assert (plan.computes, plan.moves) == (other.computes, other.moves)


def test_equal_work_under_both() -> None:
    """Ranks hold tokens by what spans and documents let them see, as `shard` and callers see it."""
    seq_len, size = 1024, 4
    lengths, spans = [0, 400, 520, 1024], cp.spans.prefix_lm(600, 1024)
    keys = dense(spans, seq_len, lengths).sum(1)
    tokens = torch.arange(seq_len)
    how = {"algo": "zigzag", "layout": "documents", "spans": spans, "cu_seqlens": lengths}
    layout = Balanced().for_documents(mask_of(spans, seq_len, lengths).resolved)

    def body(topology: Topology) -> Tensor:
        mine = cp.shard(tokens, 0, group=topology, **how)
        cp.check_layout(mine, group=topology, **how)
        assert torch.equal(cp.unshard(mine, 0, group=topology, **how), tokens)
        assert torch.equal(mine, positions(layout, topology.rank, size, seq_len))
        return mine

    work = [int(keys[mine].sum()) for mine in run_virtual(size, body)]
    assert max(work) <= 1.01 * sum(work) / size
    alone = Balanced().for_documents(mask_of(spans, seq_len).resolved)
    assert layout != alone
    assert layout.spans(0, size, seq_len) != alone.spans(0, size, seq_len)


def test_the_layout_does_not_depend_on_the_window() -> None:
    """Of which layers of one model have different ones."""
    spans, lengths = cp.spans.prefix_lm(10, 32), [0, 20, 32]
    masks = [mask_of(spans, 32, lengths, window) for window in (None, 1, 9)]
    assert len({mask.resolved for mask in masks}) == 1
    assert len(set(masks)) == 3


def test_other_documents_are_another_mask() -> None:
    """Plans, tiles and layouts are kept by it."""
    spans = [(0, 16, 0, 16, "causal")]
    one, other, none = (mask_of(spans, 16, lengths) for lengths in ([0, 4, 16], [0, 8, 16], None))
    assert all(a != b for a, b in pairs_of((one, other, none, one)))
    assert len({one, other, none, mask_of(spans, 16, [0, 4, 4, 16])}) == 3
