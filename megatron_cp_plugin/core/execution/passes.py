"""The forward and backward passes of attention, as `core.execution.execute` runs them.

B batch, S local tokens, H query heads, G KV heads, D head dim, E that of values.
"""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from megatron_cp_plugin.core.algorithm import Call, Gradients, attend_block, differentiate_block
from megatron_cp_plugin.core.blocks.packed_rows import FEW, numbers_of
from megatron_cp_plugin.core.blocks.rows import Piece, Rows, between, common, row_count
from megatron_cp_plugin.core.execution.execute import Packed, Pass, Tensors
from megatron_cp_plugin.core.execution.program import BlockId, Task
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.partial import (
    Accumulator,
    GradientSum,
    SomeRows,
    WholeGradient,
    accumulation_dtype,
)
from megatron_cp_plugin.core.pipeline import HeadGroup
from megatron_cp_plugin.core.plans.plan import Move


class Forward(Pass):
    """Outputs, merged from those of all blocks of keys.

    Attributes: out: [B,S,H,E]. lse: [B,H,S]. Both are there when all heads are closed.
    """

    out: Tensor
    lse: Tensor

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, groups: int) -> None:
        """Args: groups: of heads, of which the plan is."""
        super().__init__(q, k, v)
        self._call = call
        self._placing = groups > 1 or call.places_outputs
        if self._placing:
            batch, tokens, heads, _ = q.shape
            self.out = q.new_empty((batch, tokens, heads, v.shape[3]))
            wide = accumulation_dtype(q.dtype)
            self.lse = q.new_empty((batch, heads, tokens), dtype=wide)
        # Of the own block, by the first head of groups that are not closed.
        self._totals: dict[int, Accumulator] = {}

    def open(self, heads: HeadGroup, sent: frozenset[bool], *, strided: bool) -> None:
        """See Pass.open."""
        copied = frozenset() if strided else sent
        self._queries = _some(heads.q, (self.q,), copied=False in copied)
        self._keys = _some(heads.kv, (self.k, self.v), copied=True in copied)
        place = (self.out, self.lse) if self._placing else None
        if place is not None and heads.heads < self.q.shape[2]:
            place = self.out[:, :, heads.q], self.lse[:, heads.q]
        self._totals[heads.q.start] = Accumulator(self._queries[0], self.v.shape[3], place)
        self._found: dict[int, Accumulator] = {}

    def own(self, of_keys: bool) -> Tensors:
        """See Pass.own."""
        return self._keys if of_keys else self._queries

    def compute(self, task: Task, queries: Tensors | None, keys: Tensors | None) -> None:
        """See Pass.compute."""
        if queries is None:
            total = self._totals[task.heads.q.start]
        else:  # the own ones may be complete by now
            new = Accumulator(queries[0], self.v.shape[3])
            total = self._found.setdefault(task.query[0], new)
        (q,), (k, v) = queries or self._queries, keys or self._keys
        attend_block(total, q, k, v, task.work, self._call)

    def results_for(self, move: Move, held: Rows, before: Packed | None) -> Tensors:
        """See Pass.results_for."""
        total, rows = self._found.pop(move.block.owners[0], None), move.block.rows
        if total is None:
            return _passed_on(before)
        if held != rows:
            found = total.result(accumulation_dtype(self.q.dtype))
            total = Accumulator(_like(self._queries[0], rows), self.v.shape[3])
            for there, partial in _shared(Packed(held, found), rows):
                total.add(there, *partial)
        if before is not None:
            _merge(total, before, rows)
        dtype = accumulation_dtype(self.q.dtype) if move.wide else self.q.dtype
        out, lse = total.result(dtype)
        return out.contiguous(), lse.contiguous()

    def accept(self, move: Move, results: Tensors) -> None:
        """See Pass.accept."""
        own = between(0, self.q.shape[1])
        _merge(self._totals[move.heads.q.start], Packed(move.block.rows, results), own)

    def settle(self) -> None:
        """See Pass.settle."""
        for total in self._totals.values():
            total.settle()

    def close(self, heads: HeadGroup, of_keys: bool, others: Packed | None) -> None:
        """See Pass.close."""
        if of_keys:
            return
        total = self._totals.pop(heads.q.start)
        if others is not None:
            _merge(total, others, between(0, self.q.shape[1]))
        out, lse = total.result()
        if not self._placing:
            self.out, self.lse = out, lse


