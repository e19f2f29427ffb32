"""The two passes of attention: their computations in a step, and their sums.

The forward merges partial outputs of pairs of blocks, the backward adds partial gradients.

B batch, S local tokens, T tokens of a base block, H query heads, G KV heads, D head dim, E that of
values.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.assembly import FEW, numbers_of, packed, token_dim
from megatron_cp_plugin.core.call import Call, HeadGroup
from megatron_cp_plugin.core.execution.loop import Packed, Pass, RankPart, Targets
from megatron_cp_plugin.core.execution.program import BlockId, Message, Round, Step, Task
from megatron_cp_plugin.core.execution.team import Completions, Named, Tensors
from megatron_cp_plugin.core.kernel import KernelCall, Statistics
from megatron_cp_plugin.core.masks.tile_batches import Batch
from megatron_cp_plugin.core.partial import (
    Accumulator,
    GradientSum,
    Partial,
    SomeRows,
    WholeGradient,
    accumulation_dtype,
    part_of,
    rows_at,
)
from megatron_cp_plugin.core.plans.plan import KEYS, QUERIES, Side
from megatron_cp_plugin.core.ranges import Rows, between, common, row_count
from megatron_cp_plugin.core.tiles import Tile


def attend_block(
    total: Accumulator, q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Tile | Batch], call: Call
) -> None:
    """Adds attention of queries over keys to `total`.

    Args:
        q: [B,rows,H,D].
        k: [B,cols,G,D].
        v: [B,cols,G,E].
        calls: kernel calls of the block: tiles, or as `packed_calls` gives them.
    """
    kernel, scale = call.kernel, call.scale
    for each in calls:
        if isinstance(each, Batch):
            queries, keys = each.sides(q.device)
            (rows,) = queries.given
            taken = rows_at(q, queries.taken), rows_at(k, keys.taken), rows_at(v, keys.taken)
            several = KernelCall(*taken, scale, each.causal, each.packing, window=each.window)
            total.add(rows, *kernel.forward(several))
            continue
        tile_q, tile_k, tile_v = q, k, v
        if each.rows < q.shape[1]:
            tile_q = q[:, each.q]
        if each.cols < k.shape[1]:
            tile_k, tile_v = k[:, each.kv], v[:, each.kv]
        if each.reverse:
            flipped = tile_q.flip(1), tile_k.flip(1), tile_v.flip(1)
            out, lse = kernel.forward(KernelCall(*flipped, scale, each.causal))
            total.add(each.q, out.flip(1), lse.flip(2))
            continue
        place = None
        if total.empty and call.places_outputs:
            place = total.place_of_first(each.rows)
        tile = KernelCall(tile_q, tile_k, tile_v, scale, each.causal, None, place, each.window)
        found = kernel.forward(tile)
        total.add(each.q, *found)
        del found, tile


# The heads' slice in the base block, and the sum of their gradients.
_OpenSum = tuple[slice | None, GradientSum]


class Gradients(NamedTuple):
    """Running sums of dq of one block of queries, and of dk and dv of one block of keys."""

    dq: GradientSum
    dkv: GradientSum

    def places(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Memory into which the kernel writes the gradients of a tile's q, k and v: the first
        gradients of a block go to the memory of its sum, later ones to new memory. None: none is
        the first of its block.
        """
        of_q, side = self.dq.place_of_first(q.shape[1]), self.dkv.place_of_first(k.shape[1])
        if of_q is None and side is None:
            return None
        (dq,) = of_q or (q.new_empty(q.shape),)
        dk, dv = side or (k.new_empty(k.shape), v.new_empty(v.shape))
        return dq, dk, dv


