"""One loop for every algorithm: cast, compute, reduce; and how its messages are sent.

A rank goes through the rounds of its program, and in each round through its steps. In a step it
waits for the blocks of other ranks that it needs and posts those of the next steps (cast), computes
while they travel (compute), merges or adds the results that came for its base blocks, and sends its
results for the blocks of other ranks (reduce). The base blocks of a round come from the rank's
team, and their results go back to the team after it: while a round computes, the base blocks of the
next one come, and the results of the one before leave. Without teams there is one round, and the
base blocks are the rank's own tokens.

B batch, S local tokens, H query heads, G KV heads, D head dim, E that of values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.assembly import assemble
from megatron_cp_plugin.core.blocks.rows import (
    packed,
    token_dim,
)
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
    all_exchanges,
    exchanging_program,
    program,
    without_idle,
)
from megatron_cp_plugin.core.execution.team import (
    ExchangingTeam,
    Named,
    TeamChannels,
    Tensors,
    Waits,
    gathering_teams,
)
from megatron_cp_plugin.core.masks.tile_batches import Batch, Batches
from megatron_cp_plugin.core.partial import delta_of
from megatron_cp_plugin.core.placement import BlockPlacement, HeadPlacement, Placement
from megatron_cp_plugin.core.plans.check import PlanError, check_slots
from megatron_cp_plugin.core.plans.plan import (
    KEYS,
    OF_KEYS,
    PER_HEAD,
    QUERIES,
    SIDE_OF,
    Plan,
    Side,
    TensorNames,
    outside,
    with_wanted_gradients,
)
from megatron_cp_plugin.core.tiles import Tile
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError

Saved = tuple[Tensor, ...]
# The messages of a round, by the names of their tensors, and functions that wait for these.
Coming = list[tuple[TensorNames, Callable[[], Sequence[Tensor]]]]

_KEPT = ("q", "k", "v", "lse")  # of each round's base blocks
_GRADIENTS = ("dq", "dk", "dv")
Wanted = Literal["auto", "group", "peer"]
REDISTRIBUTED = "transposes"  # the channel of `redistribute`


class Channels(NamedTuple):
    """Where messages go: inputs of computations, and results; those that may take several steps
    on channels of their own, so that no other waits for them.
    """

    inputs: Communicator
    results: Communicator
    slow_inputs: Communicator
    slow_results: Communicator


def team_channels(placement: Placement, topology: Topology) -> dict[Side, TeamChannels]:
    """Of the teams in which queries, and keys, come together; none if they do not.

    A collective operation the first time.
    """
    rank = topology.rank
    if isinstance(placement, HeadPlacement):
        if placement.members == 1:
            return {}
        first = rank // placement.members * placement.members
        ranks = tuple(range(first, first + placement.members))
        team = topology.subgroup(ranks, "team")
        both = TeamChannels(ranks, rank, team.channel("inward"), team.channel("outward"))
        return {QUERIES: both, KEYS: both}
    if not placement.assembled or placement.size == 1:
        return {}
    queries, keys = placement.blocks_of(rank)
    sources = [placement.key_source(owner) for owner in keys]
    row, column = topology.subgroup(queries, "row"), topology.subgroup(sources, "column")
    of_queries = row.channel("queries"), row.channel("outputs")
    of_keys = column.channel("keys"), column.channel("key gradients")
    return {
        QUERIES: TeamChannels(queries, rank, *of_queries),
        KEYS: TeamChannels(keys, keys[sources.index(rank)], *of_keys),
    }


def steps_among(placement: Placement, topology: Topology) -> Topology:
    """The ranks that exchange blocks step by step: those with the same share of the heads."""
    members = placement.members if isinstance(placement, HeadPlacement) else 1
    return topology.subgroup(range(topology.rank % members, topology.size, members), "ring")


class Way(NamedTuple):
    """How messages are sent.

    Attributes: names: of the channels of inputs and results, and of those that may take several
        steps, if there are any. slots: of copy engines; None: over the process group.
    """

    names: tuple[str, ...]
    slots: int | None


class Transport:
    """The channels of one rank, for the plans of one algorithm.

    Copy engines serve plans in which every rank exchanges with one other at a time and holds few
    blocks of others at once; all ranks of such a group are on one node.
    """

    def __init__(self, algorithm: str, topology: Topology, wanted: Wanted) -> None:
        """Args: algorithm: its name, for errors.

        Raises: ConfigError if copy engines are wanted where there are none.
        """
        self._algorithm, self.topology, self._wanted = algorithm, topology, wanted
        self._connected: set[Way] = set()
        if wanted == "peer" and topology.size > 1 and not topology.peer_access:
            raise ConfigError(
                f"{algorithm} transport peer needs GPUs of one node with access to each other's "
                "memory, got ranks without it: use transport auto or group"
            )

    @property
    def pushes(self) -> bool:
        """Whether copy engines may write to other ranks' memory, and can. A collective operation
        the first time.
        """
        return self._wanted != "group" and self.topology.peer_access

    def make(self, plan: Plan, *, gathers: bool) -> None:
        """Makes the process groups of a plan; a collective operation.

        Args: gathers: blocks come together; else they go from rank to rank.

        Some calls need them even where there is peer access: not every mask's plan suits it.
        """
        if outside(plan):
            self.topology.channel(REDISTRIBUTED)
        if self._wanted != "peer" and sends(plan) and not gathers:
            for name in self._names(plan):
                self.topology.channel(name)

    def way(self, plan: Plan, slots: int) -> Way | None:
        """How a plan's messages are sent: by copy engines where wanted and possible; not between
        nodes. None: it has no messages.

        Args: slots: how many blocks of others a rank holds at most, by copy engines.

        Raises: ConfigError if copy engines are wanted and cannot serve the plan.
        """
        if not sends(plan):
            return None
        return Way(tuple(self._names(plan)), slots if self._pushed(plan, slots) else None)

    def channels(self, way: Way) -> Channels:
        """Those for the messages of a plan."""
        (inputs, results, *slow), slots = way
        if slots is not None:
            # Results are added before the next ones come.
            fast = [
                self.topology.peer_channel(inputs, slots),
                self.topology.peer_channel(results, 1),
            ]
        else:
            fast = [self.topology.channel(inputs), self.topology.channel(results)]
        between = [self.topology.channel(name) for name in slow]
        if way not in self._connected:
            for channel in (*fast, *between):
                channel.connect()
            self._connected.add(way)
        return Channels(*fast, *(between or fast))

    def _names(self, plan: Plan) -> list[str]:
        """Channels of inputs and results, and of those that may take several steps."""
        names = ["fetches", "sums" if plan.relay else "returns"]
        *_, slow = all_exchanges(plan)
        return names + [f"{name} between nodes" for name in names] if slow else names

    def _pushed(self, plan: Plan, slots: int) -> bool:
        if not self.pushes:
            return False
        _, one_peer, _ = all_exchanges(plan)
        possible = one_peer and _fits(plan, slots)
        if not possible and self._wanted == "peer":
            raise ConfigError(
                f"{self._algorithm} transport peer needs each rank to exchange with one other at "
                "a time, and no more than two blocks of others at once, got another "
                f"{plan.phase} for this mask: use transport auto"
            )
        return possible


def sends(plan: Plan) -> bool:
    """Whether any rank sends anything in a step of a plan."""
    return bool(plan.moves or plan.times)


def redistribute(topology: Topology, plan: Plan, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of keys [B,S,G,D], as the moves `outside` of a plan's steps exchange them.

    So K and V come to the ranks that hold them in a pass, and their gradients to the owners.
    """
    moves, rank = outside(plan), topology.rank
    sends = [(x, move.target) for move in moves if move.source == rank for x in (a, b)]
    receives = []
    for move in moves:
        if move.target == rank:
            a, b = (x.new_empty((len(x), move.tokens, *x.shape[2:])) for x in (a, b))
            receives += [(a, move.source), (b, move.source)]
    topology.channel(REDISTRIBUTED).exchange(sends, receives).wait()
    return a, b


