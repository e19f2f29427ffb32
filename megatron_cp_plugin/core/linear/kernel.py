"""The interface of linear attention kernels.

B batch, S local tokens in n runs of consecutive ones, H heads, D head dim of q and k, E head dim of
v. With the transitions T_t and the sums U_t of core/linear/states.py, and the state S_0 before a
document, its tokens t = 1, 2, ... give

    S_t = T_t S_{t-1} + U_t        o_t = S_t^T q_t        (LASP, equation 5, where T_t is a rate)

S_0 is 0, but for the first document of a run: there it is the state that comes from before the run.

A pass over all runs comes in three parts, so that states can travel while the middle one runs: what
the neighbours need, what needs nothing of them, and the rest.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.kernel import Kernel
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.runs import Runs
from megatron_cp_plugin.core.linear.states import NO_GATES, Gates

Cache = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class LinearProblem:
    """What a kernel has to serve; `deterministic` as in `core.kernel.Problem`.

    Attributes:
        documents: whether runs have several.
        gate: transitions are constant rates, or gates of heads or of channels.
        delta: the delta rule is wanted.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    head_dim: int
    value_dim: int
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    documents: bool = False
    gate: Literal["rates", "heads", "channels"] = "rates"
    delta: bool = False

    def __str__(self) -> str:
        dims = f"{self.head_dim}"
        if self.value_dim != self.head_dim:
            dims += f" and {self.value_dim}"
        rule = "" if self.gate == "rates" else f" with gates of {self.gate}"
        rule += " and the delta rule" * self.delta
        return f"{self.heads} heads of {dims} in {str(self.dtype).removeprefix('torch.')}{rule}"


class LinearInputs(NamedTuple):
    """What a pass computes; contiguous tensors.

    Attributes:
        q, k: [B,S,H,D].
        v: [B,S,H,E].
        transition: of the tokens.
        runs: of these tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    transition: Decay | Gates
    runs: Runs


class ForwardPass(ABC):
    """A forward under way. States are float32 (float64 for float64).

    Attributes:
        states: behind the last document of each run [n,B,H,D,E], contiguous, if nothing comes from
            before the runs.
        through: transitions of the runs, see `RunStates`; None: those of constant decay.
    """

    states: Tensor
    through: Tensor | None = None

    @abstractmethod
    def __init__(self, given: LinearInputs) -> None:
        """Begins a forward."""

    @abstractmethod
    def intra(self) -> None:
        """Computes what needs nothing from before the runs. Call it once."""

    @abstractmethod
    def finish(self, incoming: Tensor | None) -> tuple[Tensor, Cache]:
        """Completes the runs.

        Args: incoming: the states before the runs [n,B,H,D,E]; None: 0.

        Returns: out [B,S,H,E] in q's dtype, and what `BackwardPass` takes as `cache`.
        """


class BackwardPass(ABC):
    """A backward under way.

    Attributes:
        dstates: gradients of the states before the runs [n,B,H,D,E], contiguous, if those of the
            states behind them are 0.
        dgates: gradients of the gates, once `finish` has returned, in their dtypes.
    """

    dstates: Tensor
    dgates: Gates = NO_GATES

    @abstractmethod
    def __init__(self, given: LinearInputs, dout: Tensor, cache: Cache) -> None:
        """Begins a backward. Args: dout: [B,S,H,E]. cache: of `ForwardPass.finish`."""

    @abstractmethod
    def intra(self) -> None:
        """Computes what does not need the gradients of the states behind the runs. Call it once."""

    @abstractmethod
    def finish(self, doutgoing: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Completes the runs.

        Args: doutgoing: gradients of the states behind the runs [n,B,H,D,E]; None: 0.

        Returns: dq, dk [B,S,H,D], dv [B,S,H,E] in the dtypes of q, k, v.
        """


class LinearKernel(Kernel[LinearProblem]):
    """Causal linear attention over runs of consecutive tokens, of any number of documents.

    Attributes: forward, backward: its passes.
    """

    forward: ClassVar[type[ForwardPass]]
    backward: ClassVar[type[BackwardPass]]
