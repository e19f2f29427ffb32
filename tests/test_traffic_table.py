"""The table of bytes: what it prints is what virtual ranks count, and what it shows."""

import pytest
import torch

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.planner.costs import BASELINES
from scripts import traffic_table
from scripts.traffic_table import LINES, Line, sent
from tests.oracle import expected_attention
from tests.pairwise import pairwise
from tests.test_conformance import Case, run

RATIOS = {"32:32": (32, 32), "32:8": (32, 8)}


@pytest.mark.parametrize(
    ("line", "size", "ratio"),
    pairwise(LINES, (4, 6, 9), tuple(RATIOS)),
    ids=lambda value: value.label if isinstance(value, Line) else str(value),
)
def test_counted_bytes_are_those_of_the_table(line: Line, size: int, ratio: str) -> None:
    heads, kv_heads = RATIOS[ratio]
    seq_len = 2 * size
    found = sent(line, size, Shape(1, seq_len, heads, kv_heads, 8))
    if found is None:
        assert (line.algo, size) in {("usp", 6), ("usp", 9)}
        return
    expected = expected_attention(
        seq_len=seq_len,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=8,
        causal=True,
        dtype=torch.bfloat16,
    )
    case = Case(line.algo, line.options)
    _, log = run(case, expected, size, causal=True, kernel="reference", peer_access=False)
    each = [
        (log.bytes(rank=rank, phase="forward"), log.bytes(rank=rank, phase="backward"))
        for rank in range(size)
    ]
    assert max(each, key=sum) == (found.forward_bytes, found.backward_bytes)


def units(label: str, size: int, heads: int, kv_heads: int) -> float:
    (line,) = [line for line in LINES if line.label == label]
    shape = Shape(1, 16384, heads, kv_heads, 128)
    found = sent(line, size, shape)
    assert found is not None
    return (found.forward_bytes + found.backward_bytes) / (16384 * heads * 128 * 2)


def test_rings_are_flat_and_the_grid_falls_with_the_root_of_the_number_of_ranks() -> None:
    ring, grid = "zigzag, KV travels", "attention2d"
    assert units(ring, 64, 32, 32) > units(ring, 16, 32, 32) > units(ring, 4, 32, 32)
    for kv_heads in (32, 8):
        ratio = units(grid, 16, 32, kv_heads) / units(grid, 64, 32, kv_heads)
        assert 1.6 < ratio < 2.0
    # sqrt(P) - 1 of P parts: 5 units of queries, 6 of keys.
    assert units(grid, 64, 32, 32) == pytest.approx(7 / 64 * 11, rel=0.01)


def test_where_the_grid_loses() -> None:
    assert units("ulysses", 16, 32, 32) < units("attention2d", 16, 32, 32) / 4
    assert units("attention2d", 4, 32, 8) == units("allgather", 4, 32, 8)


def test_what_cannot_be_served_is_a_dash() -> None:
    table = {row[0]: row[1:] for row in traffic_table.rows(32, 32, (4, 9))}
    assert table["usp, 4 ranks a team"][-1] == "-"
    assert table["attention2d"][-1].endswith("(3x3)")
    lines = len(LINES) + len(BASELINES) + 2
    assert traffic_table.markdown(32, 8, (4, 9)).count("\n") == lines - 1


def test_what_the_papers_compare_with() -> None:
    """DISTFLASHATTN, appendix C: 10 N d, 14 N d with recompute, against 3 N d of the ring, of which
    P blocks of P are counted; BurstAttention, section 3.2: 8 for Ring Self-Attention.
    """
    shape = Shape(1, 16384, 32, 8, 128)
    table = {row[0]: row[1:] for row in traffic_table.baseline_rows(shape, (4, 64))}
    for name, total in (
        ("tensor + sequence parallel", 10),
        ("the same, full recompute", 14),
        ("Ring Self-Attention", 8),
    ):
        assert table[name] == [f"{total * (size - 1) / size:.2f}" for size in (4, 64)]
