"""LASP's state is under way from call to call, but not into a CUDA graph or out of it."""

import weakref
from contextlib import nullcontext

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.algorithms import lasp
from megatron_cp_plugin.core.comm import Pending, Topology
from megatron_cp_plugin.core.communication.virtual import VirtualWorld, run_virtual
from megatron_cp_plugin.core.linear.states import Decay, Route, RunStates

RANKS = 3


def test_a_graph_waits_for_what_it_sends_and_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[lasp.Lasp] = []
    create = lasp.Lasp.__init__

    def noted(self: lasp.Lasp, *args: object) -> None:
        create(self, *args)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(lasp.Lasp, "__init__", noted)

    def never() -> None:
        raise AssertionError("a graph waited for what was sent before it")

    def rank(topology: Topology) -> torch.Tensor:
        x = torch.ones(1, 4, 2, 8, dtype=torch.float64)
        return cp.linear_attention(x, x, x, decay=0.9, algo="lasp", group=topology)

    eager = run_virtual(RANKS, rank)
    assert sum(each._sent is not None for each in made) == RANKS - 1  # all but the last one
    made.clear()
    monkeypatch.setattr(lasp, "capturing", lambda x: True)
    carry = lasp.Lasp.carry

    def after_an_eager_call(self: lasp.Lasp, *args: object, **kwargs: object) -> object:
        self._sent = Pending(never), torch.ones(1)
        return carry(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(lasp.Lasp, "carry", after_an_eager_call)
    captured = run_virtual(RANKS, rank)
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))
    assert len(made) == RANKS
    assert not any(each._sent for each in made)


def test_what_is_sent_stays_until_the_main_stream_has_come_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch holds what NCCL sends until it is waited for, which a stream beside the main one does:
    memory that came from the main one is given on there, whatever may still read it.
    """
    log: list[tuple[str, bool]] = []  # what was queued on the main stream; the first state is there
    states: list[weakref.ref[torch.Tensor]] = []

    def note(what: str) -> None:
        log.append((what, states[0]() is not None))

    class SideStream:
        def __init__(self, _: torch.device) -> None: ...

        def __call__(self) -> nullcontext:
            return nullcontext()

        def join(self) -> None:
            note("join")

    class Channel:
        def exchange(self, sends: list, receives: list) -> Pending[None]:
            held = [x for x, _ in sends]
            return Pending(held.clear)

    monkeypatch.setattr(lasp, "SideStream", SideStream)
    algorithm = lasp.Lasp(VirtualWorld(2).topology(0), lasp.Lasp.Options())
    algorithm._states = Channel()  # type: ignore[assignment]
    route = Route.of(algorithm.layout, 2, 8)

    def call() -> None:
        state = torch.zeros(1, 1, 1, 4, 4)
        states.append(weakref.ref(state))
        passing = RunStates(state, Decay((0.9,)))
        algorithm.carry(passing, None, route, lambda: note("local work"), to_the_end=False)

    call()
    log.clear()
    call()
    assert log == [("local work", True), ("join", True)]
    assert [each() is not None for each in states] == [False, True]
