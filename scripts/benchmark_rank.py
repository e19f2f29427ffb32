"""Times one rank of many by itself on one GPU: all that limits it but the network.

    python scripts/benchmark_rank.py --ranks 8,64 --tokens 16K --heads 32:8 \
        --masks causal,documents:2K,window:4K --algos zigzag,distflash,ulysses,usp,allgather
    python scripts/benchmark_rank.py --ranks 8,64 --heads 128:latent \
        --algos zigzag,zigzag:send=latents
    python scripts/benchmark_rank.py --rows docs/data/ranks.csv

A rank runs its own program of a job of P ranks, forward and backward. Its messages go nowhere, and
blocks of others arrive at once: random numbers that a copy on another stream writes, because an
H200 computes up to 1.19 times as fast with zeros. So a time has the kernels, the copies within the
GPU and the host in it, and no network; algorithms send messages, as between nodes, and use no copy
engines. The rank is the one that computes most pairs of a query and a key, unless --rank names one.

The limit is the best kernel's time for the whole sequence on one GPU, divided by P: its time per
pair at 128K tokens, or at all tokens where they are fewer, with the same mask (with the causal one
for spans, which no kernel here has, and for windows where the kernel has none), times the pairs of
a rank in the mean. `step` begins on an idle GPU; `steady` is a step among others, launched one
after another, as the layers of a model are, and its limit is measured in turns with it: a GPU at
its power limit computes slower when it is warm. A profiled step splits the time into kernels of
attention, other kernels and copies; in what is left of the step the GPU is idle and waits for the
host.

The rows of docs/data/ranks.csv are those that the simulator is compared with
(`scripts/predictions.py`); which of them it is fitted to was decided before they were measured.

Heads as `128:latent` are those of DeepSeek-V3's multi-latent attention, with queries and keys of
192 and values of 128 numbers. A step then begins with a rank's own latents: ranks send the K and V
that they make of them, or, with the option send=latents, the latents themselves.
"""

import argparse
import csv
import json
import signal
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from packed_documents import pack, work_of
from profiles import by_class, class_of, computing, device_spans, longest, new_profiler
from rich.console import Console
from rich.table import Table
from specs import algo_of
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.context import softmax_algorithm
from megatron_cp_plugin.core.autograd.latents import Wire, attend_latents
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Communicator, Pending, Receive, Send, Topology
from megatron_cp_plugin.core.communication.devices import capture
from megatron_cp_plugin.core.communication.peer import push
from megatron_cp_plugin.core.kernel import KernelCall, Packing, Problem, Statistics
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.kernels import resolve, resolver
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.planner.layer import planned
from megatron_cp_plugin.process_exit import one_line_errors
from megatron_cp_plugin.registry import option_names
from megatron_cp_plugin.terminal import check_folder, tokens_of

MEASURED_AT = 128 * 1024  # tokens of the limit's kernel
NODE = 8  # ranks of one
DEVICE = "cuda"
_NOISE_ELEMENTS = 2**24
_SECONDS = 0.3  # for which a short call is repeated
_TURNS = 3


@dataclass(frozen=True)
class Row:
    """One algorithm on one problem; times in ms, medians.

    Attributes:
        ranks, tokens: Of the job; of a rank.
        batch: Sequences.
        rank: The one that ran.
        limit_ms: Of a step, see above.
        share: Of the limit: 1 would be as fast as the kernel alone.
        attention_ms, other_ms, copies_ms: Of a profiled step.
        idle_ms: Of a step in which no kernel runs.
        host_ms: In which the host launches a step.
        steady_ms, steady_share: Of a step among others, where the host may be ahead of the GPU.
        steady_limit_ms: The limit, measured in turns with such steps.
        kernels: Launches and microseconds by (the beginning of) a kernel's name.
        attention_us: Of each kernel of attention, in order.
        captured_ms, captured_share: Of replays of a CUDA graph.
        sent_gb: Of a step, in 10^9 bytes.
        peak_gib: Allocated in a step, its inputs among it.
    """

    ranks: int
    tokens: int
    heads: str
    mask: str
    name: str
    batch: int = 1
    rank: int = 0
    forward_ms: float = 0.0
    step_ms: float = 0.0
    limit_ms: float = 0.0
    share: float = 0.0
    attention_ms: float = 0.0
    other_ms: float = 0.0
    copies_ms: float = 0.0
    idle_ms: float = 0.0
    host_ms: float = 0.0
    steady_ms: float = 0.0
    steady_limit_ms: float = 0.0
    steady_share: float = 0.0
    captured_ms: float = 0.0
    captured_share: float = 0.0
    sent_gb: float = 0.0
    peak_gib: float = 0.0
    note: str = ""
    use: str = ""
    kernels: dict[str, tuple[int, int]] = field(default_factory=dict)
    attention_us: list[int] = field(default_factory=list)


