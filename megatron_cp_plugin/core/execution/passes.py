"""The forward and backward passes of attention: what is computed, accumulated and merged.

`core.execution.executor` runs them. B batch, S local tokens, T tokens of a base block, H query
heads, G KV heads, D head dim, E that of values.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.rows import FEW, Rows, between, common, numbers_of, row_count
from megatron_cp_plugin.core.call import Call, HeadGroup
from megatron_cp_plugin.core.comm import Described
from megatron_cp_plugin.core.execution.program import (
    BlockId,
    Exchange,
    Message,
    Program,
    Round,
    Step,
    Task,
)
from megatron_cp_plugin.core.execution.team import (
    Departure,
    GatheringTeam,
    Named,
    Team,
    Tensors,
    Waits,
)
from megatron_cp_plugin.core.kernel import KernelCall, Statistics, run_backward, run_forward
from megatron_cp_plugin.core.masks.tile_batches import Batch
from megatron_cp_plugin.core.partial import (
    Accumulator,
    GradientSum,
    SomeRows,
    WholeGradient,
    accumulation_dtype,
    rows_at,
)
from megatron_cp_plugin.core.plans.plan import (
    KEYS,
    OF_KEYS,
    PER_HEAD,
    QUERIES,
    RESULTS,
    SIDE_OF,
    Move,
    Side,
)
from megatron_cp_plugin.core.tiles import Tile

Teams = Mapping[Side, Team]


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
        sides: the sides that get results.
        waits: accepted results may wait to be added.
        lent: results that come are in memory that later ones overwrite.
        compute: runs a task; its arguments are the operands, the kernel calls and the call.
        sizes: batch, head dim of q, head dim of v, dtype.
        own: tensors of the rank's own tokens; teams gather them.
        kept_of: tensors that the forward gathered and kept, by round.
        q, k, v: tensors of the base blocks, of all heads of the round.
        queries, keys: tensors of the base blocks, of the open group of heads, in the order in which
            they travel.
        retained: K and V of another rank's block, which the forward leaves to the backward.
    """

    sides: ClassVar[tuple[Side, ...]]
    waits: ClassVar[bool] = False
    lent: bool = False
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
        """Args: q, v: tensors that give the batch, the head dims and the dtype."""
        self.sizes = len(q), q.shape[3], v.shape[3], q.dtype
        self._call, self._program, self._teams = call, program, teams
        self._targets: dict[str, Tensor] = {}  # memory of the results for the own tokens
        self._leaving: Departure | None = None  # results for queries, filled task by task

    @abstractmethod
    def begin(self, part: Round, base: Named) -> None:
        """Begins a round, with the tensors of its base blocks."""

    @abstractmethod
    def open(self, step: Step, *, strided: bool) -> None:
        """Begins a group of heads, by its first step. Args: strided: messages may be slices."""

    @abstractmethod
    def operands(
        self, task: Task, queries: Tensors | None, keys: Tensors | None
    ) -> tuple[object, ...]:
        """Operands of `compute`: the sums that a task adds to, then tensors.

        Args: queries, keys: of another rank; None: those of the base block.
        """

    @abstractmethod
    def leave(self, rows: slice, found: object) -> None:
        """Takes the final results for some rows of the base block: what `compute` added to."""

    @abstractmethod
    def results_for(self, message: Message, held: Rows, before: Packed | None) -> Tensors:
        """Results for another rank's block: this rank's own, plus those that came.

        Args:
            held: rows of the block that this rank had.
            before: the sum of the ranks before this one in a relay, if one came.
        """

    @abstractmethod
    def accept(self, move: Move, results: Tensors) -> None:
        """Adds another rank's results for some rows of the base block."""

    def settle(self) -> None:
        """Adds accepted results, if they `wait`: the next results overwrite them."""
        raise NotImplementedError

    @abstractmethod
    def close(self, heads: HeadGroup, side: Side, others: Packed | None) -> None:
        """Finishes the results for the queries, or keys, of a group of heads.

        Args: others: results of other ranks that are still to be added.
        """

    @abstractmethod
    def end(self) -> Waits:
        """Ends a round, after all its groups are closed: sends the results to the team."""

    def _passed_on(self, before: Packed | None) -> Tensors:
        """The sum that came, if the mask lets this rank add nothing to it."""
        assert before is not None
        return tuple([x.clone() for x in before.tensors]) if self.lent else before.tensors

    def _departure(self, *names: str) -> Departure:
        """Where results for some rows of the base block go: to the owners of its tokens in the
        team, or, if the round has no operation for them, to this rank's own targets.
        """
        operation = self._round.results.get(names)
        if operation is None:
            return Departure(self._round.base.named(names, self._targets))
        team = self._teams[SIDE_OF[names[0]]]
        assert isinstance(team, GatheringTeam)
        return team.departure(operation, self._targets)

    def _send(self, tensors: Tensors, *names: str) -> Waits:
        """Sends results for all rows of the base block where `_departure` sends those of some."""
        operation = self._round.results.get(names)
        if operation is not None:
            return self._teams[SIDE_OF[names[0]]].send(operation, self._targets, tensors)
        targets = self._round.base.named(names, self._targets)
        for target, x in zip(targets, tensors, strict=True):
            target.copy_(x)
        return []

    def _take_heads(self, step: Step, of_queries: Tensors, strided: bool) -> None:
        """Sets `queries` and `keys` to a step's heads; contiguous where messages must be."""
        queries, keys, some = of_queries, (self.k, self.v), step.within
        if some is not None:
            queries = tuple([x[:, :, some.q] for x in queries])
            keys = self.k[:, :, some.kv], self.v[:, :, some.kv]
            if not strided and QUERIES in self._program.sent:
                queries = tuple([x.contiguous() for x in queries])
            if not strided and KEYS in self._program.sent:
                keys = keys[0].contiguous(), keys[1].contiguous()
        self.queries, self.keys = queries, keys


