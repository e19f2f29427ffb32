"""Shared by allgather and attention2d: a grid of ranks, queries in rows and keys in columns.

B batch, S local tokens, H query heads, G KV heads, D head dim, P = R * C ranks in R rows and C
columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_cp_plugin.algorithms.grid_placements import (
    GatheredPlacement,
    GridBlocksPlacement,
    GridPlacement,
    GridRingPlacement,
)
from megatron_cp_plugin.algorithms.point_to_point import PointToPoint
from megatron_cp_plugin.core.caching import cached_method
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.head_groups import HeadGroup, group_count, head_groups
from megatron_cp_plugin.core.plans.compile import plan_of
from megatron_cp_plugin.core.plans.grid import Grid, cheapest, column_major, row_major
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask

Wire = Literal["model", "float32"]


class GridAlgorithm(PointToPoint):
    """Attention on a grid of ranks; subclasses say on which, and how blocks come together.

    Attributes: rows, cols: R and C; 0: whatever moves fewer bytes. partials: dtype in which partial
        outputs travel. transposed: columns need the keys of other ranks than their own.
    """

    rows = 0
    cols = 0
    partials: Wire = "model"
    transposed = False

    @dataclass(frozen=True)
    class Options(PointToPoint.Options):
        """Options of grids.

        Attributes: gradients: dtype in which partial gradients travel; summed in float32.
        """

        gradients: Wire = "model"

    options: Options

    # Looked up once a pass: at short lengths a step of training is bound by the host.
    @cached_property
    def _grid_shape(self) -> Callable[[Shape], tuple[int, int]]:
        return cached_method(self._cheapest, 256)

    @cached_property
    def kind(self) -> type[GridPlacement]:
        """How blocks come together: pushed by copy engines where these serve, else gathered."""
        return GridBlocksPlacement if self.transport.pushes else GatheredPlacement

    @cached_property
    def gathers(self) -> bool:
        """Whether blocks come by collective operations, not from rank to rank."""
        return self.kind is GatheredPlacement

    def grid_shape(self, shape: Shape) -> tuple[int, int]:
        """R and C: as set, or what moves the fewest bytes in forward and backward together."""
        return self._grid_shape(shape)

    def grid(self, shape: Shape) -> Grid:
        """The ranks that gather queries together, its rows, and keys, its columns."""
        return self._grid(*self.grid_shape(shape))

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> GridPlacement:
        """See Algorithm.placement."""
        return self._placed(self.kind, self.grid(shape), self.head_groups(shape, mask), phase)

    def _placed(
        self, kind: type[GridPlacement], grid: Grid, groups: tuple[HeadGroup, ...], phase: Phase
    ) -> GridPlacement:
        wide = self.partials == "float32", self.options.gradients == "float32"
        # What is gathered is so in both passes, of which one plan is derived then.
        backward = phase == "backward" and kind is not GatheredPlacement
        return kind(self.layout, self.topology.size, groups, *wide, grid=grid, backward=backward)

    def head_groups(self, shape: Shape, mask: Mask) -> tuple[HeadGroup, ...]:
        """See PointToPoint.head_groups."""
        count = group_count(self.options.chunks, shape.flop(self.topology.size))
        if self.topology.size == 1 or self.kind is GridRingPlacement:
            count = 1
        elif not self.gathers and 1 in self.grid_shape(shape):
            # Blocks overlap within a group too, and two of them are all that is held at a time.
            count = self.options.chunks or (1 if mask.special else self._few_groups(shape, count))
        # Where only K and V are gathered, groups that share them would have nothing to wait for.
        share_kv = self.gathers and self.grid_shape(shape)[1] > 1
        return head_groups(shape.heads, shape.kv_heads, count, share_kv=share_kv)

    def _few_groups(self, shape: Shape, count: int) -> int:
        """Groups where blocks go from rank to rank. Args: count: where they are gathered."""
        half = max(1, count // 2)
        if shape.kv_heads == shape.heads:
            return half
        # Most of the memory is that of queries, which few groups would not make less than gathers.
        return max(half, group_count(0, shape.flop(self.topology.size) // 4))

    def slots(self, shape: Shape, size: int) -> int:
        """See Algorithm.slots: a column's blocks are held until the last one of the row came."""
        rows, cols = self.grid_shape(shape)
        return rows + cols - 2 if min(rows, cols) > 1 else super().slots(shape, size)

    def _cheapest(self, shape: Shape) -> tuple[int, int]:
        size, whole = self.topology.size, head_groups(shape.heads, shape.kv_heads, 1)

        def cost(rows: int, cols: int) -> int:
            total, grid = 0, self._grid(rows, cols)
            for phase in PHASES:
                placed = self._placed(GatheredPlacement, grid, whole, phase)
                # The last rank but one is not on the diagonal, where nothing is transposed.
                rank = max(0, size - 2)
                plan = plan_of(placed, shape.seq_len, Mask(), phase, rank=rank)
                total += plan.sent(rank, shape).bytes
            return total

        return cheapest(size, self.rows, self.cols, cost)

    def _grid(self, rows: int, cols: int) -> Grid:
        """Where ranks stand; a collective operation the first time."""
        if self.transposed:
            return column_major(rows, cols)
        alone = rows == 1 or cols == 1
        return row_major(rows, cols, (0,) * (rows * cols) if alone else self.topology.nodes)
