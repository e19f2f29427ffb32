"""What the stand-ins for kernels have in common: how they are launched, and where sequences are.

A sequence is an entry of a batch, or, with cu_seqlens, part of the only one. Tensors are read and
written as the kernels do, by their addresses, so they have to be contiguous.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

# Of all launches since they were asked for the name, and arguments; of tensors their shapes.
LAUNCHES: list[tuple[str, dict[str, object]]] = []
# What autotuning adds, and heuristics.
CHOSEN = {"BK": 32, "BV": 32}


class Kernel:
    """Takes the arguments of its body, by name and no others, and a grid of one dimension."""

    def __init__(self, body: Callable[..., int]) -> None:
        self._body = body
        self._names = set(inspect.signature(body).parameters)

    def __getitem__(self, grid: Callable[[dict[str, int]], tuple[int]]) -> Callable[..., None]:
        def launch(**given: object) -> None:
            assert set(given) == self._names, set(given) ^ self._names
            launched(self._body.__name__, given)
            assert grid(CHOSEN) == (self._body(**given),)

        return launch


def launched(name: str, given: Mapping[str, object]) -> None:
    """Notes a launch. Raises: AssertionError if a tensor is not contiguous."""
    assert all(x.is_contiguous() for x in given.values() if isinstance(x, Tensor))
    shapes = {n: tuple(x.shape) if isinstance(x, Tensor) else x for n, x in given.items()}
    LAUNCHES.append((name, shapes))


def blocks(dim: int, block: int) -> int:
    """How many of them a dimension takes."""
    return -(-dim // block)


def sequences(x: Tensor, tokens: int, cu_seqlens: Tensor | None) -> Iterator[slice]:
    """The tokens of each sequence of x [B,T,...], counted over all entries of the batch."""
    assert x.shape[1] == tokens
    if cu_seqlens is None:
        starts = [entry * tokens for entry in range(x.shape[0] + 1)]
    else:
        assert x.shape[0] == 1, "sequences of unequal length need a batch of one"
        assert cu_seqlens.dtype in (torch.int32, torch.int64)
        starts = cu_seqlens.tolist()
        assert starts[0] == 0
        assert starts[-1] == tokens
    return (slice(*pair) for pair in pairwise(starts))


def powers(log2_rates: Tensor, exponents: Tensor) -> Tensor:
    """rate**exponent: [H], [C] -> [C,H,1]."""
    return torch.exp2(log2_rates * exponents[:, None]).unsqueeze(-1)
