"""Blocks of queries and keys that go around rings, and what is computed with several of them.

B batch, S tokens of a block, H query heads, G KV heads, D head dim.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import (
    Call,
    Gradients,
    attend_tile,
    differentiate_block,
    differentiate_tile,
)
from megatron_cp_plugin.core.comm import Communicator, Pending
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.partial import GradientSum, accumulation_dtype, merge_all_into
from megatron_cp_plugin.core.tiles import Tile

Block = tuple[Tensor, ...]
Pair = tuple[Tensor, Tensor]
KeySums = tuple[GradientSum, GradientSum]


@dataclass(frozen=True)
class Ring:
    """A row or a column, around which blocks go down by one place a step.

    Attributes: owners: whose tokens the members' blocks are. lengths: how many these are.
    """

    owners: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of members."""
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


@dataclass(frozen=True)
class Queries:
    """A block of queries in the backward, and the sum of its gradient on this rank."""

    q: Tensor
    dout: Tensor
    statistics: Statistics
    dq: GradientSum


class Keys:
    """The key blocks of a column in the backward, and the sums of their gradients on this rank."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.sums: dict[int, KeySums] = {}
        self._pairs: dict[int, Pair] = {}

    def add(self, member: int, pair: Pair) -> None:
        """Takes a block that arrived."""
        self._pairs[member] = pair
        self.sums[member] = GradientSum(pair[0]), GradientSum(pair[1])

    def differentiate(
        self,
        queries: Queries,
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
        self, queries: Queries, tiles_of: Sequence[tuple[Tile, ...]], call: Call
    ) -> None:
        """Adds the gradients of queries against all blocks, in as few kernel calls as can be."""
        batch = queries.q.shape[0]
        for tile, members in alike(tiles_of):
            count = len(members)
            rows = queries.statistics.rows(tile.q)
            assert rows.delta is not None
            k, v = _batched([self._pairs[member] for member in members], tile)
            dq, dk, dv = differentiate_tile(
                _repeated(queries.dout[:, tile.q], count),
                _repeated(queries.q[:, tile.q], count),
                k,
                v,
                Statistics(_repeated(rows.lse, count), delta=_repeated(rows.delta, count)),
                tile,
                call,
            )
            wide = accumulation_dtype(dq.dtype)
            queries.dq.add(tile.q, dq.unflatten(0, (count, batch)).sum(0, dtype=wide))
            for member, of_k, of_v in zip(members, dk.chunk(count), dv.chunk(count), strict=True):
                sum_k, sum_v = self.sums[member]
                sum_k.add(tile.kv, of_k)
                sum_v.add(tile.kv, of_v)


def alike(
    tiles_of: Iterable[tuple[Tile, ...]],
) -> tuple[tuple[Tile, tuple[int, ...]], ...]:
    """Tiles against several blocks, each once with all the blocks it stands for."""
    blocks: dict[tuple[object, ...], tuple[Tile, list[int]]] = {}
    for block, tiles in enumerate(tiles_of):
        for tile in tiles:
            edges = tile.q.start, tile.q.stop, tile.kv.start, tile.kv.stop
            key = (*edges, tile.causal, tile.reverse, tile.document_bounds)
            blocks.setdefault(key, (tile, []))[1].append(block)
    return tuple((tile, tuple(found)) for tile, found in blocks.values())


def attend_alike(q: Tensor, keys: Sequence[Pair], tile: Tile, call: Call) -> Pair:
    """The same tile against several blocks in one kernel call, merged."""
    rows, count = q[:, tile.q], len(keys)
    k, v = _batched(keys, tile)
    outs, lses = attend_tile(_repeated(rows, count), k, v, tile, call)
    if count == 1:
        return outs, lses
    wide = accumulation_dtype(q.dtype)
    batch, tokens, heads, _ = rows.shape
    out = q.new_empty((batch, tokens, heads, outs.shape[3]), dtype=wide)
    lse = q.new_empty((batch, heads, tokens), dtype=wide)
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


def pair_of(block: Block) -> Pair:
    """A block that is two tensors, as that."""
    a, b = block
    return a, b
