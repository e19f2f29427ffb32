"""Helpers by work: every pair once, no rank with much more than the mean, the same on all ranks."""

from collections.abc import Callable

import numpy as np
import pytest

from megatron_cp_plugin.algorithms.work_placement import (
    Assigned,
    Assignment,
    WorkPlacement,
    _counted,
    _Queries,
)
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.layout import Contiguous
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.registry import create
from scripts.packed_documents import pack
from tests.peer_world import PeerWorld

COSTS = 40, 12
PACKS = ("lognormal:16K:1", "lognormal:2K:1", "configs/lengths/long_tail.csv", "images", "trees")


def edges_of(size: int, seq_len: int) -> tuple[int, ...]:
    spans = [Contiguous().spans(rank, size, seq_len) for rank in range(size)]
    return (0, *(one[-1].stop for one in spans))


def loads(parts: list[Assigned], size: int) -> list[float]:
    found = [0.0] * size
    for part in parts:
        found[part.rank] += part.work
    return found


def test_pieces_of_queries_are_counted_by_hand() -> None:
    """Of a window and two documents: pairs, which keys, and the rows of whoever computes them."""
    at = np.arange(24)
    age = at[:, None] - at
    seen = (age >= 0) & (age < 5) & ((at[:, None] < 9) == (at < 9))
    edges, blocks = np.array([8, 12, 16]), np.array([0, 8, 16, 24])
    bands = Mask(window=5, documents=(9,)).bands.table
    queries = _Queries(1, edges, _counted(edges, blocks, bands))
    assert queries.keys.tolist() == [0, 1]
    for number, key in enumerate(queries.keys):
        for piece in range(2):
            rows, columns = slice(*edges[piece : piece + 2]), slice(*blocks[key : key + 2])
            pairs = seen[rows, columns]
            assert queries.counted[number, piece] == pairs.sum()
            if pairs.any():
                keys = np.flatnonzero(pairs.any(0)) + blocks[key]
                assert queries.first[number, piece] == keys[0]
                assert queries.last[number, piece] == keys[-1] + 1
    queries.who[1] = [2, 0]
    rows = [(part.key, part.start, part.stop, part.rank) for part in queries.parts()]
    assert rows == [(0, 0, 8, 1), (1, 0, 4, 2), (1, 4, 8, 0)]


def test_pieces_of_queries_begin_where_documents_do() -> None:
    """So no few rows of a document stay with a rank that gives the others away."""
    tokens, starts = 4096, (701, 1500, 1503, 2900)
    assignment = Assignment((0, tokens, 2 * tokens), Mask(documents=starts), [0, 0], COSTS)
    edges = assignment._pieces(0).tolist()
    assert edges == sorted(set(edges))
    assert (edges[0], edges[-1]) == (0, tokens)
    assert {701, 1503, 2900} <= set(edges)  # of two that are near to one edge it takes one
    assert max(np.diff(edges)) <= 2 * tokens / (len(edges) - 1)


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("words", PACKS)
def test_no_rank_has_a_twentieth_more_than_the_mean(words: str, size: int) -> None:
    """16K tokens a rank, ranks of several nodes."""
    seq_len = size * 2**14
    edges = tuple(range(0, seq_len + 1, 2**14))
    for seed in range(5):
        mask = pack(words, seq_len, size, seed)
        of_ranks = loads(
            Assignment(edges, mask, [rank // 8 for rank in range(size)], COSTS).parts(), size
        )
        assert sum(of_ranks) == mask.bands.area(seq_len)
        assert max(of_ranks) <= 1.05 * sum(of_ranks) / size


@pytest.mark.parametrize("size", [3, 8, 64])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: Mask(documents=(n // 3,)),
        lambda n: Mask(causal=False, documents=(n // 3,)),
        lambda n: Mask(window=n // 3),
        lambda n: Mask.of(
            Slices.of([(0, n // 2, 0, n, "full"), (n // 2, n, n // 2, n, "causal")], n)
        ),
        lambda n: Mask.of(Slices.of([(0, n // 8, 0, n, "full")], n)),
    ],
    ids=["two documents", "full documents", "window", "rectangle", "few queries"],
)
def test_blocks_that_many_others_meet(make: Callable[[int], Mask], size: int) -> None:
    seq_len = size * 4096
    mask = make(seq_len)
    of_ranks = loads(Assignment(edges_of(size, seq_len), mask, [0] * size, COSTS).parts(), size)
    assert sum(of_ranks) == mask.bands.area(seq_len)
    assert max(of_ranks) <= 1.05 * sum(of_ranks) / size


def test_whoever_has_the_keys_helps_first_and_then_the_node() -> None:
    """Of ranks with equally much room."""
    # Rank 1 has all the work. Queries see keys of rank 0, which has nothing else to do.
    mask = Mask.of(Slices.of([(1024, 2048, 0, 1024, "full")], 2048))
    parts = Assignment((0, 1024, 2048), mask, [0, 0], COSTS).parts()
    assert {(part.key, part.rank) for part in parts} == {(0, 0), (0, 1)}
    assert [part.stop - part.start for part in parts if part.rank == 0] == [
        pytest.approx(512, abs=32)
    ]
    # Work of one block for two ranks of four: the other one is on the same node.
    mask = Mask.of(Slices.of([(0, 1024, 0, 1024, "full"), (3072, 4096, 3072, 4096, "full")], 4096))
    parts = Assignment(edges_of(4, 4096), mask, [0, 0, 1, 1], COSTS).parts()
    assert {(part.query, part.rank) for part in parts} == {(0, 0), (0, 1), (3, 2), (3, 3)}
    parts = Assignment(edges_of(4, 4096), mask, [0, 1, 0, 1], COSTS).parts()
    assert {(part.query, part.rank) for part in parts} == {(0, 0), (0, 2), (3, 1), (3, 3)}


def test_other_masks_have_the_plan_of_the_paper() -> None:
    shape, topology = Shape(1, 64, 4, 2, 8), VirtualWorld(8).topology(0)
    for mask in (Mask(), Mask(causal=False)):
        mine, papers = (
            create("distflash", topology, {"helpers": helpers}).placement(shape, mask, "forward")
            for helpers in ("work", "distance")
        )
        assert mine == papers


@pytest.mark.parametrize(
    ("options", "by_work"),
    [
        ({}, True),
        ({"last_step": "owner"}, True),
        ({"helpers": "none"}, False),
        ({"helpers": "distance"}, False),
        ({"layout": "thd"}, False),
        ({"transport": "peer"}, True),
    ],
)
def test_where_ranks_help_by_work(options: dict[str, object], by_work: bool) -> None:
    shape, world = Shape(1, 64, 4, 2, 8), PeerWorld(4)
    mask = Mask(documents=(8, 40))
    for name in ("distflash", "distflash-paper"):
        made = create(name, world.topology(0), options).for_documents(mask.resolved)
        placement = made.placement(shape, mask, "forward")
        assert isinstance(placement, WorkPlacement) is (by_work and name == "distflash")
