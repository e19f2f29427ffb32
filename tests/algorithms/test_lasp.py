"""LASP's state is under way from call to call, but not into a CUDA graph or out of it."""

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.algorithms import lasp
from megatron_cp_plugin.core.comm import Pending
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.core.virtual import run_virtual

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
        self._sent = Pending(never)
        return carry(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(lasp.Lasp, "carry", after_an_eager_call)
    captured = run_virtual(RANKS, rank)
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))
    assert len(made) == RANKS
    assert not any(each._sent for each in made)
