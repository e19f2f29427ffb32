"""The interface of softmax attention algorithms."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.caching import cached_method
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.kernel import Problem, SoftmaxKernel, Statistics
from megatron_cp_plugin.core.layout import Documents, Layout
from megatron_cp_plugin.core.layouts.document_layout import NAMED
from megatron_cp_plugin.core.masks.batch import Batch
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.masks.tile_batches import Batches
from megatron_cp_plugin.core.partial import Accumulator, GradientSum, rows_at
from megatron_cp_plugin.core.placement import Placement
from megatron_cp_plugin.core.plans.compile import plan_of
from megatron_cp_plugin.core.plans.plan import PHASES, Plan
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask, Tile
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ContextParallelError


class Asked(NamedTuple):
    """What a call of attention is made with, see `core.autograd.function.attend`.

    Attributes: q, k, v: shapes. deterministic: torch's setting. seq_len: N, in tokens.
    """

    q: torch.Size
    k: torch.Size
    v: torch.Size
    dtype: torch.dtype
    device: torch.device
    deterministic: bool
    seq_len: int
    causal: bool
    window: int | None
    documents: tuple[int, ...]
    slices: Slices | None
    scale: float | None
    kernel_for: Callable[[Problem], SoftmaxKernel]


@dataclass(frozen=True, eq=False)  # what follows from it is kept by it
class Call:
    """One attention over the whole split sequence; equal only to itself.

    Attributes: seq_len: N, in tokens. mask: of the whole sequence. scale: factor of the scores.
        kernel: computes the tiles. dq, dkv: whether the gradient of q, and those of k and v, are
        wanted; the same on all ranks.
    """

    seq_len: int
    mask: Mask
    scale: float
    kernel: SoftmaxKernel
    dq: bool = True
    dkv: bool = True

    @cached_property
    def packed(self) -> bool:
        """Whether one kernel call computes several tiles: with masks that make many of them."""
        return self.kernel.packs and bool(self.mask.special)

    @cached_property
    def places_outputs(self) -> bool:
        """Whether the kernel writes a block's first partial output where the merged one will be."""
        return self.kernel.places_outputs and not self.packed

    @cached_property
    def places_gradients(self) -> bool:
        """Whether the kernel writes a block's first gradients where their sums will be."""
        return self.kernel.places_gradients and not self.packed

    def wanting(self, *, dq: bool, dkv: bool) -> "Call":
        """The same call, of which only some gradients are wanted."""
        if (dq, dkv) == (self.dq, self.dkv):
            return self
        if (dq, dkv) not in self._wanting:
            self._wanting[dq, dkv] = replace(self, dq=dq, dkv=dkv)
        return self._wanting[dq, dkv]

    @cached_property
    def _wanting(self) -> dict[tuple[bool, bool], "Call"]:
        return {}


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one attention layer: bytes of payload, and numbers of messages."""

    forward_bytes: int
    forward_messages: int
    backward_bytes: int
    backward_messages: int


Saved = tuple[Tensor, ...]


def number(
    default: int,
    worth_trying: Callable[[int], Sequence[int]] | None = None,
    *,
    least: int | None = None,
) -> int:
    """An integer option.

    Args:
        worth_trying: maps the number of ranks to the values that `auto` tries; None: the default.
        least: `registry.read_options` refuses smaller values; None: `check` says what is allowed.
    """
    metadata = {"worth_trying": worth_trying, "least": least}
    option: int = field(default=default, metadata=metadata)
    return option


def divisors(size: int) -> list[int]:
    """What divides a number of ranks, 1 and itself included."""
    return [n for n in range(1, size + 1) if size % n == 0]


def group_counts(size: int) -> list[int]:
    """Numbers of head groups to try; 0: the algorithm chooses."""
    return [0, 1, 2, 4, 8]


class Algorithm(ABC):
    """Softmax attention over a sequence that is split among the ranks of a topology.

    Most algorithms derive from `algorithms.point_to_point.PointToPoint`, which follows any
    placement, and define only `layout`, `Options` and `placement`. `registry.create` makes them,
    with a topology and an instance of their own `Options`.

    B batch, S local tokens, N tokens of the whole sequence, H query heads, G KV heads, D head dim
    of queries and keys, E that of values and outputs. Formulas of subclasses are for E = D.

    Attributes:
        name: set by the registry.
        layout: which tokens each rank holds, for batch slicing, RoPE and attention alike.
        windows: whether it supports masks with a window, documents or spans.
        topology: the ranks.
        options: as given.
    """

    name: str = ""
    layout: Layout
    windows: bool = False

    @dataclass(frozen=True)
    class Options:
        """Settings of the algorithm, of types Literal, bool, int, float or str; subclasses declare
        theirs, with defaults.
        """

    def __init__(self, topology: Topology, options: Options) -> None:
        self.topology = topology
        self.options = options
        self.layout = self.layout_for(options)

    # Looked up once a pass: at short lengths a step of training is bound by the host.
    @cached_property
    def _plan(self) -> Callable[[Shape, Mask, Phase, bool, int | None], Plan]:
        return cached_method(self._make_plan, 64)

    @cached_property
    def _on(self) -> Callable[[Layout], "Algorithm"]:
        return cached_method(self._make_on, 16)

    @cached_property
    def _called(self) -> Callable[[Asked], tuple["Algorithm | None", Call]]:
        return cached_method(self._make_call, 64)

    @classmethod
    def layout_for(cls, options: Options) -> Layout:
        """The layout of an instance with these options: the one that option `layout` names, if the
        algorithm has that option; else the class's.
        """
        choice = getattr(options, "layout", None)
        return cls.layout if choice is None else NAMED[choice]

    def within(self, documents: Documents) -> "Algorithm":
        """This algorithm with the layout of a sequence of such documents, see `Layout.within`.

        Sends nothing: channels and groups are those of the topology.
        """
        layout = self.layout.within(documents)
        return self if layout == self.layout else self._on(layout)

    def _make_on(self, layout: Layout) -> "Algorithm":
        other = type(self)(self.topology, self.options)
        other.layout = layout
        return other

    @classmethod  # noqa: B027  (most algorithms serve everything)
    def check(cls, options: Options, *, size: int, heads: int, kv_heads: int, causal: bool) -> None:
        """Raises: ConfigError if the algorithm does not support this; needs no process group."""

    def called(self, asked: Asked) -> tuple["Algorithm", Call]:
        """The algorithm, `within` the documents, that computes a call, and the call; checked once.

        Raises: ContextParallelError if numbers of tokens or settings do not fit;
        KernelUnavailableError if the kernel cannot serve them.
        """
        on, call = self._called(asked)
        return on or self, call

    def _make_call(self, asked: Asked) -> tuple["Algorithm | None", Call]:
        # None stands for itself: it holds what this returns.
        documents, slices, window = asked.documents, asked.slices, asked.window
        mask = Mask(asked.causal, window, documents) if slices is None else Mask.of(slices, window)
        on = self.within(mask.followed)
        rank, size = self.topology.rank, self.topology.size
        expected = on.layout.length(rank, size, asked.seq_len)
        _, tokens, heads, head_dim = asked.q
        if tokens != expected:
            raise ContextParallelError(
                f"rank {rank} of {size} holds {expected} of {asked.seq_len} tokens "
                f"({on.layout.name} layout), got {tokens}: pass seq_len=, or shard with cp.shard"
            )
        kv_heads = asked.k[2]
        self.check(self.options, size=size, heads=heads, kv_heads=kv_heads, causal=mask.causal)
        if mask.special and not self.windows:
            raise ContextParallelError(f"{self.name} does not support {mask.special}: leave it out")
        scale = head_dim**-0.5 if asked.scale is None else asked.scale
        # Kernels that mask scores before they scale them make NaN, or worse, of others.
        if not 0 < scale < inf:
            raise ContextParallelError(
                f"attention needs a scale above 0, got {scale}: leave it out for head_dim**-0.5, "
                "or multiply q by it"
            )
        problem = Problem(
            asked.device,
            asked.dtype,
            heads,
            kv_heads,
            head_dim,
            asked.deterministic,
            documents=bool(documents) or slices is not None,
            value_dim=asked.v[3],
            windows=window is not None or slices is not None,
        )
        call = Call(asked.seq_len, mask, scale, asked.kernel_for(problem))
        return None if on is self else on, call

    def make_channels(self, shape: Shape) -> None:  # noqa: B027  (some make all in the constructor)
        """Makes the process groups that calls need; a collective operation.

        Args: shape: heads, head dims and dtypes are those of all calls; every rank has equally many
            of its tokens.
        """

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """Attention of the local queries over all keys.

        Args: q: [B,S,H,D]; k: [B,S,G,D]; v: [B,S,G,E]; contiguous, local shards in the order of
            `layout`.

        Returns: out [B,S,H,E] in q's dtype; lse [B,H,S], natural logarithm, float32 (float64 for
        float64); and what `backward` needs, local tensors only. Out among them is the same tensor
        as the one that is returned, because attention sinks change it in place.
        """

    @abstractmethod
    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the local shards.

        Args: dout: [B,S,H,E] contiguous, in q's dtype. saved: of `forward`.

        Returns: dq [B,S,H,D], dk [B,S,G,D], dv [B,S,G,E], in the dtypes of q, k, v. Those that the
        call does not want may be any tensors, and need not be sent.
        """

    def computed(self, shape: Shape) -> Shape:
        """The shape that is computed for `shape`, including zero heads if any are added."""
        return shape

    @abstractmethod
    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> Placement:
        """Which rank computes what in a pass, in which order, and from whom it gets the rest.

        Args: shape: of the whole problem, with the `shape.seq_len` tokens of all ranks. mask: of
            the whole sequence. phase: "forward" or "backward".
        """

    def plan(
        self,
        shape: Shape,
        mask: Mask,
        phase: Phase = "forward",
        *,
        rectangular: bool = True,
        rank: int | None = None,
    ) -> Plan:
        """What all ranks compute and send in one pass.

        Args: rectangular: as in `plan_tiles`. rank: only the part of this rank, see `plan_of`.
        """
        return self._plan(shape, mask, phase, rectangular, rank)

    def _make_plan(
        self, shape: Shape, mask: Mask, phase: Phase, rectangular: bool, rank: int | None
    ) -> Plan:
        placement = self.placement(shape, mask, phase)
        return plan_of(placement, shape.seq_len, mask, phase, rectangular, rank)

    def traffic(self, shape: Shape, mask: Mask, rank: int) -> Traffic:
        """What `rank` sends, as the plans of both passes say."""
        forward, backward = (self.plan(shape, mask, phase).sent(rank, shape) for phase in PHASES)
        return Traffic(*forward, *backward)