@lru_cache(maxsize=1024)  # all layers ask for the same
def expected(
    exchange: Exchange, batch: int, dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[tuple[Described, ...], ...]:
    """Shapes and dtypes of the tensors of each message that a rank receives."""
    accumulated, found = accumulation_dtype(dtype), []
    for move, *_ in exchange.receives:
        tensors, tokens = list[Described](), move.tokens
        for name in chain(*move.messages):
            count = move.heads.kv_heads if name in OF_KEYS else move.heads.heads
            own_dim = value_dim if name in ("v", "dv", "out", "dout") else dim
            wide = name in PER_HEAD or (move.wide and name in RESULTS)
            shape = (batch, count, tokens) if name in PER_HEAD else (batch, tokens, count, own_dim)
            tensors.append((shape, accumulated if wide else dtype))
        found.append(tuple(tensors))
    return tuple(found)


def attend_block(
    total: Accumulator, q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Tile | Batch], call: Call
) -> None:
    """Adds attention of queries over keys to `total`.

    Args:
        q: [B,rows,H,D].
        k: [B,cols,G,D].
        v: [B,cols,G,E].
        calls: kernel calls of the block, as `Batches.calls` gives them.
    """
    kernel, scale = call.kernel, call.scale
    for each in calls:
        if isinstance(each, Batch):
            queries, keys = each.sides(q.device)
            (rows,) = queries.given
            taken = rows_at(q, queries.taken), rows_at(k, keys.taken), rows_at(v, keys.taken)
            packed = KernelCall(*taken, scale, each.causal, each.packing, window=each.window)
            total.add(rows, *run_forward(kernel, packed))
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


