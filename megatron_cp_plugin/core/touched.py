"""Which rows of all blocks meet under a mask: those that have to travel."""

from functools import lru_cache

from megatron_cp_plugin.core import bands
from megatron_cp_plugin.core.bands import Bands
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.rows import Rows
from megatron_cp_plugin.core.tiles import Mask

# Rows that nobody needs travel too where they are fewer, one behind the other, than a block has by
# this number: every range more is a copy more before and after a message.
_GAPS = 64


def longest_gap(tokens: int) -> int:
    """How many rows that nobody needs may lie between others. Args: tokens: of the block."""
    return tokens // _GAPS


@lru_cache(maxsize=16)  # both passes of a micro-batch have the same
def keys_seen(layout: Layout, size: int, seq_len: int, mask: Mask) -> list[dict[int, Rows]]:
    """[rank][owner]: rows of the owner's keys that any query of the rank sees, if any.

    As `tiles.touched_rows`, for all pairs of blocks, with gaps up to `longest_gap` filled.

    Args: layout: of positions without a step.
    """
    return _of_all_pairs(layout, size, seq_len, mask.bands)


@lru_cache(maxsize=16)
def queries_seeing(layout: Layout, size: int, seq_len: int, mask: Mask) -> list[dict[int, Rows]]:
    """[rank][owner]: rows of the owner's queries that see any key of the rank; as `keys_seen`."""
    return _of_all_pairs(layout, size, seq_len, mask.bands.transposed)


def _of_all_pairs(layout: Layout, size: int, seq_len: int, mask: Bands) -> list[dict[int, Rows]]:
    blocks = [tuple(filter(len, layout.spans(rank, size, seq_len))) for rank in range(size)]
    return bands.keys_seen(blocks, mask, [longest_gap(sum(map(len, spans))) for spans in blocks])
