"""Some rows of a block, packed into one message."""

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.rows import Rows, common, row_count
from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.partial import RowIndex, taken

# Pieces of rows up to which each is taken, or added, by itself; more are in one kernel, by numbers.
FEW = 2


def packed(x: Tensor, dim: int, rows: Rows, held: Rows, *, strided: bool = False) -> Tensor:
    """Some rows of a packed block, one behind the other; x itself if they are all that there are.

    Args: x: the rows `held` of the block, along a dimension. strided: only the last dimension need
        be contiguous, so that rows without gaps are a view.
    """
    if rows == held:
        return x if strided and x.stride(-1) == 1 else x.contiguous()
    parts = [there for _, there in common(rows, held)]
    if len(parts) > FEW:
        return taken(x, dim, numbers_of(rows, held, x.device).to)
    pieces = [x.narrow(dim, part.start, part.stop - part.start) for part in parts]
    if len(pieces) == 1:
        return pieces[0] if strided and pieces[0].stride(-1) == 1 else pieces[0].contiguous()
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0).contiguous()


@kept_on_device(maxsize=64)  # of some micro-batches: they take memory of the device
def numbers_of(here: Rows, there: Rows, device: torch.device) -> RowIndex:
    """The rows that two packed blocks have, by their numbers in the second and in the first."""
    pieces = common(here, there)
    to, of = (
        torch.cat([torch.arange(part.start, part.stop, device="cpu") for part in parts])
        for parts in ([there for _, there in pieces], [here for here, _ in pieces])
    )
    if len(of) == row_count(here):
        return RowIndex(uploaded(to, device))
    to, of = uploaded(torch.stack((to, of)), device)
    return RowIndex(to, of)
