"""Linear attention with flash-linear-attention's Triton kernels (package fla-core).

The kernels are called one by one, not through fla's autograd Function: its parts are what lets
states travel between them, and states stored in bfloat16 give the same bits as fla's float32 ones
(the kernels that read them round them first) at three quarters of the time.

fla goes through the chunks of a run one after another, so a single long run leaves most of a GPU
idle. Here a run is cut into segments that are computed side by side, as ranks are.

fla tries over a hundred combinations of block sizes on first use, which takes minutes, most of them
for combinations that are thirty times slower. Where one was measured to be the best, that is taken.

B batch, C tokens, H heads, D, E head dims, n segments. "Folded" is [B*n,C/n,H,...].
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import log
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device
from megatron_cp_plugin.core.linear.decay import Decay, combine
from megatron_cp_plugin.core.linear.kernel import (
    BackwardPass,
    ForwardPass,
    LinearKernel,
    LinearProblem,
)

CHUNK = 64  # tokens
_SEQUENCES = 256  # batch entries times heads times segments that fill a GPU
_SHORTEST_SEGMENT = 1024

# Of each kernel: the block sizes, warps and stages that were the fastest on an H200, or within 2%
# of it, wherever segments at head dims 128 and 256 took longer than 0.05 ms.
_MEASURED: dict[str, tuple[dict[str, int], int, int]] = {
    "chunk_h.chunk_fwd_kernel_h": ({"BK": 64, "BV": 64}, 4, 3),
    "chunk_h.chunk_bwd_kernel_dh": ({"BK": 64, "BV": 64}, 4, 3),
    "chunk_o.chunk_bwd_kernel_dqkwg": ({}, 4, 3),
    "chunk_o.chunk_bwd_kernel_dv": ({}, 4, 3),
    "fused_chunk.fused_chunk_fwd_kernel": ({"BV": 64}, 4, 2),
}
_CHOOSING = Lock()  # held while fla's kernels are as `measured_blocks` has them


class FlaLinear(LinearKernel):
    """fla.ops.common's chunk kernels, as in fla.ops.simple_gla.

    Not deterministic: each process measures which block sizes to use, and they decide in which
    order sums are formed.
    """

    name = "fla"

    def unsupported(self, problem: LinearProblem) -> str | None:
        if find_spec("fla") is None:
            return "needs the package fla-core, which is not installed"
        if problem.device.type != "cuda":
            return f"runs on cuda, got tensors on {problem.device.type}"
        if problem.dtype != torch.bfloat16:
            # float32 would be multiplied in TF32, and sums over many tokens overflow float16.
            return f"takes bfloat16, got {problem.dtype}"
        for dim in (problem.head_dim, problem.value_dim):
            if dim % 2 or dim > 256:
                return f"takes even head dims up to 256, got {dim}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Decay) -> ForwardPass:
        return _Forward(q, k, v, decay)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Decay,
        cache: Tensor | None,
    ) -> BackwardPass:
        return _Backward(dout, q, k, v, decay, cache)


class _Forward(ForwardPass):
    """The states of the segments first, for which queries are not read; then the outputs.

    Keys and values are read twice, so that states travel while all outputs are computed, and what
    comes from outside the run is added only as far as it lasts.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, decay: Decay) -> None:
        from fla.ops.common.chunk_h import chunk_fwd_h

        self._whole_q = q
        self._segments = _Segments(q, decay)
        self._q, self._k, self._v = (self._segments.fold(x) for x in (q, k, v))
        # One chunk: the kernel writes none of the states between chunks.
        with measured_blocks(self._k, self._v):
            _, ends = chunk_fwd_h(
                k=self._k,
                v=self._v,
                g_gamma=self._segments.log2_rates,
                output_final_state=True,
                chunk_size=CHUNK,
                split_size=self._segments.chunks * CHUNK,
            )
        self._ends = self._segments.by_segment(ends)
        self.state = self._segments.after_all(self._ends)

    def intra(self) -> None:
        self._before = self._segments.before_each(self._ends, None)
        out = _outputs(self._q, self._k, self._v, self._before, self._segments.log2_rates)
        self._out = self._segments.unfold(out)

    def finish(self, incoming: Tensor | None) -> tuple[Tensor, Tensor | None]:
        from megatron_cp_plugin.kernels.decayed import add_decayed_

        if incoming is None:
            return self._out, self._before
        add_decayed_(self._out, self._whole_q, incoming, self._segments.log2_rates)
        return self._out, self._segments.before_each(self._ends, incoming)


