"""Peak memory of an attention call, found by following its plan on one rank without computing.

Tensors are on torch's meta device, where they have sizes but no storage, and each is counted as
long as it lives: outputs, partial sums, blocks that came, what is sent until it has left, what is
saved for the backward, and what kernels need within (`SoftmaxKernel.workspace`). So no algorithm
has a formula of its own for it.
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import Algorithm, Compiled
from megatron_cp_plugin.core.call import Call
from megatron_cp_plugin.core.communication.devices import register_fused
from megatron_cp_plugin.core.kernel import Gradients, KernelCall, SoftmaxKernel, Statistics
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.planner.meta import OnMeta, run

# By bytes of an element.
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class Peak(NamedTuple):
    """Bytes of a rank beside q, k, v and dout, and what all layers share, from the second call on.

    Attributes:
        forward, backward: the most at a time in either pass. Each has its results, what is saved
            for the backward and the receive buffers in peer memory, which live on, among them.
        saved: what lives between the two passes, out among it.
        peer: receive buffers in peer memory, which torch's own statistics do not show.
    """

    forward: int
    backward: int
    saved: int
    peer: int


def peak_of(
    make: Callable[[Topology], Algorithm],
    rank: int,
    nodes: Sequence[int],
    shape: Shape,
    mask: Mask,
    kernel: SoftmaxKernel,
    *,
    peer_access: bool,
) -> Peak:
    """The peak memory of a rank in one attention layer.

    Args:
        make: makes the algorithm. nodes: the node of each rank. kernel: of the tiles, which need
            not be able to run here. peer_access: whether the ranks reach each other's memory.
    """
    topology = DryRunGroup(rank, nodes, peer_access=peer_access)
    algorithm = make(topology)
    layout = algorithm.layout.within(mask.followed)
    q, k, v, dout = on_meta(shape, layout.length(rank, len(nodes), shape.seq_len))
    compiled = Compiled(algorithm, Call(shape, mask, shape.head_dim**-0.5, _Sizes(kernel)))
    with AllocationTracker([q, k, v, dout]):
        saved = compiled.forward.attend(q, k, v)[2]
        compiled.backward().differentiate(dout, saved)  # receive buffers have their final size now
        del saved
    with AllocationTracker([q, k, v, dout, *topology.slabs()]) as living:
        out, lse, saved = compiled.forward.attend(q, k, v)
        forward, living.most = living.most, 0
        del lse
        between = living.now
        gradients = compiled.backward().differentiate(dout, saved)
    del out, gradients
    peer = topology.peer_bytes
    return Peak(forward + peer, living.most + peer, between, peer)


def on_meta(shape: Shape | LinearShape, tokens: int) -> list[Tensor]:
    """q, k, v and dout of so many tokens, without storage."""
    kv_heads = shape.kv_heads if isinstance(shape, Shape) else shape.heads
    heads, dims = (shape.heads, kv_heads, kv_heads, shape.heads), (shape.head_dim, shape.value_dim)
    return [
        torch.empty((shape.batch, tokens, n, d), dtype=DTYPES[shape.element_bytes], device="meta")
        for n, d in zip(heads, (dims[0], *dims, dims[1]), strict=True)
    ]


class AllocationTracker(OnMeta):
    """Adds up the storages that are made while the mode is on, as long as they live.

    Attributes: now: bytes at present. most: bytes at most, at a time.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Args: known: tensors that are not counted, and are there all the time."""
        super().__init__()
        self._known = {x.untyped_storage()._cdata for x in known}
        self._living: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # `reshape` gives the copy that it has made another shape by `_unsafe_view`.
        view = func.is_view or func is torch.ops.aten._unsafe_view.default
        result = func(*args, **kwargs) if view else run(func, args, kwargs)[0]
        for x in result if isinstance(result, list | tuple) else (result,):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._living and key not in self._known:
                    self._living.add(key)
                    self.now += size
                    weakref.finalize(storage, self._freed, key, size)
        self.most = max(self.most, self.now)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._living.discard(key)
        self.now -= size


class SizesOnly(SoftmaxKernel):
    """Makes what a kernel would make, of tensors without storage; subclasses say what a call is."""

    name = "sizes"
    rectangular_causal = windows = packs = gaps = True
    places_outputs = places_gradients = True

    @abstractmethod
    def called(self, call: KernelCall, statistics: Statistics | None) -> None:
        """What there is to a call beside its results. Args: statistics: None: it is a forward."""

    def unsupported(self, problem: object) -> str | None:
        return None

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        q, v = call.q, call.v
        if call.into is None:
            batch, tokens, heads, _ = q.shape
            out = q.new_empty((batch, tokens, heads, v.shape[3]))
            lse = q.new_empty((batch, heads, tokens), dtype=accumulation_dtype(q.dtype))
        else:
            out, lse = call.into
        self.called(call, None)
        return out, lse

    def backward(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> Gradients:
        dq, dk, dv = call.into or [x.new_empty(x.shape) for x in (call.q, call.k, call.v)]
        self.called(call, statistics)
        return dq, dk, dv


class _Sizes(SizesOnly):
    """With the memory that a kernel takes within."""

    def __init__(self, kernel: SoftmaxKernel) -> None:
        self.rectangular_causal, self.windows = kernel.rectangular_causal, kernel.windows
        self.packs, self.gaps = kernel.packs, kernel.gaps
        self.places_outputs = kernel.places_outputs
        self.places_gradients = kernel.places_gradients
        self._kernel = kernel

    def called(self, call: KernelCall, statistics: Statistics | None) -> None:
        _take(call.q, self._kernel.workspace(call, statistics))


class OnePass:
    """Merges, sums and row sums as they are on GPUs: they take no memory beside their results."""

    def merge_into(
        self, out: Tensor, lse: Tensor, a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor
    ) -> None:
        pass

    def merge_all_into(self, out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> None:
        pass

    def sum_into(self, out: Tensor, a: Tensor, *others: Tensor) -> None:
        pass

    def merge_rows_into(
        self, out: Tensor, lse: Tensor, to: Tensor, b: Tensor, b_lse: Tensor, of: Tensor | None
    ) -> None:
        pass

    def add_rows_into(self, total: Tensor, to: Tensor, b: Tensor, of: Tensor | None) -> None:
        pass

    def rows_at(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.new_empty((x.shape[0], len(rows), *x.shape[2:]))

    def delta_of(self, dout: Tensor, out: Tensor) -> Tensor:
        batch, tokens, heads, _ = out.shape
        return out.new_empty((batch, heads, tokens), dtype=torch.float32)

    def stand_in_of(self, dout: Tensor, delta: Tensor) -> Tensor:
        return torch.empty_like(dout)

    def passed_along(
        self,
        added: Tensor,
        through: Tensor,
        first: Tensor | None,
        bounds: Tensor,
        order: Tensor,
        begins: Tensor,
    ) -> Tensor:
        return added.new_empty((len(begins), *added.shape[1:]))

    def logit_statistics(
        self, logits: Tensor, wanted: Tensor, scale: Tensor | None, entropy: bool
    ) -> tuple[Tensor, ...]:
        rows = logits.shape[:-1]
        return tuple(logits.new_empty(rows, dtype=torch.float32) for _ in range(2 + entropy))

    def logit_gradients_(
        self,
        logits: Tensor,
        wanted: Tensor,
        lse: Tensor,
        dloss: Tensor,
        scale: Tensor | None,
        entropy: Tensor | None,
        dentropy: Tensor | None,
    ) -> None:
        pass


register_fused("meta", OnePass)


def _take(like: Tensor, size_bytes: int) -> None:
    """Takes some memory for a moment."""
    like.new_empty(size_bytes, dtype=torch.uint8)
