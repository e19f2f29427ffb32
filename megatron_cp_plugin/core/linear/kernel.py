"""The interface of linear attention kernels.

B batch, C tokens of a run, H heads, D head dim of q and k, E head dim of v. With a head's decay
rate l and the state S_0 before the run, tokens t = 1..C of a run give

    S_t = l S_{t-1} + k_t v_t^T        o_t = S_t^T q_t        (LASP, equation 5)

A pass over a run comes in three parts, so that states can travel while the middle one runs: what
the neighbours need, what needs nothing of them, and the rest.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_cp_plugin.core.kernel import Kernel
from megatron_cp_plugin.core.linear.decay import Decay


@dataclass(frozen=True)
class LinearProblem:
    """What a kernel has to serve; `deterministic` as in `core.kernel.Problem`."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    head_dim: int
    value_dim: int
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)

    def __str__(self) -> str:
        dims = f"{self.head_dim}"
        if self.value_dim != self.head_dim:
            dims += f" and {self.value_dim}"
        return f"{self.heads} heads of {dims} in {str(self.dtype).removeprefix('torch.')}"


class ForwardPass(ABC):
    """A forward under way. States are float32 (float64 for float64).

    Attributes: state: S_C [B,H,D,E] of the run if S_0 is 0.
    """

    state: Tensor

    @abstractmethod
    def intra(self) -> None:
        """Computes what does not need S_0. Call it once."""

    @abstractmethod
    def finish(self, incoming: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Completes the run.

        Args: incoming: S_0 [B,H,D,E]; None: 0.

        Returns: out [B,C,H,E] in q's dtype, and what `LinearKernel.backward` takes as `cache`.
        """


class BackwardPass(ABC):
    """A backward under way.

    Attributes: dstate: gradient of S_0 [B,H,D,E] if that of S_C is 0.
    """

    dstate: Tensor

    @abstractmethod
    def intra(self) -> None:
        """Computes what does not need the gradient of S_C. Call it once."""

    @abstractmethod
    def finish(self, doutgoing: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Completes the run.

        Args: doutgoing: gradient of S_C [B,H,D,E]; None: 0.

        Returns: dq, dk [B,C,H,D], dv [B,C,H,E] in the dtypes of q, k, v.
        """


class LinearKernel(Kernel[LinearProblem]):
    """Causal linear attention over one run of consecutive tokens.

    Attributes: name: as users give it.
    """

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Decay) -> ForwardPass:
        """Begins a forward. Args: q, k: [B,C,H,D]; v: [B,C,H,E]; contiguous."""

    @abstractmethod
    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Decay,
        cache: Tensor | None,
    ) -> BackwardPass:
        """Begins a backward. Args: dout: [B,C,H,E]; cache: of `ForwardPass.finish`."""
