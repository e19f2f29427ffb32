"""One rank's part of a plan, as rounds of steps; derived once for each plan and rank.

A round is the time for which a rank has its base blocks, for some of the heads. Base blocks are the
rank's own tokens, or those of its team. The steps of a round compute with them and with other
ranks' blocks.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from operator import itemgetter
from typing import NamedTuple, Self

from torch import Tensor

from megatron_cp_plugin.core.blocks.assembly import Assembly
from megatron_cp_plugin.core.call import HeadGroup, together
from megatron_cp_plugin.core.masks.tile_batches import LARGE
from megatron_cp_plugin.core.plans.plan import (
    KEYS,
    OF_KEYS,
    PER_HEAD,
    QUERIES,
    TENSORS,
    Compute,
    Move,
    Plan,
    Side,
    TensorNames,
    during,
)
from megatron_cp_plugin.core.ranges import Rows, common, positions_of_all, row_count
from megatron_cp_plugin.core.tiles import TileTable

# The owner of a block, and its side.
BlockId = tuple[int, Side]
# Index of some heads in a tensor [B,S,heads,D] or [B,heads,S]; None: all heads.
Index = tuple[slice, ...] | None
EVERYTHING = slice(None)


class SomeHeads(NamedTuple):
    """Some heads of all tensors, and their index into each tensor by its name."""

    heads: HeadGroup
    slices: Mapping[str, Index]

    @classmethod
    def of(cls, heads: HeadGroup, whole: HeadGroup) -> Self:
        """Args: whole: all heads of the tensors."""
        slices: dict[str, Index] = {}
        for name in TENSORS:
            some, of_all = [x.kv if name in OF_KEYS else x.q for x in (heads, whole)]
            before = 1 if name in PER_HEAD else 2
            slices[name] = None if some == of_all else (*(EVERYTHING,) * before, some)
        return cls(heads, slices)

    def named(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Slices of these heads of some tensors; a tensor itself if these are all its heads."""
        slices = self.slices
        return [
            tensors[name] if (some := slices[name]) is None else tensors[name][some]
            for name in names
        ]


class Operation(NamedTuple):
    """One collective operation of a team.

    Attributes:
        messages: the tensors; those in one tuple travel as one.
        names: names of all these tensors.
        wide: results travel in float32, not in the model's dtype.
    """

    messages: tuple[TensorNames, ...]
    names: TensorNames
    part: SomeHeads
    wide: bool

    @classmethod
    def of(
        cls,
        messages: tuple[TensorNames, ...],
        heads: HeadGroup,
        whole: HeadGroup,
        wide: bool = False,
    ) -> Self:
        """Args: heads: those that travel. whole: all heads of the tensors."""
        return cls(messages, sum(messages, ()), SomeHeads.of(heads, whole), wide)


class Task(NamedTuple):
    """A computation of this rank.

    Attributes:
        tiles: of its blocks; rows are numbered as in the blocks that the rank holds.
        rows: query rows that only this task computes, if the program is `parted`; tiles count from
            the first of them.
    """

    query: BlockId
    key: BlockId
    tiles: TileTable
    heads: HeadGroup
    rows: slice | None = None


class Message(NamedTuple):
    """A move from or to this rank, of tensors of a block."""

    move: Move
    block: BlockId
    result: bool


@dataclass(frozen=True, eq=False)
class Exchange:
    """The messages that a rank sends and receives together; there may be none on this rank.

    Attributes:
        needed: the step before which (results: after whose computation) they must be there.
        slow: the messages go between nodes, or may take several steps: on a channel of their own.
        beside: what each target receives in it, in a plan of all ranks: writes to memory of the
            target need the place of each message among all.
        joins: blocks of one side are to lie next to each other in memory.

    Their moves have the ranks as its channel counts them.
    """

    needed: int
    slow: bool
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    beside: Mapping[int, tuple[Message, ...]] = field(default_factory=dict)
    joins: bool = False

    @cached_property
    def sources(self) -> frozenset[int]:
        """Ranks that send to this rank."""
        return frozenset([one.move.source for one in self.receives])


def _messages(moves: Iterable[Move]) -> tuple[Message, ...]:
    return tuple([Message(move, _block_of(move), move.result) for move in moves])


class Joint(NamedTuple):
    """Blocks of several other ranks, as one block in ascending order of positions.

    Attributes:
        block: its id; its owner is a negative number.
        rows: of the joint block, that belong to each part.
    """

    block: BlockId
    parts: tuple[BlockId, ...]
    order: Assembly
    rows: tuple[Rows, ...]


