"""Placements that no algorithm here has: what ranks cannot follow is refused."""

from collections.abc import Callable, Iterable, Iterator

import pytest

import megatron_cp_plugin as cp
from megatron_cp_plugin import registry
from megatron_cp_plugin.algorithms.point_to_point import PointToPoint
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.layout import Contiguous
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.plan_check import PlanError, check
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.virtual import VirtualWorld
from megatron_cp_plugin.drawing import picture
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.registry import create
from tests.oracle import expected_attention
from tests.test_conformance import Case, assert_matches, run

Places = Callable[[int, int, int], Iterable[Place]]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run every name that is registered."""
    cp.available()
    monkeypatch.setattr(registry, "_algorithms", dict(registry._algorithms))


class Placed(BlockPlacement):
    """Places as a test gives them."""

    places: Places

    def place(self, query: int, key: int) -> Iterable[Place]:
        return type(self).places(query, key, self.size)


def register(places: Places) -> None:
    """As algorithm `placed`."""
    kind = type("Kind", (Placed,), {"places": staticmethod(places)})

    @cp.register("placed")
    class _Algorithm(PointToPoint):
        layout = Contiguous()

        def placement(self, shape: Shape, mask: Mask, phase: Phase) -> BlockPlacement:
            return kind(self.layout, self.topology.size, self.head_groups(shape, mask))


def again_at_the_end(query: int, key: int, size: int) -> Iterator[Place]:
    """The keys of the rank before are computed with in the first step and in the last."""
    distance = (query - key) % size
    if distance == 1:
        yield Place(query, 1, part=(0, 2))
        yield Place(query, size - 1, part=(1, 2))
    else:
        yield Place(query, distance)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_blocks_that_are_kept_for_longer_than_slots_of_peer_memory(size: int) -> None:
    register(again_at_the_end)
    expected = expected_attention(seq_len=6 * size, heads=4, kv_heads=2, head_dim=8, causal=False)
    results, _ = run(Case("placed"), expected, size, causal=False, peer_access=True)
    assert_matches(Case("placed"), results, expected, bound=1e-10)
    if size > 3:
        with pytest.raises(ConfigError, match=r"transport peer needs .* two blocks of others"):
            run(Case("placed", (("transport", "peer"),)), expected, size, causal=False)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (lambda q, k, size: [Place(q, 0)], "in step 0, in which a rank has only its own"),
        (lambda q, k, size: [Place(size, 1)], "on rank 3 in step 1: use ranks 0 to 2"),
        (lambda q, k, size: [Place(q, (q - k) % size - 1)], "in step -1: use .* steps from 0"),
    ],
)
def test_places_that_no_rank_can_follow_are_refused(places: Places, message: str) -> None:
    register(places)
    with pytest.raises(ConfigError, match=message):
        picture("placed", 3)


def test_pairs_left_out_or_computed_twice_are_found() -> None:
    register(lambda q, k, size: [Place(q, (q - k) % size)] * (1 + (q == k)))
    with pytest.raises(PlanError, match="times for head"):
        check(create("placed", VirtualWorld(3).topology(0), {}).plan(Shape(1, 24, 1, 1, 8), Mask()))


class Shifted(BlockPlacement):
    """Every rank begins with the keys of the rank before it."""

    def key_holder(self, owner: int) -> int:
        return (owner + 1) % self.size

    def place(self, query: int, key: int) -> Iterator[Place]:
        yield Place(query, (query - self.key_holder(key)) % self.size)


@pytest.mark.parametrize("size", [2, 3])
def test_keys_that_begin_on_another_rank_than_their_owner(size: int) -> None:
    @cp.register("shifted")
    class _Algorithm(PointToPoint):
        layout = Contiguous()

        def placement(self, shape: Shape, mask: Mask, phase: Phase) -> BlockPlacement:
            return Shifted(self.layout, self.topology.size, self.head_groups(shape, mask))

    expected = expected_attention(seq_len=6 * size, heads=4, kv_heads=2, head_dim=8, causal=True)
    results, _ = run(Case("shifted"), expected, size, causal=True)
    assert_matches(Case("shifted"), results, expected, bound=1e-10)