def attend_block(
    total: Accumulator, q: Tensor, k: Tensor, v: Tensor, work: Batches, call: Call
) -> None:
    """Adds attention of a block of queries over a block of keys to `total`."""
    for each in work.calls(packed=call.packed, gaps=call.kernel.gaps, forward=True):
        if isinstance(each, Tile):
            _attend_tile(total, q, k, v, each, call)
            continue
        queries, keys = each.sides(q.device)
        (rows,) = queries.given
        taken = rows_at(q, queries.taken), rows_at(k, keys.taken), rows_at(v, keys.taken)
        out, lse = call.kernel.forward_packed(
            *taken, each.packing, scale=call.scale, causal=each.causal
        )
        total.add(rows, out, lse)


def _attend_tile(
    total: Accumulator, q: Tensor, k: Tensor, v: Tensor, tile: Tile, call: Call
) -> None:
    """Adds attention of a tile's rows [B,rows,H,D] over its columns [B,cols,G,D]."""
    if tile.rows < q.shape[1]:
        q = q[:, tile.q]
    if tile.cols < k.shape[1]:
        k, v = k[:, tile.kv], v[:, tile.kv]
    placed = call.places_outputs and not tile.reverse
    place = total.place_of_first(tile.rows) if placed else None
    if place is not None:
        call.kernel.forward_to(place, q, k, v, scale=call.scale, causal=tile.causal)
        total.add(tile.q, *place)
        return
    if tile.reverse:
        q, k, v = q.flip(1), k.flip(1), v.flip(1)
    out, lse = call.kernel.forward(q, k, v, scale=call.scale, causal=tile.causal)
    total.add(tile.q, *((out.flip(1), lse.flip(2)) if tile.reverse else (out, lse)))


