"""DISTFLASHATTN's schedule: who does what, how much idles, what travels, in which order."""

from collections import defaultdict
from fractions import Fraction
from itertools import accumulate, product

import pytest

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.plans.plan import PHASES, Compute, Plan
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.registry import create
from tests.plan_check import check, sent_by, traffic_of

CAUSAL = Mask(causal=True)
# Figure 1 (b): queries and keys by worker and step, counted from 1; "" waits.
FIGURE_1 = """
    11 81 71 61 --
    22 21 82 72 --
    33 32 31 83 --
    44 43 42 41 --
    55 54 53 52 51
    66 65 64 63 62
    77 76 75 74 73
    88 87 86 85 84
"""


def plan_of(size: int, mask: Mask = CAUSAL, tokens: int = 6, **options: object) -> Plan:
    algorithm = create("distflash", VirtualWorld(size).topology(0), options)
    return algorithm.plan(Shape(1, tokens * size, 1, 1, 8), mask)


def balanced(size: int) -> Plan:
    return plan_of(size, last_step="owner")


def steps(plan: Plan) -> list[list[Compute | None]]:
    """What every rank computes in every step; None: it waits."""
    found: list[list[Compute | None]] = [[None] * plan.size for _ in range(plan.steps)]
    for compute in plan.computes:
        assert found[compute.step][compute.rank] is None
        found[compute.step][compute.rank] = compute
    return found


def idle_fraction(plan: Plan) -> Fraction:
    """Worker-steps without work, as a fraction of the ring's P * P.

    This is how the paper counts (section 3.2): every tile is one unit, the causal ones of the first
    step too, and the ring's worker-steps are the measure of both schedules. Of its own
    P * (P/2 + 1) worker-steps the balanced one wastes 1 / (P + 2) where P is even.
    """
    waiting = sum(compute is None for step in steps(plan) for compute in step)
    return Fraction(waiting, plan.size**2)


def work_of(plan: Plan) -> dict[int, int]:
    """Pairs of a query and a key that each rank computes."""
    work: dict[int, int] = defaultdict(int)
    for compute in plan.computes:
        work[compute.rank] += int(plan.tiles(compute).areas.sum())
    return work


def test_eight_ranks_do_what_figure_1_shows() -> None:
    rows = [line.split() for line in FIGURE_1.strip().splitlines()]
    drawn = [
        [f"{c.queries.owners[0] + 1}{c.keys.owners[0] + 1}" if c else "--" for c in step]
        for step in steps(balanced(8))
    ]
    assert list(map(list, zip(*drawn, strict=True))) == rows


@pytest.mark.parametrize("size", range(1, 17))
def test_idle_fraction_is_that_of_the_paper(size: int) -> None:
    plan = balanced(size)
    assert plan.steps == size // 2 + 1
    assert idle_fraction(plan) == (0 if size % 2 else Fraction(1, 2 * size))
    ring = plan_of(size, helpers="none", last_step="owner")
    assert ring.steps == size
    assert idle_fraction(ring) == Fraction(size**2 - size, 2 * size**2)


@pytest.mark.parametrize("size", range(2, 17, 2))
def test_a_shared_last_step_leaves_nobody_waiting(size: int) -> None:
    plan = plan_of(size, last_step="shared")
    assert idle_fraction(plan) == 0
    assert len(set(work_of(plan).values())) == 1


def has_helpers(plan: Plan) -> bool:
    return any(move.result for move in plan.moves)


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize("helpers", ["distance", "none"])
def test_full_attention_is_the_plain_ring(size: int, helpers: str) -> None:
    plan = plan_of(size, Mask(causal=False), helpers=helpers, last_step="owner")
    assert plan.steps == size
    assert idle_fraction(plan) == 0
    assert not has_helpers(plan)


@pytest.mark.parametrize("last_step", ["owner", "shared"])
@pytest.mark.parametrize("size", range(1, 10))
def test_traffic_is_the_closed_formula_for_equal_blocks(size: int, last_step: str) -> None:
    shape = Shape(batch=3, seq_len=6 * size, heads=8, kv_heads=2, head_dim=16)
    kv, query, row = 2 * 2 * 16 * 2, 8 * 16 * 2, 8 * 4
    helped = (size - 1) // 2
    for rank in range(size):
        topology = VirtualWorld(size).topology(rank)
        algorithm = create("distflash", topology, {"last_step": last_step})
        traffic = traffic_of(algorithm, shape, CAUSAL, rank)
        sends_keys_to = min(size // 2, size - 1 - rank)
        owns = min(size // 2, rank)
        is_helped: Fraction | int = max(0, helped - (size - 1 - rank))
        helps: Fraction | int = max(0, helped - rank)
        if last_step == "shared" and size % 2 == 0:
            half = Fraction(1, 2)
            helps, is_helped = (
                helps + half * (2 * rank < size),
                is_helped + half * (2 * rank >= size),
            )
        forward = sends_keys_to * kv + is_helped * query + helps * (query + row)
        backward = (sends_keys_to + owns) * kv + is_helped * 2 * (query + row) + helps * query
        assert traffic.forward_bytes == 3 * 6 * forward
        assert traffic.backward_bytes == 3 * 6 * backward


def pack(size: int) -> tuple[int, Mask]:
    """Tokens and mask of four documents, of which a rank has 12 tokens each."""
    *starts, seq_len = accumulate(2 * size * n for n in (1, 3, 0, 2))
    return seq_len, Mask(documents=tuple(sorted(set(starts))))


HEADS = {"MHA": (8, 8), "MQA": (8, 1)}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", range(2, 10))
def test_ranks_have_equal_work_in_layout_thd(size: int, heads: str, causal: bool) -> None:
    seq_len, mask = pack(size)
    mask = Mask(causal, documents=mask.documents)
    made = create("distflash", VirtualWorld(size).topology(0), {"layout": "thd"})
    for phase in PHASES:
        shape = Shape(1, seq_len, *HEADS[heads], 8)
        plan = made.for_documents(mask.resolved).plan(shape, mask, phase)
        check(plan)
        assert all(compute.step < plan.steps - 1 for compute in plan.computes)  # results come home
        work = work_of(plan)
        assert len(work) == size
        assert len(set(work.values())) == 1


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", range(2, 10))
def test_bytes_by_hand_in_layout_thd(size: int, heads: str) -> None:
    """Keys travel, whatever their heads: a half of them to later ranks, all to earlier ones."""
    seq_len, mask = pack(size)
    rows, (n, g) = seq_len // size, HEADS[heads]
    shape, keys = Shape(1, seq_len, n, g, 16), g * 2 * 16 * 2
    made = create("distflash", VirtualWorld(size).topology(0), {"layout": "thd"})
    made = made.for_documents(mask.resolved)
    for phase in PHASES:
        sent = [0] * size
        for q, k in product(range(size), repeat=2):
            if q != k:
                seen = (rows // 2 if q > k else rows) * keys
                sent[k] += seen
                sent[q] += seen * (phase == "backward")  # dK and dV
        plan = made.plan(shape, mask, phase)
        assert [sent_by(plan, rank, shape)[0] for rank in range(size)] == sent
        assert phase == "backward" or not has_helpers(plan)
