"""Algorithms of others: correct, counted and drawn without another line."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import megatron_cp_plugin as cp
from megatron_cp_plugin import cli, registry
from megatron_cp_plugin.algorithms.lasp import Lasp
from megatron_cp_plugin.core.algorithm import number
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.placement import BlockPlacement
from megatron_cp_plugin.core.plans.plan import PHASES, Plan
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.kernels.choice import kernel_called
from megatron_cp_plugin.planner.call_memory import peak_of
from megatron_cp_plugin.planner.candidates import candidates
from megatron_cp_plugin.planner.drawing import picture
from megatron_cp_plugin.planner.layer import Layer
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.simulate import simulate
from megatron_cp_plugin.registry import create, create_linear
from tests import test_linear_conformance as linear
from tests.any_placement import AnyAlgorithm, AnyPlacement
from tests.foreign_linear import Doubling
from tests.halves import Halves
from tests.linear_bytes import stated
from tests.pairwise import pairwise
from tests.plan_check import check, sent_by
from tests.test_conformance import Case, assert_conforms

MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 9},
    "documents": {"documents": (3, 11, 17)},
}
CASES = [
    Case("any", (("hosts", "owners"), ("parts", 2), ("uneven", True))),
    Case("any", (("seed", 7), ("chunks", 2))),
    Case("halves"),
    Case("striped_here"),
    Case("striped_here", (("travels", "queries"), ("chunks", 2))),
]
CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For one test only: other suites run every name that is registered."""
    cp.available()
    monkeypatch.setattr(registry, "_algorithms", dict(registry._algorithms))
    cp.register("any")(AnyAlgorithm)
    cp.register("halves")(Halves)
    # The example of CONTRIBUTING.md.
    (tmp_path / "striped.py").write_text(example())
    spec = spec_from_file_location("striped", tmp_path / "striped.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))


def example() -> str:
    """By another name than printed, by which whoever has tried it may have installed it."""
    _, _, rest = CONTRIBUTING.read_text().partition("## Add an algorithm")
    _, _, code = rest.partition("```python\n")
    return code.partition("```")[0].replace('@register("striped")', '@register("striped_here")')


def plans(case: Case, size: int, shape: Shape, mask: Mask) -> Iterator[Plan]:
    made = create(case.algo, VirtualWorld(size).topology(0), dict(case.options))
    return (made.plan(shape, mask, phase) for phase in PHASES)


@pytest.mark.parametrize(
    ("case", "size", "mask"),
    pairwise(CASES, (1, 2, 3, 4, 5), tuple(MASKS)),
    ids=str,
)
def test_conformance_plan_bytes_cost_and_picture(case: Case, size: int, mask: str) -> None:
    seen = Mask(**MASKS[mask])
    seq_len = 6 * size + 17  # ranks have unequally many tokens
    documents = (0, *seen.documents, seq_len) if seen.documents else None
    settings = {"causal": seen.causal, "window": seen.window, "cu_seqlens": documents}
    _, log = assert_conforms(case, size, seq_len=seq_len, **settings)
    shape = Shape(2, seq_len, 4, 2, 8, element_bytes=8, wide_bytes=8)
    forward, backward = plans(case, size, shape, seen)
    check(forward)
    check(backward)
    layer = Layer(case.algo, case.options, shape, seen, (0,) * size, peer_access=True)
    for rank, spans in enumerate(forward.spans):
        memory = peak_of(layer.on(rank), shape, seen, kernel_called("flash4"))
        assert memory.saved == 2 * sum(map(len, spans)) * 4 * (8 + 1) * 8  # out and lse
        assert memory.saved <= memory.forward
        assert memory.saved < memory.backward
        sent = [sent_by(plan, rank, shape)[0] for plan in (forward, backward)]
        assert sum(sent) == log.bytes(rank=rank)
    drawn = picture(case.algo, size, seq_len=seq_len, mask=seen, options=dict(case.options))
    pairs = sum(cell.pairs for step in drawn.steps for cell in step if cell)
    assert pairs == pytest.approx(seen.bands.area(seq_len))


def test_the_commands_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    for name, option in (("any", "hosts=owners"), ("striped_here", "travels=queries")):
        assert cli.main(["draw", "--algo", name, "--size", "4", "--option", option]) == 0
        assert f"{name}, {option} · 4 ranks" in capsys.readouterr().out
    words = "plan --size 4 --seq-len 64 --heads 8 --machine h200"
    assert cli.main(words.split()) == 0
    assert {"any", "striped_here"} <= set(capsys.readouterr().out.split())


def test_auto_tries_numbers_that_are_worth_it() -> None:
    @cp.register("mine")
    class _Tiled(Halves):
        @dataclass(frozen=True)
        class Options(Halves.Options):
            seed: int = number(0, lambda size: [0, size])
            other: int = 5

        def placement(self, shape: Shape, mask: Mask, phase: Phase) -> BlockPlacement:
            groups = self.head_groups(shape, mask)
            return AnyPlacement(self.layout, self.topology.size, groups, seed=self.options.seed)

    question = (Shape(1, 96, 4, 2, 8), Mask(), VirtualWorld(6).topology(0))
    tried = {one.options for one in candidates(*question)[0] if one.algo == "mine"}
    assert tried == {(("seed", 6),), ()}


def test_a_chain_of_states_takes_as_long_by_any_name() -> None:
    """Of more than 16 ranks three stand for all only where an algorithm says so."""
    cp.register("chain")(type("Chain", (Lasp,), {}))
    shape, machine = LinearShape(1, 128 * 20, 4, 16, 16), Machine.load("h200_nvlink")
    times = {
        algo: simulate(algo, {}, shape, Mask(), machine, (0,) * 20).seconds
        for algo in ("lasp", "chain")
    }
    assert times["chain"] == times["lasp"]


@pytest.mark.parametrize("size", [2, 3, 6])
def test_linear_attention_in_a_logarithm_of_rounds(size: int) -> None:
    """Outputs, states, all gradients; bytes and messages of each pass."""
    cp.register("doubling")(Doubling)
    case = linear.Case("doubling")
    for causal, states in product((True, False), repeat=2):
        for rates in ("slopes", "half", "plain"):
            linear.assert_conforms(case, size, 6 * size, rates, causal=causal, states=states)
    for seq_len in (7 * size + size // 2 + 1, size - 1, 2):
        linear.assert_conforms(case, size, seq_len, documents=tuple(range(1, seq_len, 5)))
    made = create_linear("doubling", VirtualWorld(size).topology(0), {})
    shape = LinearShape(1, 4 * size, 2, 8, 8)
    _, rounds, *_ = stated(made, shape, 0, causal=True, final_state=False)
    assert rounds == (size - 1).bit_length()
