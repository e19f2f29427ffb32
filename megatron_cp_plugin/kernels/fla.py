"""Segments for flash-linear-attention's Triton kernels (package fla-core), and constant rates.

The kernels are called one by one, not through fla's autograd Functions, so that states can travel
between their parts.

fla processes the chunks of a sequence one after another, so a single long sequence leaves most of a
GPU idle. Here long documents are cut into segments that are computed side by side, like ranks:
states pass them by `decayed.passed_along`. Segments of all batch entries follow each other, and one
launch of a kernel serves them all; it is told where each begins (fla's cu_seqlens). The host knows
these places: they are copied to the device once for all layers, and nothing waits for the device.
(fla's own functions that call the kernels of states would read a count back from it at each call.)

fla tries over a hundred combinations of block sizes on first use, which takes minutes, most of them
for combinations that are thirty times slower. Where one was measured to be the best, it is used.

B batch, S tokens in n runs, H heads, D, E head dims, m sequences: segments of all batch entries. j
of them are joined, see `_segments`. "Folded" are all batch entries one after another, [1,T,H,...].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from math import ceil, log
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.linear.states import Decay, Interval, Runs, Ways
from megatron_cp_plugin.core.partial import accumulation_dtype

CHUNK = 64  # tokens
_SEQUENCES = 256  # batch entries times heads times segments that fill a GPU
_SHORTEST_SEGMENT = 1024
WHOLE = 2**30  # more tokens than any segment has

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


@contextmanager
def measured_blocks(k: Tensor, v: Tensor) -> Iterator[None]:
    """Within this context fla's kernels use the block sizes of `_MEASURED`, where these were
    measured.

    Args:
        k: [B,C,H,D].
        v: [B,C,H,E].
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
    """The autotuner of each kernel of `_MEASURED`, and the configuration it is to choose."""
    import triton

    found = []
    for path, (blocks, warps, stages) in _MEASURED.items():
        module, name = path.split(".")
        tuner = getattr(import_module(f"fla.ops.common.{module}"), name)
        while not hasattr(tuner, "configs"):
            tuner = tuner.fn
        found.append((tuner, triton.Config(blocks, num_warps=warps, num_stages=stages)))
    return found


