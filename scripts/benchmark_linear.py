"""Times the algorithms of linear attention against fla's kernel on one GPU.

    torchrun --nproc-per-node 4 scripts/benchmark_linear.py --tokens 128K,512K,2M
    torchrun --nproc-per-node 1 scripts/benchmark_linear.py --tokens 64K --documents 128,2K,16K
    torchrun --nproc-per-node 1 scripts/benchmark_linear.py --family kda --heads 32 \
        --tokens 16K,64K --algos alone,lasp2:ranks=8,lasp2:ranks=64

The limit is fla's own `chunk_simple_gla` on the tokens of one rank, which has nothing to
communicate. A time is printed only if output and gradients agree with fla's on the whole sequence.
`--documents` packs documents of random lengths into it, the same for all contenders; the limit and
`alone` have the first rank's.
With `--family` there are gates, of heads or of channels, and the delta rule; the limit is fla's
function of that name. `ranks=P` after an algorithm is a rank in the middle of P by itself: its
messages go nowhere, and buffers of received ones stay as they are, so that there is no error; `sent
MiB` are to be added at the speed of a network.
`--net sockets` sends everything through TCP sockets of one host: a stand-in for a slow network.
"""

import argparse
import gc
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

import timing
import torch
import torch.distributed as dist
from benchmark_rank import RankAlone
from reports import report
from specs import algo_of
from timing import join, take_gpu
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Communicator, Pending, Receive, Send, Topology
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.layout import Contiguous, Layout, shard
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.kernels.fla_gated import refuses_gates_of_heads
from megatron_cp_plugin.process_exit import one_line_errors
from megatron_cp_plugin.registry import layout_of
from megatron_cp_plugin.terminal import check_folder, tokens_of

Attention = Callable[..., Tensor]
Bounds = tuple[int, ...] | None  # cumulative lengths of documents; None: there are none
CHECKED_TOKENS = 32768
MAX_ERROR = 1e-2  # |x - fla's| / |fla's| of a bfloat16 output or gradient
MAX_ERROR_OF_GATES = 3e-2
# Which gates a family has, whether it is the delta rule, and fla's module and function.
FAMILIES = {
    "rates": (None, False, "simple_gla.chunk_simple_gla"),
    "simple_gla": ("heads", False, "simple_gla.chunk_simple_gla"),
    "gla": ("channels", False, "gla.chunk_gla"),
    "gated_delta_net": ("heads", True, "gated_delta_rule.chunk_gated_delta_rule"),
    "kda": ("channels", True, "kda.chunk_kda"),
}


@dataclass(frozen=True)
class Row:
    """One contender on one length. Times in ms: the slowest rank's.

    Attributes: documents: their mean length as the command line has it; empty without any.
    """

    tokens: int
    documents: str
    name: str
    forward_ms: float
    step_ms: float
    forward_share: float
    step_share: float
    peak_gib: float
    sent_mib: float
    error: float


class _Echo(Communicator):
    """What others send is in memory already: here no copy takes time, and values mean nothing."""

    def _exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Pending[None]:
        return Pending(lambda: None)

    def _all_gather(self, x: Tensor) -> Pending[Tensor]:
        found = x.new_empty((self.size, *x.shape))
        return Pending(lambda: found)

    def _reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        raise NotImplementedError

    def _all_to_all(self, tensors: Sequence[Tensor]) -> Pending[Sequence[Tensor]]:
        found = [torch.empty_like(x) for x in tensors]
        return Pending(lambda: found)


class _Echoing(RankAlone):
    """A rank without others."""

    def channel(self, name: str) -> Communicator:
        return self._channels.setdefault(name, _Echo(name, self.rank, self.size, self.rank))

    def _make_subgroup(self, ranks: tuple[int, ...], name: str) -> Topology:
        return VirtualWorld(1).topology(0) if len(ranks) == 1 else _Echoing(0, [0] * len(ranks))


