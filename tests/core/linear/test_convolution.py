"""Short convolutions over split sequences against the unsplit one, document by document."""

from itertools import pairwise as neighbours

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.document_layout import NAMED
from megatron_cp_plugin.core.layout import shard, unshard
from megatron_cp_plugin.core.linear.convolution import short_convolution
from megatron_cp_plugin.core.linear.states import Route
from tests.oracle import relative_error
from tests.pairwise import pairwise

# Where others than the first document begin, in multiples of 2P tokens, of which runs are made.
DOCUMENTS = {"one": (), "several": (1, 3), "short": (1, 2, 3, 4)}


def whole(x: Tensor, weight: Tensor, bias: Tensor | None, documents: tuple[int, ...]) -> Tensor:
    edges = (0, *documents, x.shape[1])
    parts = []
    for start, stop in neighbours(edges):
        padded = functional.pad(x[:, start:stop].mT, (weight.shape[1] - 1, 0))
        parts.append(functional.conv1d(padded, weight.unsqueeze(1), bias, groups=x.shape[2]).mT)
    return torch.cat(parts, 1)


@pytest.mark.parametrize(
    ("size", "layout", "documents", "width", "shift"),
    pairwise(
        (1, 2, 3, 4, 8),
        ("contiguous", "zigzag", "thd", "documents"),
        tuple(DOCUMENTS),
        (1, 2, 4, 6),  # more than runs have tokens
        (0, 1),
    ),
)
def test_equals_the_unsplit_one(
    size: int, layout: str, documents: str, width: int, shift: int
) -> None:
    """Outputs, gradients of tokens, weight and bias, and how many tokens travel."""
    seq_len = 6 * 2 * size
    shift = 0 if layout == "thd" else shift
    starts = tuple(2 * size * number + shift for number in DOCUMENTS[documents])
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, dout, weight = random(2, seq_len, 3), random(2, seq_len, 3), random(3, width)
    bias = random(3) if shift else None
    cut = NAMED[layout].for_documents(starts) if starts else NAMED[layout]
    route = Route.of(cut, size, seq_len, starts)
    asked = [None if one is None else one.clone().requires_grad_() for one in (x, weight, bias)]
    some = [one for one in asked if one is not None]
    want = whole(*asked, starts)
    wanted = torch.autograd.grad(want, some, dout)

    def body(topology: Topology) -> list[Tensor]:
        def mine(one: Tensor) -> Tensor:
            return shard(one, 1, cut, topology.rank, size)

        given = [mine(x), weight.clone(), None if bias is None else bias.clone()]
        given = [None if one is None else one.requires_grad_() for one in given]
        channel = topology.channel("convolution")
        out = short_convolution(*given, route=route, rank=topology.rank, channel=channel)
        found = torch.autograd.grad(out, [one for one in given if one is not None], mine(dout))
        return [out.detach(), *found]

    with cp.record_communication() as log:
        results = run_virtual(size, body)
    out, dx, *others = zip(*results, strict=True)
    assert relative_error(unshard(list(out), 1, cut), want.detach()) < 1e-12
    assert relative_error(unshard(list(dx), 1, cut), wanted[0]) < 1e-12
    for got, want_ in zip(others, wanted[1:], strict=True):
        assert relative_error(sum(got), want_) < 1e-12
    sent = log.bytes(phase="forward")
    runs = sum(map(len, route.runs))
    assert sent == log.bytes(phase="backward") <= runs * (width - 1) * 2 * 3 * 8
    if layout == "contiguous" and not starts:
        assert sent == (size - 1) * (width - 1) * 2 * 3 * 8
