"""Ring attention: blocks travel from rank to rank, every rank computes what it sees of them.

`ring` is BurstAttention (contiguous layout), `zigzag` the same schedule with a balanced layout.

B batch, S local tokens, H query heads, G KV heads, D head dim, P ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import (
    Algorithm,
    Call,
    Gradients,
    Saved,
    attend_block,
    differentiate_block,
)
from megatron_cp_plugin.core.comm import Communicator, Pending, Phase
from megatron_cp_plugin.core.document_layout import PerDocument
from megatron_cp_plugin.core.layout import Contiguous, Layout, Zigzag
from megatron_cp_plugin.core.partial import (
    Accumulator,
    GradientSum,
    WholeGradient,
    accumulation_dtype,
)
from megatron_cp_plugin.core.pipeline import HeadGroup, check_chunks, successive_groups
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask, Tile, plan_tiles
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels.base import Statistics
from megatron_cp_plugin.registry import register

Block = tuple[Tensor, ...]
Visit = Callable[[Block, tuple[Tile, ...]], tuple[GradientSum, ...]]
# Takes a sum, and what is to be added to it.
Put = Callable[..., None]


@dataclass(frozen=True)
class RingPlacement(BlockPlacement):
    """Blocks go round the ring; every rank computes with what it is lent by its neighbour.

    Attributes: travelling: what goes round, K and V or the queries.
    """

    travelling: Literal["kv", "query"] = "kv"
    relay = True

    def place(self, query: int, key: int) -> Iterator[Place]:
        """See BlockPlacement.place: as many steps after the first as the blocks are apart."""
        yield Place(query if self.travelling == "kv" else key, (query - key) % self.size)


@dataclass(frozen=True)
class Tour:
    """The way of every rank's block around the ring, and what is computed at each stop.

    KV blocks go up (rank r to r + 1), query blocks down, so that under a causal mask on a
    contiguous layout the ranks that need a block come first. A block goes no further than its
    last stop with something to compute; what it gathered goes home from there.

    Attributes: moving: what travels; the other one stays.
    """

    layout: Layout
    size: int
    seq_len: int
    mask: Mask
    moving: Literal["kv", "query"]
    rectangular: bool

    def host(self, owner: int, step: int) -> int:
        """The rank at which the owner's block is at a step."""
        return (owner + step if self.moving == "kv" else owner - step) % self.size

    def owner(self, host: int, step: int) -> int:
        """Whose block is at a rank at a step."""
        return (host - step if self.moving == "kv" else host + step) % self.size

    def tiles(self, owner: int, host: int) -> tuple[Tile, ...]:
        """What `host` computes with the owner's block."""
        return _tiles(self, owner, host)

    def last(self, owner: int) -> int:
        """The last step at which the owner's block is of use."""
        return _last_step(self, owner)

    @property
    def uniform(self) -> bool:
        """Whether equal blocks visit every rank: then all ranks do the same in every step."""
        return len(set(_lengths(self))) == 1 and all(
            self.last(owner) == self.size - 1 for owner in range(self.size)
        )

    def length(self, owner: int) -> int:
        """Number of tokens of the owner's block."""
        return _lengths(self)[owner]

    def stops(self, owner: int, step: int) -> bool:
        """Whether the owner's block makes a stop at that step."""
        return step <= self.last(owner)


# Planned once: at short lengths a step of training is bound by the host.
@lru_cache(maxsize=4096)
def _tiles(tour: Tour, owner: int, host: int) -> tuple[Tile, ...]:
    query, kv = (host, owner) if tour.moving == "kv" else (owner, host)
    return plan_tiles(
        tour.layout.spans(query, tour.size, tour.seq_len),
        tour.layout.spans(kv, tour.size, tour.seq_len),
        tour.mask,
        rectangular=tour.rectangular,
    )


@lru_cache(maxsize=256)
def _lengths(tour: Tour) -> tuple[int, ...]:
    return tuple(tour.layout.length(r, tour.size, tour.seq_len) for r in range(tour.size))


@lru_cache(maxsize=4096)
def _last_step(tour: Tour, owner: int) -> int:
    steps = range(tour.size - 1, 0, -1)
    return next((s for s in steps if tour.tiles(owner, tour.host(owner, s))), 0)