class Backward(Pass):
    """Gradients, summed over all blocks that meet.

    Attributes: gradients: dq [B,S,H,D], dk [B,S,G,D], dv [B,S,G,E], when all heads are closed.
    """

    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        call: Call,
        *,
        groups: int,
        few: bool,
        retained: Tensors,
    ) -> None:
        """Args:
        groups: of heads, of which the plan is. few: as in `GradientSum`.
        retained: as in `Pass`.
        """
        super().__init__(q, k, v, retained)
        self._few = few
        # A first partial that waits for a sum in float32 would take memory there.
        self._placing = (groups > 1 or few) and call.places_gradients
        self._dout, self._all, self._call = dout, statistics, call
        self._whole = WholeGradient(q), WholeGradient(k), WholeGradient(v)
        # Of the own block, by the first head of groups that are not closed: dq; dk and dv (true).
        self._sums: dict[tuple[int, bool], tuple[GradientSum, ...]] = {}
        self._found: dict[BlockId, tuple[GradientSum, ...]] = {}  # of blocks of other ranks

    def open(self, heads: HeadGroup, sent: frozenset[bool], *, strided: bool) -> None:
        """See Pass.open."""
        copied = frozenset() if strided else sent
        self._keys = _some(heads.kv, (self.k, self.v), copied=True in copied)
        self._queries = _some(heads.q, (self.q, self._dout), copied=False in copied)
        self._statistics = self._all.heads(heads.q)
        if False in sent:
            lse, delta = self._statistics.lse, self._statistics.delta_for(self._queries[1])
            self._queries += (delta, lse)
            self._statistics = Statistics(lse, self._statistics.out, delta)
        own, parts = (self._queries[0], *self._keys), (heads.q, heads.kv, heads.kv)
        dq, dk, dv = [
            GradientSum(
                x, few=self._few, place=partial(whole.place, part) if self._placing else None
            )
            for whole, x, part in zip(self._whole, own, parts, strict=True)
        ]
        self._sums[heads.q.start, False] = (dq,)
        self._sums[heads.q.start, True] = dk, dv

    def own(self, of_keys: bool) -> Tensors:
        """See Pass.own."""
        return self._keys if of_keys else self._queries

    def compute(self, task: Task, queries: Tensors | None, keys: Tensors | None) -> None:
        """See Pass.compute."""
        (q, dout), (k, v), statistics = self._queries[:2], self._keys, self._statistics
        if queries is None:
            (dq,) = self._sums[task.heads.q.start, False]
        else:
            q, dout, delta, lse = queries
            statistics = Statistics(lse, delta=delta)
            (dq,) = self._of_others(task.query, (q,), wanted=self._call.dq)
        if keys is None:
            dk, dv = self._sums[task.heads.q.start, True]
        else:
            k, v = keys
            dk, dv = self._of_others(task.key, (k, v), wanted=self._call.dkv)
        sums = Gradients(dq, dk, dv)
        differentiate_block(sums, dout, q, k, v, statistics, task.work, self._call)

    def _of_others(self, block: BlockId, like: Tensors, *, wanted: bool) -> tuple[GradientSum, ...]:
        """The sums of a block of another rank; kept only if they are wanted there."""
        new = tuple(GradientSum(x, few=self._few) for x in like)
        return self._found.setdefault(block, new) if wanted else new

    def results_for(self, move: Move, held: Rows, before: Packed | None) -> Tensors:
        """See Pass.results_for."""
        sums = self._found.pop((move.block.owners[0], move.of_keys), None)
        rows = move.block.rows
        if sums is None:
            return _passed_on(before)
        dtype = accumulation_dtype(self.q.dtype) if move.wide else self.q.dtype
        if held == rows and (before is None or before.rows == rows):
            others = (None,) * len(sums) if before is None else before.tensors
            return tuple(x.result(dtype, plus=other) for x, other in zip(sums, others, strict=True))
        found = tuple(x.held for x in sums)
        sums = tuple(
            GradientSum(_like(x, rows)) for x in (self._keys if move.of_keys else self._queries[:1])
        )
        _add_gradients(sums, Packed(held, found), rows)
        if before is not None:
            _add_gradients(sums, before, rows)
        return tuple(x.result(dtype) for x in sums)

    def accept(self, move: Move, results: Tensors) -> None:
        """See Pass.accept."""
        sums = self._sums[move.heads.q.start, move.of_keys]
        _add_gradients(sums, Packed(move.block.rows, results), self._own_rows(move.of_keys))

    def close(self, heads: HeadGroup, of_keys: bool, others: Packed | None) -> None:
        """See Pass.close."""
        sums, own = self._sums.pop((heads.q.start, of_keys)), self._own_rows(of_keys)
        wholes = self._whole[1:] if of_keys else self._whole[:1]
        part = heads.kv if of_keys else heads.q
        plus: tuple[Tensor | None, ...] = (None,) * len(sums)
        if others is not None and others.rows == own:
            plus = others.tensors
        elif others is not None:
            _add_gradients(sums, others, own)
        for whole, total, other in zip(wholes, sums, plus, strict=True):
            whole.write(part, total, other)

    def _own_rows(self, of_keys: bool) -> Rows:
        return between(0, (self.k if of_keys else self.q).shape[1])

    @property
    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those of q, k and v."""
        dq, dk, dv = [gradient.whole for gradient in self._whole]
        return dq, dk, dv


def _merge(total: Accumulator, came: Packed, rows: Rows) -> None:
    """Merges a partial that came, which the next one overwrites.

    Args: rows: of the block, of which the total is.
    """
    for there, (out, lse) in _shared(came, rows):
        if total.empty:  # which keeps what it is given
            out, lse = out.clone(), lse.clone()
        total.add(there, out, lse, borrowed=True)


def _add_gradients(sums: tuple[GradientSum, ...], results: Packed, rows: Rows) -> None:
    """Adds gradients of some rows of a block, which the next ones overwrite.

    Args: rows: of the block, of which the sums are.
    """
    for there, gradients in _shared(results, rows):
        for total, gradient in zip(sums, gradients, strict=True):
            total.add(there, gradient.clone() if total.keeps else gradient)


def _shared(here: Packed, rows: Rows) -> Iterator[tuple[SomeRows, Tensors]]:
    """The rows that two packed blocks have: where they are in the second, tensors of the first."""
    pieces = common(here.rows, rows)
    if len(pieces) > FEW:
        yield numbers_of(here.rows, rows, here.tensors[0].device), here.tensors
        return
    for piece in pieces:
        yield piece.there, _part(here.tensors, piece)


def _part(tensors: Tensors, piece: Piece) -> Tensors:
    """Rows of packed tensors [B,S,heads,D], perhaps with [B,H,S], as views."""
    if piece.here.stop - piece.here.start == tensors[0].shape[1]:
        return tensors
    return tuple(x[:, piece.here] if x.dim() == 4 else x[:, :, piece.here] for x in tensors)


def _like(x: Tensor, rows: Rows) -> Tensor:
    """What tells shape and dtype of other rows of [B,S,heads,D], without their memory."""
    return x.new_empty(()).expand(len(x), row_count(rows), *x.shape[2:])


def _passed_on(before: Packed | None) -> Tensors:
    """Results to which the mask lets this rank add nothing."""
    assert before is not None
    return tuple(x.clone() for x in before.tensors)  # the next ones come into the same buffers


def _some(heads: slice, tensors: Tensors, *, copied: bool) -> Tensors:
    """Some heads of [B,S,heads,D]. Args: copied: contiguous, for messages."""
    if heads.stop - heads.start < tensors[0].shape[2]:
        tensors = tuple([x[:, :, heads] for x in tensors])
    return tuple([x.contiguous() for x in tensors]) if copied else tensors
