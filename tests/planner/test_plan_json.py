"""Plans that go through JSON text and come back."""

import json
from pathlib import Path

import pytest

import megatron_cp_plugin as cp
from megatron_cp_plugin import cli, registry
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.plans.plan import PHASES, Plan
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.costs import peak
from megatron_cp_plugin.planner.plan_json import to_json
from megatron_cp_plugin.spans import image_blocks
from tests.plan_check import check
from tests.plan_reader import from_json

SHAPE = Shape(2, 96, 16, 4, 8, value_dim=6)
NODES = (0, 0, 1, 1)
VARIANTS = [
    *((algo, {}) for algo in cp.available("softmax")),
    ("zigzag", {"route": "double", "chunks": 2}),
    ("attention2d", {"variant": "no", "chunks": 2}),
    ("attention2d", {"variant": "no", "rows": 2}),
    ("attention2d", {"variant": "overlap"}),
    ("usp", {"ulysses": 2, "chunks": 2}),
]


MASKS = {
    "causal": Mask(),
    "window": Mask(window=9),
    "documents": Mask(documents=(10, 31)),
    "spans": Mask.of(Slices.of(image_blocks(96, [(20, 50)]), 96)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("algo", "options"), VARIANTS, ids=str)
def test_a_plan_comes_back(algo: str, options: dict[str, object], mask: Mask) -> None:
    world = VirtualWorld(4, ranks_per_node=2)
    algorithm = registry.create(algo, world.topology(0), options)
    for phase in PHASES:
        plan = algorithm.plan(SHAPE, mask, phase)
        document = to_json(plan, SHAPE, NODES)
        back = from_json(json.loads(json.dumps(document)))
        for name in Plan.__dataclass_fields__:
            assert getattr(back, name) == getattr(plan, name), name
        check(back)
        for rank in range(4):
            sent = [t for t in document["transfers"] if t["source"] == rank]
            far = [t for t in sent if t["link"] == "network"]
            assert sum(t["bytes"] for t in sent) == plan.sent(rank, SHAPE).bytes
            assert sum(t["bytes"] for t in far) == plan.sent(rank, SHAPE, NODES).bytes
        assert sum(c["pairs"] for c in document["computes"]) == pytest.approx(
            sum(float(plan.pairs(compute)) for compute in plan.computes)
        )


def test_routes_and_bytes() -> None:
    ring = registry.create("zigzag", VirtualWorld(3).topology(0), {})
    shape = Shape(1, 96, 4, 2, 8)
    hops = to_json(ring.plan(shape, Mask()), shape, (0, 0, 0))["transfers"]
    assert [t["route"] for t in hops] == ["direct", "relay"] * 3
    assert {t["bytes"] for t in hops} == {32 * 2 * 2 * 8 * 2}
    assert {t["kind"] for t in hops} == {"input"}
    back = to_json(ring.plan(shape, Mask(), "backward"), shape, (0, 0, 0))["transfers"]
    results = [t for t in back if t["kind"] == "result"]
    assert [(t["route"], t["wide"]) for t in results] == [("relay", True), ("direct", True)] * 3


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    words = "plan --size 3 --seq-len 768 --heads 8 --kv-heads 2 --head-dim 64 --algo zigzag"
    more = ["--option", "backward=query", "--memory", "--json", str(path)]
    assert cli.main([*words.split(), *more]) == 0
    printed = capsys.readouterr().out
    assert "peak GiB" in printed
    assert f"wrote {path}" in printed.replace("\n", "")
    document = json.loads(path.read_text())
    assert (document["version"], document["algorithm"], document["size"]) == (1, "zigzag", 3)
    assert document["options"]["backward"] == "query"
    shape = Shape(**document["shape"])
    assert shape == Shape(1, 768, 8, 2, 64)
    for phase in PHASES:
        check(from_json(document["passes"][phase]))
    peaks = [peak("zigzag", 3, rank, shape, options=document["options"]) for rank in range(3)]
    assert document["peak_bytes"] == [found._asdict() for found in peaks]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--json plan.json", "--option and --json need --algo"),
        ("--option chunks=2", "--option and --json need --algo"),
        ("--algo zigzag --json nowhere/plan.json", "no folder 'nowhere'"),
        ("--algo zigzg", "did you mean 'zigzag'"),
        ("--algo lasp", "softmax attention got 'lasp'"),
        ("--algo usp --option ulysses=4 --size 6", "usp needs ulysses to divide"),
    ],
)
def test_errors_are_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["plan", *"--size 2 --seq-len 64 --heads 8".split(), *words.split()]
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
