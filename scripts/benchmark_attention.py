"""Times every algorithm, every installed rival and the limit on the same tensors in one run.

    torchrun --nproc-per-node 4 scripts/benchmark_attention.py --tokens 32K,128K --heads 32:32,32:8

The limit is the best single-GPU kernel's time for the whole sequence, divided by the number of
ranks. A time is printed only if output and gradients agree with that kernel's. `--net sockets`
sends everything through TCP sockets of one host: a stand-in for a slow network, labelled so.

    torchrun --nproc-per-node 2 scripts/benchmark_attention.py --tokens 128K --heads 32:8 \
        --documents 16K,2K,lognormal:4K:1.5,configs/lengths/long_tail.csv \
        --algos zigzag,zigzag:layout=documents,zigzag:layout=thd,distflash,ulysses,allgather

packs documents of random lengths into each sequence. All of them are multiples of twice the number
of ranks, as the layout thd and Transformer Engine's THD form need them, so that all contenders get
the same documents; the limit is one call with all of them.

BurstAttention's ablations, on two GPUs: which tensors go round in the backward, for each layout and
ratio of heads, and a kernel without blocks ("w/o LAO"), with batches of 1 to 8 sequences:

    torchrun --nproc-per-node 2 scripts/benchmark_attention.py --tokens 32K,128K --rivals none \
        --heads 32:32,32:8,32:4 --algos \
        ring:backward=kv,ring:backward=query,zigzag:backward=kv,zigzag:backward=query,usp,distflash
    torchrun --nproc-per-node 2 scripts/benchmark_attention.py --tokens 4K,8K,16K --heads 32:32 \
        --rivals none --algos ring:kernel=reference,ring,zigzag:kernel=reference,zigzag --batch 1
"""

import argparse
import gc
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import rivals
import timing
import torch
import torch.distributed as dist
from profiles import computing, device_spans, gaps, longest, new_profiler
from reports import report
from specs import algo_of, head_dims_of
from timing import take_gpu
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.communication.devices import capture
from megatron_cp_plugin.core.communication.process_groups import topology_of
from megatron_cp_plugin.core.document_layout import PaddedDocuments
from megatron_cp_plugin.core.kernel import KernelCall, Packing, Problem, SoftmaxKernel, Statistics
from megatron_cp_plugin.core.layout import Layout, shard
from megatron_cp_plugin.document_lengths import Lengths, lengths_of, random_documents
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.kernels import kernel_names, resolve
from megatron_cp_plugin.process_exit import one_line_errors
from megatron_cp_plugin.registry import layout_of
from megatron_cp_plugin.terminal import check_folder, tokens_of

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
MAX_ERROR = 2e-2  # |x - limit's| / |limit's| of a bfloat16 output or gradient


