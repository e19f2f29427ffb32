"""What all schedules on a grid of ranks share: who stands where, flows of messages, transposes.

B batch, S local tokens, H query heads, G KV heads, D head dim, P = R * C ranks in R rows and C
columns. Queries meet in rows, keys in columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from megatron_cp_plugin.algorithms.point_to_point import PointToPoint
from megatron_cp_plugin.core.algorithm import Algorithm, Call, Saved
from megatron_cp_plugin.core.caching import cached_method
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.derive import plan_of
from megatron_cp_plugin.core.grid import Grid, cheapest, column_major, row_major
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.core.pipeline import HeadGroup, head_groups
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.plan import PHASES, Plan, Setting
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ContextParallelError

Wire = Literal["model", "float32"]


@dataclass(frozen=True)
class GridSettings:
    """Settings of a schedule on a grid.

    Attributes:
        layout: of the tokens. transposed: keys are redistributed, so that a column of a cyclic
            layout holds evenly spaced ones.
        rows, cols: R and C; 0: whatever moves fewer bytes.
        partials, gradients: dtype in which partial outputs and gradients travel.
        chunks: head groups that are pipelined, at most; 0: what suits the work.
        gathered_bytes: bound on the gathered K and V; None: no bound.
    """

    layout: Layout
    transposed: bool = False
    rows: int = 0
    cols: int = 0
    partials: Wire = "model"
    gradients: Wire = "model"
    chunks: int = 0
    gathered_bytes: int | None = None


@dataclass(frozen=True)
class GridPlacement(BlockPlacement):
    """Queries of a row of ranks meet the keys of a column on the rank where they cross."""

    grid: Grid = field(kw_only=True)
    masked = False

    def key_holder(self, owner: int) -> int:
        """See BlockPlacement.key_holder: a rank of the column that gathers the keys."""
        return self.grid.key_owners.index(owner)

    def crossing(self, query: int, key: int) -> int:
        """The rank in the row of the queries and the column of the keys."""
        return self.grid.crossing(query, self.key_holder(key))

    def place(self, query: int, key: int) -> Iterator[Place]:
        """See BlockPlacement.place."""
        yield Place(self.crossing(query, key), 0)


@dataclass(frozen=True)
class GatheredPlacement(GridPlacement):
    """Everything is gathered first, and computed in one step."""

    assembled = True


@dataclass(frozen=True)
class GridRingPlacement(GridPlacement):
    """Blocks go round rings: keys in the columns first, then queries in the rows.

    So a rank computes its own queries with every block of keys as it comes, and then the queries
    of others with all of them. In the backward the last block of queries comes while sums of dK
    and dV go round.
    """

    backward: bool = False
    relay = True

    def place(self, query: int, key: int) -> Iterator[Place]:
        """See BlockPlacement.place. Source: Attention2D, Algorithms 4 to 11."""
        rank = self.crossing(query, key)
        row, column = self.grid.row(rank), self.grid.column(rank)
        rows, cols = len(column), len(row)
        of_query = (row.index(query) - row.index(rank)) % cols
        of_key = (column.index(self.key_holder(key)) - column.index(rank)) % rows
        if not of_query:
            yield Place(rank, of_key)
        elif self.backward and of_query == cols - 1:
            yield Place(rank, rows + cols - 2 + (of_key - 1) % rows)
        else:
            yield Place(rank, rows - 1 + of_query)


@dataclass(frozen=True)
class GridBlocksPlacement(GridRingPlacement):
    """The same steps, but blocks and results go straight from rank to rank.

    So a rank has one source and one target at a time, computes with a block as soon as it is there,
    and holds the blocks of its column and two of its row.
    """

    relay = False
    masked = True


def bounded_groups(
    groups: tuple[HeadGroup, ...], shape: Shape, head_bytes: int, bound: int | None
) -> tuple[HeadGroup, ...]:
    """These groups, or as many more as a bound on gathered K and V needs.

    Args: head_bytes: that a KV head takes of them.

    Raises: ContextParallelError if it cannot be kept.
    """
    count = len(groups)
    while bound is not None and groups[0].kv_heads * head_bytes > bound:
        count += 1
        if count > shape.kv_heads:
            raise ContextParallelError(
                f"gathered K and V take {head_bytes / 2**20:.0f} MiB even by single heads, got a "
                f"bound of {bound / 2**20:.0f} MiB: raise it, or shorten the sequence"
            )
        groups = head_groups(shape.heads, shape.kv_heads, count, share_kv=False)
    return groups


class Flows:
    """A grid of ranks with its flows of messages; making one is a collective operation.

    Attributes:
        queries, outputs: in the row. keys, key_gradients: in the column. transposes: of all
        ranks; None where every rank holds its own keys.
    """

    def __init__(self, grid: Grid, topology: Topology) -> None:
        self.grid = grid
        rank = topology.rank
        self.rank = rank
        row = topology.subgroup(grid.row(rank), "row")
        column = topology.subgroup(grid.column(rank), "column")
        self.queries = row.channel("queries")
        self.outputs = row.channel("outputs")
        self.keys = column.channel("keys")
        self.key_gradients = column.channel("key gradients")
        # Made by the ranks on the diagonal too, which never use it.
        moves = grid.key_owners != tuple(range(topology.size))
        self.transposes = topology.channel("transposes") if moves else None

    @property
    def row(self) -> tuple[int, ...]:
        """Ranks of this row; the order of messages within it."""
        return self.grid.row(self.rank)

    @property
    def column_owners(self) -> tuple[int, ...]:
        """Owners of the keys of this column's ranks."""
        return tuple(self.grid.key_owners[rank] for rank in self.grid.column(self.rank))

    @property
    def key_owner(self) -> int:
        """The rank whose keys this one holds once they are transposed."""
        return self.grid.key_owners[self.rank]

    @property
    def key_holder(self) -> int:
        """The rank that holds this one's keys then."""
        return self.grid.key_owners.index(self.rank)