@dataclass(frozen=True)
class _Heads:
    """What the backward of some heads starts from.

    Attributes: put: take the sums of dq, dk and dv.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    statistics: Statistics
    put: Sequence[Put]


class Ring(Algorithm):
    """BurstAttention: GAO forward (Algorithm 1), either rule of backward, double-buffered.

    While a rank computes with one block the next one arrives; no rank ever holds more than two.

    Kept for the backward: q, k, v, out and lse of the rank's own tokens. Beside these and its
    results a rank holds at most, with elements of 2 bytes, q = 2*B*H*S*D bytes of queries,
    kv = 4*B*G*S*D of keys and values and n groups of heads (`chunks`), rows of lse and delta aside,

        forward   3q + 2kv; n > 1: (4q + 3kv) / n
        backward  "kv": q + 9kv, "query": 11q + kv; n > 1: (2q + 15kv) / n, (19q + 2kv) / n

    and what kernels need within. With transport peer, receive buffers are kept between calls.

    Source: BurstAttention, Algorithms 1, 2 and 3. Differs: out and all gradients are summed in
    float32; blocks that are wholly in the causal future are not sent on; dQ travels on a flow of
    its own; a KV-rotating backward where that moves fewer bytes.
    """

    windows = True

    @dataclass(frozen=True)
    class Options(Algorithm.Options):
        """Options of the ring.

        Attributes:
            backward: what travels in the backward: "kv" (K, V, dK, dV), "query" (Q, dO, delta,
                lse, dQ), or "auto", the one with fewer bytes for this ratio of heads.
            chunks: groups of heads that are computed one after another, at most as many as KV
                heads: less memory, and in the backward one group's last hop runs beside the next
                group's first step; 0: two for long sequences, else one.
            gradients: dtype in which partial sums of gradients travel: "float32" or "model",
                the dtype of q.
            transport: "group" (the process group's own, NCCL or gloo), "peer" (copy engines over
                peer memory: GPUs of one node, equal blocks that visit every rank), or "auto",
                peer where that is possible.
        """

        backward: Literal["auto", "kv", "query"] = "auto"
        chunks: int = 0
        gradients: Literal["float32", "model"] = "float32"
        transport: Literal["auto", "group", "peer"] = "auto"

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        if options.transport == "peer" and topology.size > 1 and not topology.peer_access:
            raise ConfigError(
                f"{self.name} transport peer needs GPUs of one node with access to each other's "
                "memory, got ranks without it: use transport auto or group"
            )

    @classmethod
    def check(
        cls, options: Algorithm.Options, *, size: int, heads: int, kv_heads: int, causal: bool
    ) -> None:
        """See Algorithm.check."""
        assert isinstance(options, cls.Options)
        check_chunks(cls.name, options.chunks)

    def _flow(self, name: str, tour: Tour, slots: int) -> Communicator:
        """The flow of messages of that name, by copy engines where wanted and possible."""
        wanted = self.options.transport
        if wanted != "group" and self.topology.peer_access and tour.uniform:
            return self.topology.peer_channel(name, slots)
        if wanted == "peer" and tour.size > 1:
            raise ConfigError(
                f"{self.name} transport peer needs equal blocks that visit every rank, got "
                f"{tour.seq_len} tokens on the {tour.layout.name} layout: use transport auto"
            )
        return self.topology.channel(name)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward. Source: BurstAttention, Algorithm 3."""
        groups = self._groups(Shape.of(q, k, v, call.seq_len))
        if len(groups) == 1:
            out, lse = self._attend(q, (k, v), call)
            return out, lse, (q, k, v, out, lse)
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
        for group in groups:
            part, part_lse = self._attend(
                q[:, :, group.q], (k[:, :, group.kv], v[:, :, group.kv]), call
            )
            out[:, :, group.q] = part
            lse[:, group.q] = part_lse
            del part, part_lse
        return out, lse, (q, k, v, out, lse)

    def _attend(self, q: Tensor, kv: Block, call: Call) -> tuple[Tensor, Tensor]:
        """(out, lse) of some heads."""
        total = Accumulator(q, kv[1].shape[3])

        def visit(block: Block, tiles: tuple[Tile, ...]) -> tuple[GradientSum, ...]:
            keys, values = block
            attend_block(total, q, keys, values, tiles, call)
            return ()

        block = tuple(x.contiguous() for x in kv)
        self._circulate(block, self._tour(call, "kv"), visit, (), Pending(lambda: None)).wait()
        return total.result()

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward. Source: BurstAttention, Algorithm 2; differs: see the class."""
        q, k, v, out, lse = saved
        return self.differentiate(dout, q, k, v, Statistics(lse, out=out), call)

    def differentiate(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, statistics: Statistics, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `backward`, where either out or delta is at hand."""
        shape = Shape.of(q, k, v, call.seq_len)
        rotate = self._rotate_kv if self._rule(shape) == "kv" else self._rotate_query
        gradients = [WholeGradient(x) for x in (q, k, v)]
        coming_home: Pending[None] = Pending(lambda: None)
        for group in self._groups(shape):
            own = _Heads(
                dout[:, :, group.q],
                q[:, :, group.q],
                k[:, :, group.kv],
                v[:, :, group.kv],
                statistics.heads(group.q),
                [
                    partial(whole.put, heads)
                    for whole, heads in zip(gradients, (group.q, group.kv, group.kv), strict=True)
                ],
            )
            coming_home = rotate(own, call, coming_home)
        coming_home.wait()
        dq, dk, dv = (gradient.whole for gradient in gradients)
        return dq, dk, dv

    def _groups(self, shape: Shape) -> tuple[HeadGroup, ...]:
        elements = shape.elements(self.topology.size)
        return successive_groups(shape.heads, shape.kv_heads, self.options.chunks, elements)

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> "RingPlacement":
        """See Algorithm.placement."""
        return RingPlacement(
            self.layout,
            self.topology.size,
            self._groups(shape),
            wide_gradients=self.options.gradients == "float32",
            travelling="kv" if phase == "forward" else self._rule(shape),
        )

    def _rule(self, shape: Shape) -> Literal["kv", "query"]:
        """What travels in the backward; with "auto" whatever moves fewer bytes a hop."""
        if self.options.backward != "auto":
            return self.options.backward
        return "kv" if sum(self._hop(shape, "kv")) <= sum(self._hop(shape, "query")) else "query"

    def _rotate_kv(self, own: _Heads, call: Call, before: Pending[None]) -> Pending[None]:
        """K, V and their gradients travel.

        Args: before: see `_circulate`.

        Returns: to be waited for until all sums have been put.
        """
        dq = GradientSum(own.q)

        def visit(block: Block, tiles: tuple[Tile, ...]) -> tuple[GradientSum, ...]:
            k, v = block
            sums = Gradients(dq, GradientSum(k), GradientSum(v))
            differentiate_block(sums, own.dout, own.q, k, v, own.statistics, tiles, call)
            return sums.dk, sums.dv

        block = own.k.contiguous(), own.v.contiguous()
        done = self._circulate(block, self._tour(call, "kv"), visit, own.put[1:], before)
        own.put[0](dq)
        return done

    def _rotate_query(self, own: _Heads, call: Call, before: Pending[None]) -> Pending[None]:
        """Q, dO, delta, lse and dQ travel; otherwise as `_rotate_kv`."""
        dk, dv = GradientSum(own.k), GradientSum(own.v)

        def visit(block: Block, tiles: tuple[Tile, ...]) -> tuple[GradientSum, ...]:
            q, dout, delta, lse = block
            sums = Gradients(GradientSum(q), dk, dv)
            other = Statistics(lse, delta=delta)
            differentiate_block(sums, dout, q, own.k, own.v, other, tiles, call)
            return (sums.dq,)

        rows = own.statistics.delta_for(own.dout), own.statistics.lse
        block = tuple(x.contiguous() for x in (own.q, own.dout, *rows))
        done = self._circulate(block, self._tour(call, "query"), visit, own.put[:1], before)
        own.put[1](dk)
        own.put[2](dv)
        return done

    def _tour(self, call: Call, moving: Literal["kv", "query"]) -> Tour:
        return self._way(call.seq_len, call.mask, moving, call.kernel.rectangular_causal)

    def _way(
        self, seq_len: int, mask: Mask, moving: Literal["kv", "query"], rectangular: bool
    ) -> Tour:
        layout = self.layout.within(mask.documents)
        return Tour(layout, self.topology.size, seq_len, mask, moving, rectangular)

    def _circulate(
        self, block: Block, tour: Tour, visit: Visit, put: Sequence[Put], before: Pending[None]
    ) -> Pending[None]:
        """Sends the local block on its tour and computes with every block that comes by.

        `visit(block, tiles)` may return sums that belong to the block; they travel one step
        behind it, each stop adding its own.

        Args:
            put: take the sums of the local block, each with what other ranks added to it.
            before: of an earlier tour; waited for once this one has something to compute.

        Returns: to be waited for until they have.
        """
        rank = self.topology.rank
        blocks = self._flow("blocks", tour, slots=2)
        sums = _TravellingSums(
            self._flow("gradients", tour, slots=1), tour, block, self._sum_dtype(block[0].dtype)
        )
        held: Block | None = block
        for step in range(tour.size):
            arriving = self._post_hop(blocks, held, tour, step, block)
            own: tuple[GradientSum, ...] = ()
            if held is not None:
                own = visit(held, tour.tiles(tour.owner(rank, step), rank))
            if step == 0:
                before.wait()
            sums.after_stop(step, own)
            held = arriving.wait()
        return sums.coming_home(put)

    @staticmethod
    def _post_hop(
        comm: Communicator, held: Block | None, tour: Tour, step: int, like: Block
    ) -> Pending[Block | None]:
        """Posts this step's hop: the held block goes on, the next one comes, if they do."""
        rank = comm.rank
        incoming = _buffers(comm, like, tour, step + 1)
        goes_on = held is not None and step < tour.last(tour.owner(rank, step))
        hop = comm.exchange(
            [(tensor, tour.host(rank, 1)) for tensor in held or ()] if goes_on else [],
            [(tensor, tour.owner(rank, 1)) for tensor in incoming],
        )
        return hop.then(lambda _: incoming or None)

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return accumulation_dtype(dtype) if self.options.gradients == "float32" else dtype

    def _hop(self, shape: Shape, moving: Literal["kv", "query"]) -> tuple[int, int]:
        """Bytes per batch entry and token of one hop in the backward: (blocks, sums)."""
        sum_bytes = shape.wide_bytes if self.options.gradients == "float32" else shape.element_bytes
        if moving == "kv":
            return shape.kv_width * shape.element_bytes, shape.kv_width * sum_bytes
        both = shape.query_width + shape.out_width
        statistics = 2 * shape.heads * shape.wide_bytes
        return both * shape.element_bytes + statistics, shape.query_width * sum_bytes


