"""Heads inside teams, a grid of teams: what travels."""

import pytest

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.registry import create
from tests.plan_check import sent_by

HEADS, KV_HEADS, DIM = 12, 6, 8


@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_bytes_between_teams_are_those_of_the_grid(rows: int) -> None:
    """Of H/U and G/U heads of a team's tokens, where the mask hides nothing."""
    teams, members, tokens = 6, 2, 10
    options = {"ulysses": members, "route": "grid", "rows": rows}
    made = create("usp", VirtualWorld(12, ranks_per_node=members).topology(0), options)
    shape = Shape(1, 12 * tokens, HEADS, KV_HEADS, DIM)
    nodes = made.topology.nodes
    of_token = members * tokens // members  # of the team's tokens, the rank's share of the heads
    q, kv, row = HEADS * DIM * 2, 2 * KV_HEADS * DIM * 2, HEADS * 4
    away, keys = teams // rows - 1, rows - 1
    for phase, of_query, of_keys in (
        ("forward", 2 * q + row, kv),
        ("backward", 3 * q + 2 * row, 2 * kv),
    ):
        plan = made.plan(shape, Mask(causal=False), phase)
        for rank in range(12):
            sent = sent_by(plan, rank, shape, nodes)[0]
            assert sent == of_token * (away * of_query + keys * of_keys)


@pytest.mark.parametrize(("kv_heads", "share"), [(32, 0.67), (8, 0.84)])
def test_nodes_in_a_grid_send_less_to_each_other(kv_heads: int, share: float) -> None:
    """Of 4 nodes of 8 ranks the busiest network card; of two rows and columns, or of one column."""
    shape, topology = (
        Shape(1, 2048, 32, kv_heads, 128),
        VirtualWorld(32, ranks_per_node=8).topology(0),
    )

    def busiest(algo: str, **options: object) -> int:
        made = create(algo, topology, options)
        plans = [made.plan(shape, Mask(), phase) for phase in PHASES]
        sent = (sum(sent_by(p, n, shape, topology.nodes)[0] for p in plans) for n in range(32))
        return max(sent)

    model = {"gradients": "model"}
    others = (
        busiest("zigzag", route="double", **model),
        busiest("attention2d"),
        busiest("usp", ulysses=8, **model),
    )
    assert busiest("usp", ulysses=8, route="grid") < share * min(others)