class Gradients(NamedTuple):
    """Running sums of dq, dk, dv of one block of queries and one block of keys."""

    dq: GradientSum
    dk: GradientSum
    dv: GradientSum

    def places(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where the kernel writes the gradients of a tile's q, k and v: the first ones of a block
        where its sum will be, others to new memory. None: no gradient is the first.
        """
        places = [
            total.place_of_first(x.shape[1])
            for total, x in zip((self.dq, self.dk, self.dv), (q, k, v), strict=True)
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
    """Adds the gradients of a block's q, k and v to `sums`, see `attend_block`.

    Args: statistics: of all rows of q.
    """
    for each in work.calls(packed=call.packed, gaps=call.kernel.gaps):
        if isinstance(each, Tile):
            dq, dk, dv = _differentiate_tile(sums, dout, q, k, v, statistics, each, call)
            sums.dq.add(each.q, dq)
            sums.dk.add(each.kv, dk)
            sums.dv.add(each.kv, dv)
        else:
            _differentiate_batch(sums, dout, q, k, v, statistics, each, call)


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


def _differentiate_tile(
    sums: Gradients,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Statistics,
    tile: Tile,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `_attend_tile`; the first ones of a block are where its sums will be."""
    if tile.rows < q.shape[1]:
        dout, q, statistics = dout[:, tile.q], q[:, tile.q], statistics.rows(tile.q)
    if tile.cols < k.shape[1]:
        k, v = k[:, tile.kv], v[:, tile.kv]
    places = sums.places(q, k, v) if call.places_gradients and not tile.reverse else None
    if places is not None:
        call.kernel.backward_to(
            places, dout, q, k, v, statistics, scale=call.scale, causal=tile.causal
        )
        return places
    if tile.reverse:
        dout, q, k, v = dout.flip(1), q.flip(1), k.flip(1), v.flip(1)
        statistics = statistics.flipped()
    dq, dk, dv = call.kernel.backward(
        dout, q, k, v, statistics, scale=call.scale, causal=tile.causal
    )
    return (dq.flip(1), dk.flip(1), dv.flip(1)) if tile.reverse else (dq, dk, dv)
