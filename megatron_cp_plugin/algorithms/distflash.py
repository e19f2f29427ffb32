"""DISTFLASHATTN: contiguous chunks, and ranks that would idle compute for those that would not.

No permutation of the tokens, so that everything else in a model stays as it is, and yet equal
causal work. All of the schedule is planned before a tensor moves.

B batch, S local tokens, H query heads, G KV heads, D head dim, P ranks.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, lru_cache
from typing import Literal

from torch import Tensor

from megatron_cp_plugin.core.algorithm import (
    Algorithm,
    Call,
    Gradients,
    Saved,
    attend_block,
    differentiate_block,
)
from megatron_cp_plugin.core.comm import Communicator, Described, Pending, Phase, Receive, Send
from megatron_cp_plugin.core.layout import Contiguous, Span
from megatron_cp_plugin.core.partial import (
    Accumulator,
    GradientSum,
    WholeGradient,
    accumulation_dtype,
)
from megatron_cp_plugin.core.pipeline import check_chunks, head_groups
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask, Tile, plan_tiles
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels.base import Statistics
from megatron_cp_plugin.registry import register

log = logging.getLogger(__name__)

Block = tuple[Tensor, ...]
LastStep = Literal["owner", "shared"]

_LAYOUT = Contiguous()


@dataclass(frozen=True)
class HelpedPlacement(BlockPlacement):
    """Blocks of contiguous tokens, straight from their owners.

    Attributes: helping: ranks compute for others where they would wait. shared: of an even number
        of ranks the last step is computed half by the owner of the queries and half by a helper.
    """

    helping: bool = True
    shared: bool = True

    def place(self, query: int, key: int) -> Iterator[Place]:
        """See BlockPlacement.place. Source: DISTFLASHATTN, Algorithm 2."""
        distance = (query - key) % self.size
        if self.helping and self.shared and distance and 2 * distance == self.size:
            yield Place(query, distance, part=(1, 2))
            yield Place(key, distance, part=(0, 2))
        elif self.helping and 2 * distance > self.size:
            yield Place(key, self.size - distance)
        else:
            yield Place(query, distance)


@dataclass(frozen=True)
class Task:
    """One block of queries against one block of keys, computed by the rank that has one of them.

    Attributes:
        query_owner, key_owner: whose blocks meet. host: who computes; one of the two.
        part: rows of the other rank's block that the host fetches.
        tiles: the host's whole own block against the fetched part.
    """

    query_owner: int
    key_owner: int
    host: int
    part: slice
    tiles: tuple[Tile, ...]

    @property
    def source(self) -> int:
        """The rank that the host fetches from; the host itself where both blocks are its own."""
        return self.key_owner if self.host == self.query_owner else self.query_owner

    @property
    def helps(self) -> bool:
        """Whether the host computes for the owner of the queries."""
        return self.host != self.query_owner

    @property
    def tokens(self) -> int:
        """Number of tokens that the host fetches."""
        return self.part.stop - self.part.start

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs computed."""
        return sum(tile.area for tile in self.tiles)


@dataclass(frozen=True)
class Schedule:
    """Who computes what in which step; index: step, then rank. None: that rank waits."""

    size: int
    steps: tuple[tuple[Task | None, ...], ...]

    @property
    def waiting(self) -> int:
        """Worker-steps without work."""
        return sum(task is None for step in self.steps for task in step)

    @property
    def idle_fraction(self) -> Fraction:
        """Worker-steps without work, as a fraction of the ring's P * P.

        This is how the paper counts (section 3.2): every tile is one unit, the causal ones of the
        first step too, and the ring's worker-steps are the measure of both schedules. Of its own
        P * (P/2 + 1) worker-steps the balanced one wastes 1 / (P + 2) where P is even.
        """
        return Fraction(self.waiting, self.size**2)

    @cached_property
    def largest(self) -> dict[bool, int]:
        """Most tokens that a host fetches, for tasks that do (not) help, if there are any."""
        tokens: dict[bool, int] = {}
        for step in range(len(self.steps)):
            for task in self.exchanged(step):
                tokens[task.helps] = max(tokens.get(task.helps, 0), task.tokens)
        return tokens

    @property
    def has_helpers(self) -> bool:
        """Whether any rank computes for another."""
        return True in self.largest

    def exchanged(self, step: int) -> tuple[Task, ...]:
        """Tasks of a step, if there is one, whose host fetches something."""
        tasks = self.steps[step] if step < len(self.steps) else ()
        return tuple(task for task in tasks if task and task.source != task.host)


