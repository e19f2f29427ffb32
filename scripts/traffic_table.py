"""Bytes that a rank sends in one attention layer, for every algorithm and number of ranks.

    python scripts/traffic_table.py [--markdown] [--heads 32] [--kv-heads 32 8] [--nodes]

From the plans of the algorithms, which the tests hold against counted messages; so no processes
are needed. The unit is a whole Q, B * N * H * D elements: what counts is whether a line
falls from left to right. The last lines are what the papers compare with; tensor parallelism sends
it for attention and MLP together. With --nodes, what a rank sends to other nodes of 8 ranks: each
has a network card of its own.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.costs import BASELINES, Cost, cost
from megatron_cp_plugin.registry import create

SIZES = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Line:
    """One algorithm with its options."""

    label: str
    algo: str
    options: tuple[tuple[str, object], ...] = ()


# Gradients travel in the model's dtype everywhere, so that lines differ by algorithm only.
_MODEL = ("gradients", "model")
LINES = (
    Line("zigzag, KV travels", "zigzag", (("backward", "kv"), _MODEL)),
    Line("zigzag, Q travels in the backward", "zigzag", (("backward", "query"), _MODEL)),
    Line("distflash", "distflash"),
    Line("allgather", "allgather", (_MODEL,)),
    Line("ulysses", "ulysses"),
    Line("usp, 4 ranks a team", "usp", (("ulysses", 4), _MODEL)),
    Line("attention2d", "attention2d", (_MODEL,)),
    Line("attention2d, the paper's", "attention2d", (("variant", "no"), _MODEL)),
)

NODES = (2, 4, 8, 16)
# Of nodes of 8 ranks. The rings send a block once to each other node.
BETWEEN_NODES = (
    Line("zigzag, double ring", "zigzag", (("route", "double"), _MODEL)),
    Line("attention2d", "attention2d", (_MODEL,)),
    Line("usp, a node a team", "usp", (("ulysses", 8), _MODEL)),
    Line("usp, a grid of nodes", "usp", (("ulysses", 8), ("route", "grid"))),
)


def sent(line: Line, size: int, shape: Shape) -> Cost | None:
    """What the rank that sends most sends; None where the algorithm cannot serve that many."""
    try:
        return cost(line.algo, size, shape, options=dict(line.options))
    except ConfigError:
        return None


def units(found: Cost, shape: Shape) -> float:
    """Forward and backward together in units."""
    unit = shape.batch * shape.seq_len * shape.query_width * shape.element_bytes
    return (found.forward_bytes + found.backward_bytes) / unit


def cell(line: Line, size: int, shape: Shape) -> str:
    """Forward and backward together in units, with the shape of the grid."""
    found = sent(line, size, shape)
    if found is None:
        return "-"
    text = f"{units(found, shape):.2f}"
    if line.algo == "attention2d" and found.grid:
        text += f" ({found.grid[0]}x{found.grid[1]})"
    return text


def rows(heads: int, kv_heads: int, sizes: Sequence[int] = SIZES) -> list[list[str]]:
    """One row a line and baseline: label, then a cell for each number of ranks."""
    shape = Shape(1, 4 * max(sizes) * 64, heads, kv_heads, 128)
    found = [[line.label, *(cell(line, size, shape) for size in sizes)] for line in LINES]
    return found + baseline_rows(shape, sizes)


def between_nodes(line: Line, nodes: int, heads: int, kv_heads: int) -> float:
    """Units that the rank sends to other nodes that sends most there, in both passes."""
    size = 8 * nodes
    shape = Shape(1, 64 * size, heads, kv_heads, 128)
    topology = VirtualWorld(size, ranks_per_node=8).topology(0)
    algorithm = create(line.algo, topology, dict(line.options))
    plans = [algorithm.plan(shape, Mask(), phase) for phase in PHASES]
    each = (
        sum(plan.sent(rank, shape, topology.nodes).bytes for plan in plans) for rank in range(size)
    )
    return max(each) / (shape.seq_len * shape.query_width * shape.element_bytes)


def cards(heads: int, kv_heads: int, nodes: Sequence[int] = NODES) -> Table:
    """The table of what leaves a node, for a terminal."""
    drawn = Table("algorithm", title=f"{heads}:{kv_heads} heads: whole Qs to other nodes")
    for number in nodes:
        drawn.add_column(f"{number} nodes", justify="right")
    for line in BETWEEN_NODES:
        found = (between_nodes(line, number, heads, kv_heads) for number in nodes)
        drawn.add_row(line.label, *(f"{one:.2f}" for one in found))
    return drawn


def baseline_rows(shape: Shape, sizes: Sequence[int]) -> list[list[str]]:
    """As `rows`, of what the papers compare with."""
    found = []
    for baseline in BASELINES:
        costs = (baseline.cost(size, shape) for size in sizes)
        found.append([baseline.name, *(f"{units(one, shape):.2f}" for one in costs)])
    return found


def title(heads: int, kv_heads: int) -> str:
    """What a table shows."""
    return (
        f"{heads}:{kv_heads} heads, head dim 128, bf16, causal: whole Qs that a rank sends, "
        "forward + backward"
    )


def markdown(heads: int, kv_heads: int, sizes: Sequence[int] = SIZES) -> str:
    """The table for docs/data/bytes.md."""
    lines: Iterable[Sequence[str]] = [
        [f"{heads}:{kv_heads} heads", *(f"P = {size}" for size in sizes)],
        ["---"] + ["---:"] * len(sizes),
        *rows(heads, kv_heads, sizes),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(heads: int, kv_heads: int, sizes: Sequence[int] = SIZES) -> Table:
    """The table for a terminal."""
    drawn = Table("algorithm", title=title(heads, kv_heads))
    for size in sizes:
        drawn.add_column(f"P = {size}", justify="right")
    for row in rows(heads, kv_heads, sizes):
        drawn.add_row(*row)
    return drawn


def main() -> None:
    """Prints a table for each number of KV heads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--nodes", action="store_true", help="only what leaves nodes of 8 ranks")
    args = parser.parse_args()
    console = Console()
    for kv_heads in args.kv_heads:
        if args.nodes:
            console.print(cards(args.heads, kv_heads))
        elif args.markdown:
            print(f"{title(args.heads, kv_heads)}\n\n{markdown(args.heads, kv_heads)}\n")
        else:
            console.print(table(args.heads, kv_heads))


if __name__ == "__main__":
    main()
