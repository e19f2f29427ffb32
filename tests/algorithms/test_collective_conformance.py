"""attention2d, allgather, ulysses, usp: what they compute, move and keep, over all grids and teams.

One run serves all questions: out and gradients against unsplit attention in float64, bytes and
messages against the plan, the plan against the mask.
"""

import pytest
import torch

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import VirtualTopology, VirtualWorld
from megatron_cp_plugin.core.layout import shard
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.registry import algorithm_class, create, layout_of, read_options
from tests.oracle import expected_attention
from tests.peer_world import run_virtual
from tests.plan_check import traffic_of
from tests.test_conformance import Case, assert_conforms, run

VARIANTS = ("zigzag", "no", "overlap")


@pytest.mark.parametrize("kind", [*VARIANTS, "blocks"])
def test_rounding_of_what_travels_costs_little(kind: str) -> None:
    """bf16 on the wire is at most 1.5 times as far off as a ring, whose sums travel in float32."""
    expected = expected_attention(seq_len=48, head_dim=16, causal=True, dtype=torch.bfloat16)

    blocks = kind == "blocks"
    grid = Case("attention2d", (("variant", "zigzag" if blocks else kind), ("rows", 3)))

    def errors(case: Case) -> list[float]:
        results, _ = run(case, expected, 6, causal=True, kernel="reference", peer_access=blocks)
        layout = layout_of(case.algo, dict(case.options))
        square = []
        for index, name in enumerate(("out", "dq", "dk", "dv")):
            whole = getattr(expected, name)
            parts = [
                (result[index].double() - shard(whole, 1, layout, rank, 6)).square().sum()
                for rank, result in enumerate(results)
            ]
            square.append((torch.stack(parts).sum() / whole.square().sum()).sqrt().item())
        return square

    for narrow, wide in zip(errors(grid), errors(Case("zigzag")), strict=True):
        assert narrow <= 1.5 * wide


@pytest.mark.parametrize(
    ("size", "route", "options", "peer_access"),
    [
        (4, "straight", {"backward": "kv"}, True),
        (6, "straight", {"backward": "kv", "keep": "local"}, False),
        (6, "straight", {"backward": "query"}, True),
        (8, "grid", {"rows": 2}, True),
        (6, "ring", {}, False),
    ],
)
def test_keys_cross_between_teams_once_for_all_groups_of_heads(
    size: int, route: str, options: dict[str, object], peer_access: bool
) -> None:
    """Except in a relay, in which ranks would hold the blocks of all."""
    given = {"ulysses": 2, "layout": "documents", "route": route, **options}
    sizes = {"seq_len": 8 * size, "heads": 8, "kv_heads": 2}
    cuts = [3, 2 * size, 7 * size + 1]
    shape, mask = Shape(2, *sizes.values(), 8), Mask(documents=tuple(cuts))
    both = []
    for chunks in (1, 4):
        case = Case("usp", (*given.items(), ("chunks", chunks)))
        edges = [0, *cuts, 8 * size]
        log = assert_conforms(case, size, **sizes, peer_access=peer_access, cu_seqlens=edges)[1]
        both.append(log.bytes())
    assert both[0] == both[1] > 0
    made = create("usp", VirtualWorld(size).topology(0), dict(case.options))
    groups = made.placement(shape, mask, "forward").exchanges
    assert len(groups) == (1 if route == "ring" else 4)
    found = [move for move in made.plan(shape, mask, "backward").moves if "dk" in move.messages[0]]
    come, leave = (
        {move[time] for move in found if (move.source // 2 == move.target // 2) == inside}
        for inside, time in ((False, 1), (True, 0))
    )
    assert leave == {max(come, default=min(leave))}


def test_rows_inside_nodes_and_any_numbering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a node need not be consecutive."""
    monkeypatch.setattr(VirtualTopology, "nodes", property(lambda self: (0, 1, 1, 0) * 2))
    for rows, settings in ((4, {"seq_len": 45}), (2, {"seq_len": 32, "causal": False})):
        case = Case("attention2d", (("rows", rows), ("chunks", 4)))
        assert_conforms(case, 8, **settings, peer_access=False)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_no_other_shape_moves_fewer_bytes(variant: str, kv_heads: int) -> None:
    size, shape = 12, Shape(1, 24 * 12, 8, kv_heads, 64)

    def worst(topology: Topology) -> dict[int, int]:
        found = {}
        for rows in (0, 1, 2, 3, 4, 6, 12):
            algorithm = create("attention2d", topology, {"variant": variant, "rows": rows})
            each = [traffic_of(algorithm, shape, Mask(), rank) for rank in range(size)]
            found[rows] = max(t.forward_bytes + t.backward_bytes for t in each)
        return found

    totals = run_virtual(size, worst)[0]
    assert totals[0] == min(totals.values())


def refused(algo: str, size: int, heads: int = 8, kv_heads: int = 8, **options: object) -> str:
    """The message with which `check` refuses."""
    with pytest.raises(ConfigError) as caught:
        algorithm_class(algo).check(
            read_options(algo, options), size=size, heads=heads, kv_heads=kv_heads, causal=True
        )
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_refusals_name_what_works() -> None:
    assert "got 4: use one of 1, 2, 3, 6" in refused("attention2d", 6, rows=4)
    assert "needs variant zigzag, got no" in refused(
        "attention2d", 4, variant="no", transport="peer"
    )
    assert "variant zigzag or no" in refused("attention2d", 4, variant="overlap", chunks=4)
    assert "chunks >= 0" in refused("attention2d", 4, chunks=-1)
    assert "use one of 1, 2, 3, 6" in refused("usp", 6, ulysses=4)
    for route in ("auto", "ring"):
        said = refused("usp", 8, ulysses=2, rows=2, route=route)
        assert f"with route grid, got rows 2 with route {route}: leave rows out" in said
    said = refused("usp", 8, ulysses=2, rows=3, route="grid")
    assert "rows to divide its 4 teams, got 3: use one of 1, 2, 4, or 0" in said
    assert "gathered_mib >= 1" in refused("allgather", 4, gathered_mib=0)
    assert "chunks >= 0" in refused("ulysses", 4, chunks=-1)


def test_the_bound_on_gathered_keys_makes_more_groups_or_refuses() -> None:
    def body(topology: Topology) -> int:
        algorithm = create("allgather", topology, {"gathered_mib": 1, "chunks": 1})
        # 16 heads of 1 MiB; of two groups together no more than 1 MiB.
        fits = Shape(1, 2048, 16, 16, 8)
        messages = traffic_of(algorithm, fits, Mask(), 0).forward_messages
        with pytest.raises(
            ContextParallelError, match="even by single heads, got a bound of 1 MiB"
        ):
            traffic_of(algorithm, Shape(1, 2**20, 16, 16, 8), Mask(), 0)
        return messages

    assert run_virtual(2, body) == [2, 2]


def test_the_bound_holds_for_blocks_under_way_too() -> None:
    """Two blocks of others, or one of two ranks, at a time: 16 heads of 1/2 MiB, or 1/4."""

    def groups(topology: Topology) -> int:
        algorithm = create("allgather", topology, {"gathered_mib": 1, "chunks": 1})
        fits = Shape(1, 16384 * topology.size, 16, 16, 8)
        with pytest.raises(ContextParallelError, match="even by single heads, got a bound of 1 M"):
            algorithm.plan(Shape(1, 2**20, 16, 16, 8), Mask())
        return len(algorithm.plan(fits, Mask()).groups)

    assert run_virtual(2, groups, peer_access=True) == [8, 8]
    assert run_virtual(3, groups, peer_access=True) == [16, 16, 16]
