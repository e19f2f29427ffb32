"""A placement that follows the work of a mask: ranks with more than the mean give some away.

DISTFLASHATTN's helpers are known by their distance from who is helped, which suits a causal mask.
Under documents, spans and windows work lies anywhere: here it is counted first, and ranks that have
little compute pairs of ranks with much, down to some rows of a rank's own block. Tokens stay in
their order, on contiguous chunks.

Source: none for the greedy choice; that idle ranks help is DISTFLASHATTN's.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp_plugin.core.layout import chunk_bounds
from megatron_cp_plugin.core.masks.bands import ramp
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.ranges import Numbers, expanded
from megatron_cp_plugin.core.tiles import Mask

# A rank gives work away above this multiple of the mean work, and takes work up to it.
_CEILING = 1.03
# Less work than this part of the mean is not given away.
_TRIFLE = 0.01
# A piece of a block of queries has about this part of the mean work. Upper bound of the number of
# pieces times the number of blocks of keys that they see.
_GRAIN, _MOST_PIECES = 0.005, 1024
# Number of blocks of others that a rank computes in one step.
_AT_ONCE = 8
# Where keys begin if there are none.
_NONE = 1 << 40
# Cost of a byte between nodes, in bytes inside one.
_BETWEEN = 2.0

Works = NDArray[np.float64]


class Assigned(NamedTuple):
    """Rows of a rank's queries against the keys of a rank, and who computes them.

    Attributes:
        query, key: owners.
        start, stop: rows of the block of queries.
        work: pairs.
    """

    query: int
    key: int
    start: int
    stop: int
    rank: int
    work: float


@dataclass(frozen=True)
class WorkPlacement(BlockPlacement):
    """Ranks compute their own queries, and take rows of the queries of ranks with too much work.

    Attributes: row_bytes: of a row of queries, and of keys, as of `Shape.travel_bytes`.
    """

    seq_len: int = field(kw_only=True)
    mask: Mask = field(kw_only=True)
    nodes: tuple[int, ...] = field(kw_only=True)
    row_bytes: tuple[int, int] = field(kw_only=True)

    def place(self, query: int, key: int) -> Iterator[Place]:
        yield from self._places.get((query, key)) or (Place(query, int(query != key)),)

    def pairs_of(self, rank: int) -> Iterator[tuple[int, int]]:
        return iter(self._pairs.get(rank, ()))

    @cached_property
    def _pairs(self) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, dict[tuple[int, int], None]] = defaultdict(dict)
        for pair, places in self._places.items():
            for place in places:
                found[place.rank][pair] = None
        return {rank: sorted(pairs) for rank, pairs in found.items()}

    @cached_property
    def _places(self) -> dict[tuple[int, int], list[Place]]:
        chunks = (chunk_bounds(rank, self.size, self.seq_len) for rank in range(self.size))
        edges = (0, *(stop for _, stop in chunks))
        return _placed(edges, self.mask, self.nodes, self.row_bytes)


@lru_cache(maxsize=16)  # both passes of a micro-batch have the same
def _placed(
    edges: tuple[int, ...], mask: Mask, nodes: tuple[int, ...], row_bytes: tuple[int, int]
) -> dict[tuple[int, int], list[Place]]:
    """By owners of queries and of keys: where they meet."""
    by_rank: dict[int, list[Assigned]] = defaultdict(list)
    for part in Assignment(edges, mask, nodes, row_bytes).parts():
        by_rank[part.rank].append(part)
    found: dict[tuple[int, int], list[Place]] = defaultdict(list)
    for rank, parts in by_rank.items():
        # Queries of others come first: their results go back while others are computed.
        parts.sort(key=lambda part: (part.query == rank, abs(rank - part.query), -part.key))
        others: set[tuple[str, int]] = set()
        for query, key, start, stop, _, _ in parts:
            others |= {("queries", query), ("keys", key)} - {("queries", rank), ("keys", rank)}
            step = 0 if query == key == rank else 1 + (len(others) - 1) // _AT_ONCE
            tokens = edges[query + 1] - edges[query]
            rows = ((0, 1), 1) if stop - start == tokens else ((start, tokens), stop - start)
            found[query, key].append(Place(rank, step, *rows))
    return dict(found)


class _Counted(NamedTuple):
    """Work of some pieces of queries with each block of keys that they see any of.

    Attributes, each [n]:
        work: pairs of a query and a key.
        first, last: keys.
    """

    piece: Numbers
    key: Numbers
    work: Numbers
    first: Numbers
    last: Numbers


def _counted(pieces: Numbers, blocks: Numbers, bands: Numbers) -> _Counted:
    """Counts the pairs of a query and a key.

    Args:
        pieces: where pieces of queries begin, ascending, and the last one ends.
        blocks: where blocks of keys begin, ascending, and the last one ends.
    """
    q_start, q_stop, k_start, k_stop, low, high = bands
    first = np.maximum(pieces.searchsorted(q_start, side="right") - 1, 0)
    last = np.minimum(pieces.searchsorted(q_stop), len(pieces) - 1)
    band, number = expanded(np.maximum(last - first, 0))
    piece = first[band] + number
    start = np.maximum(pieces[piece], q_start[band])
    stop = np.minimum(pieces[piece + 1], q_stop[band])
    begin = np.maximum(k_start[band], start + low[band])
    end = np.minimum(np.minimum(k_stop[band], stop + high[band]), blocks[-1])
    some = (begin < end) & (start < stop)
    band, piece, start, stop, begin, end = (x[some] for x in (band, piece, start, stop, begin, end))
    first = blocks.searchsorted(begin, side="right") - 1
    which, number = expanded(blocks.searchsorted(end) - first)
    band, piece, start, stop = (x[which] for x in (band, piece, start, stop))
    key = first[which] + number
    begin, end = np.maximum(begin[which], blocks[key]), np.minimum(end[which], blocks[key + 1])
    keys = end - begin
    work = np.zeros_like(start)
    for sign, diagonal in ((1, high[band] + 1), (-1, low[band])):
        shift = diagonal - begin
        work += sign * (ramp(stop + shift, keys) - ramp(start + shift, keys))
    seen = np.maximum(begin, start + low[band]), np.minimum(end, stop + high[band])
    return _Counted(*(x[work > 0] for x in (piece, key, work, *seen)))


class _Queries:
    """A block of queries, in pieces.

    Attributes:
        edges: where pieces begin, and the last one ends.
        keys: owners of the keys that they see.
        counted: [keys, pieces]: work.
        work: [keys, pieces]: work that the owner still computes.
        first, last: [keys, pieces]: which keys.
        who: [keys, pieces]: who computes them.
    """

    def __init__(self, rank: int, edges: Numbers, counted: _Counted) -> None:
        """Args: counted: the work of these pieces."""
        self.rank, self.edges, self.rows = rank, edges, np.diff(edges)
        self.keys, row = np.unique(counted.key, return_inverse=True)
        shape, at = (len(self.keys), len(self.rows)), (row, counted.piece)
        self.counted = np.zeros(shape)
        self.first, self.last = np.full(shape, _NONE), np.zeros(shape, np.int64)
        np.add.at(self.counted, at, counted.work)
        np.minimum.at(self.first, at, counted.first)
        np.maximum.at(self.last, at, counted.last)
        self.work = self.counted.copy()
        self.who = np.full(shape, rank)

    def densest(self, keys: Numbers, amount: float) -> "_Some":
        """Successive pieces whose rows see many keys, of about the given work if they have it.

        Args: keys: some of the blocks, by their place in `keys`.
        """
        work = self.work[keys].sum(0)
        density = work / self.rows
        top = len(density) - 1 - int(density[::-1].argmax())
        bounds = np.flatnonzero(density < 0.5 * density[top])
        after = int(bounds.searchsorted(top))
        low = int(bounds[after - 1]) + 1 if after else 0
        high = int(bounds[after]) if after < len(bounds) else len(density)
        end = top - low >= high - 1 - top
        sums = np.cumsum(work[low:high][::-1] if end else work[low:high])
        count = max(1, int(sums.searchsorted(amount, side="right")))
        low, high = (high - count, high) if end else (low, low + count)
        first, last = self.first[keys, low:high].min(1), self.last[keys, low:high].max(1)
        return _Some(keys, low, high, float(sums[count - 1]), first, last)

    def rows_of(self, some: "_Some") -> int:
        """How many rows they are."""
        return int(self.edges[some.high] - self.edges[some.low])

    def parts(self) -> Iterator[Assigned]:
        """Rows of each pair of blocks, in as few parts as can be."""
        edges = (self.edges - self.edges[0]).tolist()
        for key, who, work in zip(self.keys.tolist(), self.who, self.counted, strict=True):
            filled = np.flatnonzero(work)
            ranks = who[filled]
            begins = np.flatnonzero(np.append(True, ranks[1:] != ranks[:-1]))
            starts = [0, *(edges[filled[begin]] for begin in begins[1:])]
            works = np.add.reduceat(work[filled], begins).tolist()
            columns = starts, [*starts[1:], edges[-1]], ranks[begins].tolist(), works
            for start, stop, rank, amount in zip(*columns, strict=True):
                yield Assigned(self.rank, key, start, stop, rank, amount)


class _Some(NamedTuple):
    """Pieces of a block of queries with some blocks of keys.

    Attributes:
        keys: of the blocks, see `_Queries.keys`.
        low, high: pieces.
        work: of them that the owner still computes.
        first, last: by blocks of keys, which they see.
    """

    keys: Numbers
    low: int
    high: int
    work: float
    first: Numbers
    last: Numbers


class Assignment:
    """Which rank computes which pairs.

    Attributes:
        load: work of each rank.
        ceiling: at most, where that can be.
        trifle: too little to be sent.
        apart: [rank, other]: as how many a byte counts that is sent.
        changes: queries at which others begin to see other keys, ascending.
        sent: bytes, by each rank.
        first, last: [rank, block]: which keys a rank has, or gets.
    """

    def __init__(
        self, edges: Sequence[int], mask: Mask, nodes: Sequence[int], row_bytes: tuple[int, int]
    ) -> None:
        """Args: edges: where the ranks' chunks begin, and where the last one ends."""
        self.blocks, self.size = np.array(edges, np.int64), len(edges) - 1
        self.bands = mask.bands.table
        self.changes = np.unique(self.bands[:2])
        self.query_bytes, self.key_bytes = row_bytes
        self.apart = np.where(np.equal.outer(nodes, nodes), 1.0, _BETWEEN)
        self.counted = _counted(self.blocks, self.blocks, self.bands)
        work = self.counted.work
        self.load = np.bincount(self.counted.piece, work, self.size)
        self.mean = float(self.load.sum()) / self.size
        self.ceiling, self.trifle = _CEILING * self.mean, _TRIFLE * self.mean
        shape = self.size, self.size
        self.first, self.last = np.full(shape, self.blocks[-1]), np.zeros(shape, np.int64)
        np.minimum.at(self.first, (self.counted.piece, self.counted.key), self.counted.first)
        np.maximum.at(self.last, (self.counted.piece, self.counted.key), self.counted.last)
        own = np.arange(self.size)
        self.last[own, own] = 0
        self.sent = np.maximum(self.last - self.first, 0).sum(0) * float(self.key_bytes)
        self.first[own, own], self.last[own, own] = self.blocks[:-1], self.blocks[1:]

    def parts(self) -> list[Assigned]:
        """Rows of every pair of blocks that see each other, each once."""
        found: list[Assigned] = []
        order = np.argsort(-self.load, kind="stable")
        above = [int(rank) for rank in order if self.load[rank] > self.ceiling]
        edges = {rank: self._pieces(rank) for rank in sorted(above)}
        ends = dict(zip(edges, np.cumsum([*map(len, edges.values())]).tolist(), strict=True))
        counted = _counted(np.concatenate([[0], *edges.values()])[1:], self.blocks, self.bands)
        for rank in above:
            first = ends[rank] - len(edges[rank])
            own = (first <= counted.piece) & (counted.piece < ends[rank] - 1)
            some = _Counted(*(column[own] for column in counted))
            queries = _Queries(rank, edges[rank], some._replace(piece=some.piece - first))
            self._relieve(queries)
            found += queries.parts()
        left = ~np.isin(self.counted.piece, above)
        pairs = self.counted.piece[left] * self.size + self.counted.key[left]
        distinct, which = np.unique(pairs, return_inverse=True)
        works = np.bincount(which, self.counted.work[left]).tolist()
        for pair, work in zip(distinct.tolist(), works, strict=True):
            query, key = divmod(pair, self.size)
            stop = int(self.blocks[query + 1] - self.blocks[query])
            found.append(Assigned(query, key, 0, stop, query, work))
        return found

    def _pieces(self, rank: int) -> Numbers:
        """Where the pieces of a rank's queries begin, and where the last one ends."""
        start, stop = self.blocks[rank : rank + 2].tolist()
        keys = int(np.count_nonzero(self.last[rank]))
        wanted = self.load[rank] / (_GRAIN * self.mean)
        pieces = int(np.clip(wanted, 8, max(32, _MOST_PIECES // keys)))
        edges = np.linspace(start, stop, pieces + 1).astype(np.int64)
        # Where queries begin to see other keys the nearest edge moves there: no few rows of a
        # document are left behind.
        changes = self.changes[self.changes.searchsorted(start) : self.changes.searchsorted(stop)]
        edges[np.rint((changes - start) * (pieces / (stop - start))).astype(np.int64)] = changes
        edges[[0, -1]] = start, stop
        found: Numbers = np.unique(edges)
        return found

    def _relieve(self, queries: _Queries) -> None:
        """Gives away rows of a rank's queries until its work is below the ceiling."""
        while (excess := float(self.load[queries.rank]) - self.ceiling) > self.trifle:
            most = self.ceiling + 2 * self.trifle
            moves = [
                (cost, to, some)
                for cost, to, some in self._moves(queries, excess)
                if self.load[to] + some.work <= most  # pieces may be coarse
            ]
            if not moves:
                break
            _, to, some = min(moves, key=itemgetter(0))
            self._give(queries, to, some)

    def _moves(self, queries: _Queries, excess: float) -> Iterator[tuple[float, int, _Some]]:
        """Moves of a rank: (bytes for each pair of a query and a key, helper, pieces)."""
        own = queries.work.sum(1)
        room = np.minimum(self.ceiling - self.load, excess)
        room[queries.rank] = 0
        # To the rank that has most of the keys: nothing but queries travels.
        amounts = np.minimum(room[queries.keys], own)
        best = amounts.argmax(keepdims=True)
        if amounts[best] > self.trifle:
            yield self._cheapest(queries, best, queries.keys[best], amounts[best])
        # To any rank that has much room, with all keys, or with the block that they see most of.
        seen = np.flatnonzero(own)
        for keys in (seen, own.argmax(keepdims=True))[: len(seen)]:
            amounts = np.minimum(room, own[keys].sum())
            ranks = np.flatnonzero(amounts > max(self.trifle, 0.5 * amounts.max()))
            if len(ranks):
                yield self._cheapest(queries, keys, ranks, amounts[ranks])

    def _cheapest(
        self, queries: _Queries, keys: Numbers, ranks: Numbers, amounts: Works
    ) -> tuple[float, int, _Some]:
        """The move for which the fewest bytes travel; bytes of busy senders count more.

        Args:
            keys: see `_Queries.densest`.
            amounts: of work, that each of the ranks may be given.
        """
        most = float(amounts.max())
        some, owners = queries.densest(keys, most), queries.keys[keys]
        sending = 1 + self.sent / max(float(self.sent.mean()), 1.0)
        of_rank = self.apart[queries.rank, ranks] * self.query_bytes * sending[queries.rank]
        cost = queries.rows_of(some) * amounts / most * of_rank
        at = ranks[:, None], owners
        of_keys = self.apart[at] * self.key_bytes * sending[owners]
        cost += (self._missing(at, some) * of_keys).sum(1)
        cost /= amounts
        best = int(cost.argmin())
        if amounts[best] < most:
            some = queries.densest(keys, float(amounts[best]))
        return float(cost[best]), int(ranks[best]), some

    def _missing(self, at: tuple[int | Numbers, ...], some: _Some) -> Numbers:
        """How many keys a rank lacks for some pieces. Args: at: its indices into `first`."""
        there = np.minimum(self.last[at], some.last) - np.maximum(self.first[at], some.first)
        found: Numbers = np.maximum(some.last - some.first, 0) - np.maximum(there, 0)
        return found

    def _give(self, queries: _Queries, to: int, some: _Some) -> None:
        keys, pieces = some.keys, slice(some.low, some.high)
        own = queries.work[keys, pieces] > 0
        queries.who[keys, pieces] = np.where(own, to, queries.who[keys, pieces])
        queries.work[keys, pieces] = 0
        at = to, queries.keys[keys]
        self.sent[at[1]] += self._missing(at, some) * self.key_bytes
        self.sent[queries.rank] += queries.rows_of(some) * self.query_bytes
        self.first[at] = np.minimum(self.first[at], some.first)
        self.last[at] = np.maximum(self.last[at], some.last)
        self.load[queries.rank] -= some.work
        self.load[to] += some.work
