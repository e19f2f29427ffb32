"""Placements that nobody chose: pairs of blocks on random ranks, in random steps and orders."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from itertools import accumulate
from random import Random
from typing import ClassVar, Literal

import pytest

import megatron_cp_plugin as cp
from megatron_cp_plugin import registry
from megatron_cp_plugin.core.algorithm import PointToPoint
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.kernels import choice
from tests.any_kernel import ABILITIES, AnyKernel
from tests.halves import Halves


@dataclass(frozen=True)
class AnyPlacement(BlockPlacement):
    """Pairs of blocks, or parts of them, on any rank and in any step.

    Attributes: hosts: any rank, or those that own one of the blocks. parts: at most. uneven: they
        have unequal numbers of rows.
    """

    _: KW_ONLY
    seed: int
    steps: int = 4
    parts: int = 1
    uneven: bool = False
    hosts: Literal["any", "owners"] = "any"

    def place(self, query: int, key: int) -> Iterator[Place]:
        yield from self._places[query, key]

    @cached_property
    def _places(self) -> dict[tuple[int, int], list[Place]]:
        source, found = Random(self.seed), {}
        for query in range(self.size):
            for key in range(self.size):
                parts = [1] * source.randint(1, self.parts)
                if self.uneven:
                    parts = [source.randint(1, 3) for _ in parts]
                found[query, key] = []
                for part, number in zip(accumulate(parts, initial=0), parts, strict=False):
                    hosts = range(self.size) if self.hosts == "any" else (query, key)
                    rank = source.choice(hosts)
                    step = source.randint(int(not rank == query == key), self.steps)
                    found[query, key].append(Place(rank, step, (part, sum(parts)), number))
        return found


@dataclass(frozen=True)
class AnyRelay(BlockPlacement):
    """Blocks of one side stay where they are, those of the other go round in an order of their own.

    Attributes: travelling: "keys" or "queries".
    """

    _: KW_ONLY
    seed: int
    travelling: Literal["keys", "queries"] = "keys"
    relay: ClassVar[bool] = True

    def place(self, query: int, key: int) -> Iterator[Place]:
        stays, goes = (query, key) if self.travelling == "keys" else (key, query)
        yield Place(stays, self._orders[goes].index(stays))

    @cached_property
    def _orders(self) -> list[list[int]]:
        source, found = Random(self.seed), []
        for owner in range(self.size):
            others = [rank for rank in range(self.size) if rank != owner]
            source.shuffle(others)
            found.append([owner, *others])
        return found


class AnyAlgorithm(PointToPoint):
    @dataclass(frozen=True)
    class Options(PointToPoint.Options):
        seed: int = 0
        steps: int = 4
        parts: int = 1
        uneven: bool = False
        hosts: Literal["any", "owners"] = "any"
        relay: Literal["none", "keys", "queries", "either"] = "none"
        gradients: Literal["float32", "model"] = "model"
        layout: Literal["zigzag", "contiguous", "cyclic", "documents", "thd"] = "zigzag"

    options: Options

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> BlockPlacement:
        own = self.options
        groups = self.head_groups(shape, mask)
        of_all = self.layout, self.topology.size, groups, own.gradients == "float32"
        seed = 2 * own.seed + (phase == "backward")
        if own.relay == "none":
            options = {"steps": own.steps or 4, "parts": own.parts or 1, "uneven": own.uneven}
            return AnyPlacement(*of_all, seed=seed, hosts=own.hosts, **options)
        if own.relay == "either":
            return AnyRelay(*of_all, seed=seed, travelling=("keys", "queries")[seed % 2])
        return AnyRelay(*of_all, seed=seed, travelling=own.relay)


@contextmanager
def registered() -> Iterator[None]:
    """Algorithms and kernels of nobody's have names meanwhile; other suites run all that have."""
    cp.available()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_algorithms", dict(registry._algorithms))
        cp.register("any")(AnyAlgorithm)
        cp.register("halves")(Halves)
        for kernel in map(AnyKernel, range(2 ** (len(ABILITIES) + 1))):
            patch.setitem(choice._KERNELS, kernel.name, partial(_itself, kernel))
        yield


def _itself(kernel: AnyKernel) -> AnyKernel:
    return kernel
