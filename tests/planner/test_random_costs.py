"""What is said of any layer before it runs: memory and pictures."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.kernels.choice import kernel_called, kernel_names
from megatron_cp_plugin.planner.call_memory import peak_of
from megatron_cp_plugin.planner.drawing import picture, text
from megatron_cp_plugin.planner.layer import Layer
from tests.any_placement import registered
from tests.random_tests import examples
from tests.test_random_attention import HEADS, choices, lengths, mask_of, masks, worlds


@pytest.fixture(scope="module", autouse=True)
def foreign() -> Iterator[None]:
    with registered():
        yield


@examples(8)
@given(st.data())
def test_any_layer(data: st.DataObject) -> None:
    world = replace(data.draw(worlds()), peer_access=False)
    choice = data.draw(choices(world))
    seq_len, multiple = data.draw(lengths(choice, world.size))
    mask = mask_of(data.draw(masks(seq_len, multiple)), seq_len)
    shape = Shape(1, seq_len, *data.draw(st.sampled_from(HEADS)), 8)
    options, rank = dict(choice.options), data.draw(st.integers(0, world.size - 1))
    kernel = data.draw(st.sampled_from(kernel_names()))
    phase = data.draw(st.sampled_from(PHASES))

    try:
        layer = Layer(choice.algo, choice.options, shape, mask, (0,) * world.size, True)
        memory = peak_of(layer.on(rank), shape, mask, kernel_called(kernel))
        drawn = picture(
            choice.algo, world.size, seq_len=seq_len, mask=mask, options=options, phase=phase
        )
    except ContextParallelError as error:
        event(f"refused: {str(error)[:70]}")
        return
    assert 0 <= drawn.idle_share < 1
    pairs = mask.bands.area(seq_len)
    assert 0 <= memory.saved <= min(memory.forward, memory.backward)
    cells = [cell.pairs for step in drawn.steps for cell in step if cell]
    assert sum(cells) == pytest.approx(pairs)
    shown = text(drawn).split()  # the last column is folded
    words = (cell.text.split() for step in drawn.steps for cell in step if cell)
    assert all(set(shown).issuperset(each) for each in words)
