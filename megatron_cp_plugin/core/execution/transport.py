"""Chooses how the blocks of a plan are sent: copy engines over peer memory, or messages."""

from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from torch import Tensor

from megatron_cp_plugin.core.execution.execute import Channels
from megatron_cp_plugin.core.execution.program import program
from megatron_cp_plugin.core.plans.plan import Plan, outside
from megatron_cp_plugin.core.plans.plan_check import PlanError, check_slots
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError

Wanted = Literal["auto", "group", "peer"]

REDISTRIBUTED = "transposes"  # the channel of `redistribute`


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
        self._algorithm, self._topology, self._wanted = algorithm, topology, wanted
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
        return self._wanted != "group" and self._topology.peer_access

    def make(self, plan: Plan) -> None:
        """Makes the process groups of a plan; a collective operation.

        Some calls need them even where there is peer access: not every mask's plan suits it.
        """
        if outside(plan):
            self._topology.channel(REDISTRIBUTED)
        if self._wanted != "peer":
            for name in self._names(plan):
                self._topology.channel(name)

    def way(self, plan: Plan, slots: int) -> Way:
        """How a plan's messages are sent: by copy engines where wanted and possible; not between
        nodes.

        Args: slots: how many blocks of others a rank holds at most, by copy engines.

        Raises: ConfigError if copy engines are wanted and cannot serve the plan.
        """
        return Way(tuple(self._names(plan)), slots if self._pushed(plan, slots) else None)

    def channels(self, way: Way) -> Channels:
        """Those for the messages of a plan."""
        (inputs, results, *slow), slots = way
        if slots is not None:
            # Results are added before the next ones come.
            fast = [
                self._topology.peer_channel(inputs, slots),
                self._topology.peer_channel(results, 1),
            ]
        else:
            fast = [self._topology.channel(inputs), self._topology.channel(results)]
        between = [self._topology.channel(name) for name in slow]
        return Channels(*fast, *(between or fast))

    def _names(self, plan: Plan) -> list[str]:
        """Channels of inputs and results, and of those that may take several steps."""
        names = ["fetches", "sums" if plan.relay else "returns"]
        slow = program(plan, self._topology.rank).slow
        return names + [f"{name} between nodes" for name in names] if slow else names

    def _pushed(self, plan: Plan, slots: int) -> bool:
        if not self.pushes:
            return False
        possible = program(plan, self._topology.rank).one_peer and _fits(plan, slots)
        if not possible and self._wanted == "peer":
            raise ConfigError(
                f"{self._algorithm} transport peer needs each rank to exchange with one other at "
                "a time, and no more than two blocks of others at once, got another "
                f"{plan.phase} for this mask: use transport auto"
            )
        return possible


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
