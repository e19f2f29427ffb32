"""One rank's part of a plan: how long it holds blocks, what its tasks take."""

from itertools import product
from random import Random

import pytest

from megatron_cp_plugin.core.call import HeadGroup, Shape, head_groups
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.execution import program as module
from megatron_cp_plugin.core.execution import team
from megatron_cp_plugin.core.execution.program import program
from megatron_cp_plugin.core.layout import Contiguous
from megatron_cp_plugin.core.placement import HeadPlacement
from megatron_cp_plugin.core.plans.compile import plan_of
from megatron_cp_plugin.core.plans.plan import PHASES, Plan
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import LogNormal, random_documents
from megatron_cp_plugin.registry import create
from tests.any_placement import AnyPlacement, AnyRelay


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("seed", range(8))
def test_a_block_goes_after_its_last_use(seed: int, phase: Phase) -> None:
    """In each group of heads: not before, for it comes once a group, and not later."""
    source = Random(seed)
    size, tokens = source.randint(2, 7), source.randint(20, 40)
    settings = Contiguous(), size, head_groups(4, 4, 2), False
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
        AnyPlacement(Contiguous(), 2, head_groups(8, 4, 4), False, seed=1),
        8,
        Mask(),
        "forward",
    )
    step = program(plan, 0).rounds[0].steps[-1]
    assert (step.heads.q, step.heads.kv) == (slice(6, 8), slice(3, 4))
    local = team._with_local_heads(
        step, HeadGroup(slice(4, 8), slice(2, 4), True, True), 2
    ).local_heads
    assert local is not None
    assert (local.q, local.kv) == (slice(2, 4), slice(1, 2))
    assert team._with_local_heads(step, step.heads, 1).local_heads is None


def plan_for(
    name: str,
    options: dict[str, object],
    size: int,
    mask: Mask,
    phase: str,
    tokens: int,
    kv_heads: int = 4,
) -> Plan:
    topology = VirtualWorld(size, ranks_per_node=size // 2 if size % 2 == 0 else 1).topology(0)
    made = create(name, topology, options).for_documents(mask.resolved)
    placement = made.placement(Shape(1, tokens, 4, kv_heads, 8), mask, phase)
    if isinstance(placement, HeadPlacement):
        placement = placement.of_teams
    return plan_of(placement, tokens, mask, phase)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "mask",
    [Mask(window=4096), Mask(documents=random_documents(2**20, LogNormal(2**11, 1), seed=0))],
    ids=["window", "documents"],
)
def test_few_steps_of_sixty_four(mask: Mask, phase: str) -> None:
    """Own pairs, pairs with blocks of others, results: a ring that passes blocks on has 64."""
    plan = plan_for("zigzag", {"route": "straight"}, 64, mask, phase, 2**20)
    for rank in (0, 31, 63):
        whole = program(plan, rank)
        assert len(whole.rounds[0].steps) == 3
        assert [one.number for one in whole.rounds[0].steps if one.inputs] == [0]
        assert len(whole.rounds[0].steps[1].tasks) == 1


LONG = Mask(documents=(2000, 5000, 9000, 26000, 52000))


def test_inputs_of_merged_steps_leave_at_the_start() -> None:
    """Those of as many steps as there are buffers; results once, after the last one but one."""
    plan = plan_for("zigzag", {"layout": "documents"}, 8, LONG, "backward", 2**16)
    assert plan.merged
    assert plan.steps > 4
    for rank in range(8):
        steps = program(plan, rank).rounds[0].steps
        posted = {one.needed: step.number for step in steps for one in step.inputs}
        assert posted == {n: 0 if n <= 2 else n - 1 for n in range(1, plan.steps - 1)}
        (results,) = (one for step in steps for one in step.results)
        assert (results.needed, steps[-2].results) == (plan.steps - 1, (results,))
        assert [step.number for step in steps if step.expects] == [0]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mask", [LONG, Mask(window=20000)], ids=["documents", "window"])
def test_the_order_in_which_copy_engines_write(mask: Mask, phase: Phase) -> None:
    """The last rank of a document waits least for its keys; no two ranks begin with one."""
    options = {"layout": "documents"} if mask.documents else {"route": "straight"}
    plan = plan_for("zigzag", options, 8, mask, phase, 2**16)
    several = 0
    for rank in range(8):
        for step in program(plan, rank).rounds[0].steps:
            for one in (*step.inputs, *step.results):
                targets = [message.move.target for message in one.sends]
                down = one in step.inputs and bool(mask.documents)
                turn = [((rank - to) if down else (to - rank)) % 8 for to in targets]
                assert turn == sorted(turn)
                several += len(set(targets)) > 1
    assert several > 4


LATE = ((8, (4, 10, 18, 51, 102), {4, 6, 7}), (5, (12, 24, 44), {4}), (4, (12, 24, 40), {3}))