class Step(NamedTuple):
    """What a rank does in one step.

    Attributes:
        number: counts from 0.
        heads: the group of heads that it computes.
        local_heads: these heads as slices of the base blocks; None: these have no other heads.
        first: whether the step is the first of its group.
        last: whether results of the group are to be closed after the step.
        inputs: exchanges of inputs that are posted before the computation.
        results: exchanges of results that are posted after the computation.
        packs: exchanges of later steps in which the rank sends what it has in this one.
        expects: exchanges of results in which other ranks may send from this step on.
        dropped: blocks of other ranks that no later step needs.
        joints: blocks that are joined from blocks of other ranks before the computation.
        spent: blocks of other ranks that nothing needs once these are joined.
        casts: whether blocks or messages are to be seen to before the computation.
    """

    number: int
    heads: HeadGroup
    local_heads: HeadGroup | None = None
    first: bool = True
    last: bool = False
    inputs: tuple[Exchange, ...] = ()
    tasks: tuple[Task, ...] = ()
    results: tuple[Exchange, ...] = ()
    packs: tuple[Exchange, ...] = ()
    expects: tuple[Exchange, ...] = ()
    dropped: tuple[BlockId, ...] = ()
    joints: tuple[Joint, ...] = ()
    spent: tuple[BlockId, ...] = ()
    casts: bool = False


class HeadExchange(NamedTuple):
    """What an exchange of heads brings.

    Attributes: lent: it is used where it came, before a later exchange overwrites it.
    """

    operations: Sequence[Operation]
    lent: bool


class Round(NamedTuple):
    """The steps that compute with one set of base blocks.

    Attributes:
        inputs: operations that bring the base blocks before the first step.
        results: operations that take results for the base blocks away after the last step, by the
            names of their tensors.
        exchanges: of these operations, if teams exchange heads: each brings some at once.
    """

    base: SomeHeads
    inputs: tuple[Operation, ...]
    results: Mapping[TensorNames, Operation]
    steps: tuple[Step, ...]
    exchanges: Sequence[HeadExchange] = ()


@dataclass(frozen=True)
class Program:
    """What a rank does in a pass.

    Attributes:
        few: each group of heads has at most two steps with tasks; of a parted program, two tasks.
        own: (owner of the queries, owner of the keys) that the rank has before the first step.
        sent: sides whose base block the rank sends to others.
        awaited: number of moves with results for its base blocks, by the first query head of a
            group of heads and the side.
        receivable: (False for inputs or True for results, an exchange), for each amount that any
            rank receives in an exchange.
        retained: blocks of keys of other ranks that this one has at the end of the forward, and at
            the beginning of the backward.
        rows: rows of other ranks' blocks that this rank has, by block.
        joined: the joint blocks that a block is part of, and its number among their parts.
        parted: tasks share no rows of the base block's queries: each computes all of its own rows.
        wide: results of such tasks are in float32.
        relay: results for a block go from rank to rank.
        merged: see Plan.
    """

    rounds: tuple[Round, ...]
    few: bool
    own: tuple[int, int]
    sent: frozenset[Side] = frozenset()
    awaited: Mapping[tuple[int, Side], int] = field(default_factory=dict)
    retained: tuple[BlockId, ...] = ()
    rows: Mapping[BlockId, Rows] = field(default_factory=dict)
    joined: Mapping[BlockId, tuple[tuple[Joint, int], ...]] = field(default_factory=dict)
    receivable: tuple[tuple[bool, Exchange], ...] = ()
    parted: bool = False
    wide: bool = False
    relay: bool = False
    merged: bool = False


