"""One loop for every algorithm: cast, compute, reduce; and what the two passes of attention sum.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.rows import (
    FEW,
    Rows,
    between,
    common,
    numbers_of,
    packed,
    row_count,
    token_dim,
)
from megatron_cp_plugin.core.call import Call, HeadGroup
from megatron_cp_plugin.core.comm import Communicator, Described, Pending
from megatron_cp_plugin.core.execution.program import (
    BlockId,
    Exchange,
    Message,
    Program,
    Round,
    Step,
    Task,
)
from megatron_cp_plugin.core.execution.tasks import Gradients, attend_block, differentiate_block
from megatron_cp_plugin.core.execution.team import (
    Departure,
    ExchangingTeam,
    GatheringTeam,
    Named,
    Team,
    Tensors,
    Waits,
)
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.partial import (
    Accumulator,
    GradientSum,
    SomeRows,
    WholeGradient,
    accumulation_dtype,
    rows_at,
)
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

Teams = Mapping[Side, Team]
# The messages of a round, by the names of their tensors, and functions that wait for these.
Coming = list[tuple[TensorNames, Callable[[], Sequence[Tensor]]]]


class Channels(NamedTuple):
    """Where messages go: inputs of computations, and results; those that may take several steps
    on channels of their own, so that no other waits for them.
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
        overlap: false waits for each message where it is posted, for measurements.
        channels: gives those of messages from rank to rank; None: there are no messages.
    """

    call: Call
    program: Program
    teams: Teams
    overlap: bool
    channels: Callable[[], Channels] | None


class Packed(NamedTuple):
    """Tensors of some rows of a block."""

    rows: Rows
    tensors: Tensors


class Posted(NamedTuple):
    """Messages under way.

    Attributes:
        pending: the operation.
        arriving: what comes, and the buffers of its tensors.
        sends: tensors that must live until the operation is done, and their destinations.
    """

    pending: Pending[None]
    arriving: tuple[tuple[Message, Tensors], ...]
    sends: list[tuple[Tensor, int]]


class Pass(ABC):
    """One pass of a rank: the loop, the blocks that the rank holds, and messages under way.

    What is summed, and how, subclasses say. `begin` starts a round: the rank gets the base blocks
    of some heads. `open` starts a group of these heads, before its first step. `close` finishes the
    results of a group, for queries or for keys; results that come straight from other ranks can
    delay it to the next group's first step. `end` finishes the round and sends the results for the
    base blocks to the team. Without teams there is one round, with the rank's own tokens.

    Attributes:
        sides: the sides that get results.
        compute: runs a task; its arguments are the operands, the kernel calls and the call.
        own: tensors of the rank's own tokens; teams gather them.
        kept_of: tensors that the forward gathered and kept, by round.
        q, k, v: tensors of the base blocks, of all heads of the round.
        queries, keys: tensors of the base blocks, of the open group of heads, in the order in which
            they travel.
        retained: K and V of another rank's block, which the forward leaves to the backward.
        lent: results that come are in memory that later ones overwrite.
    """

    sides: ClassVar[tuple[Side, ...]]
    compute: ClassVar[Callable[..., None]]
    kept_of: Sequence[Named] = ()
    q: Tensor
    k: Tensor
    v: Tensor
    queries: Tensors
    keys: Tensors
    _round: Round
    retained: Tensors = ()

    def __init__(self, part: RankPart, own: Named, q: Tensor, v: Tensor) -> None:
        """Args: own: of the rank's tokens. q, v: give the batch, the head dims and the dtype."""
        self._call, self._program, self._teams = part.call, part.program, part.teams
        self._overlap, self.own = part.overlap, own
        self._sizes = len(q), q.shape[3], v.shape[3], q.dtype
        self._wide = accumulation_dtype(q.dtype)
        self._targets: dict[str, Tensor] = {}  # memory of the results for the own tokens
        self._leaving: Departure | None = None  # results for queries, filled task by task
        self._gathered: dict[str, Tensor] = {}  # which a later round may still use
        self._held: dict[BlockId, Tensors] = {}  # blocks of other ranks
        self._partial_sums: dict[BlockId, Packed] = {}  # sums of ranks before this one
        # How many events the base block of a side, of a group of heads, waits for: results of other
        # ranks, and its last step. By the first query head of the group.
        self._missing: dict[tuple[int, Side], int] = {}
        self._complete: list[tuple[HeadGroup, Side]] = []  # those that wait for nothing any more
        # Messages under way, by the step that needs them.
        self._inputs: dict[int, list[Posted]] = {}
        self._results: dict[int, list[Posted]] = {}
        self.lent = False
        self._strided = True  # messages may be slices of all heads
        if part.channels is not None:
            channels = part.channels()
            self._channels, self.lent = channels, channels.results.lends
            self._strided = channels.inputs.strided and channels.slow_inputs.strided
            for of_results, exchange in part.program.receivable:
                room = [x for each in expected(exchange, *self._sizes) for x in each]
                channels[of_results].reserve(room)
            for (of_results, slow), count in part.program.idle.items():
                channels[2 * slow + of_results].skip(count)

    def run(self) -> None:
        """Goes through all rounds and steps."""
        rounds, call, held = self._program.rounds, self._call, self._held
        way = {"packed": call.packed, "gaps": call.kernel.gaps, "forward": KEYS not in self.sides}
        coming = self._gather(rounds[0]) if self._teams else None
        leaving: Waits = []
        for number, part in enumerate(rounds):
            base = self.own if coming is None else self._base(number, coming)
            # The memory of what came is free before more comes: `base` may be an ordered copy.
            if number + 1 < len(rounds):
                coming = self._gather(rounds[number + 1])
            self.begin(part, base)
            del base
            for step in part.steps:
                if step.first:
                    self.open(step)
                if step.inputs or step.results or step.number in self._inputs:
                    self._cast(step)
                for task in step.tasks:
                    operands = self.operands(task, held.get(task.query), held.get(task.key))
                    self.compute(*operands, task.work.calls(**way), call)
                    if task.rows is not None:
                        self.leave(task.rows, operands[0])
                    del operands
                if step.last or step.results or step.number in self._results:
                    self._reduce(step)
                if not self._overlap:
                    self._take_results()
                    for exchange in step.inputs:
                        self._post(exchange, result=False)
                for block in step.dropped:
                    del held[block]
            if self._teams:
                if self._results:
                    self._take_results()
                posted = self.end()
                while leaving:
                    leaving.pop(0)()
                leaving = posted
        if self._results:
            self._take_results()
        while leaving:
            leaving.pop(0)()

    def _cast(self, step: Step) -> None:
        """Waits for the blocks of a step, and posts those of the next steps."""
        for posted in self._inputs.pop(step.number, ()):
            posted.pending.wait()
            posted.sends.clear()
            for message, tensors in posted.arriving:
                self._held[message.block] = tensors
        if not self._overlap:
            return
        for exchange in step.inputs:
            self._post(exchange, result=False)
        for exchange in step.results:
            # Other ranks may send while this one computes, if no results are under way.
            if exchange.receives and not exchange.slow and not self._results:
                if self.lent:
                    self.settle()
                self._channels.results.expect(exchange.sources)

    def _reduce(self, step: Step) -> None:
        """Adds the results that a step needs, and posts the results for blocks of others."""
        if step.last:
            if self._program.retained is not None:
                self.retain()
            for side in self.sides:
                if self._is_last(step.heads, side):
                    self._complete.append((step.heads, side))
        if step.number in self._results:
            self._add_results(step.number)
        for exchange in step.results:
            if exchange.receives and self.lent:
                self.settle()
            self._post(exchange, result=True)
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
        for posted in self._results.pop(step):
            posted.pending.wait()
            posted.sends.clear()
            for (move, (owner, side), _), tensors in posted.arriving:
                came = Packed(move.block.rows, tensors)
                if owner != self._program.own[side]:
                    self._partial_sums[owner, side] = came
                    continue
                complete = self._is_last(move.heads, side)
                if complete and self._program.relay:  # added in the pass that writes the results
                    self.close(move.heads, side, came)
                    continue
                self.accept(move.heads, side, came)
                if complete:
                    self._complete.append((move.heads, side))

    def _is_last(self, heads: HeadGroup, side: Side) -> bool:
        """Notes that results for a base block came, or that its last step is done: is it complete?

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
            self.close(*self._complete.pop(0), None)

    def _post(self, exchange: Exchange, *, result: bool) -> None:
        channel = self._channels[2 * exchange.slow + result]
        sends = [(x, one.move.target) for one in exchange.sends for x in self._sent(one, channel)]
        described = expected(exchange, *self._sizes)
        buffers = channel.buffers([x for each in described for x in each], self.q.device)
        arriving, start = [], 0
        for message, each in zip(exchange.receives, described, strict=True):
            arriving.append((message, buffers[start : start + len(each)]))
            start += len(each)
        receives = [(buffer, one.move.source) for one, own in arriving for buffer in own]
        posted = Posted(channel.exchange(sends, receives), tuple(arriving), sends)
        if exchange.idle:
            channel.skip(exchange.idle)
        under_way = self._results if result else self._inputs
        under_way.setdefault(exchange.needed, []).append(posted)

    def _sent(self, message: Message, channel: Communicator) -> Sequence[Tensor]:
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
        return [packed(x, token_dim(x), rows, held, strided=channel.strided) for x in tensors]

    # Base blocks that come from a team, and their results

    def _gather(self, part: Round) -> Coming:
        """Posts the gathers of a round."""
        return [
            (message, self._teams[SIDE_OF[message[0]]].gather(message, self.own, one.part))
            for one in part.inputs
            for message in one.messages
        ]

    def _base(self, number: int, coming: Coming) -> Named:
        """Tensors of a round's base blocks: the team's, of `coming`, or the own."""
        while coming:
            message, wait = coming.pop(0)
            self._gathered.update(zip(message, wait(), strict=True))
            del wait
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

    def _departure(self, *names: str) -> Departure:
        """Where results for some rows of the base block go: to the owners of its tokens in the
        team, or, if the round has no operation for them, to this rank's own targets.
        """
        operation = self._round.results.get(names)
        if operation is None:
            return Departure(self._round.base.named(names, self._targets))
        team = self._teams[SIDE_OF[names[0]]]
        assert isinstance(team, GatheringTeam)
        return team.departure(operation, self._targets)

    def _send(self, tensors: Tensors, *names: str) -> Waits:
        """Sends results for all rows of the base block where `_departure` sends those of some."""
        operation = self._round.results.get(names)
        if operation is None:
            targets = self._round.base.named(names, self._targets)
            for target, x in zip(targets, tensors, strict=True):
                target.copy_(x)
            return []
        team = self._teams[SIDE_OF[names[0]]]
        if isinstance(team, ExchangingTeam):
            return team.send(operation, self._targets, tensors)
        leaving = team.departure(operation, self._targets)
        leaving.add(slice(0, tensors[0].shape[1]), tensors)
        return leaving.post()

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
    def leave(self, rows: slice, found: object) -> None:
        """Takes the final results for some rows of the base block: what `compute` added to."""

    @abstractmethod
    def results_for(self, message: Message, before: Packed | None) -> Tensors:
        """Results for another rank's block: this rank's own, plus those that came.

        Args: before: the sum of the ranks before this one in a relay, if one came.
        """

    @abstractmethod
    def accept(self, heads: HeadGroup, side: Side, came: Packed) -> None:
        """Adds another rank's results for some rows of the base block."""

    def settle(self) -> None:  # noqa: B027  (gradients do not wait)
        """Adds accepted results that wait to be added: the next results overwrite them."""

    def retain(self) -> None:  # noqa: B027  (a backward leaves nothing)
        """Keeps a block of another rank for the backward, after the last step."""

    @abstractmethod
    def close(self, heads: HeadGroup, side: Side, others: Packed | None) -> None:
        """Finishes the results for the queries, or keys, of a group of heads.

        Args: others: results of other ranks that are still to be added.
        """

    @abstractmethod
    def end(self) -> Waits:
        """Ends a round, after all its groups are closed: sends the results to the team."""

    def _passed_on(self, before: Packed | None) -> Tensors:
        """The sum that came, if the mask lets this rank add nothing to it."""
        assert before is not None
        return tuple([x.clone() for x in before.tensors]) if self.lent else before.tensors

    def _take_heads(self, step: Step, of_queries: Tensors) -> None:
        """Sets `queries` and `keys` to a step's heads; contiguous where messages must be."""
        queries, keys, some = of_queries, (self.k, self.v), step.within
        if some is not None:
            queries = tuple([x[:, :, some.q] for x in queries])
            keys = self.k[:, :, some.kv], self.v[:, :, some.kv]
            if not self._strided and QUERIES in self._program.sent:
                queries = tuple([x.contiguous() for x in queries])
            if not self._strided and KEYS in self._program.sent:
                keys = keys[0].contiguous(), keys[1].contiguous()
        self.queries, self.keys = queries, keys


