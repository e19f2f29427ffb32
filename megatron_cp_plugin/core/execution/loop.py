"""One loop for every algorithm: cast, compute, reduce.

A rank goes through the rounds of its program, and in each round through its steps. In a step it
waits for the blocks of other ranks that it needs and posts those of the next steps (cast), computes
while they travel (compute), merges or adds the results that came for its base blocks, and sends its
results for the blocks of other ranks (reduce). The base blocks of a round come from the rank's
team, and their results go back to the team after it: while a round computes, the base blocks of the
next one come, and the results of the one before leave. Without teams there is one round, and the
base blocks are the rank's own tokens.

B batch, S local tokens, T tokens of a base block, H query heads, G KV heads, D head dim, E that of
values.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.assembly import (
    Assembly,
    packed,
    stay_in_place,
    strided,
    token_dim,
)
from megatron_cp_plugin.core.call import Call, HeadGroup
from megatron_cp_plugin.core.comm import (
    NOTHING_BESIDE,
    Beside,
    Communicator,
    Described,
    Pending,
    Pieces,
    Room,
    Sent,
)
from megatron_cp_plugin.core.execution.program import (
    BlockId,
    Exchange,
    Message,
    Program,
    Round,
    Step,
    Task,
)
from megatron_cp_plugin.core.execution.team import (
    Completions,
    ExchangingTeam,
    GatheringTeam,
    Named,
    ResultScatter,
    Team,
    Tensors,
)
from megatron_cp_plugin.core.masks.tile_batches import packed_calls
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.core.plans.plan import (
    KEYS,
    OF_KEYS,
    PER_HEAD,
    QUERIES,
    RESULTS,
    SIDE_OF,
    Side,
    TensorNames,
)
from megatron_cp_plugin.core.ranges import Rows

Teams = Mapping[Side, Team]
Targets = Callable[[Side], Named]
# The messages of a round, by the names of their tensors, and functions that wait for these.
Coming = list[tuple[TensorNames, Callable[[], Sequence[Tensor]]]]


class Channels(NamedTuple):
    """Channels for inputs of computations and for results. Messages between nodes, and those that
    may take several steps, have channels of their own, so that no other message waits for them.
    """

    inputs: Communicator
    results: Communicator
    slow_inputs: Communicator
    slow_results: Communicator


@dataclass(frozen=True, eq=False)
class RankPart:
    """What a rank does in a pass, for all calls that are alike.

    Attributes:
        teams: of queries and of keys; without teams, the base blocks are the rank's own.
        channels: makes the channels for messages from rank to rank; None: there are no messages.
    """

    call: Call
    program: Program
    teams: Teams
    channels: Callable[[], Channels] | None


class Packed(NamedTuple):
    """Tensors of some rows of a block."""

    rows: Rows
    tensors: Tensors


class Posted(NamedTuple):
    """Messages under way.

    Attributes:
        arriving: what comes, and the buffers of its tensors.
        sends: tensors that must live until the operation is done, and their destinations.
    """

    pending: Pending[None]
    arriving: tuple[tuple[Message, Tensors], ...]
    sends: list[Sent]


class Pass(ABC):
    """One pass of a rank: the loop, the blocks that the rank holds, and messages under way.

    Subclasses say what is summed, and how. `begin` starts a round: the rank gets the base blocks of
    some heads. `open` starts a group of these heads, before its first step. `close` finishes the
    results of a group, for queries or for keys; results that come straight from other ranks can
    delay it to the next group's first step. `end` finishes the round and sends the results for the
    base blocks to the team. Without teams there is one round, with the rank's own tokens.

    Attributes:
        sides: the sides that get results.
        compute: runs a task; its arguments are the operands, the kernel calls and the call.
        own: tensors of the rank's own tokens; teams gather them.
        targets: memory of the results for the own tokens, which a team sends back, by name.
        kept_of: tensors that the forward gathered and kept, by round.
        q, k, v: tensors of the base blocks, of all heads of the round.
        queries, keys: tensors of the base blocks, of the open group of heads, in the order in which
            they travel.
        retained: K and V of other ranks' blocks, one after another, which the forward leaves to the
            backward.
        lent: results arrive in memory that later results overwrite.
    """

    sides: ClassVar[tuple[Side, ...]]
    compute: ClassVar[Callable[..., None]]
    kept_of: Sequence[Named] = ()
    _keep = False  # base blocks stay for the other pass
    q: Tensor
    k: Tensor
    v: Tensor
    queries: Tensors
    keys: Tensors
    _round: Round
    _early: Sequence[Exchange] = ()  # posted before the first step
    retained: Tensors = ()

    def __init__(self, part: RankPart, own: Named, targets: Targets) -> None:
        self._call, self._program, self._teams = part.call, part.program, part.teams
        self.own, self.targets = own, _Targets()
        self.targets.make = targets
        shape, dtype = part.call.shape, next(iter(own.values())).dtype
        self._sizes = Sizes(shape.batch, shape.head_dim, shape.value_dim, dtype)
        self._wide = accumulation_dtype(dtype)
        self._open_scatter: ResultScatter | None = None  # results for queries, filled task by task
        self._gathered: dict[str, Tensor] = {}  # which a later round may still use
        self._held: dict[BlockId, Tensors] = {}  # blocks of other ranks
        self._partial_sums: dict[BlockId, Packed] = {}  # sums of ranks before this one
        self._of_joints: dict[BlockId, list[Tensors]] = {}  # results for joint blocks, by part
        self._packed: dict[Exchange, list[Sent]] = {}  # to be sent behind kernels
        self._late = list[Callable[[], object]]()  # to be done behind the next kernel
        # Number of events that the base block of a side and group of heads still waits for: results
        # of other ranks, and its last step. By the group's first query head and the side.
        self._missing: dict[tuple[int, Side], int] = {}
        self._complete: list[tuple[HeadGroup, Side]] = []  # these wait for nothing any more
        # Messages under way, by the step that needs them.
        self._inputs: dict[int, list[Posted]] = {}
        self._results: dict[int, list[Posted]] = {}
        # Results take the memory of those of the round before.
        self._in_turn = bool(part.teams) and part.teams[QUERIES].lends
        self.lent, self._strided = False, True  # strided: messages may be slices of all heads
        if part.channels is not None:
            channels = part.channels()
            self._channels, self.lent = channels, channels.results.direct
            self._strided = channels.inputs.direct and channels.slow_inputs.direct
            receivable = part.program.receivable if self.lent else ()
            for of_results, room in _largest(receivable, self._sizes):
                channels[of_results].reserve(room)

    def run(self) -> None:
        """Goes through all rounds and steps."""
        rounds, call, held = self._program.rounds, self._call, self._held
        gaps, forward, heads = call.kernel.gaps, KEYS not in self.sides, 0
        if call.packed:
            heads = rounds[0].steps[0].heads.heads  # as many in all groups
        coming = self._gather(rounds[0]) if self._teams else None
        completions: Completions = []
        for number, part in enumerate(rounds):
            base = self.own if coming is None else self._base(number, coming)
            # Frees the memory of gathered blocks before more are gathered: `base` may be a copy.
            if number + 1 < len(rounds):
                coming = self._gather(rounds[number + 1])
            self.begin(part, base)
            del base
            for step in part.steps:
                if step.first:
                    self.open(step)
                if step.casts or step.number in self._inputs:
                    self._cast(step)
                for task in step.tasks:
                    operands = self.operands(task, held.get(task.query), held.get(task.key))
                    tiles = task.tiles
                    calls = packed_calls(tiles, heads, gaps, forward) if heads else tiles.each
                    self.compute(*operands, calls, call)
                    if self._late:
                        self._catch_up()
                    if task.rows is not None:
                        self.send_results(task.rows, operands[0])
                    del operands
                if self._late:
                    self._catch_up()
                if step.last or step.results or step.number in self._results:
                    self._reduce(step)
                for block in step.dropped:
                    del held[block]
            if self._teams:
                posted = None if self._in_turn else self.end()
                while completions:
                    completions.pop(0)()
                completions = self.end() if posted is None else posted
        if self._results:
            self._take_results()
        while completions:
            completions.pop(0)()

    def send_keys(self, step: Step, base: Named) -> None:
        """Sends the keys of a first step as soon as they are there, before the queries are."""
        if self.lent or not step.inputs or QUERIES in self._program.sent:
            return
        self.k, self.v = base["k"], base["v"]
        self._take_heads(step, ())
        self._early = step.inputs
        for exchange in step.inputs:
            self._post(exchange, result=False)

    def _cast(self, step: Step) -> None:
        """Waits for the blocks of a step, and posts those of the next steps, or packs them."""
        for posted in self._inputs.pop(step.number, ()):
            posted.pending.wait()
            posted.sends.clear()
            for message, tensors in posted.arriving:
                self._held[message.block] = tensors
        for joint in step.joints:
            parts = zip(*[self._held[part] for part in joint.parts], strict=True)
            self._held[joint.block] = tuple([_joined(joint.order, x) for x in parts])
            del parts
        for block in step.spent:
            del self._held[block]
        inputs: Sequence[Exchange] = step.inputs
        last = None
        if self.lent and inputs and not inputs[-1].slow:
            *inputs, last = inputs
        for exchange in inputs:
            if exchange not in self._early:
                self._post(exchange, result=False)
        if self.lent:
            self._pack(step, last)
        for exchange in step.expects:
            # Other ranks may send while this one computes, if no results are under way.
            if self.lent and exchange.receives and not exchange.slow and not self._results:
                self.settle()
                self._keep_partial_sums()
                self._channels.results.expect(exchange.sources)
                self._late.append(self._channels.results.offer)

    def _pack(self, step: Step, last: Exchange | None) -> None:
        """Takes what copy engines send behind kernels that are launched before: they take no
        multiprocessor, so the host launches the step's first kernel before its last copies.

        Args: last: exchange of inputs that is posted behind that kernel.
        """
        channel, packed = self._channels.inputs, self._packed
        each = step.packs if last is None else (*step.packs, last)
        new = [one for one in each if one.sends and one not in packed]
        for later in new:
            packed[later] = []
            if not all(map(self._stays, later.sends)):
                packed[later] = [
                    (x, one.move.target) for one in later.sends for x in self._sent(one, channel)
                ]
        if new:
            channel.mark()
        if last is not None and last.receives:
            channel.expect(last.sources)
        if last is not None:
            self._late.append(partial(self._post, last, result=False))

    def _catch_up(self) -> None:
        """Does what the host has put off until a kernel was launched."""
        while self._late:
            self._late.pop(0)()

    def _reduce(self, step: Step) -> None:
        """Adds the results that a step needs, and posts the results for blocks of others."""
        if step.last:
            if self._program.retained and step is self._program.rounds[-1].steps[-1]:
                self.retain()
            for side in self.sides:
                if self._is_last(step.heads, side):
                    self._complete.append((step.heads, side))
        ends = self._teams and step is self._round.steps[-1] and not step.results
        if step.number in self._results and not ends:  # `end` takes them
            self._add_results(step.number)
        for exchange in step.results:
            if exchange.receives and self.lent:
                self.settle()
            self._post(exchange, result=True)
        self._of_joints.clear()
        if self._complete:
            self._close()

    def _take_results(self) -> None:
        """Waits for all results that are under way, and adds them to the sums."""
        for needed in sorted(self._results):
            self._add_results(needed)
        if self._complete:
            self._close()

    def _add_results(self, step: int) -> None:
        """Waits for the results that a step needs, and adds them to the sums."""
        # The last ones of a block, which are added when it is written.
        last = dict[tuple[int, Side], tuple[HeadGroup, list[Packed]]]()
        joins = self._program.relay or self._program.merged
        for posted in self._results.pop(step):
            posted.pending.wait()
            posted.sends.clear()
            for (move, (owner, side), _), tensors in posted.arriving:
                came = Packed(move.block.rows, tensors)
                if owner != self._program.own[side]:
                    self._partial_sums[owner, side] = came
                    continue
                complete, group = self._is_last(move.heads, side), (move.heads.q.start, side)
                if not joins:
                    self.accept(move.heads, side, came)
                    if complete:
                        self._complete.append((move.heads, side))
                    continue
                last.setdefault(group, (move.heads, []))[1].append(came)
                if complete:
                    self.close(move.heads, side, last.pop(group)[1])
        for (_, side), (heads, others) in last.items():
            for came in others:
                self.accept(heads, side, came)

    def _is_last(self, heads: HeadGroup, side: Side) -> bool:
        """Notes one event of a base block, results that came or its last step; says if it is
        complete.

        A mask may shorten a relay, so that the last results come before the last step.
        """
        group = heads.q.start, side
        missing = self._missing.get(group)
        if missing is None:
            missing = self._program.awaited.get(group, 0) + 1
        self._missing[group] = missing - 1
        return missing == 1

    def _close(self) -> None:
        """Closes base blocks that wait for nothing any more."""
        while self._complete:
            self.close(*self._complete.pop(0), ())

    def _post(self, exchange: Exchange, *, result: bool) -> None:
        channel = self._channels[2 * exchange.slow + result]
        early = exchange in self._packed
        sends = self._packed.pop(exchange, None) or [
            (x, one.move.target) for one in exchange.sends for x in self._sent(one, channel)
        ]
        if result and exchange.receives and self.lent:
            self._keep_partial_sums()
        coming = expected(exchange, self._sizes)
        buffers = iter(channel.buffers(coming, self.k.device))
        arriving = [
            (message, tuple(islice(buffers, sum(map(len, message.move.messages)))))
            for message in exchange.receives
        ]
        receives = [(buffer, one.move.source) for one, own in arriving for buffer in own]
        beside = expected_beside(exchange, self._sizes) if exchange.beside else NOTHING_BESIDE
        pending = channel.exchange(sends, receives, beside, early=early)
        posted = Posted(pending, tuple(arriving), sends)
        under_way = self._results if result else self._inputs
        under_way.setdefault(exchange.needed, []).append(posted)

    def _keep_partial_sums(self) -> None:
        """Copies sums that are passed on later than the next results come, which overwrite them.

        A mask may shorten a relay, so that a sum waits for some steps.
        """
        for block, (rows, tensors) in self._partial_sums.items():
            self._partial_sums[block] = Packed(rows, tuple([x.clone() for x in tensors]))

    def _stays(self, message: Message) -> bool:
        """Whether copy engines send a block's inputs from where they are: there is nothing to do
        before kernels are launched.
        """
        block, rows = message.block, message.move.block.rows
        batch, tokens, _, _ = self.k.shape if block[1] else self.q.shape
        held = self._program.rows[block] if block in self._held else ((0, tokens),)
        dim = 1 if block[1] or len(self.queries) == 1 else 2  # of statistics, tokens come last
        return stay_in_place(batch, dim, rows, held)

    def _sent(self, message: Message, channel: Communicator) -> Sequence[Tensor | Pieces]:
        block, rows = message.block, message.move.block.rows
        if message.result:
            return self.results_for(message, self._partial_sums.pop(block, None))
        if block in self._held:
            held, tensors = self._program.rows[block], self._held[block]
        else:
            tensors = self.keys if block[1] else self.queries
            held = ((0, tensors[0].shape[1]),)
        if rows == held and all(map(Tensor.is_contiguous, tensors)):
            return tensors
        taken = strided if channel.direct else packed
        return [taken(x, token_dim(x), rows, held) for x in tensors]

    # Base blocks that come from a team, and their results

    def _gather(self, part: Round) -> Coming:
        """Posts the operations that gather a round's base blocks."""
        coming, team = Coming(), self._teams[QUERIES]
        if isinstance(team, ExchangingTeam):
            for operations, lent in part.exchanges:
                each = [(name, one.part.slices[name]) for one in operations for name in one.names]
                came = team.come([(self.own[name], some) for name, some in each], lent=lent)
                coming.append((tuple([name for name, _ in each]), came))
            return coming
        for one in part.inputs:
            for message in one.messages:
                team = self._teams[SIDE_OF[message[0]]]
                assert isinstance(team, GatheringTeam)
                coming.append((message, team.gather(message, self.own, one.part)))
        return coming

    def _base(self, number: int, coming: Coming) -> Named:
        """Tensors of a round's base blocks: gathered by the team (`coming`), or the rank's own."""
        while coming:
            message, wait = coming.pop(0)
            self._gathered.update(zip(message, wait(), strict=True))
            del wait
            if coming and message[0] in OF_KEYS:
                self.send_keys(self._program.rounds[number].steps[0], self._gathered)
        heads, of_part = self._program.rounds[number].base
        held = {**self.kept_of[number]} if self.kept_of else {}
        for name, x in self.own.items():
            some = of_part[name]
            if name not in self._gathered:
                held[name] = x if some is None else x[some]
            elif name in PER_HEAD:  # of all heads
                rows = self._gathered[name]
                held[name] = (rows if some is None else rows[some]).contiguous()
            elif heads.last or name not in OF_KEYS:
                held[name] = self._gathered.pop(name)
            else:
                held[name] = self._gathered[name]
        return held

    def _scatter(self, *names: str) -> ResultScatter:
        """Takes results for rows of the base block to the owners of the tokens in the team, or, if
        the round has no operation for them, to this rank's own targets.
        """
        operation = self._round.results.get(names)
        if operation is None:
            return ResultScatter(self._round.base.named(names, self.targets))
        team = self._teams[SIDE_OF[names[0]]]
        assert isinstance(team, GatheringTeam)
        return team.scatter(operation, self.targets)

    def _send(self, tensors: Tensors, *names: str) -> Completions:
        """Sends results for all rows of the base block, as `_scatter` does for some rows."""
        operation = self._round.results.get(names)
        if operation is None:
            targets = self._round.base.named(names, self.targets)
            for target, x in zip(targets, tensors, strict=True):
                target.copy_(x)
            return []
        team = self._teams[SIDE_OF[names[0]]]
        if isinstance(team, ExchangingTeam):
            both, some = zip(operation.names, tensors, strict=True), operation.part.slices
            return [team.send_results([(x, self.targets[name], some[name]) for name, x in both])]
        scatter = team.scatter(operation, self.targets)
        scatter.add(slice(0, tensors[0].shape[1]), tensors)
        return scatter.post()

    # What the passes sum

    @abstractmethod
    def begin(self, part: Round, base: Named) -> None:
        """Begins a round, with the tensors of its base blocks."""

    @abstractmethod
    def open(self, step: Step) -> None:
        """Begins a group of heads, by its first step."""

    @abstractmethod
    def operands(
        self, task: Task, queries: Tensors | None, keys: Tensors | None
    ) -> tuple[object, ...]:
        """Operands of `compute`: the sums that a task adds to, then tensors.

        Args: queries, keys: of another rank; None: those of the base block.
        """

    @abstractmethod
    def send_results(self, rows: slice, found: object) -> None:
        """Takes the final results for some rows of the base block: what `compute` added to."""

    @abstractmethod
    def results_for(self, message: Message, before: Packed | None) -> Tensors:
        """Results for another rank's block: this rank's own, plus those that came.

        Args: before: the sum of the ranks before this one in a relay, if one came.
        """

    @abstractmethod
    def accept(self, heads: HeadGroup, side: Side, came: Packed) -> None:
        """Adds another rank's results for some rows of the base block."""

    def settle(self) -> None:  # noqa: B027  (where gradients wait, results come once a group)
        """Adds accepted results that still wait: the next results overwrite their memory."""

    def retain(self) -> None:  # noqa: B027  (a backward leaves nothing)
        """Keeps blocks of other ranks for the backward, after the last step."""

    @abstractmethod
    def close(self, heads: HeadGroup, side: Side, others: Sequence[Packed]) -> None:
        """Finishes the results for the queries, or keys, of a group of heads.

        Args: others: results of other ranks that are still to be added.
        """

    @abstractmethod
    def end(self) -> Completions:
        """Ends a round, after its steps: takes the results that are under way, and sends those for
        the base blocks to the team.
        """

    def _take_heads(self, step: Step, of_queries: Tensors) -> None:
        """Sets `queries` and `keys` to a step's heads; contiguous where messages must be."""
        queries, keys, some = of_queries, (self.k, self.v), step.local_heads
        if some is not None:
            queries = tuple([x[:, :, some.q] for x in queries])
            keys = self.k[:, :, some.kv], self.v[:, :, some.kv]
            if not self._strided and QUERIES in self._program.sent:
                queries = tuple([x.contiguous() for x in queries])
            if not self._strided and KEYS in self._program.sent:
                keys = keys[0].contiguous(), keys[1].contiguous()
        self.queries, self.keys = queries, keys


