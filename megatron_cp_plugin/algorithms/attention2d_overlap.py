"""Attention2D with rings in place of collective operations: every hop behind a computation.

B batch, S local tokens, H query heads, G KV heads, D head dim, R rows, C columns.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_cp_plugin.algorithms.attention2d_blocks import (
    Block,
    Keys,
    Pair,
    Queries,
    Ring,
    alike,
    attend_alike,
    pair_of,
)
from megatron_cp_plugin.algorithms.grid import Flows, GridRingPlacement, GridSchedule
from megatron_cp_plugin.core.algorithm import Call, Saved, attend_block
from megatron_cp_plugin.core.comm import Communicator, Pending, Phase
from megatron_cp_plugin.core.grid import Grid
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.partial import Accumulator, GradientSum, delta_of
from megatron_cp_plugin.core.pipeline import head_groups
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask, Tile, plan_tiles


class RingSchedule(GridSchedule):
    """K and V go around the columns, then Q around the rows, and partial outputs behind it.

    While K and V arrive a rank computes its own queries against each block. Then it has all keys
    of its column, and computes every block of queries that comes by against all of them: key
    blocks whose tiles have the same shape in one kernel call, which makes at most two calls on
    equal blocks where the paper needed one for each block. The backward works alike; dK and dV are
    reduced and scattered behind the computation with the last block of queries.

    Source: Attention2D, Algorithms 4 to 11. Differs: delta travels instead of the output; grids
    need not be square.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward. Source: Attention2D, Algorithms 4, 5 and 6."""
        flows = self.flows(Shape.of(q, k, v, call.seq_len))
        row, column = self._rings(flows, call.seq_len)
        k, v = self.transpose(flows, (k, v), call.seq_len)
        wire = self.wire_dtype(self.settings.partials, q.dtype)
        arriving = row.hop(flows.queries, (q,), 0) if row.size > 1 else None
        total = Accumulator(q, v.shape[3])
        keys: dict[int, Pair] = {}
        for member, pair in _arriving_keys(flows.keys, column, (k, v)):
            keys[member] = pair
            attend_block(
                total, q, *pair, self._tiles(flows.rank, column.owners[member], call), call
            )
        merged: Pending[Block] | None = None
        for step in range(1, row.size):
            assert arriving is not None
            held = arriving.wait()
            if step + 1 < row.size:
                arriving = row.hop(flows.queries, held, step)
            (queries,) = held
            owner = row.owners[row.member(flows.queries.rank, step)]
            partial = Accumulator(queries, v.shape[3])
            for tile, members in alike(self._tiles(owner, other, call) for other in column.owners):
                partial.add(tile.q, *attend_alike(queries, [keys[m] for m in members], tile, call))
            if merged is not None:
                partial.add(slice(0, queries.shape[1]), *pair_of(merged.wait()))
            merged = row.hop(flows.outputs, partial.result(wire), step)
        if merged is not None:
            total.add(slice(0, q.shape[1]), *pair_of(merged.wait()))
        out, lse = total.result()
        return out, lse, (q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward. Source: Attention2D, Algorithms 8 to 11."""
        q, k, v, out, lse = saved
        flows = self.flows(Shape.of(q, k, v, call.seq_len))
        row, column = self._rings(flows, call.seq_len)
        wire = self.wire_dtype(self.settings.gradients, q.dtype)
        block: Block = (q, dout, lse, delta_of(dout, out))
        arriving = row.hop(flows.queries, block, 0) if row.size > 1 else None
        own = Queries(q, dout, Statistics(lse, out=out), GradientSum(q))
        keys = Keys(column)
        for member, pair in _arriving_keys(flows.keys, column, (k, v)):
            keys.add(member, pair)
            keys.differentiate(own, member, self._tiles_of(flows.rank, column, call), call)
        visiting: Queries | None = None
        tiles_of: tuple[tuple[Tile, ...], ...] = ((),) * column.size
        reduced: Pending[Block] | None = None
        for step in range(1, row.size):
            assert arriving is not None
            block = arriving.wait()
            visiting = Queries(
                block[0], block[1], Statistics(block[2], delta=block[3]), GradientSum(block[0])
            )
            owner = row.owners[row.member(flows.queries.rank, step)]
            tiles_of = self._tiles_of(owner, column, call)
            if step + 1 == row.size:
                break  # the last block is computed behind the scatter of dK and dV
            arriving = row.hop(flows.queries, block, step)
            keys.differentiate_alike(visiting, tiles_of, call)
            reduced = _pass_on(flows.outputs, row, visiting.dq, reduced, step, wire)

        def before_sending(member: int) -> None:
            if visiting is not None:
                keys.differentiate(visiting, member, tiles_of, call)

        returned: Tensor | None = None
        gradients = _scatter_keys(flows.key_gradients, keys, wire, before_sending)
        if visiting is not None:
            last = row.size - 1
            reduced = _pass_on(flows.outputs, row, visiting.dq, reduced, last, wire)
            (returned,) = reduced.wait()
        dq = own.dq.result(plus=returned)
        return (dq, *self.transpose(flows, gradients, call.seq_len, back=True))

    def placement(self, grid: Grid, shape: Shape, phase: Phase) -> GridRingPlacement:
        """See GridSchedule.placement."""
        return GridRingPlacement(
            self.settings.layout,
            self.topology.size,
            head_groups(shape.heads, shape.kv_heads, 1),
            wide_partials=self.settings.partials == "float32",
            wide_gradients=self.settings.gradients == "float32",
            grid=grid,
            backward=phase == "backward",
        )

    def _rings(self, flows: Flows, seq_len: int) -> tuple[Ring, Ring]:
        return self._ring(flows.row, seq_len), self._ring(flows.column_owners, seq_len)

    def _ring(self, owners: tuple[int, ...], seq_len: int) -> Ring:
        return Ring(owners, tuple(self.length(owner, seq_len) for owner in owners))

    def _tiles_of(self, query_owner: int, column: Ring, call: Call) -> tuple[tuple[Tile, ...], ...]:
        """What a block of queries sees of each block of keys of the column."""
        return tuple(self._tiles(query_owner, owner, call) for owner in column.owners)

    def _tiles(self, query_owner: int, key_owner: int, call: Call) -> tuple[Tile, ...]:
        return self._plan(
            query_owner, key_owner, call.seq_len, call.mask, call.kernel.rectangular_causal
        )

    def _plan(
        self, query_owner: int, key_owner: int, seq_len: int, mask: Mask, rectangular: bool
    ) -> tuple[Tile, ...]:
        layout, size = self.settings.layout, self.topology.size
        return plan_tiles(
            layout.spans(query_owner, size, seq_len),
            layout.spans(key_owner, size, seq_len),
            mask,
            rectangular=rectangular,
        )


