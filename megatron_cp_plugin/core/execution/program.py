"""One rank's part of a plan, step by step, derived once for each plan and rank."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import NamedTuple, Self

from megatron_cp_plugin.core.blocks.rows import Rows, common
from megatron_cp_plugin.core.masks.tile_batches import Batches
from megatron_cp_plugin.core.masks.tile_table import TileTable
from megatron_cp_plugin.core.pipeline import HeadGroup
from megatron_cp_plugin.core.plans.plan import Move, Plan, during

# The owner of a block, and whether it is one of keys; else it is one of queries.
BlockId = tuple[int, bool]


class Task(NamedTuple):
    """A computation of this rank.

    Attributes: work: its tiles, of rows of the blocks as the rank has them.
    """

    query: BlockId
    key: BlockId
    work: Batches
    heads: HeadGroup


class Delivery(NamedTuple):
    """A move from or to this rank. Attributes: block, result: whose tensors it has, and which."""

    move: Move
    block: BlockId
    result: bool


@dataclass(frozen=True, eq=False)
class Exchange:
    """What a rank sends and receives at a time; it may be nothing where other ranks do.

    Attributes: needed: in which step it must be there. slow: it may take several steps.
    """

    needed: int
    slow: bool
    sends: tuple[Delivery, ...]
    receives: tuple[Delivery, ...]

    @classmethod
    def of(cls, posted: int, needed: int, sends: Iterable[Move], receives: Iterable[Move]) -> Self:
        """Of moves that are posted and needed in these steps."""
        sent, received = (
            tuple(Delivery(move, _block_of(move), move.result) for move in moves)
            for moves in (sends, receives)
        )
        return cls(needed, needed > posted + 1, sent, received)

    @cached_property
    def sources(self) -> frozenset[int]:
        """Ranks from which something comes."""
        return frozenset(one.move.source for one in self.receives)


class Turn(NamedTuple):
    """What a rank does in one step.

    Attributes:
        step: its number. heads: of the group; first, last: step of it. inputs: posted before the
            computation. results: posted after it. dropped: blocks that are not needed after it.
    """

    step: int
    heads: HeadGroup
    first: bool
    last: bool
    inputs: tuple[Exchange, ...]
    tasks: tuple[Task, ...]
    results: tuple[Exchange, ...]
    dropped: tuple[BlockId, ...]


@dataclass(frozen=True)
class Program:
    """What a rank does in a pass.

    Attributes:
        own: owners of the queries and of the keys that it has before any computation. sent:
            whether these queries (false), these keys (true), go to others. awaited: how often
            results for them come from others, for each group of heads.
        receivable: where ranks receive unequally much, what one exchange of inputs (false), of
            results (true), brings at most to any rank: an exchange of each kind, with the most
            tokens.
        retained: the block of another rank that it has at the end of the forward, and at the
            beginning of the backward, if any. rows: of each other rank's block those that it has.
        one_peer: no rank has more than one source, and one target, in an exchange. slow: whether
            any exchange is.
    """

    turns: tuple[Turn, ...]
    own: tuple[int, int]
    sent: frozenset[bool]
    awaited: tuple[int, int]
    retained: BlockId | None
    rows: Mapping[BlockId, Rows]
    receivable: tuple[tuple[bool, Exchange], ...]
    one_peer: bool
    slow: bool


@lru_cache(maxsize=256)
def program(plan: Plan, rank: int) -> Program:
    """What `rank` does."""
    own, inner = (rank, _keys_of(plan, rank)), during(plan)
    if len(inner) < len(plan.moves):
        plan = replace(plan, moves=inner)
    each = plan.steps // len(plan.groups)
    rows = _rows_that_come(plan, rank)
    exchanges, tasks = _exchanges(plan, rank), _tasks(plan, rank, rows)
    last_use = _last_uses(plan, rank)
    turns = (
        Turn(
            step,
            plan.groups[step // each],
            first=step % each == 0,
            last=step % each == each - 1,
            inputs=exchanges.get((False, step), ()),
            tasks=tasks.get(step, ()),
            results=exchanges.get((True, step), ()),
            dropped=last_use.get(step, ()),
        )
        for step in range(plan.steps)
    )
    of_own = [move for move in plan.moves if move.block.owners[0] == own[move.of_keys]]
    awaited = [move.of_keys for move in of_own if move.target == rank and move.result]
    return Program(
        tuple(turns),
        own,
        frozenset(move.of_keys for move in of_own if move.source == rank and not move.result),
        (awaited.count(False) // len(plan.groups), awaited.count(True) // len(plan.groups)),
        next(((kept.owners[0], True) for kept in plan.retained if kept.rank == rank), None),
        rows,
        *_all_exchanges(plan),
    )


def _keys_of(plan: Plan, rank: int) -> int:
    """Whose keys a rank holds."""
    before = [
        move.block.owners[0] for move in plan.moves if move.needed < 0 and move.target == rank
    ]
    kept = [kept.owners[0] for kept in plan.kept if kept.rank == rank and "k" in kept.tensors]
    return (*before, *kept, rank)[0]


def _rows_that_come(plan: Plan, rank: int) -> dict[BlockId, Rows]:
    """Rows of other ranks' blocks."""
    found = {
        _block_of(move): move.block.rows
        for move in plan.moves
        if move.target == rank and not move.result
    }
    for kept in plan.retained:
        if kept.rank == rank and kept.rows is not None:
            found[kept.owners[0], True] = kept.rows
    return found