class _Targets(dict[str, Tensor]):
    """Those of a side take memory when its first results leave: kernels need theirs before."""

    make: Targets

    def __missing__(self, name: str) -> Tensor:
        self.update(self.make(SIDE_OF[name]))
        return self[name]


def _joined(order: Assembly, parts: Sequence[Tensor]) -> Tensor:
    """Joins tensors of several blocks; a view if they lie in memory as in the joint block."""
    first = parts[0]
    if order.successive and len(first) == 1 and first.dim() == 4:
        storage, place = first.untyped_storage()._cdata, first.storage_offset()
        for x in parts:
            if (x.untyped_storage()._cdata, x.storage_offset()) != (storage, place):
                break
            place += x.numel()
        else:
            return first.as_strided((1, order.tokens, *first.shape[2:]), first.stride())
    return order.join(parts, token_dim(first))


class Sizes(NamedTuple):
    """Batch, head dims D and E, and dtype of q."""

    batch: int
    dim: int
    value_dim: int
    dtype: torch.dtype


@lru_cache(maxsize=1024)  # all layers ask for the same
def expected(exchange: Exchange, sizes: Sizes) -> Room:
    """Memory for what a rank receives."""
    return _room(exchange.receives, sizes, joins=exchange.joins)


@lru_cache(maxsize=256)
def _largest(
    receivable: tuple[tuple[bool, Exchange], ...], sizes: Sizes
) -> tuple[tuple[bool, Room], ...]:
    """The most memory that any rank needs for inputs, and for results, of one exchange."""
    found: dict[bool, Room] = {}
    for of_results, exchange in receivable:
        rooms = [expected(exchange, sizes)]
        rooms += [found[of_results]] if of_results in found else []
        found[of_results] = max(rooms, key=lambda room: room.bytes)
    return tuple(found.items())


