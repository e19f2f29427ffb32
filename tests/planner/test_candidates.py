"""Candidates: each serves what was asked for, and no two are the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.placement import HeadPlacement
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.candidates import candidates
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from tests.random_tests import examples

shapes = st.builds(
    lambda heads, ratio, per_rank: (heads * ratio, heads, per_rank),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 6]),
    st.sampled_from([1, 7, 64]),
)


@examples(15)
@given(st.data(), st.integers(1, 12), shapes, st.integers(1, 6))
def test_candidates_serve_and_differ(
    data: st.DataObject, size: int, shape: tuple[int, int, int], per_node: int
) -> None:
    heads, kv_heads, per_rank = shape
    tokens = size * per_rank
    masks = [Mask(), Mask(causal=False), Mask(window=max(1, tokens // 4))]
    if tokens > 4:
        masks.append(Mask(documents=(tokens // 3, tokens // 2)))
    mask, nodes = data.draw(st.sampled_from(masks)), tuple(r // per_node for r in range(size))
    question = (
        Shape(1, tokens, heads, kv_heads, 16),
        mask,
        DryRunGroup(0, nodes, peer_access=True),
    )
    found, refused = candidates(*question)
    assert found
    assert len({one.placements for one in found}) == len(found)
    assert candidates(*question) == (found, refused)
    for one in found:
        cls = registry.algorithm_class(one.algo)
        options = registry.read_options(one.algo, dict(one.options))
        assert issubclass(cls, Algorithm)
        cls.check(options, size=size, heads=heads, kv_heads=kv_heads, causal=mask.causal)
        assert cls.windows or not mask.special
        assert registry.layout_of(one.algo, dict(one.options)).name == one.layout.name
    for refusal in refused:
        assert refusal.name.split()[0] in registry.available("softmax")


@pytest.mark.parametrize("size", [1, 2, 4, 6, 9])
def test_a_rank_finds_all_its_pairs(size: int) -> None:
    """`pairs_of` leaves none out of those that `place` gives a rank."""
    nodes = tuple(rank // 3 for rank in range(size))
    question = (Shape(1, 64 * size, 12, 12, 16), Mask(), DryRunGroup(0, nodes, peer_access=True))
    for one in candidates(*question)[0]:
        for placement in one.placements:
            if isinstance(placement, HeadPlacement):
                placement = placement.of_teams
            every = range(placement.size)
            for rank in every:
                pairs = {
                    (q, k)
                    for q in every
                    for k in every
                    if any(place.rank == rank for place in placement.place(q, k))
                }
                assert pairs <= set(placement.pairs_of(rank)), one
