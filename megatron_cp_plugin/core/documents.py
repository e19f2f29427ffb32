"""Documents that are packed into one sequence: where they begin, and what blocks have of each."""

from collections.abc import Sequence
from itertools import accumulate, pairwise, takewhile
from math import ceil
from random import Random

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


def random_documents(seq_len: int, mean: int) -> tuple[int, ...]:
    """`document_starts` of lengths that are exponentially distributed, always the same ones."""
    source = Random(0)
    lengths = (ceil(source.expovariate(1 / mean)) for _ in range(seq_len))
    return tuple(takewhile(lambda start: start < seq_len, accumulate(lengths)))
