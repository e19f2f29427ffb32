"""Chooses how the blocks of a plan are sent: copy engines over peer memory, or messages."""

from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from torch import Tensor

from megatron_cp_plugin.core.comm import Communicator
from megatron_cp_plugin.core.execution.program import all_exchanges
from megatron_cp_plugin.core.placement import HeadPlacement, Placement
from megatron_cp_plugin.core.plans.check import PlanError, check_slots
from megatron_cp_plugin.core.plans.plan import KEYS, QUERIES, Plan, Side, outside
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError

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


class TeamChannels(NamedTuple):
    """Where blocks come together.

    Attributes: owners: whose blocks they are, in the order of the ranks. own: whose this rank has.
        inward, outward: channels to where blocks are computed with, and back.
    """

    owners: tuple[int, ...]
    own: int
    inward: Communicator
    outward: Communicator


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
    if not moves:
        return a, b
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
