"""The forward and backward passes of attention: what is computed, accumulated and merged.

`core.execution.executor` runs them. B batch, S local tokens, T tokens of a base block, H query
heads, G KV heads, D head dim, E that of values.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.packed_rows import FEW, numbers_of
from megatron_cp_plugin.core.blocks.rows import Rows, between, common, row_count
from megatron_cp_plugin.core.call import Call
from megatron_cp_plugin.core.comm import Described, Pending
from megatron_cp_plugin.core.execution.program import BlockId, Exchange, Program, Round, Task, Turn
from megatron_cp_plugin.core.execution.team import (
    Departure,
    Named,
    Staying,
    Team,
    Tensors,
    together,
)
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.masks.batch import Batch
from megatron_cp_plugin.core.masks.tile_batches import Batches
from megatron_cp_plugin.core.partial import (
    Accumulator,
    GradientSum,
    SomeRows,
    WholeGradient,
    accumulation_dtype,
    rows_at,
)
from megatron_cp_plugin.core.pipeline import HeadGroup
from megatron_cp_plugin.core.plans.plan import OF_KEYS, OF_ROWS, RESULTS, Move

Teams = Mapping[bool, Team]  # of queries (false), of keys (true)


class Packed(NamedTuple):
    """Tensors of some rows of a block."""

    rows: Rows
    tensors: Tensors


class Pass(ABC):
    """What a rank does in one pass: with its base blocks, and with the blocks that come.

    `begin` starts a round: the rank gets the base blocks of some heads. `open` starts a group of
    these heads, before its first step. `close` finishes the results of a group, for queries or for
    keys; results that come straight from other ranks can delay it to the next group's first step.
    `end` finishes the round and sends the results for the base blocks to the team. Without teams
    there is one round, with the rank's own tokens.

    Attributes:
        sides: the sides that get results: queries (false), keys (true).
        compute: runs a task; its arguments are the operands, the tiles and the call.
        sizes: batch, head dim of q, head dim of v, dtype.
        own: tensors of the rank's own tokens; teams gather them.
        kept_of: tensors that the forward gathered and kept, by round.
        q, k, v: tensors of the base blocks, of all heads of the round.
        queries, keys: tensors of the base blocks, of the open group of heads, in the order in which
            they travel.
        retained: K and V of another rank's block, which the forward leaves to the backward.
    """

    sides: ClassVar[tuple[bool, ...]]
    compute: ClassVar[Callable[..., None]]
    sizes: tuple[int, int, int, torch.dtype]
    own: Named
    kept_of: Sequence[Named] = ()
    q: Tensor
    k: Tensor
    v: Tensor
    queries: Tensors
    keys: Tensors
    _round: Round
    retained: Tensors = ()

    def _begin_with(self, call: Call, program: Program, teams: Teams, q: Tensor, v: Tensor) -> None:
        """Begins the pass. Args: q, v: tensors that give the batch, the head dims and the dtype."""
        self.sizes = len(q), q.shape[3], v.shape[3], q.dtype
        self._call, self._program, self._teams = call, program, teams
        self._targets: dict[str, Tensor] = {}  # memory of the results for the own tokens
        self._leaving: Departure | None = None  # results for queries, filled task by task

    @abstractmethod
    def begin(self, part: Round, base: Named) -> None:
        """Begins a round. Args: base: tensors of the base blocks."""

    @abstractmethod
    def open(self, turn: Turn, *, strided: bool) -> None:
        """Begins a group of heads.

        Args:
            turn: the first step of the group.
            strided: messages may be slices of all heads.
        """

    @abstractmethod
    def operands(
        self, task: Task, queries: Tensors | None, keys: Tensors | None
    ) -> tuple[object, ...]:
        """Operands of `compute` for a task: the sums that it adds to, then tensors.

        Args:
            task: the task.
            queries: tensors of another rank's queries; None: those of the base block.
            keys: tensors of another rank's keys; None: those of the base block.
        """

    @abstractmethod
    def leave(self, rows: slice, found: object) -> None:
        """Takes the final results for some rows of the base block.

        Args:
            rows: the rows.
            found: the sums that `compute` added to.
        """

    @abstractmethod
    def results_for(self, move: Move, held: Rows, before: Packed | None) -> Tensors:
        """Results for another rank's block: this rank's own, plus those that came.

        Args:
            move: the move that sends them.
            held: rows of the block that this rank had.
            before: the sum of the ranks before this one in a relay, if one came.
        """

    @abstractmethod
    def accept(self, move: Move, results: Tensors) -> None:
        """Adds another rank's results for some rows of the base block."""

    def settle(self) -> None:  # noqa: B027  (sums are made at once)
        """Adds accepted results that still wait to be added: the next results overwrite them."""

    @abstractmethod
    def close(self, heads: HeadGroup, of_keys: bool, others: Packed | None) -> None:
        """Finishes the results for the queries, or keys, of a group of heads.

        Args:
            heads: the group.
            of_keys: of the keys, not of the queries.
            others: results of other ranks that are still to be added; None: there are none.
        """

    @abstractmethod
    def end(self) -> Pending[None]:
        """Ends a round, after all its groups are closed: sends the results to the team."""

    def _departure(self, *names: str) -> Departure:
        """Where results for the base block go: to the ranks of the team that own its tokens, or, if
        the round has no operation for them, to this rank's own targets.
        """
        operation = self._round.results.get(names)
        if operation is None:
            return Staying(self._round.base.named(names, self._targets))
        return self._teams[names[0] in OF_KEYS].departure(operation, self._targets)

    def _take_heads(self, turn: Turn, of_queries: Tensors, strided: bool) -> None:
        """Sets `queries` and `keys` to a step's heads; contiguous where messages must be."""
        queries, keys, some = of_queries, (self.k, self.v), turn.within
        if some is not None:
            queries = tuple([x[:, :, some.q] for x in queries])
            keys = self.k[:, :, some.kv], self.v[:, :, some.kv]
            if not strided and False in self._program.sent:
                queries = tuple([x.contiguous() for x in queries])
            if not strided and True in self._program.sent:
                keys = keys[0].contiguous(), keys[1].contiguous()
        self.queries, self.keys = queries, keys


