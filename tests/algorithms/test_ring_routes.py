"""Routes of rings: results, bytes over the network, correct plans."""

import pytest

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.communication.virtual import VirtualTopology, VirtualWorld
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.registry import create
from tests.plan_check import check, sent_by, traffic_of


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_a_block_goes_once_to_each_other_node(nodes: int) -> None:
    """A ring sends N - 1 blocks over the one link between two nodes of 8; here each rank 1/8."""
    size, seq_len = 8 * nodes, 16 * nodes
    world = VirtualWorld(size, ranks_per_node=8)
    shape = Shape(1, seq_len, 1, 1, 8)
    block = 2 * seq_len // size * 8 * 2
    blocks = {}
    for route in ("ring", "double"):
        algorithm = create("zigzag", world.topology(0), {"route": route})
        plan = algorithm.plan(shape, Mask())
        nodes_of = world.topology(0).nodes
        blocks[route] = {sent_by(plan, rank, shape, nodes_of)[0] // block for rank in range(size)}
        total = {sent_by(plan, rank, shape)[0] // block for rank in range(size)}
        # Whoever is the first of a node to have a block sends it on twice.
        assert max(total) <= size - 1 + nodes
    assert blocks == {"ring": {0, size - 1}, "double": {nodes - 1}}


@pytest.mark.parametrize("size", [4, 6, 8])
@pytest.mark.parametrize("phase", PHASES)
def test_messages_take_a_step_within_a_node_and_one_for_each_of_its_ranks_between(
    phase: Phase, size: int
) -> None:
    topology = VirtualWorld(size, ranks_per_node=size // 2).topology(0)
    made, nodes = create("zigzag", topology, {"route": "double"}), topology.nodes
    for move in made.plan(Shape(1, 8 * size, 4, 2, 8), Mask(), phase).moves:
        near = nodes[move.source] == nodes[move.target]
        assert move.needed - move.posted == (1 if near else size // 2)


@pytest.mark.parametrize("size", [2, 3, 5, 9, 64])
def test_straight_ways_halve_what_the_busiest_rank_of_a_contiguous_ring_sends(size: int) -> None:
    """Rank p sends KV to P - 1 - p ranks, returns to p; in a ring it passes on p + 1 and p sums."""
    shape = Shape(1, 4 * size, 4, 4, 8)
    block = 4 * 2 * 4 * 8 * 2
    most = {}
    for route in ("ring", "straight"):
        topology = VirtualWorld(size).topology(0)
        options = {"route": route, "backward": "kv", "gradients": "model"}
        algorithm = create("ring", topology, options)
        sent = [traffic_of(algorithm, shape, Mask(), rank) for rank in range(size)]
        most[route] = max(traffic.backward_bytes // block for traffic in sent)
    assert most == {"ring": max(2 * size - 3, size - 1), "straight": size - 1}


SHORT, LONG = tuple(range(20, 640, 20)), (600, 617)  # documents


@pytest.mark.parametrize(
    ("algo", "size", "of_node", "mask", "route"),
    [
        ("zigzag", 4, 4, Mask(), "ring"),
        ("zigzag", 4, 4, Mask(False), "ring"),
        ("zigzag", 16, 8, Mask(), "double"),
        ("zigzag", 16, 1, Mask(), "ring"),  # a node of each rank's own
        ("zigzag", 16, 4, Mask(), "double"),
        # Inside a node, whatever the mask hides.
        ("zigzag", 16, 16, Mask(window=9), "straight"),
        ("ring", 16, 16, Mask(documents=LONG), "straight"),
        ("zigzag:layout=documents", 16, 16, Mask(documents=SHORT), "straight"),
        ("zigzag:layout=documents", 16, 16, Mask(documents=LONG), "straight"),
        # Between nodes by what crosses.
        ("zigzag:layout=documents", 16, 4, Mask(documents=SHORT), "straight"),
        ("zigzag:layout=documents", 16, 4, Mask(documents=LONG), "double"),
        ("zigzag", 16, 8, Mask(window=9), "straight"),
        ("zigzag", 16, 8, Mask(window=600), "double"),
        ("zigzag", 16, 1, Mask(window=600), "straight"),
    ],
)
def test_the_route_of_auto(algo: str, size: int, of_node: int, mask: Mask, route: str) -> None:
    name, *words = algo.split(":")
    options: dict[str, object] = dict(word.split("=") for word in words)
    topology = VirtualWorld(size, ranks_per_node=of_node).topology(0)
    shape = Shape(1, 40 * size, 4, 2, 8)
    auto = create(name, topology, options).for_documents(mask.resolved)
    named = create(name, topology, {**options, "route": route}).for_documents(mask.resolved)
    for phase in PHASES:
        assert auto.placement(shape, mask, phase) == named.placement(shape, mask, phase)


def test_blocks_that_many_ranks_of_a_node_need_cross_once() -> None:
    """Straight ways would send the first rows of a long document to each of them."""
    shape, mask = Shape(1, 640, 4, 2, 8), Mask(documents=LONG)
    topology = VirtualWorld(16, ranks_per_node=4).topology(0)
    most = {}
    for route in ("straight", "auto"):
        options = {"layout": "documents", "route": route}
        plan = create("zigzag", topology, options).for_documents(mask.resolved).plan(shape, mask)
        most[route] = max(sent_by(plan, rank, shape, topology.nodes)[0] for rank in range(16))
    assert 2 * most["auto"] <= most["straight"]


def test_unequal_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualTopology, "nodes", property(lambda self: (0, 0, 0, 1)))
    algorithm = create("zigzag", VirtualWorld(4).topology(0), {"route": "double"})
    with pytest.raises(ConfigError, match=r"zigzag route double needs as many .* got 3, 1: use"):
        algorithm.plan(Shape(1, 32, 4, 2, 8), Mask())


def test_any_numbering_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualTopology, "nodes", property(lambda self: (0, 1, 1, 0, 2, 2)))
    algorithm = create("zigzag", VirtualWorld(6).topology(0), {"route": "double"})
    for phase in PHASES:
        check(algorithm.plan(Shape(1, 31, 4, 2, 8), Mask(), phase))
