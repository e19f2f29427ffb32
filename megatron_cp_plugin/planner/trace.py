"""Records what a rank does in an attention layer by running its own code without data.

The executors run as they are, on torch's meta device, where tensors have no storage. So what is
simulated launches, copies, posts and waits as the real thing does, whatever the algorithm.

B batch, S local tokens, H query heads, G KV heads, D head dim, E that of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

from megatron_cp_plugin.core.algorithm import Algorithm, Compiled
from megatron_cp_plugin.core.call import Call
from megatron_cp_plugin.core.communication.devices import register_fused
from megatron_cp_plugin.core.kernel import KernelCall, Packing, Statistics
from megatron_cp_plugin.core.linear.algorithm import (
    LinearAlgorithm,
    LinearCall,
    LinearShape,
    LinearTensors,
)
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.kernel import Cache, LinearInputs
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask, pairs_within
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.planner.call_memory import OnePass, SizesOnly, on_meta
from megatron_cp_plugin.planner.dry_run import DryRunGroup, Post, Wait
from megatron_cp_plugin.planner.linear_sizes import BackwardSizes, ForwardSizes, LinearSizes
from megatron_cp_plugin.planner.machine import Pass
from megatron_cp_plugin.planner.meta import OnMeta, run


class Tile(NamedTuple):
    """An attention kernel.

    Attributes:
        rows, columns: Of a document, in the mean over pairs: harmonic, because what a kernel loses
            is in inverse proportion.
        area: Pairs of a query and a key, for each head.
    """

    phase: Pass
    batch: int
    rows: float
    columns: float
    area: float
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool


class Linear(NamedTuple):
    """A part of a kernel of linear attention."""

    phase: Pass
    flop: float


class Memory(NamedTuple):
    """An operation that is bound by memory. Attributes: name: of torch's operator, or ours."""

    name: str
    bytes: int


Event = Tile | Linear | Memory | Post | Wait


