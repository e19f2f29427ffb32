"""Peak memory of a rank against the formulas of docs/algorithms.md.

By the planner's prediction, which planner/test_call_memory.py holds against what ranks need.
"""

from dataclasses import dataclass

import pytest

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.planner import call_memory as predicted
from megatron_cp_plugin.registry import create

TOKENS, DIM, ELEMENT = 256, 128, 2


class Plain(Reference):
    """A kernel whose results are tensors of its own."""

    packs = gaps = windows = places_outputs = places_gradients = False


@dataclass
class Peak:
    """Bytes beside inputs and results; kept: results of the forward."""

    forward: int
    backward: int
    kept: int


def measure(algo: str, size: int, heads: int, kv_heads: int, **options: object) -> Peak:
    """Of the first rank, over the process group."""
    ranks = predicted.DryRunGroup(0, (0,) * size, peer_access=False)
    shape = Shape(1, TOKENS * size, heads, kv_heads, DIM)
    found = predicted.peak_of(create(algo, ranks, options), shape, Mask(), Plain())
    gradients = TOKENS * (heads + 2 * kv_heads) * DIM * ELEMENT
    backward = found.backward - found.saved - gradients
    return Peak(found.forward - found.saved, backward, found.saved)


def is_within(measured: int, formula: float) -> None:
    """At most the formula, rows of lse and delta (a few of every 2 * DIM bytes) aside.

    And not far below it, or the formula would say nothing.
    """
    assert measured <= 1.05 * formula
    assert measured >= 0.4 * formula


GATHERED = [
    ("attention2d", 4, 2, 2, 8, 8, 4),
    ("attention2d", 4, 2, 2, 8, 8, 8),
    ("attention2d", 16, 4, 4, 8, 8, 4),
    ("attention2d", 16, 8, 2, 8, 2, 2),
    ("attention2d", 8, 2, 4, 8, 4, 4),
    ("allgather", 4, 4, 1, 8, 8, 4),
    ("allgather", 8, 8, 1, 8, 4, 2),
]


@pytest.mark.parametrize(("algo", "size", "rows", "cols", "heads", "kv_heads", "chunks"), GATHERED)
def test_gathered(algo, size, rows, cols, heads, kv_heads, chunks) -> None:
    options = {"chunks": chunks} | ({"rows": rows} if algo == "attention2d" else {})
    peak = measure(algo, size, heads, kv_heads, **options)
    q = heads * TOKENS * cols * DIM * ELEMENT / chunks
    kv = 2 * kv_heads * TOKENS * rows * DIM * ELEMENT / chunks
    is_within(peak.forward, (6 + 1 / cols) * q + (2 + 1 / rows) * kv)
    is_within(peak.backward, (8 + 2 / cols) * q + (6 + 4 / ELEMENT + 1 / rows) * kv)


def test_gathered_keys_stay_within_their_bound() -> None:
    """Of 8 MiB that all K and V take together, half may be held at a time."""
    options = {"gathered_mib": 4, "chunks": 1}
    bounded = measure("allgather", 8, 8, 8, **options)
    free = measure("allgather", 8, 8, 8, chunks=1)
    assert 2 * 8 * TOKENS * 8 * DIM * ELEMENT == 8 * 2**20
    assert bounded.forward < 2**22 + 2 * bounded.kept
    assert free.forward > 2**23


@pytest.mark.parametrize("kv_heads", [32, 8])
@pytest.mark.parametrize("tokens", [2**15, 2**17])
@pytest.mark.parametrize(
    ("algo", "size", "options"),
    [
        ("allgather", 2, {}),
        ("allgather", 4, {}),
        ("allgather", 8, {}),
        ("attention2d", 2, {"rows": 1}),
        ("attention2d", 4, {"rows": 2}),
        ("attention2d", 8, {"rows": 2}),
        ("attention2d", 8, {"rows": 4}),
    ],
)
def test_blocks_over_peer_memory(algo, size, options, tokens: int, kv_heads: int) -> None:
    """A step takes no more than with gathers, receive buffers of both passes among it, but for the
    own dK and dV in float32: those that are gathered are summed in the model's dtype.
    """
    shape = Shape(1, tokens, 32, kv_heads, DIM)

    def peak(peer_access: bool) -> predicted.Peak:
        return predicted.peak_of(
            create(
                algo, predicted.DryRunGroup(size - 1, (0,) * size, peer_access=peer_access), options
            ),
            shape,
            Mask(),
            Plain(),
        )

    blocks, gathered = peak(True), peak(False)
    assert blocks.peer > 0 == gathered.peer
    sums = 2 * 4 * tokens // size * kv_heads * DIM if algo == "allgather" else 0
    assert max(blocks.forward, blocks.backward) <= max(gathered.forward, gathered.backward) + sums


@pytest.mark.parametrize("algo", ["allgather", "attention2d"])
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "groups"),
    [(2**14, 32, 1), (2**14, 8, 1), (2**15, 8, 2), (2**16, 32, 2), (2**16, 8, 4)],
)
def test_more_groups_where_they_save_memory(algo, tokens, kv_heads, groups) -> None:
    """On two ranks over peer memory, and none where there is little work."""
    algorithm = create(algo, predicted.DryRunGroup(0, (0, 0), peer_access=True), {})
    plan = algorithm.plan(Shape(1, tokens, 32, kv_heads, DIM), Mask())
    assert len(plan.groups) == groups


@pytest.mark.parametrize(("size", "rows", "kv_heads"), [(4, 2, 8), (16, 4, 8), (8, 4, 2)])
def test_overlap(size: int, rows: int, kv_heads: int) -> None:
    options = {"variant": "overlap", "rows": rows}
    peak = measure("attention2d", size, 8, kv_heads, **options)
    q = 8 * TOKENS * DIM * ELEMENT
    kv = 2 * kv_heads * TOKENS * rows * DIM * ELEMENT
    is_within(peak.forward, (2 * rows + 4) * q + 2 * kv)
    is_within(peak.backward, (2 * rows + 6) * q + (3 + 4 / ELEMENT) * kv)


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "chunks"), [(4, 16, 16, 4), (8, 32, 32, 2), (4, 32, 8, 2)]
)
def test_ulysses(size: int, heads: int, kv_heads: int, chunks: int) -> None:
    peak = measure("ulysses", size, heads, kv_heads, chunks=chunks)
    head = TOKENS * DIM * ELEMENT
    is_within(peak.forward, (2 * (heads + 2 * kv_heads) + 3 * heads) * head / chunks)
    is_within(
        peak.backward, (2 * (2 * heads + 2 * kv_heads) + 3 * (heads + 2 * kv_heads)) * head / chunks
    )


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("rule", ["kv", "query"])
def test_rings(rule: str, kv_heads: int, chunks: int) -> None:
    peak = measure("zigzag", 4, 8, kv_heads, backward=rule, chunks=chunks)
    q, kv = (heads * TOKENS * DIM * ELEMENT for heads in (8, 2 * kv_heads))
    forward = 3 * q + 2 * kv
    backward = {"kv": 1.5 * q + 7 * kv, "query": 9 * q + 1.5 * kv}
    if chunks > 1:
        forward = (4 * q + 3 * kv) / chunks
        backward = {
            "kv": (2.5 * q + 9 * kv) / chunks,
            "query": (12 * q + 2.5 * kv) / chunks,
        }
    for measured, formula in ((peak.forward, forward), (peak.backward, backward[rule])):
        is_within(measured, formula)
        assert measured >= 0.9 * formula
