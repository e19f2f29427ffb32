"""fla's kernels with gates and the delta rule, over virtual ranks of one GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import shard, unshard
from megatron_cp_plugin.registry import layout_of
from tests.oracle import relative_error

FAMILIES = {
    "simple_gla": ("heads", False),
    "gla": ("channels", False),
    "gated_delta_net": ("heads", True),
    "kda": ("channels", True),
}
NAMES = "out", "dq", "dk", "dv", "dgate", "dbeta"


@pytest.fixture
def one_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kernel of fla: it has 160 to 280 in all, a second of compilation each."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    every = autotuner.run

    def run(self: Any, *args: object, **settings: object) -> object:
        self.configs = self.configs[:1]
        return every(self, *args, **settings)

    monkeypatch.setattr(autotuner, "run", run)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("one_configuration")
@pytest.mark.parametrize("documents", [(), (1, 300, 1024, 1500)], ids=["one", "documents"])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family: str, documents: tuple[int, ...]) -> None:
    """In bfloat16 against the torch kernel in float64 on the CPU; and no worse on 8 ranks, with
    states or with all-to-alls, than on one.
    """
    pytest.importorskip("fla")
    kind, delta = FAMILIES[family]
    generator = torch.Generator().manual_seed(0)
    tokens, heads, dim = 2048, 4, 64

    def random(*shape: int) -> Tensor:
        return torch.randn(1, tokens, heads, *shape, generator=generator)

    q, k, v, dout = random(dim) * dim**-0.5, random(dim), random(dim), random(dim)
    k = torch.nn.functional.normalize(k, dim=-1)
    gate = torch.nn.functional.logsigmoid(random(*((dim,) if kind == "channels" else ()))) / 4
    beta = random().sigmoid() if delta else None
    rounded = [x.bfloat16() for x in (q, k, v, dout)]
    bounds = (0, *documents, tokens)

    def attend(topology: Topology, algo: str, layout: str, device: str, dtype: torch.dtype):
        options = {} if algo == "lasp" else {"layout": layout}
        cut = layout_of(algo, options)

        def mine(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            if x is None:
                return None
            part = shard(x, 1, cut, topology.rank, topology.size)
            return part.to(device, dtype).requires_grad_()

        wide = torch.float64 if dtype == torch.float64 else torch.float32
        asked = [*(mine(x, dtype) for x in rounded[:3]), mine(gate, wide), mine(beta, wide)]
        out = cp.linear_attention(
            *asked[:3],
            gate=asked[3],
            beta=asked[4],
            algo=algo,
            group=topology,
            kernel="chunked" if device == "cpu" else "fla",
            cu_seqlens=bounds,
            **options,
        )
        some = [x for x in asked if x is not None]
        # By default one thread takes the backward of all ranks, which wait for each other in it.
        with torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(out, some, mine(rounded[3], dtype).detach())
        return (out.detach(), *found)

    def errors(algo: str, layout: str, size: int) -> list[float]:
        each = run_virtual(
            size, lambda t: attend(t, algo, layout, "cuda", torch.bfloat16), timeout_s=300
        )
        cut = layout_of(algo, {} if algo == "lasp" else {"layout": layout})
        whole = [unshard(list(parts), 1, cut).cpu() for parts in zip(*each, strict=True)]
        return [relative_error(got, want) for got, want in zip(whole, wanted, strict=True)]

    (wanted,) = run_virtual(1, lambda t: attend(t, "lasp", "contiguous", "cpu", torch.float64))
    alone = errors("lasp", "contiguous", 1)
    for algo, layout, size in (
        ("lasp", "contiguous", 4),
        ("lasp2", "zigzag", 8),
        ("linear_ulysses", "zigzag", 4),
    ):
        for name, got, one in zip(NAMES, errors(algo, layout, size), alone, strict=False):
            print(f"{family} {algo} {size}: {name} {got:.2e}, on one rank {one:.2e}")
            assert one < 2e-2
            assert got < 1.1 * one + 2e-4, f"{algo}: {name} is off by {got:.1e}, alone {one:.1e}"
