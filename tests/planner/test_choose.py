"""What is chosen of what, and what never is."""

from dataclasses import replace

import pytest

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.layers import options_by_name
from megatron_cp_plugin.planner.candidates import candidates
from megatron_cp_plugin.planner.choose import GIB, CallSite, Choice, Kind, choose
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.simulate import simulate
from megatron_cp_plugin.spans import block_diffusion

H200 = Machine.load("h200_nvlink")
GQA = Shape(1, 16384, 16, 4, 64)


def site(size: int, machine: Machine = H200, per_node: int = 8, gib: float = 0.0) -> CallSite:
    nodes = tuple(rank // per_node for rank in range(size))
    return CallSite(machine, nodes, next(iter(machine.kernels)), gib * GIB or None)


def of_one(shape: Shape, size: int, mask: Mask | None = None, **how: object) -> Choice:
    return choose([Kind("attention", shape, mask or Mask())], site(size), **how)  # type: ignore[arg-type]


def test_spans_of_many_ranks_are_simulated_where_these_gather() -> None:
    tokens = 2**17
    mask = Mask.of(Slices.of(block_diffusion(tokens // 2, 4096), tokens))
    shape, nodes = Shape(1, tokens, 8, 8, 128), (0,) * 128
    how = shape, mask, H200, nodes
    with pytest.raises(ConfigError, match="spans are simulated on up to 64 ranks"):
        simulate("ring", {}, *how)
    assert simulate("attention2d", {"variant": "no"}, *how).seconds > 0


def test_the_choice_was_simulated() -> None:
    """Not only estimated, where few of many candidates can be simulated."""
    machine = Machine.load("h100_400g")
    shape = Shape(1, 2**20, 8, 2, 128)
    choice = choose([Kind("attention", shape, Mask())], site(16, machine, per_node=2))
    assert choice.best.rows[0].simulated


def test_what_cannot_be_had_is_named() -> None:
    choice = of_one(
        GQA, 4, refusal=lambda one: "no messages to all" if one.algo == "ulysses" else None
    )
    reasons = {one.name: one.reason for one in choice.refused}
    assert "no messages to all" in reasons["ulysses"]
    assert choice.best.algo != "ulysses"
    with pytest.raises(ConfigError, match="auto found no algorithm that serves this and fits"):
        of_one(GQA, 4, refusal=lambda combination: "not today")


def test_what_does_not_fit_is_not_taken() -> None:
    kinds = [Kind("attention", Shape(1, 2**17, 32, 32, 128), Mask())]
    free = choose(kinds, site(4))
    peak = free.best.rows[0].peak_bytes
    assert peak is not None
    tight = choose(kinds, replace(site(4), memory_bytes=peak * 0.95))
    assert tight.best.rows[0].peak_bytes is not None
    assert tight.best.rows[0].peak_bytes <= peak * 0.95
    assert any("attention needs" in one.reason for one in tight.refused)
    with pytest.raises(ConfigError, match="attention needs"):
        choose([Kind("attention", GQA, Mask())], replace(site(2), memory_bytes=1.0))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_layout_that_is_given_is_kept(layout: str) -> None:
    choice = of_one(GQA, 4, layouts=(layout,))
    assert {row.layout for row in choice.tables[0].rows} == {layout}


def test_documents_may_have_their_own_layout() -> None:
    topology = DryRunGroup(0, (0,) * 4, peer_access=True)
    documents = Mask(documents=random_documents(GQA.seq_len, 1024))
    layouts = [
        {one.layout.name for one in candidates(GQA, mask, topology)[0]}
        for mask in (Mask(), documents)
    ]
    assert layouts == [{"zigzag", "contiguous"}, {*layouts[0], "documents", "documents/2"}]


def test_layers_of_several_kinds_go_together() -> None:
    """One layout, and the options that the run's configuration gives all but one of them."""
    kinds = [
        Kind("full", GQA, Mask(), 2),
        Kind("windows", GQA, Mask(window=256), 6),
        Kind("linear", LinearShape(1, GQA.seq_len, 16, 64, 64), Mask(), 8),
    ]
    choice = choose(kinds, site(4))
    for one in choice.combinations[:50]:
        assert len({row.layout for row in one.rows}) == 1
        names = [row.algo for row in one.rows]
        for row in one.rows:
            expected = options_by_name(names, one.algo, one.options)[row.algo]
            assert row.options == expected
        layers = (names[0], names[1], names[2])
        config = ContextParallelConfig(
            one.algo,
            4,
            options=one.options,
            layers=layers,
            linear_model="transnormer",
            by_auto=True,
        )
        config.check_layers()
    taken = sum(kind.count * row.seconds for kind, row in zip(kinds, choice.best.rows, strict=True))
    assert choice.best.seconds == pytest.approx(taken)
    alone = [choose([kind], site(4)).best.seconds for kind in kinds]
    assert choice.best.seconds >= sum(alone) * 0.999


def test_a_slow_network_changes_the_choice() -> None:
    """Between nodes of one GPU heads cannot be split without the network."""
    slow = replace(
        H200,
        between=replace(
            H200.between,
            exchange=replace(H200.between.exchange, bytes_per_second=2e9),
            collective={},
        ),
    )
    shape = Shape(1, 4 * 8192, 8, 8, 128)
    near = choose([Kind("attention", shape, Mask())], site(4))
    far = choose([Kind("attention", shape, Mask())], site(4, slow, per_node=1))
    assert far.best.seconds > 1.5 * near.best.seconds
    assert far.best.rows[0].between > 0
    assert near.best.rows[0].between == 0
    in_pairs = choose([Kind("attention", shape, Mask())], site(4, slow, per_node=2))
    assert in_pairs.best.rows[0].between < far.best.rows[0].between


@pytest.mark.slow
@pytest.mark.timeout(120)  # it takes 4 s; a step for each pair of ranks would take minutes
def test_a_thousand_ranks_take_seconds() -> None:
    choice = of_one(Shape(1, 1024 * 4096, 64, 64, 128), 1024)
    assert len(choice.combinations) > 10
