"""Times the attention kernels, many tiles in one call, and the merges between them, on one GPU.

    python scripts/benchmark_kernels.py --tokens 8K,32K --head-dims 128,192:128
    python scripts/benchmark_kernels.py --tokens 64K --heads 32:8 --documents 1K,2K,8K
    python scripts/benchmark_kernels.py --tokens 128K --merges 2,4,8,16

The last one runs what one of P ranks computes, kernels and merges as the algorithm has them;
what others would send is memory that nobody has written. Its shares bound what a kernel that
accumulates in place of merging (DISTFLASHATTN, Algorithm 3) could bring.

What `kernel="auto"` prefers follows this table (docs/benchmarks.md).
"""

import argparse
import json
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from itertools import product
from math import log2
from pathlib import Path
from statistics import median

import torch
from profiles import by_class, device_spans, new_profiler
from rich.console import Console
from rich.table import Table
from specs import algo_of, head_dims_of
from timing import take_gpu
from triton.testing import do_bench

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.algorithm import Compiled
from megatron_cp_plugin.core.call import Call, Shape
from megatron_cp_plugin.core.document_layout import PaddedDocuments
from megatron_cp_plugin.core.execution.passes import Gradients, attend_block, differentiate_block
from megatron_cp_plugin.core.kernel import KernelCall, Problem, Statistics
from megatron_cp_plugin.core.masks.tile_batches import Batch, packed_calls
from megatron_cp_plugin.core.partial import Accumulator, GradientSum, accumulation_dtype
from megatron_cp_plugin.core.tiles import Mask, Tile, TileTable, plan_tiles
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.errors import KernelUnavailableError
from megatron_cp_plugin.kernels import kernel_names, resolve
from megatron_cp_plugin.kernels.choice import kernel_called
from megatron_cp_plugin.kernels.fused import merge_into, sum_rows
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.process_exit import one_line_errors
from megatron_cp_plugin.terminal import tokens_of

# Each adds up partials of its own in every step.
MERGING = ("distflash", "zigzag", "ring")
REPEATS = 3
SHARE_HEADER = (
    *("algorithm", "P", "forward kernels", "merges", "share"),
    *("backward kernels", "sums", "share", "of both passes"),
)


def milliseconds(body: Callable[[], object]) -> float:
    """Median time of a call."""
    return do_bench(body, warmup=50, rep=300, return_mode="median")


def kernel_rows(
    tokens: int, heads: int, kv_heads: int, dim: int, value_dim: int
) -> list[Sequence[str]]:
    """One row a kernel and mask."""
    device = torch.device("cuda", 0)
    rows: list[Sequence[str]] = []
    q, k, v, dout = (
        torch.randn(1, tokens, n, width, device=device, dtype=torch.bfloat16)
        for n, width in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim))
    )
    for name in kernel_names():
        if name == "reference":
            continue
        try:
            shape = device, q.dtype, heads, kv_heads, dim
            kernel = resolve(name, Problem(*shape, value_dim=value_dim))
        except KernelUnavailableError as error:
            rows.append((name, str(error)[:60], "", "", "", ""))
            continue
        for causal in (True, False):
            call = KernelCall(q, k, v, dim**-0.5, causal)
            out, lse = kernel.forward(call)
            forward = milliseconds(partial(kernel.forward, call))
            statistics = Statistics(lse, out=out)
            backward = milliseconds(partial(kernel.backward, call, dout, statistics))
            # Of one product with a dim of 1.
            flops = 2 * tokens**2 * heads / (2 if causal else 1)
            rows.append(
                (
                    name,
                    "causal" if causal else "full",
                    f"{forward:.3f}",
                    f"{flops * (dim + value_dim) / forward / 1e9:.0f}",
                    f"{backward:.3f}",
                    f"{flops * (3 * dim + 2 * value_dim) / backward / 1e9:.0f}",
                )
            )
    return rows


