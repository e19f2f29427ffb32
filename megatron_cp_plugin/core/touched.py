"""Which rows of blocks meet under a mask: those that have to travel."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp_plugin.core.bands import Spans
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.rows import Rows
from megatron_cp_plugin.core.tiles import Mask

Numbers = NDArray[np.int64]

# Rows that nobody needs travel too where they are fewer, one behind the other, than a block has by
# this number: every range more is a copy more before and after a message.
_GAPS = 64


def longest_gap(tokens: int) -> int:
    """How many rows that nobody needs may lie between others. Args: tokens: of the block."""
    return tokens // _GAPS


def by_document_alone(mask: Mask, spans: Sequence[Spans]) -> bool:
    """Whether `keys_seen` and `queries_seeing` serve a mask and blocks."""
    special = mask.documents and mask == Mask(mask.causal, documents=mask.documents)
    return bool(special) and all(span.step == 1 for own in spans for span in own)


@lru_cache(maxsize=16)  # both passes of a micro-batch have the same
def keys_seen(layout: Layout, size: int, seq_len: int, mask: Mask) -> list[dict[int, Rows]]:
    """[rank][owner]: rows of the owner's keys that any query of the rank sees, if any.

    As `tiles.touched_rows`, for all pairs of blocks, with gaps up to `longest_gap` filled.

    Args: layout, mask: see `by_document_alone`.
    """
    parts = _parts(layout, size, seq_len, mask.documents)
    last = np.zeros((size, len(mask.documents) + 1), np.int64)
    np.maximum.at(last, (parts.owner, parts.document), parts.stop)
    seen_until = last[:, parts.document]  # by rank and part
    stop = np.minimum(parts.stop, seen_until) if mask.causal else parts.stop * (seen_until > 0)
    return _packed(parts, np.broadcast_to(parts.start, stop.shape), stop, size)


@lru_cache(maxsize=16)
def queries_seeing(layout: Layout, size: int, seq_len: int, mask: Mask) -> list[dict[int, Rows]]:
    """[rank][owner]: rows of the owner's queries that see any key of the rank; as `keys_seen`."""
    parts = _parts(layout, size, seq_len, mask.documents)
    first = np.full((size, len(mask.documents) + 1), seq_len)
    np.minimum.at(first, (parts.owner, parts.document), parts.start)
    seeing_from = first[:, parts.document]
    start = np.maximum(parts.start, seeing_from)
    if not mask.causal:
        start = np.where(seeing_from < seq_len, parts.start, seq_len)
    return _packed(parts, start, np.broadcast_to(parts.stop, start.shape), size)


class _Parts(NamedTuple):
    """What ranks have of documents, without gaps: by rank, ascending.

    Attributes: start, stop: positions. row: of the rank's block, where it begins.
    """

    owner: Numbers
    document: Numbers
    start: Numbers
    stop: Numbers
    row: Numbers


@lru_cache(maxsize=16)
def _parts(layout: Layout, size: int, seq_len: int, documents: tuple[int, ...]) -> _Parts:
    held = ((span, rank) for rank in range(size) for span in layout.spans(rank, size, seq_len))
    begins, owners = np.array(sorted((s.start, r) for s, r in held if len(s)), np.int64).T
    starts = np.array(documents, np.int64)
    edges = np.union1d(begins, starts)
    owner = owners[np.searchsorted(begins, edges, side="right") - 1]
    order = np.argsort(owner, kind="stable")
    lengths = np.diff(edges, append=seq_len)[order]
    owner, start = owner[order], edges[order]
    before = np.cumsum(lengths) - lengths
    row = before - before[np.searchsorted(owner, owner)]
    document = np.searchsorted(starts, start, side="right")
    return _Parts(owner, document, start, start + lengths, row)


def _packed(parts: _Parts, start: Numbers, stop: Numbers, size: int) -> list[dict[int, Rows]]:
    """[rank][owner]: rows. Args: start, stop: positions, by rank and part; start >= stop: none."""
    rank, part = np.nonzero(start < stop)
    offset = (parts.row - parts.start)[part]
    start, stop = start[rank, part] + offset, stop[rank, part] + offset
    lengths = np.bincount(parts.owner, parts.stop - parts.start, size).astype(np.int64)
    block = rank * size + parts.owner[part]
    gap = (lengths // _GAPS)[parts.owner[part]]
    # Of ranges: those that do not follow one of the same block closely.
    first = np.ones(len(rank), bool)
    first[1:] = (block[1:] != block[:-1]) | (start[1:] - stop[:-1] > gap[1:])
    (begins,) = np.nonzero(first)
    ends = np.append(begins[1:], len(rank)) - 1
    found: list[dict[int, Rows]] = [{} for _ in range(size)]
    ranges = list(zip(start[begins].tolist(), stop[ends].tolist(), strict=True))
    blocks, counts = np.unique(block[begins], return_counts=True)
    at = 0
    for number, count in zip(blocks.tolist(), counts.tolist(), strict=True):
        found[number // size][number % size] = tuple(ranges[at : at + count])
        at += count
    return found
