"""Work and bytes of ranks with packed documents, for algorithms and layouts, by their plans.

    python scripts/packed_documents.py --lengths lognormal:4K:1.5,configs/lengths/long_tail.csv

No processes are needed. Of several packs the mean: the work of the rank that has most, as a
multiple of the mean of all, and what a rank sends, forward and backward. Lengths are multiples of
2P, as in benchmark_attention.py. `images` are documents of 16K in which images of 256 to 4K tokens
see all of themselves; `trees` are prefixes of 8K that 4 to 16 sequences share. `dynamic sizes` is
Megatron's scheduler (`--hybrid-context-parallel`), which gives each document of all packs together
a number of ranks, and lets all ranks wait for one another several times a step.

    python scripts/packed_documents.py --machine h200_nvlink --lengths 16K,2K --sizes 8 \
        --tokens 16K --heads 32:8 --packs 3 --algos zigzag:layout=documents,ulysses

simulates all ranks together. Of each pack: the time of both passes; the mean rank's attention
kernels as a share of it; and in brackets the bytes' own limit as a share of it: the kernels of the
slowest rank, slowed for as long as the links need for its exchanges by process groups.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain, pairwise
from math import ceil
from pathlib import Path
from random import Random
from statistics import mean

from rich.console import Console
from rich.table import Table
from specs import algo_of

from megatron_cp_plugin import spans
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.masks.slices import Slice, Slices
from megatron_cp_plugin.core.plans.plan import PHASES, row_bytes
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import LogNormal, lengths_of, random_documents
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.dry_run import Post, RecordedKernel
from megatron_cp_plugin.planner.event_simulation import play, tile_seconds
from megatron_cp_plugin.planner.layer import Layer, planned
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.simulate import traces_of
from megatron_cp_plugin.terminal import tokens_of

ALGOS = (
    "zigzag:route=ring,zigzag:layout=documents:route=ring,zigzag:layout=documents:route=straight,"
    "distflash:helpers=distance,distflash,ulysses,allgather:transport=group"
)


@dataclass(frozen=True)
class Point:
    """What an algorithm has of some packs, on average. Attributes: busiest_mib: of the rank that
    sends most. mean_mib: of all ranks. work: of the rank with most, the mean of all being 1.
    """

    lengths: str
    size: int
    label: str
    work: float
    busiest_mib: float
    mean_mib: float

    def __str__(self) -> str:
        return f"{self.work:.2f}; {self.mean_mib:.0f}, {self.busiest_mib:.0f}"


def point(label: str, words: str, size: int, args: argparse.Namespace) -> Point:
    """Raises: ConfigError if the algorithm cannot serve that number of ranks."""
    (algo, options), shape = algo_of(label), shape_of(size, args)
    packs = packs_of(words, size, args)
    algorithms = [planned(algo, size, shape, mask, options) for mask in packs]
    sent = [
        bytes_of(algorithm, shape, mask) for algorithm, mask in zip(algorithms, packs, strict=True)
    ]
    work = [
        work_of(algorithm, shape, mask) for algorithm, mask in zip(algorithms, packs, strict=True)
    ]
    return Point(
        words,
        size,
        label,
        mean(max(of_ranks) / mean(of_ranks) for of_ranks in work),
        mean(max(of_ranks) for of_ranks in sent) / 2**20,
        mean(mean(of_ranks) for of_ranks in sent) / 2**20,
    )


@dataclass(frozen=True)
class Simulated:
    """What an algorithm takes for some packs. Attributes: packs: of each, as of `together`."""

    lengths: str
    size: int
    label: str
    packs: list[tuple[float, float, float]]

    def __str__(self) -> str:
        return ", ".join("{:.1f} ms {:.2f} ({:.2f})".format(*each) for each in self.packs)


def simulated(label: str, words: str, size: int, args: argparse.Namespace) -> Simulated:
    """Raises: ConfigError if the algorithm cannot serve that number of ranks."""
    packs = [together(label, size, mask, args) for mask in packs_of(words, size, args)]
    return Simulated(words, size, label, packs)


def together(
    label: str, size: int, mask: Mask, args: argparse.Namespace
) -> tuple[float, float, float]:
    """All ranks. Returns: ms of both passes; and as shares of that, the mean rank's attention
    kernels and the bytes' own limit. Raises: ConfigError if the algorithm cannot serve the mask.
    """
    machine, (algo, options), shape = args.machine, algo_of(label), shape_of(size, args)
    nodes = tuple(rank // machine.gpus_per_node for rank in range(size))
    near = machine.copy is not None
    layer = Layer(algo, tuple(options.items()), shape, mask, nodes, peer_access=near)
    traces, kernel = traces_of(layer, tuple(range(size))), next(iter(machine.kernels))
    seconds = play(machine, nodes, traces, kernel, captured=args.captured).seconds
    kernels, limits = list[float](), list[float]()
    for rank, trace in traces.items():
        events = *trace.forward, *trace.backward
        runs = (event for event in events if isinstance(event, RecordedKernel))
        kernels.append(sum(tile_seconds(machine, kernel, run) for run in runs))
        posts = [event for event in events if isinstance(event, Post) and event.operation]
        links = [machine.inside if node == nodes[rank] else machine.between for node in nodes]
        speeds = [link.exchange.bytes_per_second for link in links]
        sent = sum(count / speeds[to] for post in posts for to, count in post.sends)
        came = sum(count / speeds[source] for post in posts for source, count in post.receives)
        limits.append(kernels[-1] + max(sent, came) * (1 - machine.group_share))
    return 1e3 * seconds, mean(kernels) / seconds, max(limits) / seconds


def shape_of(size: int, args: argparse.Namespace) -> Shape:
    """Of a pack of `size` ranks."""
    heads, kv_heads = args.heads
    return Shape(1, size * args.tokens, heads, kv_heads, 128)


def dynamic_sizes(words: str, size: int, args: argparse.Namespace) -> Point | None:
    """Of documents that each have ranks of their own, by zigzag; None: of other masks."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    seq_len = size * args.tokens
    masks = packs_of(words, size, args)
    if any(mask.slices is not None for mask in masks):
        return None
    edges = [(0, *mask.documents, seq_len) for mask in masks]
    lengths = [stop - start for each in edges for start, stop in pairwise(each)]
    scheduler = BalancedCPScheduler(args.tokens, VirtualGroup(size))
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    busiest, every, sent = 0.0, 0.0, [0.0] * size
    for group in groups:  # of documents by rank; all ranks wait at its end
        work = [0.0] * size
        shared = Counter(document for of_rank in group for document in of_rank)
        for rank, of_rank in enumerate(group):
            for document in of_rank:
                length, ranks = lengths[document], shared[document]
                work[rank] += length * (length + 1) / 2 / ranks
                sent[rank] += zigzag_bytes(length, ranks, args.heads) / args.packs
        busiest += max(work)
        every += mean(work)
    found = busiest / every, max(sent) / 2**20, mean(sent) / 2**20
    return Point(words, size, "dynamic sizes, zigzag", *found)


