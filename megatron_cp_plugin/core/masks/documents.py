"""Packed documents: validates cu_seqlens and finds where documents start."""

from collections.abc import Sequence
from itertools import pairwise
from operator import index

from megatron_cp_plugin.errors import ContextParallelError, brief


def document_starts(cu_seqlens: Sequence[int], seq_len: int) -> tuple[int, ...]:
    """Where documents other than the first one begin, from cumulative lengths (0, n1, n1 + n2,
    ..., N); empty documents are none.

    Raises: ContextParallelError unless they are whole numbers that ascend from 0 to seq_len.
    """
    try:
        cu_seqlens = list(map(index, cu_seqlens))
    except TypeError:
        raise ContextParallelError(
            f"cu_seqlens needs whole numbers from 0 to seq_len = {seq_len}, got "
            f"{brief(cu_seqlens)}: cast them first, in one dimension"
        ) from None
    descends = any(a > b for a, b in pairwise(cu_seqlens))
    if descends or [*cu_seqlens[:1], *cu_seqlens[-1:]] != [0, seq_len]:
        raise ContextParallelError(
            f"cu_seqlens needs ascending numbers from 0 to seq_len = {seq_len}, got "
            f"{brief(cu_seqlens)}"
        )
    return tuple(sorted(set(cu_seqlens) - {0, seq_len}))
