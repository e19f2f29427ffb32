"""Validates the slices of a span mask."""

from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import index
from typing import NamedTuple

import numpy as np

from megatron_cp_plugin.core.masks.bands import FAR, Bands
from megatron_cp_plugin.core.ranges import Numbers, expanded
from megatron_cp_plugin.errors import ContextParallelError, brief, nearest

# By the numbers that tensors have for them.
KINDS = ("full", "causal", "inverse_causal", "bi_causal")
_NUMBERED = dict(enumerate(KINDS))
_NEEDS = "spans need (q_start, q_stop, k_start, k_stop, kind), four whole numbers and a kind, each"
# Pairs of slices that are compared at a time.
_COMPARED = 1 << 20


class Slice(NamedTuple):
    """Queries [q_start, q_stop) of a sequence that see keys of [k_start, k_stop).

    Attributes:
        kind: which keys j query i sees. "full": all. "causal": if k_stop - j >= q_stop - i, so that
            the last query sees all. "inverse_causal": if j - k_start >= i - q_start, so that the
            first query sees all. "bi_causal": if both.

    Source: MagiAttention's AttnSlice.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: str = "full"


class Slices(tuple[Slice, ...]):
    """Slices in ascending order, no two of which name the same query and key.

    Plans are cached by mask: a mask is hashed once, however many slices it has.

    Attributes: documents: positions where documents but the first begin, as of `document_starts`.
        Of the keys that a slice names a query sees only keys of its own document. (): one document.
    """

    documents: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, spans: Iterable[Iterable[object]], seq_len: int, documents: tuple[int, ...] = ()
    ) -> "Slices":
        """Slices of a sequence, without empty ones.

        Args:
            spans: (q_start, q_stop, k_start, k_stop, kind) each, the kind as of `Slice` or its
                number in `KINDS`.
            documents: see Attributes.

        Raises: ContextParallelError if one is no slice, or reaches beyond the sequence, or names a
            query and a key that another one names.
        """
        try:
            return _checked_slices(tuple(map(tuple, spans)), seq_len, documents)
        except TypeError:  # one that is no sequence, or has what cannot be hashed
            raise ContextParallelError(f"{_NEEDS}, got {brief(spans)}") from None

    @classmethod
    def cut(cls, slices: Iterable[Slice], documents: tuple[int, ...]) -> "Slices":
        """Slices that were checked before, restricted to keys of the queries' documents."""
        found = cls(slices)
        found.documents = documents
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Slices):
            return NotImplemented
        return self.documents == other.documents and super().__eq__(other)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((super().__hash__(), self.documents))

    @cached_property
    def bands(self) -> Bands:
        """The visible pairs, as rectangles between two diagonals."""
        return (self._named.of_each(self.documents) if self.documents else self._named).joined()

    @cached_property
    def _named(self) -> Bands:
        """All pairs that slices name, whatever the documents."""
        numbers = [(*one[:4], KINDS.index(one.kind)) for one in self]
        q_start, q_stop, k_start, k_stop, kind = np.array(numbers, np.int64).reshape(-1, 5).T
        low = np.where(kind >= KINDS.index("inverse_causal"), k_start - q_start, -FAR)
        high = np.where(kind % 2 == KINDS.index("causal"), k_stop - q_stop, FAR)
        return Bands(np.stack((q_start, q_stop, k_start, k_stop, low, high)))

    @cached_property
    def causal(self) -> bool:
        """Whether no query sees a key of a later position."""
        q_start, _, _, k_stop, _, high = self.bands.table
        return bool((np.minimum(high, k_stop - 1 - q_start) <= 0).all())


@lru_cache(maxsize=64)  # all layers and passes of a micro-batch have the same
def _checked_slices(
    spans: tuple[tuple[object, ...], ...], seq_len: int, documents: tuple[int, ...]
) -> Slices:
    filled = sorted(one for one in map(_slice_of, spans) if _is_filled(one, seq_len))
    found = Slices.cut(filled, documents)
    for first, second, query, key in _overlaps(found._named.table):
        raise ContextParallelError(
            f"spans may name a query and a key once, got query {query} and key {key} in "
            f"{tuple(found[first])} and in {tuple(found[second])}: cut one of the two"
        )
    return found


def _slice_of(span: tuple[object, ...]) -> Slice:
    try:
        *edges, kind = span
        q_start, q_stop, k_start, k_stop = map(index, edges)  # type: ignore[arg-type]
        kind = kind if isinstance(kind, str) else _NUMBERED[index(kind)]  # type: ignore[arg-type]
    except (TypeError, ValueError, KeyError):
        raise ContextParallelError(f"{_NEEDS}, got {span}") from None
    if kind not in KINDS:
        raise ContextParallelError(
            f"unknown kind of span {kind!r}{nearest(kind, KINDS)}: use one of {', '.join(KINDS)}"
        )
    return Slice(q_start, q_stop, k_start, k_stop, kind)


def _is_filled(one: Slice, seq_len: int) -> bool:
    """Whether it has a pair of a query and a key. Raises: ContextParallelError."""
    for start, stop in (one[:2], one[2:4]):
        if not 0 <= start <= stop <= seq_len:
            raise ContextParallelError(
                f"spans need 0 <= start <= stop <= seq_len = {seq_len}, got {tuple(one)}"
            )
    rows, cols = one.q_stop - one.q_start, one.k_stop - one.k_start
    return rows > 0 and cols > 0 and (one.kind != "bi_causal" or rows <= cols)


def _overlaps(table: Numbers) -> Iterator[tuple[int, int, int, int]]:
    """Two bands with a pair in common, and the pair. Args: table: of `Bands`."""
    count = table.shape[1]
    # Bands that overlap in one dimension: in that one in which they are fewer.
    orders = [np.argsort(table[side], kind="stable") for side in (0, 2)]
    ends = [
        np.searchsorted(table[side, order], table[side + 1, order])
        for side, order in zip((0, 2), orders, strict=True)
    ]
    axis = int(ends[0].sum() > ends[1].sum())
    order, later = orders[axis], ends[axis] - np.arange(1, count + 1)
    total = np.concatenate(([0], np.cumsum(later)))
    parts = np.searchsorted(total, np.arange(0, total[-1], _COMPARED))
    for start, stop in pairwise((*parts.tolist(), count)):
        which, number = expanded(later[start:stop])
        one = start + which
        other = one + 1 + number
        a, b = table[:, order[one]], table[:, order[other]]
        q_start, k_start, low = (np.maximum(a[row], b[row]) for row in (0, 2, 4))
        q_stop, k_stop, high = (np.minimum(a[row], b[row]) for row in (1, 3, 5))
        low, high = np.maximum(low, k_start - q_stop + 1), np.minimum(high, k_stop - 1 - q_start)
        shared = (q_start < q_stop) & (k_start < k_stop) & (low <= high)
        for at in np.flatnonzero(shared).tolist():
            query = int(max(q_start[at], k_start[at] - low[at]))
            yield int(order[one[at]]), int(order[other[at]]), query, query + int(low[at])
