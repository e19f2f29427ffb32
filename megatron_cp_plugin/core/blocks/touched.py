"""Finds the rows of blocks that meet under a mask, which are those that must be sent."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

import numpy as np

from megatron_cp_plugin.core.blocks.owned import Owned
from megatron_cp_plugin.core.blocks.rows import Rows, row_count, united
from megatron_cp_plugin.core.layout import Layout, Spans, edges_of, without_steps
from megatron_cp_plugin.core.masks.bands import KEYS, QUERIES, BandRows, Bands, parts_of
from megatron_cp_plugin.core.ranges import Numbers, expanded, offsets_of_each, runs
from megatron_cp_plugin.core.tiles import Mask, filled

# Rows that nobody needs travel too where they are fewer, one behind the other, than a block has by
# this number: every range more is a copy more before and after a message.
_GAPS = 64


def longest_gap(tokens: int) -> int:
    """How many rows that nobody needs may lie between others. Args: tokens: of the block."""
    return tokens // _GAPS


@lru_cache(maxsize=8192)
def sees(q_spans: Spans, kv_spans: Spans, mask: Mask) -> bool:
    """Whether any query of a block sees any key of another: whether `plan_tiles` has a tile."""
    parts = parts_of(filled(q_spans), filled(kv_spans), mask.bands)
    return any(part.visible for part in parts)


@lru_cache(maxsize=8192)  # both passes of a micro-batch have the same
def touched_rows(q_spans: Spans, kv_spans: Spans, mask: Mask, gap: int = 0) -> tuple[Rows, Rows]:
    """Rows of a block of queries that see any key of another block, and those of these keys.

    Of positions with a step, all from the first to the last one that a band of the mask has.

    Args: gap: how many rows may lie between others that come with them.
    """
    q_spans, kv_spans, bands = filled(q_spans), filled(kv_spans), mask.bands
    if not q_spans or not kv_spans:
        return (), ()
    if not without_steps(q_spans, kv_spans):
        found = [part for part in parts_of(q_spans, kv_spans, bands) if part.visible]
        of_rows = _united_slices((part.rows for part in found), gap)
        return of_rows, _united_slices((part.cols for part in found), gap)
    of_queries, of_keys = BandRows.of(q_spans, bands, QUERIES), BandRows.of(kv_spans, bands, KEYS)
    shared = np.array(of_queries.shared_with(of_keys), dtype=np.int64)
    # All pairs of a span of queries and a span of keys that a band has.
    (q_first, q_count), (k_first, k_count) = of_queries.spans_of(shared), of_keys.spans_of(shared)
    which, pair = expanded(q_count * k_count)
    band = shared[which]
    x_start, x_stop, x_shift = of_queries.piece(band, q_first[which] + pair // k_count[which])
    y_start, y_stop, y_shift = of_keys.piece(band, k_first[which] + pair % k_count[which])
    # Of each pair the queries between the diagonals of its keys, and the other way round.
    low, high = bands.table[4:, band]
    rows = np.stack((np.maximum(x_start, y_start - high), np.minimum(x_stop, y_stop - low)))
    cols = np.stack((np.maximum(y_start, x_start + low), np.minimum(y_stop, x_stop + high)))
    seen = rows[0] < rows[1]
    return united((rows - x_shift)[:, seen], gap), united((cols - y_shift)[:, seen], gap)


def _united_slices(slices: Iterable[slice], gap: int) -> Rows:
    edges = [(part.start, part.stop) for part in slices]
    return united(np.array(edges, dtype=np.int64).reshape(-1, 2).T, gap)


@lru_cache(maxsize=16)  # both passes of a micro-batch have the same
def keys_seen(layout: Layout, size: int, seq_len: int, mask: Mask) -> list[dict[int, Rows]]:
    """[rank][owner]: rows of the owner's keys that any query of the rank sees, if any.

    As `touched_rows`, for all pairs of blocks, with gaps up to `longest_gap` filled.

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


def sees_all(layout: Layout, size: int, seq_len: int, mask: Mask) -> bool:
    """Whether some query of every rank's block sees some key of every block."""
    layout = layout.within(mask.followed)
    blocks = Owned.of(layout, size, seq_len)
    if not mask.special:
        return _all_see_all(blocks, mask)
    if blocks.gaps:
        return all(sees(queries, keys, mask) for queries in blocks for keys in blocks)
    return all(len(seen) == size for seen in keys_seen(layout, size, seq_len, mask))


def _all_see_all(blocks: Iterable[Spans], mask: Mask) -> bool:
    """The same without windows, documents and spans: by the first and the last of each block."""
    found = [[span.positions for span in block if len(span)] for block in blocks]
    if not all(found):
        return False
    latest = (max(positions[-1] for positions in one) for one in found)
    first = (min(positions[0] for positions in one) for one in found)
    return not mask.causal or min(latest) >= max(first)


