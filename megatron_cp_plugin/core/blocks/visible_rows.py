"""The rows of blocks that meet under a mask, and so are sent."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import Literal, NamedTuple, Self

import numpy as np

from megatron_cp_plugin.core.layout import Layout, TokenMap
from megatron_cp_plugin.core.masks.bands import Bands
from megatron_cp_plugin.core.ranges import (
    Numbers,
    Ranges,
    Rows,
    Span,
    expanded,
    joined,
    longest_gap,
    offsets,
    offsets_of_each,
    positions_of,
    runs,
    union,
    united,
)
from megatron_cp_plugin.core.tiles import Mask, plan_tiles


def sees(q_spans: Sequence[Span], kv_spans: Sequence[Span], mask: Mask) -> bool:
    """Whether any query of a block sees any key of another, so that `plan_tiles` returns a tile."""
    return bool(visible_rows(q_spans, kv_spans, mask)[0])


@lru_cache(maxsize=1024)  # both passes of a micro-batch have the same
def visible_rows(
    q_spans: Sequence[Span], kv_spans: Sequence[Span], mask: Mask, gap: int = 0
) -> tuple[Rows, Rows]:
    """Rows of a block of queries that see any key of another block, and those of these keys.

    In positions with a step, all rows from the first to the last one of a tile.

    Args: gap: longest gap of rows that is filled.
    """
    tiles = plan_tiles(q_spans, kv_spans, mask)
    if not tiles:
        return (), ()
    return united(tiles.q.extents, gap), united(tiles.kv.extents, gap)


@lru_cache(maxsize=32)  # both passes of a micro-batch have the same
def rows_met(
    layout: Layout, size: int, seq_len: int, mask: Mask, side: Literal[0, 1]
) -> list[dict[int, Rows]]:
    """[owner][other]: rows of the owner's queries (side 0), or keys (side 1), that meet any of the
    other's keys, or queries; no entry if there are none.

    As `visible_rows`, for all pairs of blocks, with gaps up to `longest_gap` filled.
    """
    tokens = TokenMap.of(layout, size, seq_len)
    gaps = np.array([longest_gap(length) for length in tokens.lengths], np.int64)
    if not tokens.gaps:
        blocks = _Blocks.of(tokens)
        return _visible(blocks, gaps, blocks, mask.bands if side else mask.bands.transposed)
    found: list[dict[int, Rows]] = [{} for _ in tokens]
    for pair in product(range(size), range(size)):
        query, key = (tokens[rank] for rank in pair)
        owner, other = pair[side], pair[1 - side]
        if met := visible_rows(query, key, mask, int(gaps[owner]))[side]:
            found[owner][other] = met
    return found


def rows_of_parts(
    tokens: TokenMap, parts: Sequence[tuple[int, int, int, int]], mask: Mask
) -> dict[tuple[int, int, int, int], tuple[Rows, Rows]]:
    """As `visible_rows`, for rows [start, stop) of a block of queries and a block of keys, many
    pairs at once; rows of queries are numbered in their whole block.

    Args: parts: (owner of queries, owner of keys, start, stop) of each pair.
    """
    found = {}
    if tokens.gaps:
        for query, key, start, stop in parts:
            rows, cols = visible_rows(
                positions_of(tokens[query], ((start, stop),)), tokens[key], mask
            )
            of_block = tuple((start + first, start + last) for first, last in rows)
            found[query, key, start, stop] = of_block, cols
        return found
    cuts = {(query, row) for query, _, *rows in parts for row in rows}
    edges = sorted(cuts | {(query, 0) for query, _ in cuts})
    segments = [one for one in pairwise(edges) if one[0][0] == one[1][0]]
    number = {first: index for index, (first, _) in enumerate(segments)}
    number |= {last: index + 1 for index, (_, last) in enumerate(segments)}
    owner, start, stop = np.array([(*first, row) for first, (_, row) in segments], np.int64).T
    before = offsets(np.array(tokens.lengths))[owner]
    positions, _ = joined(tokens).cut(np.stack((before + start, before + stop)))
    segment = np.cumsum(stop - start).searchsorted(offsets(positions.lengths), side="right")
    queries, keys = _Blocks.of_spans(len(segments), segment, positions), _Blocks.of(tokens)
    of_keys = _visible(keys, np.zeros(len(tokens), np.int64), queries, mask.bands)
    of_queries = _visible(queries, np.zeros(len(segments), np.int64), keys, mask.bands.transposed)
    for query, key, *ends in parts:
        some = range(number[query, ends[0]], number[query, ends[1]])
        seeing = [(segments[one][0][1], of_queries[one].get(key, ())) for one in some]
        moved = (tuple((n + first, n + last) for first, last in rows) for n, rows in seeing)
        seen = union(of_keys[key].get(one, ()) for one in some)
        found[query, key, ends[0], ends[1]] = union(moved), seen
    return found


class _Blocks(NamedTuple):
    """Spans without steps of several blocks, in ascending order.

    Attributes:
        owner: number of each span's block.
        starts, stops: positions of each span.
        shift: difference between positions and rows of the block.
    """

    number: int
    owner: Numbers
    starts: Numbers
    stops: Numbers
    shift: Numbers

    @classmethod
    def of(cls, blocks: Sequence[Ranges]) -> Self:
        """Args: blocks: of which no two share a position."""
        owner = np.repeat(np.arange(len(blocks)), [len(spans) for spans in blocks])
        return cls.of_spans(len(blocks), owner, joined(blocks))

    @classmethod
    def of_spans(cls, number: int, owner: Numbers, spans: Ranges) -> Self:
        """Args: owner: of each span the number of its block, ascending."""
        shift = spans.start - offsets_of_each(owner, spans.lengths)
        order = np.argsort(spans.start)
        return cls(number, *(x[order] for x in (owner, spans.start, spans.stop, shift)))


def _visible(keys: _Blocks, gaps: Numbers, queries: _Blocks, bands: Bands) -> list[dict[int, Rows]]:
    """For each block of keys, the rows that any query of each block of queries sees, if any.

    Args: gaps: longest gap of rows that is filled, for each block of keys.
    """
    # Keys [begin, end) that are seen from each span of queries that a band has.
    q_start, q_stop, k_start, k_stop, low, high = bands.table
    band, span = _in_common(q_start, q_stop, queries)
    first = np.maximum(queries.starts[span], q_start[band])
    last = np.minimum(queries.stops[span], q_stop[band])
    begin = np.maximum(first + low[band], k_start[band])
    end = np.minimum(last + high[band], k_stop[band])
    seen = begin < end
    owner, no_gaps = queries.owner[span[seen]], np.zeros(queries.number, np.int64)
    query, begin, end = _united_of_each(owner, begin[seen], end[seen], no_gaps)
    # The same by spans of keys, and as rows of their blocks.
    which, span = _in_common(begin, end, keys)
    pair = query[which] * keys.number + keys.owner[span]
    begin = np.maximum(begin[which], keys.starts[span]) - keys.shift[span]
    end = np.minimum(end[which], keys.stops[span]) - keys.shift[span]
    pair, begin, end = _united_of_each(pair, begin, end, np.tile(gaps, queries.number))
    ranges = list(zip(begin.tolist(), end.tolist(), strict=True))
    found: list[dict[int, Rows]] = [{} for _ in range(keys.number)]
    first, last = runs(pair[1:] != pair[:-1], len(pair))
    columns = (x.tolist() for x in (pair[first], first, last + 1))
    for number, start, stop in zip(*columns, strict=True):
        query_number, key_number = divmod(number, keys.number)
        found[key_number][query_number] = tuple(ranges[start:stop])
    return found


def _in_common(begin: Numbers, end: Numbers, blocks: _Blocks) -> tuple[Numbers, Numbers]:
    """Numbers of ranges [begin, end) and spans of blocks that have positions in common."""
    first = np.searchsorted(blocks.stops, begin, side="right")
    which, number = expanded(np.maximum(np.searchsorted(blocks.starts, end) - first, 0))
    return which, first[which] + number


def _united_of_each(
    whose: Numbers, starts: Numbers, stops: Numbers, gaps: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """Unions of the ranges of each owner, in ascending order.

    Args: gaps: by owner, the longest gap that is filled.
    """
    order = np.lexsort((starts, whose))
    whose, starts = whose[order], starts[order]
    # Moved so far apart that no gap reaches from one to the next.
    moved = whose * (stops.max(initial=0) + gaps.max(initial=0) + 1)
    reached = np.maximum.accumulate(stops[order] + moved)
    apart = starts[1:] + moved[1:] > reached[:-1] + gaps[whose[1:]]
    first, last = runs(apart, len(order))
    return whose[first], starts[first], (reached - moved)[last]
