"""The table of capabilities says what the code does: every cell is run."""

from pathlib import Path

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.capabilities import PROBLEMS, RANKS, capabilities, markdown
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import LAYOUTS, positions
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.layers import layout_choices
from tests.linear_oracle import linear_expected
from tests.oracle import expected_attention, relative_error

SEQ_LEN = 4 * RANKS

ROWS = [*capabilities()]
CELLS = [pytest.param(row, cell, id=f"{row.name}-{cell}") for row in ROWS for cell in row.serves]
LAYOUT_CELLS = [
    pytest.param(row, layout, id=f"{row.name}-{layout}") for row in ROWS for layout in row.layouts
]


def test_the_document_is_what_the_code_says():
    document = Path(__file__).parent.parent / "docs" / "capabilities.md"
    assert document.read_text() == markdown(), (
        "run: megatron-cp capabilities > docs/capabilities.md"
    )


def test_every_algorithm_has_a_row():
    assert {row.name for row in ROWS} == set(cp.available())
    assert all(set(row.layouts) <= {*LAYOUTS, "documents", "thd"} for row in ROWS)
    # Linear attention has as many KV heads as query heads: the table has a dash there.
    assert all(len(row.serves) == len(PROBLEMS) - (row.kind == "linear") for row in ROWS)
    assert all(row.serves["causal"] for row in ROWS)


def run(row, *, heads=2 * RANKS, kv_heads=2 * RANKS, causal=True, window=None, layout=None):
    """The greatest error of the output on RANKS virtual ranks. layout: other than the default."""
    mask = {"causal": causal} if window is None else {"causal": causal, "window": window}
    options = {}
    for name, option, choice in layout_choices(row.name):
        if layout == name:
            options = {option: choice}
    bounds = {"documents": (0, 5, 2 * RANKS, SEQ_LEN), "thd": (0, 2 * RANKS, SEQ_LEN)}
    documents = {"cu_seqlens": bounds[layout]} if layout in bounds else {}
    settings = {"algo": row.name, **options, **documents}
    if row.kind == "softmax":
        problem = {"seq_len": SEQ_LEN, "heads": heads, "kv_heads": kv_heads, "head_dim": 4}
        expected = expected_attention(**problem, **mask, **documents)
        whole, want = (expected.q, expected.k, expected.v), expected.out
    else:
        rates = torch.linspace(0.5, 1, heads, dtype=torch.float64)
        given = {"causal": causal, "documents": bounds.get(layout, ())[1:-1], "states": False}
        drawn = linear_expected(tuple(rates.tolist()), SEQ_LEN, **given)
        whole, want = (drawn.q, drawn.k, drawn.v), drawn.out

    def body(topology):
        group = {"group": topology, **settings}
        # Positions first: whatever the layout is called, it is the one of that name.
        held = cp.shard(torch.arange(SEQ_LEN), 0, **group)
        mine = [cp.shard(x, 1, **group) for x in whole]
        if row.kind == "softmax":
            out = cp.attention(*mine, **mask, **group)
        else:
            out = cp.linear_attention(*mine, decay=rates, **mask, **group)
        return held, cp.unshard(out, 1, **group)

    results = run_virtual(RANKS, body)
    name = layout or row.layouts[0]
    if name in LAYOUTS:
        for rank, (held, _) in enumerate(results):
            assert torch.equal(held, positions(LAYOUTS[name], rank, RANKS, SEQ_LEN))
    return max(relative_error(out, want) for _, out in results)


@pytest.mark.parametrize(("row", "cell"), CELLS)
def test_cells(row, cell):
    if row.serves[cell]:
        assert run(row, **PROBLEMS[cell]) < 1e-10
    else:
        with pytest.raises(ConfigError):
            run(row, **PROBLEMS[cell])


@pytest.mark.parametrize(("row", "layout"), LAYOUT_CELLS)
def test_layouts(row, layout):
    assert run(row, layout=layout) < 1e-10


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_windows(row):
    if row.windows:
        assert run(row, window=4) < 1e-10
        return
    refusal = "sliding windows" if row.kind == "softmax" else "no option 'window'"
    with pytest.raises(ContextParallelError, match=refusal):
        run(row, window=4)
