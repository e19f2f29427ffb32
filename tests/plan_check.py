"""Checks a whole plan: an independent account of what its ranks compute, hold and send.

A plan is correct if every visible pair of a query and a key is computed once for every head, what a
rank computes with, or sends on, is there by then, every result reaches the owner of its tokens
once, and ranks that post messages in the order of the plan never wait for each other in a circle.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.call import HeadGroup, Shape
from megatron_cp_plugin.core.plans.plan import (
    OF_KEYS,
    PHASES,
    Block,
    Compute,
    Move,
    Plan,
    Side,
    row_bytes,
)
from megatron_cp_plugin.core.ranges import Ranges, between
from megatron_cp_plugin.core.tiles import Mask, Tile, TileTable
from tests.span_masks import pairs_of, seen_by


class PlanError(Exception):
    """A plan that computes something else than attention, or never ends."""


class Traffic(NamedTuple):
    """What one rank sends in one attention layer: bytes of payload, and numbers of messages."""

    forward_bytes: int
    forward_messages: int
    backward_bytes: int
    backward_messages: int


def traffic_of(algorithm: Algorithm, shape: Shape, mask: Mask, rank: int) -> Traffic:
    """What a rank sends, according to the plans of both passes."""
    forward, backward = (sent_by(algorithm.plan(shape, mask, one), rank, shape) for one in PHASES)
    return Traffic(*forward, *backward)


def sent_by(plan: Plan, rank: int, shape: Shape, nodes: Sequence[int] = ()) -> tuple[int, int]:
    """Bytes and messages of a rank. Args: nodes: of each rank; if given, only to other nodes."""
    moves = [move for move in plan.moves if move.source == rank]
    if nodes:
        moves = [move for move in moves if nodes[move.target] != nodes[rank]]
    rows = ((row_bytes(name, shape, x.heads, x.wide), x) for x in moves for name in _tensors(x))
    total = sum(row * move.tokens for row, move in rows)
    return shape.batch * total, sum(len(move.messages) for move in moves)


At = tuple[int, str, int, int]  # rank, tensor, owner of its tokens, share of the heads


def check(plan: Plan, *, rectangular: bool = True) -> None:
    """Raises: PlanError that says what is wrong, if anything is."""
    # All that a rank waits for in a step was posted by all ranks in earlier steps. So no rank can
    # wait for one that waits for it: of all ranks that wait, those in the earliest step have all.
    for move in plan.moves:
        if move.needed <= move.posted:
            raise PlanError(f"rank {move.target} waits before rank {move.source} posts: {move}")
    _check_pairs(plan, rectangular)
    _check_inputs(plan)
    _check_results(plan)


def _check_pairs(plan: Plan, rectangular: bool) -> None:
    visible = seen_by(plan.mask, sum(len(span) for spans in plan.spans for span in spans))
    found: dict[tuple[int, int, int], Tensor] = {}
    for compute in plan.computes:
        group = compute.share, compute.heads.q.start, compute.heads.q.stop
        if group not in found:
            found[group] = torch.zeros_like(visible)
        sides = (_positions(plan, x) for x in (compute.queries, compute.keys))
        rows, cols = (torch.tensor(side, dtype=torch.int64) for side in sides)
        tiles = plan.tiles(compute, rectangular=rectangular)
        found[group][rows[:, None], cols] += pairs_of(tiles, (len(rows), len(cols)))
    for share in range(plan.shares):
        groups = sorted(group[1:] for group in found if group[0] == share)
        heads = [head for start, stop in groups for head in range(start, stop)]
        if visible.any() and heads != list(range(plan.heads.heads)):
            raise PlanError(f"share {share} of the heads is computed for heads {heads}")
    for (share, first, _), count in found.items():
        for query, key in (count != visible).nonzero()[:1].tolist():
            raise PlanError(
                f"query {query} meets key {key} {count[query, key]} times for head {first} of "
                f"share {share}, got {visible[query, key]} from the mask"
            )


def table_of(tiles: Sequence[Tile]) -> TileTable:
    """These tiles."""
    q, kv = (
        Ranges(np.array([(x.start, x.stop, x.step or 1) for x in side]).T)
        for side in ([tile.q for tile in tiles], [tile.kv for tile in tiles])
    )
    causal, reverse = np.array([(tile.causal, tile.reverse) for tile in tiles]).T
    return TileTable(q, kv, causal, reverse, np.array([tile.window for tile in tiles]))


def _positions(plan: Plan, block: Block) -> list[int]:
    return [n for span in plan.positions(block) for n in span.positions]


class Extent(NamedTuple):
    """Some tokens of some heads.

    Attributes: tokens: bits of their positions. first, last: heads.
    """

    tokens: int
    first: int
    last: int

    def holds(self, other: "Extent") -> bool:
        """Whether the other one is a part of it."""
        heads = self.first <= other.first and other.last <= self.last
        return heads and not other.tokens & ~self.tokens


class _Extents:
    """The extents of blocks of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._bits = plan, dict[Block, int]()

    def of(self, tensor: str, owner: int, heads: HeadGroup, block: Block | None = None) -> Extent:
        """What an owner has. Args: block: only what this block has of it."""
        part = heads.kv if tensor in OF_KEYS else heads.q
        whole = Block((owner,), between(0, self._plan.spans.lengths[owner]))
        tokens = self._of(whole) & (self._of(block) if block else -1)
        return Extent(tokens, part.start, part.stop)

    def _of(self, block: Block) -> int:
        if block not in self._bits:
            self._bits[block] = sum(1 << n for n in _positions(self._plan, block))
        return self._bits[block]