def differentiate_block(
    sums: Gradients,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Statistics,
    calls: Sequence[Tile | Batch],
    call: Call,
) -> None:
    """Adds the gradients of a block's q, k and v to `sums`; see `attend_block` for the shapes.

    Args: statistics: lse, with delta or out, of all rows of q.
    """
    kernel, scale = call.kernel, call.scale
    for each in calls:
        if isinstance(each, Batch):
            queries, keys = each.sides(q.device)
            taken = rows_at(q, queries.taken), rows_at(k, keys.taken), rows_at(v, keys.taken)
            several = KernelCall(*taken, scale, each.causal, each.packing, window=each.window)
            of_rows = rows_at(dout, queries.taken), statistics.rows(queries.taken)
            dq, dk, dv = kernel.backward(several, *of_rows)
            del taken, several, of_rows
            for rows in queries.given:
                sums.dq.add(rows, dq)
            for cols in keys.given:
                sums.dkv.add(cols, dk, dv)
            continue
        tile_dout, tile_q, tile_k, tile_v, of_tile = dout, q, k, v, statistics
        if each.rows < q.shape[1]:
            tile_dout, tile_q, of_tile = dout[:, each.q], q[:, each.q], statistics.rows(each.q)
        if each.cols < k.shape[1]:
            tile_k, tile_v = k[:, each.kv], v[:, each.kv]
        if each.reverse:
            flipped = tile_q.flip(1), tile_k.flip(1), tile_v.flip(1)
            tile = KernelCall(*flipped, scale, each.causal)
            found = kernel.backward(tile, tile_dout.flip(1), of_tile.flipped())
            dq, dk, dv = [x.flip(1) for x in found]
        else:
            tile = KernelCall(tile_q, tile_k, tile_v, scale, each.causal, window=each.window)
            if call.places_gradients and (sums.dq.placing or sums.dkv.placing):
                tile = tile._replace(into=sums.places(tile_q, tile_k, tile_v))
            dq, dk, dv = kernel.backward(tile, tile_dout, of_tile)
        sums.dq.add(each.q, dq)
        sums.dkv.add(each.kv, dk, dv)


class _Summing[S: Accumulator | GradientSum](Pass):
    """What both passes do with sums for other ranks' blocks."""

    _found: dict[BlockId, S]

    @abstractmethod
    def sum_of(self, side: Side, rows: Rows) -> S:
        """A new sum of results for some rows of a block."""

    def results_for(self, message: Message, before: Packed | None) -> Tensors:
        move, block, _ = message
        rows, dtype = move.block.rows, self._wide if move.wide else self.q.dtype
        total: S | None = None
        parts: list[Packed] = []
        if block in self._program.joined:
            parts = self._from_joints(block, dtype)
            if len(parts) == 1 and parts[0].rows == rows:
                return parts[0].tensors
        else:
            total = self._found.pop(block, None)
            if total is None:  # the mask leaves this rank nothing to add to the sum that came
                assert before is not None
                return tuple([x.clone() for x in before.tensors]) if self.lent else before.tensors
            held = self._program.rows[block]
            if held != rows:
                parts = [Packed(held, tuple(total.held))]
                total = None
        if total is None:
            total = self.sum_of(block[1], rows)
            for each in parts:
                _add(total, each, rows, lent=False)
        others = list[Partial]()
        if before is not None and before.rows == rows:
            others = [(slice(0, row_count(rows)), before.tensors)]
        elif before is not None:
            _add(total, before, rows, lent=self.lent)
        return tuple([x.contiguous() for x in total.result(dtype, others)])

    def _from_joints(self, block: BlockId, dtype: torch.dtype) -> list[Packed]:
        """Takes this rank's own results for another rank's block: those for the block by itself,
        and the block's rows of those for joint blocks.
        """
        found, held = list[Packed](), self._program.rows[block]
        if (total := self._found.pop(block, None)) is not None:
            found.append(Packed(held, total.result(dtype)))
        for joint, number in self._program.joined[block]:
            if (total := self._found.pop(joint.block, None)) is not None:
                whole = total.result(dtype)
                every = ((0, whole[0].shape[1]),)
                self._of_joints[joint.block] = [
                    tuple([packed(x, token_dim(x), rows, every) for x in whole])
                    for rows in joint.rows
                ]
            if joint.block in self._of_joints:
                found.append(Packed(held, self._of_joints[joint.block][number]))
        return found


