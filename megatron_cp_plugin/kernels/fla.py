"""Linear attention with flash-linear-attention's Triton kernels (package fla-core).

The kernels are called one by one, not through fla's autograd Function: its parts are what lets
states travel between them, and states stored in bfloat16 give the same bits as fla's float32 ones
(the kernels that read them round them first) at three quarters of the time.

fla goes through the chunks of a sequence one after another, so a single long one leaves most of a
GPU idle. Here long documents are cut into segments that are computed side by side, as ranks are.

One launch of a kernel serves all segments of all documents. Segments of equal length are entries of
a batch; those of unequal length follow each other in one entry, and the kernels are told where each
begins (fla's cu_seqlens). The host knows these places: they are copied to the device once for all
layers, and nothing waits for the device. (fla's own functions that call the kernels of states would
read a count back from it at each call.)

fla tries over a hundred combinations of block sizes on first use, which takes minutes, most of them
for combinations that are thirty times slower. Where one was measured to be the best, that is taken.

B batch, S tokens in n runs, H heads, D, E head dims, m segments of a batch entry. "Folded" are
segments of C tokens as entries of a batch, [B*m,C,H,...], or all in one, [1,B*S,H,...].
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import ceil, log, prod
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.kernel import (
    BackwardPass,
    Cache,
    ForwardPass,
    LinearKernel,
    LinearProblem,
)
from megatron_cp_plugin.core.linear.runs import Interval, Runs
from megatron_cp_plugin.core.linear.states import Gates
from megatron_cp_plugin.core.partial import accumulation_dtype

CHUNK = 64  # tokens
_SEQUENCES = 256  # batch entries times heads times segments that fill a GPU
_SHORTEST_SEGMENT = 1024
_WHOLE = 2**30  # more tokens than any segment has

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
    """fla.ops.common's chunk kernels, as in fla.ops.simple_gla, with constant rates.

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

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, transition: Decay | Gates, runs: Runs
    ) -> ForwardPass:
        assert isinstance(transition, Decay)
        return _Forward(q, k, v, transition, runs)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        transition: Decay | Gates,
        runs: Runs,
        cache: Cache,
    ) -> BackwardPass:
        assert isinstance(transition, Decay)
        return _Backward(dout, q, k, v, transition, runs, *cache)


