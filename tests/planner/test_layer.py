"""A layer and its ranks: fewer of them, what depends on their number, and what is refused."""

from dataclasses import replace

import pytest

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.layer import Layer, planned
from tests.span_masks import mask_of

SHAPE = Shape(1, 32 * 4096, 32, 8, 128)
# Those whose ranks meet in collective operations only.
AT_ONCE = {"allgather", "attention2d", "ulysses"}


def layer_of(algo: str, **changes: object) -> Layer:
    return replace(Layer(algo, (), SHAPE, Mask(), (0,) * 32, peer_access=False), **changes)


@pytest.mark.parametrize("algo", cp.available("softmax"))
def test_fewer_ranks_do_what_many_do(algo: str) -> None:
    """By as many groups of heads, in teams and grids of as many ranks, with as many tokens each."""
    layer = layer_of(algo)
    pinned, at_once = layer.pinned()
    assert at_once == (algo in AT_ONCE)
    many, as_many = (one.on(0).placement(SHAPE, Mask(), "backward") for one in (layer, pinned))
    assert many == as_many
    if not at_once:  # else one rank stands for all
        shape = replace(SHAPE, seq_len=SHAPE.seq_len // 2)
        few = pinned.of_fewer(16).on(0).placement(shape, Mask(), "backward")
        of_both = [getattr(one, "of_teams", one).groups for one in (many, few)]
        assert of_both[0] == of_both[1]
        assert getattr(many, "members", 1) == getattr(few, "members", 1)
    assert (pinned.number("chunks"), layer.number("chunks")) == (dict(pinned.options)["chunks"], 1)
    assert pinned.pinned() == (pinned, at_once)


def test_documents_and_spans_of_fewer_ranks() -> None:
    """The documents that begin there; what spans name there is not what they name elsewhere."""
    starts = (100, 2 * 4096 - 1, 2 * 4096, 9000)
    few = layer_of("zigzag", mask=Mask(documents=starts)).of_fewer(2)
    assert few.mask.documents == starts[:2]
    assert (few.size, few.shape.seq_len) == (2, 2 * 4096)
    spans = mask_of([(0, 8, 0, 8, "causal")], SHAPE.seq_len)
    with pytest.raises(ConfigError, match="spans are simulated on up to 64 ranks"):
        layer_of("zigzag", mask=spans).of_fewer(2)


def test_what_a_layer_cannot_have() -> None:
    with pytest.raises(ConfigError, match="usp needs ulysses to divide context_parallel_size = 32"):
        layer_of("usp", options=(("ulysses", 5),)).on(0)
    with pytest.raises(ConfigError, match="nonesuch"):
        planned("nonesuch", 4, SHAPE, Mask(), {})
    linear = LinearShape(1, SHAPE.seq_len, 32, 128, 128)
    found, at_once = layer_of("lasp2", shape=linear).pinned()
    assert (found.options, at_once) == ((), True)
    assert layer_of("lasp", shape=linear).pinned()[1] is False
    assert planned("zigzag", 3, SHAPE, Mask(), {}).topology.size == 3
