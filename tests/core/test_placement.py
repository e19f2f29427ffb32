"""Placements that no algorithm here has: what ranks cannot follow is refused."""

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import pytest

import megatron_cp_plugin as cp
from megatron_cp_plugin import registry
from megatron_cp_plugin.core.algorithm import PointToPoint
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.layout import Contiguous, Layout
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.ranges import Span
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.drawing import picture
from megatron_cp_plugin.registry import create
from tests.oracle import expected_attention
from tests.test_conformance import Case, assert_conforms, run

_CONTIGUOUS = Contiguous()
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


def register(places: Places, *, relay: bool = False, layout: Layout = _CONTIGUOUS) -> None:
    """As algorithm `placed`."""
    kind = type("Kind", (Placed,), {"places": staticmethod(places), "relay": relay})
    tokens = layout

    @cp.register("placed")
    class _Algorithm(PointToPoint):
        layout = tokens

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
    assert_conforms(Case("placed"), size, seq_len=6 * size, causal=False)
    case = Case("placed", (("transport", "peer"),))
    if size > 3:
        with pytest.raises(ConfigError, match=r"transport peer needs .* of at most 2 exchanges"):
            assert_conforms(case, size, seq_len=6 * size, causal=False)


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


def in_turn(query: int, key: int, size: int) -> Place:
    return Place(query, (query - key) % size)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False), Mask(documents=(7, 30))])
@pytest.mark.parametrize(
    ("places", "message"),
    [
        (
            lambda q, k, size: [in_turn(q, k, size)] * (1 + (q == k == 1)),
            "in placed queries of rank 1 meet keys of rank 1 as part 0 of 1 on rank 1, part 0 of 1",
        ),
        (
            lambda q, k, size: [in_turn(q, k, size)] * ((q, k) != (2, 1)),
            "placed does not say where queries of rank 2 meet keys of rank 1",
        ),
        (
            lambda q, k, size: [in_turn(q, k, size)._replace(part=(0, 1 + (q == 2)))],
            "queries of rank 2 meet keys of rank 0 as part 0 of 2 on rank 2: let",
        ),
        (
            lambda q, k, size: [Place(q, 3 - 2 * (q == k), part) for part in ((0, 2), (1, 3))],
            "as part 0 of 2 on rank 0, part 1 of 3 on rank 0",
        ),
        (
            lambda q, k, size: [in_turn(q, k, size)._replace(part=(1, 5), parts=3)],
            "rank 0 meet keys of rank 0 as parts 1 to 3 of 5 on rank 0: let",
        ),
        (
            lambda q, k, size: Place(q, (q - k) % size),
            r"rank 0 meet keys of rank 0 at \[0, 0, \(0, 1\), 1\]: let `place` yield a Place",
        ),
        (lambda q, k, size: [(q, 1)], r"at \[\(0, 1\)\]: let `place` yield a Place"),
    ],
)
def test_pairs_that_are_left_out_or_computed_twice_are_refused(
    places: Places, message: str, mask: Mask
) -> None:
    """Before anything is computed, on all ranks."""
    register(places)
    made = create("placed", VirtualWorld(3).topology(2), {})
    for phase in PHASES:
        for rank in (None, 2, 2):  # of all ranks, of one, and again
            with pytest.raises(ConfigError, match=message):
                made.plan(Shape(1, 48, 1, 1, 8), mask, phase, rank=rank)


def test_a_pair_that_the_mask_hides_needs_no_place() -> None:
    register(lambda q, k, size: [in_turn(q, k, size)] * (q >= k))
    expected = expected_attention(seq_len=24, causal=True)
    assert_conforms(Case("placed"), 3, seq_len=24)
    with pytest.raises(ConfigError, match="where queries of rank 0 meet keys of rank 1"):
        run(Case("placed"), expected, 3, causal=False)


def test_a_relay_that_passes_on_what_it_has_not_is_refused() -> None:
    register(lambda q, k, size: [Place(q, int(q != k))], relay=True)
    with pytest.raises(
        ConfigError,
        match="placed lets rank 0 pass a block of rank 1 on to rank 2 in step 1, but has it there",
    ):
        picture("placed", 3, mask=Mask(causal=False))


class Held(Contiguous):
    """Tokens as a test gives them."""

    name = "held"
    edges: ClassVar[tuple[tuple[tuple[int, int], ...], ...]]
    longer: ClassVar[int] = 0

    def spans(self, rank: int, size: int, seq_len: int) -> tuple[Span, ...]:
        return tuple(Span(*edge) for edge in self.edges[rank])

    def length(self, rank: int, size: int, seq_len: int) -> int:
        return sum(map(len, self.spans(rank, size, seq_len))) + self.longer


@pytest.mark.parametrize(
    ("edges", "longer", "message"),
    [
        ((((0, 4),), ((5, 12),)), 0, "layout held gives token 4 of 12 to 0 of 2 ranks"),
        ((((0, 5),), ((4, 12),)), 0, "layout held gives token 4 of 12 to 2 of 2 ranks"),
        ((((0, 5),), ((5, 11),)), 0, "layout held gives token 11 of 12 to 0 of 2 ranks"),
        (
            (((0, 5),), ((5, 13),)),
            0,
            "gives rank 1 positions 5 to 12 after 0 of 12 tokens: let spans of a rank ascend",
        ),
        ((((0, 5),), ((9, 12), (5, 9))), 0, "gives rank 1 positions 5 to 8 after 12 of 12 tokens"),
        ((((0, 5),), ((5, 12),)), 1, "gives rank 0 5 tokens by `spans` and 6 by `length`"),
    ],
)
def test_a_layout_that_is_no_partition_is_refused(
    edges: tuple[tuple[tuple[int, int], ...], ...], longer: int, message: str
) -> None:
    kind = type("Kind", (Held,), {"edges": edges, "longer": longer})
    register(lambda q, k, size: [in_turn(q, k, size)], layout=kind())
    with pytest.raises(ConfigError, match=message):
        create("placed", VirtualWorld(2).topology(0), {}).plan(Shape(1, 12, 1, 1, 8), Mask())


class Shifted(BlockPlacement):
    """Every rank begins with the keys of the rank before it."""

    def key_source(self, owner: int) -> int:
        return (owner + 1) % self.size

    def place(self, query: int, key: int) -> Iterator[Place]:
        yield Place(query, (query - self.key_source(key)) % self.size)


@pytest.mark.parametrize("size", [2, 3])
def test_keys_that_begin_on_another_rank_than_their_owner(size: int) -> None:
    @cp.register("shifted")
    class _Algorithm(PointToPoint):
        layout = Contiguous()

        def placement(self, shape: Shape, mask: Mask, phase: Phase) -> BlockPlacement:
            return Shifted(self.layout, self.topology.size, self.head_groups(shape, mask))

    assert_conforms(Case("shifted"), size, seq_len=6 * size)
