"""Base of the algorithms that send blocks from rank to rank, following their placement."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from megatron_cp_plugin.core.algorithm import Algorithm, Call, Saved, group_counts, number
from megatron_cp_plugin.core.caching import cached_method
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.execution.execute import follow
from megatron_cp_plugin.core.execution.passes import Backward, Forward
from megatron_cp_plugin.core.execution.transport import Transport, Wanted, Way, redistribute
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.pipeline import HeadGroup, successive_groups
from megatron_cp_plugin.core.plans.placement_check import check_placement, check_steps
from megatron_cp_plugin.core.plans.plan import Plan, with_wanted_gradients
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology


class PointToPoint(Algorithm):
    """Attention by a plan that `core.execution.execute` follows; subclasses say where blocks meet.

    Attributes: overlap: messages travel during computations. transport: chooses the channels.
    """

    windows = True
    overlap = True

    @dataclass(frozen=True)
    class Options(Algorithm.Options):
        """Options of all of them.

        Attributes:
            chunks: groups of heads that are computed one after another, at most as many as KV
                heads; 0: two for long sequences without windows, documents and spans, else one.
            transport: "group" (the process group's own, NCCL or gloo), "peer" (copy engines over
                peer memory: GPUs of one node, of which each exchanges with one other at a time and
                holds two blocks of others at most), or "auto", peer where that is possible.
        """

        chunks: int = number(0, group_counts, least=0)
        transport: Wanted = "auto"

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self.transport = Transport(self.name, topology, options.transport)
        self._checked: set[Phase] = set()

    def make_channels(self, shape: Shape) -> None:
        """See Algorithm.make_channels."""
        self.transport.make(self.plan(shape, Mask(), "backward"))

    def head_groups(self, shape: Shape, mask: Mask) -> tuple[HeadGroup, ...]:
        """The groups of a placement, as many as option `chunks` says."""
        # Under other masks there is little to compute, and each group costs calls and copies.
        elements = 0 if mask.special else shape.elements(self.topology.size)
        return successive_groups(shape.heads, shape.kv_heads, self.options.chunks, elements)

    def slots(self, shape: Shape) -> int:
        """How many blocks of others a rank holds at most, over peer memory."""
        return min(2, self.topology.size - 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward."""
        plan, way = self._prepared("forward", call, Shape.of(q, k, v, call.seq_len))
        k, v = redistribute(self.topology, plan, k, v)
        work = Forward(q, k, v, call, groups=len(plan.groups))
        follow(plan, self.transport.channels(way), work, overlap=self.overlap)
        return work.out, work.lse, (q, k, v, work.out, work.lse, *work.retained)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward."""
        q, k, v, out, lse, *retained = saved
        return self.differentiate(dout, q, k, v, Statistics(lse, out=out), call, tuple(retained))

    def differentiate(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        call: Call,
        retained: Saved = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `backward`, where either out or delta is at hand."""
        plan, way = self._prepared("backward", call, Shape.of(q, k, v, call.seq_len))
        groups = len(plan.groups)
        few = plan.steps <= 2 * groups
        work = Backward(dout, q, k, v, statistics, call, groups=groups, few=few, retained=retained)
        follow(plan, self.transport.channels(way), work, overlap=self.overlap)
        dq, dk, dv = work.gradients
        return dq, *redistribute(self.topology, plan, dk, dv)

    # Looked up once a pass: at short lengths a step of training is bound by the host.
    @cached_property
    def _prepared(self) -> Callable[[Phase, Call, Shape], tuple[Plan, Way]]:
        return cached_method(self._prepare, 64)

    def _prepare(self, phase: Phase, call: Call, shape: Shape) -> tuple[Plan, Way]:
        plan = self.plan_for(shape, call, phase)
        return plan, self.transport.way(plan, self.slots(shape))

    def plan_for(self, shape: Shape, call: Call, phase: Phase) -> Plan:
        """What a call computes and moves: all that a rank needs to know of it."""
        rectangular, rank = call.kernel.rectangular_causal, self.planned_alone
        plan = self.plan(shape, call.mask, phase, rectangular=rectangular, rank=rank)
        return with_wanted_gradients(plan, dq=call.dq, dkv=call.dkv)

    def _make_on(self, layout: Layout) -> Algorithm:
        other = super()._make_on(layout)
        assert isinstance(other, PointToPoint)
        other._checked = self._checked
        return other

    @property
    def planned_alone(self) -> int | None:
        """The rank whose part of a plan is enough for it; None: it needs those of all ranks, which
        use buffers in each other's memory in the same order.
        """
        return None if self.topology.peer_access else self.topology.rank

    def _make_plan(
        self, shape: Shape, mask: Mask, phase: Phase, rectangular: bool, rank: int | None
    ) -> Plan:
        if phase not in self._checked:
            # Once for all ranks, so that all refuse what one of them does.
            if rank is not None:
                self.plan(shape, mask, phase, rectangular=rectangular)
            else:
                check_placement(self.name, self.placement(shape, mask, phase), shape.seq_len, mask)
        plan = super()._make_plan(shape, mask, phase, rectangular, rank)
        check_steps(self.name, plan)
        self._checked.add(phase)
        return plan