@lru_cache(maxsize=1024)  # all layers ask for the same
def expected(
    exchange: Exchange, batch: int, dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[tuple[Described, ...], ...]:
    """Shapes and dtypes of the tensors of each message that a rank receives."""
    accumulated, found = accumulation_dtype(dtype), []
    for move, *_ in exchange.receives:
        tensors, tokens = list[Described](), move.tokens
        for name in chain(*move.messages):
            count = move.heads.kv_heads if name in OF_KEYS else move.heads.heads
            own_dim = value_dim if name in ("v", "dv", "out", "dout") else dim
            wide = name in PER_HEAD or (move.wide and name in RESULTS)
            shape = (batch, count, tokens) if name in PER_HEAD else (batch, tokens, count, own_dim)
            tensors.append((shape, accumulated if wide else dtype))
        found.append(tuple(tensors))
    return tuple(found)


class Forward(Pass):
    """The outputs, each merged from partial outputs of all blocks of keys.

    Attributes:
        out: [B,S,H,E], complete after the last round.
        lse: [B,H,S], complete after the last round.
        kept: q, k, v and lse of every round's base blocks, if these stay for the backward.
    """

    sides = (QUERIES,)
    compute = staticmethod(attend_block)
    out: Tensor
    lse: Tensor

    def __init__(self, part: RankPart, own: Named, *, keep: bool) -> None:
        """Args: own: q, k and v of the rank's tokens. keep: base blocks stay for the backward."""
        q, v = own["q"], own["v"]
        super().__init__(part, own, q, v)
        self.kept: list[Tensor] = []
        self._keep = keep
        if part.teams:
            out, lse = self._places(q, v)
            self._targets = {"out": out, "lse": lse}
        # Merges of the base block's outputs, by the first head of each group that is not closed.
        self._totals: dict[int, Accumulator] = {}
        self._found: dict[int, Accumulator] = {}  # for other ranks' queries, by their owner

    def begin(self, part: Round, base: Named) -> None:
        self._round, self.q, self.k, self.v = part, base["q"], base["k"], base["v"]
        if self._program.parted:
            self._leaving = self._departure("out", "lse")
            return
        self._placing = part.steps[0].within is not None or self._call.places_outputs
        if self._placing:
            self.out, self.lse = self._places(self.q, self.v)

    def _places(self, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for out and lse of q."""
        batch, tokens, heads, _ = q.shape
        out = q.new_empty((batch, tokens, heads, v.shape[3]))
        return out, q.new_empty((batch, heads, tokens), dtype=self._wide)

    def open(self, step: Step) -> None:
        self._take_heads(step, (self.q,))
        if self._program.parted:
            return
        place = (self.out, self.lse) if self._placing else None
        if place is not None and step.within is not None:
            place = self.out[:, :, step.within.q], self.lse[:, step.within.q]
        (q,), (_, v) = self.queries, self.keys
        self._totals[step.heads.q.start] = Accumulator(q, v.shape[3], place)

    def operands(
        self, task: Task, queries: Tensors | None, keys: Tensors | None
    ) -> tuple[object, ...]:
        """See Pass.operands: of `attend_block`."""
        (q,), (k, v) = queries or self.queries, keys or self.keys
        if task.rows is not None:
            q = rows_at(q, task.rows)
            total = Accumulator(q, v.shape[3])
        elif queries is None:
            total = self._totals[task.heads.q.start]
        else:  # another rank's queries
            total = self._found.setdefault(task.query[0], Accumulator(q, v.shape[3]))
        return total, q, k, v

    def leave(self, rows: slice, found: object) -> None:
        assert self._leaving is not None
        assert isinstance(found, Accumulator)
        self._leaving.add(rows, found.result(self._wide if self._program.wide else None))

    def results_for(self, message: Message, before: Packed | None) -> Tensors:
        move, block, _ = message
        total, rows = self._found.pop(block[0], None), move.block.rows
        if total is None:
            return self._passed_on(before)
        held = self._program.rows[block]
        if held != rows:
            found = Packed(held, total.result(self._wide))
            total = Accumulator(_like(self.queries[0], rows), self.v.shape[3])
            _add(total, found, rows, lent=False)
        if before is not None:
            _add(total, before, rows, lent=self.lent)
        out, lse = total.result(self._wide if move.wide else None)
        return out.contiguous(), lse.contiguous()

    def accept(self, heads: HeadGroup, side: Side, came: Packed) -> None:
        own, total = between(0, self.q.shape[1]), self._totals[heads.q.start]
        _add(total, came, own, lent=self.lent)

    def settle(self) -> None:
        for total in self._totals.values():
            total.settle()

    def retain(self) -> None:
        assert self._program.retained is not None
        held = self._held[self._program.retained]
        if self._channels.inputs.lends:  # the next call's messages take this memory
            held = tuple([x.clone() for x in held])
        self.retained = held

    def close(self, heads: HeadGroup, side: Side, others: Packed | None) -> None:
        if others is not None:
            self.accept(heads, side, others)
        out, lse = self._totals.pop(heads.q.start).result()
        if not self._placing:
            self.out, self.lse = out, lse

    def end(self) -> Waits:
        leaving, self._leaving = self._leaving, None
        found = () if leaving is not None else (self.out, self.lse)
        if self._keep:
            self.kept += self.q, self.k, self.v, self.lse
        del self.q, self.k, self.v, self.queries, self.keys
        self.out, self.lse = self._targets["out"], self._targets["lse"]
        return self._send(found, "out", "lse") if leaving is None else leaving.post()


class Backward(Pass):
    """Gradients, summed over all blocks that meet."""

    sides = (QUERIES, KEYS)
    compute = staticmethod(differentiate_block)

    def __init__(
        self,
        part: RankPart,
        own: Named,
        like: Named,
        kept_of: Sequence[Named],
        retained: Tensors,
    ) -> None:
        """Args: like: memory of dq, dk and dv; without teams `own`. Others: see Pass."""
        names = ("dq", "dv") if part.teams else ("q", "v")
        super().__init__(part, own, *[like[name] for name in names])
        self.kept_of = kept_of
        if part.program.retained is not None:
            self._held[part.program.retained] = retained
        if part.teams:
            self._targets = dict(like)
        # By (first query head of a group, QUERIES) and (first KV head, KEYS), of open groups:
        # the heads' slice in the base block, and the sum of dq or of dk and dv.
        self._sums: dict[tuple[int, Side], tuple[slice | None, GradientSum]] = {}
        self._found: dict[BlockId, GradientSum] = {}  # for other ranks' blocks

    def begin(self, part: Round, base: Named) -> None:
        self._round, self.q, self.k, self.v = part, base["q"], base["k"], base["v"]
        self._dout = base["dout"]
        self._all = Statistics(base["lse"], base.get("out"), base.get("delta"))
        self._few = self._program.few
        self._travelling = self._wide if self._program.wide else self.q.dtype
        if self._program.parted:
            self._leaving = self._departure("dq") if self._call.dq else None
            return
        # Else a first partial would hold the memory of the result while a float32 sum is made.
        several = part.steps[0].within is not None
        self._placing = (several or self._few) and self._call.places_gradients
        self._of_queries = WholeGradient(self.q)
        if part.base.heads.first:
            self._of_keys = WholeGradient(self.k, self.v)

    def open(self, step: Step) -> None:
        self._take_heads(step, (self.q, self._dout))
        heads, whole, within = step.heads, self._round.base.heads, step.within
        of_q, of_kv = (None, None) if within is None else (within.q, within.kv)
        statistics = self._all if of_q is None else self._all.heads(of_q)
        if QUERIES in self._program.sent:
            lse, delta = statistics.lse, statistics.delta_for(self.queries[1])
            self.queries += (delta, lse)
            statistics = Statistics(lse, statistics.out, delta)
        self._statistics = statistics
        if self._program.parted:
            if heads.first:
                dkv = GradientSum(*self.keys, few=self._few)
                self._sums[heads.kv.start, KEYS] = None, dkv
            return
        place = partial(self._of_queries.place, of_q) if self._placing else None
        dq = GradientSum(self.queries[0], few=self._few, place=place)
        self._sums[heads.q.start, QUERIES] = of_q, dq
        if not whole.first:  # an earlier round opened the sums of these keys
            return
        few, place = self._few and whole.last, None
        if self._placing and whole.last:
            place = partial(self._of_keys.place, of_kv)
        self._sums[heads.kv.start, KEYS] = of_kv, GradientSum(*self.keys, few=few, place=place)

    def operands(
        self, task: Task, queries: Tensors | None, keys: Tensors | None
    ) -> tuple[object, ...]:
        """See Pass.operands: of `differentiate_block`."""
        (q, dout), (k, v), statistics = self.queries[:2], self.keys, self._statistics
        if task.rows is not None:
            q, dout = rows_at(q, task.rows), rows_at(dout, task.rows)
            statistics, dq = statistics.rows(task.rows), GradientSum(q)
        elif queries is None:
            _, dq = self._sums[task.heads.q.start, QUERIES]
        else:
            q, dout, delta, lse = queries
            statistics = Statistics(lse, delta=delta)
            dq = self._of_others(task.query, (q,), wanted=self._call.dq)
        if keys is None:
            _, dkv = self._sums[task.heads.kv.start, KEYS]
        else:
            k, v = keys
            dkv = self._of_others(task.key, keys, wanted=self._call.dkv)
        return Gradients(dq, dkv), dout, q, k, v, statistics

    def leave(self, rows: slice, found: object) -> None:
        if self._leaving is not None:
            assert isinstance(found, Gradients)
            self._leaving.add(rows, tuple(found.dq.final(self._travelling)))

    def _of_others(self, block: BlockId, like: Tensors, *, wanted: bool) -> GradientSum:
        """The gradient sum of another rank's block; kept only if `wanted`."""
        if block in self._found:
            return self._found[block]
        new = GradientSum(*like, few=self._few)
        if wanted:
            self._found[block] = new
        return new

    def results_for(self, message: Message, before: Packed | None) -> Tensors:
        move, block, _ = message
        total, rows = self._found.pop(block, None), move.block.rows
        if total is None:
            return self._passed_on(before)
        held, dtype = self._program.rows[block], self._wide if move.wide else self.q.dtype
        if held == rows and (before is None or before.rows == rows):
            return total.result(dtype, plus=None if before is None else before.tensors)
        found = Packed(held, tuple(total.held))
        total = GradientSum(
            *[_like(x, rows) for x in (self.keys if block[1] else self.queries[:1])]
        )
        _add(total, found, rows, lent=False)
        if before is not None:
            _add(total, before, rows, lent=self.lent)
        return total.result(dtype)

    def accept(self, heads: HeadGroup, side: Side, came: Packed) -> None:
        _, total = self._sums[(heads.kv if side else heads.q).start, side]
        rows = between(0, (self.k if side else self.q).shape[1])
        _add(total, came, rows, lent=self.lent)

    def close(self, heads: HeadGroup, side: Side, others: Packed | None) -> None:
        if side and not self._round.base.heads.last:
            return
        plus: Tensors | None = None
        if others is not None:
            if others.tensors[0].shape[1] == (self.k if side else self.q).shape[1]:
                plus = others.tensors
            else:
                self.accept(heads, side, others)
        some, total = self._sums.pop(((heads.kv if side else heads.q).start, side))
        (self._of_keys if side else self._of_queries).write(some, total, plus)

    def end(self) -> Waits:
        heads, posted = self._round.base.heads, Waits()
        leaving, self._leaving = self._leaving, None
        del self.q, self.k, self.v, self._dout, self._all
        del self.queries, self.keys, self._statistics
        if leaving is not None:
            posted += leaving.post()
            del leaving
        elif self._call.dq:
            found = self._of_queries.whole
            del self._of_queries
            posted += self._send(found, "dq")
            del found
        if heads.last and self._call.dkv:
            posted += self._send(self._found_for_keys(heads), "dk", "dv")
        if heads.last:
            self._sums.clear()
        return posted

    def _found_for_keys(self, heads: HeadGroup) -> Tensors:
        """Takes dK and dV of the base block; this object keeps no reference to them."""
        if self._program.parted:
            _, total = self._sums.pop((heads.kv.start, KEYS))
            return tuple(total.final(self._travelling))
        found = self._of_keys.whole
        del self._of_keys
        return found

    @property
    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, after the last round."""
        if self._targets:
            return self._targets["dq"], self._targets["dk"], self._targets["dv"]
        (dq,), (dk, dv) = self._of_queries.whole, self._of_keys.whole
        return dq, dk, dv


def _add(total: Accumulator | GradientSum, came: Packed, rows: Rows, *, lent: bool) -> None:
    """Adds results to a total of `rows`. Args: lent: as of Pass."""
    for there, tensors in _shared(came, rows):
        if lent and total.keeps(there):
            tensors = tuple([x.clone() for x in tensors])
        total.add(there, *tensors)
        total.borrowed |= lent


def _shared(here: Packed, rows: Rows) -> Iterator[tuple[SomeRows, Tensors]]:
    """Common rows of a packed block and of `rows`: where they are in `rows`, and their tensors."""
    pieces = common(here.rows, rows)
    if len(pieces) > FEW:
        yield numbers_of(here.rows, rows, here.tensors[0].device), here.tensors
        return
    for mine, there in pieces:
        yield there, _part(here.tensors, mine)


def _part(tensors: Tensors, rows: slice) -> Tensors:
    """Rows of packed tensors [B,S,heads,D], perhaps with [B,H,S], as views."""
    if rows.stop - rows.start == tensors[0].shape[1]:
        return tensors
    return tuple(x[:, rows] if x.dim() == 4 else x[:, :, rows] for x in tensors)


def _like(x: Tensor, rows: Rows) -> Tensor:
    """A tensor with the dtype of x [B,S,heads,D], the shape of `rows` of it, and no memory."""
    return x.new_empty(()).expand(len(x), row_count(rows), *x.shape[2:])