@pytest.mark.parametrize(("size", "starts", "late"), LATE)
def test_where_keys_move_early_a_rank_computes_its_own_pairs_last(
    size: int, starts: tuple[int, ...], late: set[int]
) -> None:
    """By copy engines; and where the busiest rank moves three blocks or more."""
    options = {"layout": "documents", "route": "straight", "backward": "kv", "keep": "local"}
    for tokens in (16 * size, 1600 * size):
        mask = Mask(documents=tuple(start * tokens // (16 * size) for start in starts))
        for phase, near in product(PHASES, (0, 1)):
            plan = plan_for("zigzag", options, size, mask, phase, tokens)
            found = set[int]()
            for rank in range(size):
                steps = program(plan, rank, near=near).rounds[0].steps
                of_own = {n for n, step in enumerate(steps) for x in step.tasks if x.key[0] == rank}
                assert of_own in ({0}, {len(steps) - 1})
                found |= {rank} if 0 not in of_own else set()
            assert found == (late if near and phase == "backward" else set())


@pytest.mark.usefixtures("keys_stay")
@pytest.mark.parametrize(("rows", "late"), [(16, set()), (8000, {1, 2})])
def test_where_keys_stayed_own_pairs_come_last_if_the_others_take_long(
    rows: int, late: set[int]
) -> None:
    options = {"layout": "documents", "route": "straight", "backward": "kv"}
    mask = Mask(documents=tuple(start * rows // 16 for start in (12, 24, 40)))
    for phase, near in product(PHASES, (0, 1)):
        plan = plan_for("zigzag", options, 4, mask, phase, 4 * rows)
        assert plan.kept
        for rank in range(4):
            steps = program(plan, rank, near=near).rounds[0].steps
            of_own = {n for n, step in enumerate(steps) for x in step.tasks if x.key[0] == rank}
            assert of_own == ({2} if phase == "backward" and rank in late else {0})


@pytest.mark.usefixtures("keys_stay")
@pytest.mark.parametrize("keep", ["exchanged", "local"])
def test_keys_of_other_teams_stay_for_all_groups_of_heads(keep: str) -> None:
    """The groups share a KV head. Own pairs of the last one come last, while gradients go home."""
    options = {"layout": "documents", "ulysses": 2, "route": "straight", "chunks": 2, "keep": keep}
    mask = Mask(documents=(70, 110, 190))
    plan = plan_for("usp", options, 8, mask, "backward", 256, kv_heads=2)
    assert len(plan.groups) == 2
    assert bool(plan.kept) == (keep == "exchanged")
    assert {move.result for move in plan.moves} == ({True} if plan.kept else {True, False})
    for rank in range(4):
        steps = program(plan, rank).rounds[0].steps
        of_own = [n for n, step in enumerate(steps) for x in step.tasks if x.key[0] == rank]
        assert of_own == [0, 5]


@pytest.mark.parametrize("size", [4, 8])
def test_where_few_keys_move_own_pairs_come_first(size: int) -> None:
    options = {"layout": "documents", "route": "straight", "backward": "kv"}
    for starts in (range(5, 16 * size, 5), (35, 59, 71, 85, 117) if size > 4 else (7, 38, 58, 61)):
        mask = Mask(documents=tuple(starts))
        plan = plan_for("zigzag", options, size, mask, "backward", 16 * size)
        assert plan.merged
        for rank in range(size):
            steps = program(plan, rank, near=1).rounds[0].steps
            assert all(x.key[0] != rank for x in steps[-1].tasks)


def test_on_several_nodes_only_where_no_keys_of_the_rank_cross() -> None:
    options = {"layout": "documents", "route": "straight", "backward": "kv"}
    mask = Mask(documents=(31, 98, 116, 121, 127, 167, 195))
    plan = plan_for("zigzag", options, 16, mask, "backward", 256)
    last = [program(plan, rank, near=8).rounds[0].steps[-1] for rank in range(16)]
    late = {rank for rank in range(16) if any(x.key[0] == rank for x in last[rank].tasks)}
    crossing = {one for x in plan.moves if x.source // 8 != x.target // 8 for one in x[2:4]}
    assert (late, crossing) == ({4, 15}, {5, 6, 7, 11, 13, 14})  # else 5, 7 and 14 too


@pytest.mark.parametrize("near", [0, 1])
def test_own_pairs_come_last_for_heads_whose_keys_came_before(near: int) -> None:
    """They cover the way home of the gradients of these keys, for all heads that share them."""
    options = {"ulysses": 2, "chunks": 2, "layout": "documents", "route": "straight"}
    mask = Mask(documents=(4, 10, 18, 51, 102))
    for phase, late in (("forward", False), ("backward", True)):
        plan = plan_for("usp", options, 16, mask, phase, 128, kv_heads=2)
        assert [(group.first, group.last) for group in plan.groups] == [
            (True, False),
            (False, True),
        ]
        each = plan.steps // 2
        for rank in range(8):
            steps = program(plan, rank, near=near).rounds[0].steps
            of_own = [n for n, step in enumerate(steps) for x in step.tasks if x.key[0] == rank]
            several = any(x.key[0] != rank for step in steps for x in step.tasks)
            assert of_own == [0, 2 * each - 1 if late else each]
            assert several or rank == 0