@lru_cache(maxsize=16)  # both passes of a micro-batch have the same
def rows_at_distances(
    layout: Layout, size: int, seq_len: int, mask: Mask
) -> list[tuple[list[int], list[int]]]:
    """[t]: of ranks p = 0, 1, ... how many rows of the queries of rank p + t, modulo `size`, see
    keys of rank p, and how many rows these keys are; with gaps as `keys_seen`.

    Args: layout: of positions without a step.
    """
    tokens = layout, size, seq_len, mask
    seen, seeing = keys_seen(*tokens), queries_seeing(*tokens)
    counts: dict[int, int] = {}

    def count(rows: Rows) -> int:
        if id(rows) not in counts:  # most are the very same, and long
            counts[id(rows)] = row_count(rows)
        return counts[id(rows)]

    found = []
    for distance in range(size):
        pairs = [((key + distance) % size, key) for key in range(size)]
        of_queries = [count(seeing[key].get(query, ())) for query, key in pairs]
        found.append((of_queries, [count(seen[query].get(key, ())) for query, key in pairs]))
    return found


def _of_kinds(owned: Owned, mask: Mask, side: Literal[0, 1]) -> list[list[Rows]]:
    """[rank][owner]: rows of the rank's queries (0), of the owner's keys (1), that meet others."""
    alike = [owned.alike(query, mask) or () for query in range(len(owned))]
    gap = longest_gap(max(owned.lengths))
    rows = {
        (query, key): touched_rows(owned[query], owned[key], mask, gap)[side]
        for query, key in set().union(*alike)
    }
    return [list(map(rows.__getitem__, pairs)) for pairs in alike]


def _of_all_pairs(owned: Owned, bands: Bands) -> list[dict[int, Rows]]:
    """See `keys_seen`: of all pairs of blocks at once."""
    size, blocks = len(owned), [filled(spans) for spans in owned]
    gaps = np.array([longest_gap(length) for length in owned.lengths], np.int64)
    # Spans of all blocks in ascending order: whose they are, and how far positions are from rows.
    owner = np.repeat(np.arange(size), [len(spans) for spans in blocks])
    edges = np.concatenate([edges_of(spans) for spans in blocks], 1)
    shift = edges[0] - offsets_of_each(owner, edges[1] - edges[0])
    order = np.argsort(edges[0])
    (starts, stops), owner, shift = edges[:, order], owner[order], shift[order]
    # Keys [begin, end) that are seen from each span of queries that a band has.
    q_start, q_stop, k_start, k_stop, low, high = bands.table
    band, span = _in_common(q_start, q_stop, starts, stops)
    first, last = np.maximum(starts[span], q_start[band]), np.minimum(stops[span], q_stop[band])
    begin = np.maximum(first + low[band], k_start[band])
    end = np.minimum(last + high[band], k_stop[band])
    seen = begin < end
    no_gaps = np.zeros_like(gaps)
    rank, begin, end = _united_of_each(owner[span[seen]], begin[seen], end[seen], no_gaps)
    # The same by spans of keys, and as rows of their blocks.
    which, span = _in_common(begin, end, starts, stops)
    pair = rank[which] * size + owner[span]
    begin = np.maximum(begin[which], starts[span]) - shift[span]
    end = np.minimum(end[which], stops[span]) - shift[span]
    pair, begin, end = _united_of_each(pair, begin, end, np.tile(gaps, size))
    ranges = list(zip(begin.tolist(), end.tolist(), strict=True))
    found: list[dict[int, Rows]] = [{} for _ in range(size)]
    first, last = runs(pair[1:] != pair[:-1], len(pair))
    columns = (x.tolist() for x in (pair[first], first, last + 1))
    for number, start, stop in zip(*columns, strict=True):
        found[number // size][number % size] = tuple(ranges[start:stop])
    return found


def _in_common(
    begin: Numbers, end: Numbers, starts: Numbers, stops: Numbers
) -> tuple[Numbers, Numbers]:
    """Ranges [begin, end) and spans that have positions in common: numbers of both.

    Args: starts, stops: of the spans, ascending, of which no two share a position.
    """
    first = np.searchsorted(stops, begin, side="right")
    which, number = expanded(np.maximum(np.searchsorted(starts, end) - first, 0))
    return which, first[which] + number


def _united_of_each(
    whose: Numbers, starts: Numbers, stops: Numbers, gaps: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """The unions of ranges that are of the same one, in ascending order.

    Args: gaps: by whose they are, how far ranges may be apart that become one.
    """
    order = np.lexsort((starts, whose))
    whose, starts = whose[order], starts[order]
    # Moved so far apart that no gap reaches from one to the next.
    moved = whose * (stops.max(initial=0) + gaps.max(initial=0) + 1)
    reached = np.maximum.accumulate(stops[order] + moved)
    apart = starts[1:] + moved[1:] > reached[:-1] + gaps[whose[1:]]
    first, last = runs(apart, len(order))
    return whose[first], starts[first], (reached - moved)[last]
