"""Records the operations of a rank in an attention layer by running its code without data.

The executors run as they are, on torch's meta device, where tensors have no storage. So a rank
launches, copies, posts and waits there as on a GPU, with any algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.dry_run import Event, Memory, note, recording
from megatron_cp_plugin.planner.layer import AnyAlgorithm, AnyShape, passes
from megatron_cp_plugin.planner.sizes import SizesOnly


class OnMeta(TorchDispatchMode):
    """Has subclasses see operations. Nothing of it is to be compiled, so Dynamo is not loaded."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# torch's own import its compiler for these on meta, which takes seconds.
_JOINING = torch.ops.aten.cat.default, torch.ops.aten.stack.default


def run_on_meta(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The results of an operation. Args: as of `__torch_dispatch__`."""
    if func not in _JOINING or not args[0][0].is_meta:
        return func(*args, **kwargs)
    blocks, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    shape = list(blocks[0].shape)
    if func is torch.ops.aten.stack.default:
        shape.insert(dim % (len(shape) + 1), len(blocks))
    else:
        shape[dim] = sum(block.shape[dim] for block in blocks)
    return blocks[0].new_empty(shape)


class Trace(NamedTuple):
    """Both passes of one rank."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]


def trace_of(algorithm: AnyAlgorithm, shape: AnyShape, mask: Mask) -> Trace:
    """The operations of a rank in both passes. Args: algorithm: on a `DryRunGroup`."""
    both = passes(algorithm, shape, mask, SizesOnly())
    forward, (*_, saved) = _recorded(both.forward)
    backward, _ = _recorded(lambda: both.backward(saved))
    return Trace(forward, backward)


def _recorded[T](body: Callable[[], T]) -> tuple[tuple[Event, ...], T]:
    events: list[Event] = []
    token = recording.set(events)
    try:
        with _Operations():
            found = body()
    finally:
        recording.reset(token)
    return tuple(events), found


class _Operations(OnMeta):
    """Notes torch's own operations that read or write memory."""

    # Makes a tensor, or a view of one, and launches nothing.
    _SILENT = frozenset(
        {"empty", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
        | {"detach", "alias", "view", "slice", "select", "expand", "transpose", "permute", "t"}
        | {"unsqueeze", "squeeze", "split", "split_with_sizes", "unbind", "as_strided", "unfold"}
        | {"_unsafe_view", "_reshape_alias"}
    )
    _OVERWRITING = frozenset({"copy_", "fill_", "zero_"})  # do not read their first argument

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in self._SILENT:
            return func(*args, **kwargs)
        result = run_on_meta(func, args, kwargs)
        # On meta, empty_like is slow, but it launches nothing either. What begins on the host, of
        # indices and lengths, only a first call does.
        if name != "empty_like" and not _of_host(args):
            read = args[1:] if name in self._OVERWRITING else args
            note(Memory(name, _bytes_of((read, tuple(kwargs.values()), result))))
        return result


def _bytes_of(x: Any) -> int:
    """Bytes of all tensors in it."""
    if isinstance(x, Tensor):
        return x.nbytes
    return sum(map(_bytes_of, x)) if isinstance(x, list | tuple) else 0


def _of_host(args: Sequence[Any]) -> bool:
    """Whether a tensor among them has values."""
    return any(
        not x.is_meta if isinstance(x, Tensor) else isinstance(x, list | tuple) and _of_host(x)
        for x in args
    )
