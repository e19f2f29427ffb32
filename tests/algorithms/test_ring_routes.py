"""Routes of rings: results, bytes over the network, correct plans."""

import pytest

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.communication.virtual import VirtualTopology, VirtualWorld
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.registry import create
from tests.plan_check import check

NODES = [(4, 2), (6, 2), (6, 3), (8, 4)]
MASKS = [Mask(), Mask(False), Mask(window=9), Mask(documents=(5, 6, 11))]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("algo", ["zigzag", "ring", "usp"])
def test_plans_are_correct(algo: str, mask: Mask) -> None:
    for size, of_node in (*NODES, (3, 3)):
        if algo == "usp" and of_node % 2:
            continue  # teams of two in nodes of three
        for rule in ("kv", "query"):
            options = {"route": "straight" if size == of_node else "double", "backward": rule}
            if algo == "usp":
                options["ulysses"] = 2
            topology = VirtualWorld(size, ranks_per_node=of_node).topology(0)
            algorithm = create(algo, topology, options)
            for phase in PHASES:
                check(algorithm.plan(Shape(1, 2 * size + 7, 4, 2, 8), mask, phase))


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
        blocks[route] = {plan.sent(rank, shape, nodes_of).bytes // block for rank in range(size)}
        total = {plan.sent(rank, shape).bytes // block for rank in range(size)}
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
        sent = [algorithm.traffic(shape, Mask(), rank) for rank in range(size)]
        most[route] = max(traffic.backward_bytes // block for traffic in sent)
    assert most == {"ring": max(2 * size - 3, size - 1), "straight": size - 1}


FEW = [
    Mask(window=9),
    Mask(window=30),
    Mask(documents=tuple(range(7, 320, 11))),
    Mask(documents=(60, 61, 150), window=20),
    Mask(causal=False, documents=tuple(range(5, 320, 9))),
]


@pytest.mark.parametrize("mask", FEW, ids=str)
@pytest.mark.parametrize("algo", ["zigzag", "usp", "zigzag:layout=documents"])
@pytest.mark.parametrize("size", [8])
def test_few_pairs_go_straight(size: int, algo: str, mask: Mask) -> None:
    """In fewer steps and messages; no rank of any size of node sends more."""
    shape = Shape(1, 40 * size, 4, 2, 8)
    name, *words = algo.split(":")
    given: dict[str, object] = dict(word.split("=") for word in words)
    given |= {"ulysses": 2} if name == "usp" else {}
    for of_node in (1, 2, 4, size):
        topology = VirtualWorld(size, ranks_per_node=of_node).topology(0)
        plans = {}
        for route in ("auto", "ring", "straight"):
            made = create(name, topology, {**given, "route": route}).within(mask.followed)
            plans[route] = [made.plan(shape, mask, phase) for phase in PHASES]
        chosen = plans["ring" if plans["auto"][0].relay else "straight"]
        assert [plan.moves for plan in plans["auto"]] == [plan.moves for plan in chosen]
        for auto, ring in zip(plans["auto"], plans["ring"], strict=True):
            for nodes in (None, topology.nodes):
                most, sums = [], []
                for plan in (auto, ring):
                    sent = [plan.sent(rank, shape, nodes).bytes for rank in range(size)]
                    most.append(max(sent))
                    sums.append(sum(sent))
                assert sums[0] <= sums[1]
                assert nodes or most[0] <= most[1]


@pytest.mark.parametrize(
    ("algo", "size", "mask", "straight"),
    [
        ("zigzag", 8, Mask(window=9), True),
        ("zigzag", 8, Mask(documents=tuple(range(20, 320, 40))), True),
        ("zigzag", 4, Mask(window=9), False),  # two steps of three
        ("zigzag", 8, Mask(), False),
        ("zigzag", 8, Mask(window=300), False),
        ("ring", 8, Mask(window=9), False),  # one step either way
        ("zigzag", 1, Mask(window=9), False),
        # Few exchanges of each rank, though at many distances.
        ("zigzag:layout=documents", 16, Mask(documents=tuple(range(17, 640, 17))), True),
        ("zigzag:layout=documents", 24, Mask(documents=tuple(range(37, 960, 37))), True),
        ("zigzag:layout=documents", 16, Mask(documents=(300, 317)), False),
        # Few that a rank sends, but others that it receives.
        ("zigzag", 16, Mask(documents=tuple(range(130, 640, 130))), False),
    ],
)
def test_what_goes_straight(algo: str, size: int, mask: Mask, straight: bool) -> None:
    name, *words = algo.split(":")
    options = dict(word.split("=") for word in words)
    made = create(name, VirtualWorld(size).topology(0), options).within(mask.followed)
    for phase in PHASES:
        assert made.plan(Shape(1, 40 * size, 4, 2, 8), mask, phase).relay is not straight


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
