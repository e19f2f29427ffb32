"""Plans of all algorithms: correct ones, as the checker says; their bytes, by closed formulas."""

from dataclasses import replace
from math import gcd, lcm

import pytest

from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.call import Shape, head_groups
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.layout import LAYOUTS
from megatron_cp_plugin.core.plans.checks import fits_slots
from megatron_cp_plugin.core.plans.compile import plan_of
from megatron_cp_plugin.core.plans.plan import PHASES, QUERIES, Block, Side
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.registry import create
from tests.halves import HalvesPlacement
from tests.plan_check import PlanError, check, sent_by, traffic_of


def algorithm(name: str, size: int, **options: object) -> Algorithm:
    return create(name, VirtualWorld(size).topology(0), options)


@pytest.mark.parametrize(("name", "rows"), [("allgather", None), ("attention2d", 4)])
def test_a_rank_that_gathers_looks_at_few_pairs(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: int | None
) -> None:
    """Of 16 ranks, in both passes: at the blocks of some ranks, not at all 256 pairs."""
    options = {} if rows is None else {"rows": rows}
    made = algorithm(name, 16, transport="group", **options)
    shape, mask = Shape(1, 1600, 4, 4, 8), Mask(documents=tuple(range(10, 1600, 10)))
    kind = type(made.placement(shape, mask, "forward"))
    asked: list[str] = []

    def note(name: str) -> None:
        method = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args: asked.append(name) or method(*args))

    note("place")
    note("blocks_of")
    for phase in PHASES:
        made.plan(shape, mask, phase, rank=5)
    assert 0 < len(asked) <= 5 * 16


def test_ranks_of_a_grid_compute_in_several_steps() -> None:
    for phase in PHASES:
        plan = algorithm("attention2d", 9, variant="overlap").plan(
            Shape(1, 157, 4, 4, 8), Mask(), phase
        )
        assert len({one.step for one in plan.computes if one.rank == 0}) > 1
        check(plan)


def test_nodes_of_any_numbering() -> None:
    world = VirtualWorld(8, ranks_per_node=2)
    plan = create("attention2d", world.topology(0), {"rows": 4}).plan(Shape(1, 40, 4, 4, 8), Mask())
    check(plan)
    nodes = world.topology(0).nodes
    # Rows lie inside nodes: only keys leave them.
    inside = [move for move in plan.moves if nodes[move.source] == nodes[move.target]]
    assert {move.side for move in inside} == {QUERIES}
    shape = Shape(1, 40, 4, 4, 8)
    assert sent_by(plan, 0, shape, nodes)[0] == 3 * 5 * 2 * 4 * 8 * 2 < sent_by(plan, 0, shape)[0]


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
@pytest.mark.parametrize(
    ("name", "options"),
    [("ring", {}), ("zigzag", {}), ("distflash", {"helpers": "distance"})],
    ids=["ring", "zigzag", "distflash"],
)
def test_two_buffers_are_enough_and_one_is_not(
    name: str, options: dict[str, object], size: int
) -> None:
    shape = Shape(1, 5 * size + 1, 4, 2, 8)
    for mask in (Mask(), Mask(False), Mask(window=9)):
        for phase in PHASES:
            plan = algorithm(name, size, chunks=2, **options).plan(shape, mask, phase)
            assert fits_slots(plan, 2)
            if plan.steps > (3 if plan.merged else 2) * len(plan.groups):
                assert not fits_slots(plan, 1)


@pytest.mark.parametrize(
    "mask", [Mask(), Mask(False), Mask(window=5), Mask(documents=(4, 6, 11, 13, 19))], ids=str
)
@pytest.mark.parametrize("phase", PHASES)
def test_no_row_travels_in_vain(phase: Phase, mask: Mask) -> None:
    placement = HalvesPlacement(LAYOUTS["contiguous"], 4, head_groups(4, 2, 1))
    plan = plan_of(placement, 26, mask, phase)
    inputs = [move for move in plan.moves if not move.result]
    assert {move.side for move in inputs} == set(Side)
    for move in inputs:
        rows: set[int] = set()
        for compute in plan.computes:
            block = compute.keys if move.side else compute.queries
            if compute.rank == move.target and block.owners == move.block.owners:
                slices = (tile.kv if move.side else tile.q for tile in plan.tiles(compute))
                numbers = rows_of(block)
                rows.update(number for s in slices for number in numbers[s])
        assert sorted(rows) == rows_of(move.block)