class Bench:
    """One process group and the shape of one problem."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.rates = rates(args.decay, args.heads)
        self.gates, self.delta, _ = FAMILIES[args.family]

    def draw(self, tokens: int) -> list[Tensor]:
        """q, k, v [1,tokens,H,D], gates and beta if any, and dout, the same on every rank."""
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (1, tokens, self.args.heads, self.args.head_dim)
        scales = (self.args.head_dim**-0.5, self.args.head_dim**-0.5, 1.0, 1.0)
        q, k, v, dout = (
            torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) * scale
            for scale in scales
        )
        others = []
        if self.gates is not None:
            of_gates = shape if self.gates == "channels" else shape[:3]
            drawn = torch.randn(of_gates, generator=generator, device="cuda")
            others.append(torch.nn.functional.logsigmoid(drawn) / 16)
        if self.delta:
            k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
            others.append(torch.randn(shape[:3], generator=generator, device="cuda").sigmoid())
        return [q, k, v, *others, dout]

    def documents_of(self, tokens: int, mean: int | None) -> Bounds:
        """Cumulative lengths of documents in `tokens` tokens; the same ones in fewer tokens."""
        return None if mean is None else (0, *random_documents(tokens, mean), tokens)

    def fla(self, bounds: Bounds) -> Attention:
        """fla's public function, as anyone would call it: of channels where fla refuses its own."""
        widened = self.gates == "heads" and refuses_gates_of_heads()
        family = ("kda" if self.delta else "gla") if widened else self.args.family
        module, name = FAMILIES[family][2].split(".")
        function = getattr(import_module(f"fla.ops.{module}"), name)
        decays = torch.tensor([log(rate) for rate in self.rates], device="cuda")
        on_host = None if bounds is None else torch.tensor(bounds)
        settings = {
            "cu_seqlens": None if on_host is None else on_host.to("cuda"),
            "cu_seqlens_cpu": on_host,
        }

        def attention(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
            gates = dict(zip(("g", "beta"), others, strict=False)) or {"g_gamma": decays}
            if widened:
                gates["g"] = gates["g"].unsqueeze(3).expand(*k.shape).contiguous()
            out: Tensor = function(q, k, v, **gates, scale=1.0, **settings)[0]
            return out

        return attention

    def ours(self, spec: str, bounds: Bounds) -> tuple[Attention, Layout]:
        """One of our algorithms from `name:option=value`; `alone` is lasp on one rank."""
        name, options = algo_of(spec)
        group: Topology | None = None
        if name == "alone":
            name, group = "lasp", VirtualWorld(1).topology(0)
        if ranks := int(options.pop("ranks", 0)):
            group = _Echoing(ranks // 2, [0] * ranks)

        def attention(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
            gates: dict[str, Any] = dict(zip(("gate", "beta"), others, strict=False))
            out = cp.linear_attention(
                q,
                k,
                v,
                **(gates or {"decay": self.rates}),
                seq_len=q.shape[1] * ranks if ranks else None,
                algo=name,
                group=group,
                kernel="fla",
                cu_seqlens=bounds,
                **options,
            )
            assert isinstance(out, Tensor)
            return out

        return attention, layout_of(name, options)

    def contender(self, spec: str, bounds: Bounds) -> tuple[Attention, Layout]:
        """What a row is about."""
        return (self.fla(bounds), Contiguous()) if spec == "fla" else self.ours(spec, bounds)

    def error(self, spec: str, mean: int | None, size: int) -> float:
        """Largest relative error of out, dq, dk, dv on a short sequence."""
        whole, bounds = self.draw(CHECKED_TOKENS), self.documents_of(CHECKED_TOKENS, mean)
        want = results(self.fla(bounds), whole)
        attention, layout = self.contender(spec, bounds)
        rank = self.rank if size > 1 else 0
        got = results(attention, [shard(x, 1, layout, rank, size) for x in whole])
        errors = [
            ((x.float() - shard(y, 1, layout, rank, size).float()).norm() / y.float().norm()).item()
            * size**0.5
            for x, y in zip(got, want, strict=True)
        ]
        return self.maximum(max(e if e == e else float("inf") for e in errors))

    def time_ms(self, body: Callable[[], object]) -> float:
        """Mean time of calls one after another, as layers of a model; the maximum over ranks."""
        for _ in range(self.args.warmup):
            body()
        times = []
        for _ in range(3):
            dist.all_reduce(torch.zeros(1, device="cuda"))
            torch.cuda.synchronize()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            start.record()
            for _ in range(self.args.iters):
                body()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop) / self.args.iters)
        return self.maximum(statistics.median(times))

    def maximum(self, value: float) -> float:
        """The greatest value of any rank."""
        return timing.maximum(value, torch.device("cuda"))

    def measure(self, tokens: int, documents: str, spec: str, limit: Row | None) -> Row:
        """One row; its shares are those of the limit. Args: documents: as of `Row`."""
        mean = tokens_of(documents) if documents else None
        ranks = int(spec.partition("ranks=")[2].partition(":")[0] or 0)
        spread = spec not in ("fla", "alone")
        error = 0.0 if ranks else self.error(spec, mean, self.size if spread else 1)
        if not error <= (MAX_ERROR if self.gates is None else MAX_ERROR_OF_GATES):
            raise SystemExit(f"{spec}: wrong result, error {error:.1e}")
        whole = tokens * max(ranks, 1) if spread else tokens // self.size
        attention, _ = self.contender(spec, self.documents_of(whole, mean))
        local = self.draw(tokens // self.size)

        def forward() -> None:
            with torch.no_grad():
                attention(*local[:-1])

        def step() -> None:
            results(attention, local)

        with cp.record_communication() as traffic:
            step()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - held) / 2**30
        forward_ms, step_ms = self.time_ms(forward), self.time_ms(step)
        return Row(
            tokens,
            documents,
            "fla on one rank's tokens" if spec == "fla" else spec,
            forward_ms,
            step_ms,
            limit.forward_ms / forward_ms if limit else 1.0,
            limit.step_ms / step_ms if limit else 1.0,
            self.maximum(peak),
            self.maximum(traffic.bytes() / 2**20),
            error,
        )


def results(attention: Attention, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """out, dq, dk, dv, and gradients of gates and beta. Args: tensors: these, and dout."""
    inputs = [x.detach().requires_grad_() for x in tensors[:-1]]
    out = attention(*inputs)
    return (out.detach(), *torch.autograd.grad(out, inputs, tensors[-1]))


def rates(name: str, heads: int) -> list[float]:
    """plain: 1 for all heads; slopes: exp(-8 h / H) of TransNormerLLM's first layer."""
    return [1.0 if name == "plain" else exp(-8 * head / heads) for head in range(heads)]


HEADER = ["tokens", "documents", "algorithm", "forward ms", "of limit", "fwd+bwd ms", "of limit"]
HEADER += ["peak GiB", "sent MiB", "error"]


def cells(row: Row) -> list[str]:
    """A row as text."""
    return [
        f"{row.tokens // 1024}K",
        row.documents or "-",
        row.name,
        f"{row.forward_ms:.2f}",
        f"{row.forward_share:.3f}",
        f"{row.step_ms:.2f}",
        f"{row.step_share:.3f}",
        f"{row.peak_gib:.2f}",
        f"{row.sent_mib:.2f}",
        f"{row.error:.1e}",
    ]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", default="128K,512K,2M", help="global sequence lengths")
    parser.add_argument(
        "--documents",
        default="",
        metavar="MEANS",
        help="pack documents of random lengths with these means, one after another: 2K,16K",
    )
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--family", choices=FAMILIES, default="rates")
    parser.add_argument("--decay", choices=["plain", "slopes"], default="plain")
    parser.add_argument("--algos", default="alone,lasp,lasp2,lasp2:layout=zigzag,linear_ulysses")
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--net", choices=["default", "sockets"], default="default")
    parser.add_argument("--output", type=Path, default=Path("results/linear"))
    return parser.parse_args(argv)


def main() -> None:
    """Runs on every rank under torchrun."""
    args = parse()
    if args.net == "sockets":
        os.environ.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
    check_folder("--output", args.output)
    take_gpu("run it on a machine that has them")
    join("cuda")
    bench = Bench(args)
    rows: list[Row] = []
    problems = product(map(tokens_of, args.tokens.split(",")), args.documents.split(","))
    for tokens, documents in problems:
        limit = None
        for spec in ("fla", *args.algos.split(",")):
            rows.append(bench.measure(tokens, documents, spec, limit))
            limit = limit or rows[-1]
            if bench.rank == 0:
                print(json.dumps(asdict(rows[-1])), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    if bench.rank == 0:
        network = ", TCP sockets of one host" if args.net == "sockets" else ""
        title = (
            f"linear attention, {args.heads} heads of {args.head_dim}, "
            f"{f'decay {args.decay}' if args.family == 'rates' else args.family}, "
            f"{bench.size} x {torch.cuda.get_device_name()}{network}"
        )
        args.output.mkdir(parents=True, exist_ok=True)
        report(rows, HEADER, cells, title, args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_line_errors("benchmark_linear: error"):
        main()
