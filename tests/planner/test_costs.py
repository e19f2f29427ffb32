"""Bytes, memory and waiting of a layer, as pages and `megatron-cp plan` say them."""

from pathlib import Path

import pytest

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.drawing import picture
from megatron_cp_plugin.planner.layer import planned
from tests.plan_check import Traffic, traffic_of

SHAPE = Shape(1, 4096, 32, 8, 128)
CAUSAL, WINDOW = Mask(), Mask(window=64)


def most_traffic(algo: str, size: int, shape: Shape, mask: Mask, **options: object) -> Traffic:
    """Of the rank that sends most."""
    algorithm = planned(algo, size, shape, mask, options)
    each = [traffic_of(algorithm, shape, mask, rank) for rank in range(size)]
    return max(each, key=lambda one: one.forward_bytes + one.backward_bytes)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_an_unbalanced_ring_waits_and_the_others_do_not(size: int) -> None:
    """P^2 / 2 blocks in P - 1/2 block times of P ranks: the first step has half blocks only."""
    tokens = 2 * 3 * 5 * 16 * 8
    idle = picture("ring", size, seq_len=tokens).idle_share
    assert idle == pytest.approx((size - 1) / (2 * size - 1), 1e-3)
    for algo in ("zigzag", "attention2d", "allgather"):
        assert picture(algo, size, seq_len=tokens).idle_share == pytest.approx(0, abs=1e-3)


@pytest.mark.slow
def test_bytes_of_the_pages() -> None:
    """Of the rank that sends most, in units of one whole Q: docs/algorithms.md."""
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    model = {"gradients": "model"}
    for name, algo, options in (
        ("zigzag", "zigzag", model | {"backward": "kv"}),
        ("distflash", "distflash", {}),
        ("allgather", "allgather", {}),
        ("ulysses", "ulysses", {}),
        ("usp, teams of 4", "usp", model | {"ulysses": 4}),
        ("attention2d", "attention2d", {}),
    ):
        cells = []
        for kv_heads, size in ((32, 8), (32, 64), (8, 8), (8, 64)):
            shape = Shape(1, 16384, 32, kv_heads, 128)
            found = most_traffic(algo, size, shape, CAUSAL, **options)
            unit = shape.seq_len * shape.query_width * shape.element_bytes
            cells.append(f"{(found.forward_bytes + found.backward_bytes) / unit:.2f}")
        assert f"| {name} | {' | '.join(cells)} |" in text
