"""Checks that a plan is correct, without a tensor of the model.

Every visible pair of a query and a key is computed once for every head. Whatever a rank computes
with, or sends on, is there by then. Every result reaches the owner of its tokens, once. And ranks
that post messages in the order of the plan never wait for each other in a circle.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.rows import Rows, between
from megatron_cp_plugin.core.head_groups import HeadGroup
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.plans.plan import OF_KEYS, Block, Compute, Move, Plan
from megatron_cp_plugin.core.tiles import Mask, Tile
from megatron_cp_plugin.errors import ContextParallelError

At = tuple[int, str, int, int]  # rank, tensor, owner of its tokens, share of the heads


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


class PlanError(ContextParallelError):
    """A plan that computes something else than attention, or never ends."""


def check(plan: Plan) -> None:
    """Raises: PlanError that says what is wrong, if anything is."""
    _check_order(plan)
    _check_pairs(plan)
    _check_inputs(plan)
    _check_results(plan)


def _check_order(plan: Plan) -> None:
    """All that a rank waits for in a step was posted by all ranks in earlier steps.

    So no rank can wait for one that waits for it: of all ranks that wait, those in the earliest
    step have all that they wait for.
    """
    for move in plan.moves:
        if move.needed <= move.posted:
            raise PlanError(f"rank {move.target} waits before rank {move.source} posts: {move}")


def _check_pairs(plan: Plan) -> None:
    visible = _visible(plan)
    found: dict[tuple[int, int, int], Tensor] = {}
    for compute in plan.computes:
        group = compute.share, compute.heads.q.start, compute.heads.q.stop
        if group not in found:
            found[group] = torch.zeros_like(visible)
        rows, cols = (_tokens(plan, block) for block in (compute.queries, compute.keys))
        for tile in plan.tiles(compute):
            mine, seen = rows[tile.q], cols[tile.kv]
            if tile.reverse:
                mine, seen = mine.flip(0), seen.flip(0)
            found[group][mine[:, None], seen] += _pairs_of(tile)
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


def _tokens(plan: Plan, block: Block) -> Tensor:
    return torch.tensor([n for span in plan.positions(block) for n in span.positions])


def _visible(plan: Plan) -> Tensor:
    """[N,N]: how often the mask wants a query to meet a key, by the mask's definition."""
    mask: Mask = plan.mask
    token = torch.arange(sum(len(span) for spans in plan.spans for span in spans))
    age = token[:, None] - token
    named, documents = torch.ones_like(age, dtype=torch.int16), mask.documents
    if mask.slices is not None:
        named, documents = _named(mask.slices, len(token)), mask.slices.documents
    elif mask.causal:
        named = (age >= 0).to(torch.int16)
    document = torch.bucketize(token, torch.tensor(documents), right=True)
    seen = document[:, None] == document
    if mask.window is not None:
        seen &= age < mask.window
    return named * seen


def _named(slices: Slices, tokens: int) -> Tensor:
    """[N,N]: how many slices name a query and a key."""
    named = torch.zeros(tokens, tokens, dtype=torch.int16)
    for q_start, q_stop, k_start, k_stop, kind in slices:
        pairs = torch.ones(q_stop - q_start, k_stop - k_start, dtype=torch.int16)
        if kind in ("causal", "bi_causal"):  # its last query sees all keys
            pairs = pairs.tril(pairs.shape[1] - pairs.shape[0])
        if kind in ("inverse_causal", "bi_causal"):  # its first query sees all keys
            pairs = pairs.triu()
        named[q_start:q_stop, k_start:k_stop] += pairs
    return named


def _pairs_of(tile: Tile) -> Tensor:
    """[rows,cols] of a tile that its kernel call computes."""
    pairs = torch.ones(tile.rows, tile.cols, dtype=torch.int16)
    if tile.document_bounds:
        edges = torch.tensor(tile.document_bounds)
        own = torch.bucketize(torch.arange(tile.rows), edges, right=True)
        pairs *= own[:, None] == own
    return pairs.tril(tile.cols - tile.rows) if tile.causal else pairs