@cache
def _noise(dtype: torch.dtype) -> Tensor:
    return torch.randn(_NOISE_ELEMENTS, device=DEVICE).to(dtype)


@cache
def _arrivals() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def arrive(*buffers: Tensor) -> Callable[[], None]:
    """Copies random numbers into contiguous buffers, on a stream of their own, as peer transport
    copies a message.

    Returns:
        What makes the current stream wait for them.
    """
    if not buffers:
        return lambda: None
    stream, device = _arrivals(), buffers[0].device
    stream.wait_stream(torch.cuda.current_stream(device))
    for buffer in buffers:
        noise = _noise(buffer.dtype)
        for part in buffer.view(-1).split(len(noise)):
            push(stream, noise[: len(part)], part.data_ptr())
    event = torch.cuda.Event()
    event.record(stream)
    return lambda: torch.cuda.current_stream(device).wait_event(event)


class _Nowhere(Communicator):
    """What is sent goes nowhere."""

    def _exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Pending[None]:
        return Pending(arrive(*(buffer for buffer, _ in receives)))

    def _all_gather(self, x: Tensor) -> Pending[Tensor]:
        return self._result(x.new_empty((self.size, *x.shape)))

    def _reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        return self._result(torch.empty_like(x[0]))

    def _all_to_all(self, tensors: Sequence[Tensor]) -> Pending[Sequence[Tensor]]:
        found = [torch.empty_like(x) for x in tensors]
        return Pending[None](arrive(*found)).then(lambda _: found)

    def _result(self, result: Tensor) -> Pending[Tensor]:
        return Pending[None](arrive(result)).then(lambda _: result)


class RankAlone(DryRunGroup):
    """A rank without others, whose blocks arrive nevertheless."""

    def __init__(self, rank: int, nodes: Sequence[int]) -> None:
        """Stands for one rank.

        Args:
            rank: In the group.
            nodes: The node of each rank of the group.
        """
        super().__init__(rank, nodes, peer_access=False)

    def channel(self, name: str) -> Communicator:
        made = _Nowhere(name, self.rank, self.size, self.rank)
        return self._channels.setdefault(name, made)

    def _make_subgroup(self, ranks: tuple[int, ...], name: str) -> Topology:
        return RankAlone(ranks.index(self.rank), [self.nodes[rank] for rank in ranks])


@dataclass(frozen=True)
class Case:
    """One problem: a job's ranks, tokens of each, heads, and a mask in words."""

    ranks: int
    tokens: int
    heads: str
    words: str
    seed: int
    batch: int = 1

    @property
    def seq_len(self) -> int:
        """Tokens of the job."""
        return self.ranks * self.tokens

    @property
    def wire(self) -> Wire | None:
        """The sizes of multi-latent attention, if heads are its."""
        heads, _, kind = self.heads.partition(":")
        return Wire(int(heads), 512, 64, 192, 128) if kind == "latent" else None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Query heads, KV heads, and the dims of keys and of values."""
        if wire := self.wire:
            return wire.heads, wire.heads, wire.head_dim, wire.value_dim
        heads, kv_heads = map(int, self.heads.split(":"))
        return heads, kv_heads, 128, 128

    def mask(self, seq_len: int) -> Mask:
        """The mask over `seq_len` tokens.

        Raises:
            ConfigError: There is no such mask.
        """
        kind, _, value = self.words.partition(":")
        if kind == "window" and value:
            return Mask(True, tokens_of(value))
        if kind == "documents" and value:
            return pack(value, seq_len, self.ranks, self.seed)
        if kind in ("images", "trees") and not value:
            return pack(kind, seq_len, self.ranks, self.seed)
        if kind in ("causal", "full") and not value:
            return Mask(kind == "causal")
        raise ConfigError(
            "--masks takes causal, full, window:TOKENS, documents:LENGTHS, images and trees, got "
            f"{self.words}"
        )


def whole(case: Case, tokens: int, batch: int = 1) -> list[Tensor]:
    """q, k, v and dout of `tokens` tokens."""
    heads, kv_heads, dim, value_dim = case.sizes
    return [
        torch.randn(batch, tokens, *sizes, device=DEVICE, dtype=torch.bfloat16)
        for sizes in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim))
    ]


def median_ms(body: Callable[[], object], iters: int, warmup: int = 2) -> float:
    """Median time of a call that begins on an idle GPU, the host's time among it."""
    return medians_ms(body, iters, warmup)[0]


