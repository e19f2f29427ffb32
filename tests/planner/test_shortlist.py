"""What is measured of a choice, and what follows from it, with a clock that is made up."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, pairwise
from math import log
from statistics import mean, stdev
from threading import get_ident
from time import sleep

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import Contiguous
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import LogNormal, random_documents
from megatron_cp_plugin.planner import detected_machine
from megatron_cp_plugin.planner import shortlist as module
from megatron_cp_plugin.planner.choose import CallSite, Combination, Kind, choose
from megatron_cp_plugin.planner.detected_machine import documents_like
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.shortlist import Measured, measure, order_of, shortlist
from tests.oracle import naive_attention

CPU = torch.device("cpu")
MACHINE = Machine.load("h200_nvlink")
SMALL = Shape(1, 96, 8, 4, 16, element_bytes=8)


def kinds(*masks: Mask, shape: Shape = SMALL) -> list[Kind]:
    return [Kind(f"layers {number}", shape, mask, number + 1) for number, mask in enumerate(masks)]


class Clock:
    """Runs what it times, and says for step n of a rank what `seconds` says.

    Attributes: steps: number of steps, which are timed in order, then in turns.
    """

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self._seconds = seconds
        self.steps = 6
        self._ranks: dict[int, int] = {}
        self.calls: dict[int, int] = defaultdict(int)

    def of_rank(self, rank: int) -> None:
        self._ranks[get_ident()] = rank

    @property
    def rank(self) -> int:
        """The rank of this thread."""
        return self._ranks[get_ident()]

    def __call__(self, body: Callable[[], object]) -> float:
        body()
        rank = self.rank
        turn, number = divmod(self.calls[rank], self.steps)
        self.calls[rank] += 1
        return self._seconds(rank, order_of(turn - 1, self.steps)[number] if turn else number)


def with_clock(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int, int], float]) -> Clock:
    clock = Clock(seconds)
    for where in (module, detected_machine):
        monkeypatch.setattr(where, "timer_on", lambda device: clock)
    return clock


def measured(
    clock: Clock, of_model: list[Kind], size: int = 2
) -> tuple[tuple[Combination, ...], Measured]:
    """The shortlist, and what all ranks measured of it."""
    site = CallSite(MACHINE, MACHINE.nodes(size), "flash4")
    listed = shortlist(choose(of_model, site), of_model)
    clock.steps = len(listed) * sum(len(kind.measured) or 1 for kind in of_model)

    def job(topology: Topology) -> Measured | None:
        clock.of_rank(topology.rank)
        return measure(listed, of_model, topology, "reference", CPU, topology.gather)

    found = run_virtual(size, job)
    assert len(set(found)) == 1
    assert found[0] is not None
    return listed, found[0]


def test_four_to_six_that_differ_are_listed_the_best_first() -> None:
    site = CallSite(MACHINE, MACHINE.nodes(8), "flash4")
    of_call = [Kind("attention", Shape(1, 65536, 32, 8, 128), Mask())]
    choice = choose(of_call, site)
    found = shortlist(choice, of_call)
    assert 4 <= len(found) <= 6
    assert found[0] is choice.best
    assert len({(one.algo, one.options) for one in found}) == len(found)
    assert len({one.algo for one in found}) >= 4
    refused = found[1].algo
    without = shortlist(choice, of_call, lambda one: "no" if one.algo == refused else None)
    assert refused not in {one.algo for one in without}
    assert len(without) >= 4
    # What does not fit a GPU is not measured either.
    most = max(one.rows[0].peak_bytes or 0 for one in found)
    tight = replace(choice, site=replace(site, memory_bytes=most - 1))
    assert len(shortlist(tight, of_call)) < len(found) or all(
        (one.rows[0].peak_bytes or 0) < most for one in shortlist(tight, of_call)[1:]
    )


def test_options_that_change_nothing_are_not_measured() -> None:
    """Of two candidates of an algorithm that take equally long the first."""
    of_call = [Kind("attention", Shape(1, 65536, 16, 16, 128), Mask())]
    choice = choose(of_call, CallSite(MACHINE, MACHINE.nodes(4), "flash4"), layouts=("zigzag",))
    first = choice.best
    alike = replace(first, rows=(replace(first.rows[0], options=(("chunks", 1),)),))
    both = replace(choice, combinations=(first, alike, *choice.combinations[1:]))
    found = shortlist(both, of_call)
    assert len(found) >= 4
    assert first in found
    assert alike not in found


def test_nothing_is_measured_on_one_rank_or_of_linear_attention() -> None:
    for size, shape in ((1, SMALL), (4, LinearShape(1, 96, 8, 16, 16))):
        of_call = [Kind("attention", shape, Mask())]
        choice = choose(of_call, CallSite(MACHINE, MACHINE.nodes(size), "flash4"))
        assert shortlist(choice, of_call) == (choice.best,)


def test_the_slowest_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidate 1 is the fastest on three ranks and the slowest on one; 2 is next."""

    def seconds(rank: int, number: int) -> float:
        return {1: 1.0 if rank == 2 else 0.1, 2: 0.3}.get(number, 0.5)

    clock = with_clock(monkeypatch, seconds)
    listed, found = measured(clock, kinds(Mask(documents=(30, 60))), 4)
    assert found.best == listed[2]
    assert found.seconds[:3] == (0.5, 1.0, 0.3)
    assert str(found).startswith(f"auto measured {len(listed)} candidates: {listed[0].name} 500")