@cache
def zigzag_bytes(length: int, ranks: int, heads: tuple[int, int]) -> float:
    """What a rank sends in both passes of one document."""
    if ranks == 1:
        return 0.0
    shape = Shape(1, 2 * ranks * ceil(length / 2 / ranks), *heads, 128)
    return mean(bytes_of(planned("zigzag", ranks, shape, Mask(), {}), shape, Mask()))


@dataclass(frozen=True)
class VirtualGroup:
    """Stands for a process group where only its size is asked for."""

    ranks: int

    def size(self) -> int:
        """See ProcessGroup."""
        return self.ranks


def packs_of(words: str, size: int, args: argparse.Namespace) -> list[Mask]:
    """The same ones for all algorithms."""
    return [pack(words, size * args.tokens, size, seed) for seed in range(args.packs)]


def pack(words: str, seq_len: int, size: int, seed: int) -> Mask:
    """A random sequence. Args: words: of --lengths. size: number of ranks."""
    makers = {"images": images, "trees": trees}
    if words in makers:
        return makers[words](seq_len, seed)
    lengths = lengths_of(words)
    return Mask(documents=random_documents(seq_len, lengths, multiple=2 * size, seed=seed))


def images(seq_len: int, seed: int) -> Mask:
    """Documents with images, whose tokens see each other."""
    source, text = Random(seed), LogNormal(1024, 1)
    found, start = list[tuple[int, int]](), 0
    while True:
        start += ceil(text.draw(source))
        stop = start + source.choice((256, 576, 1024, 4096))
        if stop > seq_len:
            break
        found.append((start, stop))
        start = stop
    documents = random_documents(seq_len, LogNormal(2**14, 1), seed=seed)
    return Mask.of(Slices.of(spans.image_blocks(seq_len, found), seq_len, documents))