def medians_ms(body: Callable[[], object], iters: int, warmup: int = 2) -> tuple[float, float]:
    """Of a call that begins on an idle GPU: until the GPU is done, and until the host is.

    Args: iters: at least; short calls are repeated for `_SECONDS`.
    """
    times, of_host, began = list[float](), list[float](), inf
    while len(times) < warmup + iters or perf_counter() - began < _SECONDS:
        if len(times) == warmup:
            began = perf_counter()
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        before = perf_counter()
        start.record()
        body()
        stop.record()
        of_host.append((perf_counter() - before) * 1e3)
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[warmup:]), statistics.median(of_host[warmup:])


def steady_ms(*bodies: Callable[[], object]) -> list[float]:
    """Times of calls among others of their kind, none of which waits for the GPU: medians of
    `_TURNS` series of each, in turns.
    """
    series = [(body, max(2, round(_SECONDS * 1e3 / median_ms(body, 1)))) for body in bodies]
    times = [list[float]() for _ in bodies]
    for _ in range(_TURNS):
        for (body, calls), own in zip(series, times, strict=True):
            torch.cuda.synchronize()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            body()
            start.record()
            for _ in range(calls):
                body()
            stop.record()
            torch.cuda.synchronize()
            own.append(start.elapsed_time(stop) / calls)
    return list(map(statistics.median, times))


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0 if seconds == inf else seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Limit:
    """The best kernel's time per pair of a query and a key, by heads and mask."""

    def __init__(self, iters: int) -> None:
        self._iters = iters
        self._known: dict[tuple[object, ...], float] = {}

    def step_ms(self, case: Case) -> float:
        """A rank's part of a forward and a backward of the whole sequence."""
        tokens = min(case.seq_len, MEASURED_AT)
        key = case.heads, tokens, case.words, case.ranks if "doc" in case.words else 0
        if key not in self._known:
            torch.cuda.empty_cache()
            self._known[key] = self._of_a_pair(case, tokens)
        return self._known[key] * _pairs_of_rank(case)

    def _of_a_pair(self, case: Case, tokens: int) -> float:
        forward, backward, pairs = self._passes(case, tokens)
        took = median_ms(forward, self._iters) + median_ms(backward, self._iters)
        return took / pairs

    def _passes(
        self, case: Case, tokens: int
    ) -> tuple[Callable[[], object], Callable[[], object], int]:
        """The two passes of the best kernel over `tokens` tokens, and their pairs."""
        q, k, v, dout = whole(case, tokens)
        mask = case.mask(tokens)
        documents, windows = bool(mask.documents), mask.window is not None
        shape = q.device, q.dtype, q.shape[2], k.shape[2], q.shape[3]
        problem = Problem(*shape, documents=documents, value_dim=v.shape[3], windows=windows)
        kernel = resolve("auto", problem)
        if documents and not kernel.packs:  # on a CPU
            kernel = resolve("reference", problem)
        if mask.slices is not None or (windows and not kernel.windows):
            mask = Mask()
        call = KernelCall(q, k, v, q.shape[3] ** -0.5, mask.causal, window=mask.window or 0)
        if documents:
            ends = (0, *mask.documents, tokens)
            call = call._replace(packing=Packing.adjacent(ends, ends))
        out, lse = kernel.forward(call)
        statistics = Statistics(lse, out=out)
        return (
            partial(kernel.forward, call),
            partial(kernel.backward, call, dout, statistics),
            mask.bands.area(tokens),
        )

    def in_turns(self, case: Case, step: Callable[[], object]) -> tuple[float, float]:
        """A step among others, and the limit among others in turns with it, in ms."""
        forward, backward, pairs = self._passes(case, min(case.seq_len, MEASURED_AT))

        def both() -> None:
            forward()
            backward()

        own, whole_ms = steady_ms(step, both)
        return own, whole_ms / pairs * _pairs_of_rank(case)


