"""Reads the arguments of the functional interface, or refuses them in one line."""

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, SupportsFloat, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from megatron_cp_plugin.core.layout import Documents, document_starts
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.errors import ConfigError, ContextParallelError, brief, whole_number

# As `functional.attention` takes them.
SpanMask = Iterable[Sequence[object]] | Tensor

_LONGEST = 2**48  # tokens; products of two of them, and of bytes, stay within 64 bits


def check_tensors(function: str | None = None, /, **given: object) -> None:
    """Raises: ContextParallelError unless all are plain tensors with elements; None is accepted
    where a name ends in `_or_none`, which the error leaves out.

    Args: function: refuses transformations, which would run messages once for many ranks' calls:
        torch.func's vmap, grad, jvp and the like, and forward-mode differentiation.
    """
    module: Any = sys.modules.get("torch.distributed.tensor")  # else there are no DTensors
    for key, value in given.items():
        name = key.removesuffix("_or_none")
        if value is None and name != key:
            continue
        if not isinstance(value, Tensor):
            raise ContextParallelError(f"{name} needs a tensor, got {brief(value)}")
        if module is not None and isinstance(value, module.DTensor):
            raise ContextParallelError(
                f"{name} needs this rank's part as a plain tensor, got a DTensor: give its "
                "to_local()"
            )
        if value.layout != torch.strided:
            raise ContextParallelError(
                f"{name} needs a dense tensor, got {value.layout}: give its to_dense()"
            )
        if name == next(iter(given)) and value.is_meta:  # others are compared with the first one
            raise ContextParallelError(f"{name} needs elements, got a tensor on the meta device")
        if function is None:
            continue
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise ContextParallelError(
                f"{function} cannot be transformed by torch.func (vmap, grad, jvp), got a tensor "
                "of such a function: use a batch dimension, and loss.backward()"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
            raise ContextParallelError(
                f"{function} has no derivative in forward mode, got a dual tensor: use "
                "loss.backward()"
            )


def process_group(name: str, value: object) -> dist.ProcessGroup | None:
    """Raises: ContextParallelError unless it is None, or a process group."""
    if not isinstance(value, dist.ProcessGroup | None):
        raise ContextParallelError(f"{name} needs a process group, got {brief(value)}")
    return value


def word(name: str, value: object) -> str:
    """Raises: ContextParallelError unless it is a string."""
    if not isinstance(value, str):
        raise ContextParallelError(f"{name} needs a name, got {brief(value)}: leave it out")
    return value


def flag(name: str, value: object) -> bool:
    """Raises: ContextParallelError unless it is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ContextParallelError(f"{name} needs True or False, got {brief(value)}")
    return bool(value)


def fixed_number(name: str, value: object) -> float | None:
    """Raises: ContextParallelError unless it is None, or a number without a gradient."""
    if isinstance(value, Tensor) and value.requires_grad:
        raise ContextParallelError(
            f"{name} is not differentiable, got a tensor that requires grad: multiply q by it"
        )
    if value is None:
        return None
    if isinstance(value, SupportsFloat) and not isinstance(value, bool):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):  # of several numbers
            return float(value)
    raise ContextParallelError(f"{name} needs a number, got {brief(value)}")


def length(name: str, value: object) -> int | None:
    """Raises: ContextParallelError unless it is None, or a number of tokens."""
    if value is None:
        return None
    number = whole_number(name, value)
    if not 0 <= number < _LONGEST:
        raise ContextParallelError(f"{name} needs a number of tokens, got {brief(number)}")
    return number


def dimension(x: Tensor, value: object) -> int:
    """Which dimension of a tensor, counted from 0. Raises: ContextParallelError if it has none."""
    dim = whole_number("dim", value)
    if not -x.dim() <= dim < x.dim():
        raise ContextParallelError(
            f"dim needs to be one of the {x.dim()} dimensions of x {list(x.shape)}, got "
            f"{brief(dim)}"
        )
    return dim % x.dim()


def as_numbers(name: str, given: Any) -> Any:
    """Numbers that can be read more than once: a tensor's as lists, which waits for a GPU.

    Raises: ContextParallelError for values without an order, or without elements.
    """
    if given is None:
        return None
    if isinstance(given, Tensor):
        check_tensors(**{name: given})
        return given.tolist()
    if isinstance(given, str | bytes | Mapping | Set):
        raise ContextParallelError(
            f"{name} needs numbers in order, as a list or a tensor, got {brief(given)}"
        )
    return list(given) if isinstance(given, Iterator) else given


def chosen(options: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """Options in one order. Raises: ConfigError for a value that none has."""
    for name, value in options.items():
        if isinstance(value, Tensor) or not isinstance(value, Hashable):
            raise ConfigError(f"option {name} needs a number or a word, got {brief(value)}")
    return tuple(sorted(options.items()))


def documents_of(
    cu_seqlens: Sequence[int] | Tensor | None, spans: SpanMask | None, seq_len: int
) -> Documents:
    """The documents or spans of a sequence, from numbers that `as_numbers` has read."""
    documents: tuple[int, ...] = ()
    if cu_seqlens is not None:
        documents = document_starts(cast(Sequence[int], cu_seqlens), seq_len)
    if spans is None:
        return documents
    return Slices.of(cast(Iterable[Sequence[object]], spans), seq_len, documents)