class Forward(_Summing[Accumulator]):
    """The outputs, each merged from partial outputs of all blocks of keys.

    Attributes:
        out: [B,S,H,E], complete after the last round.
        lse: [B,H,S], complete after the last round.
        kept: q, k, v and lse of every round's base blocks, if these stay for the backward.
    """

    sides = (QUERIES,)
    compute = staticmethod(attend_block)
    out: Tensor
    lse: Tensor

    def __init__(self, part: RankPart, own: Named, *, keep: bool) -> None:
        """Args: own: q, k and v of the rank's tokens. keep: base blocks stay for the backward."""
        super().__init__(part, own, partial(_places, own["q"], own["v"]))
        self._keep, self.kept = keep, list[Tensor]()
        # Merges of the base block's outputs, by the first head of each open group.
        self._totals: dict[int, Accumulator] = {}
        self._found = {}  # for other ranks' queries

    def begin(self, part: Round, base: Named) -> None:
        self._round, self.q, self.k, self.v = part, base["q"], base["k"], base["v"]
        if self._program.parted:
            self._open_scatter = self._scatter("out", "lse")
            return
        self._placing = part.steps[0].local_heads is not None or self._call.places_outputs
        if self._placing:
            self.out, self.lse = _places(self.q, self.v, QUERIES).values()

    def open(self, step: Step) -> None:
        self._take_heads(step, (self.q,))
        if self._program.parted:
            return
        place = (self.out, self.lse) if self._placing else None
        if place is not None and step.local_heads is not None:
            place = self.out[:, :, step.local_heads.q], self.lse[:, step.local_heads.q]
        (q,), (_, v) = self.queries, self.keys
        self._totals[step.heads.q.start] = Accumulator(q, v.shape[3], place)

    def operands(
        self, task: Task, queries: Tensors | None, keys: Tensors | None
    ) -> tuple[object, ...]:
        """See Pass.operands: of `attend_block`."""
        (q,), (k, v) = queries or self.queries, keys or self.keys
        if task.rows is not None:
            q = rows_at(q, task.rows)
            total = Accumulator(q, v.shape[3])
        elif queries is None:
            total = self._totals[task.heads.q.start]
        else:  # another rank's queries
            total = self._found.setdefault(task.query, Accumulator(q, v.shape[3]))
        return total, q, k, v

    def send_results(self, rows: slice, found: object) -> None:
        assert self._open_scatter is not None
        assert isinstance(found, Accumulator)
        self._open_scatter.add(rows, found.result(self._wide if self._program.wide else None))

    def sum_of(self, side: Side, rows: Rows) -> Accumulator:
        return Accumulator(_like(self.queries[0], rows), self.v.shape[3])

    def accept(self, heads: HeadGroup, side: Side, came: Packed) -> None:
        own, total = between(0, self.q.shape[1]), self._totals[heads.q.start]
        _add(total, came, own, lent=self.lent)

    def settle(self) -> None:
        for total in self._totals.values():
            total.settle()

    def retain(self) -> None:
        held, *others = [self._held[block] for block in self._program.retained]
        # The next call's messages overwrite memory that is lent.
        if others or self.lent:
            held = tuple([torch.cat(parts, 1) for parts in zip(held, *others, strict=True)])
        self.retained = held

    def close(self, heads: HeadGroup, side: Side, others: Sequence[Packed]) -> None:
        for each in others:
            self.accept(heads, side, each)
        out, lse = self._totals.pop(heads.q.start).result()
        if not self._placing:
            self.out, self.lse = out, lse

    def end(self) -> Completions:
        if self._results:
            self._take_results()
        scatter, self._open_scatter = self._open_scatter, None
        found = () if scatter is not None else (self.out, self.lse)
        if self._keep:
            self.kept += self.q, self.k, self.v, self.lse
        del self.q, self.k, self.v, self.queries, self.keys
        self.out, self.lse = self.targets["out"], self.targets["lse"]
        return self._send(found, "out", "lse") if scatter is None else scatter.post()


