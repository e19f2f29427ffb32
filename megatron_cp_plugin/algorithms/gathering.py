"""Algorithms whose blocks come by collective operations, or from rank to rank.

B batch, S local tokens, H query heads, G KV heads, D head dim.
"""

from abc import abstractmethod

from torch import Tensor

from megatron_cp_plugin.algorithms.point_to_point import PointToPoint
from megatron_cp_plugin.core.algorithm import Algorithm, Call, Saved
from megatron_cp_plugin.core.caching import cached_method
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.gathered import Gathered
from megatron_cp_plugin.core.grid import Grid
from megatron_cp_plugin.core.plan import Plan
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology


class Gathering(PointToPoint):
    """Attention by a plan that `core.gathered` follows if blocks are gathered, else `core.execute`.

    Subclasses say which of the two, and on which grid of ranks.
    """

    def __init__(self, topology: Topology, options: PointToPoint.Options) -> None:
        super().__init__(topology, options)
        # Looked up once a pass: at short lengths a step of training is bound by the host.
        self._gathered = cached_method(self._make_gathered, 64)

    @property
    @abstractmethod
    def gathers(self) -> bool:
        """Whether blocks come by collective operations, as of a placement that is `assembled`."""

    @abstractmethod
    def grid(self, shape: Shape) -> Grid:
        """The ranks that gather queries together, its rows, and keys, its columns."""

    @property
    def planned_alone(self) -> int | None:
        """See PointToPoint.planned_alone: collective operations have one order whatever others do,
        so a rank's own part is enough.
        """
        return self.topology.rank if self.gathers else super().planned_alone

    def make_channels(self, shape: Shape) -> None:
        """See Algorithm.make_channels."""
        if self.gathers:
            self._gathered(shape, self.plan(shape, Mask(), "forward", rank=self.planned_alone))
        else:
            super().make_channels(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward."""
        if not self.gathers:
            return super().forward(q, k, v, call)
        shape = Shape.of(q, k, v, call.seq_len)
        plan = self.plan_for(shape, call, "forward")
        return self._gathered(shape, plan).forward(q, k, v, call)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward."""
        if not self.gathers:
            return super().backward(dout, saved, call)
        q, k, v, *_ = saved
        shape = Shape.of(q, k, v, call.seq_len)
        plan = self.plan_for(shape, call, "backward")
        return self._gathered(shape, plan).backward(dout, saved, call)

    def _make_gathered(self, shape: Shape, plan: Plan) -> Gathered:
        return Gathered(plan, self.grid(shape), self.topology)

    def _make_plan(
        self, shape: Shape, mask: Mask, phase: Phase, rectangular: bool, rank: int | None
    ) -> Plan:
        # PointToPoint refuses blocks of others in step 0, in which gathered ones are there.
        kind: type[Algorithm] = Algorithm if self.gathers else PointToPoint
        return kind._make_plan(self, shape, mask, phase, rectangular, rank)