def trees(seq_len: int, seed: int) -> Mask:
    """Prefixes that several sequences share."""
    source, prefix, leaf = Random(seed), LogNormal(2**13, 1), LogNormal(2**11, 1)
    found, start = list[Slice](), 0
    while start < seq_len:
        leaves = [ceil(leaf.draw(source)) for _ in range(source.randint(4, 16))]
        tokens = ceil(prefix.draw(source)), *leaves
        if start + sum(tokens) > seq_len:
            found.append(Slice(start, seq_len, start, seq_len, "causal"))
            break
        found += spans.shared_prefix((tokens[0], leaves), start=start)
        start += sum(tokens)
    return Mask.of(Slices.of(found, seq_len))


def bytes_of(algorithm: Algorithm, shape: Shape, mask: Mask) -> list[int]:
    """What each rank sends in both passes."""
    found = [0] * algorithm.topology.size
    for move in chain(*(algorithm.plan(shape, mask, phase).moves for phase in PHASES)):
        of_token = (row_bytes(x, shape, move.heads, move.wide) for x in chain(*move.messages))
        found[move.source] += shape.batch * move.tokens * sum(of_token)
    return found


def work_of(algorithm: Algorithm, shape: Shape, mask: Mask) -> list[float]:
    """Pairs of a query and a key, times their heads, that each rank computes in the forward."""
    plan = algorithm.plan(shape, mask)
    found = [0.0] * algorithm.topology.size
    for compute in plan.computes:
        found[compute.rank] += float(plan.tiles(compute).areas.sum()) * compute.heads.heads
    return found


def table(points: Sequence[Point | Simulated], words: str, title: str) -> Table:
    """Of one distribution, a column for each number of ranks."""
    of_words = [found for found in points if found.lengths == words]
    sizes = sorted({found.size for found in of_words})
    drawn = Table(
        "algorithm",
        *(f"P = {size}" for size in sizes),
        title=f"documents {words}, {title}",
    )
    for label in dict.fromkeys(found.label for found in of_words):
        by_size = {found.size: found for found in of_words if found.label == label}
        cells = (str(by_size.get(size, "-")) for size in sizes)
        drawn.add_row(label, *cells)
    return drawn


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--lengths",
        type=_lengths,
        default="lognormal:4K:1.5,configs/lengths/long_tail.csv",
        help="as --documents of benchmark_attention.py; images, trees",
    )
    parser.add_argument("--sizes", default="8,16,32,64", help="numbers of ranks")
    parser.add_argument("--tokens", type=tokens_of, default=8192, help="of each rank")
    parser.add_argument("--heads", type=_heads, default=(64, 8), help="query heads : KV heads")
    parser.add_argument("--packs", type=int, default=4, help="random sequences of each kind")
    parser.add_argument("--algos", default=ALGOS, help="names, each with options")
    parser.add_argument("--machine", help="simulate all ranks on it")
    parser.add_argument("--captured", action="store_true", help="simulate CUDA graphs")
    parser.add_argument("--output", type=Path, help="JSON of all points")
    args = parser.parse_args(argv)
    try:
        args.machine = args.machine and Machine.load(args.machine)
    except ConfigError as error:
        parser.error(str(error))
    return args


def _lengths(text: str) -> list[str]:
    for words in (found := text.split(",")):
        pack(words, 2, 1, 0)
    return found


def _heads(text: str) -> tuple[int, int]:
    heads, kv_heads = map(int, text.split(":"))
    return heads, kv_heads


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each distribution."""
    args = parse(argv)
    title = "most work / mean; MiB a rank, busiest"
    of: Callable[..., Point | Simulated] = point
    if args.machine:
        title, of = "simulated: both passes, kernels' share (of the bytes' limit)", simulated
    points: list[Point | Simulated] = []
    for words in args.lengths:
        for size in map(int, args.sizes.split(",")):
            for label in args.algos.split(","):
                try:
                    points.append(of(label, words, size, args))
                except ConfigError as error:
                    print(f"{label}, {size} ranks: {error}", file=sys.stderr)
            if not args.machine and (by_megatron := dynamic_sizes(words, size, args)):
                points.append(by_megatron)
            print(f"{words}: {size} ranks done", file=sys.stderr, flush=True)
        Console(width=160).print(table(points, words, f"{args.tokens} tokens a rank: {title}"))
    if args.output is not None:
        args.output.write_text(json.dumps([asdict(found) for found in points], indent=1))


if __name__ == "__main__":
    main()
