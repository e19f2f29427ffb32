"""Attention sinks: a key without a value in every softmax, the same for every algorithm."""

from functools import partial

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.autograd.function import attend
from megatron_cp_plugin.core.autograd.host_memory import HostMemory
from megatron_cp_plugin.core.autograd.recompute import Checkpointed
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import shard, unshard
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.kernels import resolve
from megatron_cp_plugin.registry import create, layout_of
from tests.oracle import naive_attention, relative_error
from tests.test_conformance import Case, few_cases

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 4, 2, 8, 24


def inputs(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """q, k, v and sinks, of which one is hardly seen and one takes nearly everything; dout."""
    torch.manual_seed(0)
    shapes = [(2, TOKENS, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dout = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return [q, k, v, torch.tensor([0.0, -30.0, 1.5, 9.0], dtype=dtype)], dout


def expected(window: int | None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """out, dq, dk, dv, dsink of the unsplit sequence in float64."""
    tensors, dout = inputs(dtype)
    q, k, v, sink = (x.double().requires_grad_() for x in tensors)
    scale = HEAD_DIM**-0.5
    out = naive_attention(q, k, v, causal=True, scale=scale, window=window, sink=sink)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v, sink), dout.double()))


@pytest.mark.parametrize(
    ("case", "window"),
    [(case, (None, 7)[turn % 2]) for turn, case in enumerate(few_cases(4))],
    ids=str,
)
def test_equals_unsplit_attention_where_it_is_recomputed(case: Case, window: int | None) -> None:
    size = 4
    tensors, dout = inputs()
    layout = layout_of(case.algo, dict(case.options))

    def body(topology: Topology) -> tuple[Tensor, ...]:
        q, k, v, own_dout = (shard(x, 1, layout, topology.rank, size) for x in (*tensors[:3], dout))
        leaves = [x.clone().requires_grad_() for x in (q, k, v, tensors[3])]

        def attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
            algorithm = create(case.algo, topology, dict(case.options))
            return attend(
                q,
                k,
                v,
                algorithm=algorithm,
                seq_len=TOKENS,
                kernel_for=partial(resolve, "auto"),
                mask=Mask(window=window),
                sink=sink,
                site="a layer",
            )

        function = Checkpointed(attention, HostMemory())
        out = torch.utils.checkpoint.checkpoint(function, *leaves, use_reentrant=False)
        return (out.detach(), *torch.autograd.grad(out, leaves, own_dout))

    ranks = run_virtual(size, body, peer_access=True)
    *want, dsink = expected(window)
    for index, whole in enumerate(want):
        got = unshard([result[index] for result in ranks], 1, layout)
        assert relative_error(got, whole) < 1e-10
    assert relative_error(torch.stack([result[4] for result in ranks]).sum(0), dsink) < 1e-10


def test_in_bfloat16() -> None:
    tensors, dout = inputs(torch.bfloat16)
    leaves = [x.requires_grad_() for x in tensors]
    out = cp.attention(*leaves[:3], algo="zigzag", sink=leaves[3])
    got = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    for x, want in zip(got, expected(None, torch.bfloat16), strict=True):
        assert x.dtype == torch.bfloat16
        assert relative_error(x, want) < 2e-2


def test_a_sink_for_each_head() -> None:
    (q, k, v, sink), _ = inputs()
    with pytest.raises(ContextParallelError, match=r"each of the 4 query heads, got \(2,\)"):
        cp.attention(q, k, v, algo="zigzag", sink=sink[:2])


def test_a_sink_of_minus_infinity_is_none() -> None:
    """Also for queries that see no key, whose softmax has nothing then."""
    (q, k, v, _), dout = inputs()
    spans = [(0, 6, 0, 6, "causal")]
    sink = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    results = []
    for given in (None, sink.requires_grad_()):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = cp.attention(*leaves, algo="zigzag", spans=spans, sink=given)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dout, retain_graph=True)))
    assert all(map(torch.equal, *results))
    (dsink,) = torch.autograd.grad(out, sink, dout)
    assert torch.equal(dsink, torch.zeros_like(sink))
