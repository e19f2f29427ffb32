"""Megatron's own flag `--cp-comm-type` as another way to select an algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod
from typing import Any

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
_SIZES = "--hierarchical-context-parallel-sizes"


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

    def check(
        self, algo: str, layers: tuple[str, ...], options: tuple[tuple[str, object], ...]
    ) -> None:
        """Checks what was given against the algorithm in use.

        Raises: ConfigError: the two say different things, or the sizes are missing or too many.
        """
        inner = [str(value) for name, value in options if name == "ulysses"]
        sizes = f"{_SIZES} {' '.join(map(str, self.sizes))}"
        if self.types:
            mine, theirs = layers or (algo,), self.algorithms
            depth = range(lcm(len(mine), len(theirs)))
            if any(mine[n % len(mine)] != theirs[n % len(theirs)] for n in depth):
                flag = f"--cp-layers {', '.join(layers)}" if layers else None
                raise ConfigError(
                    f"{_FLAG} {' '.join(self.types)} means {', '.join(theirs)}, got also "
                    f"{flag or f'--context-parallel-algo {algo}'}: leave one of the two out"
                )
        if "a2a+p2p" not in self.types:
            if self.sizes:
                raise ConfigError(
                    f"{sizes} needs {_FLAG} a2a+p2p, got {' '.join(self.types) or algo}: leave it "
                    f"out, or use --context-parallel-algo usp --cp-options ulysses={self.sizes[0]}"
                )
        elif len(self.sizes) != 2:
            got = " ".join(map(str, self.sizes)) or "none"
            raise ConfigError(
                f"{_FLAG} a2a+p2p needs two {_SIZES}, got {got}: give the ranks that exchange "
                "heads and the number of such teams, or use --context-parallel-algo usp"
            )
        elif set(inner) != {str(self.sizes[0])}:
            raise ConfigError(
                f"{sizes} means ulysses={self.sizes[0]}, got also ulysses={inner[-1]}: leave one "
                "of the two out"
            )

    def check_model(self, args: Any) -> None:
        """Checks the numbers of types and of ranks against Megatron's arguments.

        Raises: ConfigError: there are not as many types as layers, or not as many ranks.
        """
        if len(self.types) > 1 and len(self.types) != args.num_layers:
            raise ConfigError(
                f"{_FLAG} takes one type, or one for each of the {args.num_layers} layers, got "
                f"{len(self.types)}: use --cp-layers for a pattern that repeats"
            )
        if self.sizes and prod(self.sizes) != args.context_parallel_size:
            raise ConfigError(
                f"{_SIZES} {' '.join(map(str, self.sizes))} must multiply to context_parallel_size "
                f"{args.context_parallel_size}, got {prod(self.sizes)}: change one of them"
            )
