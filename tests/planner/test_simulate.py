"""The simulator against the plans that ranks follow."""

from dataclasses import replace

import pytest

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner import simulate as simulator
from megatron_cp_plugin.planner.layer import planned
from megatron_cp_plugin.planner.machine import Host, Links, Rate
from megatron_cp_plugin.planner.simulate import simulate
from tests.linear_bytes import state_bytes
from tests.plan_check import sent_by
from tests.planner.test_event_simulation import FLOPS, machine


@pytest.mark.parametrize("algo", registry.available("softmax"))
@pytest.mark.parametrize("heads", [(4, 4), (8, 4)])
def test_ranks_send_what_the_plan_says(algo, heads):
    shape = Shape(1, 4096, *heads, 16)
    algorithm = planned(algo, 4, shape, Mask(), {})
    found = simulate(algo, {}, shape, Mask(), machine(), (0,) * 4)
    for phase, time in zip(PHASES, (found.forward, found.backward), strict=True):
        plan = algorithm.plan(shape, Mask(), phase)
        expected = max(sent_by(plan, rank, shape)[0] for rank in range(4))
        assert sum(time.bytes.values()) == pytest.approx(expected, rel=1e-6), phase
    assert found.ranks == 4


def test_without_a_network_only_kernels_count():
    free = machine(inside=Links(Rate(0, 1e30)))
    shape = Shape(1, 8192, 4, 4, 16)
    flop = 2 * 32 * Mask().bands.area(8192) * 4
    for algo in ("zigzag", "ulysses", "allgather", "attention2d", "distflash", "usp"):
        found = simulate(algo, {}, shape, Mask(), free, (0,) * 4)
        assert found.forward.seconds == pytest.approx(flop / 4 / FLOPS, rel=0.01), algo
        assert found.backward.seconds == pytest.approx(2.5 * flop / 4 / FLOPS, rel=0.01), algo


def test_an_unbalanced_ring_takes_as_long_as_its_busiest_rank():
    free = machine(inside=Links(Rate(0, 1e30)))
    shape = Shape(1, 8192, 4, 4, 16)
    whole = 2 * 32 * Mask().bands.area(8192) * 4 / FLOPS
    found = simulate("ring", {"backward": "kv"}, shape, Mask(), free, (0,) * 4)
    assert found.forward.seconds == pytest.approx(whole * 7 / 16, rel=0.01)


def test_a_slow_network_is_exposed_and_a_fast_one_is_not():
    shape = Shape(1, 16384, 8, 8, 64)
    fast = simulate("zigzag", {}, shape, Mask(), machine(), (0,) * 4)
    slow = simulate("zigzag", {}, shape, Mask(), machine(inside=Links(Rate(0, 1e6))), (0,) * 4)
    assert fast.exposed_communication < 0.05 * fast.seconds
    assert slow.exposed_communication > 0.9 * slow.seconds
    assert slow.bytes == fast.bytes


@pytest.mark.parametrize(
    ("algo", "options", "size", "per_node", "ranks", "error"),
    [
        # Two sizes, which say of a third what simulating all of its ranks gives.
        ("zigzag", {"transport": "group"}, 24, 2, 8, 0.05),
        ("distflash", {"transport": "group"}, 24, 2, 8, 0.05),
        ("usp", {"transport": "group", "ulysses": 2}, 24, 2, 4, 0.05),
        # A grid of teams is no line: one rank of each team.
        ("usp", {"ulysses": 2, "route": "grid"}, 16, 2, 8, 0.02),
        # Where all exchange in collective operations: three ranks.
        ("allgather", {}, 8, 4, 3, 0.02),
        ("attention2d", {"rows": 2}, 8, 4, 3, 0.02),
        ("ulysses", {}, 8, 4, 3, 0.02),
    ],
)
def test_many_ranks_by_a_few(algo, options, size, per_node, ranks, error, monkeypatch):
    of = machine(gpus_per_node=per_node, cards_per_node=per_node)
    how = Shape(1, size * 512, 8, 8, 16), Mask(), of, of.nodes(size)
    monkeypatch.setattr(simulator, "_ALL", 4)
    few = simulate(algo, options, *how)
    monkeypatch.setattr(simulator, "_ALL", 64)
    every = simulate(algo, options, *how)
    assert (few.ranks, every.ranks) == (ranks, size)
    assert few.forward.seconds == pytest.approx(every.forward.seconds, rel=error)
    assert few.seconds == pytest.approx(every.seconds, rel=error)


