"""Estimates of candidates: near simulations, and the same however blocks are looked at."""

import pytest

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.candidates import candidates
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.planner.estimate import Estimator
from megatron_cp_plugin.planner.simulate import simulate
from megatron_cp_plugin.spans import block_diffusion
from tests.planner.test_choose import H200, site


@pytest.mark.parametrize(("size", "per_node"), [(4, 8), (4, 2)])
def test_estimates_are_near_simulations(size: int, per_node: int) -> None:
    """So near that the one that is the fastest by a simulation is not left out."""
    shape, where = Shape(1, size * 8192, 32, 8, 128), site(size, per_node=per_node)
    found, _ = candidates(shape, Mask(), DryRunGroup(0, where.nodes, peer_access=where.peer))
    estimator = Estimator(shape, Mask(), H200, where.nodes, where.kernel)
    for one in found:
        estimated = sum(passed.seconds for passed in estimator.passes(one.placements))
        made = simulate(one.algo, dict(one.options), shape, Mask(), H200, where.nodes)
        assert estimated == pytest.approx(made.seconds, rel=0.35), one


def test_the_busiest_rank_of_a_span_mask_is_looked_at() -> None:
    """In the middle of block diffusion; the first and the last rank have half as much to do."""
    tokens = 2**16
    mask = Mask.of(Slices.of(block_diffusion(tokens // 2, 4096), tokens))
    shape, where = Shape(1, tokens, 8, 8, 128), site(16)
    found, _ = candidates(shape, mask, DryRunGroup(0, where.nodes, peer_access=where.peer))
    ring = next(one for one in found if one.algo == "ring" and not one.options)
    estimator = Estimator(shape, mask, H200, where.nodes, where.kernel)
    estimated = sum(passed.seconds for passed in estimator.passes(ring.placements))
    made = simulate("ring", {}, shape, mask, H200, where.nodes)
    assert estimated == pytest.approx(made.seconds, rel=0.35)