@lru_cache(maxsize=256)
def _fits(plan: Plan, slots: int) -> bool:
    """Whether no rank needs a block that came by copy engines after its slot is given on."""
    fast = tuple(move for move in plan.moves if move.needed == move.posted + 1)
    try:
        check_slots(replace(plan, moves=fast), slots)
    except PlanError:
        return False
    return True


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
    overlap: bool
    way: Way | None = None
    teams: Teams = field(default_factory=dict)
    filled: PaddedHeads | None = None
    keep: bool = False
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
    overlap: bool,
) -> Executor:
    """A rank's part of one pass.

    Args:
        steps: its plan; if teams split heads, the plan between teams.
        exchange: if teams split heads, a plan that has this rank's exchanges in its team.
        transport: sends the messages of the steps, with so many `slots`; see `Transport.way`.
    """
    steps = with_wanted_gradients(steps, dq=call.dq, dkv=call.dkv)
    channels = team_channels(placement, topology)
    common = topology, transport, overlap
    if channels and isinstance(placement, BlockPlacement):
        teams, parts = gathering_teams(steps, channels, call, topology.rank)
        return Executor(call, steps, parts, *common, teams=teams)
    way = transport.way(steps, slots)
    parts = program(steps, transport.topology.rank, call.kernel.windows)
    teams, filled, keep = {}, None, False
    if channels and isinstance(placement, HeadPlacement):
        assert exchange is not None
        members, _, inward, outward = channels[QUERIES]
        order = assemble([exchange.spans[x] for x in members], max(exchange.spans.lengths))
        team = ExchangingTeam(inward, outward, order)
        teams, keep, shape = {QUERIES: team, KEYS: team}, placement.keep, call.shape
        parts = exchanging_program(parts, exchange, topology.rank, members, placement.exchanges)
        filled = PaddedHeads.of(shape.heads, shape.kv_heads, placement.members)
        if (filled.heads, filled.sent_kv_heads) == (shape.heads, shape.kv_heads):
            filled = None
    if way is not None and way.slots is None:
        parts = without_idle(parts)
    return Executor(call, steps, parts, *common, way, teams, filled, keep)


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
        """Tensors of a round's base blocks: the team's, of `coming`, or the own."""
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
        """Notes that results for a base block came, or that its last step is done: is it complete?

        A mask may shorten a relay, so that the last results come before the last step.
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