class GridSchedule(ABC):
    """How attention is computed on a grid."""

    def __init__(self, topology: Topology, settings: GridSettings) -> None:
        self.topology = topology
        self.settings = settings
        self._flows: dict[tuple[int, int], Flows] = {}
        # Chosen once: at short lengths a step of training is bound by the host.
        self._grid_shape = cached_method(self._cheapest, 256)

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward."""

    @abstractmethod
    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward."""

    @abstractmethod
    def placement(self, grid: Grid, shape: Shape, phase: Phase) -> GridPlacement:
        """Of a grid of ranks."""

    def grid_shape(self, shape: Shape) -> tuple[int, int]:
        """R and C: as set, or what moves the fewest bytes in forward and backward together."""
        return self._grid_shape(shape)

    def _cheapest(self, shape: Shape) -> tuple[int, int]:
        whole = head_groups(shape.heads, shape.kv_heads, 1)
        # The last rank but one is not on the diagonal, where nothing is to be transposed.
        rank = max(0, self.topology.size - 2)

        def cost(rows: int, cols: int) -> int:
            grid = self._grid(rows, cols, (0,) * self.topology.size)
            plans = (
                plan_of(
                    replace(self.placement(grid, shape, phase), groups=whole),
                    Setting(shape.seq_len, Mask(), phase),
                )
                for phase in PHASES
            )
            return sum(plan.sent(rank, shape).bytes for plan in plans)

        return cheapest(self.topology.size, self.settings.rows, self.settings.cols, cost)

    def grid(self, shape: Shape) -> Grid:
        """The grid for a problem; a collective operation the first time."""
        rows, cols = self.grid_shape(shape)
        alone = rows == 1 or cols == 1
        return self._grid(rows, cols, (0,) * (rows * cols) if alone else self.topology.nodes)

    def flows(self, shape: Shape) -> Flows:
        """The grid for a problem; a collective operation the first time."""
        key = self.grid_shape(shape)
        if key not in self._flows:
            self._flows[key] = Flows(self.grid(shape), self.topology)
        return self._flows[key]

    def transpose(
        self, flows: Flows, x: tuple[Tensor, Tensor], seq_len: int, *, back: bool = False
    ) -> tuple[Tensor, Tensor]:
        """K, V or their gradients, to where the column needs them, or back to their owner."""
        to, source = flows.key_holder, flows.key_owner
        if back:
            to, source = source, to
        if flows.transposes is None:
            return x
        if to == flows.rank:
            flows.transposes.exchange([], []).wait()
            return x
        owner = flows.rank if back else source
        tokens = self.length(owner, seq_len)
        a, b = (t.new_empty((t.shape[0], tokens, *t.shape[2:])) for t in x)
        flows.transposes.exchange([(t, to) for t in x], [(a, source), (b, source)]).wait()
        return a, b

    def width(self, seq_len: int) -> int:
        """The largest number of tokens of a rank, to which the others' blocks are padded."""
        return max(self.length(rank, seq_len) for rank in range(self.topology.size))

    def wire_dtype(self, wire: Wire, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a setting means for a model's dtype."""
        return dtype if wire == "model" else accumulation_dtype(dtype)

    def length(self, rank: int, seq_len: int) -> int:
        """Number of tokens of a rank."""
        return self.settings.layout.length(rank, self.topology.size, seq_len)

    def _grid(self, rows: int, cols: int, nodes: Sequence[int]) -> Grid:
        if self.settings.transposed:
            return column_major(rows, cols)
        return row_major(rows, cols, nodes)


class GridAlgorithm(PointToPoint):
    """An algorithm on a grid; subclasses choose its schedule, and what it has for settings.

    Over peer memory copy engines push block by block; else a schedule gathers.
    """

    schedule: GridSchedule

    @property
    def by_blocks(self) -> bool:
        """Whether blocks go straight from rank to rank, over peer memory."""
        wanted = self.options.transport != "group" and not self.schedule.settings.transposed
        return wanted and self.topology.peer_access

    def make_channels(self, shape: Shape) -> None:
        """See Algorithm.make_channels."""
        if self.by_blocks:
            super().make_channels(shape)
        else:
            self.schedule.flows(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward."""
        if self.by_blocks:
            return super().forward(q, k, v, call)
        return self.schedule.forward(q, k, v, call)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward."""
        if self.by_blocks:
            return super().backward(dout, saved, call)
        return self.schedule.backward(dout, saved, call)

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> GridPlacement:
        """See Algorithm.placement."""
        grid = self.schedule.grid(shape)
        if not self.by_blocks:
            return self.schedule.placement(grid, shape, phase)
        settings = self.schedule.settings
        return GridBlocksPlacement(
            self.layout,
            self.topology.size,
            self.head_groups(shape),
            wide_partials=settings.partials == "float32",
            wide_gradients=settings.gradients == "float32",
            grid=grid,
            backward=phase == "backward",
        )

    def _make_plan(self, shape: Shape, mask: Mask, phase: Phase, rectangular: bool) -> Plan:
        if self.by_blocks:
            return super()._make_plan(shape, mask, phase, rectangular)
        return Algorithm._make_plan(self, shape, mask, phase, rectangular)

    def head_groups(self, shape: Shape) -> tuple[HeadGroup, ...]:
        """See PointToPoint.head_groups: as many as the bound on gathered K and V needs."""
        width = self.schedule.width(shape.seq_len)
        row = (shape.head_dim + shape.value_dim) * shape.element_bytes
        head = self.slots(shape) * shape.batch * width * row
        return bounded_groups(
            super().head_groups(shape), shape, head, self.schedule.settings.gathered_bytes
        )

    def slots(self, shape: Shape) -> int:
        """See PointToPoint.slots: a column's blocks are held until the last one of the row came."""
        rows, cols = self.schedule.grid_shape(shape)
        return rows + cols - 2 if min(rows, cols) > 1 else super().slots(shape)
