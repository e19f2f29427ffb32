"""Kernels and fused operations that compute nothing: they make their results, and are noted.

B batch, S local tokens, H query heads, G KV heads, D head dim, E head dim of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.kernel import KernelCall, Packing, SoftmaxKernel, Statistics
from megatron_cp_plugin.core.linear.kernel import (
    Cache,
    Gradients,
    LinearInputs,
    LinearKernel,
    Running,
)
from megatron_cp_plugin.core.linear.states import NO_GATES, Runs
from megatron_cp_plugin.core.partial import Term, accumulation_dtype, register_fused
from megatron_cp_plugin.core.ranges import row_count, union
from megatron_cp_plugin.core.tiles import pairs_within
from megatron_cp_plugin.kernels.fla import CHUNK, segments_of
from megatron_cp_plugin.planner.dry_run import Linear, Memory, RecordedKernel, note, recording


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


class SizesOnly(SoftmaxKernel):
    """Makes the results of a kernel, of tensors without storage."""

    name = "sizes"
    rectangular_causal = windows = packs = gaps = True
    places_outputs = places_gradients = True

    def called(self, call: KernelCall, statistics: Statistics | None) -> None:
        """Notes a call, or makes what it allocates beside its results.

        Args: statistics: None in a forward.
        """
        if recording.get() is None:
            return
        (batch, rows, heads, dim), (columns, kv_heads, value_dim) = call.q.shape, call.v.shape[1:]
        packing = call.packing or Packing.adjacent((0, rows), (0, columns))
        phase: Phase = "forward" if statistics is None else "backward"
        rows, columns = packing.edges[:, 1] - packing.edges[:, 0]
        pairs = pairs_within(rows, columns, call.causal, call.window)
        area = float(pairs.sum())
        # Of a document: harmonic means over pairs. Nothing is seen of empty ones.
        of_rows, of_columns = pairs / rows.clip(1), pairs / columns.clip(1)
        if call.causal and call.window:  # another edge of the mask, where a kernel loses as much
            of_rows = (rows + (columns - call.window).clip(0)) / 2
        by_row, by_column = float(of_rows.sum()), float(of_columns.sum())
        size = (area / by_row, area / by_column) if area else (1.0, 1.0)
        dims = heads, kv_heads, dim, value_dim
        packed = len(packing) > 1
        note(RecordedKernel(phase, batch, *size, area, *dims, call.causal, packed))

    def unsupported(self, problem: object) -> str | None:
        return None

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        q, v = call.q, call.v
        if call.into is None:
            batch, tokens, heads, _ = q.shape
            out = q.new_empty((batch, tokens, heads, v.shape[3]))
            lse = q.new_empty((batch, heads, tokens), dtype=accumulation_dtype(q.dtype))
        else:
            out, lse = call.into
        self.called(call, None)
        return out, lse

    def backward(
        self, call: KernelCall, dout: Tensor, statistics: Statistics
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = call.into or [x.new_empty(x.shape) for x in (call.q, call.k, call.v)]
        self.called(call, statistics)
        return dq, dk, dv


class SizesWithin(SizesOnly):
    """With the memory that a kernel takes within."""

    def __init__(self, kernel: SoftmaxKernel) -> None:
        self.rectangular_causal, self.windows = kernel.rectangular_causal, kernel.windows
        self.packs, self.gaps = kernel.packs, kernel.gaps
        self.places_outputs = kernel.places_outputs
        self.places_gradients = kernel.places_gradients
        self._kernel = kernel

    def called(self, call: KernelCall, statistics: Statistics | None) -> None:
        call.q.new_empty(self._kernel.workspace(call, statistics), dtype=torch.uint8)


_InPlace = Callable[..., None]


def _noted(name: str, size: Callable[..., int]) -> _InPlace:
    """An operation without results of its own. Args: size: bytes that it reads and writes."""

    def operation(self: object, *args: Tensor) -> None:
        note(Memory(name, size(*args)))

    return operation


class OnePass:
    """Merges, sums and row sums as they are on GPUs: each one pass over memory, of which they take
    none beside their results.
    """

    merge_into: _InPlace = _noted("merge", _bytes)
    merge_all_into: _InPlace = _noted("merge", _bytes)
    merge_rows_into: _InPlace = _noted(
        "merge", lambda out, lse, to, *_: int(3 * len(to) / out.shape[1] * _bytes(out, lse))
    )
    add_rows_into: _InPlace = _noted(
        "sum", lambda total, to, *_: int(3 * len(to) / total.shape[1] * _bytes(total))
    )

    def sum_rows(self, outs: Sequence[Tensor], terms: Sequence[Term], *, in_place: bool) -> None:
        written = _bytes(*outs)
        if in_place:
            some = union([((rows.start, rows.stop),) for rows, _ in terms])
            written = 2 * written * row_count(some) // outs[0].shape[1]
        note(Memory("sum", written + _bytes(*chain(*[tensors for _, tensors in terms]))))

    def write_rows(self, out: Tensor, to: Tensor, x: Tensor) -> None:
        note(Memory("rows", 2 * _bytes(x)))

    def rows_at(self, x: Tensor, rows: Tensor) -> Tensor:
        found = x.new_empty((x.shape[0], len(rows), *x.shape[2:]))
        note(Memory("rows", 2 * _bytes(found)))
        return found

    def delta_of(self, dout: Tensor, out: Tensor) -> Tensor:
        batch, tokens, heads, _ = out.shape
        note(Memory("delta", _bytes(dout, out)))
        return out.new_empty((batch, heads, tokens), dtype=torch.float32)

    def placeholder_out(self, dout: Tensor, delta: Tensor) -> Tensor:
        return torch.empty_like(dout)

    def passed_along(self, added: Tensor, *others: Any) -> Tensor:
        *_, begins = others
        return added.new_empty((len(begins), *added.shape[1:]))


register_fused("meta", OnePass)


# ---- linear attention, with the shapes of fla's kernels


def _states(q: Tensor, v: Tensor, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """As many for each batch entry."""
    batch, _, heads, dim = q.shape
    shape = (count, batch, heads, dim, v.shape[3])
    return q.new_empty(shape, dtype=dtype or accumulation_dtype(q.dtype))


def _flop(q: Tensor, v: Tensor) -> float:
    """Of a pass: a product for the state and one for the output of every token."""
    return 4.0 * q.numel() * v.shape[3]


def _segment_count(q: Tensor, runs: Runs) -> int:
    """Of a batch entry, whose runs are one document each."""
    batch, tokens, heads, _ = q.shape
    return len(runs) * segments_of(tokens // len(runs), batch * tokens, heads)


class LinearSizes(LinearKernel):
    """Computes nothing; the state of a run takes a third of a pass."""

    name = "sizes"

    def unsupported(self, problem: object) -> str | None:
        return None

    def forward(self, given: LinearInputs) -> Running[tuple[Tensor, Cache]]:
        q, _, v, _, runs = given
        note(Linear("forward", _flop(q, v) / 3))
        segments = _segment_count(q, runs)
        living = [_states(q, v, segments)]  # as long as the pass

        def intra() -> None:
            note(Linear("forward", _flop(q, v) * 2 / 3))
            living.extend((_states(q, v, segments), torch.empty_like(v)))

        def finish(incoming: Tensor | None) -> tuple[Tensor, Cache]:
            if incoming is not None:
                note(Memory("earlier tokens", _bytes(q, v, v)))
                living[1] = _states(q, v, segments)
            return living[2], (living[1],)

        return Running(_states(q, v, len(runs)), intra, finish)

    def backward(self, given: LinearInputs, dout: Tensor, cache: Cache) -> Running[Gradients]:
        q, k, v, _, runs = given
        note(Linear("backward", _flop(q, v) / 3))
        segments = _segment_count(q, runs)
        living = [_states(q, v, segments)]

        def of_chunks() -> Tensor:
            count = len(runs)
            return _states(q, v, count * -(-q.shape[1] // count // CHUNK), q.dtype)

        def intra() -> None:
            note(Linear("backward", _flop(q, v) * 2 / 3))
            living.append(of_chunks())

        def finish(doutgoing: Tensor | None) -> Gradients:
            dends, dafter_chunks = _states(q, v, segments), of_chunks()
            dq, dk = torch.empty_like(q), torch.empty_like(k)
            living.pop()
            dv = torch.empty_like(v)
            del dends, dafter_chunks
            return dq, dk, dv, NO_GATES

        return Running(_states(q, v, len(runs)), intra, finish)
