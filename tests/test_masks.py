"""Windows and documents: no step, no byte and no kernel call beyond what they show."""

import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_cp_plugin as cp
from megatron_cp_plugin import cli
from megatron_cp_plugin.algorithms.allgather import KvAllGather
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.virtual import VirtualWorld, run_virtual
from megatron_cp_plugin.core.layout import Contiguous, Cyclic, Layout, Zigzag
from megatron_cp_plugin.core.plans.plan import Block, Plan
from megatron_cp_plugin.core.tiles import Mask, plan_tiles, visible_pairs
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.registry import create
from tests.oracle import expected_attention
from tests.random_tests import examples
from tests.test_conformance import Case, assert_matches, few_cases, run

BLOCK, BFLOAT16 = 6, torch.bfloat16


@pytest.mark.parametrize("case", few_cases(4), ids=str)
def test_queries_that_see_only_themselves_have_no_gradients(case: Case) -> None:
    """Nor have keys, up to float32, though delta travels where kernels take a bfloat16 out."""
    expected = expected_attention(
        seq_len=4 * BLOCK, heads=4, kv_heads=2, head_dim=8, causal=True, window=1, dtype=BFLOAT16
    )
    results, _ = run(case, expected, 4, kernel="torch_cpu", window=1)
    _, *gradients = zip(*results, strict=True)
    dq, dk, dv = (torch.cat(parts, 1).abs().max().item() for parts in gradients)
    assert max(dq, dk) < 8 * 2**-23 * dv


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize(("window", "blocks"), [(1, 1), (2, 2), (6, 2), (7, 2), (8, 3), (13, 3)])
def test_the_plan_stops_where_the_window_ends(window: int, blocks: int, size: int) -> None:
    plan = distflash(size, window)
    met: dict[int, set[int]] = {}
    for compute in plan.computes:
        met.setdefault(compute.rank, set()).update(compute.keys.owners)
    assert met == {rank: {*range(max(0, rank + 1 - blocks), rank + 1)} for rank in range(size)}
    assert not any(move.result for move in plan.moves)


def distflash(size: int, window: int) -> Plan:
    options = {"helpers": "distance", "last_step": "owner"}
    algorithm = create("distflash", VirtualWorld(size).topology(0), options)
    return algorithm.plan(Shape(1, BLOCK * size, 1, 1, 8), Mask(window=window))


@pytest.mark.parametrize("window", [2, 4, 6])
def test_no_more_keys_are_fetched_than_the_window_touches(window: int) -> None:
    moves = distflash(4, window).moves
    assert sorted(move.target for move in moves) == [1, 2, 3]
    assert {move.tokens for move in moves} == {window - 1}


def test_helpers_fetch_no_more_queries_than_the_window_touches() -> None:
    """Rank 0 of 4 helps rank 3, of whose queries only the first two still see block 0."""
    moves = distflash(4, 3 * BLOCK - 3).moves
    (fetched,) = (move for move in moves if move.target == 0 and not move.result)
    assert fetched.block == Block((3,), ((0, 2),))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": 3}, "allgather does not support sliding windows"),
        ({"cu_seqlens": [0, 4, 8]}, "does not support documents, got 2 of them"),
        ({"spans": cp.spans.prefix_lm(4, 8)}, "does not support spans, got 2 of them"),
    ],
)
def test_an_algorithm_for_plain_masks_refuses_others(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.ones(1, 8, 2, 8)
    monkeypatch.setattr(KvAllGather, "windows", False)
    with pytest.raises(ContextParallelError, match=message):
        cp.attention(q, q, q, algo="allgather", **given)


def test_a_windowed_schedule_is_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["draw", "--algo", "distflash", "--size", "8", "--seq-len", "64", "--window", "8"]
    assert cli.main(words) == 0
    assert "causal, window 8 · 64 tokens" in capsys.readouterr().out
    words[2] = "allgather"
    monkeypatch.setattr(KvAllGather, "windows", False)
    assert cli.main(words) == 2
    assert "allgather does not support sliding windows" in capsys.readouterr().err


@pytest.mark.parametrize("window", [sys.maxsize, 2**80])
@pytest.mark.parametrize("algo", cp.available("softmax"))
def test_a_window_beyond_all_numbers_is_none(algo: str, window: int) -> None:
    x = torch.randn(1, 24, 4, 8, dtype=torch.float64)

    def body(topology: Topology) -> None:
        own = cp.shard(x, 1, algo=algo, group=topology)
        got, want = (
            cp.attention(own, own, own, algo=algo, group=topology, **settings)
            for settings in ({"window": window}, {})
        )
        # In float64; with a window of 22, which hides one key of one query, they differ by 0.2.
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)

    run_virtual(3, body)