def _check_inputs(plan: Plan) -> None:
    """Goes through the steps and notes who has what: senders and computations need theirs."""
    held: dict[At, list[Extent]] = defaultdict(list)
    extents = _Extents(plan)
    for rank, tensors, owners, share, rows in plan.kept if plan.phase == "backward" else ():
        for tensor, owner in product(tensors, owners):
            block = None if rows is None else Block((owner,), rows)
            held[rank, tensor, owner, share].append(extents.of(tensor, owner, plan.heads, block))

    def need(at: Move | Compute, rank: int, tensors: Iterable[str], block: Block) -> None:
        step = at.posted if isinstance(at, Move) else at.step
        for tensor, owner in product(tensors, block.owners):
            wanted = extents.of(tensor, owner, at.heads, block)
            if owner == rank or not wanted.tokens:
                continue
            there = [e for e in held[rank, tensor, owner, at.share] if e.holds(wanted)]
            if not there:
                raise PlanError(f"rank {rank} has no {tensor} of rank {owner} in step {step}")
            # A kernel is given successive rows of what came.
            around = (1 << wanted.tokens.bit_length()) - (wanted.tokens & -wanted.tokens)
            successive = any(e.tokens & around == wanted.tokens for e in there)
            if isinstance(at, Compute) and not successive:
                raise PlanError(
                    f"rank {rank} has {tensor} of rank {owner} in step {step} with rows of others "
                    "between those that it computes with"
                )

    of_queries = ("q",) if plan.phase == "forward" else ("q", "dout", "delta", "lse")
    for _, arriving, posted, computing in _by_steps(plan, results=False):
        for move in arriving:
            for tensor, owner in product(_tensors(move), move.block.owners):
                extent = extents.of(tensor, owner, move.heads, move.block)
                held[move.target, tensor, owner, move.share].append(extent)
        for move in posted:
            need(move, move.source, _tensors(move), move.block)
        for _, compute in computing:
            need(compute, compute.rank, of_queries, compute.queries)
            need(compute, compute.rank, ("k", "v"), compute.keys)


def _check_results(plan: Plan) -> None:
    """Goes through the steps: every result must reach the owner of its tokens, once."""
    sums: dict[At, dict[int, Extent]] = defaultdict(dict)
    under_way: dict[tuple[int, str, int], dict[int, Extent]] = {}
    expected: dict[At, set[int]] = defaultdict(set)
    sent: dict[At, set[Extent]] = defaultdict(set)
    extents = _Extents(plan)
    for step, arriving, posted, computing in _by_steps(plan, results=True):
        for number, compute in computing:
            for tensor, owner, found in _results_of(plan, compute):
                extent = extents.of(tensor, owner, compute.heads)
                extent = extent._replace(tokens=extent.tokens & found)
                sums[compute.rank, tensor, owner, compute.share][number] = extent
                expected[owner, tensor, owner, compute.share].add(number)
        for move in arriving:
            for tensor, owner in product(_tensors(move), move.block.owners):
                total = sums[move.target, tensor, owner, move.share]
                coming = under_way.pop((id(move), tensor, owner))
                if total.keys() & coming.keys():
                    raise PlanError(f"rank {move.target} adds {tensor} twice in step {step}")
                total |= coming
        for move in posted:
            for tensor, owner in product(_tensors(move), move.block.owners):
                extent = extents.of(tensor, owner, move.heads, move.block)
                what = move.source, tensor, owner, move.share
                if extent in sent[what]:
                    raise PlanError(f"rank {move.source} sends {tensor} of rank {owner} twice")
                sent[what].add(extent)
                total = sums[what]
                low, high = extent.first, extent.last
                going = {n: e for n, e in total.items() if low <= e.first and e.last <= high}
                if not all(extent.holds(e) for e in going.values()):
                    raise PlanError(f"rank {move.source} sends too few rows of {tensor}: {move}")
                for number in going:
                    del total[number]
                under_way[id(move), tensor, owner] = going
    for at in expected.keys() | sums.keys():
        if sums[at].keys() != expected[at]:
            raise PlanError(
                f"rank {at[0]} ends with {len(sums[at])} of {len(expected[at])} results for "
                f"{at[1]} of rank {at[2]}"
            )


def _results_of(plan: Plan, compute: Compute) -> Iterator[tuple[str, int, int]]:
    """Tensors, owners, and the positions for which anything is found, as bits."""
    forward, tiles = plan.phase == "forward", plan.tiles(compute)
    names = ("out", "lse") if forward else ("dq",), () if forward else ("dk", "dv")
    for side, block in zip(Side, (compute.queries, compute.keys), strict=True):
        positions, found = _positions(plan, block), set[int]()
        for tile in tiles:
            found.update(positions[tile.kv if side else tile.q])
        bits = sum(1 << position for position in found)
        yield from ((name, owner, bits) for name, owner in product(names[side], block.owners))


def _by_steps(
    plan: Plan, *, results: bool
) -> Iterator[tuple[int, list[Move], list[Move], list[tuple[int, Compute]]]]:
    """Of each step: inputs or results that arrive, those that are posted, and computations."""
    moves = [move for move in plan.moves if move.result == results]
    arriving, posted = _by(moves, lambda move: move.needed), _by(moves, lambda move: move.posted)
    computing = _by(enumerate(plan.computes), lambda item: item[1].step)
    first, last = min([0, *posted]), max([plan.steps, *arriving])
    for step in range(first, last + 1):
        yield step, arriving[step], posted[step], computing[step]


def _by[X](items: Iterable[X], step: Callable[[X], int]) -> dict[int, list[X]]:
    found: dict[int, list[X]] = defaultdict(list)
    for item in items:
        found[step(item)].append(item)
    return found


def _tensors(move: Move) -> Iterator[str]:
    return (tensor for message in move.messages for tensor in message)
