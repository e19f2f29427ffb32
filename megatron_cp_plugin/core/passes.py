"""The forward and the backward of attention, as `core.execute` goes through them.

B batch, S local tokens, H query heads, G KV heads, D head dim, E that of values.
"""

from torch import Tensor

from megatron_cp_plugin.core.algorithm import Call, Gradients, attend_block, differentiate_block
from megatron_cp_plugin.core.execute import Pass, Tensors
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.partial import (
    Accumulator,
    GradientSum,
    WholeGradient,
    accumulation_dtype,
)
from megatron_cp_plugin.core.pipeline import HeadGroup
from megatron_cp_plugin.core.plan import Move
from megatron_cp_plugin.core.program import BlockId, Task


class Forward(Pass):
    """Outputs, merged from those of all blocks of keys.

    Attributes: out: [B,S,H,E]. lse: [B,H,S]. Both are there when all heads are closed.
    """

    out: Tensor
    lse: Tensor

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, groups: int) -> None:
        """Args: groups: of heads, of which the plan is."""
        super().__init__(q, k, v)
        self._call, self._groups = call, groups
        if groups > 1:
            batch, tokens, heads, _ = q.shape
            self.out = q.new_empty((batch, tokens, heads, v.shape[3]))
            wide = accumulation_dtype(q.dtype)
            self.lse = q.new_empty((batch, heads, tokens), dtype=wide)

    def open(self, heads: HeadGroup, sent: frozenset[bool]) -> None:
        """See Pass.open."""
        self._queries = _some(heads.q, (self.q,), copied=False in sent)
        self._keys = _some(heads.kv, (self.k, self.v), copied=True in sent)
        self._total = Accumulator(self._queries[0], self.v.shape[3])
        self._found: dict[int, Accumulator] = {}

    def own(self, of_keys: bool) -> Tensors:
        """See Pass.own."""
        return self._keys if of_keys else self._queries

    def compute(self, task: Task, queries: Tensors | None, keys: Tensors | None) -> None:
        """See Pass.compute."""
        total = self._total
        if queries is not None:
            new = Accumulator(queries[0], self.v.shape[3])
            total = self._found.setdefault(task.query[0], new)
        (q,), (k, v) = queries or self._queries, keys or self._keys
        attend_block(total, q, k, v, task.tiles, self._call)

    def results_for(self, move: Move, before: Tensors | None) -> Tensors:
        """See Pass.results_for."""
        assert before is None  # partial outputs go straight to their owners
        out, lse = self._found.pop(move.block.owners[0]).result()
        return out.contiguous(), lse.contiguous()

    def accept(self, move: Move, results: Tensors) -> None:
        """See Pass.accept."""
        out, lse = results
        if self._total.empty:  # which keeps what it is given, and these are buffers for messages
            out, lse = out.clone(), lse.clone()
        self._total.add(slice(move.block.start, move.block.stop), out, lse)

    def close(self, heads: HeadGroup, of_keys: bool, others: Tensors | None) -> None:
        """See Pass.close."""
        if of_keys:
            return
        out, lse = self._total.result()
        if self._groups == 1:
            self.out, self.lse = out, lse
        else:
            self.out[:, :, heads.q] = out
            self.lse[:, heads.q] = lse
        del self._total, self._queries, self._keys


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
        few: bool,
    ) -> None:
        """Args: few: as in `GradientSum`, of the own queries."""
        super().__init__(q, k, v)
        self._few = few
        self._dout, self._all, self._call = dout, statistics, call
        self._whole = WholeGradient(q), WholeGradient(k), WholeGradient(v)
        # Of the own block, by the first head of groups that are not closed: dq; dk and dv (true).
        self._sums: dict[tuple[int, bool], tuple[GradientSum, ...]] = {}
        self._found: dict[BlockId, tuple[GradientSum, ...]] = {}  # of blocks of other ranks

    def open(self, heads: HeadGroup, sent: frozenset[bool]) -> None:
        """See Pass.open."""
        self._keys = _some(heads.kv, (self.k, self.v), copied=True in sent)
        self._queries = _some(heads.q, (self.q, self._dout), copied=False in sent)
        self._statistics = self._all.heads(heads.q)
        if False in sent:
            lse, delta = self._statistics.lse, self._statistics.delta_for(self._queries[1])
            self._queries += (delta, lse)
            self._statistics = Statistics(lse, self._statistics.out, delta)
        self._sums[heads.q.start, False] = (GradientSum(self._queries[0], few=self._few),)
        self._sums[heads.q.start, True] = tuple(map(GradientSum, self._keys))

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
        differentiate_block(sums, dout, q, k, v, statistics, task.tiles, self._call)

    def _of_others(self, block: BlockId, like: Tensors, *, wanted: bool) -> tuple[GradientSum, ...]:
        """The sums of a block of another rank; kept only if they are wanted there."""
        new = tuple(map(GradientSum, like))
        return self._found.setdefault(block, new) if wanted else new

    def results_for(self, move: Move, before: Tensors | None) -> Tensors:
        """See Pass.results_for."""
        sums = self._found.pop((move.block.owners[0], move.of_keys), None)
        if sums is None:  # the mask lets this rank add nothing
            assert before is not None
            return tuple(x.clone() for x in before)  # the next ones come into the same buffers
        dtype = accumulation_dtype(self.q.dtype) if move.wide else self.q.dtype
        others = before or (None,) * len(sums)
        return tuple(x.result(dtype, plus=other) for x, other in zip(sums, others, strict=True))

    def accept(self, move: Move, results: Tensors) -> None:
        """See Pass.accept."""
        rows = slice(move.block.start, move.block.stop)
        for total, result in zip(
            self._sums[move.heads.q.start, move.of_keys], results, strict=True
        ):
            total.add(rows, result.clone() if total.empty else result)

    def close(self, heads: HeadGroup, of_keys: bool, others: Tensors | None) -> None:
        """See Pass.close."""
        sums = self._sums.pop((heads.q.start, of_keys))
        wholes = self._whole[1:] if of_keys else self._whole[:1]
        part = heads.kv if of_keys else heads.q
        for whole, total, other in zip(wholes, sums, others or (None,) * len(sums), strict=True):
            whole.write(part, total, other)

    @property
    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those of q, k and v."""
        dq, dk, dv = (gradient.whole for gradient in self._whole)
        return dq, dk, dv


def _some(heads: slice, tensors: Tensors, *, copied: bool) -> Tensors:
    """Some heads of [B,S,heads,D]. Args: copied: contiguous, for messages."""
    parts = (x[:, :, heads] for x in tensors)
    return tuple(x.contiguous() if copied else x for x in parts)
