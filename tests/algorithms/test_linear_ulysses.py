"""Linear attention by heads: gradients of states, and what is said of its work and its messages."""

from collections import Counter

import pytest

from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.registry import create_linear

SIZE, TOKENS = 3, 12


@pytest.mark.parametrize("causal", [True, False])
def test_its_work_and_messages(causal: bool) -> None:
    """Every rank has its share of the heads in each sweep; each pair exchanges q, k, v and out."""
    made = create_linear("linear_ulysses", VirtualWorld(SIZE).topology(0), {})
    work = made.trace(TOKENS, causal=causal)
    assert Counter(one.host for one in work) == dict.fromkeys(range(SIZE), 1 if causal else 2)
    assert all(one.share * SIZE == 1 for one in work)
    last = max(one.step for one in work) + 1
    seen = Counter[tuple[int, int, str]]()
    for move in made.moves(TOKENS, causal=causal):
        assert move.needed == (last if move.tensors == ("out",) else 0)
        owner = move.target if move.tensors == ("out",) else move.source
        assert (move.owners, move.share) == ((owner,), move.source + move.target - owner)
        seen.update((move.source, move.target, name) for name in move.tensors)
    pairs = [(a, b) for a in range(SIZE) for b in range(SIZE) if a != b]
    assert seen == {(a, b, name): 1 for a, b in pairs for name in ("q", "k", "v", "out")}
