"""How long a rank's host plans a micro-batch of packed documents: layout, forward and backward.

    python scripts/planning_time.py [--size 64 --tokens 1M --documents 500]

What a rank does for the first attention layer of a micro-batch and not for the next one, in CPU
time of one thread; no processes and no GPU are needed. Of several packs the median.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.kernels.choice import kernel_called
from megatron_cp_plugin.planner.call_memory import peak_of
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.registry import create
from megatron_cp_plugin.tokens import tokens_of

_NODE = 8  # ranks of one
ALGOS = (
    "zigzag",
    "zigzag:layout=documents",
    "zigzag:layout=documents:route=straight",
    "zigzag:layout=thd",
    "ring",
    "distflash",
    "allgather:transport=group",
    "attention2d:transport=group",
    "ulysses",
    "usp:ulysses=4",
)


def planning_ms(spec: str, size: int, seq_len: int, documents: int, packs: int = 4) -> float:
    """Of a rank in the middle. Args: spec: an algorithm with options, as `name:option=value`."""
    name, *words = spec.split(":")
    options = dict(word.split("=", 1) for word in words)
    nodes = tuple(rank // _NODE for rank in range(size))
    shape = Shape(1, seq_len, 64, 8, 128)
    # One for all packs, as in training: it compares what all ranks do with its first pack only.
    algorithm = create(name, DryRunGroup(size // 2, nodes, peer_access=size <= _NODE), options)

    def seconds(mask: Mask) -> float:
        gc.disable()
        start = time.thread_time()
        peak_of(algorithm, shape, mask, kernel_called("flash4"))
        gc.enable()
        return time.thread_time() - start

    found = []
    for seed in range(packs + 1):  # the first makes what all packs have
        starts = random_documents(seq_len, seq_len // documents, multiple=2 * size, seed=seed)
        mask = Mask(documents=starts)
        found.append(seconds(mask) - min(seconds(mask) for _ in range(2)))
    return 1000 * median(found[1:])


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", type=int, default=64, help="ranks, 8 on a node")
    parser.add_argument("--tokens", type=tokens_of, default=2**20, help="of all ranks")
    parser.add_argument("--documents", type=int, default=500, help="in the mean")
    parser.add_argument("--algos", default=",".join(ALGOS), help="names with options")
    args = parser.parse_args(argv)
    title = f"{args.size} ranks, {args.tokens} tokens, {args.documents} documents"
    table = Table("algorithm", "ms a micro-batch", title=title, min_width=60)
    for spec in args.algos.split(","):
        found = planning_ms(spec, args.size, args.tokens, args.documents)
        table.add_row(spec, f"{found:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
