"""One loop for every algorithm: cast, compute, reduce.

A rank goes through the rounds of its program, and in each round through its steps. In a step it
waits for the blocks of other ranks that it needs and posts those of the next steps (cast), computes
while they travel (compute), merges or adds the results that came for its base blocks, and sends its
results for the blocks of other ranks (reduce). The base blocks of a round come from the rank's
team, and their results go back to the team after it: while a round computes, the base blocks of the
next one come, and the results of the one before leave. Without teams there is one round, and the
base blocks are the rank's own tokens.

B batch, S local tokens, H query heads, G KV heads, D head dim, E that of values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.assembly import assemble
from megatron_cp_plugin.core.blocks.packed_rows import packed
from megatron_cp_plugin.core.blocks.rows import token_dim
from megatron_cp_plugin.core.call import Call
from megatron_cp_plugin.core.comm import Communicator, Pending
from megatron_cp_plugin.core.execution.padded_heads import PaddedHeads
from megatron_cp_plugin.core.execution.passes import (
    Backward,
    Forward,
    Packed,
    Pass,
    Teams,
    expected,
)
from megatron_cp_plugin.core.execution.program import (
    BlockId,
    Exchange,
    Message,
    Program,
    Step,
    exchanged,
    gathered,
    program,
)
from megatron_cp_plugin.core.execution.team import (
    ExchangingTeam,
    Named,
    Team,
    Tensors,
    gathering,
)
from megatron_cp_plugin.core.execution.transport import (
    Transport,
    Way,
    redistribute,
    team_channels,
)
from megatron_cp_plugin.core.partial import delta_of
from megatron_cp_plugin.core.pipeline import HeadGroup
from megatron_cp_plugin.core.placement import BlockPlacement, HeadPlacement, Placement
from megatron_cp_plugin.core.plans.plan import (
    KEYS,
    OF_KEYS,
    OF_ROWS,
    QUERIES,
    Move,
    Plan,
    Side,
    during,
    outside,
    with_wanted_gradients,
)
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.topology import Topology

Arrived = tuple[tuple[Message, Tensors], ...]
Saved = tuple[Tensor, ...]

_KEPT = ("q", "k", "v", "lse")  # of each round's base blocks
_GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True, eq=False)
class Executor:
    """One rank's part of one pass, for all calls with equal settings and shapes.

    Attributes:
        plan: the plan of the steps.
        program: what this rank does in the steps.
        transport, way: how messages of the steps are sent; `way` is None if there are none.
        teams: the teams, by side; without teams, the base blocks are the
            rank's own.
        filled: the heads with added zero heads, if teams need more heads than the call has.
        keep: the base blocks stay in memory for the backward.
        overlap: false waits for each message where it is posted, for measurements.
    """

    call: Call
    plan: Plan
    program: Program
    topology: Topology
    transport: Transport
    way: Way | None
    teams: Teams
    filled: PaddedHeads | None
    keep: bool
    overlap: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward."""
        work = self.begin(q, k, v)
        self.follow(work)
        return self.outputs(work)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Forward:
        """Makes the forward that `follow` runs."""
        if self.redistributes:
            k, v = redistribute(self.topology, self.plan, k, v)
        given = q, k, v
        own = {"q": q, "k": k, "v": v}
        if self.filled is not None:
            own = _filled(self.filled, own)
        return Forward(self.call, self.program, self.teams, own, given, keep=self.keep)

    def outputs(self, work: Forward) -> tuple[Tensor, Tensor, Saved]:
        """What `Algorithm.forward` returns; call it after `follow`."""
        (q, k, v), out, lse = work.given, work.out, work.lse
        if self.filled is not None:
            out, lse = self.filled.own_queries(out), self.filled.own_queries(lse)
        if self.keep:
            none = [x.new_empty((0, *x.shape[1:])) for x in (q, k, v)]
            return out, lse, (*none, out, *work.kept)
        return out, lse, (q, k, v, out, lse, *work.retained)

    def backward(self, dout: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward."""
        q, k, v, out, *rest = saved
        own, kept = {"out": out, "dout": dout}, list[Named]()
        if self.keep:  # of q, k and v only the numbers of heads are here
            size = len(_KEPT)
            parts = [rest[start : start + size] for start in range(0, len(rest), size)]
            kept = [dict(zip(_KEPT, part, strict=True)) for part in parts]
        else:
            own |= {"q": q, "k": k, "v": v, "lse": rest.pop(0)}
        if self.filled is not None:
            own = _filled(self.filled, own)
        if self.sends_delta:  # in place of out
            own["delta"] = delta_of(own["dout"], own.pop("out"))
        like = self._gradients(q, k, v, dout) if self.teams else own
        retained = () if self.keep else tuple(rest)
        work = Backward(self.call, self.program, self.teams, own, like, kept, retained)
        self.follow(work)
        dq, dk, dv = work.gradients
        if self.filled is not None:
            dq = self.filled.own_queries(dq)
            dk, dv = self.filled.own_keys(dk), self.filled.own_keys(dv)
        if self.redistributes:
            dk, dv = redistribute(self.topology, self.plan, dk, dv)
        return dq, dk, dv

    def _gradients(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
        """Empty dq, dk and dv of the own tokens."""
        if self.filled is None and not self.keep:  # keys may be those of another rank
            pairs = zip(_GRADIENTS, (q, k, v), strict=True)
            return {name: torch.empty_like(x) for name, x in pairs}
        heads = [x.shape[2] for x in (q, k, v)]
        if self.filled is not None:
            heads = [self.filled.heads, *[self.filled.sent_kv_heads] * 2]
        return {
            name: dout.new_empty((*dout.shape[:2], number, x.shape[3]))
            for name, number, x in zip(_GRADIENTS, heads, (q, k, v), strict=True)
        }

    @cached_property
    def redistributes(self) -> bool:
        """Whether another rank than their owner holds a block of keys."""
        return bool(outside(self.plan))

    @cached_property
    def sends_delta(self) -> bool:
        """Whether the team gets delta in place of out."""
        return any("delta" in one.names for part in self.program.rounds for one in part.inputs)

    def follow(self, work: Pass) -> None:
        """Runs a pass through all rounds and steps of the program."""
        run, rounds = _Run(self, work), self.program.rounds
        coming = run.arrive(0) if self.teams else None
        leaving: Pending[None] | None = None
        for number, part in enumerate(rounds):
            base = work.own if coming is None else coming.wait()
            # The memory of what came is free before more comes: `base` may be an ordered copy.
            if number + 1 < len(rounds):
                coming = run.arrive(number + 1)
            work.begin(part, base)
            del base
            for step in part.steps:
                if step.first:
                    work.open(step, strided=run.strided)
                # Cast: waits for the blocks of this step, and posts those of the next steps.
                if run.dropped or step.number in run.inputs:
                    run.take_inputs(step.number)
                if self.overlap and (step.inputs or step.results):
                    run.post_inputs(step)
                    run.expect_results(step)
                for task in step.tasks:
                    operands = work.operands(task, run.held.get(task.query), run.held.get(task.key))
                    work.compute(*operands, task.work, self.call)
                    if task.rows is not None:
                        work.leave(task.rows, operands[0])
                    del operands
                # Reduce: adds the results of other ranks, and sends results for their blocks.
                run.dropped = step.dropped
                if step.last or step.results or step.number in run.results or run.ended:
                    run.reduce(step)
                if not self.overlap:
                    run.take_results(None)
                    run.post_inputs(step)
            if self.teams:
                run.take_results(None)
                posted = work.end()
                if leaving is not None:
                    leaving.wait()
                leaving = posted
        if run.results or run.ended:
            run.take_results(None)
        if leaving is not None:
            leaving.wait()


def executor_of(
    placement: Placement,
    steps: Plan,
    exchange: Plan | None,
    call: Call,
    shape: Shape,
    topology: Topology,
    transport: Transport,
    slots: int,
    *,
    overlap: bool,
) -> Executor:
    """A rank's part of one pass.

    Args:
        placement: the placement of the pass.
        steps: its plan; if teams split heads, the plan between teams.
        exchange: if teams split heads, a plan that has this rank's exchanges in its team; else
            None.
        call: the call.
        shape: sizes of the whole problem.
        topology: all ranks.
        transport: sends the messages of the steps.
        slots: see `Transport.way`.
        overlap: see Executor.
    """
    steps = with_wanted_gradients(steps, dq=call.dq, dkv=call.dkv)
    channels, rank = team_channels(placement, topology), topology.rank
    teams: dict[Side, Team] = {}
    filled: PaddedHeads | None = None
    way, keep = None, False
    if isinstance(placement, BlockPlacement) and channels:
        # Only moves before the first step: each group of heads has the same rows.
        first = [
            move
            for move in during(steps)
            if move.needed == 0 and not move.result and rank in (move.source, move.target)
        ]
        for side, (owners, own, inward, outward) in channels.items():
            moves = [move for move in first if move.side == side]
            teams[side] = gathering(inward, outward, steps.spans, owners, own, moves)
        tokens = teams[QUERIES].order.tokens
        parts = gathered(steps, rank, tokens, packed=call.packed, gaps=call.kernel.gaps)
    else:
        way = transport.way(steps, slots)
        parts = program(steps, transport.topology.rank)
    if isinstance(placement, HeadPlacement) and channels:
        assert exchange is not None
        members, _, inward, outward = channels[QUERIES]
        spans = [exchange.spans[member] for member in members]
        order = assemble(spans, max(exchange.spans.lengths))
        teams[QUERIES] = teams[KEYS] = ExchangingTeam(inward, outward, order)
        parts = exchanged(parts, exchange, rank, members, placement.exchanges)
        filled = PaddedHeads.of(shape.heads, shape.kv_heads, placement.members)
        if (filled.heads, filled.sent_kv_heads) == (shape.heads, shape.kv_heads):
            filled = None
        keep = placement.keep
    return Executor(
        call, steps, parts, topology, transport, way, teams, filled, keep=keep, overlap=overlap
    )


def _filled(filled: PaddedHeads, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with zero heads, and copies of KV heads, added."""
    return {
        name: filled.fill_keys(x) if name in OF_KEYS else filled.fill_queries(x)
        for name, x in tensors.items()
    }


class _Run:
    """One rank's run of a program: the blocks that it holds, and the messages under way.

    Attributes:
        held: blocks of other ranks that the rank has.
        dropped: held blocks that no later step needs.
        inputs, results: messages under way, by the step that needs them.
        ended: (group of heads, side) whose steps are done, and whose results of other
            ranks are under way.
        strided: messages may be slices of all heads.
    """

    def __init__(self, of: Executor, work: Pass) -> None:
        self._parts, self._work = of.program, work
        self._teams, self._relay = of.teams, of.plan.relay
        self._retains = of.plan.phase == "forward"
        self._shared: dict[str, Tensor] = {}  # gathered tensors that a later round may still use
        self.held: dict[BlockId, Tensors] = {}
        retained = of.program.retained
        if retained is not None and not self._retains:
            self.held[retained] = work.retained
        self.dropped: tuple[BlockId, ...] = ()
        self._partial_sums: dict[BlockId, Packed] = {}  # sums of ranks before this one
        # Number of results that a relay brought for a base block, by the first query head of its
        # group and side. The entry goes when the last results have come.
        self._received: dict[tuple[int, Side], int] = {}
        self._computed: set[int] = set()  # groups, by the first head, in or past their last step
        self.ended: list[tuple[HeadGroup, Side]] = []
        self.inputs: dict[int, list[Pending[Arrived]]] = {}
        self.results: dict[int, list[Pending[Arrived]]] = {}
        self.strided = True
        if of.way is not None:
            self._channels = channels = of.transport.channels(of.way)
            self.strided = channels.inputs.strided and channels.slow_inputs.strided
            for of_results, exchange in of.program.receivable:
                channel = channels.results if of_results else channels.inputs
                channel.reserve([x for each in expected(exchange, *work.sizes) for x in each])

    def arrive(self, number: int) -> Pending[Named]:
        """Posts the gathers of a round. Returns: its base blocks, after they have come."""
        part = self._parts.rounds[number]
        coming = [
            (
                message,
                self._teams[KEYS if message[0] in OF_KEYS else QUERIES].gather(
                    message, self._work.own, one.part
                ),
            )
            for one in part.inputs
            for message in one.messages
        ]

        def finish() -> Named:
            for message, tensors in coming:
                self._shared.update(zip(message, tensors.wait(), strict=True))
            coming.clear()
            return self._base(number)

        return Pending(finish)

    def _base(self, number: int) -> Named:
        """Tensors of a round's base blocks: the team's tokens, or the own ones if none came."""
        heads, of_part = self._parts.rounds[number].base
        held = {**self._work.kept_of[number]} if self._work.kept_of else {}
        for name, x in self._work.own.items():
            some = of_part[name]
            if name not in self._shared:
                held[name] = x if some is None else x[some]
            elif name in OF_ROWS:  # of all heads
                rows = self._shared[name]
                held[name] = (rows if some is None else rows[some]).contiguous()
            elif heads.last or name not in OF_KEYS:
                held[name] = self._shared.pop(name)
            else:
                held[name] = self._shared[name]
        return held

    def take_inputs(self, step: int) -> None:
        """Waits for the blocks that a step needs, and frees the blocks in `dropped`."""
        arrived = [pending.wait() for pending in self.inputs.pop(step, ())]
        for block in self.dropped:
            self.held.pop(block, None)
        for each in arrived:
            for message, tensors in each:
                self.held[message.block] = tensors

    def post_inputs(self, step: Step) -> None:
        """Posts the sends and receives of the blocks that the next steps need."""
        for exchange in step.inputs:
            channel = self._channels.slow_inputs if exchange.slow else self._channels.inputs
            self.inputs.setdefault(exchange.needed, []).append(self._post(channel, exchange))

    def expect_results(self, step: Step) -> None:
        """Lets other ranks send results while this rank computes, if no results are under way."""
        for exchange in step.results:
            if exchange.receives and not exchange.slow and not self.results:
                self._work.settle()
                self._channels.results.expect(exchange.sources)

    def reduce(self, step: Step) -> None:
        """Adds the results that a step needs, and posts the results for blocks of others."""
        retained = self._parts.retained
        if step.last and retained is not None and self._retains:
            # In memory of its own: the next call's messages take this one.
            self._work.retained = tuple([x.clone() for x in self.held[retained]])
        if step.last:
            self._computed.add(step.heads.q.start)
        if self.ended or step.number in self.results:
            self.take_results(step.number)
        for exchange in step.results:
            if exchange.receives:
                self._work.settle()
            channel = self._channels.slow_results if exchange.slow else self._channels.results
            self.results.setdefault(exchange.needed, []).append(self._post(channel, exchange))
        if step.last:
            self._end(step.heads)

    def take_results(self, step: int | None) -> None:
        """Waits for the results that a step needs (None: for all), and adds them to the sums."""
        for needed in sorted(self.results) if step is None else (step,):
            for pending in self.results.pop(needed, ()):
                for message, tensors in pending.wait():
                    self._take(message, tensors)
        for heads, side in self.ended:
            self._work.close(heads, side, None)
        self.ended.clear()

    def _end(self, heads: HeadGroup) -> None:
        """Closes the queries, and the keys, of a group of heads if they wait for no more results.

        Those of a relay that wait are closed by `_take`; others wait in `ended`.
        """
        for side in self._work.sides:
            awaited = self._parts.awaited[side]
            if not awaited or self._received.get((heads.q.start, side)) == awaited:
                self._work.close(heads, side, None)
            elif not self._relay:
                self.ended.append((heads, side))

    def _take(self, message: Message, tensors: Tensors) -> None:
        move, (owner, side), _ = message
        if owner != self._parts.own[side]:
            self._partial_sums[owner, side] = Packed(move.block.rows, tensors)
        elif self._relay and self._is_last(move, side):
            self._work.close(move.heads, side, Packed(move.block.rows, tensors))
        else:
            self._work.accept(move, tensors)

    def _is_last(self, move: Move, side: Side) -> bool:
        """Whether these results of a relay are the last that a base block gets, for one group.

        A mask may shorten the relay: then the results can come before this rank's last step.
        """
        group = move.heads.q.start, side
        self._received[group] = self._received.get(group, 0) + 1
        complete = self._received[group] == self._parts.awaited[side]
        last = complete and move.heads.q.start in self._computed
        if last:
            del self._received[group]
        return last

    def _post(self, channel: Communicator, exchange: Exchange) -> Pending[Arrived]:
        strided = channel.strided
        sends = [(x, one.move.target) for one in exchange.sends for x in self._sent(one, strided)]
        described = expected(exchange, *self._work.sizes)
        device = self._work.q.device
        buffers = channel.buffers([tensor for each in described for tensor in each], device)
        arriving, start = [], 0
        for message, each in zip(exchange.receives, described, strict=True):
            arriving.append((message, buffers[start : start + len(each)]))
            start += len(each)
        receives = [(buffer, one.move.source) for one, own in arriving for buffer in own]
        under_way = channel.exchange(sends, receives)

        def finish() -> Arrived:
            under_way.wait()
            sends.clear()  # the tensors must live until the send is done
            return tuple(arriving)

        return Pending(finish)

    def _sent(self, message: Message, strided: bool) -> Sequence[Tensor]:
        move, block, result = message
        rows = move.block.rows
        if result:
            held = self._parts.rows[block]
            return self._work.results_for(move, held, self._partial_sums.pop(block, None))
        if block in self.held:
            held, tensors = self._parts.rows[block], self.held[block]
        else:
            tensors = self._work.keys if block[1] else self._work.queries
            held = ((0, tensors[0].shape[1]),)
        if rows == held and all(map(Tensor.is_contiguous, tensors)):
            return tensors
        return [packed(x, token_dim(x), rows, held, strided=strided) for x in tensors]