def test_two_delays_of_the_host_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidate 1 is the fastest; of its five series two take ten times as long."""
    timed: dict[int, int] = defaultdict(int)

    def seconds(rank: int, number: int) -> float:
        if number != 1:
            return 0.5
        timed[rank] += 1
        return 3.0 if timed[rank] in (2, 5) else 0.3

    listed, found = measured(with_clock(monkeypatch, seconds), kinds(Mask()))
    assert found.best == listed[1]
    assert found.seconds[1] == 0.3


def test_no_step_gains_by_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """All take equally long but the second one, 2% less; behind the third, any takes a tenth less,
    because of a higher clock.
    """
    before: dict[int, int] = {}

    def seconds(rank: int, number: int) -> float:
        previous, before[rank] = before.get(rank), number
        return (0.49 if number == 1 else 0.5) * (0.9 if previous == 2 else 1.0)

    listed, found = measured(with_clock(monkeypatch, seconds), kinds(Mask()))
    assert found.seconds == (0.5, 0.49, *[0.5] * (len(listed) - 2))


@pytest.mark.parametrize("count", [5, 6, 8, 15, 40, 48])
def test_steps_follow_all_others_equally_often(count: int) -> None:
    turns = count if count % 2 == 0 else 2 * count
    orders = [order_of(turn, count) for turn in range(turns)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert set(pairs.values()) == {turns // count}
    assert len(pairs) == count * (count - 1)
    # Of five turns not in most, the ends of turns included.
    following = Counter(pairwise(chain.from_iterable(orders[:5])))
    assert max(following.values()) <= 2


def test_all_ranks_begin_a_step_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is late at the end of each step, as where a mask gives it most of the work."""
    clock, early = with_clock(monkeypatch, lambda rank, number: 0.5), []

    def timer(body: Callable[[], object]) -> float:
        rank = clock.rank
        if min(clock.calls[0], clock.calls[1]) < clock.calls[rank]:
            early.append(rank)

        def late() -> None:
            body()
            sleep(0.01 * rank)

        return clock(late)

    monkeypatch.setattr(module, "timer_on", lambda device: timer)
    listed, _ = measured(clock, kinds(Mask()))
    assert clock.calls == {0: 6 * len(listed), 1: 6 * len(listed)}
    assert not early


