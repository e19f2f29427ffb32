"""Linear attention by heads: gradients of states, and what is said of its work and its messages."""

from collections import Counter

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.communication.virtual import VirtualWorld, run_virtual
from megatron_cp_plugin.core.layout import Contiguous, shard
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.registry import create_linear
from tests.oracle import relative_error

SIZE, TOKENS = 3, 12


@pytest.mark.parametrize("heads", [3, 4])
def test_each_rank_has_the_state_gradients_of_its_own_heads(heads: int) -> None:
    """Four heads on three ranks are filled up to six: two, two and none."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, TOKENS, heads, 5, dtype=torch.float64) for _ in range(4))
    state, dfinal = torch.randn(2, 2, heads, 5, 5, dtype=torch.float64)
    settings = {"decay": 0.9, "output_final_state": True}

    def gradients(topology: Topology, size: int) -> Tensor:
        parts = [shard(x, 1, Contiguous(), topology.rank, size) for x in (q, k, v, dout)]
        initial = state.clone().requires_grad_()
        given = {"algo": "linear_ulysses", "group": topology, "initial_state": initial}
        out, final = cp.linear_attention(*parts[:3], seq_len=TOKENS, **given, **settings)
        # Of the final state, which all ranks have, each has a third of the gradient.
        loss = (out * parts[3]).sum() + (final * dfinal).sum() / size
        return torch.autograd.grad(loss, initial)[0]

    (want,) = run_virtual(1, lambda topology: gradients(topology, 1))
    found = run_virtual(SIZE, lambda topology: gradients(topology, SIZE))
    assert relative_error(sum(found), want) < 1e-12
    share = -(-heads // SIZE)
    for rank, own in enumerate(found):
        others = own.clone()
        others[:, rank * share : (rank + 1) * share] = 0
        assert not others.any()


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
