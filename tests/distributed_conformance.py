"""Conformance over real processes: every algorithm against float64, beside one device's kernel.

    torchrun --nproc-per-node 4 tests/distributed_conformance.py [--device cpu] [--kernels a,b]
        [--captured] [--one-gpu 4]

The error of each algorithm may be at most twice that of the same kernel on the whole sequence.
Prints a table; exits 1 if a bound is broken.
"""

import argparse
import sys
from datetime import timedelta
from pathlib import Path
from random import Random
from sys import path

path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.communication.devices import capture
from megatron_cp_plugin.core.communication.process_groups import topology_of
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.kernel import Problem, Statistics
from megatron_cp_plugin.core.layout import shard
from megatron_cp_plugin.errors import ConfigError, KernelUnavailableError
from megatron_cp_plugin.kernels import resolve
from megatron_cp_plugin.process_exit import one_line_errors
from scripts.timing import take_gpu
from tests.kernel_calls import backward_of, forward_of
from tests.oracle import Expected, expected_attention
from tests.peer_world import share_gpu
from tests.span_masks import dense, random_spans
from tests.test_conformance import Case, few_cases, layout_for

NAMES = ("out", "dq", "dk", "dv")


def settings_of(heads, tokens, device):
    """What is computed: arguments of `cp.attention` by name."""
    return {
        "causal": {"causal": True},
        "full": {"causal": False},
        "window": {"causal": True, "window": tokens // 3},
        "documents": {"causal": True, "cu_seqlens": (0, 5, tokens // 3, tokens - 7, tokens)},
        "sinks": {"causal": True, "sink": torch.linspace(-1, 4, heads, device=device)},
        "spans": {"spans": random_spans(Random(0), tokens)},
    }


def oracles_settings(setting, tokens, device):
    """The same as arguments of `expected_attention`."""
    if "spans" not in setting:
        return setting
    return {"causal": False, "seen": dense(setting["spans"], tokens).to(device) > 0}


def own_errors(kernel_name, expected: Expected, device, setting):
    """Errors of the kernel on the whole sequence; other masks and sinks as one rank has them."""
    q, k, v, dout = (x.to(device) for x in (expected.q, expected.k, expected.v, expected.dout))
    if setting.keys() == {"causal"}:
        shape = device, q.dtype, q.shape[2], k.shape[2], q.shape[3]
        problem = Problem(*shape, value_dim=v.shape[3])
        kernel, scale = resolve(kernel_name, problem), q.shape[3] ** -0.5
        out, lse = forward_of(kernel, q, k, v, scale=scale, **setting)
        statistics = Statistics(lse, out=out)
        gradients = backward_of(kernel, dout, q, k, v, statistics, scale=scale, **setting)
    else:
        alone, leaves = (
            VirtualWorld(1).topology(0),
            [x.detach().requires_grad_() for x in (q, k, v)],
        )
        out = cp.attention(*leaves, algo="ring", group=alone, kernel=kernel_name, **setting)
        gradients = torch.autograd.grad(out, leaves, dout)
    return [
        (got.double() - getattr(expected, name).to(device)).norm().item()
        for name, got in zip(NAMES, (out.detach(), *gradients), strict=True)
    ]


def split_errors(case, kernel_name, expected: Expected, device, setting, captured=False):
    """The same of the algorithm: squared errors summed over ranks.

    captured: of a step that was captured in a CUDA graph and replayed.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    options = dict(case.options, kernel=kernel_name, seq_len=expected.q.shape[1])
    bounds = setting.get("cu_seqlens")
    bounds = None if bounds is None else torch.tensor(bounds)
    layout = layout_for(case, expected, bounds, setting.get("spans"))

    def local(x):
        return shard(x.to(device), 1, layout, rank, size)

    q, k, v = (local(x).requires_grad_() for x in (expected.q, expected.k, expected.v))
    dout = local(expected.dout)

    def step():
        out = cp.attention(q, k, v, algo=case.algo, **setting, **options)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))

    got = replayed(step) if captured else step()
    squares = torch.stack(
        [
            (x.double() - local(getattr(expected, name))).square().sum()
            for name, x in zip(NAMES, got, strict=True)
        ]
    )
    dist.all_reduce(squares)
    return squares.sqrt().tolist()


def replayed(step):
    """Results of a step that was captured in a CUDA graph and run again from it."""

    def meet():
        torch.cuda.synchronize()
        dist.barrier()

    graph, got = capture(step, meet)
    for x in got:
        x.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    results = [x.clone() for x in got]
    graph.reset()
    return results


def real_cases(size):
    """The first ones of the virtual suite; some also over the process group, beside peer access."""
    for case in few_cases(size):
        yield case
        both = case.algo in ("zigzag", "allgather", "attention2d")
        if both and topology_of(None).peer_access:
            yield Case(case.algo, (*case.options, ("transport", "group")))
    for algo in ("zigzag", "allgather"):
        yield Case(algo, (("layout", "documents"),))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", default="cudnn,torch_flash,flash4")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--value-dim", type=int, help="of v and out; default: --head-dim")
    parser.add_argument("--captured", action="store_true", help="steps captured in CUDA graphs")
    parser.add_argument("--one-gpu", type=int, metavar="N", help="N ranks a node, all on one GPU")
    args = parser.parse_args()
    if args.one_gpu:
        share_gpu(args.one_gpu)
    cuda = args.device == "cuda"
    device = take_gpu("add --device cpu --kernels auto") if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=2))
    rank, size = dist.get_rank(), dist.get_world_size()
    broken = ran = 0
    worst = 0.0
    for kernel_name in args.kernels.split(","):
        for heads, kv_heads in ((8, 8), (8, 2)):
            for mask, setting in settings_of(heads, args.tokens, device).items():
                expected = expected_attention(
                    seq_len=args.tokens,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=args.head_dim,
                    value_dim=args.value_dim,
                    **oracles_settings(setting, args.tokens, device),
                    dtype=torch.bfloat16 if cuda else torch.float32,
                    device=device,
                )
                try:
                    own = own_errors(kernel_name, expected, device, setting)
                except KernelUnavailableError as error:
                    if rank == 0:
                        print(f"SKIPPED {error}")
                    continue
                for case in real_cases(size):
                    try:
                        errors = split_errors(
                            case, kernel_name, expected, device, setting, args.captured
                        )
                    except ConfigError as error:
                        if rank == 0:
                            print(f"REFUSED {case}: {error}")
                        continue
                    ratios = [got / max(base, 1e-12) for got, base in zip(errors, own, strict=True)]
                    ran += 1
                    worst = max(worst, *ratios)
                    bad = not all(ratio <= 2.0 for ratio in ratios)
                    broken += bad
                    if rank == 0:
                        text = " ".join(f"{n} {r:.2f}" for n, r in zip(NAMES, ratios, strict=True))
                        verdict = "BROKEN" if bad else "ok"
                        print(
                            f"{verdict} {case} P={size} {kernel_name} {heads}:{kv_heads} {mask}: "
                            f"error / own error: {text}",
                            flush=True,
                        )
    if rank == 0:
        print(f"{ran - broken} passed, {broken} failed, worst ratio {worst:.2f} (bound 2)")
    dist.destroy_process_group()
    cp.release()
    return 1 if broken or not ran else 0


if __name__ == "__main__":
    with one_line_errors("distributed_conformance: error"):
        sys.exit(main())
