"""Plans of random placements and of all algorithms with random options: right, and as JSON."""

from collections.abc import Collection, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.call import Shape, head_groups
from megatron_cp_plugin.core.document_layout import NAMED
from megatron_cp_plugin.core.placement import BlockPlacement
from megatron_cp_plugin.core.plans.checks import check_placement, check_steps, fits_slots
from megatron_cp_plugin.core.plans.compile import plan_of
from megatron_cp_plugin.core.plans.plan import MERGED_SLOTS, PHASES, Move, Plan, during, outside
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.registry import create
from tests.any_placement import AnyPlacement, AnyRelay, registered
from tests.peer_world import virtual_world
from tests.plan_check import check
from tests.random_tests import examples
from tests.test_conformance import Case
from tests.test_random_attention import (
    CHOICES,
    HEADS,
    World,
    choices,
    divisors,
    lengths,
    mask_of,
    masks,
    worlds,
)


@pytest.fixture(scope="module", autouse=True)
def foreign() -> Iterator[None]:
    with registered():
        yield


@examples(60)
@given(st.data())
def test_plans_of_algorithms(data: st.DataObject) -> None:
    world: World = data.draw(worlds(16))
    given_choice = data.draw(st.none() | st.sampled_from(CHOICES))
    choice: Case = data.draw(choices(world, given_choice))
    seq_len, multiple = data.draw(lengths(choice, world.size))
    mask = mask_of(data.draw(masks(seq_len, multiple)), seq_len)
    shape = Shape(1, seq_len, *data.draw(st.sampled_from(HEADS)), 8)
    virtual = virtual_world(
        world.size, ranks_per_node=world.ranks_per_node, peer_access=world.peer_access
    )
    rectangular = data.draw(st.booleans())
    topology = virtual.topology(data.draw(st.integers(0, world.size - 1)))
    try:
        made = create(choice.algo, topology, dict(choice.options)).for_documents(mask.resolved)
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
        made.check(made.options, size=world.size, causal=mask.causal, **heads)
        plans = [made.plan(shape, mask, phase) for phase in PHASES]
    except ContextParallelError:
        return
    for plan in plans:
        check(plan, rectangular=rectangular)
        placement = made.placement(shape, mask, plan.phase)
        if isinstance(placement, BlockPlacement) and not placement.assembled:
            # As of placements of others at their first use.
            check_placement(made.name, placement, seq_len, mask)
            check_steps(made.name, plan)
        # What is exchanged before and after all steps, but between ranks that split the heads.
        outer = outside(plan) if plan.shares == 1 else ()
        for rank in range(world.size):
            part = made.plan(shape, mask, plan.phase, rank=rank)
            assert_is_of(part, plan, [rank], outer)


def assert_is_of(
    part: Plan, whole: Plan, ranks: Collection[int], outer: Collection[Move] = ()
) -> None:
    """The steps of all, with what concerns some ranks; they know when others exchange anything."""
    assert part.computes == tuple(c for c in whole.computes if c.rank in ranks)
    mine = [m for m in whole.moves if {m.source, m.target} & {*ranks} or m in outer]
    assert sorted(map(str, part.moves)) == sorted(map(str, mine))
    of_ranks = [[kept for kept in plan.kept if kept.rank in ranks] for plan in (part, whole)]
    assert of_ranks[0] == of_ranks[1]
    within = {(m.result, m.posted, m.needed) for m in during(whole)}
    assert {(t.result, t.posted, t.needed) for t in part.times} == within
    assert (part.steps, part.spans, part.once) == (whole.steps, whole.spans, whole.once)


@st.composite
def placements(draw: st.DrawFn, size: int, relays: bool = True) -> BlockPlacement:
    layout = NAMED[draw(st.sampled_from(sorted(set(NAMED) - {"thd"})))]
    groups = head_groups(4, 4, draw(st.sampled_from([1, 2, 4])))
    of_all = layout, size, groups, draw(st.booleans())
    seed = draw(st.integers(0, 10**6))
    if relays and draw(st.booleans()):
        return AnyRelay(*of_all, seed=seed, travelling=draw(st.sampled_from(["keys", "queries"])))
    return AnyPlacement(
        *of_all,
        seed=seed,
        steps=draw(st.integers(1, 9)),
        parts=draw(st.sampled_from([1, 1, 2, 3])),
        hosts=draw(st.sampled_from(["any", "owners"])),
    )


@examples(15)
@given(st.data())
def test_plans_of_any_placement(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9))
    placement = data.draw(placements(size))
    seq_len = data.draw(st.integers(1, 5 * min(size, 16)))
    mask = mask_of(data.draw(masks(seq_len)), seq_len)
    rank, near = data.draw(st.integers(0, size - 1)), data.draw(st.sampled_from(divisors(size)))
    for phase in PHASES:
        plan = plan_of(placement, seq_len, mask, phase)
        check(plan)
        assert fits_slots(plan, MERGED_SLOTS) or not plan.once
        part = plan_of(placement, seq_len, mask, phase, rank=rank, near=near)
        assert_is_of(part, plan, range(rank // near * near, rank // near * near + near))
