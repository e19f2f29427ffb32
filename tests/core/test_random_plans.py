"""Plans of random placements and of all algorithms with random options: right, and as JSON."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.derive import plan_of
from megatron_cp_plugin.core.document_layout import NAMED
from megatron_cp_plugin.core.pipeline import head_groups
from megatron_cp_plugin.core.placement import BlockPlacement
from megatron_cp_plugin.core.plan import PHASES, Plan, Setting
from megatron_cp_plugin.core.plan_check import check
from megatron_cp_plugin.core.plan_json import from_json, to_json
from megatron_cp_plugin.core.program import outside
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.slices import Slices
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.virtual import VirtualWorld
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.registry import create, layout_of
from tests.any_placement import AnyPlacement, AnyRelay, registered
from tests.random_tests import examples
from tests.test_random_attention import HEADS, Choice, attention_masks, choices


@pytest.fixture(scope="module", autouse=True)
def foreign() -> Iterator[None]:
    with registered():
        yield


def mask_of(given: tuple[tuple[str, Any], ...], seq_len: int) -> Mask:
    mask = dict(given)
    if "spans" in mask:
        return Mask.of(Slices.of(mask["spans"], seq_len))
    bounds = mask.get("cu_seqlens", ())
    starts = tuple(sorted({n for n in bounds if 0 < n < seq_len}))
    return Mask(mask["causal"], mask.get("window"), starts)


def assert_comes_back(plan: Plan, shape: Shape, nodes: tuple[int, ...]) -> None:
    back = from_json(json.loads(json.dumps(to_json(plan, shape, nodes))))
    for name in Plan.__dataclass_fields__:
        assert getattr(back, name) == getattr(plan, name), name


def assert_right(plan: Plan, shape: Shape, nodes: tuple[int, ...]) -> None:
    check(plan)
    assert_comes_back(plan, shape, nodes)


@examples(30)
@given(st.data())
def test_plans_of_algorithms(data: st.DataObject) -> None:
    choice: Choice = data.draw(choices(16))
    layout = layout_of(choice.algo, dict(choice.options))
    multiple = 2 * choice.size if layout.name == "thd" and choice.size > 1 else 1
    seq_len = multiple * data.draw(st.integers(1, 4 if multiple > 1 else 5 * choice.size))
    mask = mask_of(data.draw(attention_masks(seq_len, multiple)), seq_len)
    heads, kv_heads = data.draw(st.sampled_from(HEADS))
    shape = Shape(1, seq_len, heads, kv_heads, 8)
    world = VirtualWorld(
        choice.size, ranks_per_node=choice.ranks_per_node, peer_access=choice.peer_access
    )
    rectangular = data.draw(st.booleans())
    topology = world.topology(data.draw(st.integers(0, choice.size - 1)))
    try:
        made = create(choice.algo, topology, dict(choice.options)).within(mask.followed)
        plans = [made.plan(shape, mask, phase, rectangular=rectangular) for phase in PHASES]
    except ContextParallelError:
        return
    for plan in plans:
        assert_right(plan, shape, topology.nodes)
        part = made.plan(shape, mask, plan.phase, rectangular=rectangular, rank=topology.rank)
        rank = topology.rank
        assert part.computes == tuple(c for c in plan.computes if c.rank == rank)
        outer = outside(plan) if plan.shares == 1 else ()
        mine = [m for m in plan.moves if rank in (m.source, m.target) or m in outer]
        assert sorted(map(str, part.moves)) == sorted(map(str, mine))


@st.composite
def placements(draw: st.DrawFn, size: int, relays: bool = True) -> BlockPlacement:
    layout = NAMED[draw(st.sampled_from(sorted(set(NAMED) - {"thd"})))]
    groups = head_groups(4, 4, draw(st.sampled_from([1, 2, 4])))
    wide = draw(st.booleans()), draw(st.booleans())
    of_all = layout, size, groups, *wide
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


@examples(30)
@given(st.data())
def test_plans_of_any_placement(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9))
    placement = data.draw(placements(size))
    seq_len = data.draw(st.integers(1, 5 * min(size, 16)))
    mask = mask_of(data.draw(attention_masks(seq_len, 1)), seq_len)
    shape = Shape(1, seq_len, 4, 4, 8)
    rank = data.draw(st.integers(0, size - 1))
    for phase in PHASES:
        plan = plan_of(placement, Setting(seq_len, mask, phase))
        assert_right(plan, shape, (0,) * size)
        part = plan_of(placement, Setting(seq_len, mask, phase, rank=rank))
        assert part.computes == tuple(c for c in plan.computes if c.rank == rank)
        mine = [m for m in plan.moves if rank in (m.source, m.target)]
        assert sorted(map(str, part.moves)) == sorted(map(str, mine))