def _pairs_of_rank(case: Case) -> float:
    """Visible pairs of a query and a key, of a rank in the mean."""
    return case.batch * case.mask(case.seq_len).bands.area(case.seq_len) / case.ranks


def busiest(name: str, options: dict[str, Any], case: Case) -> int:
    """The rank that computes most pairs of a query and a key."""
    shape = Shape(1, case.seq_len, *case.sizes[:3])
    mask = case.mask(case.seq_len)
    work = work_of(planned(name, case.ranks, shape, mask, options), shape, mask)
    return work.index(max(work))


type Attend = Callable[[], Tensor]


def of_latents(
    case: Case, q: Tensor, name: str, settings: dict[str, Any], *, sent: bool
) -> tuple[Attend, list[Tensor]]:
    """Multi-latent attention of a rank's own latents, and what it has gradients of.

    Args:
        case: One that has a wire.
        settings: Of `cp.attention`.
        sent: Whether latents are sent, in place of K and V.
    """
    wire, tokens = case.wire, case.tokens
    assert wire is not None
    made = wire.heads * (wire.head_dim - wire.rotary_dim + wire.value_dim)
    sizes = (1, tokens, wire.latent_dim + wire.rotary_dim), (made, wire.latent_dim)
    latent, weight = (torch.randn(size, device=q.device, dtype=q.dtype) for size in sizes)
    weight /= wire.latent_dim**0.5
    known = {"group", "seq_len", "causal", "window", "cu_seqlens"}
    options = tuple(sorted((k, v) for k, v in settings.items() if k not in {"algo", *known}))

    def kept() -> Tensor:
        return cp.attention(q, *wire.expanded(latent, weight), **settings)

    def apart() -> Tensor:
        return attend_latents(
            q,
            latent,
            weight,
            algorithm=softmax_algorithm(name, settings["group"], options),
            value_dim=wire.value_dim,
            seq_len=case.seq_len,
            kernel_for=resolver("auto"),
            mask=Mask(
                settings["causal"],
                settings["window"],
                tuple(settings.get("cu_seqlens", (0, case.seq_len))[1:-1]),
            ),
        )

    inputs = [x.requires_grad_() for x in (q, latent, weight)]
    return apart if sent else kept, inputs


