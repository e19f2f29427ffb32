"""Ring Self-Attention against unsplit attention, what it sends, and what it keeps."""

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import Contiguous, shard, unshard
from megatron_cp_plugin.errors import ContextParallelError
from scripts.ring_self_attention import ring_self_attention
from tests.oracle import Expected, expected_attention, relative_error

BATCH, TOKENS, HEADS, DIM = 2, 6, 4, 8


def run(expected: Expected, size: int, causal: bool) -> list[tuple[Tensor, ...]]:
    """(out, dq, dk, dv) of every rank."""

    def body(topology: Topology) -> tuple[Tensor, ...]:
        mine = [
            shard(x, 1, Contiguous(), topology.rank, size)
            for x in (expected.q, expected.k, expected.v, expected.dout)
        ]
        q, k, v = (x.requires_grad_() for x in mine[:3])
        out = ring_self_attention(q, k, v, group=topology, causal=causal)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), mine[3]))

    return run_virtual(size, body)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_equals_unsplit_attention(kv_heads: int, size: int, causal: bool) -> None:
    sizes = {"batch": BATCH, "seq_len": TOKENS * size, "kv_heads": kv_heads, "value_dim": 12}
    expected = expected_attention(**sizes, causal=causal)
    with cp.record_communication() as log:
        results = run(expected, size, causal)
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        whole = unshard([found[index] for found in results], 1, Contiguous())
        assert relative_error(whole, getattr(expected, name)) < 1e-10, name
    shards = BATCH * TOKENS * kv_heads * (DIM + 12) * 8
    for rank in range(size):
        assert log.bytes(rank=rank, phase="forward") == (size - 1) * shards
        assert log.bytes(rank=rank, phase="backward") == 2 * (size - 1) * shards


def test_it_keeps_all_scores_of_its_rows() -> None:
    """That is why sequences cannot be long: S * N for each head, where others keep S numbers."""
    size, kept = 3, list[int]()

    def body(topology: Topology) -> None:
        q, k, v = (torch.randn(1, 16, HEADS, DIM, requires_grad=True) for _ in "qkv")

        def pack(x: Tensor) -> Tensor:
            if topology.rank == 1:
                kept.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            ring_self_attention(q, k, v, group=topology)

    run_virtual(size, body)
    assert sorted(kept) == [16 * HEADS * DIM] * 3 + [HEADS * 16 * 16 * size]


def test_unequal_shards_are_refused_on_all_ranks() -> None:
    def body(topology: Topology) -> str:
        x = torch.randn(1, 4 + topology.rank, HEADS, DIM)
        with pytest.raises(ContextParallelError) as caught:
            ring_self_attention(x, x, x, group=topology)
        return str(caught.value)

    first, second = run_virtual(2, body)
    assert first == second
    assert "all ranks need one set of shapes, got" in first
