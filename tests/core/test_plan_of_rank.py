"""The part of a plan that one rank follows is that of the plan of all."""

import pytest

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.derive import plan_of, plan_of_rank
from megatron_cp_plugin.core.plan import PHASES, Setting
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.virtual import VirtualWorld


def placed(algo, size, shape, phase, **options):
    algorithm = registry.create(algo, VirtualWorld(size).topology(0), options)
    return algorithm.placement(shape, Mask(), phase)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("size", "rows"), [(4, 2), (6, 2), (6, 3), (8, 1), (8, 8), (9, 3)])
@pytest.mark.parametrize("variant", ["zigzag", "no"])
def test_a_rank_of_a_grid(phase, size, rows, variant):
    shape = Shape(1, size * size * 8, 4, 2, 8)
    options = {"variant": variant, "rows": rows, "transport": "group"}
    placement = placed("attention2d", size, shape, phase, **options)
    setting = Setting(shape.seq_len, Mask(), phase)
    whole = plan_of(placement, setting)
    for rank in range(size):
        part = plan_of_rank(placement, setting, rank)
        assert set(part.computes) == {c for c in whole.computes if c.rank == rank}
        mine = [move for move in whole.moves if rank in (move.source, move.target)]
        assert sorted(map(str, part.moves)) == sorted(map(str, mine))
        assert part.sent(rank, shape) == whole.sent(rank, shape)


def test_a_relay_is_planned_for_all():
    shape = Shape(1, 64, 4, 2, 8)
    with pytest.raises(ValueError, match="use plan_of"):
        plan_of_rank(placed("zigzag", 4, shape, "forward"), Setting(64, Mask(), "forward"), 0)