def measure(case: Case, spec: str, limit: Limit, args: argparse.Namespace, *, graphs: bool) -> Row:
    """One row.

    Args:
        spec: An algorithm with options, as `name:option=value`.
        limit: Of all rows.
        graphs: Whether the step is captured as well.
    """
    name, options = algo_of(spec)
    sent = options.pop("send", "") == "latents"
    if sent and "chunks" in option_names(name):
        options.setdefault("chunks", 1)
    limit_ms = limit.step_ms(case)
    row = Row(case.ranks, case.tokens, case.heads, case.words, spec, case.batch, limit_ms=limit_ms)
    try:
        rank = busiest(name, options, case) if args.rank is None else args.rank
        row = replace(row, rank=rank)
        q, k, v, dout = whole(case, case.tokens, case.batch)
        mask = case.mask(case.seq_len)
        settings: dict[str, Any] = {
            "algo": name,
            "causal": mask.causal,
            "window": mask.window,
            "seq_len": case.seq_len,
            "group": RankAlone(rank, [index // NODE for index in range(case.ranks)]),
            **options,
        }
        if mask.documents:
            settings["cu_seqlens"] = (0, *mask.documents, case.seq_len)
        if mask.slices is not None:
            del settings["causal"]
            settings["spans"] = mask.slices
        inputs = [x.requires_grad_() for x in (q, k, v)]
        calls = {name: settings[name] for name in ("causal", "window") if name in settings}
        context = cp.Context(**{name: x for name, x in settings.items() if name not in calls})
        attend: Attend = partial(context.attention, q, k, v, **calls)
        if case.wire is not None:
            attend, inputs = of_latents(case, q, name, settings, sent=sent)

        def forward() -> None:
            with torch.no_grad():
                attend()

        def step() -> tuple[Tensor, ...]:
            return torch.autograd.grad(attend(), inputs, dout)

        forward_ms = median_ms(forward, args.iters)
        step_ms, host_ms = medians_ms(step, args.iters)
        torch.cuda.reset_peak_memory_stats()
        with cp.record_communication() as log:
            step()
        row = replace(row, forward_ms=forward_ms, step_ms=step_ms, share=limit_ms / step_ms)
        peak = torch.cuda.max_memory_allocated() / 2**30
        row = replace(row, host_ms=host_ms, sent_gb=log.bytes() / 1e9, peak_gib=peak)
        steady, beside = limit.in_turns(case, step)
        row = replace(row, steady_ms=steady, steady_limit_ms=beside, steady_share=beside / steady)
        row = split(row, step, args)
        if graphs:
            row = captured(row, step, args)
    except (ContextParallelError, RuntimeError, ValueError, TimeoutError) as error:
        return replace(row, note=f"{type(error).__name__}: {str(error).splitlines()[0][:90]}")
    return row


def split(row: Row, step: Callable[[], object], args: argparse.Namespace) -> Row:
    """Where the time of a profiled step goes."""
    with new_profiler() as profiler:
        step()
        torch.cuda.synchronize()
    spans = device_spans(profiler.events())
    found = by_class(spans)
    if args.kernels:
        print(f"{row.ranks} ranks, {row.mask}, {row.name}:", *longest(spans), sep="\n  ")
    known = {"attention", "copies", "waiting"}
    launches, times = Counter[str](), defaultdict[str, float](float)
    for name, start, end in spans:
        launches[name[:120]] += 1
        times[name[:120]] += end - start
    return replace(
        row,
        attention_ms=found.get("attention", 0.0),
        copies_ms=found.get("copies", 0.0),
        idle_ms=max(0.0, row.step_ms - computing(spans)[0] / 1e3),
        other_ms=sum(ms for kind, ms in found.items() if kind not in known),
        kernels={name: (launches[name], round(us)) for name, us in times.items()},
        attention_us=[
            round(end - start) for name, start, end in spans if class_of(name) == "attention"
        ],
    )


def captured(row: Row, step: Callable[[], object], args: argparse.Namespace) -> Row:
    """Replays of the step in a CUDA graph, if it can be captured."""
    try:
        graph, _ = capture(step, torch.cuda.synchronize)
    except (ContextParallelError, RuntimeError) as error:
        return replace(row, note=f"not captured: {str(error).splitlines()[0][:80]}")
    took = median_ms(graph.replay, args.iters)
    graph.reset()
    return replace(row, captured_ms=took, captured_share=row.limit_ms / took)


def problems(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each problem, by its words."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        words = f"P = {row.ranks}, {row.tokens} tokens a rank, {row.heads} heads, {row.mask}"
        found[words + (f", batch {row.batch}" if row.batch > 1 else "")].append(row)
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each problem."""
    drawn = []
    for words, own in problems(rows).items():
        table = Table(
            *("algorithm", "rank", "step ms", "of limit", "steady", "attention", "other", "copies"),
            *("idle", "host", "captured", "sent GB", "peak GiB", "note"),
            title=f"{words}: limit {own[0].limit_ms:.2f} ms",
        )
        for row in own:
            parts = row.attention_ms, row.other_ms, row.copies_ms, row.idle_ms, row.host_ms
            table.add_row(
                row.name,
                str(row.rank),
                f"{row.step_ms:.2f}",
                f"{row.share:.3f}",
                f"{row.steady_share:.3f}",
                *(f"{ms:.2f}" for ms in parts),
                f"{row.captured_share:.3f}" if row.captured_ms else "-",
                f"{row.sent_gb:.2f}",
                f"{row.peak_gib:.2f}",
                row.note,
            )
        drawn.append(table)
    return drawn


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="8", help="of the job, up to 1,024; 8 on a node")
    parser.add_argument("--tokens", default="16K", help="of a rank")
    parser.add_argument(
        "--heads", default="32:8", help="query heads : KV heads, of dim 128; 128:latent"
    )
    parser.add_argument(
        "--masks",
        default="causal",
        help="causal, full, window:TOKENS, documents:LENGTHS as of benchmark_attention.py; images, "
        "trees as of packed_documents.py",
    )
    parser.add_argument("--algos", default="all", help="names, each with options")
    parser.add_argument("--batch", default="1", help="sequences, comma-separated")
    parser.add_argument("--rank", type=int, help="this one; default: the busiest")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths of documents")
    parser.add_argument("--graphs", action="store_true", help="captured in CUDA graphs as well")
    parser.add_argument("--kernels", action="store_true", help="print the longest kernels by name")
    parser.add_argument("--iters", type=int, default=5)
    parser.add_argument(
        "--rows",
        type=Path,
        help="a CSV file with the rows to measure, in place of --ranks, --tokens, --heads, "
        "--masks, --algos and --graphs",
    )
    parser.add_argument("--row-seconds", type=float, default=inf, help="a row is given up then")
    parser.add_argument("--seconds", type=float, default=inf, help="no row begins later")
    parser.add_argument("--output", type=Path, default=Path("results/rank"))
    return parser.parse_args(argv)


def asked_rows(args: argparse.Namespace) -> Iterator[tuple[Case, str, bool, str]]:
    """Each row's problem, algorithm, whether it is captured as well, and its use."""
    if args.rows is not None:
        with args.rows.open() as lines:
            for row in csv.DictReader(lines):
                sizes = int(row["ranks"]), tokens_of(row["tokens"])
                case = Case(*sizes, row["heads"], row["mask"], args.seed)
                yield case, row["algorithm"], bool(int(row["captured"])), row["use"]
        return
    algos = cp.available("softmax") if args.algos == "all" else args.algos.split(",")
    lists = (args.tokens, args.ranks, args.heads, args.masks, args.batch)
    for tokens, ranks, heads, words, batch in product(*(given.split(",") for given in lists)):
        case = Case(int(ranks), tokens_of(tokens), heads, words, args.seed, int(batch))
        for spec in algos:
            yield case, spec, args.graphs, ""


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints tables, writes rows.jsonl."""
    args = parse(argv)
    if not torch.cuda.is_available():
        raise ConfigError("benchmark_rank.py needs a GPU, got none: run it where there is one")
    check_folder("--output", args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    rows, began = list[Row](), perf_counter()
    asked = list(asked_rows(args))
    limit = Limit(args.iters)
    with (args.output / "rows.jsonl").open("a") as file:
        for number, (case, spec, graphs, use) in enumerate(asked, 1):
            if perf_counter() - began > args.seconds:
                print(f"{args.seconds:g} s are over: {len(asked) - number + 1} rows not measured")
                break
            torch.cuda.empty_cache()
            limit.step_ms(case)  # known from here on, and not among the row's seconds
            start = perf_counter()
            with at_most(args.row_seconds):
                row = measure(case, spec, limit, args, graphs=graphs)
            rows.append(replace(row, use=use))
            file.write(json.dumps(asdict(rows[-1])) + "\n")
            file.flush()
            print(
                f"{perf_counter() - began:5.0f} s, row {number} of {len(asked)} in "
                f"{perf_counter() - start:.1f} s: P {case.ranks}, {case.tokens}, {case.words}, "
                f"{spec}: {row.step_ms:.2f} ms, {row.share:.3f}, idle {row.idle_ms:.2f}, captured "
                f"{row.captured_ms:.2f} {row.note}",
                flush=True,
            )
    console = Console(width=140)
    for table in tables(rows):
        console.print(table)


if __name__ == "__main__":
    with one_line_errors("benchmark_rank: error"):
        main()
