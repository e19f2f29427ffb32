"""Masks and tiles pair by pair, and span masks of all kinds."""

from collections.abc import Iterable, Sequence
from random import Random

import torch
from torch import Tensor

from megatron_cp_plugin.core.layout import document_starts
from megatron_cp_plugin.core.masks.slices import KINDS, Slices
from megatron_cp_plugin.core.tiles import Mask, Tile

Spans = list[tuple[int, int, int, int, str]]


def mask_of(
    spans: Sequence[Sequence[object]],
    seq_len: int,
    cu_seqlens: Sequence[int] | None = None,
    window: int | None = None,
) -> Mask:
    """What the plans of a call with these are for."""
    documents = document_starts(cu_seqlens or [0, seq_len], seq_len)
    return Mask.of(Slices.of(spans, seq_len, documents), window)


def dense(
    spans: Sequence[Sequence[object]],
    seq_len: int,
    cu_seqlens: Sequence[int] | None = None,
    window: int | None = None,
) -> Tensor:
    """[N,N]: how often a query and a key are named, pair by pair as the definition has it; of
    different documents, or so far apart, never.
    """
    named = torch.zeros(seq_len, seq_len, dtype=torch.int64)
    for q_start, q_stop, k_start, k_stop, kind in spans:
        i = torch.arange(seq_len)[:, None]
        j = torch.arange(seq_len)[None, :]
        pairs = (i >= q_start) & (i < q_stop) & (j >= k_start) & (j < k_stop)
        if kind in ("causal", "bi_causal"):
            pairs &= k_stop - j >= q_stop - i
        if kind in ("inverse_causal", "bi_causal"):
            pairs &= j - k_start >= i - q_start
        named += pairs
    age = torch.arange(seq_len)[:, None] - torch.arange(seq_len)
    lengths = torch.tensor([0, seq_len] if cu_seqlens is None else cu_seqlens).diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    seen = (document[:, None] == document) & (age < (seq_len if window is None else window))
    return named * seen


def seen_by(mask: Mask, seq_len: int) -> Tensor:
    """[N,N]: how often a mask lets a query meet a key, by its definition."""
    kind = "causal" if mask.causal else "full"
    spans, documents = [(0, seq_len, 0, seq_len, kind)], mask.documents
    if mask.slices is not None:
        spans, documents = list(mask.slices), mask.slices.documents
    return dense(spans, seq_len, [0, *documents, seq_len], mask.window)


def pairs_of(tiles: Iterable[Tile], shape: tuple[int, int]) -> Tensor:
    """How often each (row, column) of two blocks is computed by tiles."""
    found = torch.zeros(shape, dtype=torch.int64)
    for tile in tiles:
        pairs = torch.ones(tile.rows, tile.cols, dtype=torch.int64)
        pairs = pairs.tril(tile.cols - tile.rows) if tile.causal else pairs
        pairs = pairs.triu(tile.cols - tile.rows - tile.window + 1) if tile.window else pairs
        assert tile.area == pairs.sum() > 0
        found[tile.q, tile.kv] += pairs.flip(0, 1) if tile.reverse else pairs
    return found


def random_spans(source: Random, seq_len: int) -> Spans:
    """Rectangles that do not overlap, each cut by one diagonal, by two, by none, or left out."""
    found: Spans = []

    def divide(q_start: int, q_stop: int, k_start: int, k_stop: int, depth: int) -> None:
        rows, cols = q_stop - q_start, k_stop - k_start
        if depth and max(rows, cols) > 1 and source.random() < 0.85:
            if rows > 1 and (cols <= 1 or source.random() < 0.5):
                cut = source.randint(q_start + 1, q_stop - 1)
                divide(q_start, cut, k_start, k_stop, depth - 1)
                divide(cut, q_stop, k_start, k_stop, depth - 1)
            else:
                cut = source.randint(k_start + 1, k_stop - 1)
                divide(q_start, q_stop, k_start, cut, depth - 1)
                divide(q_start, q_stop, cut, k_stop, depth - 1)
            return
        kind = source.choice([*KINDS, "both", ""])
        if kind == "both":  # a triangle, and what it leaves of the rectangle
            found.append((q_start, q_stop, k_start, k_stop, "causal"))
            above = k_stop - q_stop + 1 + q_start
            if k_start <= above <= k_stop:
                found.append((q_start, q_stop, above, k_stop, "inverse_causal"))
        elif kind:
            found.append((q_start, q_stop, k_start, k_stop, kind))

    divide(0, seq_len, 0, seq_len, source.randint(0, 6))
    source.shuffle(found)
    return found


def random_lengths(source: Random, seq_len: int, multiple: int = 1) -> list[int]:
    """Cumulative ones; some documents are empty, and often one is all."""
    edges = source.choices(range(0, seq_len + 1, multiple), k=source.randint(0, 6))
    return [0, *sorted(edges), seq_len]


def random_window(source: Random, seq_len: int) -> int | None:
    return source.choice([None, source.randint(1, seq_len)])