class Trace(NamedTuple):
    """Both passes of one rank."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]


# What is being recorded in this thread, if anything.
_recording: ContextVar[list[Event] | None] = ContextVar("recording", default=None)


def trace_softmax(
    make: Callable[[Topology], Algorithm],
    rank: int,
    nodes: Sequence[int],
    shape: Shape,
    mask: Mask,
    *,
    peer_access: bool,
) -> Trace:
    """What a rank does in both passes.

    Args:
        make: makes the algorithm. nodes: the node of each rank. peer_access: whether the ranks of
            one node reach each other's memory.
    """
    algorithm = make(alone(rank, nodes, peer_access=peer_access))
    algorithm = algorithm.within(mask.followed)
    q, k, v, dout = on_meta(shape, algorithm.layout.length(rank, len(nodes), shape.seq_len))
    compiled = Compiled(algorithm, Call(shape, mask, shape.head_dim**-0.5, _Kernel()))
    with _recorded() as forward:
        saved = compiled.forward.attend(q, k, v)[2]
    with _recorded() as backward:
        compiled.backward().differentiate(dout, saved)
    return Trace(tuple(forward), tuple(backward))


def trace_linear(
    make: Callable[[Topology], LinearAlgorithm],
    rank: int,
    nodes: Sequence[int],
    shape: LinearShape,
    *,
    causal: bool,
) -> Trace:
    """What a rank does in both passes of linear attention. Args: as in `trace_softmax`."""
    algorithm = make(alone(rank, nodes, peer_access=False))
    q, k, v, dout = on_meta(shape, algorithm.layout.length(rank, len(nodes), shape.seq_len))
    call = LinearCall(shape.seq_len, causal, Decay((1.0,) * shape.heads), _LinearKernel())
    with _recorded() as forward:
        saved = algorithm.forward(LinearTensors(q, k, v), call)[2]
    with _recorded() as backward:
        algorithm.backward(dout, None, saved, call)
    return Trace(tuple(forward), tuple(backward))


def alone(rank: int, nodes: Sequence[int], *, peer_access: bool) -> Topology:
    """A rank whose messages are noted. Args: as in `trace_softmax`."""
    return DryRunGroup(rank, nodes, peer_access=peer_access, note=_note)


@contextmanager
def _recorded() -> Iterator[list[Event]]:
    events: list[Event] = []
    register_fused("meta", _Fused)
    token = _recording.set(events)
    try:
        with _Operations(events):
            yield events
    finally:
        _recording.reset(token)
        register_fused("meta", OnePass)


def _note(event: Event) -> None:
    events = _recording.get()
    if events is not None:
        events.append(event)


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


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


# Names of what `_Fused` notes.
FUSED = frozenset(("merge", "sum", "rows", "delta"))


class _Fused(OnePass):
    """Notes merges, sums and row sums, each one pass over memory."""

    def merge_into(
        self, out: Tensor, lse: Tensor, a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor
    ) -> None:
        _note(Memory("merge", sum(map(_bytes, (out, lse, a, a_lse, b, b_lse)))))

    def sum_into(self, out: Tensor, a: Tensor, *others: Tensor) -> None:
        _note(Memory("sum", sum(map(_bytes, (out, a, *others)))))

    def merge_all_into(self, out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> None:
        _note(Memory("merge", sum(map(_bytes, (out, lse, outs, lses)))))

    def merge_rows_into(
        self, out: Tensor, lse: Tensor, to: Tensor, b: Tensor, b_lse: Tensor, of: Tensor | None
    ) -> None:
        share = len(to) / out.shape[1]
        _note(Memory("merge", int(3 * share * (_bytes(out) + _bytes(lse)))))

    def add_rows_into(self, total: Tensor, to: Tensor, b: Tensor, of: Tensor | None) -> None:
        _note(Memory("sum", int(3 * len(to) / total.shape[1] * _bytes(total))))

    def rows_at(self, x: Tensor, rows: Tensor) -> Tensor:
        found = super().rows_at(x, rows)
        _note(Memory("rows", 2 * _bytes(found)))
        return found

    def delta_of(self, dout: Tensor, out: Tensor) -> Tensor:
        _note(Memory("delta", _bytes(dout) + _bytes(out)))
        return super().delta_of(dout, out)


class _Kernel(SizesOnly):
    """Notes tiles."""

    def called(self, call: KernelCall, statistics: Statistics | None) -> None:
        (batch, rows, heads, dim), (columns, kv_heads, value_dim) = call.q.shape, call.v.shape[1:]
        packing = call.packing or Packing.adjacent((0, rows), (0, columns))
        phase: Pass = "forward" if statistics is None else "backward"
        rows, columns = packing.edges[:, 1] - packing.edges[:, 0]
        pairs = pairs_within(rows, columns, call.causal, call.window)
        area = float(pairs.sum())
        # Of a document: harmonic means over pairs. Nothing is seen of empty ones.
        by_row, by_column = (float((pairs / n.clip(1)).sum()) for n in (rows, columns))
        size = (area / by_row, area / by_column) if area else (1.0, 1.0)
        _note(Tile(phase, batch, *size, area, heads, kv_heads, dim, value_dim, call.causal))


def _linear_flop(q: Tensor, v: Tensor) -> float:
    """FLOP of a forward: a product for the state and one for the output of every token."""
    return 4.0 * q.numel() * v.shape[3]


class _LinearForward(ForwardSizes):
    def __init__(self, given: LinearInputs) -> None:
        q, _, v, *_ = given
        self._flop, self._earlier = _linear_flop(q, v), _bytes(q) + 2 * _bytes(v)
        _note(Linear("forward", self._flop / 3))
        super().__init__(given)

    def intra(self) -> None:
        _note(Linear("forward", self._flop * 2 / 3))
        super().intra()

    def finish(self, incoming: Tensor | None) -> tuple[Tensor, Cache]:
        if incoming is not None:
            _note(Memory("earlier tokens", self._earlier))
        return super().finish(incoming)


class _LinearBackward(BackwardSizes):
    def __init__(self, given: LinearInputs, dout: Tensor, cache: Cache) -> None:
        self._flop = _linear_flop(given.q, given.v)
        _note(Linear("backward", self._flop / 3))
        super().__init__(given, dout, cache)

    def intra(self) -> None:
        _note(Linear("backward", self._flop * 2 / 3))
        super().intra()


class _LinearKernel(LinearSizes):
    """Notes the parts of a pass; the state of a run takes a third of it."""

    name = "noted"
    forward, backward = _LinearForward, _LinearBackward
