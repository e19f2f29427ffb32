"""Which rows of two blocks meet under a mask."""

from collections.abc import Iterable

from megatron_cp_plugin.core.bands import Spans
from megatron_cp_plugin.core.rows import Rows, union
from megatron_cp_plugin.core.tiles import Mask, plan_tiles


def touched(q_spans: Spans, kv_spans: Spans, mask: Mask) -> tuple[Rows, Rows]:
    """Rows of a block of queries that see any key of a block, and those of the keys.

    Of positions with a step all from the first to the last one in a tile.
    """
    tiles = plan_tiles(q_spans, kv_spans, mask, rectangular=True)
    return _ranges(tile.q for tile in tiles), _ranges(tile.kv for tile in tiles)


def _ranges(slices: Iterable[slice]) -> Rows:
    return union(((part.start, part.stop),) for part in slices)
