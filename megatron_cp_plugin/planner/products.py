"""Times of a layer's matrix products: with few rows, as of experts, longer than by their FLOP.

A product of m rows with a matrix [k, n] computes 2 m k n FLOP and moves its operands and its
result. The two go on at a time, but not perfectly: it takes the root of the sum of their squares.
The gradient of a matrix is added to a sum in float32, read and written for any number of rows.

Source of that rule: DeepGEMM's published figures of dense and grouped products on H800
(docs/data/products.csv), beside which docs/predictions.md has it; nothing but the peak is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import hypot

from megatron_cp_plugin.planner.machine import Machine

# An expert's rows begin a tile of their own; of its last one half is padding in the mean.
_TILE_ROWS = 128
_ELEMENT, _SUMMED = 2, 8  # bytes in bfloat16, and of reading and writing float32


@dataclass(frozen=True)
class Product:
    """A matrix [inner, outer] that activations are multiplied with.

    Attributes: by_inner: tensor parallelism splits it by rows of the matrix, else by columns.
    """

    inner: int
    outer: int
    by_inner: bool = False

    @property
    def parameters(self) -> int:
        """Its elements."""
        return self.inner * self.outer

    def split(self, ways: int) -> Product:
        """A rank's part of it."""
        if self.by_inner:
            return replace(self, inner=-(-self.inner // ways))
        return replace(self, outer=-(-self.outer // ways))


def product_seconds(
    flop: float, moved_bytes: float, flops: float, bytes_per_second: float
) -> float:
    """Of one kernel, which computes and moves at a time."""
    return hypot(flop / flops, moved_bytes / bytes_per_second)


def passes_seconds(
    machine: Machine, matrix: Product, rows: float, count: int = 1, *, again: bool
) -> float:
    """Seconds of forward and backward.

    Args:
        rows: of activations, for each matrix.
        count: of matrices in one grouped product, an expert's each.
        again: the forward runs twice.
    """
    if count > 1:
        rows += _TILE_ROWS / 2
    inner, outer = matrix.inner, matrix.outer
    flop, activations = 2.0 * rows * inner * outer, _ELEMENT * rows * (inner + outer)

    def seconds(moved_bytes: float) -> float:
        return product_seconds(
            count * flop, count * moved_bytes, machine.matmul_flops, machine.memory_bytes_per_second
        )

    through = seconds(activations + _ELEMENT * matrix.parameters)  # and the same back
    of_matrix = seconds(activations + _SUMMED * matrix.parameters)
    return (3 if again else 2) * through + of_matrix
