"""What allgather and attention2d share: queries meet in rows of a grid of ranks, keys in columns.

B batch, S local tokens, H query heads, G KV heads, D head dim, P = R * C ranks in R rows and C
columns.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_cp_plugin.algorithms.grid_placements import (
    GatheredPlacement,
    GridPlacement,
    GridRingPlacement,
)
from megatron_cp_plugin.algorithms.point_to_point import PointToPoint
from megatron_cp_plugin.core import collective
from megatron_cp_plugin.core.algorithm import Algorithm, Call, Saved
from megatron_cp_plugin.core.assembly import assemble
from megatron_cp_plugin.core.caching import cached_method
from megatron_cp_plugin.core.comm import Communicator, Phase
from megatron_cp_plugin.core.derive import plan_of
from megatron_cp_plugin.core.grid import Grid, cheapest, column_major, row_major
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.core.pipeline import HeadGroup, group_count, head_groups
from megatron_cp_plugin.core.plan import PHASES, Move, Plan, Setting
from megatron_cp_plugin.core.program import during
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask, Part, parts, plan_tiles
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ContextParallelError

Wire = Literal["model", "float32"]


class GridAlgorithm(PointToPoint):
    """Attention on a grid of ranks; subclasses say on which, and how blocks come together.

    Over peer memory copy engines push block by block; else collective operations gather them.

    Attributes: rows, cols: R and C; 0: whatever moves fewer bytes. partials: dtype in which partial
        outputs travel. gathered_bytes: bound on the K and V of others; None: no bound.
        transposed: columns need the keys of other ranks than their own.
    """

    rows = 0
    cols = 0
    partials: Wire = "model"
    gathered_bytes: int | None = None
    transposed = False

    @dataclass(frozen=True)
    class Options(PointToPoint.Options):
        """Options of grids.

        Attributes: gradients: dtype in which partial gradients travel; summed in float32.
        """

        gradients: Wire = "model"

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        # Looked up once a pass: at short lengths a step of training is bound by the host.
        self._grid_shape = cached_method(self._cheapest, 256)
        self._teams = cached_method(self._make_teams, 64)
        self._rounds = cached_method(self._make_rounds, 64)
        self._channels_of: dict[tuple[int, int], tuple[Communicator, ...]] = {}

    @property
    @abstractmethod
    def kind(self) -> type[GridPlacement]:
        """How blocks come together."""

    @property
    def pushed(self) -> bool:
        """Whether copy engines can push blocks, and shall."""
        return self.options.transport != "group" and self.topology.peer_access

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> GridPlacement:
        """See Algorithm.placement."""
        return self._placed(self.kind, self._grid(shape), self.head_groups(shape), phase)

    def _placed(
        self, kind: type[GridPlacement], grid: Grid, groups: tuple[HeadGroup, ...], phase: Phase
    ) -> GridPlacement:
        wide = self.partials == "float32", self.options.gradients == "float32"
        backward = phase == "backward"
        return kind(self.layout, self.topology.size, groups, *wide, grid=grid, backward=backward)

    def grid_shape(self, shape: Shape) -> tuple[int, int]:
        """R and C: as set, or what moves the fewest bytes in forward and backward together."""
        return self._grid_shape(shape)

    def _cheapest(self, shape: Shape) -> tuple[int, int]:
        size, whole = self.topology.size, head_groups(shape.heads, shape.kv_heads, 1)
        # The last rank but one is not on the diagonal, where nothing is to be transposed.
        rank = max(0, size - 2)

        def cost(rows: int, cols: int) -> int:
            grid = (
                column_major(rows, cols) if self.transposed else row_major(rows, cols, (0,) * size)
            )
            settings = ((phase, Setting(shape.seq_len, Mask(), phase)) for phase in PHASES)
            return sum(
                plan_of(self._placed(GatheredPlacement, grid, whole, phase), setting)
                .sent(rank, shape)
                .bytes
                for phase, setting in settings
            )

        return cheapest(size, self.rows, self.cols, cost)

    def _grid(self, shape: Shape) -> Grid:
        """Where ranks stand; a collective operation the first time."""
        rows, cols = self.grid_shape(shape)
        if self.transposed:
            return column_major(rows, cols)
        alone = rows == 1 or cols == 1
        return row_major(rows, cols, (0,) * (rows * cols) if alone else self.topology.nodes)

    def head_groups(self, shape: Shape) -> tuple[HeadGroup, ...]:
        """See PointToPoint.head_groups: as many as the bound on the K and V of others needs.

        Raises: ContextParallelError if it cannot be kept.
        """
        size, (rows, cols) = self.topology.size, self.grid_shape(shape)
        if self.kind is GridRingPlacement:
            return head_groups(shape.heads, shape.kv_heads, 1)
        if self.kind is GatheredPlacement:
            most = group_count(self.options.chunks, shape.flop(size)) if size > 1 else 1
            # Where only K and V travel, groups that share them would have nothing to wait for.
            groups = head_groups(shape.heads, shape.kv_heads, most, share_kv=cols > 1)
            # One group is computed with while the next one arrives, or is put in order.
            blocks = 2 * rows if rows > 1 else 0
        else:
            groups, blocks = super().head_groups(shape), self.slots(shape)
        width = max(self.layout.length(rank, size, shape.seq_len) for rank in range(size))
        row = (shape.head_dim + shape.value_dim) * shape.element_bytes
        head, bound, count = blocks * shape.batch * width * row, self.gathered_bytes, len(groups)
        while bound is not None and groups[0].kv_heads * head > bound:
            count += 1
            if count > shape.kv_heads:
                raise ContextParallelError(
                    f"gathered K and V take {head / 2**20:.0f} MiB even by single heads, got a "
                    f"bound of {bound / 2**20:.0f} MiB: raise it, or shorten the sequence"
                )
            groups = head_groups(shape.heads, shape.kv_heads, count, share_kv=False)
        return groups

    def slots(self, shape: Shape) -> int:
        """See PointToPoint.slots: a column's blocks are held until the last one of the row came."""
        rows, cols = self.grid_shape(shape)
        return rows + cols - 2 if min(rows, cols) > 1 else super().slots(shape)

    def make_channels(self, shape: Shape) -> None:
        """See Algorithm.make_channels."""
        if self.kind is GatheredPlacement:
            self._team_channels(self._grid(shape))
        else:
            super().make_channels(shape)
        if self._rounds(shape, "forward")[1]:
            self.topology.channel("transposes")

    def _team_channels(self, grid: Grid) -> tuple[Communicator, ...]:
        """Of queries, outputs, keys and their gradients; making them is a collective operation."""
        key, rank = (grid.rows, grid.cols), self.topology.rank
        if key not in self._channels_of:
            row = self.topology.subgroup(grid.row(rank), "row")
            column = self.topology.subgroup(grid.column(rank), "column")
            of_row, of_column = ("queries", "outputs"), ("keys", "key gradients")
            self._channels_of[key] = (
                *map(row.channel, of_row),
                *map(column.channel, of_column),
            )
        return self._channels_of[key]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward."""
        shape = Shape.of(q, k, v, call.seq_len)
        plan, handed_over = self._rounds(shape, "forward")
        k, v = self._hand_over(handed_over, k, v)
        if self.kind is not GatheredPlacement:
            return super().forward(q, k, v, call)
        dtype = accumulation_dtype(q.dtype) if self.partials == "float32" else q.dtype
        teams = self._teams(shape)
        compute = collective.attend(_parts(teams, call), call, dtype)
        out, lse = collective.forward(plan, teams, q, k, v, compute)
        return out, lse, (q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward."""
        q, k, v, out, lse = saved
        shape = Shape.of(q, k, v, call.seq_len)
        plan, handed_over = self._rounds(shape, "backward")
        if self.kind is not GatheredPlacement:
            dq, dk, dv = super().backward(dout, saved, call)
        else:
            teams = self._teams(shape)
            compute = collective.differentiate(_parts(teams, call), call)
            given = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
            dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
            targets = {"dq": dq} if call.dq else {}
            targets |= {"dk": dk, "dv": dv} if call.dkv else {}
            collective.backward(plan, teams, dout, given, targets, compute)
        if call.dkv:
            dk, dv = self._hand_over(handed_over, dk, dv)
        return dq, dk, dv

    def _hand_over(self, moves: tuple[Move, ...], a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """K and V to where their column needs them, or their gradients back to their owner."""
        if not moves:
            return a, b
        rank, sends, receives = self.topology.rank, [], []
        for move in moves:
            if move.source == rank:
                sends += [(a, move.target), (b, move.target)]
        for move in moves:
            if move.target == rank:
                a, b = (x.new_empty((len(x), move.tokens, *x.shape[2:])) for x in (a, b))
                receives += [(a, move.source), (b, move.source)]
        self.topology.channel("transposes").exchange(sends, receives).wait()
        return a, b

    def _make_rounds(
        self, shape: Shape, phase: Phase
    ) -> tuple[tuple[collective.Round, ...], tuple[Move, ...]]:
        """What comes together, and keys that change hands before or after; with every mask."""
        plan = self.plan(shape, Mask(), phase)
        inner = during(plan)
        mine = (move for move in inner if move.source == self.topology.rank)
        return collective.rounds(mine, plan.groups), tuple(set(plan.moves).difference(inner))

    def _make_teams(self, shape: Shape) -> dict[bool, collective.Team]:
        grid, rank, size = self._grid(shape), self.topology.rank, self.topology.size
        spans = [self.layout.spans(other, size, shape.seq_len) for other in range(size)]
        width = max(sum(map(len, own)) for own in spans)
        row, column = grid.row(rank), (grid.key_owners[other] for other in grid.column(rank))
        of_row, of_column = (
            assemble([spans[owner] for owner in owners], width) for owners in (row, column)
        )
        queries, outputs, keys, gradients = self._team_channels(grid)
        return {
            False: collective.GatheringTeam(queries, outputs, of_row),
            True: collective.GatheringTeam(keys, gradients, of_column),
        }

    def _make_plan(self, shape: Shape, mask: Mask, phase: Phase, rectangular: bool) -> Plan:
        kind: type[Algorithm] = Algorithm if self.kind is GatheredPlacement else PointToPoint
        return kind._make_plan(self, shape, mask, phase, rectangular)


def _parts(teams: dict[bool, collective.Team], call: Call) -> tuple[Part, ...]:
    """What this rank computes with the queries of its row and the keys of its column."""
    queries, keys = teams[False].order, teams[True].order
    rectangular = call.kernel.rectangular_causal
    tiles = plan_tiles(queries.spans, keys.spans, call.mask, rectangular=rectangular)
    return parts(tiles, queries.tokens)