def _arriving_keys(comm: Communicator, ring: Ring, own: Pair) -> Iterator[tuple[int, Pair]]:
    """Every block of keys of the column as it arrives, beginning with one's own."""
    held = own
    for step in range(ring.size):
        arriving = ring.hop(comm, held, step) if step + 1 < ring.size else None
        yield ring.member(comm.rank, step), held
        if arriving is not None:
            held = pair_of(arriving.wait())


def _pass_on(
    comm: Communicator,
    ring: Ring,
    dq: GradientSum,
    before: Pending[Block] | None,
    step: int,
    wire: torch.dtype,
) -> Pending[Block]:
    """Adds what the ranks before found of a dQ, and passes the sum on."""
    others = None if before is None else before.wait()[0]
    return ring.hop(comm, (dq.result(wire, plus=others),), step)


def _scatter_keys(
    comm: Communicator, keys: Keys, wire: torch.dtype, before_sending: Callable[[int], None]
) -> Pair:
    """Reduces and scatters dK and dV in the column: a block's sum goes around and ends at home.

    Args: before_sending: computes what is still missing from a block's sum.
    """
    ring = keys.ring
    under_way: Pending[Block] | None = None

    def reduced(member: int, dtype: torch.dtype | None) -> Block:
        before_sending(member)
        others = (None, None) if under_way is None else under_way.wait()
        pairs = zip(keys.sums[member], others, strict=True)
        return tuple(total.result(dtype, plus=other) for total, other in pairs)

    for step in range(1, ring.size):
        under_way = ring.hop(comm, reduced(ring.member(comm.rank, step), wire), step)
    return pair_of(reduced(ring.member(comm.rank, 0), None))
