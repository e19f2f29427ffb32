"""Peak memory of every algorithm as its plan predicts it, and as torch measures it on GPUs.

    torchrun --nproc-per-node 2 scripts/peak_memory.py --tokens 64K --heads 32:32,32:8

Bytes beside q, k, v and dout, of the rank where prediction and measurement differ most; receive
buffers in peer memory are added to torch's figure, which does not know them. A first table has what
a single call of the kernel takes beside its arguments and results. Exit code 1 if any row of an
algorithm differs by more than 5%.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lengths import head_dims_of
from timing import join, take_gpu
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.process_groups import topology_of
from megatron_cp_plugin.core.kernel import KernelCall, Problem, SoftmaxKernel, Statistics
from megatron_cp_plugin.core.layout import shard
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.kernels import resolve
from megatron_cp_plugin.kernels.choice import kernel_called
from megatron_cp_plugin.planner.costs import peak
from megatron_cp_plugin.registry import layout_of
from megatron_cp_plugin.tokens import tokens_of

BOUND = 0.05


class Row(NamedTuple):
    """Bytes of one pass."""

    name: str
    what: str
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """How far the prediction is from the measurement, as a part of it."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", default="64K", help="global sequence length")
    parser.add_argument("--heads", default="32:32,32:8", help="query heads : KV heads")
    parser.add_argument(
        "--head-dim", type=head_dims_of, default=(128, 128), metavar="DIM[:DIM]", help="of values"
    )
    parser.add_argument("--algos", default="all", help="names, each with options: zigzag:chunks=1")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", type=Path, default=Path("results/peak_memory.md"))
    return parser.parse_args(argv)


