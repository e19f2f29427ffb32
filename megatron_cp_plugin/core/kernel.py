"""The interface of softmax attention kernels, and the statistics of the backward pass.

B batch, S query tokens, T key tokens, H query heads, G KV heads (G divides H), D head dim, E that
of values and outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.partial import delta_of, placeholder_out, rows_at
from megatron_cp_plugin.core.ranges import Numbers
from megatron_cp_plugin.errors import ContextParallelError

Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


class Kernel[P](ABC):
    """A kernel that serves some problems of a kind P.

    Attributes:
        name: as users give it.
        deterministic: every run gives the same bits, gradients included, while
            `torch.use_deterministic_algorithms(True)` is in force.
    """

    name: str
    deterministic: bool = False

    @abstractmethod
    def unsupported(self, problem: P) -> str | None:
        """Why the kernel cannot serve the problem; None if it can."""


@dataclass(frozen=True)
class Problem:
    """What a kernel has to serve.

    Attributes:
        deterministic: every run must give the same bits; default: torch's own setting.
        documents: sequences are packed documents, whose lengths change with every batch.
        windows: some computations are sliding windows, of many tiles.
        value_dim: head dim of v and out; 0: that of q and k.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    documents: bool = False
    value_dim: int = 0
    windows: bool = False

    def __post_init__(self) -> None:
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)

    def __str__(self) -> str:
        dims = f"{self.head_dim}"
        if self.value_dim != self.head_dim:
            dims += f" and {self.value_dim}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.heads}:{self.kv_heads} heads of {dims} in {dtype}"


class Statistics(NamedTuple):
    """What the backward of a tile needs from the merged forward: lse, and either out or delta.

    Attributes:
        lse: [B,H,S] over all keys, natural log.
        out: [B,S,H,E] over all keys, or None.
        delta: rowsum(dout * out) [B,H,S], or None.
    """

    lse: Tensor
    out: Tensor | None = None
    delta: Tensor | None = None

    def rows(self, rows: slice | Tensor) -> "Statistics":
        """The statistics of some query rows. Args: rows: as in `partial.rows_at`."""
        if not isinstance(rows, slice):
            return self._each(lambda x: x.index_select(2, rows), lambda out: rows_at(out, rows))
        if rows == slice(0, self.lse.shape[2]):
            return self
        lse, out, delta = self  # in every layer: without further calls
        return Statistics(
            lse[:, :, rows],
            None if out is None else out[:, rows],
            None if delta is None else delta[:, :, rows],
        )

    def _each(
        self, of_rows: Callable[[Tensor], Tensor], of_out: Callable[[Tensor], Tensor]
    ) -> "Statistics":
        """Args: of_rows: what is done to lse and delta. of_out: to out."""
        lse, out, delta = self
        return Statistics(
            of_rows(lse),
            None if out is None else of_out(out),
            None if delta is None else of_rows(delta),
        )

    def heads(self, heads: slice) -> "Statistics":
        """The statistics of some query heads."""
        if heads.stop - heads.start == self.lse.shape[1]:
            return self
        return self._each(lambda x: x[:, heads], lambda out: out[:, :, heads])

    def copied_bytes(self, dout_bytes: int) -> int:
        """Bytes that kernels copy which need a contiguous lse, and an out as large as dout."""
        lse = 0 if self.lse.is_contiguous() else self.lse.numel() * self.lse.element_size()
        return lse + (dout_bytes if self.out is None else 0)

    def flipped(self) -> "Statistics":
        """The statistics of the rows in reverse order."""
        return self._each(lambda x: x.flip(2), lambda out: out.flip(1))

    def flattened(self) -> "Statistics":
        """With one batch entry after the other: lse and delta [H,B*S], out [B*S,H,D]."""
        return self._each(lambda x: x.transpose(0, 1).flatten(1), lambda out: out.flatten(0, 1))

    def delta_for(self, dout: Tensor) -> Tensor:
        """delta [B,H,S], computed from out if it is missing."""
        if self.delta is not None:
            return self.delta
        assert self.out is not None
        return delta_of(dout, self.out)

    def out_for(self, dout: Tensor) -> Tensor:
        """out, or a tensor with the same rowsum(dout * out), in dout's shape, flattened or not.

        For kernels that compute delta themselves, in float32, and use `out` for nothing else.
        """
        if self.out is not None:
            return self.out
        assert self.delta is not None
        return placeholder_out(dout, self.delta)


