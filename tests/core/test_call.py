"""Groups of heads: as many as hide communication, fewer where a mask leaves little to compute."""

import pytest

from megatron_cp_plugin.core import call
from megatron_cp_plugin.core.call import Shape, flop_of_rank
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.placement import HeadPlacement
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.registry import create
from tests.test_conformance import Case, assert_conforms

TOKENS, SIZE = 48, 2


def test_flop_of_rank() -> None:
    """A window that hides nothing counts as the causal mask, which counts as none."""
    shape = Shape(1, 64, 4, 2, 8)
    whole = flop_of_rank(shape, Mask(), 4)
    assert whole == flop_of_rank(shape, Mask(causal=False), 4) == shape.flop(4)
    assert flop_of_rank(shape, Mask(window=64), 4) == whole
    # 64 tokens see 8 keys each, but the first 7: 1 to 7.
    assert flop_of_rank(shape, Mask(window=8), 4) == whole * (64 * 8 - 28) // (64 * 65 // 2)
    assert flop_of_rank(shape, Mask(documents=(32,)), 4) == whole * (32 * 33) // (64 * 65 // 2)


@pytest.mark.parametrize(
    "case",
    [
        Case("ulysses"),
        Case("usp", (("ulysses", 2),)),
        Case("attention2d", (("transport", "group"),)),
        Case("allgather", (("transport", "group"),)),
    ],
    ids=str,
)
def test_a_window_takes_fewer_groups(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four for the causal mask, two or one for the window; results and plan as of any call."""
    shape = Shape(2, TOKENS, 16, 8, 8, element_bytes=8, wide_bytes=8)
    monkeypatch.setattr(call, "_GROUP_FLOP", shape.flop(SIZE) // 4)
    window = 16
    made = create(case.algo, VirtualWorld(SIZE).topology(0), dict(case.options))

    def groups(mask: Mask) -> int:
        placement = made.placement(shape, mask, "forward")
        own = placement.exchanges if isinstance(placement, HeadPlacement) else placement.groups
        return len(own)

    assert groups(Mask()) == 4
    assert groups(Mask(window=window)) == 2
    assert groups(Mask(window=2)) == 1
    for some in (None, window, 2):
        assert_conforms(case, SIZE, seq_len=TOKENS, heads=16, kv_heads=8, window=some)
