"""What a kernel of softmax attention is: the problem, the interface, and a backward's statistics.

B batch, S query tokens, T key tokens, H query heads, G KV heads (G divides H), D head dim, E that
of values and outputs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.devices import uploaded
from megatron_cp_plugin.core.partial import delta_of, rows_at


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
        documents: lengths are those of documents, ever new ones.
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


@dataclass(frozen=True)
class Statistics:
    """What a tile's backward needs of the merged forward: lse, and either out or delta.

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

        def some(x: Tensor) -> Tensor:
            return x[:, :, rows] if isinstance(rows, slice) else x.index_select(2, rows)

        return Statistics(
            some(self.lse),
            None if self.out is None else rows_at(self.out, rows),
            None if self.delta is None else some(self.delta),
        )

    def heads(self, heads: slice) -> "Statistics":
        """The statistics of some query heads."""
        return Statistics(
            self.lse[:, heads],
            None if self.out is None else self.out[:, :, heads],
            None if self.delta is None else self.delta[:, heads],
        )

    def copied_bytes(self, dout_bytes: int) -> int:
        """Bytes of what kernels make of these that want a contiguous lse and an out.

        Args: dout_bytes: of a tensor like out.
        """
        lse = 0 if self.lse.is_contiguous() else self.lse.numel() * self.lse.element_size()
        return lse + (dout_bytes if self.out is None else 0)

    def flipped(self) -> "Statistics":
        """The statistics of the rows in reverse order."""
        return Statistics(
            self.lse.flip(2),
            None if self.out is None else self.out.flip(1),
            None if self.delta is None else self.delta.flip(2),
        )

    def flattened(self) -> "Statistics":
        """With one batch entry after the other: lse and delta [H,B*S], out [B*S,H,D]."""
        return Statistics(
            self.lse.transpose(0, 1).flatten(1),
            None if self.out is None else self.out.flatten(0, 1),
            None if self.delta is None else self.delta.transpose(0, 1).flatten(1),
        )

    def delta_for(self, dout: Tensor) -> Tensor:
        """delta [B,H,S], computed from out if it is not there."""
        if self.delta is not None:
            return self.delta
        assert self.out is not None
        return delta_of(dout, self.out)

    def out_for(self, dout: Tensor) -> Tensor:
        """out, or a stand-in with the same rowsum(dout * out); in dout's shape, flattened or not.

        Kernels that compute delta themselves use `out` for nothing else, so that
        out' = delta * dout / |dout|^2 (0 where dout is 0) gives the same gradients.
        """
        if self.out is not None:
            return self.out
        assert self.delta is not None
        wide = dout.to(self.delta.dtype)
        square = wide.square().sum(-1, keepdim=True)
        delta = self.delta.transpose(-2, -1).unsqueeze(-1)
        return torch.where(square > 0, delta / square * wide, 0.0).to(dout.dtype)


class Lengths(NamedTuple):
    """Lengths of sequences as kernels take them, in the order in which torch's own does.

    Attributes: cu_q, cu_k: [sequences + 1] int32. longest_q, longest_k: tokens of the longest one.
    """

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences that one call computes, each by itself, one after the other.

    Attributes: rows, cols: where the queries, and the keys, of each begin and end: 0, ..., S and
        0, ..., T.
    """

    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @property
    def sequences(self) -> int:
        """How many they are."""
        return len(self.rows) - 1

    @cached_property
    def parts(self) -> tuple[tuple[slice, slice], ...]:
        """Queries and keys of each."""
        rows, cols = ([slice(a, b) for a, b in pairwise(x)] for x in (self.rows, self.cols))
        return tuple(zip(rows, cols, strict=True))

    def lengths(self, batch: int, device: torch.device) -> Lengths:
        """Those of all entries of a batch, one entry after the other."""
        return _lengths(self, batch, device)


@lru_cache(maxsize=512)  # all layers of a micro-batch have the same packings
def _lengths(packing: Packing, batch: int, device: torch.device) -> Lengths:
    bounds = torch.tensor((packing.rows, packing.cols))
    entries = torch.arange(batch)[:, None] * bounds[:, None, -1:] + bounds[:, None, :-1]
    both = torch.cat((entries.flatten(1), batch * bounds[:, -1:]), 1)
    cu_q, cu_k = uploaded(both, device)
    longest_q, longest_k = bounds.diff().amax(1).tolist()
    return Lengths(cu_q, cu_k, longest_q, longest_k)


class SoftmaxKernel(Kernel[Problem]):
    """Softmax attention of one tile, or of several.

    Attributes:
        rectangular_causal: takes causal tiles with T > S, bottom-right aligned.
        packs: `forward_packed` and `backward_packed` are one call, however many sequences there
            are, so that it pays to copy small tiles together for it.
    """

    rectangular_causal: bool = False
    packs: bool = False

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention of q [B,S,H,D] over k [B,T,G,D], v [B,T,G,E].

        Args:
            causal: row i sees column j iff j <= i + T - S; S equals T unless `rectangular_causal`.

        Returns: out [B,S,H,E] in q's dtype, lse [B,H,S] float32 (float64 for float64), natural log.
        """

    @abstractmethod
    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients that this tile contributes; `statistics` are those of the merged forward.

        Args: dout: [B,S,H,E].

        Returns: dq [B,S,H,D], dk [B,T,G,D], dv [B,T,G,E].
        """

    def workspace(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics | None,
        *,
        causal: bool,
        sequences: int = 1,
    ) -> int:
        """Bytes that a call takes beside its arguments and results; 0 if next to nothing.

        Args: q, k, v: of the call, perhaps without storage. statistics: of a backward's; None: the
            call is a forward. causal: as there. sequences: that are packed.
        """
        return 0

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention of each sequence: one call for each, unless the kernel can do better.

        Args: q: [B,S,H,D]; k: [B,T,G,D]; v: [B,T,G,E]. causal: as in `forward`, in each.

        Returns: as `forward`.
        """
        pieces = [
            self.forward(q[:, rows], k[:, cols], v[:, cols], scale=scale, causal=causal)
            for rows, cols in packing.parts
        ]
        outs, lses = zip(*pieces, strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 2)

    def backward_packed(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        packing: Packing,
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of `forward_packed`; otherwise as `backward`."""
        pieces = [
            self.backward(
                dout[:, rows],
                q[:, rows],
                k[:, cols],
                v[:, cols],
                statistics.rows(rows),
                scale=scale,
                causal=causal,
            )
            for rows, cols in packing.parts
        ]
        dq, dk, dv = (torch.cat(gradients, 1) for gradients in zip(*pieces, strict=True))
        return dq, dk, dv
