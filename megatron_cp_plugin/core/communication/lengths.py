"""Which tokens ranks hold: remembers how a tensor was split, and compares numbers of tokens before
messages of those sizes are sent.

Ranks that disagree would wait for messages of other sizes than those that come; tokens of another
layout would be taken for those that they are not.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.same_calls import compared
from megatron_cp_plugin.core.layout import Layout, positions
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import CommunicationError, ContextParallelError

_KEPT = 4096


class Cut(NamedTuple):
    """How a tensor was split, as noted on its memory.

    Attributes: layout: within the documents. rank, size: of this part. seq_len: N. stride, tokens:
        of the dimension of tokens. version: of the tensor; changes in place count it up.
    """

    layout: Layout
    rank: int
    size: int
    seq_len: int
    stride: int
    tokens: int
    version: int


def remember(x: Tensor, dim: int, layout: Layout, seq_len: int, topology: Topology) -> None:
    """Notes how a tensor was split, for `check_cut` of it and of its views.

    Args: dim: of tokens. layout: within the documents. seq_len: N.
    """
    with suppress(RuntimeError):  # no version in inference mode, no memory within torch.func
        of_x = x.stride(dim), x.shape[dim], x._version
        cut = Cut(layout, topology.rank, topology.size, seq_len, *of_x)
        x.untyped_storage().cut = cut  # type: ignore[attr-defined]


def check_cut(
    call: str,
    dim: int,
    layout: Layout,
    within: Callable[[int], Layout],
    topology: Topology,
    tensors: Mapping[str, Tensor],
) -> bool:
    """Refuses tensors that are known to be split in another way than a call takes them.

    Known are those that were noted, and their views of the same tokens, until one of them is
    changed in place. Of all others nothing is said.

    Args: call: in words. dim: of tokens. layout: that the call needs; of so many tokens `within`.

    Returns: whether one of them is known to be split so. Raises: ContextParallelError.
    """
    known = False
    for name, x in tensors.items():
        cut: Cut | None = getattr(x.untyped_storage(), "cut", None)
        if cut is None or x._version != cut.version:
            continue
        if x.dim() > dim and x.stride(dim) == cut.stride and x.shape[dim] == cut.tokens:
            needed = within(cut.seq_len) if layout.follows_documents else layout
            if (
                topology.size != cut.size
                or topology.rank != cut.rank
                or (needed is not cut.layout and _differ(needed, cut))
            ):
                raise ContextParallelError(_mismatch(call, name, needed, topology, cut))
            known = True
        elif cut.tokens > 1:
            for other in range(x.dim()):
                if x.stride(other) == cut.stride and x.shape[other] == cut.tokens:
                    raise ContextParallelError(
                        f"{call} takes tokens in dimension {dim} of {name}, got {tuple(x.shape)} "
                        f"with tokens in dimension {other}: give {name}.transpose({dim}, {other})"
                    )
    return known


def _differ(layout: Layout, cut: Cut) -> bool:
    """Whether another layout gives some rank other tokens than a tensor was cut by."""
    if layout == cut.layout:
        return False
    of_all = ((rank, cut.size, cut.seq_len) for rank in range(cut.size))
    return not all(torch.equal(positions(layout, *x), positions(cut.layout, *x)) for x in of_all)


def _mismatch(call: str, name: str, layout: Layout, topology: Topology, cut: Cut) -> str:
    rank, size = topology.rank, topology.size
    if (rank, size) != (cut.rank, cut.size):
        found = f"the part of rank {cut.rank} of {cut.size} on rank {rank} of {size}"
        advice = "group"
    elif layout.name != cut.layout.name:
        found, advice = f"it as cut in the {cut.layout.name} layout", "algo and options"
    else:
        found, advice = "it as cut for other documents or spans", "cu_seqlens and spans"
    return (
        f"{call} needs {name} in the {layout.name} layout, got {found}: give both the same "
        f"{advice}, or use one cp.Context"
    )


def agreed_length(
    topology: Topology,
    layout: Layout,
    tokens: int,
    seq_len: int | None,
    unknown: Tensor | None = None,
) -> int:
    """The global length, which all ranks have found to fit what they hold.

    A collective operation at the first call with a seq_len, or without one with a number of tokens;
    later ones send nothing. Without seq_len every call does once there are shards of unequal
    lengths.

    Args:
        layout: within the documents, where it follows them. tokens: that this rank holds. seq_len:
            global, the same on all ranks; None: all ranks hold equally many tokens.
        unknown: [B,S,H,D], if nobody knows whether it was split: not if all ranks hold the same.

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
        mine = tokens, expected, seq_len, None if seq_len is not None else _content(unknown)
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


def _content(x: Tensor | None) -> int | None:
    """A number of what some elements [B,S,H,D] are; None where all tokens have the same."""
    if x is None or not x.numel():
        return None
    part = x.detach()[0, :, 0, :8].cpu().double()
    return crc32(part.numpy().tobytes()) if bool((part != part[0]).any()) else None


def _check(held: list[tuple[int, int, int | None, int | None]], layout: Layout) -> None:
    """Raises: ContextParallelError unless what all ranks hold, expect and were told fits."""
    size = len(held)
    for rank, (_, _, seq_len, _) in enumerate(held):
        if seq_len != held[0][2]:
            raise ContextParallelError(
                f"all ranks need one seq_len, got {held[0][2]} on rank 0 and {seq_len} on rank "
                f"{rank}: pass the global length on all"
            )
    first, _, seq_len, content = held[0]
    if content is not None and all(of_rank[3] == content for of_rank in held):
        raise ContextParallelError(
            f"ranks need different tokens, got the same {first} on all {size}, as if they were not "
            f"split: shard with cp.shard, or pass seq_len={first * size} if they are"
        )
    for rank, (tokens, expected, _, _) in enumerate(held):
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