def _check_inputs(plan: Plan) -> None:
    """Goes through the steps and notes who has what: senders and computations need theirs."""
    held: dict[At, list[Extent]] = defaultdict(list)
    tokens = _Tokens(plan)
    for kept in (*plan.kept, *(plan.retained if plan.phase == "backward" else ())):
        for tensor in kept.tensors:
            for owner in kept.owners:
                extent = tokens.extent(tensor, owner, plan.heads, kept.rows)
                held[kept.rank, tensor, owner, kept.share].append(extent)

    def need(
        rank: int, tensor: str, block: Block, heads: HeadGroup, share: int, *, whole: bool = False
    ) -> None:
        for owner in block.owners:
            wanted = tokens.extent_in(block, tensor, owner, heads)
            if owner == rank or not wanted.tokens:
                continue
            there = [e for e in held[rank, tensor, owner, share] if e.holds(wanted)]
            if not there:
                raise PlanError(f"rank {rank} has no {tensor} of rank {owner} in step {step}")
            # A kernel is given successive rows of what came.
            around = (1 << wanted.tokens.bit_length()) - (wanted.tokens & -wanted.tokens)
            if whole and not any(e.tokens & around == wanted.tokens for e in there):
                raise PlanError(
                    f"rank {rank} has {tensor} of rank {owner} in step {step} with rows of others "
                    "between those that it computes with"
                )

    inputs = [move for move in plan.moves if not move.result]
    arriving = _by(inputs, lambda move: move.needed)
    posted = _by(inputs, lambda move: move.posted)
    computing = _by(plan.computes, lambda compute: compute.step)
    for step in _steps(plan):
        for move, tensor in _tensors(arriving[step]):
            for owner in move.block.owners:
                held[move.target, tensor, owner, move.share].append(
                    tokens.extent_in(move.block, tensor, owner, move.heads)
                )
        for move, tensor in _tensors(posted[step]):
            need(move.source, tensor, move.block, move.heads, move.share)
        for compute in computing[step]:
            for tensor in ("q",) if plan.phase == "forward" else ("q", "dout", "delta", "lse"):
                block, heads = compute.queries, compute.heads
                need(compute.rank, tensor, block, heads, compute.share, whole=True)
            for tensor in ("k", "v"):
                block, heads = compute.keys, compute.heads
                need(compute.rank, tensor, block, heads, compute.share, whole=True)


def _check_results(plan: Plan) -> None:
    """Goes through the steps: every result must reach the owner of its tokens, once."""
    sums: dict[At, dict[int, Extent]] = defaultdict(dict)
    tokens = _Tokens(plan)
    under_way: dict[tuple[int, str, int], dict[int, Extent]] = {}
    expected: dict[At, set[int]] = defaultdict(set)
    sent: dict[At, set[Extent]] = defaultdict(set)
    results = [move for move in plan.moves if move.result]
    arriving = _by(results, lambda move: move.needed)
    posted = _by(results, lambda move: move.posted)
    numbered = {id(move): number for number, move in enumerate(results)}
    computing = _by(enumerate(plan.computes), lambda item: item[1].step)
    for step in _steps(plan):
        for number, compute in computing[step]:
            for tensor, block, found in _results_of(plan, compute):
                for owner in block.owners:
                    extent = tokens.extent(tensor, owner, compute.heads)
                    extent = extent._replace(tokens=extent.tokens & found)
                    sums[compute.rank, tensor, owner, compute.share][number] = extent
                    expected[owner, tensor, owner, compute.share].add(number)
        for move, tensor in _tensors(arriving[step]):
            for owner in move.block.owners:
                total = sums[move.target, tensor, owner, move.share]
                coming = under_way.pop((numbered[id(move)], tensor, owner))
                if total.keys() & coming.keys():
                    raise PlanError(f"rank {move.target} adds {tensor} twice in step {step}")
                total |= coming
        for move, tensor in _tensors(posted[step]):
            for owner in move.block.owners:
                extent = tokens.extent_in(move.block, tensor, owner, move.heads)
                low, high = extent.first, extent.last
                what = move.source, tensor, owner, move.share
                if extent in sent[what]:
                    raise PlanError(f"rank {move.source} sends {tensor} of rank {owner} twice")
                sent[what].add(extent)
                total = sums[move.source, tensor, owner, move.share]
                going = {n: e for n, e in total.items() if low <= e.first and e.last <= high}
                if not all(extent.holds(e) for e in going.values()):
                    raise PlanError(f"rank {move.source} sends too few rows of {tensor}: {move}")
                for number in going:
                    del total[number]
                under_way[numbered[id(move)], tensor, owner] = going
    for at in expected.keys() | sums.keys():
        if sums[at].keys() != expected[at]:
            rank, tensor, owner, _ = at
            raise PlanError(
                f"rank {rank} ends with {len(sums[at])} of {len(expected[at])} results for "
                f"{tensor} of rank {owner}"
            )