class Meter:
    """Measures what a call takes. Attributes: device: of the tensors."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.device = torch.device(device)
        if self.cuda:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def begin(self) -> int:
        """Starts a measurement. Returns: bytes that are allocated now."""
        gc.collect()
        if not self.cuda:
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def most(self) -> int:
        """The most bytes that were allocated since `begin`."""
        if not self.cuda:
            return 0
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def drawn(self, *shape: int) -> Tensor:
        """A random tensor."""
        dtype = torch.bfloat16 if self.cuda else torch.float32
        return torch.randn(shape, device=self.device, dtype=dtype)


def kernel_rows(
    meter: Meter, kernel: SoftmaxKernel, tokens: int, heads: int, kv_heads: int, dims: Sequence[int]
) -> list[Row]:
    """What one call takes within, forward and backward, with out and with delta given."""
    q, dout = (meter.drawn(1, tokens, heads, dim) for dim in dims)
    k, v = (meter.drawn(1, tokens, kv_heads, dim) for dim in dims)
    rows = []
    for causal in (True, False):
        given = KernelCall(q, k, v, dims[0] ** -0.5, causal)
        shape = "causal" if causal else "full"
        out, lse = kernel.forward(given)
        delta = torch.zeros_like(lse)
        call: Callable[[], Sequence[Tensor]]
        calls: list[tuple[str, Statistics | None]] = [
            ("forward", None),
            ("backward", Statistics(lse, out=out)),
            ("backward, delta given", Statistics(lse, delta=delta)),
        ]
        for what, statistics in calls:
            call = partial(kernel.forward, given)
            if statistics is not None:
                call = partial(kernel.backward, given, dout, statistics)
            call()
            before = meter.begin()
            results = call()
            made = sum(x.untyped_storage().nbytes() for x in results)
            measured = meter.most() - before - made if meter.cuda else 0
            del results
            predicted = kernel.workspace(given, statistics)
            rows.append(
                Row(kernel.name, f"{what}, {shape}, {heads}:{kv_heads}", predicted, measured)
            )
        del out, lse, delta, calls
    return rows


def algorithm_rows(
    meter: Meter, spec: str, tokens: int, heads: int, kv_heads: int, args: argparse.Namespace
) -> list[Row]:
    """Both passes of an algorithm."""
    name, *pairs = spec.split(":")
    options: dict[str, Any] = dict(pair.split("=", 1) for pair in pairs)
    rank, size, dims = dist.get_rank(), dist.get_world_size(), args.head_dim
    layout = layout_of(name, options)
    shapes = (heads, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1]), (heads, dims[1])
    q, k, v, dout = (
        shard(meter.drawn(1, tokens, n, dim), 1, layout, rank, size) for n, dim in shapes
    )
    for x in (q, k, v):
        x.requires_grad_()
    measured = [0, 0]

    def step() -> None:
        before = meter.begin()
        out = cp.attention(q, k, v, algo=name, kernel=args.kernel, **options)
        measured[0] = meter.most() - before
        meter.begin()
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        measured[1] = meter.most() - before
        del gradients

    for _ in range(2):  # receive buffers grow in the first one
        step()
    problem = Problem(meter.device, q.dtype, heads, kv_heads, dims[0], value_dim=dims[1])
    width = q.element_size()
    shape = Shape(1, tokens, heads, kv_heads, dims[0], width, 4, dims[1])
    # CPU, and GPUs that do not reach each other, have no receive buffers in peer memory.
    topology = topology_of(None)
    found = peak(
        name,
        size,
        rank,
        shape,
        None,
        options,
        kernel=resolve(args.kernel, problem).name,
        peer_access=topology.peer_access,
    )
    held = topology.peer_bytes if meter.cuda else 0
    rows = [
        Row(spec, f"{what}, {heads}:{kv_heads}", predicted, got + held if meter.cuda else 0)
        for what, predicted, got in (
            ("forward", found.forward, measured[0]),
            ("backward", found.backward, measured[1]),
        )
    ]
    gathered: list[list[Row]] = [[] for _ in range(size)]
    dist.all_gather_object(gathered, rows)
    return [max(of_all, key=lambda row: abs(row.off)) for of_all in zip(*gathered, strict=True)]


def report(title: str, rows: Sequence[Row]) -> list[str]:
    """Lines of markdown."""
    lines = [f"{title}", "", "| | pass | predicted MiB | measured MiB | off |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for row in rows:
        numbers = f"{row.predicted / 2**20:.1f} | {row.measured / 2**20:.1f} | {row.off:+.1%}"
        lines.append(f"| {row.name} | {row.what} | {numbers} |")
    return [*lines, ""]


def guarded(name: str, body: Callable[[], list[Row]]) -> list[Row]:
    """Rows of a body; a line instead where it cannot be served."""
    cp.release()
    try:
        return body()
    except (ContextParallelError, NotImplementedError) as error:
        if dist.get_rank() == 0:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
        return []
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> int:
    """Runs on every rank under torchrun."""
    args = parse()
    if args.device == "cuda":
        take_gpu("add --device cpu")
    join(args.device)
    meter, tokens, size = Meter(args.device), tokens_of(args.tokens), dist.get_world_size()
    of_kernels, of_algorithms = [], []
    algos = cp.available("softmax") if args.algos == "all" else args.algos.split(",")
    names = ("flash4", "cudnn", "torch_flash") if meter.cuda else ("torch_cpu",)
    for heads, kv_heads in (map(int, pair.split(":")) for pair in args.heads.split(",")):
        dim, value_dim = args.head_dim
        shape = meter.device, torch.bfloat16, heads, kv_heads, dim
        for name in names:
            kernel = kernel_called(name)
            if kernel.unsupported(Problem(*shape, value_dim=value_dim)):
                continue
            rows = partial(kernel_rows, meter, kernel, tokens // size, heads, kv_heads)
            of_kernels += guarded(name, partial(rows, args.head_dim))
        for spec in algos:
            rows = partial(algorithm_rows, meter, spec, tokens, heads, kv_heads)
            of_algorithms += guarded(spec, partial(rows, args))
    if dist.get_rank() == 0:
        lines = report(f"Within one call of a kernel, {tokens // size} tokens", of_kernels)
        lines += report(f"Peak beside q, k, v, dout: {tokens} tokens, {size} ranks", of_algorithms)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("\n".join(lines))
        print("\n".join(lines), flush=True)
    dist.destroy_process_group()
    cp.release()
    return int(any(abs(row.off) > BOUND for row in of_algorithms))


if __name__ == "__main__":
    sys.exit(main())
