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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.assembly import assemble
from megatron_cp_plugin.core.blocks.rows import (
    Rows,
    between,
    packed,
    row_count,
    token_dim,
    united,
)
from megatron_cp_plugin.core.blocks.visible_rows import longest_gap
from megatron_cp_plugin.core.call import Call, HeadGroup
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
    exchanging_program,
    gathering_program,
    program,
    without_idle,
)
from megatron_cp_plugin.core.execution.team import (
    ExchangingTeam,
    Named,
    Team,
    Tensors,
    Waits,
    gathering,
)
from megatron_cp_plugin.core.execution.transport import (
    TeamChannels,
    Transport,
    Way,
    redistribute,
    team_channels,
)
from megatron_cp_plugin.core.masks.tile_batches import Batch, Batches
from megatron_cp_plugin.core.partial import delta_of
from megatron_cp_plugin.core.placement import BlockPlacement, HeadPlacement, Placement
from megatron_cp_plugin.core.plans.plan import (
    KEYS,
    OF_KEYS,
    PER_HEAD,
    QUERIES,
    SIDE_OF,
    Plan,
    Side,
    TensorNames,
    during,
    outside,
    with_wanted_gradients,
)
from megatron_cp_plugin.core.ranges import Ranges
from megatron_cp_plugin.core.tiles import NO_TILES, Tile
from megatron_cp_plugin.core.topology import Topology

Saved = tuple[Tensor, ...]
# The messages of a round, by the names of their tensors, and functions that wait for these.
Coming = list[tuple[TensorNames, Callable[[], Sequence[Tensor]]]]

_KEPT = ("q", "k", "v", "lse")  # of each round's base blocks
_GRADIENTS = ("dq", "dk", "dv")


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


@dataclass(frozen=True, eq=False)
class Executor:
    """One rank's part of one pass, for all calls with equal settings and shapes.

    Attributes:
        plan: the plan of the steps.
        program: what this rank does in the steps.
        transport, way: how messages of the steps are sent; `way` is None if there are none.
        teams: teams of queries and of keys; without teams, the base blocks are the
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
    # Kernel calls of tasks, made when each is first computed, beside the computation before it.
    _calls: dict[Batches, tuple[Tile | Batch, ...]] = field(default_factory=dict, init=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
        """Attention of the local queries over all keys.

        Args:
            q: [B,S,H,D], contiguous; k: [B,S,G,D] and v: [B,S,G,E] likewise: this rank's tokens in
                the order of the layout.

        Returns: out [B,S,H,E] in q's dtype; lse [B,H,S], natural logarithm, float32 (float64 for
        float64); and what `differentiate` needs, local tensors only. Out among them is the same
        tensor as the one that is returned, because attention sinks change it in place.
        """
        given = q, k, v
        if self.redistributes:
            k, v = redistribute(self.topology, self.plan, k, v)
            given = q, k, v
        own = {"q": q, "k": k, "v": v}
        if self.filled is not None:
            own = _filled(self.filled, own)
        work = Forward(self.call, self.program, self.teams, own, keep=self.keep)
        self.follow(work)
        out, lse = work.out, work.lse
        if self.filled is not None:
            out, lse = self.filled.own_queries(out), self.filled.own_queries(lse)
        if self.keep:
            none = [x.new_empty((0, *x.shape[1:])) for x in given]
            return out, lse, (*none, out, *work.kept)
        return out, lse, (*given, out, lse, *work.retained)

    def differentiate(self, dout: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the local shards.

        Args:
            dout: [B,S,H,E] contiguous, in q's dtype.
            saved: of `attend`.

        Returns: dq [B,S,H,D], dk [B,S,G,D], dv [B,S,G,E], in the dtypes of q, k, v. Those that the
        call does not want may be any tensors.
        """
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
        calls, forward = self._calls, self.plan.phase == "forward"
        coming = run.arrive(0) if self.teams else None
        leaving: Waits = []
        for number, part in enumerate(rounds):
            base = work.own if coming is None else run.base(number, coming)
            # The memory of what came is free before more comes: `base` may be an ordered copy.
            if number + 1 < len(rounds):
                coming = run.arrive(number + 1)
            work.begin(part, base)
            del base
            for step in part.steps:
                if step.first:
                    work.open(step, strided=run.strided)
                # Cast: waits for the blocks of this step, and posts those of the next steps.
                if step.number in run.inputs:
                    run.take_inputs(step.number)
                if self.overlap and step.inputs:
                    run.post_inputs(step)
                if self.overlap and step.results:
                    run.expect_results(step)
                for task in step.tasks:
                    operands = work.operands(task, run.held.get(task.query), run.held.get(task.key))
                    if task.work not in calls:
                        calls[task.work] = task.work.calls(
                            packed=self.call.packed, gaps=self.call.kernel.gaps, forward=forward
                        )
                    work.compute(*operands, calls[task.work], self.call)
                    if task.rows is not None:
                        work.leave(task.rows, operands[0])
                    del operands
                # Reduce: adds the results of other ranks, and sends results for their blocks.
                if step.last or step.results or step.number in run.results:
                    run.reduce(step)
                if not self.overlap:
                    run.take_results()
                    run.post_inputs(step)
                for block in step.dropped:
                    del run.held[block]
            if self.teams:
                if run.results:
                    run.take_results()
                posted = work.end()
                while leaving:
                    leaving.pop(0)()
                leaving = posted
        if run.results:
            run.take_results()
        while leaving:
            leaving.pop(0)()