@lru_cache(maxsize=64)  # both passes of a micro-batch have the same
def program(
    plan: Plan, rank: int, rectangular: bool = True, windows: bool = False, near: int = 0
) -> Program:
    """What `rank` does with its own tokens in one round: blocks go from rank to rank.

    Args:
        rectangular, windows: as in `plan_tiles`.
        near: as `Transport.split` says.
    """
    kept = [one for one in plan.kept if one.rank == rank]
    came = [move for move in plan.moves if move.target == rank and not move.result]
    keys_of = [move.block.owners[0] for move in came if move.needed < 0]
    keys_of += [one.owners[0] for one in kept if one.rows is None]
    own, inner = (rank, (*keys_of, rank)[0]), during(plan)
    if len(inner) < len(plan.moves):
        plan = replace(plan, moves=inner)
    each = plan.steps // len(plan.groups)
    # Rows of another rank's block that came in the forward.
    retained = {(one.owners[0], KEYS): one.rows for one in kept if one.rows is not None}
    rows = {_block_of(move): move.block.rows for move in came if move.needed >= 0} | retained
    exchanges, joints = _exchanges(plan, rank, near), _joints(plan, rank, rows)
    tiles_of = partial(plan.tiles, rectangular=rectangular, windows=windows)
    tasks = _tasks(plan, rank, rows, joints, tiles_of)
    for start, group in zip(range(0, plan.steps, each), plan.groups, strict=True):
        others = [*chain.from_iterable(tasks.get(start + n, ()) for n in range(1, each))]
        late = start in tasks and len(tasks) > 1
        if late and _own_come_last(plan, rank, near, group, others):
            tasks[start + each - 1] = tasks.pop(start)
    last_use, single = _last_uses(plan, rank, rows, joints, retained)
    expects = {step: some for (result, step), some in exchanges.items() if result}
    packs = dict[int, tuple[Exchange, ...]]()
    if plan.merged:  # from the start: so no rank waits for what another one computes first
        expects = {step // each * each: some for step, some in expects.items()}
        for (result, step), some in exchanges.items():
            if not result and step % each:
                start = step // each * each
                packs[start] = (*packs.get(start, ()), *(x for x in some if x.sends and not x.slow))
    made: dict[int, tuple[Joint, ...]] = {}
    ended: dict[int, tuple[BlockId, ...]] = {}
    for joint, uses in _uses_of(joints, plan):
        made[min(uses)] = (*made.get(min(uses), ()), joint)
        ended[max(uses)] = (*ended.get(max(uses), ()), joint.block)
    steps = [
        Step(
            step,
            plan.groups[step // each],
            plan.groups[step // each] if len(plan.groups) > 1 else None,
            first=step % each == 0,
            last=step % each == each - 1,
            inputs=exchanges.get((False, step), ()),
            tasks=tasks.get(step, ()),
            results=exchanges.get((True, step), ()),
            packs=packs.get(step, ()),
            expects=expects.get(step, ()),
            dropped=(
                *(block for block in last_use.get(step, ()) if (step, block) in single),
                *ended.get(step, ()),
            ),
            joints=made.get(step, ()),
            spent=tuple([x for x in last_use.get(step, ()) if (step, x) not in single]),
            casts=(False, step) in exchanges or step in expects or step in made,
        )
        for step in range(plan.steps)
    ]
    joined: dict[BlockId, tuple[tuple[Joint, int], ...]] = {}
    for joint in {joint.block: joint for joint in joints.values()}.values():
        for number, part in enumerate(joint.parts):
            joined[part] = (*joined.get(part, ()), (joint, number))
    of_own = [move for move in plan.moves if move.block.owners[0] == own[move.side]]
    awaited = Counter(
        (move.heads.q.start, move.side) for move in of_own if move.target == rank and move.result
    )
    whole = together(plan.groups)
    return Program(
        (Round(SomeHeads.of(whole, whole), (), {}, tuple(steps)),),
        each <= 2 + plan.merged,
        own,
        frozenset([move.side for move in of_own if move.source == rank and not move.result]),
        awaited,
        tuple(retained),
        rows,
        joined,
        all_exchanges(plan, near),
        relay=plan.relay,
        merged=plan.merged,
    )


_Joints = Mapping[tuple[int, Side, tuple[int, ...]], Joint]


def _joints(plan: Plan, rank: int, held: Mapping[BlockId, Rows]) -> _Joints:
    """Joint blocks of a rank, by step, side and owners; one in steps of several groups of heads."""
    found: dict[tuple[int, Side, tuple[int, ...]], Joint] = {}
    same: dict[tuple[Side, tuple[int, ...]], Joint] = {}
    for compute in plan.computes:
        if compute.rank != rank or not plan.merged:
            continue
        for side, (owners, _) in zip(Side, compute[2:4], strict=True):
            if len(owners) == 1:
                continue
            if (side, owners) not in same:
                parts = tuple([(owner, side) for owner in owners])
                rows = [held[part] for part in parts]
                blocks = [(plan.spans[owner], x) for owner, x in zip(owners, rows, strict=True)]
                width = max(map(row_count, rows))
                order = Assembly(*positions_of_all(blocks), len(owners), width)
                of_parts = tuple(map(order.rows_of, range(len(owners))))
                same[side, owners] = Joint((-1 - len(same), side), parts, order, of_parts)
            found[compute.step, side, owners] = same[side, owners]
    return found


def _tasks(
    plan: Plan,
    rank: int,
    held: Mapping[BlockId, Rows],
    joints: _Joints,
    tiles_of: Callable[[Compute], TileTable],
) -> dict[int, tuple[Task, ...]]:
    """The tasks of a rank, by step."""
    tasks: dict[int, tuple[Task, ...]] = {}
    for compute in plan.computes:
        if compute.rank == rank and (tiles := tiles_of(compute)):
            query, rows = _held(compute, QUERIES, held, joints)
            key, cols = _held(compute, KEYS, held, joints)
            task = Task(query, key, _moved(tiles, rows, cols), compute.heads)
            tasks[compute.step] = (*tasks.get(compute.step, ()), task)
    return tasks


def _held(
    compute: Compute, side: Side, held: Mapping[BlockId, Rows], joints: _Joints
) -> tuple[BlockId, int]:
    """The block that a rank computes with, and the first row of it."""
    owners, rows = compute.keys if side else compute.queries
    joint = joints.get((compute.step, side, owners))
    if joint is not None:
        return joint.block, 0
    block = owners[0], side
    return block, _first(rows, held.get(block))


@lru_cache(maxsize=256)
def _moved(tiles: TileTable, rows: int, cols: int) -> TileTable:
    """Tiles moved by some rows and columns; one object for equal tiles."""
    return tiles.moved(rows, cols)


def _first(rows: Rows, held: Rows | None) -> int:
    """Number of the first of `rows` among those of a block that a rank holds; held None: all."""
    return rows[0][0] if held is None else common(rows, held)[0][1].start


def _first_group(plan: Plan, side: Side, step: int) -> int:
    """The first of the groups of heads that have the same heads of a block as a step."""
    number = step * len(plan.groups) // plan.steps
    while side and not plan.groups[number].first:
        number -= 1
    return number


def _uses_of(joints: _Joints, plan: Plan) -> Iterable[tuple[Joint, list[int]]]:
    """Joint blocks, each with the steps that use it: a block is joined once for its heads."""
    found: dict[tuple[int, BlockId], tuple[Joint, list[int]]] = {}
    for (step, side, _), joint in joints.items():
        key = _first_group(plan, side, step), joint.block
        found.setdefault(key, (joint, []))[1].append(step)
    return found.values()


def _last_uses(
    plan: Plan,
    rank: int,
    held: Mapping[BlockId, Rows],
    joints: _Joints,
    retained: Iterable[BlockId],
) -> tuple[dict[int, tuple[BlockId, ...]], set[tuple[int, BlockId]]]:
    """Blocks of other ranks, by the last step that uses them, for their heads; and (step, block) of
    uses of a block by itself, not as a part of a joint block.

    Args: retained: as of `Program`: the end of the forward uses them.
    """
    last: dict[tuple[int, BlockId], int] = {}
    single = set[tuple[int, BlockId]]()

    def use(block: BlockId, step: int) -> None:
        key = _first_group(plan, block[1], step), block
        last[key] = max(step, last.get(key, 0))

    for move in plan.moves:
        if rank in (move.source, move.target) and not move.result:
            use(_block_of(move), move.needed if move.target == rank else move.posted)
            if move.source == rank:
                single.add((move.posted, _block_of(move)))
    for compute in plan.computes:
        if compute.rank == rank:
            for side, (owners, _) in zip(Side, compute[2:4], strict=True):
                if len(owners) == 1:
                    use((owners[0], side), compute.step)
                    single.add((compute.step, (owners[0], side)))
    for joint, uses in _uses_of(joints, plan):
        for part in joint.parts:
            use(part, min(uses))
    for block in retained if plan.phase == "forward" else ():
        use(block, plan.steps - 1)
        single.add((plan.steps - 1, block))
    dropped: dict[int, tuple[BlockId, ...]] = {}
    for (_, block), step in last.items():
        if block in held:
            dropped[step] = (*dropped.get(step, ()), block)
    return dropped, single


def _block_of(move: Move) -> BlockId:
    return move.block.owners[0], move.side


def _leaves(move: Move, near: int) -> bool:
    """Whether a move goes to another node. Args: near: as of `program`."""
    return near > 1 and move.source // near != move.target // near


def _exchanges(plan: Plan, rank: int, near: int) -> dict[tuple[bool, int], tuple[Exchange, ...]]:
    """A rank's exchanges, by (carries results, step in which it is posted), those between nodes
    first: copy engines may send behind a kernel.
    """
    found: dict[tuple[bool, int, bool, int], list[Move]] = {
        (time.result, time.posted, stays, time.needed): []
        for time in plan.times
        for stays in ((False, True) if near > 1 else (True,))
    }
    for move in plan.moves:
        key = move.result, move.posted, not _leaves(move, near), move.needed
        found.setdefault(key, []).append(move)
    exchanges: dict[tuple[bool, int], tuple[Exchange, ...]] = {}
    for (result, posted, stays, needed), moves in sorted(found.items(), key=itemgetter(0)):
        joins = plan.merged and not result
        if joins:
            moves.sort(key=lambda move: (move.side, move.block.owners))
        # A channel inside nodes counts its ranks from the node's first one.
        first = rank // near * near if near > 1 and stays else 0
        own = rank - first
        if first:
            moves = [x._replace(source=x.source - first, target=x.target - first) for x in moves]
        sends = [move for move in moves if move.source == own]
        sends.sort(key=partial(_turn, plan))
        receives = [move for move in moves if move.target == own]
        beside = dict[int, tuple[Message, ...]]()
        for to in {move.target for move in sends}:
            of_target = [move for move in moves if move.target == to]
            if any(move.source != own for move in of_target):
                beside[to] = _messages(of_target)
        slow = not stays or (needed > posted + 1 and not plan.merged)
        both = _messages(sends), _messages(receives)
        exchange = Exchange(needed, slow, *both, beside=beside, joins=joins)
        exchanges[result, posted] = (*exchanges.get((result, posted), ()), exchange)
    return exchanges


def _turn(plan: Plan, move: Move) -> int:
    """In this order copy engines write: each rank begins with another one. Keys of documents go to
    the last rank first, which computes the fewest pairs of its own before.
    """
    away = -1 if plan.merged and not move.result and plan.mask.documents else 1
    return away * (move.target - move.source) % plan.size


def _own_come_last(
    plan: Plan, rank: int, near: int, group: HeadGroup, others: Sequence[Task]
) -> bool:
    """Whether a rank computes its own pairs of some heads last, while gradients of keys go home:
    where the keys of others came for the heads before. Where they stayed from the forward, if pairs
    with them keep the GPU busy until the host has launched the next kernel. Or, by copy engines,
    where its keys have come and left long before those of the busiest rank, so that gradients for
    others leave before others have theirs, and one rank does not get all of them at the end.

    Args: others: all but the own pairs of these heads.
    """
    travels = _travelling(plan) if plan.merged else ()
    if travels == {(True, KEYS)} and len(plan.groups) == 1:
        return group.heads * sum(int(task.tiles.areas.sum()) for task in others) >= LARGE
    if travels not in ({(True, KEYS)}, {(False, KEYS), (True, KEYS)}):
        return False
    if not near or len(plan.groups) > 1:
        return group.last and not group.first
    moved, first = _rows_moved(plan), rank // near * near
    most = max(moved[first : first + near] if near > 1 else moved)
    ends = (move for move in plan.moves if rank in (move.source, move.target))
    early = 3 * max(plan.spans.lengths) <= most >= 2 * moved[rank]
    return early and not any(_leaves(move, near) for move in ends)


@lru_cache(maxsize=64)  # the same for all ranks
def _travelling(plan: Plan) -> set[tuple[bool, Side]]:
    """What travels: (results, or inputs; of which side)."""
    return {(move.result, move.side) for move in plan.moves}


@lru_cache(maxsize=64)
def _rows_moved(plan: Plan) -> list[int]:
    """By rank, the rows that one has sent when all keys that this one sends or gets have moved."""
    moved, sent = [0] * plan.size, [0] * plan.size
    for move in sorted(plan.moves, key=partial(_turn, plan)):
        if not move.result:
            sent[move.source] += move.tokens
            for rank in (move.source, move.target):
                moved[rank] = max(moved[rank], sent[move.source])
    return moved


@lru_cache(maxsize=64)  # the same for all ranks
def all_exchanges(plan: Plan, near: int) -> tuple[tuple[bool, Exchange], ...]:
    """`receivable` of a program, without what comes from other nodes."""
    received: dict[tuple[bool, int, int, int], list[Move]] = {}
    for move in plan.moves:
        if _leaves(move, near):
            continue
        (posted, needed, _, target), result = move[:4], move.result
        received.setdefault((result, posted, needed, target), []).append(move)
    unlike = {
        (key[0], *[(move.messages, move.tokens, move.heads, move.wide) for move in moves]): moves
        for key, moves in received.items()
    }
    return tuple(
        [(moves[0].result, Exchange(1, False, (), _messages(moves))) for moves in unlike.values()]
    )
