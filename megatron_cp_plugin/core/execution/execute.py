"""Executes a plan with messages from rank to rank: one loop, forward and backward.

While a rank computes a step, the blocks of the next one come, and results of the last one leave.

B batch, S local tokens, H query heads, G KV heads, D head dim, E that of values.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.packed_rows import packed
from megatron_cp_plugin.core.blocks.rows import Rows, between, token_dim
from megatron_cp_plugin.core.comm import Communicator, Described, Pending
from megatron_cp_plugin.core.execution.program import (
    BlockId,
    Delivery,
    Exchange,
    Program,
    Task,
    Turn,
    program,
)
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.core.pipeline import HeadGroup
from megatron_cp_plugin.core.plans.plan import OF_KEYS, OF_ROWS, RESULTS, Move, Plan

Tensors = tuple[Tensor, ...]
Arrived = tuple[tuple[Delivery, Tensors], ...]


class Packed(NamedTuple):
    """Tensors of some rows of a block."""

    rows: Rows
    tensors: Tensors


class Channels(NamedTuple):
    """Where messages go: inputs of computations, and results; those that may take several steps
    on channels of their own, so that no other waits for them.
    """

    inputs: Communicator
    results: Communicator
    slow_inputs: Communicator
    slow_results: Communicator


class Pass(ABC):
    """What a rank does in one pass: with its own tensors, and with those that come.

    Its tensors are those of one group of heads at a time, from `open` on. Its results end with
    `close`, where they come straight from other ranks in the first step of the next group.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, retained: Tensors = ()) -> None:
        """Args: retained: of a backward, what its forward has there at the end."""
        self.q, self.k, self.v, self.retained = q, k, v, retained

    @abstractmethod
    def open(self, heads: HeadGroup, sent: frozenset[bool], *, strided: bool) -> None:
        """Begins with some heads.

        Args: sent: whether the own block of queries (false), of keys (true), goes to others.
            strided: they may go as slices of all heads.
        """

    @abstractmethod
    def own(self, of_keys: bool) -> Tensors:
        """The own block in the order in which its tensors travel."""

    @abstractmethod
    def compute(self, task: Task, queries: Tensors | None, keys: Tensors | None) -> None:
        """Computes a task. Args: queries, keys: of another rank; None: the own ones."""

    @abstractmethod
    def results_for(self, move: Move, held: Rows, before: Packed | None) -> Tensors:
        """What was found for another rank's block, with what came of ranks `before`.

        Args: held: rows of the block with which was computed.
        """

    @abstractmethod
    def accept(self, move: Move, results: Tensors) -> None:
        """Adds what another rank found for some rows of the own block."""

    def settle(self) -> None:  # noqa: B027  (sums are made at once)
        """Adds what was accepted, if it waits for that: the next results overwrite it."""

    @abstractmethod
    def close(self, heads: HeadGroup, of_keys: bool, others: Packed | None) -> None:
        """Ends with the queries, or keys, of some heads.

        Args: others: what is still to be added, the sum of all other ranks.
        """

    def expected(self, exchange: Exchange) -> tuple[tuple[Described, ...], ...]:
        """Shapes and dtypes of the tensors of each delivery that comes."""
        return _expected(exchange, self.q.shape[0], self.q.shape[3], self.v.shape[3], self.q.dtype)