def segments_of(document: int, tokens: int, heads: int) -> int:
    """Number of segments into which a document is cut. Args: tokens: of all batch entries."""
    return max(1, document // max(_SHORTEST_SEGMENT, ceil(tokens * heads / _SEQUENCES)))


def _segments(
    runs: Runs, batch: int, heads: int
) -> tuple[list[Interval], list[list[range]], list[int]]:
    """Cuts the documents of runs into segments, in each of `batch` entries.

    Returns: the segments (start, stop); for each run and each of its documents the numbers of its
    segments; and the segments that are joined: they receive or send states. These are segments of
    documents that were cut, and of the first and last document of each run.
    """
    tokens, outer = batch * runs.lasts[-1][1], {*runs.firsts, *runs.lasts}
    segments: list[Interval] = []
    parts: list[list[range]] = []
    joined: list[int] = []
    for documents in runs.documents:
        parts.append([])
        for document in documents:
            start, stop = document
            count = segments_of(stop - start, tokens, heads)
            length = max(1, ceil((stop - start) / count / CHUNK) * CHUNK)
            first, places = len(segments), range(start, max(stop, start + 1), length)
            segments += [(place, min(place + length, stop)) for place in places]
            numbers = range(first, len(segments))
            parts[-1].append(numbers)
            if len(numbers) > 1 or document in outer:
                joined += numbers
    return segments, parts, joined


@dataclass(frozen=True)
class Sequences:
    """Places of fla's sequences, which are segments of documents: int32 on the device.

    Attributes:
        runs, batch: the runs, and the number of batch entries.
        count: of sequences, m.
        is_cut: whether a document has several segments.
        starts: where sequences begin, and where the last one ends [m+1].
        chunks: sequence of each chunk, and the chunk's number there [chunks,2].
        offsets: number of chunks before each sequence [m+1].
        nowhere: zeros [m+1].
        ends: the last token of each chunk [chunks].
        joined: numbers of the joined sequences, by batch entry [j].
        lengths: lengths of the joined sequences, in tokens.
        leaving: ways through the joined ones of each run's last document, from a beginning, those
            of a run's batch entries together.
        leaving_of: the way that each step of these belongs to.
        arriving: ways to each joined sequence, from the state before its run, if any.
        leaving_back, arriving_back: the same for gradients.
    """

    runs: Runs
    batch: int
    count: int
    is_cut: bool
    starts: Tensor
    chunks: Tensor
    offsets: Tensor
    nowhere: Tensor
    ends: Tensor
    joined: Tensor
    lengths: Tensor
    leaving: Ways
    leaving_of: Tensor
    arriving: Ways
    leaving_back: Ways
    arriving_back: Ways


@kept_on_device(maxsize=64)  # of some micro-batches: they take memory of the device
def sequences_of(runs: Runs, batch: int, heads: int, chunk: int, device: torch.device) -> Sequences:
    """The segments of runs, in each of `batch` entries. Args: chunk: tokens of a chunk."""
    segments, parts, of_entry = _segments(runs, batch, heads)
    entries, each, joins = range(batch), len(segments), len(of_entry)
    tokens, starts = segments[-1][1], [start for start, _ in segments]
    edges = [start + tokens * entry for entry in entries for start in starts]
    bounds = torch.tensor([*edges, tokens * batch], device="cpu")
    counts = (bounds.diff() + chunk - 1) // chunk
    offsets = torch.cat((bounds[:1], counts.cumsum(0)))
    sequence = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    number = torch.arange(len(sequence), device="cpu") - offsets[sequence]
    ends = torch.minimum(bounds[sequence] + (number + 1) * chunk, bounds[sequence + 1]) - 1
    place = {number: at for at, number in enumerate(of_entry)}
    joined = [number + entry * each for entry in entries for number in of_entry]
    steps = torch.tensor([len(run[-1]) for run in parts for _ in entries], device="cpu")

    def leaving(way: Callable[[Sequence[range]], Sequence[int]]) -> Ways:
        return Ways.of(
            [
                ([entry * joins + place[one] for one in way(run)], 0)
                for run in parts
                for entry in entries
            ],
            device,
        )

    def arriving(outer: int, step: int) -> Ways:
        found: dict[int, tuple[range, int | None]] = {}
        for number, run in enumerate(parts):
            for part in run:
                way = part[::step]
                begin = number * batch if part == run[outer] else None
                found |= {one: (way[:at], begin) for at, one in enumerate(way)}
        ways = []
        for entry in entries:
            for one in of_entry:
                way, begin = found[one]
                over = [entry * joins + place[other] for other in way]
                ways.append((over, -1 if begin is None else begin + entry))
        return Ways.of(ways, device)

    return Sequences(
        runs,
        batch,
        len(counts),
        each > sum(map(len, parts)),
        starts=uploaded(bounds, device),
        chunks=uploaded(torch.stack((sequence, number), 1), device),
        offsets=uploaded(offsets, device),
        nowhere=uploaded(torch.zeros_like(offsets), device),
        ends=uploaded(ends, device),
        joined=uploaded(torch.tensor(joined, device="cpu"), device),
        lengths=uploaded(bounds.diff()[joined], device),
        leaving=leaving(lambda run: run[-1]),
        leaving_of=uploaded(torch.repeat_interleave(steps), device),
        arriving=arriving(0, 1),
        leaving_back=leaving(lambda run: run[0][::-1]),
        arriving_back=arriving(-1, -1),
    )


class KernelFamily:
    """A family of kernels, and its computations with folded tensors.

    Attributes:
        q, k, v: [1,T,H,D or E].
        gate: [1,T,H] or [1,T,H,D], beta: [1,T,H], as in `Gates`; or the logarithms of rates to base
            2 [H], and none.
        before, through: states before the joined sequences (None: 0), and their transitions, see
            `RunStates`; the backward begins with the forward's.
    """

    before: Tensor | None
    through: Tensor | None

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        beta: Tensor | None,
        sequences: Sequences,
    ) -> None:
        self.q, self.k, self.v, self.gate, self.beta = q, k, v, gate, beta
        self.sequences = sequences
        self.places: dict[str, Any] = {
            "cu_seqlens": sequences.starts,
            "chunk_indices": sequences.chunks,
        }
        self.where = {**self.places, "chunk_size": CHUNK}

    def cumsum(self, x: Tensor, **settings: Any) -> Tensor:
        """Sums within chunks."""
        from fla.ops.utils import chunk_local_cumsum

        found: Tensor = chunk_local_cumsum(x, **settings, **self.where)
        return found

    @abstractmethod
    def prepare(self) -> tuple[Tensor, ...]:
        """Begins the forward. Returns: tensors for the backward, as `restore` takes them."""

    @abstractmethod
    def run_states(self) -> tuple[Tensor, Tensor]:
        """Effect of joined sequences on the state: [j,H,D,E], and transitions, see `RunStates`."""

    @abstractmethod
    def transitions(self) -> Tensor:
        """Transitions of the runs [n*B,...]; unused for constant rates."""

    @abstractmethod
    def outputs(self) -> Tensor:
        """out [1,T,H,E]."""

    @abstractmethod
    def restore(self, kept: tuple[Tensor, ...], dout: Tensor) -> Tensor:
        """Begins the backward. Returns: gradients of the states before the runs [n*B,H,D,E]."""

    @abstractmethod
    def gradients(self, behind: Tensor | None) -> tuple[Tensor, ...]:
        """dq, dk, dv, dgate and dbeta, if there are such, given the gradients of states behind the
        runs.
        """

    def intra_chunk(self) -> None:
        """Work that needs no other run's states, done while these travel."""

    def intra_chunk_back(self) -> None:
        """The same in the backward."""

    def summaries(self) -> tuple[Tensor, Tensor]:
        """Effect of runs on the state: [n*B,H,D,E], and transitions."""
        self._added, self.through = self.run_states()
        return self.leaving(self._added, self.through, self.sequences.leaving), self.transitions()

    def entering(self, incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        """Takes the states before the runs [n*B,H,D,E]. Returns: before and through."""
        assert self.through is not None
        ways = self.sequences.arriving
        self.before = self.reaching(self._added, incoming, self.through, ways)
        return self.before, self.through

    def leaving_back(self, added: Tensor, through: Tensor) -> Tensor:
        """Gradients of the states before the runs, if the gradients of the states behind are 0."""
        self._added, self._through_back = added, through
        return self.leaving(added, through, self.sequences.leaving_back)

    def entering_back(self, behind: Tensor | None) -> Tensor | None:
        """Gradients of the states behind all sequences, given those behind the runs."""
        ways = self.sequences.arriving_back
        return self.of_all(self.reaching(self._added, behind, self._through_back, ways))

    def leaving(self, added: Tensor, through: Tensor, ways: Ways) -> Tensor:
        """States behind the runs, from the states that joined sequences add."""
        if not self.sequences.is_cut:
            return added.index_select(0, ways.order)
        return self.along(added, through, None, ways)

    def reaching(
        self, added: Tensor, outer: Tensor | None, through: Tensor, ways: Ways
    ) -> Tensor | None:
        """States that come to the joined sequences [j,H,D,E]; None: all are 0."""
        if not self.sequences.is_cut:
            if outer is None:
                return None
            return torch.cat((outer, torch.zeros_like(outer[:1]))).index_select(
                0, ways.begins.remainder(len(outer) + 1)
            )
        return self.along(added, through, outer, ways)

    def along(self, added: Tensor, through: Tensor, first: Tensor | None, ways: Ways) -> Tensor:
        """States at the end of ways."""
        from megatron_cp_plugin.kernels.decayed import passed_along

        begin = None if first is None else first.unsqueeze(1)
        found = passed_along(added.unsqueeze(1), through.unsqueeze(1), begin, *ways)
        assert found is not None
        return found.squeeze(1)

    def of_all(self, states: Tensor | None) -> Tensor | None:
        """States of joined sequences -> of all sequences, 0 for the others: [m,H,D,E]."""
        joined = self.sequences.joined
        if states is None or len(joined) == self.sequences.count:
            return states
        found = states.new_zeros((self.sequences.count, *states.shape[1:]))
        return found.index_copy_(0, joined.long(), states)


class Gated(KernelFamily):
    """Without the delta rule: gates or rates.

    Attributes:
        gated: rates, or sums of the gates in chunks, by the name of fla's argument.
        kept_dtype: of the states before chunks in the backward; None: k's.
    """

    name: str
    gated: dict[str, Tensor]
    kept_dtype: torch.dtype | None = torch.float32

    def prepare(self) -> tuple[Tensor, ...]:
        self.gated = {self.name: self.cumsum(self.gate.contiguous(), scale=1 / log(2))}
        return (self.gated[self.name],)

    def run_states(self) -> tuple[Tensor, Tensor]:
        behind = self._behind()
        self._launch_states(None, self._unread(), behind, WHOLE)
        return self._joined(behind), self._logs()

    def _logs(self) -> Tensor:
        """Of the joined sequences' transitions, from those of their chunks; fla's are to base 2."""
        (sums,), sequences = self.gated.values(), self.sequences
        logs = sums.new_zeros((sequences.count, *sums.shape[2:]))
        logs.index_add_(0, sequences.chunks[:, 0], sums[0].index_select(0, sequences.ends))
        logs = self._joined(logs) * log(2)
        return logs if logs.dim() == 3 else logs.unsqueeze(2)

    def transitions(self) -> Tensor:
        assert self.through is not None
        (_, order, begins), of_ways = self.sequences.leaving, self.sequences.leaving_of
        sums = self.through.new_zeros((len(begins), *self.through.shape[1:]))
        return sums.index_add_(0, of_ways, self.through.index_select(0, order))

    def states(self, dtype: torch.dtype | None = None) -> Tensor:
        """Before all chunks [1,chunks,H,D,E]; None: in k's dtype."""
        found = self._of_chunks(dtype)
        self._launch_states(self.of_all(self.before), found, None, CHUNK)
        return found

    def restore(self, kept: tuple[Tensor, ...], dout: Tensor) -> Tensor:
        self.gated = {self.name: kept[0]}
        self._kept, self._dout = kept, dout
        found = self._behind()
        self._launch_gradients(None, self._unread(), found, WHOLE)
        assert self.through is not None
        return self.leaving_back(self._joined(found), self.through)

    def intra_chunk_back(self) -> None:
        self._before_chunks = self.states(self.kept_dtype)

    def gradients_of_states(self, behind: Tensor | None) -> Tensor:
        """Of the states behind all chunks."""
        found = self._of_chunks(self.kept_dtype)
        self._launch_gradients(self.entering_back(behind), found, None, CHUNK)
        return found

    def _joined(self, x: Tensor) -> Tensor:
        joined = self.sequences.joined
        return x if len(joined) == self.sequences.count else x.index_select(0, joined)

    def _behind_shape(self) -> tuple[int, ...]:
        return self.k.shape[2], self.k.shape[3], self.v.shape[3]

    def _behind(self) -> Tensor:
        shape = self.sequences.count, *self._behind_shape()
        return self.k.new_empty(shape, dtype=accumulation_dtype(self.k.dtype))

    def _of_chunks(self, dtype: torch.dtype | None) -> Tensor:
        shape = 1, len(self.sequences.chunks), *self._behind_shape()
        return self.k.new_empty(shape, dtype=dtype or self.k.dtype)

    def _unread(self) -> Tensor:
        """Memory for states that nobody reads: the kernel writes all into one."""
        return self.k.new_empty((1, 1, *self._behind_shape()))

    def _launch_states(
        self, before: Tensor | None, found: Tensor, behind: Tensor | None, every: int
    ) -> None:
        """Writes the states before each sequence's first token, and before every `every` further
        tokens, to `found`; and the states behind sequences to `behind`.
        """
        from fla.ops.common.chunk_h import chunk_fwd_kernel_h

        with measured_blocks(self.k, self.v):
            chunk_fwd_kernel_h[self._grid](
                k=self.k, v=self.v, h=found, h0=before, ht=behind, **self._settings(every)
            )

    def _launch_gradients(
        self, behind: Tensor | None, found: Tensor, before: Tensor | None, every: int
    ) -> None:
        """The same for gradients, from the last token to the first."""
        from fla.ops.common.chunk_h import chunk_bwd_kernel_dh

        with measured_blocks(self.k, self.v):
            chunk_bwd_kernel_dh[self._grid](
                q=self.q,
                do=self._dout,
                dh=found,
                dht=behind,
                dh0=before,
                scale=1.0,
                HQ=self.q.shape[2],
                NG=1,
                **self._settings(every),
            )

    def _grid(self, meta: dict[str, int]) -> tuple[int]:
        heads, head_dim, value_dim = self._behind_shape()
        blocks = -(-head_dim // meta["BK"]) * -(-value_dim // meta["BV"])
        return (blocks * self.sequences.count * heads,)

    def _settings(self, every: int) -> dict[str, Any]:
        """Arguments of both kernels of states."""
        heads, head_dim, value_dim = self._behind_shape()
        given = {"g": None, "g_gamma": None, "gk": None, **self.gated}
        return {
            **given,
            "gv": None,
            "cu_seqlens": self.sequences.starts,
            "split_offsets": self.sequences.offsets if every == CHUNK else self.sequences.nowhere,
            "T": self.k.shape[1],
            "H": heads,
            "K": head_dim,
            "V": value_dim,
            "BT": CHUNK,
            "BS": every,
            "USE_G": given["g"] is not None,
            "USE_G_GAMMA": given["g_gamma"] is not None,
            "USE_GK": given["gk"] is not None,
            "USE_GV": False,
            "STATE_V_FIRST": False,
        }


class Rates(Gated):
    """fla.ops.simple_gla with constant rates.

    States stored in k's dtype give the same bits as fla's float32 ones (the kernels that read them
    round them first) at three quarters of the time. Outputs are computed while states travel, and
    what comes from before the runs is added only as far as it lasts.
    """

    name = "g_gamma"
    kept_dtype = None

    def prepare(self) -> tuple[Tensor, ...]:
        self.gated = {self.name: self.gate}
        return (self.gate,)

    def _logs(self) -> Tensor:
        return (self.sequences.lengths[:, None] * (self.gate * log(2))).unsqueeze(2)

    def transitions(self) -> Tensor:
        return self.gate

    def intra_chunk(self) -> None:
        """fla's `fused_chunk_fwd` would cut D into blocks of 64 and add float32 outputs of each:
        its kernel is called with one block.
        """
        from fla.ops.common.fused_chunk import fused_chunk_fwd_kernel

        assert self.through is not None
        before = self.reaching(self._added, None, self.through, self.sequences.arriving)
        heads, head_dim, value_dim = self._behind_shape()
        self._out = torch.empty_like(self.v)

        def grid(meta: dict[str, int]) -> tuple[int]:
            return (-(-value_dim // meta["BV"]) * self.sequences.count * heads,)

        with measured_blocks(self.k, self.v):
            fused_chunk_fwd_kernel[grid](
                q=self.q,
                k=self.k,
                v=self.v,
                g=None,
                g_gamma=self.gate,
                o=self._out,
                h0=self.of_all(before),
                ht=None,
                cu_seqlens=self.sequences.starts,
                scale=1.0,
                T=self.k.shape[1],
                B=1,
                H=heads,
                K=head_dim,
                V=value_dim,
                BT=CHUNK,
                BK=1 << max(4, (head_dim - 1).bit_length()),
            )

    def entering(self, incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        self._incoming = incoming
        return super().entering(incoming)

    def outputs(self) -> Tensor:
        from megatron_cp_plugin.kernels.decayed import add_decayed_

        if self._incoming is not None:
            batch, firsts = self.sequences.batch, self.sequences.runs.firsts
            out, q = (x.unflatten(1, (batch, -1))[0] for x in (self._out, self.q))
            incoming = self._incoming.unflatten(0, (-1, batch))
            add_decayed_(out, q, incoming, self.gate, firsts)
        return self._out

    def gradients(self, behind: Tensor | None) -> tuple[Tensor, ...]:
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv

        given = {**self.gated, "do": self._dout, "scale": 1.0, **self.where}
        given["dh"] = self.gradients_of_states(behind)
        with measured_blocks(self.k, self.v):
            dq, dk, *_ = chunk_bwd_dqkwg(
                q=self.q, k=self.k, v=self.v, h=self._before_chunks, **given
            )
            del self._before_chunks
            dv = chunk_bwd_dv(q=self.q, k=self.k, **given)
        return dq, dk, dv


@kept_on_device(maxsize=1024)
def log2_rates_of(decay: Decay, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Logarithms to base 2 [H]."""
    return (decay.logarithms(device) / log(2)).to(dtype)