def rows_of(block: Block) -> list[int]:
    return [row for start, stop in block.rows for row in range(start, stop)]


SHAPE = Shape(1, 24, 4, 2, 8)


@pytest.mark.parametrize("name", ["ring", "zigzag", "distflash", "allgather", "ulysses", "usp"])
@pytest.mark.parametrize("phase", PHASES)
def test_every_move_is_needed(name: str, phase: str) -> None:
    options = {"ulysses": 2} if name == "usp" else {}
    plan = algorithm(name, 4, **options).plan(SHAPE, Mask(), phase)  # type: ignore[arg-type]
    check(plan)
    for move in plan.moves:
        with pytest.raises(PlanError):
            check(replace(plan, moves=tuple(other for other in plan.moves if other is not move)))


# Closed formulas: written down without the plan, for equal blocks of S tokens a rank.

SIZES = (1, 2, 3, 4, 6, 8, 32)
S, D, E = 8, 16, 24  # tokens a rank, head dims of queries and of values


def shape_of(size: int, heads: int, kv_heads: int) -> Shape:
    return Shape(3, S * size, heads, kv_heads, D, value_dim=E)


def assert_sent(
    name: str,
    size: int,
    shape: Shape,
    expected: tuple[float, int, float, int],
    mask: Mask | None = None,
    **options: object,
) -> None:
    """Bytes for each token and entry of the batch, and messages, forward and backward."""
    made = algorithm(name, size, **options)
    for rank in {0, size // 2, size - 1}:
        traffic = traffic_of(made, shape, mask or Mask(), rank)
        assert traffic.forward_bytes == 3 * S * expected[0]
        assert traffic.forward_messages == expected[1]
        assert traffic.backward_bytes == 3 * S * expected[2]
        assert traffic.backward_messages == expected[3]


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("size", SIZES)
def test_ring(size: int, kv_heads: int, wide: bool) -> None:
    """P-1 hops of K, V; backward of K, V, dK, dV or of Q, dO, dQ, delta, lse.

    Sums that are passed on are float32 if so wanted; of two ranks none is.
    """
    hops, kv, g = size - 1, kv_heads * (D + E), 4 if wide and size > 2 else 2
    options = {"gradients": "float32" if wide else "model"}
    # With four query heads a KV head the last block of the forward is still there.
    inputs = hops - 1 if kv_heads == 2 and size > 1 else hops
    by_rule = {
        "kv": (kv * (2 * inputs + g * hops), 2 * inputs + 2 * hops),
        "query": (hops * (8 * (D + E) * 2 + 8 * D * g + 2 * 8 * 4), 5 * hops),
    }
    for rule, backward in by_rule.items():
        expected = (hops * kv * 2, 2 * hops, *backward)
        shape = shape_of(size, 8, kv_heads)
        assert_sent("zigzag", size, shape, expected, backward=rule, **options)
        assert_sent("ring", size, shape, expected, Mask(False), backward=rule, **options)


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("variant", ["zigzag", "no", "overlap"])
@pytest.mark.parametrize("size", SIZES)
def test_grid(size: int, variant: str, kv_heads: int) -> None:
    """Forward (C-1) (HDe + HEe + Hw) + (R-1) G(D+E)e; backward one HDe and Hw, and KV, more.

    Off the diagonal the paper's variants send G(D+E)e more in each.
    """
    q, out, kv = 8 * D * 2, 8 * E * 2, kv_heads * (D + E) * 2
    for rows in (r for r in range(1, size + 1) if size % r == 0):
        cols = size // rows
        made = algorithm("attention2d", size, rows=rows, variant=variant, chunks=1)
        for rank in range(0, size, max(1, size // 5)):
            moved = rank != rank % rows * cols + rank // rows
            transposed = kv if variant != "zigzag" and 1 < rows < size and moved else 0
            traffic = traffic_of(made, shape_of(size, 8, kv_heads), Mask(), rank)
            row, column = cols - 1, rows - 1
            assert traffic.forward_bytes == 3 * S * (
                row * (q + out + 8 * 4) + column * kv + transposed
            )
            assert traffic.backward_bytes == 3 * S * (
                row * (2 * q + out + 2 * 8 * 4) + column * 2 * kv + transposed
            )
            if variant == "overlap":
                assert traffic.forward_messages == 3 * row + 2 * column + 2 * (transposed > 0)
                assert traffic.backward_messages == 5 * row + 4 * column + 2 * (transposed > 0)
            else:
                assert traffic.forward_messages == 3 * row + column + 2 * (transposed > 0)
                assert traffic.backward_messages == 3 * row + 2 * column + 2 * (transposed > 0)


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("size", SIZES)
def test_allgather(size: int, kv_heads: int) -> None:
    """P-1 times K and V; back also dK and dV; by groups of heads in as many messages more."""
    others, kv = size - 1, kv_heads * (D + E) * 2
    shape = shape_of(size, 8, kv_heads)
    for chunks in (1, 2):
        expected = (others * kv, chunks * others, others * 2 * kv, 2 * chunks * others)
        assert_sent("allgather", size, shape, expected, chunks=chunks)


def exchanged(size: int, heads: int, kv_heads: int, keep: str) -> tuple[float, float]:
    """(P-1)/P times HDe + HEe + V(D+E)e + Hw; keep=local one HDe + V(D+E)e + Hw more."""
    sent = lcm(kv_heads, size)
    q, out, kv, row = heads * D * 2, heads * E * 2, sent * (D + E) * 2, heads * 4
    part = (size - 1) / size
    again = q + kv + row if keep == "local" else 0
    return part * (q + out + kv + row), part * (q + out + kv + row + again)


@pytest.mark.parametrize("keep", ["exchanged", "local"])
@pytest.mark.parametrize("kv_heads", [64, 4, 1])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 64])
def test_ulysses(size: int, kv_heads: int, keep: str) -> None:
    forward, backward = exchanged(size, 64, kv_heads, keep)
    # q, k, v there, out and lse back; dout and delta there, dq, dk and dv back.
    messages = 5 * (size - 1), (5 if keep == "exchanged" else 9) * (size - 1)
    expected = (forward, messages[0], backward, messages[1])
    assert_sent("ulysses", size, shape_of(size, 64, kv_heads), expected, keep=keep, chunks=1)


@pytest.mark.parametrize("kv_heads", [32, 4])
@pytest.mark.parametrize("size", [4, 8, 64])
def test_usp(size: int, kv_heads: int) -> None:
    """What ulysses sends in a team, and a ring of the teams for one rank's heads."""
    for team in (0, 2, size):
        if team > 32:
            continue
        ranks = team or gcd(size, kv_heads)
        forward, backward = exchanged(ranks, 32, kv_heads, "exchanged")
        hops = size // ranks - 1
        kv = lcm(kv_heads, ranks) // ranks * (D + E) * ranks  # of all tokens of a team
        g = 4 if hops > 1 else 2
        hop = {"forward": hops * kv * 2, "backward": hops * kv * (2 + g)}
        expected = (
            forward + hop["forward"],
            5 * (ranks - 1) + 2 * hops,
            backward + hop["backward"],
            5 * (ranks - 1) + 4 * hops,
        )
        options = {"ulysses": team, "backward": "kv", "chunks": 1}
        assert_sent("usp", size, shape_of(size, 32, kv_heads), expected, **options)
