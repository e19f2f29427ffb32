"""Compares the ranks' numbers of tokens before messages of those sizes are sent.

Ranks that disagree would wait for messages of other sizes than those that come.
"""

import torch

from megatron_cp_plugin.core.communication.same_calls import compared
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import CommunicationError, ContextParallelError

_KEPT = 4096


def agreed_length(topology: Topology, layout: Layout, tokens: int, seq_len: int | None) -> int:
    """The global length, which all ranks have found to fit what they hold.

    A collective operation at the first call with a seq_len, or without one with a number of tokens;
    later ones send nothing. Without seq_len every call does once there are shards of unequal
    lengths.

    Args:
        layout: within the documents, where it follows them. tokens: that this rank holds. seq_len:
            global, the same on all ranks; None: all ranks hold equally many tokens.

    Raises: ContextParallelError on all ranks, with the same words, if they disagree;
    CommunicationError if another rank does not come.
    """
    size, lengths = topology.size, topology.lengths
    if size == 1:
        return tokens if seq_len is None else seq_len
    # Where seq_len is there, all ranks come here together whatever each of them holds.
    key = tokens if seq_len is None else (layout if seq_len % size else layout.name, seq_len)
    if key in lengths.agreed and not (seq_len is None and lengths.unequal):
        return tokens * size if seq_len is None else seq_len
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ContextParallelError(
            f"a CUDA graph cannot compare the ranks' numbers of tokens, got {tokens} for the first "
            "time while it was captured: make the same call, with seq_len=, once before"
        )
    total = tokens * size if seq_len is None else seq_len
    expected = layout.length(topology.rank, size, total)
    try:
        mine = tokens, expected, seq_len
        held = compared(topology, "numbers of tokens", "one that was made before", mine)
    except CommunicationError as error:
        raise CommunicationError(
            f"{error}; the ranks were comparing their numbers of tokens, {tokens} here: pass "
            "seq_len= if they are unequal"
        ) from error
    lengths.unequal |= len({tokens for tokens, *_ in held}) > 1
    _check(held, layout)
    if len(lengths.agreed) >= _KEPT:
        lengths.agreed.clear()
    lengths.agreed.add(key)
    return total


def _check(held: list[tuple[int, int, int | None]], layout: Layout) -> None:
    """Raises: ContextParallelError unless what all ranks hold, expect and were told fits."""
    size = len(held)
    for rank, (_, _, seq_len) in enumerate(held):
        if seq_len != held[0][2]:
            raise ContextParallelError(
                f"all ranks need one seq_len, got {held[0][2]} on rank 0 and {seq_len} on rank "
                f"{rank}: pass the global length on all"
            )
    first, _, seq_len = held[0]
    for rank, (tokens, expected, _) in enumerate(held):
        if seq_len is None and tokens != first:
            total = sum(tokens for tokens, *_ in held)
            fits = all(layout.length(r, size, total) == held[r][0] for r in range(size))
            advice = f"pass seq_len={total}" if fits else "shard with cp.shard, and pass seq_len="
            raise ContextParallelError(
                f"ranks hold unequally many tokens, got {first} on rank 0 and {tokens} on rank "
                f"{rank}: {advice}"
            )
        if seq_len is not None and tokens != expected:
            raise ContextParallelError(
                f"rank {rank} of {size} holds {expected} of {seq_len} tokens ({layout.name} "
                f"layout), got {tokens}: shard with cp.shard"
            )
