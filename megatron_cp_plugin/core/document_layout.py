"""Layouts that depend on packed documents, the registry of all layouts, and which one
tokens are in.

Where documents do not see each other, chunks of a sequence have very unequal work: that of a
document grows with the square of its length.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import batched, chain, pairwise
from typing import cast

import numpy as np
import torch
from torch import Tensor

from megatron_cp_plugin.core.balance import deal, room
from megatron_cp_plugin.core.layout import LAYOUTS, Contiguous, Documents, Layout, Zigzag, positions
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.ranges import Ranges, Span, joined, runs
from megatron_cp_plugin.errors import ContextParallelError

# A key of another rank, whose gradients go home when no kernel runs any more, takes as long as 144
# pairs: 4 KiB by NVLink, with a KV head for four query heads. It counts at most a 32nd of the pairs
# of a row in the mean: kernels take longer for pairs of short rows.
_PAIRS_OF_A_KEY, _OF_A_ROW = 144, 32
# Into how many parts a rank those rows are cut of which later ones see fewer keys.
_PARTS = 32


@dataclass(frozen=True)
class Balanced(Layout):
    """Equally many tokens and equal work on every rank; documents stay whole, or on few ranks, see
    `core.balance`. Without documents and spans this is the zigzag layout.

    Attributes: documents: as of `for_documents`.
    """

    documents: Documents = ()
    name = "documents"
    follows_documents = True

    def spans(self, rank: int, size: int, seq_len: int) -> Sequence[Span]:
        if self.documents:
            # By what was made before: a hash of all documents for each rank takes long.
            if (size, seq_len) not in self._made:
                self._made[size, seq_len] = self._make(size, seq_len)
            return self._made[size, seq_len][rank]
        return _ZIGZAG.spans(rank, size, seq_len)

    def _make(self, size: int, seq_len: int) -> tuple[Ranges, ...]:
        """The spans of every rank, with documents."""
        return _balanced(self.documents, seq_len, size)

    @cached_property
    def _made(self) -> dict[tuple[int, int], tuple[Ranges, ...]]:
        return {}

    def length(self, rank: int, size: int, seq_len: int) -> int:
        if self.documents:
            return room(rank, size, seq_len)
        return _ZIGZAG.length(rank, size, seq_len)

    def multiple(self, size: int) -> int:
        return _ZIGZAG.multiple(size)

    def for_documents(self, documents: Documents) -> "Balanced":
        return replace(self, documents=documents) if documents else self


@dataclass(frozen=True)
class BalancedTeams(Balanced):
    """The tokens of each team of consecutive ranks as `Balanced` has them, in ascending order.

    For teams that split the heads: each rank has an equal part of the team's work, and the tokens
    that a team joins need not be put in order.

    Attributes: members: ranks of a team.
    """

    members: int = 1

    @property
    def name(self) -> str:  # type: ignore[override]
        """With the number of ranks of a team."""
        return f"documents/{self.members}"

    def _make(self, size: int, seq_len: int) -> tuple[Ranges, ...]:
        ranks = super()._make(size, seq_len)
        return ranks if size % self.members else _in_order(ranks, self.members)


@dataclass(frozen=True)
class PaddedDocuments(Layout):
    """Zigzag inside each document, all padded to multiples of 2P: equal causal work for any
    documents. Frameworks around Megatron split packed ("thd") batches in this layout.

    Each document is cut into 2P equal chunks (if P = 1, one chunk of any length); rank p has its
    chunks p and 2P-1-p, one document after another. Padding tokens are the last of a document,
    which no other token sees under a causal mask. Without documents this is the zigzag layout.

    Attributes: documents: as of `document_starts`, of padded lengths.

    Source: Transformer Engine, thd_get_partitioned_indices.
    """

    documents: tuple[int, ...] = ()
    name = "thd"
    follows_documents = True

    def spans(self, rank: int, size: int, seq_len: int) -> Sequence[Span]:
        return _chunks_of_each(self.documents, seq_len, size, rank)

    def length(self, rank: int, size: int, seq_len: int) -> int:
        return _ZIGZAG.length(rank, size, seq_len)

    def multiple(self, size: int) -> int:
        return _ZIGZAG.multiple(size) if size > 1 else 1

    def for_documents(self, documents: Documents) -> "PaddedDocuments":
        starts = documents.documents if isinstance(documents, Slices) else documents
        return PaddedDocuments(cast(tuple[int, ...], starts)) if starts else self


_ZIGZAG = Zigzag()
NAMED: dict[str, Layout] = {
    layout.name: layout for layout in (*LAYOUTS.values(), Balanced(), PaddedDocuments())
}


@lru_cache(maxsize=64)
def _chunks_of_each(
    documents: tuple[int, ...], seq_len: int, size: int, rank: int
) -> Sequence[Span]:
    """The spans of a rank. Args: documents: where padded ones begin, but for the first.

    Raises: ContextParallelError if a length is no multiple of 2P.
    """
    if size == 1:
        return (Span(0, seq_len),)
    multiple = _ZIGZAG.multiple(size)
    edges = np.array((0, *documents, seq_len), np.int64)
    starts, lengths = edges[:-1], np.diff(edges)
    uneven = np.flatnonzero(lengths % multiple)
    if len(uneven):
        number = int(uneven[0])
        length = int(lengths[number])
        raise ContextParallelError(
            f"the thd layout needs lengths of documents divisible by 2 * context_parallel_size "
            f"= {multiple}, got {length} tokens in document {number + 1} of "
            f"{len(lengths)}: pad it to {-(-length // multiple) * multiple}"
        )
    chunks = lengths // multiple
    both = np.stack([starts + index * chunks for index in (rank, multiple - 1 - rank)], 1)
    return Ranges.between(both.ravel(), (both + chunks[:, None]).ravel()).united


@lru_cache(maxsize=64)
def _balanced(documents: Documents, seq_len: int, size: int) -> tuple[Ranges, ...]:
    """The spans of every rank. Args: documents: as of `Layout.for_documents`, not empty."""
    if isinstance(documents, Slices):
        return _balanced_under(documents, seq_len, size)
    bounds = (0, *cast(tuple[int, ...], documents), seq_len)
    squares = sum((stop - start) ** 2 for start, stop in pairwise(bounds))
    of_a_key = min(_PAIRS_OF_A_KEY, squares // (2 * _OF_A_ROW * seq_len))

    def visible(start: int, stop: int) -> int:
        """Keys that rows see, all of one document, under a causal mask; and what keys before the
        rows cost, which come from other ranks.
        """
        before = bounds[bisect_right(bounds, start) - 1]  # where their document begins
        pairs = (stop - start) * (start + stop + 1 - 2 * before) // 2
        return pairs + of_a_key * (start - before) * (start < stop)

    return _dealt(list(pairwise(bounds)), size, visible)


@lru_cache(maxsize=64)
def _in_order(ranks: tuple[Ranges, ...], members: int) -> tuple[Ranges, ...]:
    """The tokens of each team of ranks, dealt to its ranks in ascending order."""
    found = list[Ranges]()
    for team in batched(ranks, members):
        edges = np.cumsum([0, *[own.total for own in team]])
        pieces, _ = joined(team).united.cut(np.stack((edges[:-1], edges[1:])))
        places = pieces.ends.searchsorted(edges, "right").tolist()
        found += [pieces.some(slice(*ends)) for ends in pairwise(places)]
    return tuple(found)


def _balanced_under(slices: Slices, seq_len: int, size: int) -> tuple[Ranges, ...]:
    """The spans of every rank under a span mask."""
    keys = slices.bands.keys_of(seq_len)
    before = np.concatenate(([0], np.cumsum(keys)))
    edges = np.unique(np.append(slices.bands.table[:2], (0, seq_len)))
    falls = np.flatnonzero(np.diff(keys) < 0) + 1
    least = max(1, seq_len // (_PARTS * size))
    parts: list[tuple[int, int]] = []
    start = 0
    for edge in edges[1:].tolist():
        if edge - start < least and edge < seq_len:
            continue  # a short one goes with the next
        inside = np.searchsorted(falls, (start + 1, edge))
        step = least if inside[0] < inside[1] else edge - start
        parts += pairwise((*range(start, edge, step), edge))
        start = edge
    return _dealt(parts, size, lambda start, stop: before.item(stop) - before.item(start))


def _dealt(
    parts: list[tuple[int, int]], size: int, work: Callable[[int, int], int]
) -> tuple[Ranges, ...]:
    """Parts of a sequence for each rank. Args: work: as of `deal`."""
    dealt = deal(parts, size, work)
    rank = np.repeat(np.arange(size), list(map(len, dealt)))
    edges = np.array([*chain(*dealt)], np.int64).reshape(-1, 2)
    start, stop = edges[np.lexsort((edges[:, 0], rank))].T
    first, last = runs((start[1:] != stop[:-1]) | (rank[1:] != rank[:-1]), len(rank))
    whole = Ranges.between(start[first], stop[last])
    bounds = rank[first].searchsorted(np.arange(size + 1)).tolist()
    return tuple(whole.some(slice(*ends)) for ends in pairwise(bounds))


def describe_mismatch(
    held: Tensor, layout: Layout, rank: int, size: int, seq_len: int
) -> str | None:
    """Says what is wrong with the tokens that a rank holds; None if they are the layout's.

    Args:
        held: global positions of the rank's tokens in their local order, integers [S] or [B,S] on
            any device.
        layout: within the documents, where it follows them.

    Returns: such as "token 0 is at position 128, expected 64: these are the tokens of rank 1 in
    the contiguous layout".
    """
    whole = not (held.is_floating_point() or held.is_complex())
    if held.dim() not in (1, 2) or not whole or held.dtype == torch.bool:
        return f"positions need integers [S] or [B,S], got {held.dtype} {[*held.shape]}"
    expected = positions(layout, rank, size, seq_len)
    rows = torch.atleast_2d(held.detach().cpu())
    for entry, row in enumerate(rows):
        if torch.equal(row, expected):
            continue
        origin = _origin(row, expected, layout, size, seq_len)
        if len(row) != len(expected):
            return f"it holds {len(row)} tokens, expected {len(expected)}{origin}"
        token = int((row != expected).nonzero()[0])
        where = f"token {token}" if len(rows) == 1 else f"token {token} of batch entry {entry}"
        return f"{where} is at position {int(row[token])}, expected {int(expected[token])}{origin}"
    return None


def _origin(row: Tensor, expected: Tensor, layout: Layout, size: int, seq_len: int) -> str:
    """Says which tokens positions [S] are, as the end of a sentence; "" if they fit nothing."""
    for name, candidate, rank, ranks in _mistakes(layout, size):
        if len(row) == candidate.length(rank, ranks, seq_len) and torch.equal(
            row, positions(candidate, rank, ranks, seq_len)
        ):
            return f": these are {name}"
    if torch.equal(row.sort().values, expected):
        return ": these are the right tokens in another order"
    if bool(((row[1:] <= row[:-1]) & (row[1:] == 0)).any()):
        return ": they begin again at 0, but positions count through the whole sequence"
    return ""


def _mistakes(layout: Layout, size: int) -> Iterator[tuple[str, Layout, int, int]]:
    """Yields what a rank may hold by mistake: description, layout, rank and number of ranks."""
    yield "all tokens, not split", Contiguous(), 0, 1
    others = (other for other in LAYOUTS.values() if other.name != layout.name)
    for candidate in (layout, *others):
        for rank in range(size):
            yield f"the tokens of rank {rank} in the {candidate.name} layout", candidate, rank, size
