"""Whether all ranks see some of all blocks, by the ends of blocks, as pair by pair."""

import pytest

from megatron_cp_plugin.core.blocks.visible_rows import sees
from megatron_cp_plugin.core.layout import Contiguous, Cyclic, TokenMap, Zigzag
from megatron_cp_plugin.core.tiles import Mask


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Cyclic()])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False)])
def test_by_the_ends_of_blocks(layout, mask):
    found = set()
    for size in (1, 2, 3, 4, 8):
        for seq_len in (2 * size, 6 * size, 24 * size):
            blocks = TokenMap.of(layout, size, seq_len)
            expected = all(sees(queries, keys, mask) for queries in blocks for keys in blocks)
            assert blocks.all_see_all(mask.causal) == expected
            found.add(expected)
    assert True in found
    assert len(found) == 2 or not mask.causal or layout in (Zigzag(), Cyclic())


def test_an_empty_block_sees_nothing():
    assert not TokenMap.of(Contiguous(), 4, 3).all_see_all(causal=False)
