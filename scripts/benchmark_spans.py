"""Times span masks beside the best single-GPU kernel's time for as many pairs of a causal mask.

    torchrun --nproc-per-node 2 scripts/benchmark_spans.py --tokens 64K --heads 32:8 \
        --algos zigzag,distflash,allgather,ulysses

Of N tokens: "tree", a prefix of half of them with eight rollouts; "images" of N/64 tokens each,
with as much text between them; "prefix", which half of them are; "diffusion", of blocks of N/128.
The limit is the kernel's causal time times the pairs of the mask over those of the causal mask,
divided by the number of ranks. Outputs and gradients are held against the same mask on one rank.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import benchmark_attention
import torch
import torch.distributed as dist
from benchmark_attention import MAX_ERROR, Bench, Row
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.devices import take_gpu
from megatron_cp_plugin.core.kernel import Problem
from megatron_cp_plugin.core.slices import Slice, Slices
from megatron_cp_plugin.core.tiles import Mask, visible_pairs
from megatron_cp_plugin.core.virtual import VirtualWorld
from megatron_cp_plugin.ending import one_line_errors
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels import resolve
from megatron_cp_plugin.registry import layout_of
from megatron_cp_plugin.tokens import tokens_of

MASKS: dict[str, Callable[[int], list[Slice]]] = {
    "tree": lambda n: cp.spans.shared_prefix((n // 2, [n // 16] * 8)),
    "images": lambda n: cp.spans.image_blocks(
        n, [(at, at + n // 64) for at in range(n // 64, n, n // 32)]
    ),
    "prefix": lambda n: cp.spans.prefix_lm(n // 2, n),
    "diffusion": lambda n: cp.spans.block_diffusion(n // 2, n // 128),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", default="64K", help="global sequence lengths")
    parser.add_argument("--heads", default="32:8", help="query heads : KV heads")
    parser.add_argument("--head-dim", default="128")
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--algos", default="zigzag,distflash,allgather,ulysses")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--iters", default="7")
    parser.add_argument("--warmup", default="2")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return parser.parse_args(argv)


def measure(bench: Bench, tokens: int, heads: str, mask: str) -> list[Row]:
    """All rows of one mask; the limit is the first."""
    if mask not in MASKS:
        raise ConfigError(f"unknown mask {mask!r}: use {', '.join(MASKS)}")
    if tokens % 256:
        raise ConfigError(f"--tokens must be divisible by 256, got {tokens}: use 64K")
    n_heads, kv_heads = map(int, heads.split(":"))
    bench.problem(tokens, n_heads, kv_heads, None)
    spans = MASKS[mask](tokens)
    part = visible_pairs(tokens, Mask.of(Slices.of(spans, tokens))) / visible_pairs(tokens, Mask())
    shape = torch.device(bench.device), bench.whole[0].dtype, n_heads, kv_heads
    kernel = resolve(bench.args.kernel, Problem(*shape, bench.args.head_dim[0]))
    blank = Row(tokens, heads, mask, "")
    limit = bench.limit(blank, kernel)
    limit = Row(
        tokens,
        heads,
        mask,
        f"{part:.3f} of causal {kernel.name} / {bench.size}",
        limit.forward_ms * part,
        limit.step_ms * part,
        1.0,
    )
    bench.reference = alone(bench, spans)
    rows = [limit]
    for algo in bench.args.algos.split(","):
        attention = partial(cp.attention, algo=algo, kernel=bench.args.kernel, spans=spans)
        found = bench.contender(Row(tokens, heads, mask, algo), attention, layout_of(algo, {}))
        share = limit.step_ms / found.step_ms if found.error <= MAX_ERROR else 0.0
        rows.append(Row(**{**vars(found), "share_of_limit": share}))
        cp.release()
    return rows


def alone(bench: Bench, spans: list[Slice]) -> list[Tensor]:
    """Output and gradients of one rank that has all tokens."""
    q, k, v = (x.requires_grad_() for x in bench.whole[:3])
    group = VirtualWorld(1).topology(0)
    out = cp.attention(q, k, v, algo="ring", group=group, kernel=bench.args.kernel, spans=spans)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), bench.whole[3])]
    bench.whole = [x.detach() for x in bench.whole]
    return found


def main() -> None:
    """Runs on every rank under torchrun."""
    args = parse()
    if args.device == "cuda":
        take_gpu("add --device cpu")
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo", timeout=timedelta(minutes=3)
    )
    words = f"--device {args.device} --head-dim {args.head_dim} --kernel {args.kernel} "
    words += f"--algos {args.algos} --rivals none --iters {args.iters} --warmup {args.warmup}"
    bench = Bench(benchmark_attention.parse(words.split()))
    for heads in args.heads.split(","):
        for tokens in args.tokens.split(","):
            for mask in args.masks.split(","):
                for row in measure(bench, tokens_of(tokens), heads, mask):
                    if bench.rank == 0:
                        print(json.dumps(vars(row)), flush=True)
    dist.destroy_process_group()
    cp.release()


if __name__ == "__main__":
    with one_line_errors("benchmark_spans: error"):
        main()
