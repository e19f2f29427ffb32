"""Attention on a grid of ranks by collective operations: queries gathered in rows, keys in columns.

B batch, S local tokens, H query heads, G KV heads, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp_plugin.core import collective
from megatron_cp_plugin.core.algorithm import Call
from megatron_cp_plugin.core.assembly import assemble
from megatron_cp_plugin.core.grid import Grid
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.core.plan import Move, Plan
from megatron_cp_plugin.core.program import during
from megatron_cp_plugin.core.team import GatheringTeam, Team
from megatron_cp_plugin.core.tile_batches import Part, parts
from megatron_cp_plugin.core.tiles import plan_tiles
from megatron_cp_plugin.core.topology import Topology


class GridChannels:
    """Channels of a rank's row and column; making them is a collective operation."""

    def __init__(self, topology: Topology, grid: Grid) -> None:
        row = topology.subgroup(grid.row(topology.rank), "row")
        column = topology.subgroup(grid.column(topology.rank), "column")
        self.queries, self.outputs = row.channel("queries"), row.channel("outputs")
        self.keys, self.gradients = column.channel("keys"), column.channel("key gradients")


class Gathered:
    """What one rank does, for one length: gather, compute, merge or sum, and scatter.

    Partial outputs are scattered by an all-to-all and merged by the receiver. The backward gathers
    delta instead of the output.

    Source: Attention2D, Algorithms 1, 2 and 3. Differs: groups of heads overlap.
    """

    def __init__(self, plan: Plan, grid: Grid, channels: GridChannels, rank: int) -> None:
        """Args: plan: of forward or backward, under any mask."""
        width = max(sum(map(len, spans)) for spans in plan.spans)
        row, column = grid.row(rank), (grid.key_owners[other] for other in grid.column(rank))
        of_row, of_column = (
            assemble([plan.spans[owner] for owner in owners], width) for owners in (row, column)
        )
        self._teams: dict[bool, Team] = {
            False: GatheringTeam(channels.queries, channels.outputs, of_row),
            True: GatheringTeam(channels.keys, channels.gradients, of_column),
        }
        mine = (move for move in during(plan) if move.source == rank)
        self._rounds = collective.rounds(mine, plan.groups)
        self._heads = plan.groups[0].heads
        self._wide = any(move.wide for move in plan.moves)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Out and lse of the own queries."""
        dtype = accumulation_dtype(q.dtype) if self._wide else q.dtype
        compute = collective.attend(self._parts(call), call, dtype)
        return collective.forward(self._rounds, self._teams, q, k, v, compute)

    def backward(
        self, dout: Tensor, given: dict[str, Tensor], call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the own q, k and v. Args: given: these, out and lse."""
        dq, dk, dv = (torch.empty_like(given[name]) for name in "qkv")
        targets = {"dq": dq} if call.dq else {}
        targets |= {"dk": dk, "dv": dv} if call.dkv else {}
        compute = collective.differentiate(self._parts(call), call)
        collective.backward(self._rounds, self._teams, dout, given, targets, compute)
        return dq, dk, dv

    def _parts(self, call: Call) -> tuple[Part, ...]:
        """What is computed with the queries of the row and the keys of the column."""
        queries, keys = self._teams[False].order, self._teams[True].order
        rectangular = call.kernel.rectangular_causal
        tiles = plan_tiles(queries.spans, keys.spans, call.mask, rectangular=rectangular)
        return parts(tiles, queries.tokens, self._heads, call.packed)


def transposed(
    topology: Topology, moves: Sequence[Move], a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Two tensors of keys [B,S,G,D] as the moves exchange them among ranks."""
    rank = topology.rank
    sends = [(x, move.target) for move in moves if move.source == rank for x in (a, b)]
    receives = []
    for move in moves:
        if move.target == rank:
            a, b = (x.new_empty((len(x), move.tokens, *x.shape[2:])) for x in (a, b))
            receives += [(a, move.source), (b, move.source)]
    topology.channel("transposes").exchange(sends, receives).wait()
    return a, b
