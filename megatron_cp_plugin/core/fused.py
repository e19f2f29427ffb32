"""Fused merges, sums, softmaxes and ways of states, on device types that have kernels for them.

`core` computes all of it by PyTorch; the folder of kernels registers what is faster.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class FusedOperations(Protocol):
    """Operations in float32; functions of the same names in `core` define them."""

    def merge_into(
        self, out: Tensor, lse: Tensor, a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor
    ) -> None:
        """As `partial.merge_into`, with lse in float32."""

    def merge_all_into(self, out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> None:
        """As `partial.merge_all_into`, with lse in float32."""

    def sum_into(self, out: Tensor, a: Tensor, *others: Tensor) -> None:
        """out = a + the others, two at most; out may be a; a copy if there are none.

        Args: all [B,S,heads,D], not float64.
        """

    def merge_rows_into(
        self, out: Tensor, lse: Tensor, to: Tensor, b: Tensor, b_lse: Tensor, of: Tensor | None
    ) -> None:
        """Merges some rows of a partial (None: all) into some of (out, lse), with lse in float32.

        Args: out, b: [B,S,H,D]; lse, b_lse: [B,H,S]. to, of: [n] int32, none twice.
        """

    def add_rows_into(self, total: Tensor, to: Tensor, b: Tensor, of: Tensor | None) -> None:
        """Adds some rows of b (None: all) to some of total; [B,S,heads,D], not float64.

        Args: to, of: [n] int32, none twice.
        """

    def rows_at(self, x: Tensor, rows: Tensor) -> Tensor:
        """As `partial.rows_at`. Args: rows: [n] int32."""

    def delta_of(self, dout: Tensor, out: Tensor) -> Tensor:
        """As `partial.delta_of`, without float64."""

    def stand_in_of(self, dout: Tensor, delta: Tensor) -> Tensor:
        """As `partial.stand_in_of`, without float64."""

    def passed_along(
        self,
        added: Tensor,
        through: Tensor,
        first: Tensor | None,
        bounds: Tensor,
        order: Tensor,
        begins: Tensor,
    ) -> Tensor | None:
        """The states behind ways of runs, one after another: T S + added; None: not served.

        Args: added: [M,B,H,D,E], through: T [M,B,H,D,D], or logarithms of its diagonal [M,B,H,1]
            or [M,B,H,D], of all runs, with heads of B next to each other; float32, added in rows
            of D*E numbers. first: [F,B,H,D,E]; None: 0. bounds: of the ways in order [n+1].
            order: numbers of runs. begins: of each way which of `first` it begins with, -1 where
            with 0 [n]; int32.

        Returns: [n,B,H,D,E] float32.
        """

    def logit_statistics(
        self, logits: Tensor, wanted: Tensor, scale: Tensor | None, entropy: bool
    ) -> tuple[Tensor, ...]:
        """As `chunked_loss.logit_statistics`, in float32, without float64."""

    def logit_gradients_(
        self,
        logits: Tensor,
        wanted: Tensor,
        lse: Tensor,
        dloss: Tensor,
        scale: Tensor | None,
        entropy: Tensor | None,
        dentropy: Tensor | None,
    ) -> None:
        """As `chunked_loss.logit_gradients_`, with all but logits and wanted in float32."""


_by_device: dict[str, Callable[[], FusedOperations]] = {}


def register_fused(device_type: str, load: Callable[[], FusedOperations]) -> None:
    """Has tensors of a type of device go through fused operations. Args: load: at first use."""
    _by_device[device_type] = load


def fused_for(x: Tensor) -> FusedOperations | None:
    """Those for tensors on x's device; None: PyTorch's own operations serve."""
    load = _by_device.get(x.device.type)
    return None if load is None else load()
