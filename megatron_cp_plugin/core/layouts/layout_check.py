"""Checks that a rank's tokens match its layout, and recognizes which layout they match instead."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_cp_plugin.core.layout import LAYOUTS, Contiguous, Layout
from megatron_cp_plugin.core.layout import positions as positions_of


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