def _buffers(
    comm: Communicator, like: Block, tour: Tour, step: int, dtype: torch.dtype | None = None
) -> Block:
    """Empty tensors for the block that stops here at a step; none where none does."""
    owner = tour.owner(comm.rank, step)
    if step >= tour.size or not tour.stops(owner, step):
        return ()
    tokens = tour.length(owner)
    shapes = [
        (t.shape[0], tokens, *t.shape[2:]) if t.dim() == 4 else (*t.shape[:2], tokens) for t in like
    ]
    described = [(shape, dtype or t.dtype) for shape, t in zip(shapes, like, strict=True)]
    return comm.buffers(described, like[0].device)


class _TravellingSums:
    """Sums that belong to the travelling blocks, one step behind them, and back home at last."""

    def __init__(self, comm: Communicator, tour: Tour, like: Block, dtype: torch.dtype) -> None:
        self._comm = comm
        self._tour = tour
        self._like = like
        self._dtype = dtype
        self._home: tuple[GradientSum, ...] = ()
        self._before: Block = ()  # of earlier stops, for the block that this rank holds next
        self._returned: Block = ()
        self._under_way: list[Pending[None]] = []

    def after_stop(self, step: int, own: tuple[GradientSum, ...]) -> None:
        """Adds what earlier stops gathered for the same block and sends the sum on."""
        if step == 0:
            self._home = own
            return
        if not self._home:
            return
        self._wait()
        comm, tour = self._comm, self._tour
        owner = tour.owner(comm.rank, step)
        sums: Block = ()
        if own:
            earlier = self._before or (None,) * len(own)
            sums = tuple(
                mine.result(self._dtype, plus=before)
                for mine, before in zip(own, earlier, strict=True)
            )
        gathered = self._like[: len(self._home)]
        self._before = _buffers(comm, gathered, tour, step + 1, self._dtype)
        goes_on = step < tour.last(owner)
        travel = comm.exchange(
            [(t, tour.host(comm.rank, 1)) for t in sums] if goes_on else [],
            [(t, tour.owner(comm.rank, 1)) for t in self._before],
        )
        returning: Block = ()
        if step == tour.last(comm.rank):
            described = [(tuple(t.shape), self._dtype) for t in gathered]
            returning = self._returned = comm.buffers(described, gathered[0].device)
        home = comm.exchange(
            [(t, owner) for t in sums] if not goes_on else [],
            [(t, tour.host(comm.rank, step)) for t in returning],
        )
        self._under_way = [travel, home]

    def coming_home(self, put: Sequence[Put]) -> Pending[None]:
        """Once waited for, this rank's own sums have been taken, with what came back for them."""

        def finish() -> None:
            self._wait()
            returned = self._returned or (None,) * len(put)
            for take, total, elsewhere in zip(put, self._home, returned, strict=True):
                take(total, elsewhere)

        return Pending(finish)

    def _wait(self) -> None:
        for pending in self._under_way:
            pending.wait()
        self._under_way = []


@register("ring")
class BurstRing(Ring):
    """BurstAttention's ring on contiguous chunks: no permutation, but unequal causal work."""

    layout = Contiguous()


@register("zigzag")
class ZigzagRing(Ring):
    """The ring on chunks p and 2P-1-p: equal causal work; Megatron's own layout.

    With layout=documents packed documents have equal work too.
    """

    @dataclass(frozen=True)
    class Options(Ring.Options):
        """Options of zigzag.

        Attributes: layout: "zigzag", or "documents": each long document by zigzag, short ones
            whole, on a rank each (`core.document_layout.PerDocument`).
        """

        layout: Literal["zigzag", "documents"] = "zigzag"

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self.layout = self.layout_for(options)

    @classmethod
    def layout_for(cls, options: Algorithm.Options) -> Layout:
        """See Algorithm.layout_for."""
        assert isinstance(options, cls.Options)
        return PerDocument() if options.layout == "documents" else Zigzag()