def _tasks(plan: Plan, rank: int, held: Mapping[BlockId, Rows]) -> dict[int, tuple[Task, ...]]:
    """By step. Args: held: as of `_rows_that_come`."""
    tasks: dict[int, tuple[Task, ...]] = {}
    for compute in plan.computes:
        if compute.rank == rank and (tiles := plan.tiles(compute)):
            query, key = (compute.queries.owners[0], False), (compute.keys.owners[0], True)
            rows = _first(compute.queries.rows, held.get(query))
            cols = _first(compute.keys.rows, held.get(key))
            work = _work(tiles, rows, cols, compute.heads.heads)
            task = Task(query, key, work, compute.heads)
            tasks[compute.step] = (*tasks.get(compute.step, ()), task)
    return tasks


@lru_cache(maxsize=1024)
def _work(tiles: TileTable, rows: int, cols: int, heads: int) -> Batches:
    """Of blocks before which there are some rows and columns; the same for the same tiles."""
    return Batches(tiles.moved(rows, cols), heads)


def _first(rows: Rows, held: Rows | None) -> int:
    """Where some rows begin in the block as a rank has it. Args: held: None: it has all rows."""
    return rows[0][0] if held is None else common(rows, held)[0].there.start


def _last_uses(plan: Plan, rank: int) -> dict[int, tuple[BlockId, ...]]:
    """Blocks of others by the step, in each group of heads, in which they are last of use."""
    each = plan.steps // len(plan.groups)
    last: dict[tuple[int, BlockId], int] = {}

    def use(block: BlockId, step: int) -> None:
        last[step // each, block] = max(step, last.get((step // each, block), 0))

    for move in plan.moves:
        if rank in (move.source, move.target) and not move.result:
            use(_block_of(move), move.needed if move.target == rank else move.posted)
    for compute in plan.computes:
        if compute.rank == rank:
            use((compute.queries.owners[0], False), compute.step)
            use((compute.keys.owners[0], True), compute.step)
    dropped: dict[int, tuple[BlockId, ...]] = {}
    for (_, block), step in last.items():
        dropped[step] = (*dropped.get(step, ()), block)
    return dropped


def _block_of(move: Move) -> BlockId:
    return move.block.owners[0], move.of_keys


def _exchanges(plan: Plan, rank: int) -> dict[tuple[bool, int], tuple[Exchange, ...]]:
    """By kind, results or inputs, and step in which they are posted."""
    found: dict[tuple[bool, int, int], tuple[list[Move], list[Move]]] = {
        (time.result, time.posted, time.needed): ([], []) for time in plan.times
    }
    for move in plan.moves:
        sends, receives = found.setdefault((move.result, move.posted, move.needed), ([], []))
        if move.source == rank:
            sends.append(move)
        if move.target == rank:
            receives.append(move)
    exchanges: dict[tuple[bool, int], tuple[Exchange, ...]] = {}
    for (result, posted, needed), (sends, receives) in sorted(found.items(), key=itemgetter(0)):
        exchange = Exchange.of(posted, needed, sends, receives)
        exchanges[result, posted] = (*exchanges.get((result, posted), ()), exchange)
    return exchanges


@lru_cache(maxsize=64)  # the same for all ranks
def _all_exchanges(plan: Plan) -> tuple[tuple[tuple[bool, Exchange], ...], bool, bool]:
    """`receivable`, `one_peer` and `slow` of a program."""
    received: dict[tuple[bool, int, int, int], list[Move]] = {}
    sent_to: dict[tuple[bool, int, int, int], int] = {}
    one_peer, slow = True, any(needed > posted + 1 for _, posted, needed in plan.times)
    for move in plan.moves:
        (posted, needed, source, target), result = move[:4], move.result
        moves = received.setdefault((result, posted, needed, target), [])
        moves.append(move)
        to = sent_to.setdefault((result, posted, needed, source), target)
        one_peer = one_peer and moves[0].source == source and to == target
        slow = slow or needed > posted + 1
    unequal = {result for result in (False, True) if not _equal_for_all(plan, received, result)}
    largest: dict[tuple[object, ...], tuple[Move, ...]] = {}
    for (result, *_), moves in received.items():
        if result in unequal:
            kind = result, *[(move.messages, move.heads, move.wide) for move in moves]
            before = largest.get(kind)
            if before is None:
                largest[kind] = tuple(moves)
            elif any(a.tokens < b.tokens for a, b in zip(before, moves, strict=True)):
                pairs = zip(before, moves, strict=True)
                largest[kind] = tuple(a if a.tokens >= b.tokens else b for a, b in pairs)
    receivable = tuple(
        (moves[0].result, Exchange.of(0, 1, (), moves)) for moves in largest.values()
    )
    return receivable, one_peer, slow


def _equal_for_all(
    plan: Plan, received: Mapping[tuple[bool, int, int, int], Sequence[Move]], result: bool
) -> bool:
    """Whether every exchange of inputs, or of results, brings equally much to every rank."""
    of_kind = [key for key in received if key[0] == result]
    if len(of_kind) != plan.size * len({(posted, needed) for _, posted, needed, _ in of_kind}):
        return False
    kinds = (
        tuple((move.messages, move.tokens, move.wide) for move in received[key]) for key in of_kind
    )
    return len(set(kinds)) <= 1
