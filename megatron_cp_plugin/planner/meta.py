"""Records the operations of a rank in an attention layer by running its code without data.

The executors run as they are, on torch's meta device, where tensors have no storage. So a rank
launches, copies, posts and waits there as on a GPU, with any algorithm.

Each operation is run once for all tensors that are laid out alike: most are written in Python
there and take up to a millisecond, though nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.dry_run import Event, Memory, recording
from megatron_cp_plugin.planner.layer import AnyAlgorithm, passes
from megatron_cp_plugin.planner.sizes import SizesOnly


class _Laid(NamedTuple):
    """How a tensor is laid out."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """One like it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _Other(NamedTuple):
    """An argument that is no tensor. Attributes: kind: True, 1 and 1.0 are different ones."""

    kind: type
    value: Any


class _Effect(NamedTuple):
    """The effect of an operation.

    Attributes:
        made: a tensor of its own; None: something else.
        in_place: it returns its first argument as it was.
        bytes: of all tensors that it takes and returns.
    """

    made: _Laid | None
    in_place: bool
    bytes: int


class OnMeta(TorchDispatchMode):
    """Has subclasses see operations. Nothing of it is to be compiled, so Dynamo is not loaded."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def run_counted(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, int]:
    """The results of an operation, and the bytes of all tensors that it takes and returns.

    Args: as of `__torch_dispatch__`. Tensors on other devices than meta are computed with.
    """
    try:
        keys = _key(args), tuple((name, _key(x)) for name, x in kwargs.items())
    except _ElsewhereError:
        result = func(*args, **kwargs)
        return result, _tree_bytes((args, kwargs, result))
    effect = _effect(func, *keys)
    if effect.made is not None:
        return effect.made.empty(), effect.bytes
    return args[0] if effect.in_place else func(*args, **kwargs), effect.bytes


class _ElsewhereError(Exception):
    """A tensor has values."""


def _key(x: Any) -> Any:
    """Raises: _ElsewhereError for tensors that are not on meta."""
    if isinstance(x, Tensor):
        if not x.is_meta:
            raise _ElsewhereError
        return _Laid(tuple(x.shape), x.stride(), x.dtype)
    if isinstance(x, list | tuple):
        return tuple(map(_key, x))
    return _Other(type(x), x)


def _entry(key: Any) -> Any:
    """The entry of this key."""
    if isinstance(key, _Laid):
        return key.empty()
    return key.value if isinstance(key, _Other) else [_entry(one) for one in key]


# torch's own import its compiler for these on meta, which takes seconds.
_JOINING = torch.ops.aten.cat.default, torch.ops.aten.stack.default


@lru_cache(maxsize=4096)
def _effect(func: OpOverload, args: Any, kwargs: tuple[tuple[str, Any], ...]) -> _Effect:
    """Args: keys."""
    given, named = _entry(args), {name: _entry(key) for name, key in kwargs}
    if func in _JOINING:
        blocks, dim = given[0], given[1] if len(given) > 1 else named.get("dim", 0)
        shape = list(blocks[0].shape)
        if func is torch.ops.aten.stack.default:
            shape.insert(dim % (len(shape) + 1), len(blocks))
        else:
            shape[dim] = sum(block.shape[dim] for block in blocks)
        result = blocks[0].new_empty(shape)
    else:
        result = func(*given, **named)
    size = _tree_bytes((given, named, result))
    if given and result is given[0]:
        return _Effect(None, in_place=_key(result) == args[0], bytes=size)
    own = all(one.alias_info is None for one in func._schema.returns)
    made = _key(result) if own and isinstance(result, Tensor) and result.is_meta else None
    return _Effect(made, in_place=False, bytes=size)


def _tree_bytes(tree: Any) -> int:
    tensors = (x for x in tree_leaves(tree) if isinstance(x, Tensor))
    return sum(x.numel() * x.element_size() for x in tensors)


class Trace(NamedTuple):
    """Both passes of one rank."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]


def trace_of(algorithm: AnyAlgorithm, shape: Shape | LinearShape, mask: Mask) -> Trace:
    """The operations of a rank in both passes.

    Args: algorithm: on a `DryRunGroup`.
    """
    both = passes(algorithm, shape, mask, SizesOnly())
    forward, (*_, saved) = _recorded(both.forward)
    backward, _ = _recorded(lambda: both.backward(saved))
    return Trace(forward, backward)


def _recorded[T](body: Callable[[], T]) -> tuple[tuple[Event, ...], T]:
    events: list[Event] = []
    token = recording.set(events)
    try:
        with _Operations(events):
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

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in self._SILENT:
            return func(*args, **kwargs)
        result, size = run_counted(func, args, kwargs)
        # On meta, empty_like is slow, but it launches nothing either. What begins on the host, of
        # indices and lengths, only a first call does.
        if name != "empty_like" and not _of_host(args):
            self._events.append(Memory(name, size))
        return result


def _of_host(args: Sequence[Any]) -> bool:
    """Whether a tensor among them has values."""
    return any(
        not x.is_meta if isinstance(x, Tensor) else isinstance(x, list | tuple) and _of_host(x)
        for x in args
    )
