"""Times the attention kernels, and the merges between them, on one GPU.

    python scripts/benchmark_kernels.py --tokens 8K,32K --head-dims 128,192:128

What `kernel="auto"` prefers follows this table (docs/benchmarks.md).
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from lengths import head_dims_of
from rich.console import Console
from rich.table import Table
from triton.testing import do_bench

from megatron_cp_plugin.core.devices import take_gpu
from megatron_cp_plugin.core.kernel import Problem, Statistics
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.ending import one_line_errors
from megatron_cp_plugin.errors import KernelUnavailableError
from megatron_cp_plugin.kernels import kernel_names, resolve
from megatron_cp_plugin.kernels.fused import merge_into, sum_into
from megatron_cp_plugin.tokens import tokens_of


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
            out, lse = kernel.forward(q, k, v, scale=dim**-0.5, causal=causal)
            forward = milliseconds(partial(kernel.forward, q, k, v, scale=dim**-0.5, causal=causal))
            backward = milliseconds(
                partial(
                    kernel.backward,
                    dout,
                    q,
                    k,
                    v,
                    Statistics(lse, out=out),
                    scale=dim**-0.5,
                    causal=causal,
                )
            )
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


def merge_rows(tokens: int, heads: int, dim: int) -> list[Sequence[str]]:
    """Times of merging and summing whole blocks, with the bytes a second that they move."""
    a, b = (torch.randn(1, tokens, heads, dim, device="cuda").bfloat16() for _ in "ab")
    lse = torch.randn(1, heads, tokens, device="cuda")
    wide, wide_lse = a.to(accumulation_dtype(a.dtype)), lse.clone()
    half, half_lse = torch.empty_like(a), torch.empty_like(lse)
    cases: list[tuple[str, int, Callable[[], object]]] = [
        ("merge 16+16 -> 32", 8, lambda: merge_into(wide, wide_lse, a, lse, b, lse)),
        ("merge 32+16 -> 32", 10, lambda: merge_into(wide, wide_lse, wide, wide_lse, b, lse)),
        ("merge 32+16 -> 16", 8, lambda: merge_into(half, half_lse, wide, wide_lse, b, lse)),
        ("sum 16+16 -> 32", 8, lambda: sum_into(wide, a, b)),
        ("sum 32+16 -> 32", 10, lambda: sum_into(wide, wide, b)),
        ("sum 32+16 -> 16", 8, lambda: sum_into(half, wide, b)),
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
    parser.add_argument("--head-dims", default="128", help="192:128: values of another one")
    args = parser.parse_args()
    take_gpu("run it on a machine that has one")
    lists = (args.heads.split(","), args.tokens.split(","), args.head_dims.split(","))
    for heads, tokens, dims in product(*lists):
        n_heads, kv_heads = map(int, heads.split(":"))
        length, (dim, value_dim) = tokens_of(tokens), head_dims_of(dims)
        table = Table(title=f"{tokens} tokens, heads {heads}, head dim {dims}")
        for header in ("kernel", "mask", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s"):
            table.add_column(header)
        for row in kernel_rows(length, n_heads, kv_heads, dim, value_dim):
            table.add_row(*row)
        for row in merge_rows(length, n_heads, value_dim):
            table.add_row(*row)
        Console(width=120).print(table)


if __name__ == "__main__":
    with one_line_errors("benchmark_kernels: error"):
        main()
