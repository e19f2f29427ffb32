"""What Megatron's recurrent layers are held to: each document of a batch by itself."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import shard, unshard
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.integration.documents import DocumentMask
from megatron_cp_plugin.integration.runtime import Runtime
from tests.integration.ranks import Place
from tests.oracle import relative_error


class Projection(nn.Linear):
    """Stands for Megatron's parallel linear layers, on one tensor-parallel rank."""

    def __init__(self, inputs: int, outputs: int, **others: object) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def with_weights(layer: Any) -> Any:
    """The layer, with weights that are the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = drawn.to(parameter.dtype) / 2
    return layer


def check_documents(
    whole: Any,
    served: Callable[[Place, Runtime], Any],
    config: ContextParallelConfig,
    *,
    tokens: int,
    padding: tuple[tuple[int, int], ...] = (),
    bound: float,
) -> None:
    """Outputs and all gradients are those of Megatron's own layer on one document at a time.

    Args: whole: that layer. served: makes the plugin's, of a rank.
    """
    size, starts = config.size, (8, 24)
    generator = torch.Generator().manual_seed(1)
    dtype = next(whole.parameters()).dtype
    x, dout = (torch.randn(tokens, 2, 8, generator=generator).to(dtype) for _ in range(2))
    given = x.clone().requires_grad_()
    edges = pairwise((0, *starts, tokens))
    want = torch.cat([whole(given[start:stop], None)[0] for start, stop in edges])
    wanted = torch.autograd.grad(want, [given, *whole.parameters()], dout)
    cut = config.layout.within(starts)

    def body(topology: Topology) -> list[Tensor]:
        runtime = Runtime(config)
        runtime._topology = lambda group: topology  # type: ignore[method-assign]
        layer = served(Place(topology.rank, size), runtime)
        mine = shard(x, 0, cut, topology.rank, size).requires_grad_()
        packed = DocumentMask(seq_len=tokens, starts=starts, padding=padding)
        out, _ = layer(mine, packed_seq_params=packed)
        part = shard(dout, 0, cut, topology.rank, size)
        assert list(layer.state_dict()) == list(whole.state_dict())
        return [out.detach(), *torch.autograd.grad(out, [mine, *layer.parameters()], part)]

    out, dx, *gradients = zip(*run_virtual(size, body), strict=True)
    found = [unshard(list(out), 0, cut), unshard(list(dx), 0, cut), *map(sum, gradients)]
    for got, want_ in zip(found, (want.detach(), *wanted), strict=True):
        assert relative_error(got, want_) < bound