def _outputs(q: Tensor, k: Tensor, v: Tensor, before: Tensor | None, log2_rates: Tensor) -> Tensor:
    """Linear attention of [B,C,H,D], [B,C,H,D], [B,C,H,E] -> [B,C,H,E], one pass over each.

    fla's `fused_chunk_fwd` would cut D into blocks of 64 and add float32 outputs of each: its
    kernel is called with one block.
    """
    from fla.ops.common.fused_chunk import fused_chunk_fwd_kernel

    batch, tokens, heads, head_dim = q.shape
    value_dim = v.shape[3]
    out = torch.empty_like(v)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (-(-value_dim // meta["BV"]) * batch * heads,)

    with measured_blocks(k, v):
        fused_chunk_fwd_kernel[grid](
            q=q,
            k=k,
            v=v,
            g=None,
            g_gamma=log2_rates,
            o=out,
            h0=before,
            ht=None,
            cu_seqlens=None,
            scale=1.0,
            T=tokens,
            B=batch,
            H=heads,
            K=head_dim,
            V=value_dim,
            BT=CHUNK,
            BK=1 << max(4, (head_dim - 1).bit_length()),
        )
    return out


@contextmanager
def measured_blocks(k: Tensor, v: Tensor) -> Iterator[None]:
    """fla's kernels, called inside, take `_MEASURED`, where it was measured; outside they do not.

    Args: k: [B,C,H,D]. v: [B,C,H,E].
    """
    like_measured = k.shape[3] <= 256 and v.shape[3] <= 128
    if not like_measured or torch.cuda.get_device_capability(k.device) != (9, 0):
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_CHOOSING)
        for tuner, config in tuners():
            stack.callback(setattr, tuner, "configs", tuner.configs)
            tuner.configs = [config]
        yield


@lru_cache(maxsize=1)
def tuners() -> list[tuple[Any, Any]]:
    """What chooses the block sizes of each kernel of `_MEASURED`, and the choice it is to make."""
    import triton

    found = []
    for path, (blocks, warps, stages) in _MEASURED.items():
        module, name = path.split(".")
        tuner = getattr(import_module(f"fla.ops.common.{module}"), name)
        while not hasattr(tuner, "configs"):
            tuner = tuner.fn
        found.append((tuner, triton.Config(blocks, num_warps=warps, num_stages=stages)))
    return found


class _Backward(BackwardPass):
    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Decay,
        before: Tensor | None,
    ) -> None:
        self._segments = _Segments(q, decay)
        self._dout, self._q, self._k, self._v = (self._segments.fold(x) for x in (dout, q, k, v))
        self._before = before
        # One chunk: the kernel writes none of the gradients between chunks.
        _, dstarts = self._gradients_of_states(None, chunks_per_state=self._segments.chunks)
        self._dstarts = self._segments.by_segment(dstarts)
        self.dstate = self._segments.before_all(self._dstarts)

    def intra(self) -> None:
        from fla.ops.common.chunk_h import chunk_fwd_h

        with measured_blocks(self._k, self._v):
            self._before_chunks, _ = chunk_fwd_h(
                k=self._k,
                v=self._v,
                g_gamma=self._segments.log2_rates,
                h0=self._before,
                chunk_size=CHUNK,
            )

    def finish(self, doutgoing: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv

        dends = self._segments.after_each(self._dstarts, doutgoing)
        dafter_chunks, _ = self._gradients_of_states(dends, chunks_per_state=1)
        with measured_blocks(self._k, self._v):
            dq, dk, *_ = chunk_bwd_dqkwg(
                q=self._q,
                k=self._k,
                v=self._v,
                g_gamma=self._segments.log2_rates,
                h=self._before_chunks,
                do=self._dout,
                dh=dafter_chunks,
                scale=1.0,
                chunk_size=CHUNK,
            )
            del self._before_chunks
            dv = chunk_bwd_dv(
                q=self._q,
                k=self._k,
                g_gamma=self._segments.log2_rates,
                do=self._dout,
                dh=dafter_chunks,
                scale=1.0,
                chunk_size=CHUNK,
            )
        dq, dk, dv = (self._segments.unfold(x) for x in (dq, dk, dv))
        return dq, dk, dv

    def _gradients_of_states(
        self, dends: Tensor | None, *, chunks_per_state: int
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the states after chunks, and of those before the segments [B*n,H,D,E]."""
        from fla.ops.common.chunk_h import chunk_bwd_dh

        with measured_blocks(self._k, self._v):
            return chunk_bwd_dh(
                q=self._q,
                k=self._k,
                v=self._v,
                do=self._dout,
                h0=self._segments.states_like(self._k, self._v),
                dht=dends,
                scale=1.0,
                g_gamma=self._segments.log2_rates,
                chunk_size=CHUNK,
                split_size=chunks_per_state * CHUNK,
            )


def segments_of(batch: int, tokens: int, heads: int) -> int:
    """Into how many segments a run is cut."""
    count = 1
    while (
        batch * heads * count < _SEQUENCES
        and tokens % (2 * count * CHUNK) == 0
        and tokens >= 2 * count * _SHORTEST_SEGMENT
    ):
        count *= 2
    return count


class _Segments:
    """A run as n segments of equal length.

    Attributes: chunks: of a segment. log2_rates: [H] float32.
    """

    def __init__(self, like: Tensor, decay: Decay) -> None:
        """Args: like: [B,C,H,D]."""
        batch, tokens, heads, _ = like.shape
        self._decay = decay
        self._count = segments_of(batch, tokens, heads)
        self._length = tokens // self._count
        self.chunks = -(-self._length // CHUNK)
        self.log2_rates = _log2_rates(decay, like.device)

    def fold(self, x: Tensor) -> Tensor:
        """[B,C,...] -> [B*n,C/n,...], a view."""
        return x.unflatten(1, (self._count, -1)).flatten(0, 1)

    def unfold(self, x: Tensor) -> Tensor:
        """[B*n,C/n,...] -> [B,C,...]."""
        return x.unflatten(0, (-1, self._count)).flatten(1, 2)

    def by_segment(self, states: Tensor) -> Tensor:
        """[B*n,H,D,E] -> [n,B,H,D,E], a view."""
        return states.unflatten(0, (-1, self._count)).transpose(0, 1)

    def states_like(self, k: Tensor, v: Tensor) -> Tensor:
        """Uninitialised states of folded k and v: [B*n,H,D,E] float32."""
        shape = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
        return k.new_empty(shape, dtype=torch.float32)

    def after_all(self, states: Tensor) -> Tensor:
        """The state behind the last segment, if none came before the first: [B,H,D,E]."""
        behind = range(self._count, self._count + 1)
        return self._carried(states, None, behind, forwards=True)[0]

    def before_all(self, dstates: Tensor) -> Tensor:
        """The gradient of the state before the first segment, from all of them: [B,H,D,E]."""
        return self._carried(dstates, None, range(-1, 0), forwards=False)[0]

    def before_each(self, states: Tensor, incoming: Tensor | None) -> Tensor | None:
        """States before the segments [B*n,H,D,E], given the one before the first."""
        return self._each(states, incoming, forwards=True)

    def after_each(self, dstates: Tensor, doutgoing: Tensor | None) -> Tensor | None:
        """Gradients of the states behind the segments, given the one behind the last."""
        return self._each(dstates, doutgoing, forwards=False)

    def _each(self, states: Tensor, outer: Tensor | None, *, forwards: bool) -> Tensor | None:
        if self._count == 1:
            return outer
        carried = self._carried(states, outer, range(self._count), forwards=forwards)
        return carried.transpose(0, 1).flatten(0, 1)

    def _carried(
        self, states: Tensor, outer: Tensor | None, places: range, *, forwards: bool
    ) -> Tensor:
        """What reaches segments from the ones before (behind) them and from outside."""
        if self._count == 1 and outer is None:
            return states
        sources = [*range(self._count)]
        if outer is not None:
            states = torch.cat((states, outer.unsqueeze(0)))
            sources.append(-1 if forwards else self._count)
        weights = _weights(
            self._decay, self._length, tuple(sources), places, forwards, states.device
        )
        return combine(states, weights)


# Kept here too: at short lengths a step is bound by the host, to which the distances between all
# segments are longer work than a kernel's launch.
@kept_on_device(maxsize=4096)
def _weights(
    decay: Decay,
    length: int,
    sources: tuple[int, ...],
    places: range,
    forwards: bool,
    device: torch.device,
) -> Tensor:
    """What is left of the states of `sources` at `places`, segments of that length apart."""
    sign = 1 if forwards else -1
    gaps = [[sign * (place - source) - 1 for source in sources] for place in places]
    distances = tuple(tuple(gap * length if gap >= 0 else None for gap in row) for row in gaps)
    return decay.weights(distances, torch.float32, device)


@kept_on_device(maxsize=1024)
def _log2_rates(decay: Decay, device: torch.device) -> Tensor:
    return (decay.logarithms(device) / log(2)).float()
