"""Tokens and work that shared prefixes of rollouts save, and how evenly ranks share the rest.

    python scripts/rollout_packs.py --size 8 --budget 128K --ranks 4

For sets of rollouts of random tokens: tokens one by one and in packs of `pack_rollouts`, pairs of a
query and a key of both, and the pairs of the rank that has most, as a multiple of the mean of all,
over all packs. With `--ranks` also the work of the data-parallel rank that has most, likewise; a
token costs as much as 24,576 pairs beside attention. No processes are needed.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import numpy as np
from packed_documents import work_of
from rich.console import Console
from rich.table import Table

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.layer import planned
from megatron_cp_plugin.terminal import tokens_of

type Rollout = np.ndarray[tuple[int], np.dtype[np.int64]]

LAYOUTS = ("zigzag", "documents")
TOKEN_WORK = 24_576  # pairs


def answers(
    draw: np.random.Generator, prompts: int, prompt: int, count: int, mean: int
) -> Iterator[Rollout]:
    """Each prompt with `count` answers, whose lengths are log-normal with this mean."""
    for _ in range(prompts):
        start = tokens(draw, prompt)
        for length in draw.lognormal(np.log(mean) - 0.125, 0.5, count):
            yield np.concatenate((start, tokens(draw, int(length))))


def agents(
    draw: np.random.Generator, tasks: int, runs: int, turns: int, *, each_turn: bool
) -> Iterator[Rollout]:
    """Runs of agents: 4K tokens of system and tools, a task of 2K, turns of some 300 tokens and
    what tools answer, some 700. Args: each_turn: whether each turn is a rollout, with all before.
    """
    system = tokens(draw, 4096)
    for _ in range(tasks):
        task = np.concatenate((system, tokens(draw, 2048)))
        for _ in range(runs):
            found = task
            last = int(draw.integers(turns // 2, turns * 3 // 2 + 1))
            for turn in range(1, last + 1):
                found = np.concatenate((found, tokens(draw, int(draw.integers(100, 500)))))
                if each_turn or turn == last:
                    yield found
                found = np.concatenate((found, tokens(draw, int(draw.integers(200, 1200)))))


def tokens(draw: np.random.Generator, count: int) -> Rollout:
    """Random ones, `count` of them."""
    return draw.integers(0, 150_000, count)


SETS: dict[str, Callable[[np.random.Generator], Iterator[Rollout]]] = {
    "GRPO: 4 prompts of 8K, 8 answers of 4K each": lambda draw: answers(draw, 4, 8192, 8, 4096),
    "agents: 4 tasks, 8 runs of 12 turns each": lambda draw: agents(
        draw, 4, 8, 12, each_turn=False
    ),
    "the same, each turn a rollout": lambda draw: agents(draw, 4, 8, 12, each_turn=True),
    "best of 64: a prompt of 2K, answers of 2K": lambda draw: answers(draw, 1, 2048, 64, 2048),
}


def row(rollouts: Sequence[Rollout], args: argparse.Namespace) -> list[str]:
    """Cells of the table."""
    alone = [len(each) - 1 for each in rollouts]
    began = perf_counter()
    packs = cp.pack_rollouts(
        rollouts,
        budget=args.budget,
        multiple=2 * args.size,
        ranks=args.ranks,
        token_work=TOKEN_WORK,
    )
    took = perf_counter() - began
    of_ranks, pairs = {layout: [0.0, 0.0] for layout in LAYOUTS}, 0
    dealt = [0] * args.ranks
    for number, pack in enumerate(packs):
        shape = Shape(1, len(pack.tokens), args.size, args.size, 128)
        mask = Mask.of(Slices.of(pack.spans, shape.seq_len), None)
        seen = mask.bands.area(shape.seq_len)
        dealt[number % args.ranks] += TOKEN_WORK * shape.seq_len + seen
        pairs += seen
        for layout, sums in of_ranks.items():
            algorithm = planned("zigzag", args.size, shape, mask, {"layout": layout})
            work = work_of(algorithm, shape, mask)
            sums[0] += max(work)
            sums[1] += sum(work)
    before = sum(n * (n + 1) / 2 for n in alone)
    packed = sum(len(pack.tokens) for pack in packs)
    assert all(round(total) == pairs * args.size for _, total in of_ranks.values())
    return [
        str(len(rollouts)),
        f"{sum(alone):,}",
        f"{packed:,} in {len(packs)}",
        f"{sum(alone) / packed:.2f}x",
        f"{before / pairs:.2f}x",
        *(f"{most * args.size / total:.3f}" for most, total in of_ranks.values()),
        str(max(len(pack.spans) for pack in packs)),
        f"{took * 1e3:.0f} ms",
        f"{max(dealt) * args.ranks / sum(dealt):.3f}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", type=int, default=8, help="context-parallel ranks")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--budget", type=tokens_of, default=1 << 17, help="tokens of a pack")
    args = parser.parse_args(argv)
    table = Table(
        *("rollouts of", "are", "tokens", "in packs", "fewer tokens", "fewer pairs"),
        *("zigzag: most / mean", "documents: most / mean", "slices of a pack", "packing"),
        "data-parallel: most / mean",
        title=f"P = {args.size}, {args.ranks} data-parallel rank(s), at most {args.budget} tokens",
    )
    for name, make in SETS.items():
        table.add_row(name, *row(list(make(np.random.default_rng(0))), args))
    Console(width=300).print(table)


if __name__ == "__main__":
    main()