@lru_cache(maxsize=1024)
def expected_beside(exchange: Exchange, sizes: Sizes) -> Beside:
    """Memory for what each target with several sources receives, and the source of each tensor."""
    found = {}
    for to, messages in exchange.beside.items():
        sources = [one.move.source for one in messages for _ in chain(*one.move.messages)]
        found[to] = _room(messages, sizes, joins=exchange.joins), sources
    return found


def _room(messages: Sequence[Message], sizes: Sizes, *, joins: bool) -> Room:
    """Args: joins: see Exchange."""
    batch, dim, value_dim, dtype = sizes
    accumulated, like = accumulation_dtype(dtype), list[Described]()
    places = list[tuple[int, int]]()  # of each tensor among those of its message
    for number, (move, *_) in enumerate(messages):
        tokens = move.tokens
        for place, name in enumerate(chain(*move.messages)):
            count = move.heads.kv_heads if name in OF_KEYS else move.heads.heads
            own_dim = value_dim if name in ("v", "dv", "out", "dout") else dim
            wide = name in PER_HEAD or (move.wide and name in RESULTS)
            shape = (batch, count, tokens) if name in PER_HEAD else (batch, tokens, count, own_dim)
            like.append((shape, accumulated if wide else dtype))
            places.append((messages[number].block[1], place))
    return Room.of(like, sorted(range(len(like)), key=places.__getitem__) if joins else None)