class Lengths(NamedTuple):
    """Lengths of packed sequences, in the order of the arguments of torch's own kernel.

    Attributes:
        cu_q, cu_k: [sequences + 1] int32, where each sequence begins, and where the last one ends.
        longest_q, longest_k: tokens of the longest sequence.
        used_q, used_k: [sequences] int32, lengths; None: each sequence ends where the next begins.
    """

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    used_q: Tensor | None = None
    used_k: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences that one call computes, each by itself, in ascending order.

    Attributes: edges: int64 [2,2,n]: [queries or keys, starts or stops, sequence]. The first
        sequence begins at 0, the last one ends where the tensors do. For a kernel that takes `gaps`
        other tokens may lie between sequences; in a forward, keys may also be in any order and
        belong to several sequences.
    """

    edges: Numbers

    @classmethod
    def of(cls, q: Sequence[slice], kv: Sequence[slice]) -> "Packing":
        """A packing of sequences with these ranges of queries and of keys."""
        return cls(np.array([[[x.start for x in s], [x.stop for x in s]] for s in (q, kv)]))

    @classmethod
    def adjacent(cls, q: Sequence[int], kv: Sequence[int]) -> "Packing":
        """A packing without gaps, from cumulative lengths 0, ..., S."""
        return cls(np.array([[side[:-1], side[1:]] for side in (q, kv)]))

    def __len__(self) -> int:
        return self.edges.shape[2]

    @cached_property
    def q(self) -> tuple[slice, ...]:
        """Ranges of queries, by sequence."""
        return tuple(map(slice, *self.edges[0].tolist()))

    @cached_property
    def kv(self) -> tuple[slice, ...]:
        """Ranges of keys, by sequence."""
        return tuple(map(slice, *self.edges[1].tolist()))

    @cached_property
    def gaps(self) -> bool:
        """Whether there are queries, or keys, between sequences."""
        return bool((self.edges[:, 1, :-1] != self.edges[:, 0, 1:]).any())

    @kept_on_device(maxsize=512)  # all layers of a micro-batch have the same packings
    def lengths(self, batch: int, device: torch.device) -> Lengths:
        """Lengths of the sequences of all batch entries, one entry after the other."""
        first, stops = torch.from_numpy(self.edges).unbind(1)
        ends = stops.amax(1, keepdim=True)
        starts = torch.arange(batch, device="cpu")[:, None] * ends[:, None] + first[:, None]
        used = stops - first
        longest_q, longest_k = used.amax(1).tolist()
        count = batch * used.shape[1]
        # flash-attn 4 copies what does not begin at a multiple of 16 bytes.
        numbers = starts.new_zeros((2, 2, -(-(count + 1) // 4) * 4))
        numbers[:, 0, : count + 1] = torch.cat((starts.flatten(1), batch * ends), 1)
        numbers[:, 1, :count] = used.repeat(1, batch)
        (cu_q, used_q), (cu_k, used_k) = (
            (cu[: count + 1], used[:count]) for cu, used in uploaded(numbers, device)
        )
        lengths = Lengths(cu_q, cu_k, longest_q, longest_k)
        return lengths._replace(used_q=used_q, used_k=used_k) if self.gaps else lengths


def check_scale(scale: float) -> None:
    """Raises: ContextParallelError for scales with which kernels that mask scores before they scale
    them compute NaN, or wrong numbers.
    """
    if not 0 < scale < inf:
        raise ContextParallelError(
            f"attention needs a scale above 0, got {scale}: leave it out for head_dim**-0.5, or "
            "multiply q by it"
        )


class KernelCall(NamedTuple):
    """What one call of a kernel computes: attention of a tile, or of several sequences.

    Attributes:
        q: [B,S,H,D].
        k: [B,T,G,D].
        v: [B,T,G,E].
        scale: factor of the scores.
        causal: row i sees column j iff j <= i + T - S; S equals T unless `rectangular_causal`. With
            packed sequences this holds in each sequence.
        packing: the sequences, each computed by itself, only for kernels that pack; None: one
            sequence of S queries and T keys.
        into: memory for the results, possibly some heads of wider tensors; only for kernels that
            place results, and without packing. None: results are new tensors.
        window: row i sees no column j <= i + T - S - window, in each packed sequence; 0: no window.
            Only for kernels with `windows`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool
    packing: Packing | None = None
    into: tuple[Tensor, ...] | None = None
    window: int = 0

    def placed[T: tuple[Tensor, ...]](self, results: T) -> T:
        """Returns the results in `into`, after copying those that the kernel wrote elsewhere."""
        if self.into is None:
            return results
        for place, x in zip(self.into, results, strict=True):
            if x is not place:
                place.copy_(x)
        return cast("T", self.into)


class SoftmaxKernel(Kernel[Problem]):
    """Softmax attention of one tile, or of several.

    Attributes:
        rectangular_causal: takes causal tiles with T > S, bottom-right aligned.
        windows: takes tiles with a `window`, causal or not, and rectangular causal tiles too.
        packs: takes calls with a `packing` of any number of sequences, so that copying small tiles
            together pays.
        gaps: other queries and keys may lie between packed sequences; their results are undefined.
        places_outputs, places_gradients: takes `into` in the forward, in the backward.
    """

    rectangular_causal: bool = False
    windows: bool = False
    packs: bool = False
    gaps: bool = False
    places_outputs: bool = False
    places_gradients: bool = False

    @abstractmethod
    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        """Attention of queries over keys.

        Returns: out [B,S,H,E] in q's dtype, lse [B,H,S] float32 (float64 for float64), natural log.
        """

    @abstractmethod
    def backward(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> Gradients:
        """This call's contribution to the gradients.

        Args: dout: [B,S,H,E]. statistics: of the merged forward.

        Returns: dq [B,S,H,D], dk [B,T,G,D], dv [B,T,G,E].
        """

    def workspace(self, call: KernelCall, statistics: Statistics | None) -> int:
        """Bytes of memory that a call takes beside its arguments and results; 0 if negligible.

        Args:
            call: its tensors may be without storage.
            statistics: of a backward; None: the call is a forward.
        """
        return 0