class Backward(_Summing[GradientSum]):
    """Gradients, summed over all blocks that meet."""

    sides = (QUERIES, KEYS)
    compute = staticmethod(differentiate_block)

    def __init__(
        self, part: RankPart, own: Named, new: Targets, kept_of: Sequence[Named], retained: Tensors
    ) -> None:
        """Args: new: makes memory for dq, dk and dv. Others: see Pass."""
        super().__init__(part, own, new)
        self.kept_of = kept_of
        start = 0
        for block in part.program.retained:
            rows = row_count(part.program.rows[block])
            self._held[block] = tuple([x.narrow(1, start, rows) for x in retained])
            start += rows
        # By (first query head of a group, QUERIES) and (first KV head, KEYS), of open groups.
        self._sums: dict[tuple[int, Side], _OpenSum] = {}
        self._found = {}  # for other ranks' blocks

    def begin(self, part: Round, base: Named) -> None:
        self._round, self.q, self.k, self.v = part, base["q"], base["k"], base["v"]
        self._tokens, self._dout = (self.q.shape[1], self.k.shape[1]), base["dout"]
        self._all = Statistics(base["lse"], base.get("out"), base.get("delta"))
        self._few = self._program.few
        self._sent_dtype = self._wide if self._program.wide else self.q.dtype
        if self._program.parted:
            self._open_scatter = self._scatter("dq") if self._call.dq else None
            return
        # Otherwise the first partial would hold the result's memory while a float32 sum is made.
        several = part.steps[0].local_heads is not None
        self._placing = (several or self._few) and self._call.places_gradients
        self._of_queries = WholeGradient(self.q)
        if part.base.heads.first:
            self._of_keys = WholeGradient(self.k, self.v)

    def open(self, step: Step) -> None:
        self._take_heads(step, (self.q, self._dout))
        heads, whole, local = step.heads, self._round.base.heads, step.local_heads
        of_q, of_kv = (None, None) if local is None else (local.q, local.kv)
        statistics = self._all if of_q is None else self._all.heads(of_q)
        if QUERIES in self._program.sent:
            lse, delta = statistics.lse, statistics.delta_for(self.queries[1])
            self.queries += (delta, lse)
            statistics = Statistics(lse, statistics.out, delta)
        self._statistics = statistics
        if self._program.parted:
            if heads.first:
                self._sums[heads.kv.start, KEYS] = None, GradientSum(*self.keys, few=self._few)
            return
        place = partial(self._of_queries.place, of_q) if self._placing else None
        dq = GradientSum(self.queries[0], few=self._few, place=place)
        self._sums[heads.q.start, QUERIES] = of_q, dq
        if not whole.first:  # an earlier round opened the sums of these keys
            return
        place = None
        if self._placing and whole.last:
            place = partial(self._of_keys.place, of_kv)
        dkv = GradientSum(*self.keys, few=self._few, place=place)
        self._sums[heads.kv.start, KEYS] = of_kv, dkv

    def operands(
        self, task: Task, queries: Tensors | None, keys: Tensors | None
    ) -> tuple[object, ...]:
        """See Pass.operands: of `differentiate_block`."""
        (q, dout), (k, v), statistics = self.queries[:2], self.keys, self._statistics
        if task.rows is not None:
            q, dout = rows_at(q, task.rows), rows_at(dout, task.rows)
            statistics, dq = statistics.rows(task.rows), GradientSum(q)
        elif queries is None:
            _, dq = self._sums[task.heads.q.start, QUERIES]
        else:
            q, dout, delta, lse = queries
            statistics = Statistics(lse, delta=delta)
            dq = self._of_others(task.query, (q,), wanted=self._call.dq)
        if keys is None:
            # A block with itself is among the sums of keys.
            _, dkv = self._sums[task.heads.kv.start, KEYS]
        else:
            k, v = keys
            dkv = self._of_others(task.key, keys, wanted=self._call.dkv)
        return Gradients(dq, dkv), dout, q, k, v, statistics

    def send_results(self, rows: slice, found: object) -> None:
        if self._open_scatter is not None:
            assert isinstance(found, Gradients)
            self._open_scatter.add(rows, tuple(found.dq.final(self._sent_dtype)))

    def _of_others(self, block: BlockId, like: Tensors, *, wanted: bool) -> GradientSum:
        """The gradient sum of another rank's block; kept only if `wanted`."""
        if block in self._found:
            return self._found[block]
        new = GradientSum(*like, few=self._few)
        if wanted:
            self._found[block] = new
        return new

    def sum_of(self, side: Side, rows: Rows) -> GradientSum:
        like = self.keys if side else self.queries[:1]
        return GradientSum(*[_like(x, rows) for x in like])

    def accept(self, heads: HeadGroup, side: Side, came: Packed) -> None:
        _, total = self._sums[(heads.kv if side else heads.q).start, side]
        _add(total, came, between(0, self._tokens[side]), lent=self.lent)

    def close(self, heads: HeadGroup, side: Side, others: Sequence[Packed]) -> None:
        if side and not self._round.base.heads.last:
            for each in others:
                self.accept(heads, side, each)
            return
        some, total = self._sums.pop(((heads.kv if side else heads.q).start, side))
        every = ((0, self._tokens[side]),)
        last = [piece for each in others for piece in _shared(each, every)]
        (self._of_keys if side else self._of_queries).write(some, total, last)

    def end(self) -> Completions:
        heads, posted, found = self._round.base.heads, Completions(), Tensors()
        at_once = ("dq", "dk", "dv") in self._round.results and self._call.dq and self._call.dkv
        scatter, self._open_scatter = self._open_scatter, None
        del self.q, self.k, self.v, self._dout, self._all
        del self.queries, self.keys, self._statistics
        # Otherwise dq leaves before dk and dv come.
        if self._results and QUERIES in [side for _, side in self._sums]:
            self._take_results()
        if scatter is not None:
            posted += scatter.post()
            del scatter
        elif self._call.dq:
            found = self._of_queries.whole
            del self._of_queries
            if not at_once:
                posted += self._send(found, "dq")
                found = ()
        if self._results:
            if heads.last and self._program.merged:
                for _, total in self._sums.values():
                    total.final(self._sizes.dtype)  # while results come
            self._take_results()
        if heads.last and self._call.dkv:
            names = ("dq", "dk", "dv") if at_once else ("dk", "dv")
            posted += self._send((*found, *self._found_for_keys(heads)), *names)
        if heads.last:
            self._sums.clear()
        return posted

    def _found_for_keys(self, heads: HeadGroup) -> Tensors:
        """Takes dK and dV of the base block; this object drops its references to them."""
        if self._program.parted:
            _, total = self._sums.pop((heads.kv.start, KEYS))
            return tuple(total.final(self._sent_dtype))
        found = self._of_keys.whole
        del self._of_keys
        return found

    @property
    def gradients(self) -> Tensors:
        """The gradients of q, k and v, after the last round."""
        if self._teams:
            return self.targets["dq"], self.targets["dk"], self.targets["dv"]
        return (*self._of_queries.whole, *self._of_keys.whole)


