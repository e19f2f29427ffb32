"""Executes attention on a grid of ranks: queries are gathered in rows, keys in columns.

B batch, S local tokens, H query heads, G KV heads, D head dim.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import Call, Saved
from megatron_cp_plugin.core.blocks.assembly import Assembly, Contiguous, assemble
from megatron_cp_plugin.core.blocks.owned import Owned
from megatron_cp_plugin.core.blocks.rows import Rows, between, positions_of_all, row_count
from megatron_cp_plugin.core.execution import collective
from megatron_cp_plugin.core.execution.team import GatheringTeam, Team, Travelling
from megatron_cp_plugin.core.execution.transport import REDISTRIBUTED, redistribute
from megatron_cp_plugin.core.masks.tile_batches import Part, parts
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.core.plans.grid import Grid
from megatron_cp_plugin.core.plans.plan import Move, Plan, during, outside
from megatron_cp_plugin.core.topology import Topology


class Gathered:
    """What one rank does, for one length: gather, compute, merge or sum, and scatter.

    Partial outputs are scattered by an all-to-all and merged by the receiver. The backward gathers
    delta instead of the output.

    Source: Attention2D, Algorithms 1, 2 and 3. Differs: groups of heads overlap.
    """

    def __init__(self, plan: Plan, grid: Grid, topology: Topology) -> None:
        """Makes the channels it needs, a collective operation. Args: plan: of one pass."""
        self._plan, self._topology, rank = plan, topology, topology.rank
        if outside(plan):
            topology.channel(REDISTRIBUTED)
        row, column = grid.row(rank), grid.keys(rank)
        moves = during(plan)
        # The same rows for all groups of heads.
        first = [
            move
            for move in moves
            if move.needed == 0 and not move.result and rank in (move.source, move.target)
        ]
        queries = _order(plan, first, row, rank, of_keys=False)
        keys = _order(plan, first, column, grid.key_owners[rank], of_keys=True)
        in_row = topology.subgroup(row, "row")
        in_column = topology.subgroup(grid.column(rank), "column")
        self._teams: dict[bool, Team] = {
            False: GatheringTeam(in_row.channel("queries"), in_row.channel("outputs"), *queries),
            True: GatheringTeam(
                in_column.channel("keys"), in_column.channel("key gradients"), *keys
            ),
        }
        mine = (move for move in moves if move.source == rank)
        self._rounds = collective.rounds(mine, plan.groups)
        self._heads = plan.groups[0].heads
        self._wide = any(move.wide for move in plan.moves)
        computes = (compute for compute in plan.computes if compute.rank == rank)
        tiles = (plan.tiles(compute) for compute in computes)  # the same of all groups of heads
        self._tiles = next(tiles, ())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """As of `Algorithm`."""
        k, v = redistribute(self._topology, self._plan, k, v)
        dtype = accumulation_dtype(q.dtype) if self._wide else q.dtype
        compute = collective.attend(self._parts(call), call, dtype)
        out, lse = collective.forward(self._rounds, self._teams, q, k, v, compute)
        return out, lse, (q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """As of `Algorithm`."""
        given = dict(zip(("q", "k", "v", "out", "lse"), saved, strict=True))
        dq, dk, dv = (torch.empty_like(given[name]) for name in "qkv")
        compute = collective.differentiate(self._parts(call), call)
        collective.backward(self._rounds, self._teams, dout, given, (dq, dk, dv), call, compute)
        return dq, *redistribute(self._topology, self._plan, dk, dv)

    def _parts(self, call: Call) -> tuple[Part, ...]:
        """What is computed with the queries of the row and the keys of the column."""
        packed, gaps = call.packed, call.kernel.gaps
        return parts(self._tiles, self._teams[False].order.tokens, self._heads, packed, gaps)


def _order(
    plan: Plan, moves: Sequence[Move], members: Sequence[int], own: int, *, of_keys: bool
) -> tuple[Assembly, Travelling | None]:
    """The tokens that a rank has in the end, and what travels of its own.

    Args: moves: from or to it. members: whose blocks they are, in the order of the channel. own:
        whose block it has at the beginning.
    """
    travelling = [move for move in moves if move.of_keys == of_keys]
    if not travelling:
        members = [own]
    rows = {move.block.owners[0]: move.block.rows for move in travelling}
    width = max((move.tokens for move in travelling), default=plan.spans.lengths[own])
    return _ordered(plan.spans, tuple(members), own, tuple(sorted(rows.items())), width)


@lru_cache(maxsize=64)  # both passes of a micro-batch have the same
def _ordered(
    owned: Owned,
    members: tuple[int, ...],
    own: int,
    travelling: tuple[tuple[int, Rows], ...],
    width: int,
) -> tuple[Assembly, Travelling | None]:
    """See `_order`. Args: travelling: which rows of each member."""
    rows = dict(travelling)
    if all(row_count(rows[owner]) == owned.lengths[owner] for owner in rows):
        return assemble([owned[owner] for owner in members], width), None
    whole = between(0, owned.lengths[own])
    some = [(owned[owner], whole if owner == own else rows[owner]) for owner in members]
    order = Contiguous(*positions_of_all(some), len(members), width)
    return order, Travelling(members.index(own), rows[own])