@lru_cache(maxsize=1024)  # all layers ask for the same
def expected(
    exchange: Exchange, batch: int, dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[tuple[Described, ...], ...]:
    """Shapes and dtypes of the tensors of each delivery that a rank receives."""
    moves = (one.move for one in exchange.receives)
    return tuple(tuple(_described(move, batch, dim, value_dim, dtype)) for move in moves)


def _described(
    move: Move, batch: int, dim: int, value_dim: int, dtype: torch.dtype
) -> Iterator[Described]:
    """Shapes and dtypes of the tensors of a move."""
    accumulated, heads, tokens = accumulation_dtype(dtype), move.heads, move.tokens
    for name in (name for message in move.messages for name in message):
        count = heads.kv_heads if name in OF_KEYS else heads.heads
        own_dim = value_dim if name in ("v", "dv", "out", "dout") else dim
        if name in OF_ROWS:
            yield (batch, count, tokens), accumulated
        else:
            own_dtype = accumulated if move.wide and name in RESULTS else dtype
            yield (batch, tokens, count, own_dim), own_dtype


def attend_block(
    total: Accumulator, q: Tensor, k: Tensor, v: Tensor, work: Batches, call: Call
) -> None:
    """Adds attention of a block of queries over a block of keys to `total`.

    Args:
        total: the merge of the block's partial outputs.
        q: [B,rows,H,D].
        k: [B,cols,G,D].
        v: [B,cols,G,E].
        work: tiles of the block.
        call: the call.
    """
    kernel, scale = call.kernel, call.scale
    for each in work.calls(packed=call.packed, gaps=kernel.gaps, forward=True):
        if isinstance(each, Batch):
            queries, keys = each.sides(q.device)
            (rows,) = queries.given
            taken = rows_at(q, queries.taken), rows_at(k, keys.taken), rows_at(v, keys.taken)
            packing, causal = each.packing, each.causal
            total.add(rows, *kernel.forward_packed(*taken, packing, scale=scale, causal=causal))
            continue
        tile_q, tile_k, tile_v = q, k, v
        if each.rows < q.shape[1]:
            tile_q = q[:, each.q]
        if each.cols < k.shape[1]:
            tile_k, tile_v = k[:, each.kv], v[:, each.kv]
        placed = call.places_outputs and not each.reverse
        place = total.place_of_first(each.rows) if placed else None
        if place is not None:
            kernel.forward_to(place, tile_q, tile_k, tile_v, scale=scale, causal=each.causal)
            total.add(each.q, *place)
        elif each.reverse:
            flipped = tile_q.flip(1), tile_k.flip(1), tile_v.flip(1)
            out, lse = kernel.forward(*flipped, scale=scale, causal=each.causal)
            total.add(each.q, out.flip(1), lse.flip(2))
        else:
            found = kernel.forward(tile_q, tile_k, tile_v, scale=scale, causal=each.causal)
            total.add(each.q, *found)
            del found


class Gradients(NamedTuple):
    """Running sums of dq, dk, dv of one block of queries and one block of keys."""

    dq: GradientSum
    dk: GradientSum
    dv: GradientSum

    def places(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where the kernel writes the gradients of a tile's q, k and v: a block's first gradients
        to the memory of its sum, later ones to new memory. None: no gradient is a block's first.
        """
        places = [
            total.place_of_first(x.shape[1]) if total.empty else None
            for total, x in zip(self, (q, k, v), strict=True)
        ]
        if places == [None, None, None]:
            return None
        dq, dk, dv = [
            x.new_empty(x.shape) if place is None else place
            for place, x in zip(places, (q, k, v), strict=True)
        ]
        return dq, dk, dv


def differentiate_block(
    sums: Gradients,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Statistics,
    work: Batches,
    call: Call,
) -> None:
    """Adds the gradients of a block's q, k and v to `sums`; see `attend_block` for the shapes.

    Args:
        sums: gradient sums of the block of queries and of the block of keys.
        dout: [B,rows,H,E].
        q: queries.
        k: keys.
        v: values.
        statistics: lse, with delta or out, of all rows of q.
        work: tiles of the block.
        call: the call.
    """
    kernel, scale = call.kernel, call.scale
    sum_dq, sum_dk, sum_dv = sums
    for each in work.calls(packed=call.packed, gaps=kernel.gaps):
        if isinstance(each, Batch):
            _differentiate_batch(sums, dout, q, k, v, statistics, each, call)
            continue
        tile, tile_k, tile_v, of_tile = (dout, q), k, v, statistics
        if each.rows < q.shape[1]:
            tile, of_tile = (dout[:, each.q], q[:, each.q]), statistics.rows(each.q)
        if each.cols < k.shape[1]:
            tile_k, tile_v = k[:, each.kv], v[:, each.kv]
        causal, places = each.causal, None
        if call.places_gradients and not each.reverse:
            places = sums.places(tile[1], tile_k, tile_v)
        if places is not None:
            kernel.backward_to(places, *tile, tile_k, tile_v, of_tile, scale=scale, causal=causal)
            dq, dk, dv = places
        elif each.reverse:
            tile, tile_k, tile_v = (
                (tile[0].flip(1), tile[1].flip(1)),
                tile_k.flip(1),
                tile_v.flip(1),
            )
            found = kernel.backward(
                *tile, tile_k, tile_v, of_tile.flipped(), scale=scale, causal=causal
            )
            dq, dk, dv = [x.flip(1) for x in found]
        else:
            dq, dk, dv = kernel.backward(*tile, tile_k, tile_v, of_tile, scale=scale, causal=causal)
        sum_dq.add(each.q, dq)
        sum_dk.add(each.kv, dk)
        sum_dv.add(each.kv, dv)


def _differentiate_batch(
    sums: Gradients,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Statistics,
    batch: Batch,
    call: Call,
) -> None:
    queries, keys = batch.sides(q.device)
    dq, dk, dv = call.kernel.backward_packed(
        rows_at(dout, queries.taken),
        rows_at(q, queries.taken),
        rows_at(k, keys.taken),
        rows_at(v, keys.taken),
        statistics.rows(queries.taken),
        batch.packing,
        scale=call.scale,
        causal=batch.causal,
    )
    for rows in queries.given:
        sums.dq.add(rows, dq)
    for cols in keys.given:
        sums.dk.add(cols, dk)
        sums.dv.add(cols, dv)


class Forward(Pass):
    """The outputs, each merged from partial outputs of all blocks of keys.

    Attributes:
        out: [B,S,H,E], complete after the last round.
        lse: [B,H,S], complete after the last round.
        given: see `__init__`.
        kept: q, k, v and lse of every round's base blocks, if these stay for the backward.
    """

    sides = (False,)
    compute = staticmethod(attend_block)
    out: Tensor
    lse: Tensor

    def __init__(
        self,
        call: Call,
        program: Program,
        teams: Teams,
        own: Named,
        given: tuple[Tensor, Tensor, Tensor],
        *,
        keep: bool,
    ) -> None:
        """Makes a forward.

        Args:
            call: the call.
            program: what this rank does.
            teams: see Executor.
            own: q, k and v of the rank's tokens.
            given: q, k and v without the zero heads.
            keep: base blocks stay for the backward.
        """
        self.own, self.given = own, given
        q, v = own["q"], own["v"]
        self._begin_with(call, program, teams, q, v)
        self._wide = accumulation_dtype(q.dtype)
        self.kept: list[Tensor] = []
        self._keep = keep
        if teams:
            out, lse = self._places(q, v)
            self._targets = {"out": out, "lse": lse}
        # Merges of the base block's outputs, by the first head of each group that is not closed.
        self._totals: dict[int, Accumulator] = {}
        self._found: dict[int, Accumulator] = {}  # for other ranks' queries, by their owner

    def begin(self, part: Round, base: Named) -> None:
        """See Pass.begin."""
        self._round, self.q, self.k, self.v = part, base["q"], base["k"], base["v"]
        if self._program.parted:
            self._leaving = self._departure("out", "lse")
            return
        self._placing = part.turns[0].within is not None or self._call.places_outputs
        if self._placing:
            self.out, self.lse = self._places(self.q, self.v)

    def _places(self, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for out and lse of q."""
        batch, tokens, heads, _ = q.shape
        out = q.new_empty((batch, tokens, heads, v.shape[3]))
        return out, q.new_empty((batch, heads, tokens), dtype=self._wide)

    def open(self, turn: Turn, *, strided: bool) -> None:
        """See Pass.open."""
        self._take_heads(turn, (self.q,), strided)
        if self._program.parted:
            return
        place = (self.out, self.lse) if self._placing else None
        if place is not None and turn.within is not None:
            place = self.out[:, :, turn.within.q], self.lse[:, turn.within.q]
        (q,), (_, v) = self.queries, self.keys
        self._totals[turn.heads.q.start] = Accumulator(q, v.shape[3], place)

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
            total = self._found.setdefault(task.query[0], Accumulator(q, v.shape[3]))
        return total, q, k, v

    def leave(self, rows: slice, found: object) -> None:
        """See Pass.leave."""
        assert self._leaving is not None
        assert isinstance(found, Accumulator)
        self._leaving.add(rows, found.result(self._wide if self._program.wide else None))

    def results_for(self, move: Move, held: Rows, before: Packed | None) -> Tensors:
        """See Pass.results_for."""
        total, rows = self._found.pop(move.block.owners[0], None), move.block.rows
        if total is None:
            return _passed_on(before)
        if held != rows:
            found = total.result(self._wide)
            total = Accumulator(_like(self.queries[0], rows), self.v.shape[3])
            for there, partial in _shared(Packed(held, found), rows):
                total.add(there, *partial)
        if before is not None:
            _merge(total, before, rows)
        out, lse = total.result(self._wide if move.wide else None)
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
        if self._program.parted:
            return
        total = self._totals.pop(heads.q.start)
        if others is not None:
            _merge(total, others, between(0, self.q.shape[1]))
        out, lse = total.result()
        if not self._placing:
            self.out, self.lse = out, lse

    def end(self) -> Pending[None]:
        """See Pass.end."""
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            leaving = self._departure("out", "lse")
            leaving.add(slice(0, self.q.shape[1]), (self.out, self.lse))
        if self._keep:
            self.kept += self.q, self.k, self.v, self.lse
        del self.q, self.k, self.v, self.queries, self.keys
        self.out, self.lse = self._targets["out"], self._targets["lse"]
        return leaving.post()


class Backward(Pass):
    """Gradients, summed over all blocks that meet."""

    sides = (False, True)
    compute = staticmethod(differentiate_block)

    def __init__(
        self,
        call: Call,
        program: Program,
        teams: Teams,
        own: Named,
        like: Named,
        kept_of: Sequence[Named],
        retained: Tensors,
    ) -> None:
        """Makes a backward.

        Args:
            call: the call.
            program: what this rank does.
            teams: see Executor.
            own: see Pass.
            like: memory of dq, dk and dv, if there are teams; else `own`.
            kept_of: see Pass.
            retained: see Pass.
        """
        q, v = like["dq" if teams else "q"], like["dv" if teams else "v"]
        self._begin_with(call, program, teams, q, v)
        self.own, self.kept_of, self.retained = own, kept_of, retained
        if teams:
            self._targets = dict(like)
        # By (first query head of a group, False) and (first KV head, True), of groups that are not
        # closed: the heads' slice in the base block, and the sums, of dq or of dk and dv.
        self._sums: dict[tuple[int, bool], tuple[slice | None, tuple[GradientSum, ...]]] = {}
        self._found: dict[BlockId, tuple[GradientSum, ...]] = {}  # for other ranks' blocks

    def begin(self, part: Round, base: Named) -> None:
        """See Pass.begin."""
        self._round, self.q, self.k, self.v = part, base["q"], base["k"], base["v"]
        self._dout = base["dout"]
        self._all = Statistics(base["lse"], base.get("out"), base.get("delta"))
        self._few = self._program.few
        if self._program.parted:
            self._leaving = self._departure("dq") if self._call.dq else None
            return
        # Else a first partial would hold the memory of the result while a float32 sum is made.
        several = part.turns[0].within is not None
        self._placing = (several or self._few) and self._call.places_gradients
        self._of_queries = WholeGradient(self.q)
        if part.base.heads.first:
            self._of_keys = WholeGradient(self.k), WholeGradient(self.v)

    def open(self, turn: Turn, *, strided: bool) -> None:
        """See Pass.open."""
        self._take_heads(turn, (self.q, self._dout), strided)
        heads, whole, within = turn.heads, self._round.base.heads, turn.within
        of_q, of_kv = (None, None) if within is None else (within.q, within.kv)
        statistics = self._all if of_q is None else self._all.heads(of_q)
        if False in self._program.sent:
            lse, delta = statistics.lse, statistics.delta_for(self.queries[1])
            self.queries += (delta, lse)
            statistics = Statistics(lse, statistics.out, delta)
        self._statistics = statistics
        if self._program.parted:
            if heads.first:
                sums = tuple([GradientSum(x) for x in self.keys])
                self._sums[heads.kv.start, True] = None, sums
            return
        place = partial(self._of_queries.place, of_q) if self._placing else None
        dq = GradientSum(self.queries[0], few=self._few, place=place)
        self._sums[heads.q.start, False] = of_q, (dq,)
        if not whole.first:  # an earlier round opened the sums of these keys
            return
        few, of_keys = self._few and whole.last, list[GradientSum]()
        for x, gradient in zip(self.keys, self._of_keys, strict=True):
            place = partial(gradient.place, of_kv) if self._placing and whole.last else None
            of_keys.append(GradientSum(x, few=few, place=place))
        self._sums[heads.kv.start, True] = of_kv, tuple(of_keys)

    def operands(
        self, task: Task, queries: Tensors | None, keys: Tensors | None
    ) -> tuple[object, ...]:
        """See Pass.operands: of `differentiate_block`."""
        (q, dout), (k, v), statistics = self.queries[:2], self.keys, self._statistics
        if task.rows is not None:
            q, dout = rows_at(q, task.rows), rows_at(dout, task.rows)
            statistics, dq = statistics.rows(task.rows), GradientSum(q)
        elif queries is None:
            _, (dq,) = self._sums[task.heads.q.start, False]
        else:
            q, dout, delta, lse = queries
            statistics = Statistics(lse, delta=delta)
            (dq,) = self._of_others(task.query, (q,), wanted=self._call.dq)
        if keys is None:
            _, (dk, dv) = self._sums[task.heads.kv.start, True]
        else:
            k, v = keys
            dk, dv = self._of_others(task.key, (k, v), wanted=self._call.dkv)
        return Gradients(dq, dk, dv), dout, q, k, v, statistics

    def leave(self, rows: slice, found: object) -> None:
        """See Pass.leave."""
        if self._leaving is not None:
            assert isinstance(found, Gradients)
            self._leaving.add(rows, (found.dq.held,))

    def _of_others(self, block: BlockId, like: Tensors, *, wanted: bool) -> tuple[GradientSum, ...]:
        """Gradient sums of another rank's block; kept only if `wanted`."""
        if block in self._found:
            return self._found[block]
        new = tuple([GradientSum(x, few=self._few) for x in like])
        if wanted:
            self._found[block] = new
        return new

    def results_for(self, move: Move, held: Rows, before: Packed | None) -> Tensors:
        """See Pass.results_for."""
        sums = self._found.pop((move.block.owners[0], move.of_keys), None)
        rows = move.block.rows
        if sums is None:
            return _passed_on(before)
        dtype = accumulation_dtype(self.q.dtype) if move.wide else self.q.dtype
        if held == rows and (before is None or before.rows == rows):
            others = (None,) * len(sums) if before is None else before.tensors
            both = zip(sums, others, strict=True)
            return tuple([x.result(dtype, plus=other) for x, other in both])
        found = tuple([x.held for x in sums])
        like = self.keys if move.of_keys else self.queries[:1]
        sums = tuple([GradientSum(_like(x, rows)) for x in like])
        _add_gradients(sums, Packed(held, found), rows)
        if before is not None:
            _add_gradients(sums, before, rows)
        return tuple(x.result(dtype) for x in sums)

    def accept(self, move: Move, results: Tensors) -> None:
        """See Pass.accept."""
        of_keys = move.of_keys
        _, sums = self._sums[(move.heads.kv if of_keys else move.heads.q).start, of_keys]
        rows = between(0, (self.k if of_keys else self.q).shape[1])
        _add_gradients(sums, Packed(move.block.rows, results), rows)

    def close(self, heads: HeadGroup, of_keys: bool, others: Packed | None) -> None:
        """See Pass.close."""
        if self._program.parted or (of_keys and not self._round.base.heads.last):
            return
        some, sums = self._sums.pop(((heads.kv if of_keys else heads.q).start, of_keys))
        wholes = self._of_keys if of_keys else (self._of_queries,)
        plus: tuple[Tensor | None, ...] = (None,) * len(sums)
        if others is not None:
            rows = between(0, (self.k if of_keys else self.q).shape[1])
            if others.rows == rows:
                plus = others.tensors
            else:
                _add_gradients(sums, others, rows)
        for whole, total, other in zip(wholes, sums, plus, strict=True):
            whole.write(some, total, other)

    def end(self) -> Pending[None]:
        """See Pass.end."""
        heads, posted = self._round.base.heads, list[Pending[None]]()
        leaving, self._leaving = self._leaving, None
        rows, cols = slice(0, self.q.shape[1]), slice(0, self.k.shape[1])
        del self.q, self.k, self.v, self._dout, self._all
        del self.queries, self.keys, self._statistics
        if self._call.dq and leaving is None:
            leaving = self._departure("dq")
            leaving.add(rows, (self._of_queries.whole,))
            del self._of_queries
        if leaving is not None:
            posted.append(leaving.post())
            del leaving
        if heads.last and self._call.dkv:
            leaving = self._departure("dk", "dv")
            leaving.add(cols, self._found_for_keys(heads))
            posted.append(leaving.post())
        if heads.last:
            self._sums.clear()
        return together(posted)

    def _found_for_keys(self, heads: HeadGroup) -> Tensors:
        """Takes dK and dV of the base block; this object keeps no reference to them."""
        if self._program.parted:
            _, sums = self._sums.pop((heads.kv.start, True))
            return tuple([x.held for x in sums])
        dk, dv = self._of_keys
        del self._of_keys
        return dk.whole, dv.whole

    @property
    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, after the last round."""
        if self._targets:
            return self._targets["dq"], self._targets["dk"], self._targets["dv"]
        return self._of_queries.whole, self._of_keys[0].whole, self._of_keys[1].whole


def _merge(total: Accumulator, came: Packed, rows: Rows) -> None:
    """Merges a partial output of another rank. The next one overwrites its buffer.

    Args:
        total: the merge that it is added to.
        came: the partial.
        rows: rows of the block that `total` has.
    """
    for there, (out, lse) in _shared(came, rows):
        if total.empty:  # an empty total keeps the tensors that it is given
            out, lse = out.clone(), lse.clone()
        total.add(there, out, lse, borrowed=True)


def _add_gradients(sums: tuple[GradientSum, ...], results: Packed, rows: Rows) -> None:
    """Adds gradients of another rank. The next ones overwrite their buffers.

    Args:
        sums: the sums that they are added to.
        results: the gradients.
        rows: rows of the block that `sums` have.
    """
    for there, gradients in _shared(results, rows):
        for total, gradient in zip(sums, gradients, strict=True):
            total.add(there, gradient.clone() if total.keeps else gradient)


def _shared(here: Packed, rows: Rows) -> Iterator[tuple[SomeRows, Tensors]]:
    """Common rows of a packed block and of `rows`: where they are in `rows`, and their tensors."""
    pieces = common(here.rows, rows)
    if len(pieces) > FEW:
        yield numbers_of(here.rows, rows, here.tensors[0].device), here.tensors
        return
    for mine, there in pieces:
        yield there, _part(here.tensors, mine)


def _part(tensors: Tensors, rows: slice) -> Tensors:
    """Rows of packed tensors [B,S,heads,D], perhaps with [B,H,S], as views."""
    if rows.stop - rows.start == tensors[0].shape[1]:
        return tensors
    return tuple(x[:, rows] if x.dim() == 4 else x[:, :, rows] for x in tensors)


def _like(x: Tensor, rows: Rows) -> Tensor:
    """A tensor with the dtype of x [B,S,heads,D], the shape of `rows` of it, and no memory."""
    return x.new_empty(()).expand(len(x), row_count(rows), *x.shape[2:])


def _passed_on(before: Packed | None) -> Tensors:
    """The sum that came, if the mask lets this rank add nothing to it."""
    assert before is not None
    return tuple(x.clone() for x in before.tensors)  # the next results reuse the buffers
