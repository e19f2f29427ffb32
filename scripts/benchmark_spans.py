"""Times attention under span masks, beside one GPU's kernel on as many pairs.

    torchrun --nproc-per-node 2 scripts/benchmark_spans.py --heads 32:8 --algos zigzag,ulysses

The masks: a shared prefix of 32K tokens with 8 rollouts of 4K, and 64K tokens of text with an image
of 1K in every 4K. The limit is the causal kernel's time for a whole sequence of that length on one
GPU, times the mask's share of the causal pairs, divided by the number of ranks. Values are random;
that they are right is for tests/test_spans.py.
"""

import argparse
import json

import torch
import torch.distributed as dist
from specs import algo_of, head_dims_of
from timing import join, take_gpu, time_ms

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.kernel import KernelCall, Problem, Statistics
from megatron_cp_plugin.core.masks.slices import Slice, Slices
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.kernels import resolve
from megatron_cp_plugin.process_exit import one_line_errors

ALGOS = "zigzag,zigzag:layout=documents,distflash,allgather,attention2d,ulysses"


def masks(scale: int) -> dict[str, tuple[int, list[Slice]]]:
    """Tokens and spans of each mask. Args: scale: 1024; smaller for tries."""
    tokens = 64 * scale
    images = [(first + scale, first + 2 * scale) for first in range(0, tokens, 4 * scale)]
    return {
        "shared prefix": (tokens, cp.spans.shared_prefix((32 * scale, [4 * scale] * 8))),
        "image blocks": (tokens, cp.spans.image_blocks(tokens, images)),
    }


class Bench:
    """Random tensors of some heads, and who is timed with them."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self._args, self._device = args, device
        self._heads, self._kv_heads = map(int, args.heads.split(":"))
        self._dim, self._value_dim = args.head_dim
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shape = device, self._dtype, self._heads, self._kv_heads, self._dim
        self.kernel = resolve(args.kernel, Problem(*shape, value_dim=self._value_dim))

    def _random(self, tokens: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, dim, device=self._device, dtype=self._dtype)

    def _inputs(self, tokens: int) -> list[torch.Tensor]:
        """q, k, v and dout."""
        q, k = (self._random(tokens, heads, self._dim) for heads in (self._heads, self._kv_heads))
        v, dout = (
            self._random(tokens, heads, self._value_dim) for heads in (self._kv_heads, self._heads)
        )
        return [q, k, v, dout]

    def alone(self, tokens: int) -> float:
        """One GPU's causal kernel, ms."""
        q, k, v, dout = self._inputs(tokens)
        scale = self._dim**-0.5

        def both() -> None:
            out, lse = self.kernel.forward(KernelCall(q, k, v, scale, causal=True))
            statistics = Statistics(lse, out=out)
            self.kernel.backward(KernelCall(q, k, v, scale, causal=True), dout, statistics)

        return time_ms(both, self._device, warmup=2, iters=self._args.iters)

    def ours(self, algo: str, tokens: int, spans: list[Slice]) -> float:
        """An algorithm on all ranks, ms. Args: algo: with options, as zigzag:chunks=1."""
        name, options = algo_of(algo)
        *inputs, dout = self._inputs(tokens // dist.get_world_size())
        for x in inputs:
            x.requires_grad_()

        # As the layers of a model, which share the context of a batch.
        context = cp.Context(algo=name, seq_len=tokens, spans=spans, **options)

        def both() -> None:
            q, k, v = inputs
            out = context.attention(q, k, v, kernel=self._args.kernel)
            torch.autograd.grad(out, inputs, dout)

        return time_ms(both, self._device, warmup=2, iters=self._args.iters)


def say(row: dict[str, object]) -> None:
    """Prints a row, once for all ranks."""
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)


def main() -> None:
    """Runs on every rank under torchrun."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--heads", default="32:8", help="query heads : KV heads")
    parser.add_argument("--head-dim", default=(128, 128), type=head_dims_of)
    parser.add_argument("--algos", default=ALGOS)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--scale", type=int, default=1024, help="tokens in place of each 1K")
    parser.add_argument("--iters", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = take_gpu("use --device cpu")
    join(device.type)
    bench, size = Bench(args, device), dist.get_world_size()
    for mask, (tokens, spans) in masks(args.scale).items():
        share = Slices.of(spans, tokens).bands.area(tokens)
        limit = bench.alone(tokens) * share / Mask().bands.area(tokens) / size
        say({"mask": mask, "name": f"one GPU / {size}: {bench.kernel.name}", "ms": limit})
        for algo in args.algos.split(","):
            try:
                took = bench.ours(algo, tokens, spans)
                say({"mask": mask, "name": algo, "ms": took, "of_limit": limit / took})
            except ContextParallelError as error:
                say({"mask": mask, "name": algo, "note": str(error)})
    dist.destroy_process_group()
    cp.release()


if __name__ == "__main__":
    with one_line_errors("benchmark_spans: error"):
        main()