def executor_of(
    placement: Placement,
    steps: Plan,
    exchange: Plan | None,
    call: Call,
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
        topology: all ranks.
        transport: sends the messages of the steps.
        slots: see `Transport.way`.
        overlap: see Executor.
    """
    steps = with_wanted_gradients(steps, dq=call.dq, dkv=call.dkv)
    channels = team_channels(placement, topology)
    if channels and isinstance(placement, BlockPlacement):
        teams, parts = _gathering(steps, channels, call, topology.rank)
        return Executor(
            call, steps, parts, topology, transport, None, teams, None, keep=False, overlap=overlap
        )
    way, windows = transport.way(steps, slots), call.kernel.windows
    parts = program(steps, transport.topology.rank, windows)
    messages = way is not None and way.slots is None
    if not channels or not isinstance(placement, HeadPlacement):
        parts = without_idle(parts) if messages else parts
        return Executor(
            call, steps, parts, topology, transport, way, {}, None, keep=False, overlap=overlap
        )
    assert exchange is not None
    team, parts = _exchanging(parts, exchange, channels[QUERIES], placement, topology.rank)
    parts = without_idle(parts) if messages else parts
    teams, shape = {QUERIES: team, KEYS: team}, call.shape
    filled: PaddedHeads | None = PaddedHeads.of(shape.heads, shape.kv_heads, placement.members)
    if filled and (filled.heads, filled.sent_kv_heads) == (shape.heads, shape.kv_heads):
        filled = None
    of_teams = teams, filled
    return Executor(
        call,
        steps,
        parts,
        topology,
        transport,
        way,
        *of_teams,
        keep=placement.keep,
        overlap=overlap,
    )


def _gathering(
    steps: Plan, channels: Mapping[Side, TeamChannels], call: Call, rank: int
) -> tuple[dict[Side, Team], Program]:
    """The teams of queries and of keys that gather blocks, and what the rank does with these."""
    # Only moves before the first step: each group of heads has the same rows.
    first = [
        move
        for move in during(steps)
        if move.needed == 0 and not move.result and rank in (move.source, move.target)
    ]
    teams: dict[Side, Team] = {}
    for side, (owners, own, inward, outward) in channels.items():
        moves = [move for move in first if move.side == side]
        teams[side] = gathering(inward, outward, steps.spans, owners, own, moves)
    kernel = call.kernel
    computes = (compute for compute in steps.computes if compute.rank == rank)
    tiles = next((steps.tiles(one, windows=kernel.windows) for one in computes), NO_TILES)
    if tiles:
        # Only rows that are computed with are put in order, where they are few.
        wanted = _excerpt(teams[QUERIES], tiles.q), _excerpt(teams[KEYS], tiles.kv)
        tiles = tiles.excerpt(*wanted)
    tokens = teams[QUERIES].order.tokens
    return teams, gathering_program(
        steps, rank, tiles, tokens, packed=call.packed, gaps=kernel.gaps
    )


def _excerpt(team: Team, places: Ranges) -> Rows:
    """The rows that a team puts in order from now on. Args: places: of those that tiles have."""
    order, whole = team.order, between(0, team.order.tokens)
    wanted = united(places.extents, longest_gap(order.tokens))
    if order.members == 1 or 2 * row_count(wanted) > order.tokens:
        return whole
    team.order = order.within(wanted)
    return wanted if team.order.excerpt else whole


def _exchanging(
    parts: Program,
    exchange: Plan,
    channels: TeamChannels,
    placement: HeadPlacement,
    rank: int,
) -> tuple[Team, Program]:
    """The team that exchanges heads, and what the rank does with its share of them.

    Args:
        parts: what the rank does between teams.
        exchange: see `executor_of`.
        channels: of the team.
        placement: the placement.
        rank: the rank.
    """
    members, _, inward, outward = channels
    order = assemble([exchange.spans[x] for x in members], max(exchange.spans.lengths))
    team = ExchangingTeam(inward, outward, order)
    return team, exchanging_program(parts, exchange, rank, members, placement.exchanges)


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
        inputs, results: messages under way, by the step that needs them.
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
        self._partial_sums: dict[BlockId, Packed] = {}  # sums of ranks before this one
        # How many events the base block of a side, of a group of heads, waits for: results of other
        # ranks, and its last step. By the first query head of the group.
        self._missing: dict[tuple[int, Side], int] = {}
        self._complete: list[tuple[HeadGroup, Side]] = []  # those that wait for nothing any more
        self.inputs: dict[int, list[Posted]] = {}
        self.results: dict[int, list[Posted]] = {}
        self.strided = True
        if of.way is not None:
            self._channels = channels = of.transport.channels(of.way)
            self.strided = channels.inputs.strided and channels.slow_inputs.strided
            work.lent = channels.results.lends
            for of_results, exchange in of.program.receivable:
                channel = channels.results if of_results else channels.inputs
                channel.reserve([x for each in expected(exchange, *work.sizes) for x in each])
            for (of_results, slow), count in of.program.idle.items():
                channels[2 * slow + of_results].skip(count)

    def arrive(self, number: int) -> Coming:
        """Posts the gathers of a round."""
        return [
            (
                message,
                self._teams[SIDE_OF[message[0]]].gather(message, self._work.own, one.part),
            )
            for one in self._parts.rounds[number].inputs
            for message in one.messages
        ]

    def base(self, number: int, coming: Coming) -> Named:
        """Tensors of a round's base blocks: the team's tokens, or the own ones if none came.

        Args:
            number: of the round.
            coming: as `arrive` returned it; emptied.
        """
        while coming:
            message, wait = coming.pop(0)
            self._shared.update(zip(message, wait(), strict=True))
            del wait
        heads, of_part = self._parts.rounds[number].base
        held = {**self._work.kept_of[number]} if self._work.kept_of else {}
        for name, x in self._work.own.items():
            some = of_part[name]
            if name not in self._shared:
                held[name] = x if some is None else x[some]
            elif name in PER_HEAD:  # of all heads
                rows = self._shared[name]
                held[name] = (rows if some is None else rows[some]).contiguous()
            elif heads.last or name not in OF_KEYS:
                held[name] = self._shared.pop(name)
            else:
                held[name] = self._shared[name]
        return held

    def take_inputs(self, step: int) -> None:
        """Waits for the blocks that a step needs."""
        for posted in self.inputs.pop(step):
            posted.pending.wait()
            posted.sends.clear()
            for message, tensors in posted.arriving:
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
                if self._work.waits:
                    self._work.settle()
                self._channels.results.expect(exchange.sources)

    def reduce(self, step: Step) -> None:
        """Adds the results that a step needs, and posts the results for blocks of others."""
        retained = self._parts.retained
        if step.last and retained is not None and self._retains:
            held = self.held[retained]
            if self._channels.inputs.lends:  # the next call's messages take this memory
                held = tuple([x.clone() for x in held])
            self._work.retained = held
        if step.last:
            for side in self._work.sides:
                if self._note(step.heads, side):
                    self._complete.append((step.heads, side))
        if step.number in self.results:
            self._take_results(step.number)
        for exchange in step.results:
            if exchange.receives and self._work.waits:
                self._work.settle()
            channel = self._channels.slow_results if exchange.slow else self._channels.results
            self.results.setdefault(exchange.needed, []).append(self._post(channel, exchange))
        if self._complete:
            self._close()

    def take_results(self) -> None:
        """Waits for all results that are under way, and adds them to the sums."""
        for needed in sorted(self.results):
            self._take_results(needed)
        if self._complete:
            self._close()

    def _take_results(self, step: int) -> None:
        """Waits for the results that a step needs, and adds them to the sums."""
        for posted in self.results.pop(step):
            posted.pending.wait()
            posted.sends.clear()
            for (move, (owner, side), _), tensors in posted.arriving:
                if owner != self._parts.own[side]:
                    self._partial_sums[owner, side] = Packed(move.block.rows, tensors)
                    continue
                complete = self._note(move.heads, side)
                if complete and self._relay:  # added in the pass that writes the results
                    self._work.close(move.heads, side, Packed(move.block.rows, tensors))
                    continue
                self._work.accept(move, tensors)
                if complete:
                    self._complete.append((move.heads, side))

    def _note(self, heads: HeadGroup, side: Side) -> bool:
        """Notes that results for a base block came, or that its last step is done.

        Returns: whether nothing is missing any more. A mask may shorten a relay, so that the last
        results come before the last step.
        """
        group = heads.q.start, side
        missing = self._missing.get(group)
        if missing is None:
            missing = self._parts.awaited.get(group, 0) + 1
        self._missing[group] = missing - 1
        return missing == 1

    def _close(self) -> None:
        """Closes base blocks that wait for nothing any more."""
        for heads, side in self._complete:
            self._work.close(heads, side, None)
        self._complete.clear()

    def _post(self, channel: Communicator, exchange: Exchange) -> Posted:
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
        posted = Posted(channel.exchange(sends, receives), tuple(arriving), sends)
        if exchange.idle:
            channel.skip(exchange.idle)
        return posted

    def _sent(self, message: Message, strided: bool) -> Sequence[Tensor]:
        move, block, result = message
        rows = move.block.rows
        if result:
            held = self._parts.rows[block]
            return self._work.results_for(message, held, self._partial_sums.pop(block, None))
        if block in self.held:
            held, tensors = self._parts.rows[block], self.held[block]
        else:
            tensors = self._work.keys if block[1] else self._work.queries
            held = ((0, tensors[0].shape[1]),)
        if rows == held and all(map(Tensor.is_contiguous, tensors)):
            return tensors
        return [packed(x, token_dim(x), rows, held, strided=strided) for x in tensors]