def _places(q: Tensor, v: Tensor, _: Side) -> Named:
    """Memory for out and lse of q."""
    batch, tokens, heads = q.shape[:3]
    lse = q.new_empty((batch, heads, tokens), dtype=accumulation_dtype(q.dtype))
    return {"out": q.new_empty((batch, tokens, heads, v.shape[3])), "lse": lse}


def _add(total: Accumulator | GradientSum, came: Packed, rows: Rows, *, lent: bool) -> None:
    """Adds results to a total of `rows`. Args: lent: as of Pass."""
    for there, tensors in _shared(came, rows):
        if lent and total.keeps:
            tensors = tuple([x.clone() for x in tensors])
        total.add(there, *tensors)
        if isinstance(total, Accumulator):
            total.borrowed |= lent


def _shared(here: Packed, rows: Rows) -> Iterator[tuple[SomeRows, Tensors]]:
    """Yields the rows that a packed block has in common with `rows`: their places in `rows`, and
    their tensors.
    """
    pieces = common(here.rows, rows)
    if len(pieces) > FEW:
        yield numbers_of(here.rows, rows, here.tensors[0].device), here.tensors
        return
    for mine, there in pieces:
        yield there, part_of(here.tensors, mine)


def _like(x: Tensor, rows: Rows) -> Tensor:
    """A tensor with the dtype of x [B,S,heads,D], the shape of `rows` of it, and no memory."""
    return x.new_empty(()).expand(len(x), row_count(rows), *x.shape[2:])
