"""One rank's part of a pass, made once for all calls that are alike, and its transport.

B batch, S local tokens, H query heads, G KV heads, D head dim, E that of values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import batched
from typing import Literal

from torch import Tensor

from megatron_cp_plugin.core.blocks.assembly import Assembly, assemble
from megatron_cp_plugin.core.call import Call
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.execution.loop import Channels, RankPart
from megatron_cp_plugin.core.execution.passes import Backward, Forward
from megatron_cp_plugin.core.execution.program import program
from megatron_cp_plugin.core.execution.team import (
    ExchangingTeam,
    Named,
    TeamChannels,
    exchanging_program,
    gathering_teams,
)
from megatron_cp_plugin.core.partial import delta_of
from megatron_cp_plugin.core.placement import HeadPlacement, Placement
from megatron_cp_plugin.core.plans.checks import fits_slots
from megatron_cp_plugin.core.plans.plan import (
    KEYS,
    QUERIES,
    Plan,
    Side,
    outside,
    with_wanted_gradients,
)
from megatron_cp_plugin.core.plans.team_heads import PaddedHeads, TeamHeads
from megatron_cp_plugin.errors import ConfigError

Saved = tuple[Tensor, ...]

_KEPT = ("q", "k", "v", "lse")  # of each round's base blocks
Wanted = Literal["auto", "group", "peer"]
REDISTRIBUTED = "transposes"  # the channel of `redistribute`


def team_of_heads(
    placement: HeadPlacement, order: Assembly, topology: Topology, transport: "Transport"
) -> ExchangingTeam:
    """The rank's team, which exchanges heads, by copy engines where that is wanted and possible.
    A collective operation the first time. Args: order: of the team's tokens.

    Raises: ConfigError if copy engines are wanted where there are none.
    """
    team = topology.subgroup(placement.team(topology.rank), "team")
    if not transport.pushes_in(team):
        return ExchangingTeam(
            partial(team.channel, "inward"), partial(team.channel, "outward"), order
        )
    # Inputs of a round are two exchanges if later rounds share its keys; results then, or if other
    # teams have some for its keys.
    inward = 1 if all(heads.last for heads, _ in placement.exchanges) else 2
    slots = inward, 1 if inward == 1 and placement.members == topology.size else 2
    ways = partial(team.peer_channel, "inward", 2), partial(team.peer_channel, "outward", 2)
    return ExchangingTeam(*ways, order, slots)


def team_channels(placement: Placement, topology: Topology) -> dict[Side, TeamChannels]:
    """Channels of the teams that gather queries and of those that gather keys; empty without such.

    A collective operation the first time.
    """
    rank = topology.rank
    if isinstance(placement, HeadPlacement) or not placement.assembled or placement.size == 1:
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
    """The ranks that exchange blocks step by step: all ranks with the same share of the heads."""
    members = placement.members if isinstance(placement, HeadPlacement) else 1
    return topology.subgroup(range(topology.rank % members, topology.size, members), "ring")


class Transport:
    """The channels of one rank, for the plans of one algorithm.

    Copy engines serve plans in which every rank holds the blocks of few exchanges at once. Between
    nodes messages go over the process group; in merged steps those inside nodes go by copy engines
    nevertheless.
    """

    def __init__(self, algorithm: str, topology: Topology, wanted: Wanted) -> None:
        """Args: algorithm: its name, for errors.

        Raises: ConfigError if copy engines are wanted where there are none.
        """
        self._algorithm, self.topology, self._wanted = algorithm, topology, wanted
        if wanted == "peer":
            self.pushes_in(topology)

    @property
    def pushes(self) -> bool:
        """Whether copy engines may and can write to other ranks' memory. First time: collective."""
        return self.pushes_in(self.topology)

    def pushes_in(self, topology: Topology) -> bool:
        """As `pushes`, in a topology. Raises: ConfigError if it is wanted and they cannot."""
        if self._wanted == "peer" and topology.size > 1 and not topology.peer_access:
            raise ConfigError(
                f"{self._algorithm} transport peer needs GPUs of one node with access to each "
                "other's memory, got ranks without it: use transport auto or group"
            )
        return self._wanted != "group" and topology.peer_access

    @property
    def near(self) -> int:
        """Ranks of each of several nodes, if copy engines may and can send inside them; else 1."""
        near = None if self._wanted == "group" else self.topology.near
        return 1 if near is None or near is self.topology else near.size

    def split(self, plan: Plan, slots: int) -> int:
        """`near`, if copy engines send a plan's messages inside nodes and process groups between; 1
        if copy engines send all of them, 0 if none.

        Args: slots: how many blocks of others a rank holds at most, by copy engines.

        Raises: ConfigError if copy engines are wanted and cannot serve the plan.
        """
        if plan.once and self.near > 1:
            return self.near
        if not sends(plan):
            return 0
        fits = self.pushes and fits_slots(plan, slots)
        if self._wanted == "peer" and self.pushes and not fits:
            raise ConfigError(
                f"{self._algorithm} transport peer needs ranks to hold the blocks of at most "
                f"{slots} exchanges at once, got another {plan.phase} for this mask: use transport "
                "auto"
            )
        return int(fits)

    def channels(self, plan: Plan, slots: int, near: int) -> Callable[[], Channels] | None:
        """Makes the channels of a plan's messages. None: it has none.

        Args: slots: as of `split`. near: what it gives.
        """
        if not sends(plan):
            return None
        buffers = slots if near else 0
        # Of a group's steps the first and the last need no inputs, if they are merged.
        rotation = min(plan.steps // len(plan.groups) - 2, slots) if plan.merged else slots
        return partial(self._open, *self._names(plan, near), slots=buffers, rotation=rotation)

    def _open(self, inputs: str, results: str, *slow: str, slots: int, rotation: int) -> Channels:
        """Args:
        slots: receive buffers of copy engines; 0: messages go over the process group.
        rotation: how many of them this plan takes in turn.
        """
        topology = self.topology
        if slots:  # results are added before the next ones come
            near = topology.near
            assert near is not None
            fast = near.peer_channel(inputs, slots), near.peer_channel(results, 1)
            fast[0].rotation = rotation
        else:
            fast = topology.channel(inputs), topology.channel(results)
        return Channels(*fast, *([topology.channel(name) for name in slow] or fast))

    def _names(self, plan: Plan, near: int) -> list[str]:
        """Names of channels for inputs and results; then of those for slow messages."""
        names = ["fetches", "sums" if plan.relay else "returns"]
        if plan.slow or near > 1:
            names += [f"{name} between nodes" for name in names]
        return names


def sends(plan: Plan) -> bool:
    """Whether any rank sends anything in a step of a plan."""
    return bool(plan.moves or plan.times)


def redistribute(topology: Topology, plan: Plan, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Exchanges two tensors of keys [B,S,G,D] by the moves of a plan that are `outside` its steps.

    It brings K and V to the ranks that hold them during a pass, and their gradients to the owners.
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


@dataclass(frozen=True, eq=False)
class Executor(RankPart):
    """One rank's part of one pass, for all calls with equal settings and shapes.

    Attributes:
        plan: of the steps.
        filled: the heads with zero heads added, if teams need more heads than the call has.
        keep: the base blocks stay in memory for the backward.
    """

    plan: Plan
    topology: Topology
    transport: Transport
    filled: PaddedHeads | None = None
    keep: bool = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
        """Attention of the local queries over all keys.

        Args:
            q: [B,S,H,D], contiguous; k: [B,S,G,D] and v: [B,S,G,E] likewise: this rank's tokens in
                the order of the layout.

        Returns: out [B,S,H,E] in q's dtype; lse [B,H,S], natural logarithm, float32 (float64 for
        float64); and what `differentiate` needs, local tensors only. Out among them is the same
        tensor as the one that is returned, because attention sinks change it in place.
        """
        if outside(self.plan):
            k, v = redistribute(self.topology, self.plan, k, v)
        given = q, k, v
        own = {"q": q, "k": k, "v": v}
        if self.filled is not None:
            own = self.filled.fill(own)
        work = Forward(self, own, keep=self.keep)
        work.run()
        out, lse = work.out, work.lse
        if self.filled is not None:
            out, lse = self.filled.own_queries(out), self.filled.own_queries(lse)
        if self.keep:
            none = [x.new_empty((0, *x.shape[1:])) for x in given]
            return out, lse, (*none, out, *work.kept, *work.retained)
        return out, lse, (*given, out, lse, *work.retained)

    def differentiate(self, dout: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the local shards.

        Args: dout: [B,S,H,E] contiguous, in q's dtype. saved: of `attend`.

        Returns: dq [B,S,H,D], dk [B,S,G,D], dv [B,S,G,E], in the dtypes of q, k, v. Gradients that
        the call does not want are arbitrary tensors.
        """
        q, k, v, out, *rest = saved
        own, kept = {"out": out, "dout": dout}, list[Named]()
        if self.keep:  # of q, k and v only the numbers of heads are here
            count = len(_KEPT) * len(self.program.rounds)
            rest, of_rounds = rest[count:], rest[:count]
            kept = [dict(zip(_KEPT, part, strict=True)) for part in batched(of_rounds, len(_KEPT))]
        else:
            own |= {"q": q, "k": k, "v": v, "lse": rest.pop(0)}
        if self.filled is not None:
            own = self.filled.fill(own)
        new = partial(self._gradients, q, k, v, dout)
        work = Backward(self, own, new, kept, tuple(rest))
        first = self.program.rounds[0].steps[0]
        if kept and first.inputs:
            work.send_keys(first, kept[0])
        if self.sends_delta:  # in place of out
            own["delta"] = delta_of(own["dout"], own.pop("out"))
        work.run()
        dq, dk, dv = work.gradients
        if self.filled is not None:
            dq = self.filled.own_queries(dq)
            dk, dv = self.filled.own_keys(dk), self.filled.own_keys(dv)
        if outside(self.plan):
            dk, dv = redistribute(self.topology, self.plan, dk, dv)
        return dq, dk, dv

    def _gradients(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, side: Side) -> Named:
        """Memory for dq, or for dk and dv, of the own tokens."""
        like = {"dk": k, "dv": v} if side else {"dq": q}
        heads = (k if side else q).shape[2]
        if self.filled is not None:
            heads = self.filled.sent_kv_heads if side else self.filled.heads
        sizes = {name: (len(dout), x.shape[1], heads, x.shape[3]) for name, x in like.items()}
        return {name: dout.new_empty(size) for name, size in sizes.items()}

    @cached_property
    def sends_delta(self) -> bool:
        """Whether delta is sent to the team in place of out."""
        return any("delta" in one.names for part in self.program.rounds for one in part.inputs)


def executor_of(
    placement: Placement, steps: Plan, call: Call, topology: Topology, transport: Transport
) -> Executor:
    """A rank's part of one pass.

    Args: steps: its plan; if teams split heads, the plan between teams.
    """
    steps = with_wanted_gradients(steps, dq=call.dq, dkv=call.dkv)
    channels = team_channels(placement, topology)
    if channels:
        teams, parts = gathering_teams(steps, channels, call, topology.rank)
        return Executor(call, parts, teams, None, steps, topology, transport)
    blocks = placement.of_teams if isinstance(placement, HeadPlacement) else placement
    kinds = call.kernel.rectangular_causal, call.kernel.windows
    near = transport.split(steps, blocks.most_held)
    parts = program(steps, transport.topology.rank, *kinds, near)
    filled, keep, of_heads = None, False, dict[Side, ExchangingTeam]()
    if isinstance(placement, HeadPlacement) and placement.members > 1:
        exchange, ranks = TeamHeads(placement, steps), placement.team(topology.rank)
        order = assemble([exchange.spans[x] for x in ranks], max(exchange.spans.lengths))
        team = team_of_heads(placement, order, topology, transport)
        of_heads, keep, shape = {QUERIES: team, KEYS: team}, placement.keep, call.shape
        parts = exchanging_program(parts, exchange, team.slots[0])
        filled = PaddedHeads.of(shape.heads, shape.kv_heads, placement.members)
        if (filled.heads, filled.sent_kv_heads) == (shape.heads, shape.kv_heads):
            filled = None
    common = transport.channels(steps, blocks.most_held, near), steps, topology, transport
    return Executor(call, parts, of_heads, *common, filled, keep)
