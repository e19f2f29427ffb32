"""An algorithm of nobody's: the rank that has the keys computes the later half of all queries."""

from collections.abc import Iterator

from megatron_cp_plugin.core.algorithm import PointToPoint
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.layout import Contiguous
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.tiles import Mask


class HalvesPlacement(BlockPlacement):
    """No algorithm of the package sends rows that are not the first ones of a block."""

    def place(self, query: int, key: int) -> Iterator[Place]:
        distance = (query - key) % self.size
        if distance:
            yield Place(query, distance, part=(0, 2))
            yield Place(key, distance, part=(1, 2))
        else:
            yield Place(query, 0)


class Halves(PointToPoint):
    """To be registered."""

    layout = Contiguous()

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> HalvesPlacement:
        return HalvesPlacement(self.layout, self.topology.size, self.head_groups(shape, mask))
