"""DISTFLASHATTN's schedule: who does what, how much idles, what travels, in which order."""

from fractions import Fraction
from itertools import accumulate, product

import pytest
import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import Compiled
from megatron_cp_plugin.core.call import Call, Shape
from megatron_cp_plugin.core.comm import Communicator, record_communication
from megatron_cp_plugin.core.communication.virtual import VirtualWorld, run_virtual
from megatron_cp_plugin.core.kernel import Gradients, KernelCall, Statistics
from megatron_cp_plugin.core.plans.plan import PHASES, Compute, Plan
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.registry import create
from tests.plan_check import check

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


@pytest.mark.parametrize("size", range(2, 17))
def test_every_step_after_the_first_has_equal_work(size: int) -> None:
    plan = balanced(size)
    for step in steps(plan)[1:]:
        assert {plan.pairs(compute) for compute in step if compute} == {36}


@pytest.mark.parametrize("size", range(2, 17, 2))
def test_a_shared_last_step_leaves_nobody_waiting(size: int) -> None:
    plan = plan_of(size, last_step="shared")
    assert idle_fraction(plan) == 0
    work = [sum(plan.pairs(c) for c in plan.computes if c.rank == rank) for rank in range(size)]
    assert len(set(work)) == 1


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
        traffic = algorithm.traffic(shape, CAUSAL, rank)
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


def test_peer_transport_without_peer_access_is_refused() -> None:
    with pytest.raises(ConfigError, match="distflash transport peer needs GPUs of one node"):
        create("distflash", VirtualWorld(2).topology(0), {"transport": "peer"})


class _Journal(Reference):
    """A kernel that notes its calls."""

    def __init__(self, entries: list[str]) -> None:
        self.entries = entries

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        self.entries.append("compute")
        return super().forward(call)

    def backward(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> Gradients:
        self.entries.append("compute")
        return super().backward(call, dout, statistics)


def journals(overlap: bool) -> list[tuple[list[str], list[str]]]:
    """What each of 5 ranks posts, waits for and computes, in order: (forward, backward)."""

    def body(topology: Topology) -> tuple[list[str], list[str]]:
        entries: list[str] = []
        make = topology.channel

        def noted(name: str) -> Communicator:
            channel = make(name)

            def exchange(sends, receives, *_, **__):  # type: ignore[no-untyped-def]
                pending = type(channel).exchange(channel, sends, receives)
                if not receives:
                    return pending
                entries.append(f"post {name}")
                return pending.then(lambda result: entries.append(f"wait {name}") or result)

            channel.exchange = exchange  # type: ignore[method-assign]
            return channel

        topology.channel = noted  # type: ignore[method-assign]
        algorithm = create("distflash", topology, {"overlap": overlap})
        q, k, v, dout = (torch.randn(1, 4, 2, 8) for _ in range(4))
        compiled = Compiled(algorithm, Call(Shape.of(q, k, v, 20), CAUSAL, 1.0, _Journal(entries)))
        saved = compiled.forward.attend(q, k, v)[2]
        forward = list(entries)
        entries.clear()
        compiled.backward().differentiate(dout, saved)
        return forward, list(entries)

    return run_virtual(5, body)


def test_the_next_fetch_is_posted_before_the_present_computation() -> None:
    """Rank 2 of 5 owns two tasks and nobody helps it: nothing but fetches in its forward."""
    forward, _ = journals(overlap=True)[2]
    assert forward == [
        "post fetches",
        "compute",
        "wait fetches",
        "post fetches",
        "compute",
        "wait fetches",
        "compute",
    ]


def test_a_blocking_run_waits_for_every_message_where_it_is_posted() -> None:
    for forward, backward in journals(overlap=False):
        for entries in (forward, backward):
            for index, entry in enumerate(entries):
                if entry.startswith("post"):
                    assert entries[index + 1] == entry.replace("post", "wait")


def test_results_come_back_during_the_next_computation() -> None:
    """Rank 4 of 5 is helped in both steps after the first."""
    for entries in journals(overlap=True)[4]:
        posted = entries.index("post returns")
        assert "compute" in entries[posted : entries.index("wait returns")]


def test_fetches_and_returns_are_flows_of_their_own() -> None:
    with record_communication() as log:
        journals(overlap=True)
    forward = {row.channel for row in log.rows if row.phase == "forward"}
    assert forward == {"fetches", "returns"}


def pack(size: int) -> tuple[int, Mask]:
    """Tokens and mask of four documents, of which a rank has 12 tokens each."""
    *starts, seq_len = accumulate(2 * size * n for n in (1, 3, 0, 2))
    return seq_len, Mask(documents=tuple(sorted(set(starts))))


HEADS = {"MHA": (8, 8), "MQA": (8, 1)}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", range(2, 10))
def test_every_step_is_equal_work_in_layout_thd(size: int, heads: str, causal: bool) -> None:
    seq_len, mask = pack(size)
    mask = Mask(causal, documents=mask.documents)
    made = create("distflash", VirtualWorld(size).topology(0), {"layout": "thd"})
    for phase in PHASES:
        plan = made.within(mask.followed).plan(Shape(1, seq_len, *HEADS[heads], 8), mask, phase)
        check(plan)
        *computing, home = steps(plan)  # in the last step results come home
        assert home == [None] * size
        for step in computing:
            (work,) = {plan.pairs(compute) for compute in step if compute is not None}
            assert None not in step
            assert work > 0


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", range(2, 10))
def test_bytes_by_hand_in_layout_thd(size: int, heads: str) -> None:
    """Keys travel, whatever their heads: a half of them to later ranks, all to earlier ones."""
    seq_len, mask = pack(size)
    rows, (n, g) = seq_len // size, HEADS[heads]
    shape, keys = Shape(1, seq_len, n, g, 16), g * 2 * 16 * 2
    made = create("distflash", VirtualWorld(size).topology(0), {"layout": "thd"})
    made = made.within(mask.followed)
    for phase in PHASES:
        sent = [0] * size
        for q, k in product(range(size), repeat=2):
            if q != k:
                seen = (rows // 2 if q > k else rows) * keys
                sent[k] += seen
                sent[q] += seen * (phase == "backward")  # dK and dV
        plan = made.plan(shape, mask, phase)
        assert [plan.sent(rank, shape).bytes for rank in range(size)] == sent
        assert phase == "backward" or not has_helpers(plan)