def document_rows(
    tokens: int, heads: int, kv_heads: int, dims: tuple[int, int], mean: int
) -> list[Sequence[str]]:
    """What two of four ranks have of documents that are split over them: a call for each tile, and
    few calls, with copies or without; merges and sums among them. The last column has the pairs of
    the tile in the middle, for all heads: from some number on a call for each is as fast.
    """
    device, size, (dim, value_dim) = torch.device("cuda", 0), 4, dims
    whole = size * tokens
    documents = tuple(sorted({n // 8 * 8 for n in random_documents(whole, size * mean)} - {0}))
    mask, layout = Mask(documents=documents), PaddedDocuments(documents)
    earlier, later = (layout.spans(rank, size, whole) for rank in (1, 2))
    sizes = Shape(1, whole, heads, kv_heads, dim, value_dim=value_dim)
    of_kernel = device, torch.bfloat16, heads, kv_heads, dim
    problem = Problem(*of_kernel, documents=True, value_dim=value_dim)
    rows: list[Sequence[str]] = []
    for name in kernel_names():
        found = kernel_called(name)
        if name == "reference" or not found.packs or found.unsupported(problem):
            continue
        ways = (("a call a tile", False, False), ("copied", True, False), ("in place", True, True))
        for way, packs, gaps in ways[: 3 if found.gaps else 2]:
            kernel = copy(found)
            kernel.packs, kernel.gaps = packs, gaps
            call = Call(sizes, mask, dim**-0.5, kernel)
            for queries, keys in ((earlier, later), (later, earlier)):
                tiles = plan_tiles(queries, keys, mask, rectangular=True)
                pairs = median(tile.area for tile in tiles)
                forward, backward = times(tokens, kv_heads, heads, dims, tiles, call)
                calls = len(_calls(tiles, heads, call, False))
                which = "later keys" if queries is earlier else "earlier keys"
                rows.append(
                    (
                        f"{name}, {way}",
                        which,
                        f"{forward:.3f}",
                        f"{calls} calls",
                        f"{backward:.3f}",
                        f"{len(tiles)} tiles, 2^{log2(heads * pairs):.1f}",
                    )
                )
    return rows


def _calls(tiles: TileTable, heads: int, call: Call, forward: bool) -> Sequence[Tile | Batch]:
    return packed_calls(tiles, heads, call.kernel.gaps, forward) if call.packed else tiles.each


def times(
    tokens: int, kv_heads: int, heads: int, dims: tuple[int, int], tiles: TileTable, call: Call
) -> tuple[float, float]:
    """Of a block's forward, merged with another one's, and backward."""
    dim, value_dim = dims
    q, k, v, dout = (
        torch.randn(1, tokens, n, width, device="cuda", dtype=torch.bfloat16)
        for n, width in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim))
    )
    lse = torch.zeros(1, heads, tokens, device="cuda")
    of_forward, of_backward = (_calls(tiles, heads, call, one) for one in (True, False))

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        total = Accumulator(q, value_dim)
        total.add(slice(0, tokens), dout, lse)
        attend_block(total, q, k, v, of_forward, call)
        return total.result(torch.float32)

    out, merged = forward()
    statistics = Statistics(merged, out=out.to(q.dtype))

    def backward() -> None:
        sums = Gradients(GradientSum(q), GradientSum(k, v))
        differentiate_block(sums, dout, q, k, v, statistics, of_backward, call)

    return milliseconds(forward), milliseconds(backward)


def passes_of_a_rank(
    spec: str, size: int, tokens: int, heads: tuple[int, int], dim: int, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward and backward of the last rank, which meets all keys where a layout is contiguous.

    Args: spec: name:option=value. tokens: of all ranks. heads: those of queries, and of keys.
    """
    (name, options), (n_heads, kv_heads) = algo_of(spec), heads
    alone = DryRunGroup(size - 1, (0,) * size, peer_access=False)
    algorithm = registry.create(name, alone, options)
    algorithm.check(algorithm.options, size=size, heads=n_heads, kv_heads=kv_heads, causal=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernel = resolve("auto", Problem(device, dtype, n_heads, kv_heads, dim))
    own = algorithm.layout.length(size - 1, size, tokens)
    q, k, v, dout = (
        torch.randn(1, own, n, dim, device=device, dtype=dtype)
        for n in (n_heads, kv_heads, kv_heads, n_heads)
    )
    shape = Shape.of(q, k, v, tokens)
    compiled = Compiled(algorithm, Call(shape, Mask(), dim**-0.5, kernel))
    saved = compiled.forward.attend(q, k, v)[2]
    forward = partial(compiled.forward.attend, q, k, v)
    return forward, partial(compiled.backward().differentiate, dout, saved)


def share_rows(
    sizes: Sequence[int], tokens: int, heads: tuple[int, int], dim: int
) -> list[Sequence[str]]:
    """One row an algorithm and number of ranks: kernels, merges and sums in both passes."""
    rows: list[Sequence[str]] = []
    for spec, size in product(MERGING, sizes):
        passes = passes_of_a_rank(spec, size, tokens, heads, dim, torch.device("cuda", 0))
        row, merging, whole = [spec, str(size)], 0.0, 0.0
        for body in passes:
            body()
            with new_profiler() as profiler:
                for _ in range(REPEATS):
                    body()
                torch.cuda.synchronize()
            spans = device_spans(profiler.events())
            kernels = by_class(spans)["attention"] / REPEATS
            # Of kernels/fused.py.
            fused = [span for span in spans if "_merge_kernel" in span[0] or "_sum_" in span[0]]
            merges = sum(end - start for _, start, end in fused) / (1000 * REPEATS)
            row += [f"{kernels:.2f}", f"{merges:.3f}", f"{merges / (kernels + merges):.2%}"]
            merging, whole = merging + merges, whole + kernels + merges
        rows.append([*row, f"{merging / whole:.2%}"])
        torch.cuda.empty_cache()
    return rows


def merge_rows(tokens: int, heads: int, dim: int) -> list[Sequence[str]]:
    """Times of merging and summing whole blocks, with the bytes a second that they move."""
    a, b = (torch.randn(1, tokens, heads, dim, device="cuda").bfloat16() for _ in "ab")
    lse = torch.randn(1, heads, tokens, device="cuda")
    wide, wide_lse = a.to(accumulation_dtype(a.dtype)), lse.clone()
    half, half_lse = torch.empty_like(a), torch.empty_like(lse)

    def summed(out: torch.Tensor, *terms: torch.Tensor) -> Callable[[], object]:
        return lambda: sum_rows((out,), [(slice(0, tokens), (x,)) for x in terms], in_place=False)

    cases: list[tuple[str, int, Callable[[], object]]] = [
        ("merge 16+16 -> 32", 8, lambda: merge_into(wide, wide_lse, a, lse, b, lse)),
        ("merge 32+16 -> 32", 10, lambda: merge_into(wide, wide_lse, wide, wide_lse, b, lse)),
        ("merge 32+16 -> 16", 8, lambda: merge_into(half, half_lse, wide, wide_lse, b, lse)),
        ("sum 16+16 -> 32", 8, summed(wide, a, b)),
        ("sum 32+16 -> 32", 10, summed(wide, wide, b)),
        ("sum 32+16 -> 16", 8, summed(half, wide, b)),
    ]
    rows: list[Sequence[str]] = []
    for name, element_bytes, body in cases:
        time = milliseconds(body)
        rate = element_bytes * a.numel() / time / 1e9
        rows.append((name, "", f"{time:.3f}", f"{rate:.2f} TB/s", "", ""))
    return rows


def main() -> None:
    """Prints one table a ratio of heads, length and head dim."""
    parser = argparse.ArgumentParser(description="Times attention kernels on one GPU.")
    parser.add_argument("--tokens", default="8K,32K")
    parser.add_argument("--heads", default="32:32,32:8")
    parser.add_argument("--documents", default="", help="many tiles only: mean length on a rank")
    parser.add_argument("--head-dims", default="128", help="192:128: values of another one")
    parser.add_argument(
        "--merges", default="", metavar="RANKS", help="shares of merges and sums only, 2,4,8,16"
    )
    parser.add_argument("--json", type=Path, help="adds the shares to this file, a line a row")
    args = parser.parse_args()
    take_gpu("run it on a machine that has one")
    lists = (args.heads.split(","), args.tokens.split(","), args.head_dims.split(","))
    for heads, tokens, dims in product(*lists):
        n_heads, kv_heads = map(int, heads.split(":"))
        length, (dim, value_dim) = tokens_of(tokens), head_dims_of(dims)
        title = f"{tokens} tokens, heads {heads}, head dim {dims}"
        if args.merges:
            table = Table(title=f"{title}, causal, the last of P ranks, ms")
            for header in SHARE_HEADER:
                table.add_column(header, justify="right")
            ranks = [int(size) for size in args.merges.split(",")]
            for row in share_rows(ranks, length, (n_heads, kv_heads), dim):
                table.add_row(*row)
                if args.json is not None:
                    found = {"tokens": length, "heads": heads, "row": row}
                    with args.json.open("a") as file:
                        file.write(json.dumps(found) + "\n")
            Console(width=120).print(table)
            continue
        table = Table(title=title)
        for header in ("kernel", "mask", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s"):
            table.add_column(header)
        for mean in filter(None, args.documents.split(",")):
            table.add_section()
            sizes = length, n_heads, kv_heads, (dim, value_dim), tokens_of(mean)
            for row in document_rows(*sizes):
                table.add_row(*row)
        if args.documents:
            Console(width=120).print(table)
            continue
        for row in kernel_rows(length, n_heads, kv_heads, dim, value_dim):
            table.add_row(*row)
        for row in merge_rows(length, n_heads, value_dim):
            table.add_row(*row)
        Console(width=120).print(table)


if __name__ == "__main__":
    with one_line_errors("benchmark_kernels: error"):
        main()
