"""Records what a rank does in an attention layer by running its own code without data.

The executors run as they are, on torch's meta device, where tensors have no storage. So what is
simulated launches, copies, posts and waits as the real thing does, whatever the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.dry_run import Event, Memory, recording
from megatron_cp_plugin.planner.layer import AnyAlgorithm, passes
from megatron_cp_plugin.planner.meta import OnMeta, run
from megatron_cp_plugin.planner.sizes import SizesOnly


class Trace(NamedTuple):
    """Both passes of one rank."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]


def trace_of(algorithm: AnyAlgorithm, shape: Shape | LinearShape, mask: Mask) -> Trace:
    """What a rank does in both passes. Args: algorithm: on a `DryRunGroup`."""
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
        result, size = run(func, args, kwargs)
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