@lru_cache(maxsize=256)
def plan(
    size: int,
    seq_len: int,
    mask: Mask,
    *,
    balanced: bool,
    last_step: LastStep,
    rectangular: bool = False,
) -> Schedule:
    """The schedule of all ranks.

    In step t, rank p takes the keys of rank p - t. Where those are in its future, so that it has
    nothing of its own to do, it takes the queries of rank p - t (mod P) against its own keys. So
    floor(P/2) + 1 steps are enough; without helpers (or with a mask that leaves nobody idle) it is
    P. With an even P, the helpers of the last step would do what the owners do then.

    Source: DISTFLASHATTN, Algorithm 2 (ranks there count from 1). Differs: line 14 as printed
    lets nobody help in the last step of an odd P either, which would leave pairs out; Figure 1 and
    section 3.2 do not.

    Args:
        balanced: with helpers. last_step: of an even P, computed by the "owner" of the queries
            alone, as in the paper, or "shared" with the rank that would wait. rectangular: as in
            `plan_tiles`.
    """
    helping = balanced and mask.causal
    steps: list[tuple[Task | None, ...]] = []
    for step in range(size // 2 + 1 if helping else size):
        tasks: list[Task | None] = []
        shared = last_step == "shared" and 2 * step == size
        for host in range(size):
            other = (host - step) % size
            block = _Block(size, seq_len, mask, rectangular)
            if not mask.causal or other <= host:
                rows = block.half(host, late=True) if helping and shared else block.whole(host)
                tasks.append(block.task(host, other, host, rows, block.whole(other)))
            elif helping and (2 * step < size or shared):
                rows = block.half(other, late=False) if shared else block.whole(other)
                tasks.append(block.task(other, host, host, rows, block.whole(host)))
            else:
                tasks.append(None)
        steps.append(tuple(tasks))
    while len(steps) > 1 and not any(steps[-1]):
        steps.pop()
    return Schedule(size, tuple(steps))


@dataclass(frozen=True)
class _Block:
    """Planning of one pair of blocks. Rows are local: [start, stop) of a rank's chunk."""

    size: int
    seq_len: int
    mask: Mask
    rectangular: bool

    def whole(self, rank: int) -> tuple[int, int]:
        return 0, len(self._span(rank))

    def half(self, rank: int, *, late: bool) -> tuple[int, int]:
        tokens = len(self._span(rank))
        return (tokens // 2, tokens) if late else (0, tokens // 2)

    def task(
        self,
        query_owner: int,
        key_owner: int,
        host: int,
        rows: tuple[int, int],
        cols: tuple[int, int],
    ) -> Task | None:
        """Some rows of one block against some of another; None if they do not see each other."""
        tiles = plan_tiles(
            [self._rows(query_owner, rows)],
            [self._rows(key_owner, cols)],
            self.mask,
            rectangular=self.rectangular,
        )
        if not tiles:
            return None
        fetches_queries = host != query_owner
        touched = [tile.q if fetches_queries else tile.kv for tile in tiles]
        first, last = min(s.start for s in touched), max(s.stop for s in touched)
        offset = rows[0] if fetches_queries else cols[0]
        # Tiles count from where their block is held: the local one whole, the other as fetched.
        q_shift, kv_shift = (-first, cols[0]) if fetches_queries else (rows[0], -first)
        moved = tuple(tile.moved(q_shift, kv_shift) for tile in tiles)
        part = slice(offset + first, offset + last)
        return Task(query_owner, key_owner, host, part, moved)

    def _span(self, rank: int) -> Span:
        (span,) = _LAYOUT.spans(rank, self.size, self.seq_len)
        return span

    def _rows(self, rank: int, rows: tuple[int, int]) -> Span:
        start = self._span(rank).start
        return Span(start + rows[0], start + rows[1])


@register("distflash")
class DistFlash(Algorithm):
    """DISTFLASHATTN with helpers in the forward and, by the same schedule, in the backward.

    An owner of queries fetches K, V and (backward) returns dK, dV. A helper fetches Q and returns
    (out, lse); in the backward it fetches Q, dO, delta, lse, returns dQ and keeps its own dK, dV.
    What is fetched or returned goes straight from rank to rank, in one flow of messages each;
    neither queries nor KV heads are ever expanded. Every returned gradient is that of one block
    pair, as the kernel gave it, and is summed in float32 where it belongs.

    Source: DISTFLASHATTN, Algorithms 1 and 2, section 3.2.
    """

    layout = _LAYOUT
    windows = True

    @dataclass(frozen=True)
    class Options(Algorithm.Options):
        """Options of distflash.

        Attributes:
            balanced: idle ranks help; false gives the unbalanced ring of the paper (Algorithm 1).
            overlap: the fetch for the next step runs during the present one; false waits for each
                message where it is posted, for measurements.
            last_step: of an even number of ranks: "shared" by the owner of the queries and the rank
                that would wait, or computed by the "owner" alone while half of the ranks wait (the
                paper's rule; on 4 GPUs it takes 1.25 times as long).
            chunks: groups of heads that the backward takes one after another, at most as many as
                KV heads: two need less memory, and 1 to 2% more time.
            transport: "group" (the process group's own, NCCL or gloo), "peer" (copy engines over
                peer memory: GPUs of one node), or "auto", peer where that is possible.
        """

        balanced: bool = True
        overlap: bool = True
        last_step: LastStep = "shared"
        chunks: int = 1
        transport: Literal["auto", "group", "peer"] = "auto"

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        if options.transport == "peer" and topology.size > 1 and not topology.peer_access:
            raise ConfigError(
                "distflash transport peer needs GPUs of one node with access to each other's "
                "memory, got ranks without it: use transport auto or group"
            )
        self._fetches = self._flow("fetches")
        self._returns = self._flow("returns")

    def _flow(self, name: str) -> Communicator:
        """A flow of messages; by copy engines, where a block is read until the next but one."""
        if self.options.transport != "group" and self.topology.peer_access:
            return self.topology.peer_channel(name, slots=2)
        return self.topology.channel(name)

    @classmethod
    def check(
        cls, options: Algorithm.Options, *, size: int, heads: int, kv_heads: int, causal: bool
    ) -> None:
        """See Algorithm.check: serves everything; says so where helpers have nothing to do."""
        assert isinstance(options, cls.Options)
        check_chunks(cls.name, options.chunks)
        if options.balanced and not causal and size > 1:
            _say_that_nobody_helps(size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward."""
        total = Accumulator(q, v.shape[3])
        out_like = q.new_empty((q.shape[0], 0, q.shape[2], v.shape[3]))
        lse_like = q.new_empty((q.shape[0], q.shape[2], 0), dtype=accumulation_dtype(q.dtype))

        def compute(task: Task, fetched: Block) -> Block:
            if not task.helps:
                keys, values = fetched or (k, v)
                attend_block(total, q, keys, values, task.tiles, call)
                return ()
            partial = Accumulator(fetched[0], v.shape[3])
            attend_block(partial, fetched[0], k, v, task.tiles, call)
            out, lse = partial.result()
            return out.contiguous(), lse.contiguous()

        def accept(task: Task, results: Block) -> None:
            total.add(task.part, *results)

        lent = _Lent(kv=(k, v), query=(q,), returned_kv=(), returned_query=(out_like, lse_like))
        self._follow(self._schedule(call), lent, compute, accept)
        out, lse = total.result()
        return out, lse, (q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward."""
        q, k, v, out, lse = saved
        gradients = [WholeGradient(x) for x in (q, k, v)]
        for group in head_groups(q.shape[2], k.shape[2], self.options.chunks, share_kv=False):
            sums = self._differentiate(
                dout[:, :, group.q],
                q[:, :, group.q],
                k[:, :, group.kv],
                v[:, :, group.kv],
                Statistics(lse, out=out).heads(group.q),
                call,
            )
            for whole, heads, total in zip(
                gradients, (group.q, group.kv, group.kv), (sums.dq, sums.dk, sums.dv), strict=True
            ):
                whole.put(heads, total)
            del sums, total
        dq, dk, dv = (gradient.whole for gradient in gradients)
        return dq, dk, dv

    def _differentiate(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        call: Call,
    ) -> Gradients:
        """The sums of dq, dk, dv of some heads."""
        schedule = self._schedule(call)
        total = Gradients(GradientSum(q), GradientSum(k), GradientSum(v))

        def compute(task: Task, fetched: Block) -> Block:
            if not fetched:
                differentiate_block(total, dout, q, k, v, statistics, task.tiles, call)
                return ()
            if not task.helps:
                keys, values = fetched
                sums = Gradients(total.dq, GradientSum(keys), GradientSum(values))
                differentiate_block(sums, dout, q, keys, values, statistics, task.tiles, call)
                return sums.dk.result(), sums.dv.result()
            other_q, other_dout, delta, other_lse = fetched
            sums = Gradients(GradientSum(other_q), total.dk, total.dv)
            other = Statistics(other_lse, delta=delta)
            differentiate_block(sums, other_dout, other_q, k, v, other, task.tiles, call)
            return (sums.dq.result(),)

        def accept(task: Task, results: Block) -> None:
            sums = (total.dq,) if task.helps else (total.dk, total.dv)
            for own, gradient in zip(sums, results, strict=True):
                own.add(task.part, gradient)

        query: Block = ()
        if schedule.has_helpers:
            query = (q, dout, statistics.delta_for(dout), statistics.lse)
        kv = k.contiguous(), v.contiguous()
        lent = _Lent(kv=kv, query=query, returned_kv=kv, returned_query=(q,))
        self._follow(schedule, lent, compute, accept)
        return total

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> HelpedPlacement:
        """See Algorithm.placement.

        With causal masking and S = N/P tokens each, let e and w be the bytes of an element and of
        a float32, h = floor((P-1)/2) the number of steps with helpers, and for rank p = 0..P-1

            lends KV to      kv(p)  = min(floor(P/2), P-1-p) ranks,
            owns             own(p) = min(floor(P/2), p) tasks with KV of others,
            is helped in     q(p)   = max(0, h - (P-1-p)) tasks,
            helps in         o(p)   = max(0, h - p) tasks.

        Bytes that p sends, each times B*S:

            forward   kv(p) * 2GDe + q(p) * HDe + o(p) * (HDe + Hw)
            backward  kv(p) * 2GDe + own(p) * 2GDe + q(p) * (2HDe + 2Hw) + o(p) * HDe

        Without helpers floor(P/2) becomes P-1 and h becomes 0. With a shared last step of an even
        P, ranks p < P/2 help and ranks p >= P/2 are helped once more, with half of the rows.
        """
        chunks = 1 if phase == "forward" else self.options.chunks
        return HelpedPlacement(
            self.layout,
            self.topology.size,
            head_groups(shape.heads, shape.kv_heads, chunks, share_kv=False),
            helping=self.options.balanced and mask.causal,
            shared=self.options.last_step == "shared",
        )

    def _schedule(self, call: Call) -> Schedule:
        return self._plan(call.seq_len, call.mask, call.kernel.rectangular_causal)

    def _plan(self, seq_len: int, mask: Mask, rectangular: bool) -> Schedule:
        return plan(
            self.topology.size,
            seq_len,
            mask,
            balanced=self.options.balanced,
            last_step=self.options.last_step,
            rectangular=rectangular,
        )

    def _follow(
        self,
        schedule: Schedule,
        lent: "_Lent",
        compute: Callable[[Task, Block], Block],
        accept: Callable[[Task, Block], None],
    ) -> None:
        """Goes through the schedule with this rank.

        Args:
            compute: does a task with what was fetched for it, () if nothing was; gives what goes
                back to where that came from. accept: takes what another rank gave back.
        """
        rank, overlap = self.topology.rank, self.options.overlap
        self._make_room(schedule, lent)
        arriving = self._fetch(schedule, 0, lent)
        coming_back: Pending[list[tuple[Task, Block]]] | None = None
        for step, tasks in enumerate(schedule.steps):
            if step and not overlap:
                arriving = self._fetch(schedule, step, lent)
            fetched = arriving.wait()
            if overlap:
                arriving = self._fetch(schedule, step + 1, lent)
            task = tasks[rank]
            results = compute(task, fetched) if task else ()
            if coming_back:
                _accept_all(coming_back, accept)
            coming_back = self._give_back(schedule, step, results, lent)
            if not overlap:
                _accept_all(coming_back, accept)
                coming_back = None
        if coming_back:
            _accept_all(coming_back, accept)

    def _fetch(self, schedule: Schedule, step: int, lent: "_Lent") -> Pending[Block]:
        """Posts what this rank fetches for a step, and what others fetch from it."""
        rank = self.topology.rank
        sends: list[Send] = []
        buffers: Block = ()
        receives: list[Receive] = []
        for task in schedule.exchanged(step):
            block = lent.query if task.helps else lent.kv
            if task.source == rank:
                sends += [(_part(x, task.part), task.host) for x in block]
            if task.host == rank:
                buffers = self._fetches.buffers(_described(block, task.tokens), block[0].device)
                receives = [(buffer, task.source) for buffer in buffers]
        return self._fetches.exchange(sends, receives).then(lambda _: buffers)

    def _give_back(
        self, schedule: Schedule, step: int, results: Block, lent: "_Lent"
    ) -> Pending[list[tuple[Task, Block]]]:
        """Posts the results that belong to another rank, and those of others for this one."""
        rank = self.topology.rank
        sends: list[Send] = []
        coming: list[tuple[Task, Block]] = []
        for task in schedule.exchanged(step):
            if task.host == rank:
                sends = [(x, task.source) for x in results]
            if task.source == rank:
                like = lent.returned_query if task.helps else lent.returned_kv
                described = _described(like, task.tokens)
                if described:
                    coming.append((task, self._returns.buffers(described, like[0].device)))
        receives = [(buffer, task.host) for task, buffers in coming for buffer in buffers]
        return self._returns.exchange(sends, receives).then(lambda _: coming)

    def _make_room(self, schedule: Schedule, lent: "_Lent") -> None:
        """Reserves, for all ranks, what the largest of all their messages needs."""
        for helps, tokens in schedule.largest.items():
            lent_block = lent.query if helps else lent.kv
            returned = lent.returned_query if helps else lent.returned_kv
            self._fetches.reserve(_described(lent_block, tokens))
            self._returns.reserve(_described(returned, tokens))


@dataclass(frozen=True)
class _Lent:
    """What a rank gives to others, and what comes back for it (templates of shape and dtype).

    Attributes:
        kv, query: local tensors that a host fetches, of which it takes some rows.
        returned_kv, returned_query: like what the host gives back after a task with them.
    """

    kv: Block
    query: Block
    returned_kv: Block
    returned_query: Block


def _part(x: Tensor, rows: slice) -> Tensor:
    """Some tokens of [B,S,heads,D] or [B,H,S], contiguous."""
    return (x[:, rows] if x.dim() == 4 else x[:, :, rows]).contiguous()


def _described(block: Block, tokens: int) -> list[Described]:
    """Tensors of `tokens` tokens, otherwise like [B,S,heads,D] or [B,H,S]."""
    return [
        ((x.shape[0], tokens, *x.shape[2:]) if x.dim() == 4 else (*x.shape[:2], tokens), x.dtype)
        for x in block
    ]


def _accept_all(
    coming_back: Pending[list[tuple[Task, Block]]], accept: Callable[[Task, Block], None]
) -> None:
    for task, results in coming_back.wait():
        accept(task, results)


@cache
def _say_that_nobody_helps(size: int) -> None:
    log.info(
        "distflash: full attention keeps all %d ranks busy, so it runs as the plain ring, "
        "without helpers",
        size,
    )