class _Forward(ForwardPass):
    """The states of the segments first, for which queries are not read; then the outputs.

    Keys and values are read twice, so that states travel while all outputs are computed, and what
    comes from before the runs is added only as far as it lasts.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, decay: Decay, runs: Runs) -> None:
        self._whole_q, self._runs = q, runs
        self._segments = _Segments(q, decay, runs)
        self._q, self._k, self._v = (self._segments.fold(x) for x in (q, k, v))
        self._ends = self._segments.joined(self._segments.states_behind(self._k, self._v))
        self.states = self._segments.behind_runs(self._ends)

    def intra(self) -> None:
        self._before = self._segments.before_each(self._ends, None)
        out = self._segments.outputs(self._q, self._k, self._v, self._before)
        self._out = self._segments.unfold(out)

    def finish(self, incoming: Tensor | None) -> tuple[Tensor, Cache]:
        from megatron_cp_plugin.kernels.decayed import add_decayed_

        if incoming is None:
            return self._out, (self._before,)
        firsts = self._runs.firsts
        add_decayed_(self._out, self._whole_q, incoming, self._segments.log2_rates, firsts)
        return self._out, (self._segments.before_each(self._ends, incoming),)


class _Backward(BackwardPass):
    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Decay,
        runs: Runs,
        before: Tensor | None,
    ) -> None:
        self._segments = _Segments(q, decay, runs)
        self._dout, self._q, self._k, self._v = (self._segments.fold(x) for x in (dout, q, k, v))
        self._before = before
        dstarts = self._segments.gradients_before(self._q, self._dout)
        self._dstarts = self._segments.joined(dstarts)
        self.dstates = self._segments.before_runs(self._dstarts)

    def intra(self) -> None:
        before = self._before
        self._before_chunks = self._segments.states_before_chunks(self._k, self._v, before)

    def finish(self, doutgoing: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv

        segments = self._segments
        dends = segments.behind_each(self._dstarts, doutgoing)
        settings = {
            "g_gamma": segments.log2_rates,
            "do": self._dout,
            "dh": segments.gradients_behind_chunks(self._q, self._dout, dends),
            "scale": 1.0,
            "cu_seqlens": segments.tables.starts,
            "chunk_size": CHUNK,
            "chunk_indices": segments.tables.chunks,
        }
        with measured_blocks(self._k, self._v):
            dq, dk, *_ = chunk_bwd_dqkwg(
                q=self._q, k=self._k, v=self._v, h=self._before_chunks, **settings
            )
            del self._before_chunks
            dv = chunk_bwd_dv(q=self._q, k=self._k, **settings)
        dq, dk, dv = (segments.unfold(x) for x in (dq, dk, dv))
        return dq, dk, dv


@contextmanager
def measured_blocks(k: Tensor, v: Tensor) -> Iterator[None]:
    """fla's kernels, called inside, take `_MEASURED`, where it was measured; outside they do not.

    Args: k: [B,C,H,D]. v: [B,C,H,E].
    """
    measured = _measured(k.shape[3], v.shape[3], k.device.index)
    if not measured:
        yield
        return
    with _CHOOSING:
        all_configs = [tuner.configs for tuner, _ in measured]
        try:
            for tuner, config in measured:
                tuner.configs = [config]
            yield
        finally:
            for (tuner, _), configs in zip(measured, all_configs, strict=True):
                tuner.configs = configs


@lru_cache(maxsize=64)  # asking for a GPU's properties takes as long as a launch
def _measured(head_dim: int, value_dim: int, gpu: int | None) -> list[tuple[Any, Any]]:
    """`tuners`, or none where others may be faster. Args: gpu: its index; None: the current one."""
    like_measured = head_dim <= 256 and value_dim <= 128
    if like_measured and torch.cuda.get_device_capability(gpu) == (9, 0):
        return tuners()
    return []


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


def segments_of(batch: int, tokens: int, heads: int) -> int:
    """Into how many segments of equal length a document is cut, if there are no others."""
    count = 1
    while (
        batch * heads * count < _SEQUENCES
        and tokens % (2 * count * CHUNK) == 0
        and tokens >= 2 * count * _SHORTEST_SEGMENT
    ):
        count *= 2
    return count


@dataclass(frozen=True)
class Cut:
    """How the documents of runs are cut into segments.

    "Joined" are the segments that meet others, or states from outside the runs: those of documents
    that were cut, and the first and last document of each run.

    Attributes: runs: of each of `batch` entries.
    """

    runs: Runs
    batch: int
    heads: int

    @cached_property
    def length(self) -> int | None:
        """Of each segment, if all are equally long; otherwise None."""
        if self.runs.length is None:
            return None
        return self.runs.length // segments_of(
            self.batch * len(self.runs), self.runs.length, self.heads
        )

    @cached_property
    def segments(self) -> list[tuple[Interval, Interval]]:
        """The segments (start, stop) of one batch entry, each with the document that it is of."""
        documents = [document for run in self.runs.documents for document in run]
        tokens = documents[-1][1]
        shortest = max(_SHORTEST_SEGMENT, ceil(self.batch * tokens * self.heads / _SEQUENCES))
        found = []
        for document in documents:
            start, stop = document
            length = self.length
            if length is None:
                length = ceil((stop - start) / max(1, (stop - start) // shortest) / CHUNK) * CHUNK
            places = range(start, max(stop, start + 1), max(length, 1))
            found += [((place, min(place + length, stop)), document) for place in places]
        return found

    @cached_property
    def parts(self) -> list[list[range]]:
        """Of each run, of each of its documents, the numbers of the segments."""
        found, number = [], 0
        for documents in self.runs.documents:
            of_run = []
            for _, stop in documents:
                first = number
                while self.segments[number][0][1] < stop:
                    number += 1
                number += 1
                of_run.append(range(first, number))
            found.append(of_run)
        return found

    @cached_property
    def joined(self) -> list[int]:
        """Which of the segments are joined."""
        outer = {*self.runs.firsts, *self.runs.lasts}
        return [
            number
            for number, (segment, document) in enumerate(self.segments)
            if segment != document or document in outer
        ]

    @property
    def whole(self) -> bool:
        """Whether each run is one segment."""
        return self.length is not None and self.length == self.runs.length

    @cached_property
    def alone(self) -> bool:
        """Whether no document is cut."""
        return all(segment == document for segment, document in self.segments)

    @cached_property
    def bounds(self) -> Tensor:
        """Where the segments of all batch entries begin, and where the last one ends: [B*m+1]."""
        tokens = self.segments[-1][0][1]
        starts = torch.tensor([start for (start, _), _ in self.segments], device="cpu")
        entries = torch.arange(self.batch, device="cpu")[:, None]
        end = torch.tensor([tokens * self.batch], device="cpu")
        return torch.cat(((starts + tokens * entries).flatten(), end))


@lru_cache(maxsize=64)  # every pass has the same
def cut_of(runs: Runs, batch: int, heads: int) -> Cut:
    """The cut of such runs, made once."""
    return Cut(runs, batch, heads)


@dataclass(frozen=True)
class _Tables:
    """Where segments of unequal length are: int32 on the device. All None: their lengths are equal.

    Attributes: starts: `Cut.bounds`. chunks: of each chunk its segment and its number there
        [chunks,2]. first_chunks: how many chunks come before each segment [B*m+1]. nowhere: zeros
        [B*m+1]. joined: `Cut.joined`, int64.
    """

    starts: Tensor | None = None
    chunks: Tensor | None = None
    first_chunks: Tensor | None = None
    nowhere: Tensor | None = None
    joined: Tensor | None = None


@kept_on_device(maxsize=64)  # of some micro-batches: they take memory of the device
def _tables(cut: Cut, device: torch.device) -> _Tables:
    if cut.length is not None:
        return _Tables()
    bounds = cut.bounds
    counts = (bounds.diff() + CHUNK - 1) // CHUNK
    first = torch.cat((bounds[:1], counts.cumsum(0)))
    segment = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    chunk = torch.arange(len(segment), device="cpu") - first[segment]
    return _Tables(
        starts=uploaded(bounds, device),
        chunks=uploaded(torch.stack((segment, chunk), 1), device),
        first_chunks=uploaded(first, device),
        nowhere=uploaded(torch.zeros_like(first), device),
        joined=uploaded(torch.tensor(cut.joined, device="cpu"), device).long(),
    )


class _Segments:
    """The documents of all runs as segments: the sequences of fla's kernels.

    Attributes: log2_rates: [H] float32 (float64 for float64). tables: where they are.
    """

    def __init__(self, like: Tensor, decay: Decay, runs: Runs) -> None:
        """Args: like: [B,S,H,D]."""
        self._batch, self._tokens, heads, _ = like.shape
        self._cut = cut_of(runs, self._batch, heads)
        self._runs, self._decay = runs, decay
        self._count = self._batch * len(self._cut.segments)
        self._wide = accumulation_dtype(like.dtype)
        self.tables = _tables(self._cut, like.device)
        self.log2_rates = _log2_rates(decay, self._wide, like.device)

    def fold(self, x: Tensor) -> Tensor:
        """[B,S,...] -> folded, a view."""
        length = self._cut.length
        if length is None:
            return x.flatten(0, 1).unsqueeze(0)
        return x.view(self._count, length, *x.shape[2:])

    def unfold(self, x: Tensor) -> Tensor:
        """Folded -> [B,S,...], a view."""
        return x.view(self._batch, self._tokens, *x.shape[2:])

    def states_behind(self, k: Tensor, v: Tensor) -> Tensor:
        """Behind each segment, if nothing comes before it: folded k, v -> [B*m,H,D,E]."""
        states = self._states(k, v, self._count, self._wide)
        self._launch_states(k, v, None, self._unread(k, v), states, self._whole)
        return states

    def states_before_chunks(self, k: Tensor, v: Tensor, before: Tensor | None) -> Tensor:
        """Before each chunk [chunks,H,D,E], in k's dtype. Args: before: the joined segments."""
        states = self._states(k, v, self._chunks, k.dtype)
        self._launch_states(k, v, self._each(before), states, None, CHUNK)
        return states

    def gradients_before(self, q: Tensor, dout: Tensor) -> Tensor:
        """Of the state before each segment, if those behind have none: -> [B*m,H,D,E]."""
        states = self._states(q, dout, self._count, self._wide)
        self._launch_gradients(q, dout, None, self._unread(q, dout), states, self._whole)
        return states

    def gradients_behind_chunks(self, q: Tensor, dout: Tensor, behind: Tensor | None) -> Tensor:
        """Of the state behind each chunk, as `states_before_chunks`. Args: behind: the joined."""
        states = self._states(q, dout, self._chunks, q.dtype)
        self._launch_gradients(q, dout, self._each(behind), states, None, CHUNK)
        return states

    def outputs(self, q: Tensor, k: Tensor, v: Tensor, before: Tensor | None) -> Tensor:
        """Linear attention of folded q, k, v, one pass over each. Args: before: the joined.

        fla's `fused_chunk_fwd` would cut D into blocks of 64 and add float32 outputs of each: its
        kernel is called with one block.
        """
        from fla.ops.common.fused_chunk import fused_chunk_fwd_kernel

        entries, tokens, heads, head_dim = q.shape
        value_dim = v.shape[3]
        out = torch.empty_like(v)
        count = self._count

        def grid(meta: dict[str, int]) -> tuple[int]:
            return (-(-value_dim // meta["BV"]) * count * heads,)

        with measured_blocks(k, v):
            fused_chunk_fwd_kernel[grid](
                q=q,
                k=k,
                v=v,
                g=None,
                g_gamma=self.log2_rates,
                o=out,
                h0=self._each(before),
                ht=None,
                cu_seqlens=self.tables.starts,
                scale=1.0,
                T=tokens,
                B=entries,
                H=heads,
                K=head_dim,
                V=value_dim,
                BT=CHUNK,
                BK=1 << max(4, (head_dim - 1).bit_length()),
            )
        return out

    def joined(self, states: Tensor) -> Tensor:
        """Those of the joined segments: [B*m,H,D,E] -> [j,B,H,D,E]."""
        states = states.view(self._batch, len(self._cut.segments), *states.shape[1:])
        if self.tables.joined is not None:
            states = states.index_select(1, self.tables.joined)
        return states.transpose(0, 1)

    def behind_runs(self, ends: Tensor) -> Tensor:
        """The states behind the runs [n,B,H,D,E]. Args: ends: of the joined segments."""
        return self._leaving_runs(ends, forwards=True)

    def before_runs(self, dstarts: Tensor) -> Tensor:
        """The gradients of the states before the runs. Args: dstarts: of the joined segments."""
        return self._leaving_runs(dstarts, forwards=False)

    def _leaving_runs(self, states: Tensor, *, forwards: bool) -> Tensor:
        if self._cut.whole:
            return states.contiguous()
        return self._carried(states, None, forwards=forwards, to_runs=True)

    def before_each(self, ends: Tensor, incoming: Tensor | None) -> Tensor | None:
        """States before the joined segments, given those before the runs; None: all are 0."""
        return self._reaching_each(ends, incoming, forwards=True)

    def behind_each(self, dstarts: Tensor, doutgoing: Tensor | None) -> Tensor | None:
        """Gradients of the states behind the joined segments, given those behind the runs."""
        return self._reaching_each(dstarts, doutgoing, forwards=False)

    def _reaching_each(
        self, states: Tensor, outer: Tensor | None, *, forwards: bool
    ) -> Tensor | None:
        if self._cut.whole or (self._cut.alone and outer is None):
            return outer
        return self._carried(states, outer, forwards=forwards, to_runs=False)

    def _carried(
        self, states: Tensor, outer: Tensor | None, *, forwards: bool, to_runs: bool
    ) -> Tensor:
        if outer is not None:
            states = torch.cat((states, outer))
        kind = forwards, to_runs, outer is not None
        return _combined(
            states, _weights(self._decay, self._cut, *kind, states.dtype, states.device)
        )

    def _each(self, joined: Tensor | None) -> Tensor | None:
        """Of all segments, 0 where they are not joined: [j,B,H,D,E] -> [B*m,H,D,E]."""
        if joined is None:
            return None
        of_entries = joined.transpose(0, 1)
        if self.tables.joined is not None:
            shape = self._batch, len(self._cut.segments), *joined.shape[2:]
            of_entries = joined.new_zeros(shape).index_copy_(1, self.tables.joined, of_entries)
        return of_entries.flatten(0, 1).contiguous()

    @property
    def _chunks(self) -> int:
        """How many chunks all segments have."""
        if self.tables.chunks is not None:
            return len(self.tables.chunks)
        return self._count * -(-(self._cut.length or 0) // CHUNK)

    @property
    def _whole(self) -> int:
        """As many tokens as a segment has, or more: at so many no states are written but the first.

        Where lengths are those of documents, always the same number: kernels are compiled for it.
        """
        length = self._cut.length
        return _WHOLE if length is None else max(1, -(-length // CHUNK)) * CHUNK

    def _unread(self, x: Tensor, y: Tensor) -> Tensor:
        """Where a kernel may write states that nobody reads: all into one, if it has tables."""
        count = self._count if self.tables.nowhere is None else 1
        return self._states(x, y, count, x.dtype)

    @staticmethod
    def _states(x: Tensor, y: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return x.new_empty((count, x.shape[2], x.shape[3], y.shape[3]), dtype=dtype)

    def _launch_states(
        self,
        k: Tensor,
        v: Tensor,
        before: Tensor | None,
        found: Tensor,
        behind: Tensor | None,
        every: int,
    ) -> None:
        """Writes the states before segments' first tokens, and then every so many tokens, to
        `found`, and those behind segments to `behind`.
        """
        from fla.ops.common.chunk_h import chunk_fwd_kernel_h

        with measured_blocks(k, v):
            chunk_fwd_kernel_h[self._grid(k, v)](
                k=k,
                v=v,
                h=found,
                h0=before,
                ht=behind,
                **self._settings(k, v, every),
            )

    def _launch_gradients(
        self,
        q: Tensor,
        dout: Tensor,
        behind: Tensor | None,
        found: Tensor,
        before: Tensor | None,
        every: int,
    ) -> None:
        """The same for gradients, from the last token to the first."""
        from fla.ops.common.chunk_h import chunk_bwd_kernel_dh

        with measured_blocks(q, dout):
            chunk_bwd_kernel_dh[self._grid(q, dout)](
                q=q,
                do=dout,
                dh=found,
                dht=behind,
                dh0=before,
                scale=1.0,
                HQ=q.shape[2],
                NG=1,
                **self._settings(q, dout, every),
            )

    def _grid(self, x: Tensor, y: Tensor) -> Callable[[dict[str, int]], tuple[int]]:
        head_dim, value_dim, sequences = x.shape[3], y.shape[3], self._count * x.shape[2]
        return lambda meta: (-(-head_dim // meta["BK"]) * -(-value_dim // meta["BV"]) * sequences,)

    def _settings(self, x: Tensor, y: Tensor, every: int) -> dict[str, Any]:
        """What both kernels of states take."""
        tables = self.tables
        return {
            "g": None,
            "g_gamma": self.log2_rates,
            "gk": None,
            "gv": None,
            "cu_seqlens": tables.starts,
            "split_offsets": tables.first_chunks if every == CHUNK else tables.nowhere,
            "T": x.shape[1],
            "H": x.shape[2],
            "K": x.shape[3],
            "V": y.shape[3],
            "BT": CHUNK,
            "BS": every,
            "USE_G": False,
            "USE_G_GAMMA": True,
            "USE_GK": False,
            "USE_GV": False,
            "STATE_V_FIRST": False,
        }


def _combined(states: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of states: [M,B,H,D,E] with weights [H,N,M] -> [N,B,H,D,E], contiguous."""
    count, batch, heads, *dims = states.shape
    rows = weights.shape[1]
    sums = states.new_empty((rows, batch, heads, *dims))
    # One call, and nothing put in order for it: there are many of these, and all are short.
    size = prod(dims)
    torch.bmm(
        weights.expand(batch, -1, -1, -1).flatten(0, 1),
        states.reshape(count, batch * heads, size).transpose(0, 1),
        out=sums.view(rows, batch * heads, size).transpose(0, 1),
    )
    return sums


# Kept: at short lengths a step is bound by the host.
@kept_on_device(maxsize=512)
def _weights(
    decay: Decay,
    cut: Cut,
    forwards: bool,
    to_runs: bool,
    outer: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """What is left of states after `_distances`: [H,places,states]."""
    distances = _distances(cut, forwards, to_runs, outer, device)
    powers = decay.powers(distances.clamp_min(0)) * (distances >= 0).unsqueeze(-1)
    return powers.permute(2, 0, 1).to(dtype).contiguous()


@kept_on_device(maxsize=128)  # of all layers
def _distances(
    cut: Cut, forwards: bool, to_runs: bool, outer: bool, device: torch.device
) -> Tensor:
    """How many tokens are between where states come from, the joined segments and, if wanted, from
    outside the runs, and where they go to, each joined segment or out of the runs: [places,states]
    int32, -1 where none comes.
    """

    def on_the_way(interval: Interval) -> Interval:
        """Counted in the direction in which states go."""
        return interval if forwards else (-interval[1], -interval[0])

    joined = [cut.segments[number] for number in cut.joined]
    entries, exits = cut.runs.firsts, cut.runs.lasts
    if not forwards:
        entries, exits = exits, entries
    sources = [(document, on_the_way(segment)[1]) for segment, document in joined]
    if outer:
        sources += [(document, on_the_way(document)[0]) for document in entries]
    if to_runs:
        places = [(document, on_the_way(document)[1]) for document in exits]
    else:
        places = [(document, on_the_way(segment)[0]) for segment, document in joined]
    distances = [
        [
            place - source if document == other and source <= place else -1
            for other, source in sources
        ]
        for document, place in places
    ]
    return uploaded(torch.tensor(distances, device="cpu"), device)


@kept_on_device(maxsize=1024)
def _log2_rates(decay: Decay, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (decay.logarithms(device) / log(2)).to(dtype)
