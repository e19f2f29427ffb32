"""Numbers of heads that ranks do not divide, with every algorithm; 33 are DISTFLASHATTN's."""

from math import lcm

import pytest

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.plans.team_heads import PaddedHeads
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.layer import planned
from tests.plan_check import traffic_of

RATIOS = [(33, 33), (33, 11), (2, 2), (7, 1)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "filled"),
    [
        (33, 33, 4, (36, 36)),
        (33, 11, 4, (36, 12)),
        (33, 11, 8, (48, 16)),  # as many as 12 KV heads with 4 query heads, and fewer KV heads sent
        (33, 11, 3, (33, 11)),
        (2, 2, 8, (8, 8)),
        (7, 1, 8, (8, 1)),
        (7, 1, 3, (9, 1)),
        (32, 8, 16, (32, 8)),
    ],
)
def test_as_few_heads_as_can_be(
    heads: int, kv_heads: int, ranks: int, filled: tuple[int, int]
) -> None:
    found = PaddedHeads.of(heads, kv_heads, ranks)
    assert (found.heads, found.all_kv_heads) == filled


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
def test_the_plan_counts_zero_heads(heads: int, kv_heads: int, size: int) -> None:
    """(P-1)/P times HDe + HEe + V(D+E)e + Hw of the filled heads, and as much work."""
    shape = Shape(1, 64 * size, heads, kv_heads, 16, value_dim=24)
    filled = PaddedHeads.of(heads, kv_heads, size)
    assert not filled.heads % lcm(filled.all_kv_heads, size)
    kv = lcm(filled.all_kv_heads, size) * (16 + 24) * 2
    row = filled.heads * (16 + 24) * 2 + kv + filled.heads * 4
    ulysses = planned("ulysses", size, shape, Mask(), {})
    assert traffic_of(ulysses, shape, Mask(), 0).forward_bytes == 64 * (size - 1) * row // size
    assert ulysses.computed(shape).heads == filled.heads
    assert planned("zigzag", size, shape, Mask(), {}).computed(shape).heads == heads
