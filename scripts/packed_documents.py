"""Work and bytes of ranks with packed documents, for algorithms and layouts, by their plans.

    python scripts/packed_documents.py --lengths lognormal:4K:1.5,configs/lengths/long_tail.csv

No processes are needed. Of several packs the mean: the work of the rank that has most, as a
multiple of the mean of all, and what a rank sends, forward and backward. Padding to multiples of
2P, which the layout thd needs, is left out there. `images` are documents of 16K in which images of
256 to 4K tokens see all of themselves; `trees` are prefixes of 8K that 4 to 16 sequences share.
`dynamic sizes` is Megatron's scheduler (`--hybrid-context-parallel`), which gives each document of
all packs together a number of ranks, and lets all ranks wait for one another several times a step.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain, pairwise
from math import ceil
from pathlib import Path
from random import Random
from statistics import mean

from rich.console import Console
from rich.table import Table

from megatron_cp_plugin import spans
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.masks.slices import Slice, Slices
from megatron_cp_plugin.core.plans.plan import PHASES, row_bytes
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import LogNormal, lengths_of, random_documents
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.layer import planned


@dataclass(frozen=True)
class Line:
    """An algorithm with its options."""

    label: str
    algo: str
    options: tuple[tuple[str, object], ...] = ()


LINES = (
    Line("zigzag, route=ring", "zigzag", (("route", "ring"),)),
    Line(
        "zigzag, layout=documents, route=ring",
        "zigzag",
        (("layout", "documents"), ("route", "ring")),
    ),
    Line(
        "zigzag, layout=documents, route=straight",
        "zigzag",
        (("layout", "documents"), ("route", "straight")),
    ),
    Line("distflash, helpers=distance", "distflash", (("helpers", "distance"),)),
    Line("distflash", "distflash"),
    Line("ulysses", "ulysses"),
    Line("all-gather", "allgather", (("transport", "group"),)),
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


def point(line: Line, words: str, size: int, args: argparse.Namespace) -> Point | None:
    """None where the algorithm cannot serve that number of ranks."""
    heads, kv_heads = args.heads
    shape = Shape(1, size * args.tokens, heads, kv_heads, 128)
    packs = [pack(words, shape.seq_len, seed) for seed in range(args.packs)]
    try:
        algorithms = [planned(line.algo, size, shape, mask, dict(line.options)) for mask in packs]
    except ConfigError:
        return None
    sent = [
        bytes_of(algorithm, shape, mask) for algorithm, mask in zip(algorithms, packs, strict=True)
    ]
    work = [
        work_of(algorithm, shape, mask) for algorithm, mask in zip(algorithms, packs, strict=True)
    ]
    return Point(
        words,
        size,
        line.label,
        mean(max(of_ranks) / mean(of_ranks) for of_ranks in work),
        mean(max(of_ranks) for of_ranks in sent) / 2**20,
        mean(mean(of_ranks) for of_ranks in sent) / 2**20,
    )


def dynamic_sizes(words: str, size: int, args: argparse.Namespace) -> Point | None:
    """Of documents that each have ranks of their own, by zigzag; None: of other masks."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    seq_len = size * args.tokens
    masks = [pack(words, seq_len, seed) for seed in range(args.packs)]
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


def pack(words: str, seq_len: int, seed: int) -> Mask:
    """A random sequence. Args: words: of --lengths."""
    makers = {"images": images, "trees": trees}
    if words in makers:
        return makers[words](seq_len, seed)
    return Mask(documents=random_documents(seq_len, lengths_of(words), seed=seed))


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


def table(points: Sequence[Point], words: str, tokens: int) -> Table:
    """Of one distribution, a column for each number of ranks."""
    of_words = [found for found in points if found.lengths == words]
    sizes = sorted({found.size for found in of_words})
    drawn = Table(
        "algorithm",
        *(f"P = {size}" for size in sizes),
        title=f"documents {words}, {tokens} tokens a rank: most work / mean; MiB a rank, busiest",
    )
    for label in dict.fromkeys(found.label for found in of_words):
        by_size = {found.size: found for found in of_words if found.label == label}
        cells = ("-" if size not in by_size else cell(by_size[size]) for size in sizes)
        drawn.add_row(label, *cells)
    return drawn


def cell(found: Point) -> str:
    """A point in words."""
    return f"{found.work:.2f}; {found.mean_mib:.0f}, {found.busiest_mib:.0f}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--lengths",
        default="lognormal:4K:1.5,configs/lengths/long_tail.csv",
        help="as --documents of benchmark_attention.py; images, trees",
    )
    parser.add_argument("--sizes", default="8,16,32,64", help="numbers of ranks")
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--heads", type=_heads, default=(64, 8), help="query heads : KV heads")
    parser.add_argument("--packs", type=int, default=4, help="random sequences of each kind")
    parser.add_argument("--output", type=Path, help="JSON of all points")
    return parser.parse_args(argv)


def _heads(text: str) -> tuple[int, int]:
    heads, kv_heads = map(int, text.split(":"))
    return heads, kv_heads


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each distribution."""
    args = parse(argv)
    points: list[Point] = []
    for words in args.lengths.split(","):
        for size in map(int, args.sizes.split(",")):
            found = (point(line, words, size, args) for line in LINES)
            points += [each for each in found if each is not None]
            if by_megatron := dynamic_sizes(words, size, args):
                points.append(by_megatron)
            print(f"{words}: {size} ranks done", file=sys.stderr, flush=True)
        Console(width=160).print(table(points, words, args.tokens))
    if args.output is not None:
        args.output.write_text(json.dumps([asdict(found) for found in points], indent=1))


if __name__ == "__main__":
    main()
