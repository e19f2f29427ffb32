"""Documents that are packed into one sequence: where they begin, and what blocks have of each."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, takewhile
from math import ceil
from random import Random

from megatron_cp_plugin.core.document_lengths import Exponential, Lengths
from megatron_cp_plugin.core.layout import Span
from megatron_cp_plugin.errors import ContextParallelError

Spans = tuple[Span, ...]


def document_starts(cu_seqlens: Sequence[int], seq_len: int) -> tuple[int, ...]:
    """Where documents other than the first one begin, from cumulative lengths (0, n1, n1 + n2,
    ..., N); empty documents are none.

    Raises: ContextParallelError unless the lengths ascend from 0 to seq_len.
    """
    descends = any(a > b for a, b in pairwise(cu_seqlens))
    if descends or [*cu_seqlens[:1], *cu_seqlens[-1:]] != [0, seq_len]:
        few = ", ".join(map(str, cu_seqlens[:8])) + (", ..." if len(cu_seqlens) > 8 else "")
        raise ContextParallelError(
            f"cu_seqlens needs ascending numbers from 0 to seq_len = {seq_len}, got {few}"
        )
    return tuple(sorted(set(cu_seqlens) - {0, seq_len}))


def random_documents(
    seq_len: int, lengths: Lengths | int, *, multiple: int = 1, seed: int = 0
) -> tuple[int, ...]:
    """`document_starts` of random lengths, the same ones for the same seed; seq_len cuts the last.

    Args: lengths: their distribution; a number: exponential with this mean. multiple: to which
        lengths are rounded up.
    """
    if isinstance(lengths, int):
        lengths = Exponential(lengths)
    source = Random(seed)
    drawn = (ceil(lengths.draw(source) / multiple) * multiple for _ in range(seq_len))
    return tuple(takewhile(lambda start: start < seq_len, accumulate(drawn)))


@dataclass(frozen=True)
class CommonDocument:
    """What two blocks have of a document that reaches into both.

    Attributes: q, kv: positions of its queries and keys. rows, cols: of the blocks before them.
    """

    q: Spans
    kv: Spans
    rows: int
    cols: int


def common_documents(
    q_spans: Spans, kv_spans: Spans, starts: tuple[int, ...]
) -> Iterator[CommonDocument]:
    """What a block of queries and one of keys have of each document that reaches into both.

    Args: q_spans, kv_spans: positions, no span of them empty. starts: of `document_starts`.
    """
    for queries, rows_before, keys, cols_before in _in_order(q_spans, kv_spans):
        of_queries, of_keys = by_document(queries, starts), by_document(keys, starts)
        for number in sorted(of_queries.keys() & of_keys.keys()):
            (rows, q), (cols, kv) = of_queries[number], of_keys[number]
            yield CommonDocument(q, kv, rows_before + rows, cols_before + cols)


def _in_order(q_spans: Spans, kv_spans: Spans) -> Iterator[tuple[Spans, int, Spans, int]]:
    """Parts of the blocks in the order of positions: queries, rows before them, keys, columns
    before them.
    """
    if all(span.step == 1 for span in (*q_spans, *kv_spans)):
        yield q_spans, 0, kv_spans, 0
        return
    rows = 0
    for q in q_spans:
        cols = 0
        for kv in kv_spans:
            yield (q,), rows, (kv,), cols
            cols += len(kv)
        rows += len(q)


@lru_cache(maxsize=1024)  # a block is computed with every other one
def by_document(spans: Spans, starts: tuple[int, ...]) -> dict[int, tuple[int, Spans]]:
    """What a block has of each document: how many rows before it, and its positions.

    Args: spans: none of them empty.
    """
    found: dict[int, tuple[int, Spans]] = {}
    edges = (*starts, spans[-1].stop)
    row = 0
    for span in spans:
        first, number = span.start, bisect_right(starts, span.start)
        while first < span.stop:
            stop = min(span.stop, edges[number])
            part = Span(first, stop, span.step)
            if len(part):  # positions with a step may lie on both sides of a short document
                before, others = found.get(number, (row, ()))
                found[number] = before, (*others, part)
            row, first, number = row + len(part), first + len(part) * span.step, number + 1
    return found