@dataclass(frozen=True)
class Row:
    """One contender on one problem. Times in ms: medians of a rank, maximum over ranks.

    Attributes: documents: their lengths as the command line has them; empty without any.
        captured_forward_ms, captured_step_ms: of replays of CUDA graphs.
    """

    tokens: int
    heads: str
    documents: str
    name: str
    forward_ms: float = 0.0
    step_ms: float = 0.0
    share_of_limit: float = 0.0
    captured_forward_ms: float = 0.0
    captured_step_ms: float = 0.0
    captured_share: float = 0.0
    peak_gib: float = 0.0
    sent_mib: float = 0.0
    error: float = 0.0
    note: str = ""
    captured_note: str = ""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", default="32K,64K,128K", help="global sequence lengths")
    parser.add_argument("--heads", default="32:32,32:8", help="query heads : KV heads")
    parser.add_argument(
        "--head-dim",
        type=head_dims_of,
        default=(128, 128),
        metavar="DIM[:DIM]",
        help="192:128: values of another one, as in multi-latent attention",
    )
    parser.add_argument(
        "--algos",
        default="all",
        help="names, each with options: zigzag:backward=kv:gradients=model,ring:kernel=reference",
    )
    parser.add_argument("--rivals", default="installed", help="installed, none, or names")
    parser.add_argument("--batch", type=int, default=1, help="sequences at a time; no rivals but 1")
    parser.add_argument("--kernel", default="auto", help="kernel of our algorithms")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument(
        "--documents",
        type=documents_of,
        default=[("", None)],
        metavar="LENGTHS",
        help="causal within packed documents of random lengths: 16K is the mean of an exponential "
        "distribution, lognormal:MEAN:SIGMA another one, FILE.csv or FILE.json a histogram of "
        "upper edges and shares; several, with commas between them, one after another",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the lengths of documents")
    parser.add_argument("--graphs", action="store_true", help="captured in CUDA graphs as well")
    parser.add_argument("--iters", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--net", choices=["default", "sockets"], default="default")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", type=Path, default=Path("results/attention"))
    parser.add_argument("--profile", help="contender whose second step is traced")
    args = parser.parse_args(argv)
    if args.graphs and args.device != "cuda":
        parser.error("--graphs needs --device cuda")
    args.packed = args.documents[0][1] is not None
    if args.packed and args.full:
        parser.error("--documents are causal: leave --full out")
    if args.batch < 1 or (args.packed and args.batch > 1):
        parser.error(f"--batch must be 1 or more, and 1 with --documents, got {args.batch}")
    if args.batch > 1:
        args.rivals = "none"
    return args


def documents_of(text: str) -> list[tuple[str, Lengths | None]]:
    """Distributions of lengths, each with its words. Raises: ArgumentTypeError as `lengths_of`."""
    return [(word, lengths_of(word)) for word in text.split(",")]


class Bench:
    """One process group, and the tensors of one problem at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.causal = not args.full
        self.cuda = args.device == "cuda"
        names = rivals.PACKED if args.packed else rivals.NAMES
        self.rivals = rivals.installed(names) if self.cuda and args.rivals != "none" else ()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu")
        if self.cuda:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def problem(self, tokens: int, heads: int, kv_heads: int, lengths: Lengths | None) -> None:
        """Draws the whole q, k, v and dout, and documents, the same on every rank.

        Raises: ConfigError if tokens with documents are no multiple of twice the number of ranks.
        """
        generator = torch.Generator(self.device).manual_seed(0)
        dtype = torch.bfloat16 if self.cuda else torch.float32
        dim, value_dim = self.args.head_dim
        batch = self.args.batch
        shapes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim)
        self.whole: list[Tensor] = [
            torch.randn(batch, tokens, *shape, generator=generator, device=self.device, dtype=dtype)
            for shape in shapes
        ]
        self.reference: list[Tensor] = []
        self.cu_seqlens: tuple[int, ...] | None = None
        self.documents: tuple[int, ...] = ()
        if lengths is not None:
            multiple = 2 * self.size
            if tokens % multiple:
                raise ConfigError(
                    f"--documents needs --tokens divisible by twice the {self.size} ranks, got "
                    f"{tokens}: use {tokens // multiple * multiple + multiple}"
                )
            self.documents = random_documents(
                tokens, lengths, multiple=multiple, seed=self.args.seed
            )
            self.cu_seqlens = (0, *self.documents, tokens)

    def time_ms(self, body: Callable[[], object]) -> float:
        """See timing.time_ms."""
        warmup, iters = self.args.warmup, self.args.iters
        return timing.time_ms(body, self.device, warmup=warmup, iters=iters)

    def align(self) -> None:
        """See timing.align."""
        timing.align(self.device)

    def maximum(self, value: float) -> float:
        """See timing.maximum."""
        return timing.maximum(value, self.device)

    def limit(self, row: Row, kernel: SoftmaxKernel) -> Row:
        """One GPU's kernel on the whole sequence; its result is what others are held against."""
        q, k, v, dout = self.whole
        scale = self.args.head_dim[0] ** -0.5

        call = KernelCall(q, k, v, scale, self.causal)
        if self.cu_seqlens:
            packing = Packing.adjacent(self.cu_seqlens, self.cu_seqlens)
            call = KernelCall(q, k, v, scale, causal=True, packing=packing)

        def forward() -> tuple[Tensor, Tensor]:
            return kernel.forward(call)

        out, lse = forward()

        def backward() -> tuple[Tensor, ...]:
            return kernel.backward(call, dout, Statistics(lse, out=out))

        if not self.reference:
            self.reference = [out, *backward()]
        forward_ms = self.time_ms(forward)
        step_ms = forward_ms + self.time_ms(backward)
        row = replace(row, forward_ms=forward_ms / self.size, step_ms=step_ms / self.size)
        if self.args.graphs:
            captured_forward, captured_backward = map(self.captured_ms, (forward, backward))
            step_ms = captured_forward + captured_backward
            row = replace(
                row,
                captured_forward_ms=captured_forward / self.size,
                captured_step_ms=step_ms / self.size,
            )
        return row

    def captured_ms(
        self, body: Callable[[], object], check: Callable[[Any], None] = lambda _: None
    ) -> float:
        """Median time of a replay of a call that is captured in a CUDA graph; as `time_ms`.

        Args: check: is given the results of one replay.
        """
        graph, results = capture(body, self.align)
        self.align()
        graph.replay()
        torch.cuda.synchronize()
        check(results)
        elapsed = self.time_ms(graph.replay)
        graph.reset()
        return elapsed

    def contender(self, row: Row, attention: Attention, layout: Layout) -> Row:
        """Checks and times an attention over local shards."""
        mine = [shard(x, 1, layout, self.rank, self.size) for x in self.whole]
        q, k, v = (x.requires_grad_() for x in mine[:3])

        def step() -> tuple[Tensor, ...]:
            out = attention(q, k, v)
            return (out.detach(), *torch.autograd.grad(out, (q, k, v), mine[3]))

        def forward() -> None:
            with torch.no_grad():
                attention(q, k, v)

        with cp.record_communication() as log:
            result = step()
        error = self.maximum(max(self.errors(result, layout)))
        row = replace(row, error=error, sent_mib=self.maximum(log.bytes()) / 2**20)
        del result
        if not error <= MAX_ERROR:
            return replace(row, note=f"WRONG RESULT (error {error:.1e})")
        peak = self.peak_gib(step)
        row = replace(
            row, peak_gib=peak, forward_ms=self.time_ms(forward), step_ms=self.time_ms(step)
        )
        if self.args.profile == row.name:
            self.trace(step, row)
        return self.captured(row, step, forward, layout) if self.args.graphs else row

    def captured(
        self,
        row: Row,
        step: Callable[[], tuple[Tensor, ...]],
        forward: Callable[[], None],
        layout: Layout,
    ) -> Row:
        """The same in CUDA graphs, if it can be."""
        errors: list[float] = []

        def check(results: tuple[Tensor, ...]) -> None:
            errors.append(self.maximum(max(self.errors(results, layout))))

        try:
            step_ms = self.captured_ms(step, check)
            row = replace(row, captured_forward_ms=self.captured_ms(forward))
        except (ContextParallelError, RuntimeError) as error:
            reason = str(error).splitlines()[0][:70]
            return replace(row, captured_note=f"{type(error).__name__}: {reason}")
        if not errors[0] <= MAX_ERROR:
            return replace(row, captured_note=f"WRONG RESULT (error {errors[0]:.1e})")
        return replace(row, captured_step_ms=step_ms)

    def errors(self, result: Sequence[Tensor], layout: Layout) -> list[float]:
        """Relative errors of this rank's out, dq, dk, dv; inf for NaN."""
        errors = []
        for got, whole in zip(result, self.reference, strict=True):
            want = shard(whole, 1, layout, self.rank, self.size).float()
            error = ((got.float() - want).norm() / want.norm()).item()
            errors.append(error if error == error else float("inf"))
        return errors

    def peak_gib(self, body: Callable[[], object]) -> float:
        """Memory that a call needs above what is held before it."""
        if not self.cuda:
            return 0.0
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        body()
        torch.cuda.synchronize()
        held = topology_of(None).peer_bytes  # receive buffers that torch does not count
        return self.maximum((torch.cuda.max_memory_allocated() - before + held) / 2**30)

    def trace(self, step: Callable[[], object], row: Row) -> None:
        """Writes a profiler trace of one step of rank 0, and the time that kernels overlap."""
        self.align()
        with new_profiler() as profiler:
            step()
            torch.cuda.synchronize()
        if self.rank == 0:
            self.args.output.mkdir(parents=True, exist_ok=True)
            safe = row.name.replace(":", "_").replace("=", "_")
            spans = device_spans(profiler.events())
            lines = [*longest(spans), *gaps(spans)]
            (self.args.output / f"profile_{safe}.txt").write_text("\n".join(lines) + "\n")
            busy, total = computing(spans)
            (self.args.output / f"timeline_{safe}.json").write_text(
                json.dumps({"computing_us": busy, "total_us": total, "spans": spans})
            )
            print(
                f"{row.name}, {row.tokens} tokens, {row.heads}: of a profiled step of "
                f"{total / 1000:.2f} ms rank 0 computes in {busy / 1000:.2f} ms; exposed "
                f"communication and launches {1 - busy / total:.2%}",
                flush=True,
            )


def ours(spec: str, bench: Bench) -> tuple[Attention, Layout]:
    """One of our algorithms from `name:option=value:option=value`; its kernel, from `kernel=`."""
    name, options = algo_of(spec)
    kernel = options.pop("kernel", bench.args.kernel)

    # As the layers of a model, which share the context of a batch.
    seq_len, documents = bench.whole[0].shape[1], bench.cu_seqlens
    context = cp.Context(algo=name, seq_len=seq_len, cu_seqlens=documents, **options)
    attention = partial(context.attention, causal=bench.causal, kernel=kernel)
    return attention, layout_of(name, options).for_documents(bench.documents)


def theirs(name: str, bench: Bench, heads: int, kv_heads: int) -> tuple[Attention, Layout]:
    """A rival's attention."""
    attention = rivals.make(
        name, heads, kv_heads, bench.args.head_dim, bench.causal, bench.cu_seqlens
    )
    return attention, PaddedDocuments().for_documents(bench.documents)


def measure(
    bench: Bench, tokens: int, heads: str, documents: str, lengths: Lengths | None
) -> list[Row]:
    """All rows of one problem. Args: documents: the words for `lengths`."""
    args = bench.args
    n_heads, kv_heads = map(int, heads.split(":"))
    bench.problem(tokens, n_heads, kv_heads, lengths)
    dtype = bench.whole[0].dtype
    device = torch.device(bench.device)
    packed = lengths is not None
    blank = Row(tokens, heads, documents, "")
    dim, value_dim = args.head_dim
    shape = device, dtype, n_heads, kv_heads, dim
    problem = Problem(*shape, documents=packed, value_dim=value_dim)
    best = resolve("auto", problem)
    if packed and not best.packs:  # on a CPU
        best = resolve("reference", problem)
    others = [
        resolve(name, problem)
        for name in (("cudnn",) if bench.cuda and not packed else ())
        if name in kernel_names() and name != best.name
    ]
    rows = [
        bench.limit(replace(blank, name=f"one GPU / {bench.size}: {kernel.name}"), kernel)
        for kernel in (best, *others)
    ]
    limit = min(row.step_ms for row in rows)
    captured_limit = min(row.captured_step_ms for row in rows)
    if bench.rank == 0:
        print(*(json.dumps(asdict(row)) for row in rows), sep="\n", flush=True)
    algos = cp.available("softmax") if args.algos == "all" else args.algos.split(",")
    if args.rivals == "installed":
        names: Sequence[str] = bench.rivals
    else:
        names = [] if args.rivals == "none" else args.rivals.split(",")
    makers: list[tuple[str, Callable[[], tuple[Attention, Layout]]]] = []
    makers += [(spec, partial(ours, spec, bench)) for spec in algos]
    makers += [(name, partial(theirs, name, bench, n_heads, kv_heads)) for name in names]
    for name, make in makers:
        row = replace(blank, name=name)
        cp.release()
        try:
            attention, layout = make()
            row = bench.contender(row, attention, layout)
        except (ContextParallelError, AssertionError, ImportError) as error:
            row = replace(row, note=f"{type(error).__name__}: {str(error).splitlines()[0][:90]}")
        rows.append(row)
        if bench.rank == 0:
            print(json.dumps(asdict(row)), flush=True)
        gc.collect()
        if bench.cuda:
            torch.cuda.empty_cache()
    for index, row in enumerate(rows):
        share = limit / row.step_ms if row.step_ms else 0.0
        captured = captured_limit / row.captured_step_ms if row.captured_step_ms else 0.0
        rows[index] = replace(row, share_of_limit=share, captured_share=captured)
    return rows


def cells(row: Row, *, graphs: bool) -> list[str]:
    """A row as text; no number for what is not right."""
    start = [f"{row.tokens // 1024}K" if row.tokens >= 1024 else str(row.tokens), row.heads]
    if row.documents:
        start.append(row.documents.rpartition("/")[2])
    captured = []
    if graphs:
        captured = [f"{row.captured_step_ms:.2f}", f"{row.captured_share:.3f}"]
        if not row.captured_step_ms:
            captured = [row.captured_note, ""]
    if row.note:
        return [*start, row.name, row.note, "", "", "", "", "", *captured]
    return [
        *start,
        row.name,
        f"{row.forward_ms:.2f}",
        f"{row.step_ms:.2f}",
        f"{row.share_of_limit:.3f}",
        f"{row.peak_gib:.2f}",
        f"{row.sent_mib:.0f}",
        f"{row.error:.1e}",
        *captured,
    ]


HEADER = [
    "tokens",
    "heads",
    "algorithm",
    "forward ms",
    "fwd+bwd ms",
    "of limit",
    "peak GiB",
    "sent MiB",
    "error",
]
CAPTURED = ["captured fwd+bwd ms", "of captured limit"]


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Machine and versions."""
    found = {"torch": str(torch.__version__)}
    if args.device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with suppress(RuntimeError):  # Transformer Engine may have loaded another release
            found["cudnn"] = str(torch.backends.cudnn.version())
    for package in ("flash-attn-4", "transformer-engine", "ring-flash-attn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Runs on every rank under torchrun."""
    args = parse()
    if args.net == "sockets":
        os.environ.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
    check_folder("--output", args.output)
    if args.device == "cuda":
        take_gpu("add --device cpu")
    timing.join(args.device)
    bench = Bench(args)
    network = "TCP sockets of one host, emulating a slow network" if args.net == "sockets" else ""
    rows: list[Row] = []
    for heads in args.heads.split(","):
        for tokens in args.tokens.split(","):
            for documents, lengths in args.documents:
                rows += measure(bench, tokens_of(tokens), heads, documents, lengths)
    if bench.rank == 0:
        found = environment(args)
        mask = "causal" if bench.causal else "full"
        if args.packed:
            drawn = "; ".join(f"{word}: {lengths.label}" for word, lengths in args.documents)
            mask += (
                f" within documents ({drawn}; seed {args.seed}), all of lengths that are multiples "
                f"of {2 * bench.size}"
            )
        dims = " and ".join(map(str, dict.fromkeys(args.head_dim)))
        title = (
            f"attention, {mask}, batch {args.batch}, head dim {dims}, {bench.size} x "
            f"{found.get('gpu', 'CPU')}{', ' + network if network else ''}"
        )
        args.output.mkdir(parents=True, exist_ok=True)
        graphs = any(row.captured_step_ms for row in rows)
        header = HEADER + CAPTURED if graphs else HEADER
        if args.packed:
            header = [*header[:2], "documents", *header[2:]]
        about = {"environment": found}
        report(rows, header, partial(cells, graphs=graphs), title, args.output, about)
    dist.destroy_process_group()
    cp.release()


if __name__ == "__main__":
    with one_line_errors("benchmark_attention: error"):
        main()