class Gradients(NamedTuple):
    """Running sums of dq of one block of queries, and of dk and dv of one block of keys."""

    dq: GradientSum
    dkv: GradientSum

    def places(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where the kernel writes the gradients of a tile's q, k and v: a block's first gradients
        to the memory of its sum, later ones to new memory. None: no gradient is a block's first.
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
            packed = KernelCall(*taken, scale, each.causal, each.packing, window=each.window)
            of_rows = rows_at(dout, queries.taken), statistics.rows(queries.taken)
            dq, dk, dv = run_backward(kernel, packed, *of_rows)
            del taken, packed, of_rows
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
            places = None
            if call.places_gradients and (sums.dq.placing or sums.dkv.placing):
                places = sums.places(tile_q, tile_k, tile_v)
            tile = KernelCall(tile_q, tile_k, tile_v, scale, each.causal, None, places, each.window)
            dq, dk, dv = kernel.backward(tile, tile_dout, of_tile)
        sums.dq.add(each.q, dq)
        sums.dkv.add(each.kv, dk, dv)


class Forward(Pass):
    """The outputs, each merged from partial outputs of all blocks of keys.

    Attributes:
        out: [B,S,H,E], complete after the last round.
        lse: [B,H,S], complete after the last round.
        kept: q, k, v and lse of every round's base blocks, if these stay for the backward.
    """

    sides = (QUERIES,)
    waits = True
    compute = staticmethod(attend_block)
    out: Tensor
    lse: Tensor

    def __init__(
        self,
        call: Call,
        program: Program,
        teams: Teams,
        own: Named,
        *,
        keep: bool,
    ) -> None:
        """Args: own: q, k and v of the rank's tokens. keep: base blocks stay for the backward."""
        self.own = own
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
        self._round, self.q, self.k, self.v = part, base["q"], base["k"], base["v"]
        if self._program.parted:
            self._leaving = self._departure("out", "lse")
            return
        self._placing = part.steps[0].within is not None or self._call.places_outputs
        if self._placing:
            self.out, self.lse = self._places(self.q, self.v)

    def _places(self, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for out and lse of q."""
        batch, tokens, heads, _ = q.shape
        out = q.new_empty((batch, tokens, heads, v.shape[3]))
        return out, q.new_empty((batch, heads, tokens), dtype=self._wide)

    def open(self, step: Step, *, strided: bool) -> None:
        self._take_heads(step, (self.q,), strided)
        if self._program.parted:
            return
        place = (self.out, self.lse) if self._placing else None
        if place is not None and step.within is not None:
            place = self.out[:, :, step.within.q], self.lse[:, step.within.q]
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
            total = self._found.setdefault(task.query[0], Accumulator(q, v.shape[3]))
        return total, q, k, v

    def leave(self, rows: slice, found: object) -> None:
        assert self._leaving is not None
        assert isinstance(found, Accumulator)
        self._leaving.add(rows, found.result(self._wide if self._program.wide else None))

    def results_for(self, message: Message, held: Rows, before: Packed | None) -> Tensors:
        move, (owner, _), _ = message
        total, rows = self._found.pop(owner, None), move.block.rows
        if total is None:
            return self._passed_on(before)
        if held != rows:
            found = total.result(self._wide)
            total = Accumulator(_like(self.queries[0], rows), self.v.shape[3])
            for there, partial in _shared(Packed(held, found), rows):
                total.add(there, *partial)
        if before is not None:
            _merge(total, before, rows, lent=self.lent)
        out, lse = total.result(self._wide if move.wide else None)
        return out.contiguous(), lse.contiguous()

    def accept(self, move: Move, results: Tensors) -> None:
        own = between(0, self.q.shape[1])
        total = self._totals[move.heads.q.start]
        _merge(total, Packed(move.block.rows, results), own, lent=self.lent)

    def settle(self) -> None:
        for total in self._totals.values():
            total.settle()

    def close(self, heads: HeadGroup, side: Side, others: Packed | None) -> None:
        total = self._totals.pop(heads.q.start)
        if others is not None:
            _merge(total, others, between(0, self.q.shape[1]), lent=self.lent)
        out, lse = total.result()
        if not self._placing:
            self.out, self.lse = out, lse

    def end(self) -> Waits:
        leaving, self._leaving = self._leaving, None
        found = () if leaving is not None else (self.out, self.lse)
        if self._keep:
            self.kept += self.q, self.k, self.v, self.lse
        del self.q, self.k, self.v, self.queries, self.keys
        self.out, self.lse = self._targets["out"], self._targets["lse"]
        return self._send(found, "out", "lse") if leaving is None else leaving.post()


class Backward(Pass):
    """Gradients, summed over all blocks that meet."""

    sides = (QUERIES, KEYS)
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
        """Args: like: memory of dq, dk and dv; without teams `own`. Others: see Pass."""
        q, v = like["dq" if teams else "q"], like["dv" if teams else "v"]
        self._begin_with(call, program, teams, q, v)
        self.own, self.kept_of, self.retained = own, kept_of, retained
        if teams:
            self._targets = dict(like)
        # By (first query head of a group, QUERIES) and (first KV head, KEYS), of open groups:
        # the heads' slice in the base block, and the sum of dq or of dk and dv.
        self._sums: dict[tuple[int, Side], tuple[slice | None, GradientSum]] = {}
        self._found: dict[BlockId, GradientSum] = {}  # for other ranks' blocks

    def begin(self, part: Round, base: Named) -> None:
        self._round, self.q, self.k, self.v = part, base["q"], base["k"], base["v"]
        self._dout = base["dout"]
        self._all = Statistics(base["lse"], base.get("out"), base.get("delta"))
        self._few = self._program.few
        if self._program.parted:
            self._leaving = self._departure("dq") if self._call.dq else None
            return
        # Else a first partial would hold the memory of the result while a float32 sum is made.
        several = part.steps[0].within is not None
        self._placing = (several or self._few) and self._call.places_gradients
        self._of_queries = WholeGradient(self.q)
        if part.base.heads.first:
            self._of_keys = WholeGradient(self.k, self.v)

    def open(self, step: Step, *, strided: bool) -> None:
        self._take_heads(step, (self.q, self._dout), strided)
        heads, whole, within = step.heads, self._round.base.heads, step.within
        of_q, of_kv = (None, None) if within is None else (within.q, within.kv)
        statistics = self._all if of_q is None else self._all.heads(of_q)
        if QUERIES in self._program.sent:
            lse, delta = statistics.lse, statistics.delta_for(self.queries[1])
            self.queries += (delta, lse)
            statistics = Statistics(lse, statistics.out, delta)
        self._statistics = statistics
        if self._program.parted:
            if heads.first:
                self._sums[heads.kv.start, KEYS] = None, GradientSum(*self.keys)
            return
        place = partial(self._of_queries.place, of_q) if self._placing else None
        dq = GradientSum(self.queries[0], few=self._few, place=place)
        self._sums[heads.q.start, QUERIES] = of_q, dq
        if not whole.first:  # an earlier round opened the sums of these keys
            return
        few, place = self._few and whole.last, None
        if self._placing and whole.last:
            place = partial(self._of_keys.place, of_kv)
        self._sums[heads.kv.start, KEYS] = of_kv, GradientSum(*self.keys, few=few, place=place)

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
            _, dkv = self._sums[task.heads.kv.start, KEYS]
        else:
            k, v = keys
            dkv = self._of_others(task.key, keys, wanted=self._call.dkv)
        return Gradients(dq, dkv), dout, q, k, v, statistics

    def leave(self, rows: slice, found: object) -> None:
        if self._leaving is not None:
            assert isinstance(found, Gradients)
            self._leaving.add(rows, tuple(found.dq.held))

    def _of_others(self, block: BlockId, like: Tensors, *, wanted: bool) -> GradientSum:
        """The gradient sum of another rank's block; kept only if `wanted`."""
        if block in self._found:
            return self._found[block]
        new = GradientSum(*like, few=self._few)
        if wanted:
            self._found[block] = new
        return new

    def results_for(self, message: Message, held: Rows, before: Packed | None) -> Tensors:
        move, block, _ = message
        total, rows = self._found.pop(block, None), move.block.rows
        if total is None:
            return self._passed_on(before)
        dtype = accumulation_dtype(self.q.dtype) if move.wide else self.q.dtype
        if held == rows and (before is None or before.rows == rows):
            return total.result(dtype, plus=None if before is None else before.tensors)
        found = tuple(total.held)
        like = self.keys if block[1] else self.queries[:1]
        total = GradientSum(*[_like(x, rows) for x in like])
        _add_gradients(total, Packed(held, found), rows, lent=False)
        if before is not None:
            _add_gradients(total, before, rows, lent=self.lent)
        return total.result(dtype)

    def accept(self, move: Move, results: Tensors) -> None:
        side = move.side
        _, total = self._sums[(move.heads.kv if side else move.heads.q).start, side]
        rows = between(0, (self.k if side else self.q).shape[1])
        _add_gradients(total, Packed(move.block.rows, results), rows, lent=self.lent)

    def close(self, heads: HeadGroup, side: Side, others: Packed | None) -> None:
        if side and not self._round.base.heads.last:
            return
        some, total = self._sums.pop(((heads.kv if side else heads.q).start, side))
        plus: Tensors | None = None
        if others is not None:
            tokens = (self.k if side else self.q).shape[1]
            if others.tensors[0].shape[1] == tokens:
                plus = others.tensors
            else:
                _add_gradients(total, others, between(0, tokens), lent=self.lent)
        (self._of_keys if side else self._of_queries).write(some, total, plus)

    def end(self) -> Waits:
        heads, posted = self._round.base.heads, Waits()
        leaving, self._leaving = self._leaving, None
        del self.q, self.k, self.v, self._dout, self._all
        del self.queries, self.keys, self._statistics
        if leaving is not None:
            posted += leaving.post()
            del leaving
        elif self._call.dq:
            found = self._of_queries.whole
            del self._of_queries
            posted += self._send(found, "dq")
            del found
        if heads.last and self._call.dkv:
            posted += self._send(self._found_for_keys(heads), "dk", "dv")
        if heads.last:
            self._sums.clear()
        return posted

    def _found_for_keys(self, heads: HeadGroup) -> Tensors:
        """Takes dK and dV of the base block; this object keeps no reference to them."""
        if self._program.parted:
            _, total = self._sums.pop((heads.kv.start, KEYS))
            return tuple(total.held)
        found = self._of_keys.whole
        del self._of_keys
        return found

    @property
    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, after the last round."""
        if self._targets:
            return self._targets["dq"], self._targets["dk"], self._targets["dv"]
        (dq,), (dk, dv) = self._of_queries.whole, self._of_keys.whole
        return dq, dk, dv


def _merge(total: Accumulator, came: Packed, rows: Rows, *, lent: bool) -> None:
    """Merges another rank's partial output into a total of `rows`. Args: lent: see Pass."""
    for there, (out, lse) in _shared(came, rows):
        if lent and total.empty:  # an empty total keeps the tensors that it is given
            out, lse = out.clone(), lse.clone()
        total.add(there, out, lse, borrowed=lent)


def _add_gradients(total: GradientSum, results: Packed, rows: Rows, *, lent: bool) -> None:
    """Adds another rank's gradients to sums of `rows`. Args: lent: see Pass."""
    for there, gradients in _shared(results, rows):
        copies = lent and total.keeps
        total.add(there, *([x.clone() for x in gradients] if copies else gradients))


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
