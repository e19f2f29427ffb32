"""What all autograd functions do: dtypes under autocast, and no second derivative."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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


def differentiable_once[R](backward: Callable[..., R]) -> Callable[..., R]:
    """torch's `once_differentiable`, for a backward whose results depend on saved tensors too.

    That one refuses a second derivative only where the gradient that comes in requires one; where
    it does not, as that of a plain sum, the second derivative would silently be zero.

    Limit of both: the refusal hangs on the gradients, which do not lead back to the inputs.
    `loss.backward()` meets it; `torch.autograd.grad(loss, inputs)` does not if something else
    connects the two, and leaves this part of the second derivative out.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *gradients: Tensor | None) -> R:
        if torch.is_grad_enabled():  # create_graph=True
            gradients = tuple(
                x.detach().requires_grad_() if x is not None and x.is_floating_point() else x
                for x in gradients
            )
        return once(ctx, *gradients)

    return call