def test_documents_of_all_batches_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidate 0 is the fastest with one batch, and 1 in the mean of both."""

    def seconds(rank: int, number: int) -> float:
        candidate, batch = divmod(number, 2)
        return {0: (0.1, 0.9), 1: (0.3, 0.4)}.get(candidate, (0.5, 0.5))[batch]

    clock = with_clock(monkeypatch, seconds)
    masks = [Mask(documents=(30, 60)), Mask(documents=(48,))]
    of_call = [Kind("attention", SMALL, masks[0], measured=tuple(masks))]
    listed, found = measured(clock, of_call)
    assert found.seconds == pytest.approx([0.5, 0.35, *[0.5] * (len(listed) - 2)])
    assert found.best == listed[1]


def test_draws_of_documents_are_a_typical_one_and_some_that_stand_for_all() -> None:
    tokens = 2**16
    lengths = LogNormal(2**14, 1)

    def over_tokens(documents: tuple[int, ...]) -> float:
        ends = 0, *documents, tokens
        return sum((b - a) ** 2 for a, b in pairwise(ends)) / tokens

    typical, *measured = documents_like(lengths, tokens, Contiguous(), 2)
    assert len(set(measured)) == 8
    many = [over_tokens(random_documents(tokens, lengths, seed=seed)) for seed in range(32)]
    assert abs(log(over_tokens(typical) / mean(many))) == min(
        abs(log(one / mean(many))) for one in many
    )
    assert mean(map(over_tokens, measured)) == pytest.approx(mean(many), rel=0.1)
    assert stdev(map(over_tokens, measured)) == pytest.approx(stdev(many), rel=0.2)
    # Of a call, whose own length is known: those that are nearest to it.
    typical, *measured = documents_like(lengths, tokens, Contiguous(), 2, 12_000.0)
    assert measured[0] == typical
    nearest = sorted(abs(log(one / 12_000)) for one in many)[:3]
    assert [abs(log(over_tokens(one) / 12_000)) for one in measured] == nearest


def test_layers_count_as_often_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = with_clock(monkeypatch, lambda rank, number: 0.1)
    of_model = kinds(Mask(), Mask(window=24))  # one layer, and two
    listed, found = measured(clock, of_model)
    assert found.seconds == pytest.approx([0.3] * len(listed))
    assert found.best == listed[0]  # of equals the one that the simulation prefers


@pytest.mark.parametrize("missing", ["gpu", "memory"])
def test_nothing_is_measured_unless_all_ranks_can(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = with_clock(monkeypatch, lambda rank, number: 0.1)
    ranks: dict[int, int] = {}
    if missing == "gpu":
        monkeypatch.setattr(
            module, "timer_on", lambda device: None if ranks[get_ident()] == 1 else clock
        )
    else:
        monkeypatch.setattr(
            module, "free_bytes", lambda device: 1 if ranks[get_ident()] == 1 else 2**40
        )
    of_call = kinds(Mask())
    listed = shortlist(choose(of_call, CallSite(MACHINE, MACHINE.nodes(2), "flash4")), of_call)

    def job(topology: Topology) -> Measured | None:
        ranks[get_ident()] = topology.rank
        clock.of_rank(topology.rank)
        return measure(listed, of_call, topology, "reference", CPU, topology.gather)

    assert run_virtual(2, job) == [None, None]
    assert not clock.calls


@pytest.mark.parametrize("named", [False, True])
def test_a_call_takes_the_fastest_unless_a_machine_is_named(
    named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = with_clock(monkeypatch, lambda rank, number: 0.1 if number == 1 else 0.5)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 96, n, 16, dtype=torch.float64) for n in (8, 4, 4))
    state = torch.get_rng_state()

    def job(topology: Topology) -> tuple[torch.Tensor, set[object], int]:
        clock.of_rank(topology.rank)
        how = {"algo": "auto", "group": topology, **({"machine": "h200"} if named else {})}
        shards = [cp.shard(x, 1, **how) for x in (q, k, v)]
        with cp.record_communication() as log:
            cp.attention(*shards, **how)
        first = log.bytes(rank=topology.rank)
        with cp.record_communication() as log:
            out = cp.attention(*shards, **how)
        assert first == log.bytes(rank=topology.rank)  # what was tried is not counted
        return cp.unshard(out, 1, **how), set(topology.choices.values()), first

    with caplog.at_level(logging.INFO):
        found = run_virtual(4, job)
    expected = naive_attention(q, k, v, causal=True, scale=0.25)
    for whole, chosen, _ in found:
        torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-10)
        assert chosen == found[0][1]
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("auto measured")]
    assert len(said) == (not named)
    assert bool(clock.calls) is not named
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random numbers stay his
    if not named:
        ((algo, options),) = found[0][1]  # type: ignore[misc]
        pin = "".join(f", {key}={value!r}" for key, value in options)
        assert said[0].endswith(f'; to pin the fastest one: algo="{algo}"{pin}')
