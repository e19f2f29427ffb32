"""Megatron's own flag `--cp-comm-type` as another way to select an algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from megatron_cp_plugin.errors import ConfigError, nearest
from megatron_cp_plugin.layers import leading_algorithm

# Transformer Engine's names, and the algorithm that each one means on the command line. Megatron's
# help says allgather, Transformer Engine all_gather.
TYPES = {
    "p2p": "zigzag",
    "all_gather": "allgather",
    "allgather": "allgather",
    "a2a": "ulysses",
    "a2a+p2p": "usp",
}
_FLAG = "--cp-comm-type"


@dataclass(frozen=True)
class CommType:
    """`--cp-comm-type` and `--hierarchical-context-parallel-sizes` as a user gave them.

    Attributes:
        types: one for all layers, or one for each; () where it was not given.
        sizes: ranks that exchange heads, then ranks of the ring between them; () likewise.
    """

    types: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithm of each type. Raises: ConfigError if one has no meaning."""
        for name in self.types:
            if name not in TYPES:
                raise ConfigError(
                    f"{_FLAG} got {name!r}{nearest(name, TYPES)}: use p2p, all_gather, a2a "
                    "or a2a+p2p, or another algorithm by --context-parallel-algo"
                )
        return tuple(TYPES[name] for name in self.types)

    @property
    def algo(self) -> str:
        """The algorithm that has the options, and whose layout the model takes."""
        names = self.algorithms
        return "usp" if "usp" in names else leading_algorithm(names)

    @property
    def layers(self) -> tuple[str, ...]:
        """The algorithm of each layer, where they were given one by one."""
        return self.algorithms if len(self.types) > 1 else ()

    @property
    def options(self) -> tuple[tuple[str, object], ...]:
        """Options of `algo` that the sizes stand for."""
        return (("ulysses", str(self.sizes[0])),) if self.sizes and self.types else ()

    def agrees(self, algorithms: Sequence[str]) -> bool:
        """Whether algorithms of layers, repeated over the depth, are those of the types."""
        theirs = self.algorithms
        depth = range(lcm(len(algorithms), len(theirs)))
        return all(algorithms[n % len(algorithms)] == theirs[n % len(theirs)] for n in depth)
