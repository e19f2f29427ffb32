"""One rank's part of a plan: how long it holds blocks, and which rows and heads its tasks take."""

from random import Random

import pytest

from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.execution import program as module
from megatron_cp_plugin.core.execution.program import program
from megatron_cp_plugin.core.head_groups import HeadGroup, head_groups
from megatron_cp_plugin.core.layout import Contiguous
from megatron_cp_plugin.core.plans.compile import plan_of
from megatron_cp_plugin.core.tiles import Mask
from tests.any_placement import AnyPlacement, AnyRelay


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("seed", range(8))
def test_a_block_goes_after_its_last_use(seed: int, phase: Phase) -> None:
    """In each group of heads: not before, for it comes once a group, and not later."""
    source = Random(seed)
    size, tokens = source.randint(2, 7), source.randint(20, 40)
    settings = Contiguous(), size, head_groups(4, 4, 2), False, False
    placement = AnyPlacement(*settings, seed=seed, steps=5, parts=2)
    if seed % 2:
        placement = AnyRelay(*settings, seed=seed)
    plan = plan_of(placement, tokens, source.choice([Mask(), Mask(window=5)]), phase)
    each = plan.steps // 2
    for rank in range(size):
        (part,) = program(plan, rank).rounds
        last, dropped = {}, {}
        for step in part.steps:
            used = {block for task in step.tasks for block in (task.query, task.key)}
            used |= {message.block for one in step.inputs for message in one.sends}
            last |= {
                (step.number // each, block): step.number for block in used if block[0] != rank
            }
            dropped |= {(step.number // each, block): step.number for block in step.dropped}
        assert dropped == last


def test_where_the_rows_of_a_task_begin() -> None:
    """In the whole block, or in what a rank holds of it."""
    assert module._first(((5, 7),), None) == 5
    assert module._first(((5, 7),), ((1, 3), (4, 9))) == 3


def test_heads_of_a_step_are_counted_from_those_of_its_round() -> None:
    plan = plan_of(
        AnyPlacement(Contiguous(), 2, head_groups(8, 4, 4), False, False, seed=1),
        8,
        Mask(),
        "forward",
    )
    step = program(plan, 0).rounds[0].steps[-1]
    assert (step.heads.q, step.heads.kv) == (slice(6, 8), slice(3, 4))
    within = module._within(step, HeadGroup(slice(4, 8), slice(2, 4), True, True), 2).within
    assert within is not None
    assert (within.q, within.kv) == (slice(2, 4), slice(1, 2))
    assert module._within(step, step.heads, 1).within is None
