"""Sliding windows: the same attention, no step and no byte beyond the window."""

import sys

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin import cli
from megatron_cp_plugin.algorithms.allgather import KvAllGather
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.virtual import VirtualWorld, run_virtual
from megatron_cp_plugin.core.plans.plan import Block, Plan
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.registry import create
from tests.oracle import expected_attention
from tests.pairwise import pairwise
from tests.test_conformance import Case, assert_conforms, run

BLOCK, BFLOAT16 = 6, torch.bfloat16
EVEN = ("ulysses", "usp", "attention2d")
CASES = [
    Case("distflash"),
    Case("distflash", (("helpers", "none"),)),
    Case("distflash", (("helpers", "distance"),)),
    Case("distflash", (("helpers", "distance"), ("last_step", "owner"))),
    Case("ring", (("backward", "kv"),)),
    Case("zigzag", (("backward", "query"),)),
    Case("allgather", (("chunks", 2),)),
    Case("allgather", (("chunks", 2), ("transport", "group"))),
    Case("attention2d", (("rows", 2),)),
    Case("attention2d", (("rows", 2), ("transport", "group"))),
    Case("attention2d", (("rows", 1),)),
    Case("attention2d", (("variant", "no"), ("rows", 2))),
    Case("attention2d", (("variant", "overlap"), ("cols", 2))),
    Case("ulysses"),
    Case("usp", (("ulysses", 2),)),
    Case("usp", (("ulysses", 2), ("layout", "contiguous"))),
    Case("usp", (("ulysses", 2), ("route", "grid"))),
]


def divides(case: Case, size: int, *_: object) -> bool:
    """4 heads, teams of 2 and two rows or columns do not divide among 3 or 5 ranks."""
    return size % 2 == 0 or case.algo not in EVEN


@pytest.mark.parametrize(
    ("case", "size", "window", "kernel"),
    pairwise(CASES, (2, 3, 4), (1, 6, 7, 16), ("torch_cpu", "reference"), allowed=divides),
    ids=str,
)
def test_equals_unsplit_attention(case: Case, size: int, window: int, kernel: str) -> None:
    """With kernels that take square causal tiles only, and with one that takes any."""
    assert_conforms(case, size, seq_len=BLOCK * size + size // 2, kernel=kernel, window=window)


@pytest.mark.parametrize("case", CASES, ids=str)
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
@pytest.mark.parametrize(("window", "steps"), [(1, 1), (2, 2), (6, 2), (7, 2), (8, 3), (13, 3)])
def test_the_plan_stops_where_the_window_ends(window: int, steps: int, size: int) -> None:
    plan = distflash(size, window)
    assert plan.steps == steps
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


def test_every_algorithm_takes_a_window_and_one_that_does_not_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.ones(1, 8, 2, 8)
    for algo in cp.available("softmax"):
        cp.attention(q, q, q, algo=algo, window=4)
    monkeypatch.setattr(KvAllGather, "windows", False)
    with pytest.raises(ContextParallelError, match="allgather does not support sliding windows"):
        cp.attention(q, q, q, algo="allgather", window=3)


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
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)

    run_virtual(3, body)
