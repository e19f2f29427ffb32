"""The interface of softmax attention algorithms."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from weakref import proxy

import torch

from megatron_cp_plugin.core.call import Call, HeadGroup, Shape, successive_groups
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.document_layout import NAMED
from megatron_cp_plugin.core.execution.executor import (
    Executor,
    Transport,
    Wanted,
    executor_of,
    steps_among,
)
from megatron_cp_plugin.core.kernel import Problem, SoftmaxKernel, check_scale
from megatron_cp_plugin.core.layout import Documents, Layout, unfit
from megatron_cp_plugin.core.placement import HeadPlacement, Placement
from megatron_cp_plugin.core.plans.checks import check_placement, check_steps
from megatron_cp_plugin.core.plans.compile import plan_of
from megatron_cp_plugin.core.plans.plan import Plan
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ContextParallelError

_PACKAGE = __name__.partition(".")[0]  # placements of other packages are checked


def number(
    default: int,
    worth_trying: Callable[[int], Sequence[int]] | None = None,
    *,
    least: int | None = None,
) -> int:
    """An integer option.

    Args:
        worth_trying: maps the number of ranks to the values that `auto` tries; None: the default.
        least: `registry.read_options` refuses smaller values; None: `check` says what is allowed.
    """
    metadata = {"worth_trying": worth_trying, "least": least}
    option: int = field(default=default, metadata=metadata)
    return option


@cache
def divisors(size: int) -> tuple[int, ...]:
    """Divisors of a number of ranks, 1 and the number itself included."""
    return tuple([n for n in range(1, size + 1) if size % n == 0])


class Registered(ABC):
    """Base of algorithms of softmax and of linear attention: a name, options and a layout.

    The registry makes it, with a topology and an instance of its own `Options`.

    Attributes:
        name: set by the registry.
        layout: which tokens each rank holds, for batch slicing, RoPE and attention alike.
    """

    name: str = ""
    layout: Layout

    @dataclass(frozen=True)
    class Options:
        """Settings of the algorithm, of types Literal, bool, int, float or str; subclasses declare
        theirs, with defaults.
        """

    def __init__(self, topology: Topology, options: Options) -> None:
        self.topology = topology
        self.options = options
        self.layout = self.layout_for(options)

    @classmethod
    def layout_for(cls, options: Options) -> Layout:
        """The layout of an instance with these options: the layout that option `layout` names, if
        the algorithm has that option; otherwise the class's.
        """
        choice = getattr(options, "layout", None)
        return cls.layout if choice is None else NAMED[choice]

    @classmethod  # noqa: B027  (most serve all)
    def check(cls, options: Options, *, size: int, heads: int, kv_heads: int, causal: bool) -> None:
        """Raises: ConfigError if the algorithm does not support this; needs no process group."""


class Algorithm(Registered):
    """Softmax attention over a sequence that is split among the ranks of a topology.

    Subclasses define `layout`, `Options` and `placement`, from which everything else follows:
    `core.execution.executor` runs what the plan of a placement says. Most derive from
    `PointToPoint`, for its options. `registry.create` makes them.

    B batch, S local tokens, N tokens of the whole sequence, H query heads, G KV heads, D head dim
    of queries and keys, E head dim of values and outputs. Formulas of subclasses are for E = D.

    Attributes:
        windows: whether it supports masks with a window, documents or spans.
    """

    windows: bool = False

    def __init__(self, topology: Topology, options: Registered.Options) -> None:
        super().__init__(topology, options)
        self._checked: set[Phase] = set()

    # There is no cycle of references, so that what this object holds, such as process groups, is
    # freed with the last reference to it, without the garbage collector.

    @cached_property
    def compiled(self) -> Callable[..., "Compiled"]:
        """The compiled call for the arguments of `_compile`; calls that are alike share one."""
        return lru_cache(64)(partial(type(self)._compile, proxy(self)))

    @cached_property
    def _on(self) -> Callable[[Layout], "Algorithm"]:
        return lru_cache(16)(partial(type(self)._make_on, proxy(self)))

    def for_documents(self, documents: Documents) -> "Algorithm":
        """This algorithm with the layout of a sequence with these documents, as the layout has it.

        Sends nothing: it uses the channels and groups of the topology.
        """
        layout = self.layout.for_documents(documents)
        return self if layout == self.layout else self._on(layout)

    def _make_on(self, layout: Layout) -> "Algorithm":
        other = self.__class__(self.topology, self.options)
        other.layout, other._checked = layout, self._checked
        return other

    def _compile(
        self,
        q: torch.Size,
        k: torch.Size,
        v: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,  # torch's setting
        seq_len: int,
        mask: Mask,
        scale: float | None,
        kernel_for: Callable[[Problem], SoftmaxKernel],
    ) -> "Compiled":
        """Args: q, k, v: shapes. Others as of `core.autograd.function.attend`.

        Raises: ContextParallelError if numbers of tokens or settings do not fit;
        KernelUnavailableError if the kernel cannot serve them.
        """
        # This object holds what this returns.
        on = self._on(self.layout.for_documents(mask.resolved))
        rank, size = self.topology.rank, self.topology.size
        expected = on.layout.length(rank, size, seq_len)
        _, tokens, heads, head_dim = q
        if tokens != expected:
            raise unfit(on.layout, rank, size, seq_len, expected, tokens)
        kv_heads = k[2]
        self.check(self.options, size=size, heads=heads, kv_heads=kv_heads, causal=mask.causal)
        if mask.special and not self.windows:
            raise ContextParallelError(f"{self.name} does not support {mask.special}: leave it out")
        scale = head_dim**-0.5 if scale is None else scale
        check_scale(scale)
        problem = Problem(
            device,
            dtype,
            heads,
            kv_heads,
            head_dim,
            deterministic,
            documents=bool(mask.documents) or mask.slices is not None,
            value_dim=v[3],
            windows=mask.window is not None or mask.slices is not None,
        )
        shape = Shape.of_sizes(q, k, v, dtype, seq_len)
        return Compiled(on, Call(shape, mask, scale, kernel_for(problem)))

    def executor(self, phase: Phase, call: Call) -> Executor:
        """Makes the executor of a rank's part in one pass of a call, from its placement and its
        plan, as far as this rank needs it. A collective operation the first time.

        One rank's part is enough for collective operations, whose order does not depend on other
        ranks, and without peer access. With peer access, if only inside nodes, ranks use buffers in
        each other's memory in the same order, which takes the plan of all these ranks.
        """
        shape, mask = call.shape, call.mask
        placement = self.placement(shape, mask, phase)
        among = steps_among(placement, self.topology)
        wanted: Wanted = getattr(self.options, "transport", "auto")
        transport = Transport(self.name, among, wanted)
        blocks = placement.of_teams if isinstance(placement, HeadPlacement) else placement
        of_all = not blocks.assembled and (among.plans_all or among.peer_access)
        apart = mask.special and not (of_all or blocks.assembled or blocks.relay)
        which = None if of_all else among.rank, transport.near if apart else 1
        steps = self._checked_plan(blocks, shape.seq_len, mask, phase, *which)
        return executor_of(placement, steps, call, self.topology, transport)

    def computed(self, shape: Shape) -> Shape:
        """The shape that is computed for `shape`, including zero heads if any are added."""
        return shape

    @abstractmethod
    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> Placement:
        """Where each pair of blocks is computed in a pass, in which step, and from which ranks
        blocks come.

        Args:
            shape: of the whole problem, with the `shape.seq_len` tokens of all ranks.
            mask: of the whole sequence.
            phase: "forward" or "backward".
        """

    def plan(
        self, shape: Shape, mask: Mask, phase: Phase = "forward", *, rank: int | None = None
    ) -> Plan:
        """The plan of one pass: what all ranks compute and send.

        Args: rank: only the part of this rank, see `plan_of`.
        """
        placement = self.placement(shape, mask, phase)
        return self._checked_plan(placement, shape.seq_len, mask, phase, rank)

    def _checked_plan(
        self,
        placement: Placement,
        seq_len: int,
        mask: Mask,
        phase: Phase,
        rank: int | None,
        near: int = 1,
    ) -> Plan:
        """The plan of a placement that serves all calls. Args: as of `plan_of`.

        Placements of other packages are checked; this package's tests check its own.
        """
        foreign = not type(placement).__module__.startswith(f"{_PACKAGE}.")
        if not foreign or isinstance(placement, HeadPlacement) or placement.assembled:
            return plan_of(placement, seq_len, mask, phase, rank, near)
        if phase not in self._checked:
            # The first plan is checked for all ranks, so that all ranks refuse a plan that is wrong
            # on one.
            check_placement(self.name, placement, seq_len, mask)
            check_steps(self.name, plan_of(placement, seq_len, mask, phase))
        plan = plan_of(placement, seq_len, mask, phase, rank, near)
        check_steps(self.name, plan)
        self._checked.add(phase)
        return plan


class Compiled:
    """A compiled call: its executors, made once for all calls that are alike.

    The executor of a pass is made when it is first asked for.

    Attributes: backwards: executors of backwards that were asked for, by (dq, dkv) as of `Call`.
    """

    def __init__(self, algorithm: Algorithm, call: Call) -> None:
        """Args: algorithm: with the layout of the call's documents."""
        self._algorithm, self._call = algorithm, call
        self.backwards: dict[tuple[bool, bool], Executor] = {}

    @cached_property
    def forward(self) -> Executor:
        """The executor of the forward."""
        return self._algorithm.executor("forward", self._call)

    def backward(self, *, dq: bool = True, dkv: bool = True) -> Executor:
        """The executor of a backward. Args: dq, dkv: as of `Call`."""
        if (dq, dkv) not in self.backwards:
            call = replace(self._call, dq=dq, dkv=dkv)
            self.backwards[dq, dkv] = self._algorithm.executor("backward", call)
        return self.backwards[dq, dkv]


class PointToPoint(Algorithm):
    """Attention by blocks that go from rank to rank; subclasses say where they meet."""

    windows = True

    @dataclass(frozen=True)
    class Options(Algorithm.Options):
        """Options of all algorithms of this kind.

        Attributes:
            chunks: groups of heads that are computed one after another, at most as many as KV
                heads; 0: two for long sequences without windows, documents and spans, else one.
            transport: "group" (the process group's own, NCCL or gloo), "peer" (copy engines over
                peer memory: GPUs of one node, which hold the blocks of two exchanges at most), or
                "auto", peer where that is possible.
        """

        chunks: int = number(0, least=0)
        transport: Wanted = "auto"

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self.transport = Transport(self.name, topology, options.transport)

    def head_groups(self, shape: Shape, mask: Mask) -> tuple[HeadGroup, ...]:
        """The groups of heads of a placement, as many as option `chunks` says."""
        # Under special masks there is little to compute, and each group costs calls and copies.
        elements = 0 if mask.special else shape.elements(self.topology.size)
        return successive_groups(shape.heads, shape.kv_heads, self.options.chunks, elements)