@lru_cache(maxsize=1024)  # the same in all layers
def _expected(
    exchange: Exchange, batch: int, dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[tuple[Described, ...], ...]:
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


def follow(plan: Plan, channels: Channels, work: Pass, *, overlap: bool = True) -> None:
    """Does this rank's part of a plan.

    Args: overlap: false waits for each message where it is posted, for measurements.
    """
    parts = program(plan, channels.inputs.rank)
    run = _Run(plan, parts, channels, work)
    for turn in parts.turns:
        run.step(turn, overlap=overlap)
    run.take_results(None)


class _Run:
    """One rank on its way through a plan."""

    def __init__(self, plan: Plan, parts: Program, channels: Channels, work: Pass) -> None:
        self._relay, self._parts, self._channels, self._work = plan.relay, parts, channels, work
        self._device = work.q.device
        self._strided = channels.inputs.strided and channels.slow_inputs.strided
        self._held: dict[BlockId, Tensors] = {}
        # Which block to keep at the end.
        self._retained = parts.retained if plan.phase == "forward" else None
        if parts.retained is not None and plan.phase == "backward":
            self._held[parts.retained] = work.retained
        self._dropped: tuple[BlockId, ...] = ()
        self._earlier: dict[BlockId, Packed] = {}  # sums of ranks before this one
        # Results for the own block that a relay brought, by the first head and whether it is of
        # keys; none when they are complete and the block is closed.
        self._came: dict[tuple[int, bool], int] = {}
        self._computed: set[int] = set()  # groups, by the first head, in or past their last step
        # Heads whose queries, or keys (true), still get results that are under way.
        self._ended: list[tuple[HeadGroup, bool]] = []
        # What is under way, by the step that needs it.
        self._inputs: dict[int, list[Pending[Arrived]]] = {}
        self._results: dict[int, list[Pending[Arrived]]] = {}
        for of_results, exchange in parts.receivable:
            channel = channels.results if of_results else channels.inputs
            channel.reserve([tensor for each in work.expected(exchange) for tensor in each])

    def step(self, turn: Turn, *, overlap: bool) -> None:
        """Does one step."""
        work = self._work
        if turn.first:
            work.open(turn.heads, self._parts.sent, strided=self._strided)
        self._take_inputs(turn.step)
        if overlap:
            self._post_inputs(turn)
            self._expect_results(turn)
        for task in turn.tasks:
            work.compute(task, self._held.get(task.query), self._held.get(task.key))
        self._dropped = turn.dropped
        if turn.last and self._retained is not None:
            # In memory of its own: the next call's messages take this one.
            work.retained = tuple([x.clone() for x in self._held[self._retained]])
        if turn.last:
            self._computed.add(turn.heads.q.start)
        self.take_results(turn.step)
        for exchange in turn.results:
            if exchange.receives:
                work.settle()
            channel = self._channels.slow_results if exchange.slow else self._channels.results
            self._results.setdefault(exchange.needed, []).append(self._post(channel, exchange))
        if turn.last:
            self._end(turn.heads)
        if not overlap:
            self.take_results(None)
            self._post_inputs(turn)

    def take_results(self, step: int | None) -> None:
        """Waits for the results that a step needs, or all, and adds them where they belong."""
        for needed in sorted(self._results) if step is None else (step,):
            for pending in self._results.pop(needed, ()):
                for delivery, tensors in pending.wait():
                    self._take(delivery, tensors)
        for heads, of_keys in self._ended:
            self._work.close(heads, of_keys, None)
        self._ended.clear()

    def _end(self, heads: HeadGroup) -> None:
        """Closes what gets no results any more. A relay's last one may still close, see `_take`."""
        for of_keys in (False, True):
            awaited = self._parts.awaited[of_keys]
            if not awaited or self._came.get((heads.q.start, of_keys)) == awaited:
                self._work.close(heads, of_keys, None)
            elif not self._relay:
                self._ended.append((heads, of_keys))

    def _take(self, delivery: Delivery, tensors: Tensors) -> None:
        move, (owner, of_keys), _ = delivery
        if owner != self._parts.own[of_keys]:
            self._earlier[owner, of_keys] = Packed(move.block.rows, tensors)
        elif self._relay and self._is_last(move, of_keys):
            self._work.close(move.heads, of_keys, Packed(move.block.rows, tensors))
        else:
            self._work.accept(move, tensors)

    def _is_last(self, move: Move, of_keys: bool) -> bool:
        """Whether nothing is added to the own block, of some heads, after these results of a relay.

        Where a mask shortens its way, they may come before this rank's own last computation.
        """
        group = move.heads.q.start, of_keys
        self._came[group] = self._came.get(group, 0) + 1
        complete = self._came[group] == self._parts.awaited[of_keys]
        last = complete and move.heads.q.start in self._computed
        if last:
            del self._came[group]
        return last

    def _take_inputs(self, step: int) -> None:
        arrived = [pending.wait() for pending in self._inputs.pop(step, ())]
        for block in self._dropped:  # which others have by now
            self._held.pop(block, None)
        for each in arrived:
            for delivery, tensors in each:
                self._held[delivery.block] = tensors

    def _post_inputs(self, turn: Turn) -> None:
        for exchange in turn.inputs:
            channel = self._channels.slow_inputs if exchange.slow else self._channels.inputs
            self._inputs.setdefault(exchange.needed, []).append(self._post(channel, exchange))

    def _expect_results(self, turn: Turn) -> None:
        """Lets others send results while this rank still computes its own, if it waits for none."""
        for exchange in turn.results:
            if exchange.receives and not exchange.slow and not self._results:
                self._work.settle()
                self._channels.results.expect(exchange.sources)

    def _post(self, channel: Communicator, exchange: Exchange) -> Pending[Arrived]:
        strided = channel.strided
        sends = [(x, one.move.target) for one in exchange.sends for x in self._sent(one, strided)]
        described = self._work.expected(exchange)
        buffers = channel.buffers([tensor for each in described for tensor in each], self._device)
        arriving, start = [], 0
        for delivery, each in zip(exchange.receives, described, strict=True):
            arriving.append((delivery, buffers[start : start + len(each)]))
            start += len(each)
        receives = [(buffer, one.move.source) for one, own in arriving for buffer in own]
        under_way = channel.exchange(sends, receives)

        def finish() -> Arrived:
            under_way.wait()
            sends.clear()  # which lived until now
            return tuple(arriving)

        return Pending(finish)

    def _sent(self, delivery: Delivery, strided: bool) -> Sequence[Tensor]:
        move, block, result = delivery
        rows = move.block.rows
        if result:
            held = self._parts.rows[block]
            return self._work.results_for(move, held, self._earlier.pop(block, None))
        if block in self._held:
            held, tensors = self._parts.rows[block], self._held[block]
        else:
            tensors = self._work.own(block[1])
            held = between(0, tensors[0].shape[1])
        return [packed(x, token_dim(x), rows, held, strided=strided) for x in tensors]
