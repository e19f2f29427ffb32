"""Follows a plan from rank to rank: one loop, forward and backward, for all such algorithms.

While a rank computes a step, the blocks of the next one come, and results of the last one leave.

B batch, S local tokens, H query heads, G KV heads, D head dim, E that of values.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megatron_cp_plugin.core.comm import Communicator, Described, Pending
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.core.pipeline import HeadGroup
from megatron_cp_plugin.core.plan import OF_KEYS, OF_ROWS, RESULTS, Move, Plan
from megatron_cp_plugin.core.program import BlockId, Exchange, Program, Task, Turn, program

Tensors = tuple[Tensor, ...]
Arrived = tuple[tuple[Move, Tensors], ...]


class Channels(NamedTuple):
    """Where messages go: inputs of computations, and results."""

    inputs: Communicator
    results: Communicator


class Pass(ABC):
    """What a rank does in one pass: with its own tensors, and with those that come.

    Its tensors are those of one group of heads at a time, from `open` to `close`.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.q, self.k, self.v = q, k, v

    @abstractmethod
    def open(self, heads: HeadGroup, sent: frozenset[bool]) -> None:
        """Begins with some heads.

        Args: sent: whether the own block of queries (false), of keys (true), goes to others.
        """

    @abstractmethod
    def own(self, of_keys: bool) -> Tensors:
        """The own block, contiguous, in the order in which its tensors travel."""

    @abstractmethod
    def compute(self, task: Task, queries: Tensors | None, keys: Tensors | None) -> None:
        """Computes a task. Args: queries, keys: of another rank; None: the own ones."""

    @abstractmethod
    def results_for(self, move: Move, before: Tensors | None) -> Tensors:
        """What was found for another rank's block, with what came of ranks `before`."""

    @abstractmethod
    def accept(self, move: Move, results: Tensors) -> None:
        """Adds what another rank found for some rows of the own block."""

    @abstractmethod
    def close(self, heads: HeadGroup, of_keys: bool, others: Tensors | None) -> None:
        """Ends with the queries, or keys, of some heads.

        Args: others: what is still to be added, the sum of all other ranks.
        """

    def describe(self, move: Move) -> list[Described]:
        """Shapes and dtypes of the tensors of a move."""
        return [self._describe(name, move) for message in move.messages for name in message]

    def _describe(self, name: str, move: Move) -> Described:
        batch, wide = self.q.shape[0], accumulation_dtype(self.q.dtype)
        if name in OF_ROWS:
            return (batch, move.heads.heads, move.tokens), wide
        heads = move.heads.kv_heads if name in OF_KEYS else move.heads.heads
        dim = (self.v if name in ("v", "dv", "out", "dout") else self.q).shape[3]
        dtype = wide if move.wide and name in RESULTS else self.q.dtype
        return (batch, move.tokens, heads, dim), dtype


def follow(plan: Plan, channels: Channels, work: Pass, *, overlap: bool = True) -> None:
    """Does this rank's part of a plan.

    Args: overlap: false waits for each message where it is posted, for measurements.
    """
    parts = program(plan, channels.inputs.rank)
    run = _Run(plan, parts, channels, work)
    for turn in parts.turns:
        run.step(turn, overlap=overlap)
    run.take_results()


class _Run:
    """One rank on its way through a plan."""

    def __init__(self, plan: Plan, parts: Program, channels: Channels, work: Pass) -> None:
        self._relay, self._parts, self._channels, self._work = plan.relay, parts, channels, work
        self._rank, self._device = channels.inputs.rank, work.q.device
        self._held: dict[BlockId, Tensors] = {}
        self._dropped: tuple[BlockId, ...] = ()
        self._earlier: dict[BlockId, Tensors] = {}  # sums of ranks before this one
        self._inputs: Pending[Arrived] | None = None
        self._results: Pending[Arrived] | None = None
        for of_results, moves in parts.receivable:
            channel = channels.results if of_results else channels.inputs
            channel.reserve([tensor for move in moves for tensor in work.describe(move)])

    def step(self, turn: Turn, *, overlap: bool) -> None:
        """Does one step."""
        work = self._work
        if turn.first:
            work.open(turn.heads, self._parts.sent)
        self._take_inputs()
        if overlap:
            self._inputs = self._post(self._channels.inputs, turn.inputs)
        for task in turn.tasks:
            work.compute(task, self._held.get(task.query), self._held.get(task.key))
        self._dropped = turn.dropped
        self.take_results()
        self._results = self._post(self._channels.results, turn.results)
        if not overlap or (turn.last and not self._relay):
            self.take_results()  # straight to their owner, whose sums of these heads end here
        if turn.last:
            for of_keys in (False, True):
                if not self._relay or of_keys not in self._parts.awaited:
                    work.close(turn.heads, of_keys, None)
        if not overlap:
            self._inputs = self._post(self._channels.inputs, turn.inputs)

    def take_results(self) -> None:
        """Waits for the results that were posted last, and adds them where they belong."""
        if self._results is None:
            return
        for move, tensors in self._results.wait():
            (owner,) = move.block.owners
            if owner != self._rank:
                self._earlier[owner, move.of_keys] = tensors
            elif self._relay:
                self._work.close(move.heads, move.of_keys, tensors)
            else:
                self._work.accept(move, tensors)
        self._results = None

    def _take_inputs(self) -> None:
        arrived = () if self._inputs is None else self._inputs.wait()
        self._inputs = None
        for block in self._dropped:  # which others have by now
            self._held.pop(block, None)
        for move, tensors in arrived:
            self._held[move.block.owners[0], move.of_keys] = tensors

    def _post(self, channel: Communicator, exchange: Exchange) -> Pending[Arrived] | None:
        if not exchange.any:
            return None
        sends = [(x, move.target) for move in exchange.sends for x in self._sent(move)]
        described = [self._work.describe(move) for move in exchange.receives]
        buffers = channel.buffers([tensor for each in described for tensor in each], self._device)
        arriving, start = [], 0
        for move, each in zip(exchange.receives, described, strict=True):
            arriving.append((move, buffers[start : start + len(each)]))
            start += len(each)
        receives = [(buffer, move.source) for move, own in arriving for buffer in own]
        return channel.exchange(sends, receives).then(lambda _: tuple(arriving))

    def _sent(self, move: Move) -> Sequence[Tensor]:
        block = move.block.owners[0], move.of_keys
        if move.result:
            return self._work.results_for(move, self._earlier.pop(block, None))
        if block in self._held:
            return self._held[block]
        rows = slice(move.block.start, move.block.stop)
        return [_rows(x, rows) for x in self._work.own(move.of_keys)]


def _rows(x: Tensor, rows: slice) -> Tensor:
    """Some tokens of [B,S,heads,D] or [B,H,S], contiguous."""
    return (x[:, rows] if x.dim() == 4 else x[:, :, rows]).contiguous()