@examples(150)
@given(
    st.sampled_from([Contiguous(), Zigzag(), Cyclic()]),
    st.integers(1, 5),
    st.integers(1, 40),
    st.lists(st.integers(0, 40), max_size=8),
    st.one_of(st.none(), st.integers(1, 12)),
    st.booleans(),
    st.booleans(),
)
def test_tiles_cover_every_pair_once(
    layout: Layout,
    size: int,
    seq_len: int,
    starts: list[int],
    window: int | None,
    causal: bool,
    rectangular: bool,
) -> None:
    documents = tuple(sorted({start for start in starts if 0 < start < seq_len}))
    mask = Mask(causal, window if causal else None, documents)
    document = [sum(start <= token for start in documents) for token in range(seq_len)]
    found: dict[tuple[int, int], int] = {}
    for owner in range(size):
        for other in range(size):
            q_spans, kv_spans = (layout.spans(r, size, seq_len) for r in (owner, other))
            rows, cols = ([p for s in spans for p in s.positions] for spans in (q_spans, kv_spans))
            for tile in plan_tiles(q_spans, kv_spans, mask, rectangular=rectangular):
                mine, seen = rows[tile.q], cols[tile.kv]
                assert (len(mine), len(seen)) == (tile.rows, tile.cols)
                if tile.reverse:
                    mine, seen = mine[::-1], seen[::-1]
                for i, x in enumerate(mine):
                    first = max((start for start in tile.document_bounds if start <= i), default=0)
                    last = i + tile.cols - tile.rows if tile.causal else tile.cols - 1
                    for y in seen[first : last + 1]:
                        found[x, y] = found.get((x, y), 0) + 1
    visible = {
        (x, y): 1
        for x in range(seq_len)
        for y in range(seq_len)
        if document[x] == document[y]
        and (not mask.causal or y <= x)
        and (mask.window is None or x - y < mask.window)
    }
    assert found == visible
    assert sum(found.values()) == visible_pairs(seq_len, mask)


def test_a_document_of_many_ranks_costs_no_further_kernel_calls() -> None:
    """Off the diagonal two blocks share one document at most."""
    spans = [Contiguous().spans(rank, 4, 400) for rank in range(4)]
    mask = Mask(documents=(30, 150, 160, 390))
    tiles = plan_tiles(spans[2], spans[1], mask, rectangular=True)
    assert [(tile.q, tile.kv) for tile in tiles] == [(slice(0, 100), slice(60, 100))]
    assert not plan_tiles(spans[2], spans[0], mask, rectangular=True)


def test_what_a_layout_that_follows_documents_sends() -> None:
    """Of whole ones nothing; of others a ring no less than what goes straight to where it is
    needed, which is less than what a collective operation sends.
    """
    for lengths, size, whole in ((range(0, 49, 8), 3, True), ((0, 20, 48, 60, 72, 90), 5, False)):
        bounds, sent = torch.tensor(lengths), []
        expected = expected_attention(
            seq_len=lengths[-1], heads=4, kv_heads=2, head_dim=8, causal=True, cu_seqlens=bounds
        )
        for algo, *transport in (
            ("allgather",),
            ("zigzag",),
            ("allgather", ("transport", "group")),
        ):
            case = Case(algo, (("layout", "documents"), *transport))
            results, log = run(case, expected, size, peer_access=False, cu_seqlens=bounds)
            assert_matches(case, results, expected, 1e-12, bounds)
            sent.append(log.bytes())
        assert sent == [0, 0, 0] if whole else 0 < sent[0] <= sent[1] < sent[2]


def test_whole_documents_are_one_kernel_call() -> None:
    (span,) = Contiguous().spans(1, 4, 400)
    mask = Mask(documents=(30, 130, 131, 150, 190, 390))
    (tile,) = plan_tiles([span], [span], mask)
    assert (tile.q, tile.kv, tile.causal) == (slice(0, 100), slice(0, 100), True)
    assert tile.document_bounds == (0, 30, 31, 50, 90, 100)
    assert tile.area == sum(n * (n + 1) // 2 for n in (30, 1, 19, 40, 10))


@pytest.mark.parametrize(
    "cu_seqlens", [[], [0], [1, 8], [0, 7], [0, 5, 3, 8], [0, 9]], ids=lambda x: str(x)
)
def test_lengths_that_are_none_are_refused(cu_seqlens: list[int]) -> None:
    q = torch.ones(1, 8, 2, 8)
    with pytest.raises(ContextParallelError, match="ascending numbers from 0 to seq_len = 8, got"):
        cp.attention(q, q, q, algo="ring", cu_seqlens=cu_seqlens)
