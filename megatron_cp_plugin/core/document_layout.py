"""Layouts that follow packed documents, and all layouts by name.

Where documents do not see each other, chunks of a sequence have very unequal work: that of a
document grows with the square of its length. So each document is dealt with by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from megatron_cp_plugin.core.layout import LAYOUTS, Layout, Span, Zigzag, joined
from megatron_cp_plugin.errors import ContextParallelError

# A document is split if it is more than this part of a rank's share of the work: whole ones keep
# ranks apart by at most about that much, and each split one costs kernel calls in every step.
_SPLIT_FROM = 1 / 8


@dataclass(frozen=True)
class PerDocument(Layout):
    """Long documents by zigzag, each over all ranks; short ones whole, each on one rank.

    A long document is cut into 2P chunks, of which rank p has number p and 2P-1-p. Its tokens
    beyond 2P equal chunks go one by one to the rank that has fewest so far, as every rank holds
    equally many in the end, and nothing is padded. A short one goes to the rank with least work
    among those with room for it; if none has, it is cut to fill the room that is left. Without
    documents this is the zigzag layout.

    Attributes: documents: as of `document_starts`.

    Source: zigzag within each document, as Transformer Engine has it for documents that are padded
    to multiples of 2P. Differs: nothing is padded; short documents stay whole.
    """

    documents: tuple[int, ...] = ()
    name = "documents"
    follows_documents = True

    def spans(self, rank: int, size: int, seq_len: int) -> tuple[Span, ...]:
        if not self.documents:
            return _ZIGZAG.spans(rank, size, seq_len)
        return _deal((0, *self.documents, seq_len), size)[rank]

    def multiple(self, size: int) -> int:
        return _ZIGZAG.multiple(size)

    def within(self, documents: tuple[int, ...]) -> "PerDocument":
        return PerDocument(documents) if documents else self


@dataclass(frozen=True)
class PaddedDocuments(Layout):
    """Zigzag inside each document, all padded to multiples of 2P: equal causal work, whatever the
    documents. What frameworks around Megatron cut packed ("thd") batches by.

    Of each document, cut into 2P equal chunks (one, of any length, if P = 1), rank p has numbers p
    and 2P-1-p, one document after another. Padding is a document's last tokens, which no other one
    sees under a causal mask. Without documents this is the zigzag layout.

    Attributes: documents: as of `document_starts`, of padded lengths.

    Source: Transformer Engine, thd_get_partitioned_indices.
    """

    documents: tuple[int, ...] = ()
    name = "thd"
    follows_documents = True

    def spans(self, rank: int, size: int, seq_len: int) -> tuple[Span, ...]:
        return _chunks_of_each((0, *self.documents, seq_len), size)[rank]

    def length(self, rank: int, size: int, seq_len: int) -> int:
        return _ZIGZAG.length(rank, size, seq_len)

    def multiple(self, size: int) -> int:
        return _ZIGZAG.multiple(size) if size > 1 else 1

    def within(self, documents: tuple[int, ...]) -> "PaddedDocuments":
        return PaddedDocuments(documents) if documents else self


_ZIGZAG = Zigzag()
NAMED: dict[str, Layout] = {
    layout.name: layout for layout in (*LAYOUTS.values(), PerDocument(), PaddedDocuments())
}


@lru_cache(maxsize=64)
def _chunks_of_each(bounds: tuple[int, ...], size: int) -> tuple[tuple[Span, ...], ...]:
    """The spans of every rank. Args: bounds: 0, ..., N: where padded documents begin and end.

    Raises: ContextParallelError if a length is no multiple of 2P.
    """
    if size == 1:
        return ((Span(0, bounds[-1]),),)
    multiple = _ZIGZAG.multiple(size)
    found: list[list[Span]] = [[] for _ in range(size)]
    for number, (start, stop) in enumerate(pairwise(bounds), 1):
        chunk, rest = divmod(stop - start, multiple)
        if rest:
            raise ContextParallelError(
                f"the thd layout needs lengths of documents divisible by 2 * context_parallel_size "
                f"= {multiple}, got {stop - start} tokens in document {number} of "
                f"{len(bounds) - 1}: pad it to {stop - start - rest + multiple}"
            )
        for rank, spans in enumerate(found):
            for index in (rank, multiple - 1 - rank):
                spans.append(Span(start + index * chunk, start + (index + 1) * chunk))
    return tuple(joined(spans) for spans in found)


@lru_cache(maxsize=64)
def _deal(bounds: tuple[int, ...], size: int) -> tuple[tuple[Span, ...], ...]:
    """The spans of every rank. Args: bounds: 0, ..., N: where documents begin and end."""
    ranks = [_Hand(-(-bounds[-1] // size)) for _ in range(size)]
    documents = sorted(pairwise(bounds), key=lambda edges: edges[0] - edges[1])
    share = sum(map(_work, documents)) / size
    rest = []
    for edges in documents:
        if _work(edges) > share * _SPLIT_FROM:
            _split(edges, ranks)
            continue
        with_room = [rank for rank in ranks if rank.room >= edges[1] - edges[0]]
        if with_room:
            min(with_room, key=lambda rank: rank.work).take(*edges, _work(edges))
        else:
            rest.append(edges)
    for start, stop in rest:
        while start < stop:
            rank = min((rank for rank in ranks if rank.room), key=lambda rank: rank.work)
            end = min(stop, start + rank.room)
            rank.take(start, end, _work((start, end)))
            start = end
    return tuple(rank.spans() for rank in ranks)


def _work(edges: tuple[int, int]) -> int:
    """Pairs of a query and a key that a document has."""
    tokens = edges[1] - edges[0]
    return tokens * (tokens + 1) // 2


class _Hand:
    """What a rank has been given. Attributes: room: for tokens. work: of its whole documents."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.work = 0
        self._spans: list[Span] = []

    def take(self, start: int, stop: int, work: int) -> None:
        self.room -= stop - start
        self.work += work
        self._spans.append(Span(start, stop))

    def spans(self) -> tuple[Span, ...]:
        return joined(filter(len, self._spans)) or (Span(0, 0),)


def _split(edges: tuple[int, int], ranks: Sequence[_Hand]) -> None:
    """Gives every rank its two chunks of a document."""
    start, stop = edges
    size = len(ranks)
    equal, odd = divmod(stop - start, 2 * size)
    lengths = [equal] * (2 * size)
    # Whoever has most room takes one token more, in its first chunk and then in its second one.
    by_room = sorted(range(size), key=lambda rank: -ranks[rank].room)
    for turn in range(odd):
        rank = by_room[turn % size]
        lengths[rank if turn < size else 2 * size - 1 - rank] += 1
    edge = list(accumulate(lengths, initial=start))
    for number in range(2 * size):
        hand = ranks[min(number, 2 * size - 1 - number)]
        hand.take(edge[number], edge[number + 1], 0)
