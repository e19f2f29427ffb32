"""Tiles as arrays: the tiles of the planner, and the same for pairs of ranks that are alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_cp_plugin.core.blocks.owned import Owned
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.layout import Contiguous, Grouped, Layout, Zigzag
from megatron_cp_plugin.core.layouts.document_layout import Balanced, PaddedDocuments
from megatron_cp_plugin.core.masks import tile_table
from megatron_cp_plugin.core.masks.documents import random_documents
from megatron_cp_plugin.core.masks.tile_table import TileTable, tiles_of
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask, plan_tiles
from megatron_cp_plugin.registry import create
from tests.random_tests import examples


def pairs_of(tiles: TileTable, shape: tuple[int, int]) -> Tensor:
    """How often each (row, column) of two blocks is computed."""
    found = torch.zeros(shape, dtype=torch.int64)
    for tile in tiles.single:
        pairs = torch.ones(tile.rows, tile.cols, dtype=torch.int64)
        pairs = pairs.tril(tile.cols - tile.rows) if tile.causal else pairs
        found[tile.q, tile.kv] += pairs.flip(0, 1) if tile.reverse else pairs
    return found


def visible(layout: Layout, ranks: tuple[int, int], size: int, seq_len: int, mask: Mask) -> Tensor:
    """Which pairs a mask lets through, token by token."""
    query, key = (
        torch.tensor([n for span in layout.spans(rank, size, seq_len) for n in span.positions])
        for rank in ranks
    )
    starts = torch.tensor(mask.documents)
    same = torch.bucketize(query, starts, right=True)[:, None] == torch.bucketize(
        key, starts, right=True
    )
    age = query[:, None] - key
    if mask.causal:
        same &= age >= 0
    return same if mask.window is None else same & (age < mask.window)


LAYOUTS = [Contiguous(), Zigzag(), Balanced(), PaddedDocuments(), Grouped(PaddedDocuments(), 2)]


@examples(150)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 6),
    st.sampled_from([1, 3, 10, 40]),
    st.integers(0, 99),
    st.sampled_from([(True, None), (False, None), (True, 1), (True, 5)]),
    st.booleans(),
)
def test_documents_that_are_planned_together(
    layout: Layout,
    size: int,
    length: int,
    mean: int,
    seed: int,
    kind: tuple[bool, int | None],
    rectangular: bool,
) -> None:
    """The same tiles as one by one, and the pairs of the mask; alike where ranks are alike."""
    seq_len = length * 4 * size
    mask = Mask(*kind, random_documents(seq_len, mean, multiple=layout.multiple(size), seed=seed))
    owned = Owned(layout.within(mask.documents), size, seq_len)
    found: dict[object, TileTable] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_table, "_MANY", 1)
        for query in range(size):
            for key in range(size):
                blocks = owned[query], owned[key]
                table = tiles_of(*blocks, mask, rectangular=rectangular)
                tiles = plan_tiles(*blocks, mask, rectangular=rectangular)
                assert tuple(table) == tuple(TileTable.of(tiles)) == tiles
                want = visible(owned.layout, (query, key), size, seq_len, mask)
                assert torch.equal(pairs_of(table, want.shape), want.long())
                alike = owned.alike(query, mask)
                assert alike is None or mask.window is None
                if alike is not None:
                    assert tuple(found.setdefault(alike[key], table)) == tiles


def test_ranks_that_are_alike_have_the_very_same_tiles() -> None:
    """Own ones, with earlier keys (of the first rank half come) and with later ones; no windows."""
    documents = random_documents(4096, 100, multiple=16)
    for mask, kinds in ((Mask(documents=documents), 4), (Mask(True, 64, documents), 64)):
        algorithm = create("zigzag", VirtualWorld(8).topology(0), {"layout": "thd"})
        plan = algorithm.plan(Shape(1, 4096, 4, 4, 8), mask)
        assert len({id(plan.tiles(compute)) for compute in plan.computes}) == kinds


def test_tables() -> None:
    documents = tuple(range(0, 64, 4))[1:]
    blocks = Contiguous().spans(0, 1, 64), Contiguous().spans(0, 1, 64)
    table = tiles_of(*blocks, Mask(documents=documents), rectangular=True)
    (tile,) = table
    assert tile.document_bounds == tuple(range(0, 68, 4))
    assert (len(table), len(table.single)) == (1, 16)
    assert table[0].area == table.areas.sum() == 160
    moved = table.moved(8, 2)
    assert [(one.q, one.kv) for one in moved] == [(slice(8, 72), slice(2, 66))]
    assert not TileTable.of(())
