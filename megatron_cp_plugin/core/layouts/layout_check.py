"""Whether a rank's tokens match a layout, by their positions or by how they were split.

Tokens of another layout would be taken for those that they are not.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.layout import LAYOUTS, Contiguous, Layout
from megatron_cp_plugin.core.layout import positions as positions_of
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ContextParallelError


def describe_mismatch(
    positions: Tensor, layout: Layout, rank: int, size: int, seq_len: int
) -> str | None:
    """What is wrong with the tokens that a rank holds; None if they are those of the layout.

    Args:
        positions: global positions of the rank's tokens in their local order, integers [S] or
            [B,S] on any device. layout: within the documents, where it follows them. seq_len:
            global.

    Returns: such as "token 0 is at position 128, expected 64: these are the tokens of rank 1 in
    the contiguous layout".
    """
    whole = not (positions.is_floating_point() or positions.is_complex())
    if positions.dim() not in (1, 2) or not whole or positions.dtype == torch.bool:
        return f"positions need integers [S] or [B,S], got {positions.dtype} {[*positions.shape]}"
    expected = positions_of(layout, rank, size, seq_len)
    rows = torch.atleast_2d(positions.detach().cpu())
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
    """What positions [S] are instead, as the end of a sentence; "" where nobody can tell."""
    for name, candidate, rank, ranks in _candidates(layout, size):
        if len(row) == candidate.length(rank, ranks, seq_len) and torch.equal(
            row, positions_of(candidate, rank, ranks, seq_len)
        ):
            return f": these are {name}"
    if torch.equal(row.sort().values, expected):
        return ": these are the right tokens in another order"
    if bool(((row[1:] <= row[:-1]) & (row[1:] == 0)).any()):
        return ": they begin again at 0, but positions count through the whole sequence"
    return ""


def _candidates(layout: Layout, size: int) -> Iterator[tuple[str, Layout, int, int]]:
    """Description, layout, rank and number of ranks of what a rank may hold by mistake."""
    yield "all tokens, not split", Contiguous(), 0, 1
    others = (other for other in LAYOUTS.values() if other.name != layout.name)
    for candidate in (layout, *others):
        for rank in range(size):
            yield f"the tokens of rank {rank} in the {candidate.name} layout", candidate, rank, size


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
    return not all(
        torch.equal(positions_of(layout, *x), positions_of(cut.layout, *x)) for x in of_all
    )


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