@pytest.mark.parametrize(
    ("algo", "mask"),
    [
        ("usp", Mask()),
        pytest.param(
            *("zigzag", Mask(documents=tuple(range(700, 1024 * 64, 700)))), marks=pytest.mark.slow
        ),
    ],
)
def test_a_thousand_ranks_in_seconds(algo, mask):
    of, shape = machine(), Shape(1, 1024 * 64, 64, 8, 16)
    whole, few = (
        simulate(algo, {}, replace(shape, seq_len=64 * size), mask, of, of.nodes(size)).seconds
        for size, mask in ((1024, mask), (128, replace(mask, documents=mask.documents[:5])))
    )
    # What goes straight takes as long on any number of ranks.
    assert whole > 4 * few if mask == Mask() else whole == pytest.approx(few, rel=0.05)


@pytest.mark.parametrize("algo", ["ring", "attention2d", "usp"])
def test_of_unequal_steps_all_ranks_are_simulated(algo):
    """Of usp one rank of each team, which says as much."""
    of, mask = machine(gpus_per_node=4), Mask(documents=(100, 700, 900))
    options = {"ulysses": 4} if algo == "usp" else {}
    found = simulate(algo, options, Shape(1, 24 * 64, 4, 4, 16), mask, of, of.nodes(24))
    assert found.ranks == (6 if algo == "usp" else 24)


def test_too_many_ranks_on_a_grid_by_blocks():
    options = {"variant": "overlap", "rows": 8}
    shape = Shape(1, 128 * 64, 4, 4, 16)
    with pytest.raises(ConfigError, match="simulated on up to 64 ranks, got 128"):
        simulate("attention2d", options, shape, Mask(), machine(), machine().nodes(128))


@pytest.mark.parametrize("algo", registry.available("linear"))
def test_linear_attention(algo):
    shape = LinearShape(1, 4096, 4, 16, 16)
    found = simulate(algo, {}, shape, Mask(), machine(), (0,) * 4)
    alone = simulate("lasp2", {}, LinearShape(1, 1024, 4, 16, 16), Mask(), machine(), (0,))
    assert found.seconds >= alone.seconds
    if algo == "lasp2":
        assert found.forward.bytes == {"inside": 3 * state_bytes(shape)}


def test_documents_and_captured_calls():
    starts = tuple(range(100, 4096, 100))
    shape, slow = Shape(1, 4096, 4, 4, 16), machine(host=Host(operation=1.0, kernel=1.0))
    eager, captured = (
        simulate("zigzag", {}, shape, Mask(documents=starts), slow, (0, 0), captured=one)
        for one in (False, True)
    )
    assert captured.seconds < eager.seconds
    whole = simulate("zigzag", {}, shape, Mask(), slow, (0, 0), captured=True)
    assert captured.seconds < whole.seconds


def test_what_cannot_be_served_is_refused():
    with pytest.raises(ConfigError, match="attention2d needs"):
        simulate("attention2d", {"rows": 3}, Shape(1, 4096, 3, 3, 16), Mask(), machine(), (0,) * 4)
    with pytest.raises(ConfigError, match=r"no kernel 'flesh' .did you mean 'flash'"):
        simulate("ring", {}, Shape(1, 64, 4, 4, 8), Mask(), machine(), (0, 0), kernel="flesh")
