"""torch.autocast for attention, as in torch's own scaled_dot_product_attention."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_AS_IT_IS = nullcontext()


def cast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one device, in autocast's dtype where it is in force there; float64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def as_written(device: torch.device) -> AbstractContextManager[object]:
    """Within this context operations compute in the dtypes that they are given.

    Sums and statistics are float32 for a reason, and backward may run under autocast too.
    """
    if not torch.is_autocast_enabled(device.type):
        return _AS_IT_IS
    return torch.autocast(device.type, enabled=False)
