"""The interface of linear attention kernels.

B batch, S local tokens in n runs of consecutive ones, H heads, D head dim of q and k, E head dim of
v. With the transitions T_t and the sums U_t of core/linear/states.py, and the state S_0 before a
document, its tokens t = 1, 2, ... give

    S_t = T_t S_{t-1} + U_t        o_t = S_t^T q_t        (LASP, equation 5, where T_t is a rate)

S_0 is 0, but for the first document of a run: there it is the state that comes from before the run.

A pass over all runs has three parts, so that states can travel during the second: states that other
ranks need, work that needs no other rank's states, and the rest.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.kernel import Kernel
from megatron_cp_plugin.core.linear.states import Decay, Gates, Runs

Cache = tuple[Tensor | None, ...]
# dq, dk [B,S,H,D], dv [B,S,H,E] and gradients of the gates, in the dtypes of their tensors.
Gradients = tuple[Tensor, Tensor, Tensor, Gates]


@dataclass(frozen=True)
class LinearProblem:
    """What a kernel must support; `deterministic` as in `core.kernel.Problem`.

    Attributes:
        documents: whether runs have several documents.
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
    """Inputs of a pass; contiguous tensors.

    Attributes:
        q, k: [B,S,H,D].
        v: [B,S,H,E].
        transition: of the tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    transition: Decay | Gates
    runs: Runs


@dataclass
class Running[R]:
    """A pass under way. States are float32 (float64 for float64).

    Attributes:
        states: [n,B,H,D,E], contiguous. In a forward: the states behind the last document of each
            run, if the states before the runs are 0. In a backward: gradients of the states before
            the runs, if gradients of the states behind them are 0.
        intra: does the work that needs no other run. Call it once.
        finish: completes the runs, given the states before them, or the gradients of the states
            behind them, [n,B,H,D,E]; None: 0.
        through: in a forward, transitions of the runs, see `RunStates`; None: constant decay.
    """

    states: Tensor
    intra: Callable[[], object]
    finish: Callable[[Tensor | None], R]
    through: Tensor | None = None


class LinearKernel(Kernel[LinearProblem]):
    """Causal linear attention over runs of consecutive tokens, of any number of documents."""

    @abstractmethod
    def forward(self, given: LinearInputs) -> Running[tuple[Tensor, Cache]]:
        """Begins a forward, which gives out [B,S,H,E] in q's dtype, and what `backward` takes."""

    @abstractmethod
    def backward(self, given: LinearInputs, dout: Tensor, cache: Cache) -> Running[Gradients]:
        """Begins a backward. Args: dout: [B,S,H,E]. cache: of the forward."""
