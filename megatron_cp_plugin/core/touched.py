"""Which rows of all blocks meet under a mask: those that have to travel."""

from functools import lru_cache
from typing import Literal

from megatron_cp_plugin.core import bands
from megatron_cp_plugin.core.bands import Bands
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.owned import Owned
from megatron_cp_plugin.core.rows import Rows
from megatron_cp_plugin.core.tiles import Mask, filled, touched_rows

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
    owned = Owned.of(layout, size, seq_len)
    if owned.alike(0, mask) is None:
        return _of_all_pairs(owned, mask.bands)
    return list(map(dict, map(enumerate, _of_kinds(owned, mask, 1))))


@lru_cache(maxsize=16)
def queries_seeing(layout: Layout, size: int, seq_len: int, mask: Mask) -> list[dict[int, Rows]]:
    """[rank][owner]: rows of the owner's queries that see any key of the rank; as `keys_seen`."""
    owned = Owned.of(layout, size, seq_len)
    if owned.alike(0, mask) is None:
        return _of_all_pairs(owned, mask.bands.transposed)
    return [dict(enumerate(met)) for met in zip(*_of_kinds(owned, mask, 0), strict=True)]


def _of_all_pairs(owned: Owned, mask: Bands) -> list[dict[int, Rows]]:
    blocks = [filled(spans) for spans in owned]
    return bands.keys_seen(blocks, mask, [longest_gap(length) for length in owned.lengths])


def _of_kinds(owned: Owned, mask: Mask, side: Literal[0, 1]) -> list[list[Rows]]:
    """[rank][owner]: rows of the rank's queries (0), of the owner's keys (1), that meet others."""
    alike = [owned.alike(query, mask) or () for query in range(len(owned))]
    gap = longest_gap(max(owned.lengths))
    rows = {
        (query, key): touched_rows(owned[query], owned[key], mask, gap)[side]
        for query, key in set().union(*alike)
    }
    return [list(map(rows.__getitem__, pairs)) for pairs in alike]