def _by[X](items: Iterable[X], step: Callable[[X], int]) -> dict[int, list[X]]:
    found: dict[int, list[X]] = defaultdict(list)
    for item in items:
        found[step(item)].append(item)
    return found


def check_slots(plan: Plan, slots: int) -> None:
    """Checks that inputs fit into `slots` buffers a rank, used in turns by its exchanges.

    A block may be computed with, or sent on, until another one comes into its buffer.

    Raises: PlanError.
    """
    inputs = [move for move in plan.moves if not move.result]
    turns = {posted: turn for turn, posted in enumerate(sorted({m.posted for m in inputs}))}
    for rank in range(plan.size):
        received = _by(
            (move for move in inputs if move.target == rank),
            lambda move: turns[move.posted] % slots,
        )
        until: dict[tuple[tuple[int, ...], bool, int], int] = {}  # the last step with the block
        for moves in received.values():
            ordered = sorted(moves, key=lambda move: move.posted)
            for move, after in zip_longest(ordered, ordered[1:]):
                last = plan.steps if after is None else after.posted - 1
                until[move.block.owners, move.of_keys, move.heads.q.start] = last
        for compute in plan.computes:
            for block, of_keys in ((compute.queries, False), (compute.keys, True)):
                last = until.get((block.owners, of_keys, compute.heads.q.start), plan.steps)
                if compute.rank == rank and compute.step > last:
                    raise PlanError(
                        f"rank {rank} needs a block of rank {block.owners[0]} in step "
                        f"{compute.step}, but its buffer is given on after step {last}"
                    )
        for move in inputs:
            kept = until.get((move.block.owners, move.of_keys, move.heads.q.start), plan.steps)
            if move.source == rank and move.needed - 1 > kept:
                raise PlanError(f"rank {rank} sends on what its buffer has no more: {move}")


def _results_of(plan: Plan, compute: Compute) -> Iterator[tuple[str, Block, int]]:
    """Tensors, of which blocks, and the positions for which anything is found, as bits."""
    tiles = plan.tiles(compute)
    for block, names in (
        (compute.queries, ("out", "lse") if plan.phase == "forward" else ("dq",)),
        (compute.keys, () if plan.phase == "forward" else ("dk", "dv")),
    ):
        positions = [n for span in plan.positions(block) for n in span.positions]
        found = {
            position
            for tile in tiles
            for position in positions[tile.q if block is compute.queries else tile.kv]
        }
        bits = sum(1 << position for position in found)
        yield from ((name, block, bits) for name in names)


class _Tokens:
    """Which tokens blocks have."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._bits: dict[Block, int] = {}
        self._whole = [
            Block((owner,), between(0, sum(map(len, spans))))
            for owner, spans in enumerate(plan.spans)
        ]

    def extent(self, tensor: str, owner: int, heads: HeadGroup, rows: Rows | None = None) -> Extent:
        """What an owner has. Args: rows: of it; None: all."""
        whole = self._whole[owner]
        return self.extent_in(
            whole if rows is None else Block((owner,), rows), tensor, owner, heads
        )

    def extent_in(self, block: Block, tensor: str, owner: int, heads: HeadGroup) -> Extent:
        """What a block has of an owner's tokens."""
        part = heads.kv if tensor in OF_KEYS else heads.q
        return Extent(self._of(block) & self._of(self._whole[owner]), part.start, part.stop)

    def _of(self, block: Block) -> int:
        if block not in self._bits:
            spans = self._plan.positions(block)
            self._bits[block] = sum(1 << n for span in spans for n in span.positions)
        return self._bits[block]


def _tensors(moves: Iterable[Move]) -> Iterator[tuple[Move, str]]:
    for move in moves:
        for message in move.messages:
            for tensor in message:
                yield move, tensor


def _steps(plan: Plan) -> range:
    """All steps in which anything happens."""
    ends = [(move.posted, move.needed) for move in plan.moves]
    first = min([0, *(posted for posted, _ in ends)])
    return range(first, 1 + max([plan.steps, *(needed for _, needed in ends)]))
