"""What all schedules on a grid of ranks share: who stands where, flows of messages, transposes.

B batch, S local tokens, H query heads, G KV heads, D head dim, P = R * C ranks in R rows and C
columns. Queries meet in rows, keys in columns.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import Algorithm, Call, Saved, Shape, Traffic, Work
from megatron_cp_plugin.core.grid import Grid, cheapest, column_major, row_major
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology

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

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward."""

    @abstractmethod
    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward."""

    @abstractmethod
    def moved(self, rows: int, cols: int, shape: Shape, rank: int) -> Traffic:
        """What a rank sends on a grid of R x C, without transposes."""

    @abstractmethod
    def work(self, grid: Grid, seq_len: int, mask: Mask) -> tuple[Work, ...]:
        """See Algorithm.trace."""

    def traffic(self, shape: Shape, rank: int) -> Traffic:
        """See Algorithm.traffic."""
        rows, cols = self.grid_shape(shape)
        return self._with_transposes(self.moved(rows, cols, shape, rank), rows, cols, shape, rank)

    def trace(self, seq_len: int, mask: Mask) -> tuple[Work, ...]:
        """See Algorithm.trace. A grid that is chosen by bytes is that of equally many heads."""
        return self.work(self._grid(*self.grid_shape(Shape(1, seq_len, 1, 1, 1))), seq_len, mask)

    def grid_shape(self, shape: Shape) -> tuple[int, int]:
        """R and C: as set, or what moves the fewest bytes in forward and backward together."""

        def cost(rows: int, cols: int) -> int:
            # The last rank but one is not on the diagonal, where nothing is to be transposed.
            rank = max(0, self.topology.size - 2)
            moved = self.moved(rows, cols, shape, rank)
            total = self._with_transposes(moved, rows, cols, shape, rank)
            return total.forward_bytes + total.backward_bytes

        return cheapest(self.topology.size, self.settings.rows, self.settings.cols, cost)

    def flows(self, shape: Shape) -> Flows:
        """The grid for a problem; a collective operation the first time."""
        key = self.grid_shape(shape)
        if key not in self._flows:
            self._flows[key] = Flows(self._grid(*key), self.topology)
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

    def wire_bytes(self, wire: Wire, shape: Shape) -> int:
        """Bytes of an element that travels."""
        return shape.element_bytes if wire == "model" else shape.wide_bytes

    def length(self, rank: int, seq_len: int) -> int:
        """Number of tokens of a rank."""
        return self.settings.layout.length(rank, self.topology.size, seq_len)

    def _grid(self, rows: int, cols: int) -> Grid:
        if self.settings.transposed:
            return column_major(rows, cols)
        alone = rows == 1 or cols == 1
        return row_major(rows, cols, (0,) * self.topology.size if alone else self.topology.nodes)

    def _with_transposes(
        self, moved: Traffic, rows: int, cols: int, shape: Shape, rank: int
    ) -> Traffic:
        if not self.settings.transposed or rows == 1 or cols == 1:
            return moved
        owner = column_major(rows, cols).key_owners[rank]
        if owner == rank:
            return moved
        token = shape.batch * shape.kv_width * shape.element_bytes
        return Traffic(
            moved.forward_bytes + self.length(rank, shape.seq_len) * token,
            moved.forward_messages + 2,
            moved.backward_bytes + self.length(owner, shape.seq_len) * token,
            moved.backward_messages + 2,
        )


class GridAlgorithm(Algorithm):
    """An algorithm that is one schedule on a grid; subclasses choose which, and its settings."""

    windows = True
    schedule: GridSchedule

    def make_flows(self, shape: Shape) -> None:
        """See Algorithm.make_flows."""
        self.schedule.flows(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward."""
        return self.schedule.forward(q, k, v, call)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward."""
        return self.schedule.backward(dout, saved, call)

    def traffic(self, shape: Shape, mask: Mask, rank: int) -> Traffic:
        """See Algorithm.traffic. A mask saves pairs, but no bytes: whole blocks are gathered."""
        return self.schedule.traffic(shape, rank)

    def trace(self, seq_len: int, mask: Mask) -> tuple[Work, ...]:
        """See Algorithm.trace."""
        return self.schedule.trace(seq_len, mask)
