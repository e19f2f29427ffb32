"""Rings whose backward begins with blocks that the forward had."""

from typing import Any

import pytest
import torch

from megatron_cp_plugin.algorithms import ring
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.plans.plan import Kept, Plan
from megatron_cp_plugin.core.ranges import row_count
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.functional import attention, shard
from megatron_cp_plugin.registry import create
from tests.peer_world import run_virtual
from tests.plan_check import check

CAUSAL = Mask()


pytestmark = pytest.mark.usefixtures("keys_stay")


def retained(plan: Plan) -> list[Kept]:
    """What ranks keep of blocks that came."""
    return [kept for kept in plan.kept if kept.rows is not None]


def backward(size: int, algo: str = "zigzag", mask: Mask = CAUSAL, **changes) -> Plan:
    options = changes.pop("options", {})
    made = create(algo, VirtualWorld(size).topology(0), options)
    shape = Shape(
        **{"batch": 1, "seq_len": 48 * size, "heads": 8, "kv_heads": 2, "head_dim": 8} | changes
    )
    plan = made.plan(shape, mask, "backward")
    assert retained(plan) == retained(made.plan(shape, mask, "forward"))
    return plan


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_the_own_block_comes_last(size: int) -> None:
    plan = backward(size)
    check(plan)
    for compute in plan.computes:
        own = compute.keys.owners == (compute.rank,)
        assert own == (compute.step == plan.steps - 1)
    # Nothing has to come before the first step, and the last sums come beside the last one.
    assert all(move.needed >= 1 for move in plan.moves)
    assert {move.needed for move in plan.moves if move.result} == set(range(1, plan.steps))
    assert sum(not move.result for move in plan.moves) == size * (size - 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"keep": "local"}},
        {"options": {"backward": "query"}},
        {"options": {"route": "straight"}},
        {"options": {"chunks": 2}},
        {"kv_heads": 4},
        {"seq_len": 2**22},
        {"mask": Mask(window=8), "options": {"keep": "local"}},
        {"mask": Mask(window=8), "batch": 2**22},
        {"mask": Mask(window=8), "kv_heads": 2**21, "heads": 2**21},
        {"mask": Mask(documents=(20, 40))},
        {"algo": "ring"},
        {"algo": "usp"},
    ],
    ids=str,
)
def test_where_ranks_keep_their_own_tensors_alone(changes: dict) -> None:
    assert not retained(backward(4, **changes))


@pytest.mark.parametrize(
    ("mask", "layout"), [(Mask(window=8), "zigzag"), (Mask(documents=(20, 90)), "documents")]
)
def test_keys_that_came_in_one_merged_step_stay(mask: Mask, layout: str) -> None:
    """The backward sends gradients alone."""
    plan = backward(4, mask=mask, options={"layout": layout})
    assert retained(plan)
    assert {move.result for move in plan.moves} == {True}
    home = {(move.source, move.block) for move in plan.moves}
    assert {(kept.rank, kept.owners, kept.rows) for kept in retained(plan)} == {
        (rank, *block) for rank, block in home
    }


def test_few_keys_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying them would cost the host more than it saves. The busiest rank decides for all."""
    mask = Mask(window=8)
    (rows,) = {row_count(kept.rows or ()) for kept in retained(backward(4, mask=mask))}
    for factor in (1, 2):
        least = factor * rows * 2 * 2 * 8 * 4  # bytes: K and V of two heads, 8 dims, float32
        monkeypatch.setattr(ring, "_KEPT", (least, 2**26))
        assert bool(retained(backward(4, mask=mask))) == (factor == 1)


def test_a_ring_without_a_causal_mask_keeps_the_last_block_too() -> None:
    assert len(retained(backward(3, "ring", Mask(False)))) == 3


@pytest.mark.parametrize("documents", [(), (2, 25), (3, 7, 50)], ids=str)
@pytest.mark.parametrize("peer_access", [True, False])
@pytest.mark.parametrize("frozen", ["", "q", "kv"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_gradients_are_those_without_it(
    size: int, frozen: str, peer_access: bool, documents: tuple[int, ...]
) -> None:
    """Also if some are not wanted, and in another call before the backward."""
    torch.manual_seed(0)
    batch, tokens = 1 if documents else 2, 12 * size
    whole = [torch.randn(batch, tokens, n, 8, dtype=torch.float64) for n in (4, 1, 1, 4)]
    given: dict[str, Any] = {}
    if documents:
        edges = [0, *(x for x in documents if x < tokens), tokens]
        given = {"layout": "documents", "route": "straight", "cu_seqlens": edges}

    def body(topology: Topology) -> list[torch.Tensor]:
        found = []
        for keep in ("auto", "local"):
            split = {"algo": "zigzag", "group": topology} | given
            q, k, v, dout = (shard(x, 1, **split).clone() for x in whole)
            for name, x in zip("qkv", (q, k, v), strict=True):
                x.requires_grad_(name not in frozen)

            def call(q, k, v, keep=keep, split=split):
                return attention(q, k, v, keep=keep, seq_len=tokens, **split)

            out = call(q, k, v)
            call(*(x.detach() + 1 for x in (q, k, v)))  # takes the same buffers for its messages
            wanted = [x for x in (q, k, v) if x.requires_grad]
            found += [out, *torch.autograd.grad(out, wanted, dout)]
        return found

    for found in run_virtual(size, body, peer_access=peer_access):
        half = len(found) // 2
        for kept, local in zip(found[:half], found[half:], strict=True):
            torch.testing.assert_close(kept, local, rtol=1e-12, atol=1e-12)
