"""The table of capabilities says what the code does: every cell is run."""

from pathlib import Path

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.capabilities import RANKS, capabilities, markdown
from megatron_cp_plugin.core.layout import LAYOUTS, shard, unshard
from megatron_cp_plugin.core.virtual import run_virtual
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.registry import layout_of
from tests.oracle import expected_attention, relative_error

SOFTMAX = [row for row in capabilities() if row.kind == "softmax"]


def test_the_document_is_what_the_code_says():
    document = Path(__file__).parent.parent / "docs" / "capabilities.md"
    assert document.read_text() == markdown(), (
        "run: megatron-cp capabilities > docs/capabilities.md"
    )


def test_every_algorithm_has_a_row():
    assert {row.name for row in capabilities()} == set(cp.available())
    assert all(set(row.layouts) <= {*LAYOUTS, "documents"} for row in capabilities())


def run(name, *, heads, kv_heads, causal=True):
    """The greatest error of the output on RANKS virtual ranks."""
    expected = expected_attention(
        seq_len=2 * RANKS, heads=heads, kv_heads=kv_heads, head_dim=4, causal=causal
    )
    layout = layout_of(name, {})

    def body(topology):
        mine = [
            shard(x, 1, layout, topology.rank, RANKS) for x in (expected.q, expected.k, expected.v)
        ]
        return cp.attention(*mine, algo=name, group=topology, causal=causal)

    return relative_error(unshard(run_virtual(RANKS, body), 1, layout), expected.out)


@pytest.mark.parametrize("row", SOFTMAX, ids=lambda row: row.name)
@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("full", {"heads": 2 * RANKS, "kv_heads": 2 * RANKS, "causal": False}),
        ("few_heads", {"heads": RANKS // 2, "kv_heads": RANKS // 2}),
        ("few_kv_heads", {"heads": 2 * RANKS, "kv_heads": RANKS // 4}),
    ],
)
def test_cells(row, cell, problem):
    if getattr(row, cell):
        assert run(row.name, **problem) < 1e-10
    else:
        with pytest.raises(ConfigError):
            run(row.name, **problem)


@pytest.mark.parametrize("row", SOFTMAX, ids=lambda row: row.name)
def test_windows(row):
    q = torch.randn(1, 16, 2, 4, dtype=torch.float64)
    if not row.window:
        with pytest.raises(ContextParallelError, match="sliding windows"):
            cp.attention(q, q, q, algo=row.name, window=4)
        return
    out = cp.attention(q, q, q, algo=row.name, window=4)
    scores = torch.einsum("bshd,bthd->bhst", q, q) / 2
    position = torch.arange(16)
    distance = position[:, None] - position[None, :]
    scores = scores.masked_fill((distance < 0) | (distance >= 4), -torch.inf)
    expected = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), q)
    assert relative_error(out, expected) < 1e-12
