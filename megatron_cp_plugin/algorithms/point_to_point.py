"""Algorithms that send blocks from rank to rank, as their placement says."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from torch import Tensor

from megatron_cp_plugin.core.algorithm import Algorithm, Call, Saved
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.execute import Channels, follow
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.passes import Backward, Forward
from megatron_cp_plugin.core.pipeline import HeadGroup, check_chunks, successive_groups
from megatron_cp_plugin.core.plan import Plan
from megatron_cp_plugin.core.plan_check import PlanError, check_slots
from megatron_cp_plugin.core.program import during, program
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError


class PointToPoint(Algorithm):
    """Attention by a plan that `core.execute` follows; subclasses say where blocks meet.

    Attributes: overlap: messages travel during computations.
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

        chunks: int = 0
        transport: Literal["auto", "group", "peer"] = "auto"

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self._checked: set[Phase] = set()
        if options.transport == "peer" and topology.size > 1 and not topology.peer_access:
            raise ConfigError(
                f"{self.name} transport peer needs GPUs of one node with access to each other's "
                "memory, got ranks without it: use transport auto or group"
            )

    @classmethod
    def check(
        cls, options: Algorithm.Options, *, size: int, heads: int, kv_heads: int, causal: bool
    ) -> None:
        """See Algorithm.check."""
        assert isinstance(options, cls.Options)
        check_chunks(cls.name, options.chunks)

    def make_channels(self, shape: Shape) -> None:
        """See Algorithm.make_channels; some calls need them even where there is peer access."""
        if self.options.transport != "peer":
            for name, _ in self._channel_names(self.plan(shape, Mask(), "backward"), shape):
                self.topology.channel(name)

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
        shape, rectangular = Shape.of(q, k, v, call.seq_len), call.kernel.rectangular_causal
        plan = self.plan(
            shape, call.mask, "forward", rectangular=rectangular, rank=self.planned_alone
        )
        work = Forward(q, k, v, call, groups=len(plan.groups))
        follow(plan, self._channels(plan, shape), work, overlap=self.overlap)
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
        shape, rectangular = Shape.of(q, k, v, call.seq_len), call.kernel.rectangular_causal
        plan = self.plan(
            shape, call.mask, "backward", rectangular=rectangular, rank=self.planned_alone
        )
        plan = _with_results(plan, dq=call.dq, dkv=call.dkv)
        groups = len(plan.groups)
        few = plan.steps <= 2 * groups
        work = Backward(dout, q, k, v, statistics, call, groups=groups, few=few, retained=retained)
        follow(plan, self._channels(plan, shape), work, overlap=self.overlap)
        return work.gradients

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
        plan = super()._make_plan(shape, mask, phase, rectangular, rank)
        if rank is not None and phase not in self._checked:
            # Once for all ranks, so that all refuse what one of them does.
            self.plan(shape, mask, phase, rectangular=rectangular)
            self._checked.add(phase)
        each = plan.steps // len(plan.groups)
        for move in during(plan):
            if not move.result and move.needed % each == 0:
                raise ConfigError(
                    f"{self.name} places a block of rank {move.block.owners[0]} on rank "
                    f"{move.target} in step 0, in which a rank has only its own: use steps from 1"
                )
        return plan

    def _channels(self, plan: Plan, shape: Shape) -> Channels:
        """By copy engines where wanted and possible; not between nodes."""
        (inputs, slots), results, *slow = self._channel_names(plan, shape)
        if self._pushed(plan, slots):
            fast = (
                self.topology.peer_channel(inputs, slots),
                self.topology.peer_channel(*results),
            )
        else:
            fast = self.topology.channel(inputs), self.topology.channel(results[0])
        between = tuple(self.topology.channel(name) for name, _ in slow)
        return Channels(*fast, *(between or fast))

    def _channel_names(self, plan: Plan, shape: Shape) -> list[tuple[str, int]]:
        """Names of inputs and results, and those that may take several steps; slots of each."""
        # Results are added before the next ones come.
        names = [("fetches", self.slots(shape)), ("sums" if plan.relay else "returns", 1)]
        if program(plan, self.topology.rank).slow:
            names += [(f"{name} between nodes", slots) for name, slots in names]
        return names

    def _pushed(self, plan: Plan, slots: int) -> bool:
        """Whether copy engines do it. Raises: ConfigError if they shall but cannot."""
        if self.options.transport == "group" or not self.topology.peer_access:
            return False
        possible = program(plan, self.topology.rank).one_peer and _fits(plan, slots)
        if not possible and self.options.transport == "peer":
            raise ConfigError(
                f"{self.name} transport peer needs each rank to exchange with one other at a "
                f"time, and no more than two blocks of others at once, got another "
                f"{plan.phase} for this mask: use transport auto"
            )
        return possible


@lru_cache(maxsize=256)
def _fits(plan: Plan, slots: int) -> bool:
    """Whether no rank needs a block that came by copy engines after its slot is given on."""
    fast = tuple(move for move in plan.moves if move.needed == move.posted + 1)
    try:
        check_slots(replace(plan, moves=fast), slots)
    except PlanError:
        return False
    return True


@lru_cache(maxsize=256)
def _with_results(plan: Plan, *, dq: bool, dkv: bool) -> Plan:
    """A plan of a backward in which gradients travel only if they are wanted."""
    if dq and dkv:
        return plan
    wanted = {False: dq, True: dkv}
    moves = (move for move in plan.moves if not move.result or wanted[move.of_keys])
    times = (time for time in plan.times if not time.result or wanted[time.of_keys])
    return replace(plan, moves=tuple(moves), times=frozenset(times))
