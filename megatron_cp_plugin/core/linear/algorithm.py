"""The interface of linear attention algorithms over a split sequence.

B batch, S local tokens, H heads, D head dim of q and k, E head dim of v. States are [B,H,D,E],
float32 (float64 for float64).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, NamedTuple

from torch import Tensor

from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.layouts.document_layout import NAMED
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.kernel import LinearKernel
from megatron_cp_plugin.core.linear.states import NO_GATES, Gates
from megatron_cp_plugin.core.topology import Topology


@dataclass(frozen=True)
class LinearCall:
    """One linear attention over the whole split sequence.

    Attributes:
        seq_len: global N. causal: tokens see themselves and earlier ones; otherwise all, with
            rate**|distance|. decay: rates per head, of 1 beside gates. kernel: computes the runs.
        output_final_state: the state after the last token is wanted. documents: as of
        `document_starts`; each begins with a state of 0, but the first. shared: how many heads in
            a row differ in their queries alone, and so have one state. initial: a state before the
        first token is given.
    """

    seq_len: int
    causal: bool
    decay: Decay
    kernel: LinearKernel
    output_final_state: bool = False
    documents: tuple[int, ...] = ()
    shared: int = 1
    initial: bool = False


@dataclass(frozen=True)
class LinearShape:
    """The sizes of one linear attention.

    Attributes: seq_len: global N. heads: of states. element_bytes: of q, k, v. wide_bytes: of
        states.
    """

    batch: int
    seq_len: int
    heads: int
    head_dim: int
    value_dim: int
    element_bytes: int = 2
    wide_bytes: int = 4

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of all heads."""
        return self.batch * self.heads * self.head_dim * self.value_dim * self.wide_bytes


@dataclass(frozen=True)
class LinearWork:
    """What one rank computes in one step of the forward.

    Attributes: step, host: when and where. state_owners: the ranks whose state meets the host's
        queries; (): its own runs, each by itself. products: of a token with a state, D x E each.
        share: of the heads; less than 1 where the host has some heads of all ranks' tokens.
    """

    step: int
    host: int
    state_owners: tuple[int, ...]
    products: int
    share: Fraction = Fraction(1)


class LinearMove(NamedTuple):
    """What one rank sends to another in the forward.

    Attributes: needed: in which step. tensors: letters of what travels, S for a state. owners:
        whose tokens they are of. share: which share of the heads.
    """

    needed: int
    source: int
    target: int
    tensors: tuple[str, ...]
    owners: tuple[int, ...]
    share: int = 0


class LinearTensors(NamedTuple):
    """What a rank is given of one attention; contiguous tensors.

    Attributes:
        q, k: [B,S,H,D].
        v: [B,S,H,E].
        gates: of all local tokens.
        initial: the state before the first token [B,H,D,E]; None: 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates = NO_GATES
    initial: Tensor | None = None


Saved = tuple[Tensor | None, ...]


class LinearAlgorithm(ABC):
    """Linear attention over a sequence that is split among the ranks of a topology.

    Subclasses are made by `registry.create_linear` with a topology and an instance of their own
    `Options` (Algorithm.Options where they have none).

    Attributes:
        name: set by the registry. layout: which tokens each rank holds.
        collective: ranks meet in collective operations only, so that one stands for all others in
            a simulation.
    """

    name: str = ""
    collective: ClassVar[bool] = False
    layout: Layout

    Options = Algorithm.Options

    def __init__(self, topology: Topology, options: Algorithm.Options) -> None:
        self.topology = topology
        self.options = options
        self.layout = self.layout_for(options)

    @classmethod
    def layout_for(cls, options: Algorithm.Options) -> Layout:
        """The layout that an instance with these options has: of an option `layout`, if any."""
        choice = getattr(options, "layout", None)
        return cls.layout if choice is None else NAMED[choice]

    @classmethod  # noqa: B027  (most algorithms serve everything)
    def check(cls, options: Algorithm.Options, *, size: int, heads: int) -> None:
        """Raises: ConfigError if the algorithm cannot serve this; needs no processes."""

    @abstractmethod
    def forward(
        self, given: LinearTensors, call: LinearCall
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """Linear attention of the local queries.

        Returns: out [B,S,H,E] in q's dtype, the final state if wanted, and what `backward` needs.
        """

    @abstractmethod
    def backward(
        self, dout: Tensor, dfinal: Tensor | None, saved: Saved, call: LinearCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Gates]:
        """Gradients of the local shards, and of the initial state.

        Args: dout: [B,S,H,E] contiguous. dfinal: this rank's gradient of the final state.

        Returns: dq, dk, dv in the dtypes of q, k, v; dinitial [B,H,D,E], whose sum over ranks is
        the whole one; None: 0; and the gradients of the gates.
        """

    @abstractmethod
    def trace(self, seq_len: int, *, causal: bool) -> tuple[LinearWork, ...]:
        """The forward's plan for all ranks, with decay."""

    @abstractmethod
    def moves(self, seq_len: int, *, causal: bool) -> tuple[LinearMove, ...]:
        """What travels in that plan."""
