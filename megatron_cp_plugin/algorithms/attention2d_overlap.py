"""Attention2D with rings in place of collective operations: every hop behind a computation.

B batch, S local tokens, H query heads, G KV heads, D head dim, R rows, C columns.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_cp_plugin.algorithms.grid import Flows, GridSchedule, shape_of
from megatron_cp_plugin.core.algorithm import (
    Call,
    Gradients,
    Saved,
    Shape,
    Traffic,
    Work,
    attend_block,
    differentiate_block,
)
from megatron_cp_plugin.core.comm import Communicator, Pending
from megatron_cp_plugin.core.grid import Grid
from megatron_cp_plugin.core.partial import (
    Accumulator,
    GradientSum,
    accumulation_dtype,
    delta_of,
    merge_all_into,
)
from megatron_cp_plugin.core.tiles import Mask, Tile, plan_tiles
from megatron_cp_plugin.kernels.base import Statistics

Block = tuple[Tensor, ...]
Pair = tuple[Tensor, Tensor]
KeySums = tuple[GradientSum, GradientSum]


@dataclass(frozen=True)
class _Ring:
    """A row or a column, around which blocks go down by one place a step.

    Attributes: owners: whose tokens the members' blocks are. lengths: how many these are.
    """

    owners: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.owners)

    def member(self, place: int, step: int) -> int:
        """Whose block is at a place at a step."""
        return (place + step) % self.size

    def tokens(self, place: int, steps: range) -> int:
        """How many tokens a place passes on at some steps."""
        return sum(self.lengths[self.member(place, step)] for step in steps)

    def hop(self, comm: Communicator, held: Block, step: int) -> Pending[Block]:
        """Passes on the block of a step and receives that of the next one, alike but in length."""
        place, size = comm.rank, self.size
        tokens = self.lengths[self.member(place, step + 1)]
        coming = tuple(_empty(x, tokens) for x in held)
        under_way = comm.exchange(
            [(x.contiguous(), (place - 1) % size) for x in held],
            [(x, (place + 1) % size) for x in coming],
        )
        return under_way.then(lambda _: coming)


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
        flows = self.flows(shape_of(q, k, call))
        row, column = self._rings(flows, call.seq_len)
        k, v = self.transpose(flows, (k, v), call.seq_len)
        wire = self.wire_dtype(self.settings.partials, q.dtype)
        arriving = row.hop(flows.queries, (q,), 0) if row.size > 1 else None
        total = Accumulator(q)
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
            partial = Accumulator(queries)
            for tile, members in _alike(self._tiles(owner, other, call) for other in column.owners):
                partial.add(tile.q, *_attend(queries, [keys[m] for m in members], tile, call))
            if merged is not None:
                partial.add(slice(0, queries.shape[1]), *_pair(merged.wait()))
            merged = row.hop(flows.outputs, partial.result(wire), step)
        if merged is not None:
            total.add(slice(0, q.shape[1]), *_pair(merged.wait()))
        out, lse = total.result()
        return out, lse, (q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward. Source: Attention2D, Algorithms 8 to 11."""
        q, k, v, out, lse = saved
        flows = self.flows(shape_of(q, k, call))
        row, column = self._rings(flows, call.seq_len)
        wire = self.wire_dtype(self.settings.gradients, q.dtype)
        block: Block = (q, dout, lse, delta_of(dout, out))
        arriving = row.hop(flows.queries, block, 0) if row.size > 1 else None
        own = _Queries(q, dout, Statistics(lse, out=out), GradientSum(q))
        keys = _Keys(column)
        for member, pair in _arriving_keys(flows.keys, column, (k, v)):
            keys.add(member, pair)
            keys.differentiate(own, member, self._tiles_of(flows.rank, column, call), call)
        visiting: _Queries | None = None
        tiles_of: tuple[tuple[Tile, ...], ...] = ((),) * column.size
        reduced: Pending[Block] | None = None
        for step in range(1, row.size):
            assert arriving is not None
            block = arriving.wait()
            visiting = _Queries(
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

    def moved(self, rows: int, cols: int, shape: Shape, rank: int) -> Traffic:
        """See GridSchedule.moved.

        Hops of blocks of S tokens: forward C-1 of Q, C-1 of out and lse, R-1 of K and V; backward
        C-1 of Q, dO, lse and delta, C-1 of dQ, R-1 of K and V, R-1 of dK and dV.
        """
        grid = self._grid(rows, cols)
        members, column = grid.row(rank), grid.column(rank)
        row_ring = self._ring(members, shape.seq_len)
        column_ring = self._ring(tuple(grid.key_owners[r] for r in column), shape.seq_len)
        place, column_place = members.index(rank), column.index(rank)
        sent, passed_on = (
            row_ring.tokens(place, range(cols - 1)),
            row_ring.tokens(place, range(1, cols)),
        )
        keys, key_sums = (
            column_ring.tokens(column_place, range(rows - 1)),
            column_ring.tokens(column_place, range(1, rows)),
        )
        element, wide = shape.element_bytes, shape.wide_bytes
        partial = self.wire_bytes(self.settings.partials, shape)
        gradient = self.wire_bytes(self.settings.gradients, shape)
        q, kv = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
        row_bytes = shape.heads * wide
        forward = sent * q * element + passed_on * (q * partial + row_bytes) + keys * kv * element
        backward = (
            sent * 2 * (q * element + row_bytes)
            + passed_on * q * gradient
            + kv * (keys * element + key_sums * gradient)
        )
        return Traffic(
            shape.batch * forward,
            3 * (cols - 1) + 2 * (rows - 1),
            shape.batch * backward,
            5 * (cols - 1) + 4 * (rows - 1),
        )

    def work(self, grid: Grid, seq_len: int, mask: Mask) -> tuple[Work, ...]:
        """See Algorithm.trace."""
        found = []
        for host in range(self.topology.size):
            column = grid.column(host)
            owners = tuple(grid.key_owners[rank] for rank in column)
            row = grid.row(host)
            for step in range(grid.rows):
                owner = owners[(column.index(host) + step) % grid.rows]
                found.append(self._work(step, host, host, (owner,), seq_len, mask))
            for step in range(1, grid.cols):
                query_owner = row[(row.index(host) + step) % grid.cols]
                last = grid.rows - 1
                found.append(self._work(last + step, host, query_owner, owners, seq_len, mask))
        return tuple(work for work in found if work.pairs)

    def _work(
        self,
        step: int,
        host: int,
        query_owner: int,
        key_owners: tuple[int, ...],
        seq_len: int,
        mask: Mask,
    ) -> Work:
        tiles = (self._plan(query_owner, owner, seq_len, mask, True) for owner in key_owners)
        pairs = sum(tile.area for found in tiles for tile in found)
        return Work(step, host, (query_owner,), key_owners, pairs)

    def _rings(self, flows: Flows, seq_len: int) -> tuple[_Ring, _Ring]:
        return self._ring(flows.row, seq_len), self._ring(flows.column_owners, seq_len)

    def _ring(self, owners: tuple[int, ...], seq_len: int) -> _Ring:
        return _Ring(owners, tuple(self.length(owner, seq_len) for owner in owners))

    def _tiles_of(
        self, query_owner: int, column: _Ring, call: Call
    ) -> tuple[tuple[Tile, ...], ...]:
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


@dataclass(frozen=True)
class _Queries:
    """A block of queries in the backward, and the sum of its gradient on this rank."""

    q: Tensor
    dout: Tensor
    statistics: Statistics
    dq: GradientSum


class _Keys:
    """The key blocks of a column in the backward, and the sums of their gradients on this rank."""

    def __init__(self, ring: _Ring) -> None:
        self.ring = ring
        self.sums: dict[int, KeySums] = {}
        self._pairs: dict[int, Pair] = {}

    def add(self, member: int, pair: Pair) -> None:
        """Takes a block that arrived."""
        self._pairs[member] = pair
        self.sums[member] = GradientSum(pair[0]), GradientSum(pair[1])

    def differentiate(
        self,
        queries: _Queries,
        member: int,
        tiles_of: Sequence[tuple[Tile, ...]],
        call: Call,
    ) -> None:
        """Adds the gradients of queries against one block."""
        differentiate_block(
            Gradients(queries.dq, *self.sums[member]),
            queries.dout,
            queries.q,
            *self._pairs[member],
            queries.statistics,
            tiles_of[member],
            call,
        )

    def differentiate_alike(
        self, queries: _Queries, tiles_of: Sequence[tuple[Tile, ...]], call: Call
    ) -> None:
        """Adds the gradients of queries against all blocks, in as few kernel calls as can be."""
        batch = queries.q.shape[0]
        for tile, members in _alike(tiles_of):
            count = len(members)
            rows = queries.statistics.rows(tile.q)
            assert rows.delta is not None
            k, v = _batched([self._pairs[member] for member in members], tile)
            dq, dk, dv = call.kernel.backward(
                _repeated(queries.dout[:, tile.q], count),
                _repeated(queries.q[:, tile.q], count),
                k,
                v,
                Statistics(_repeated(rows.lse, count), delta=_repeated(rows.delta, count)),
                scale=call.scale,
                causal=tile.causal,
            )
            wide = accumulation_dtype(dq.dtype)
            queries.dq.add(tile.q, dq.unflatten(0, (count, batch)).sum(0, dtype=wide))
            for member, of_k, of_v in zip(members, dk.chunk(count), dv.chunk(count), strict=True):
                sum_k, sum_v = self.sums[member]
                sum_k.add(tile.kv, of_k)
                sum_v.add(tile.kv, of_v)


def _arriving_keys(comm: Communicator, ring: _Ring, own: Pair) -> Iterator[tuple[int, Pair]]:
    """Every block of keys of the column as it arrives, beginning with one's own."""
    held = own
    for step in range(ring.size):
        arriving = ring.hop(comm, held, step) if step + 1 < ring.size else None
        yield ring.member(comm.rank, step), held
        if arriving is not None:
            held = _pair(arriving.wait())


def _pass_on(
    comm: Communicator,
    ring: _Ring,
    dq: GradientSum,
    before: Pending[Block] | None,
    step: int,
    wire: torch.dtype,
) -> Pending[Block]:
    """Adds what the ranks before found of a dQ, and passes the sum on."""
    others = None if before is None else before.wait()[0]
    return ring.hop(comm, (dq.result(wire, plus=others),), step)


def _scatter_keys(
    comm: Communicator, keys: _Keys, wire: torch.dtype, before_sending: Callable[[int], None]
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
    return _pair(reduced(ring.member(comm.rank, 0), None))


def _alike(
    tiles_of: Iterable[tuple[Tile, ...]],
) -> tuple[tuple[Tile, tuple[int, ...]], ...]:
    """Tiles against several blocks, each once with all the blocks it stands for."""
    blocks: dict[tuple[object, ...], tuple[Tile, list[int]]] = {}
    for block, tiles in enumerate(tiles_of):
        for tile in tiles:
            key = (tile.q.start, tile.q.stop, tile.kv.start, tile.kv.stop, tile.causal)
            blocks.setdefault(key, (tile, []))[1].append(block)
    return tuple((tile, tuple(found)) for tile, found in blocks.values())


def _attend(q: Tensor, keys: Sequence[Pair], tile: Tile, call: Call) -> Pair:
    """The same tile against several blocks in one kernel call, merged."""
    rows, count = q[:, tile.q], len(keys)
    k, v = _batched(keys, tile)
    outs, lses = call.kernel.forward(
        _repeated(rows, count), k, v, scale=call.scale, causal=tile.causal
    )
    if count == 1:
        return outs, lses
    wide = accumulation_dtype(q.dtype)
    batch, tokens, heads, _ = rows.shape
    out, lse = torch.empty_like(rows, dtype=wide), q.new_empty((batch, heads, tokens), dtype=wide)
    merge_all_into(out, lse, outs.unflatten(0, (count, batch)), lses.unflatten(0, (count, batch)))
    return out, lse


def _batched(keys: Sequence[Pair], tile: Tile) -> Pair:
    """What a tile sees of several blocks [B,S,G,D], one after the other along the batch."""
    if len(keys) == 1:
        k, v = keys[0]
        return k[:, tile.kv], v[:, tile.kv]
    return (
        torch.cat([k[:, tile.kv] for k, _ in keys]),
        torch.cat([v[:, tile.kv] for _, v in keys]),
    )


def _repeated(x: Tensor, count: int) -> Tensor:
    """[B, ...] -> [count * B, ...]; kernels do not all take a stride of zero."""
    return x if count == 1 else x.expand(count, *x.shape).flatten(0, 1).contiguous()


def _empty(like: Tensor, tokens: int) -> Tensor:
    """An empty tensor of `tokens` tokens, otherwise like [B,S,heads,D] or [B,H,S]."""
    batch, second, *rest = like.shape
    return like.new_empty((batch, tokens, *rest) if rest[1:] else (batch, second, tokens))


def _pair(block: Block) -> Pair:
    a, b = block
    return a, b
