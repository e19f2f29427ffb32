"""An algorithm that is not ours, from the names that CONTRIBUTING.md lists: a random assignment."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from random import Random
from typing import Literal

from megatron_cp_plugin.core.algorithm import PointToPoint
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.layout import Contiguous
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.tiles import Mask, plan_tiles


@dataclass(frozen=True)
class RandomPlacement(BlockPlacement):
    """Pairs of blocks in random order, each to the rank that has least to do so far."""

    _: KW_ONLY
    seq_len: int
    mask: Mask
    ranks: str
    seed: int

    def place(self, query: int, key: int) -> Iterator[Place]:
        if (query, key) in self._places:
            yield self._places[query, key]

    @cached_property
    def _places(self) -> dict[tuple[int, int], Place]:
        spans = [self.layout.spans(rank, self.size, self.seq_len) for rank in range(self.size)]
        pairs = [(query, key) for query in range(self.size) for key in range(self.size)]
        Random(self.seed).shuffle(pairs)
        places, work, steps = {}, [0] * self.size, [1] * self.size
        for query, key in pairs:
            area = sum(tile.area for tile in plan_tiles(spans[query], spans[key], self.mask))
            if area:
                hosts = range(self.size) if self.ranks == "any" else (query, key)
                rank = min(hosts, key=lambda host: work[host])
                places[query, key] = Place(rank, steps[rank])
                work[rank], steps[rank] = work[rank] + area, steps[rank] + 1
        return places


class RandomBalanced(PointToPoint):
    layout = Contiguous()

    @dataclass(frozen=True)
    class Options(PointToPoint.Options):
        ranks: Literal["owners", "any"] = "owners"
        seed: int = 0

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> RandomPlacement:
        of_all = self.layout, self.topology.size, self.head_groups(shape, mask)
        options = {"ranks": self.options.ranks, "seed": self.options.seed}
        return RandomPlacement(*of_all, seq_len=shape.seq_len, mask=mask, **options)
