"""Merging of partial attention outputs, and sums of partial gradients, without losing precision.

B batch, S local tokens, H query heads, D head dim. A partial is attention over a part of the keys:
out [B,S,H,D] and lse [B,H,S], the natural log of its softmax denominator.

Source: AttnFix (Attention2D, Algorithm 2); the same as rescale (DISTFLASHATTN, Algorithm 2) and
GAO (BurstAttention, Algorithm 1, lines 13-16). Differs: rows that no key is visible to.
"""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def weight(lse: Tensor, merged_lse: Tensor) -> Tensor:
    """exp(lse - merged_lse) [B,H,S] as a factor of out [B,S,H,1]; 0 for rows without any key."""
    factor = torch.where(merged_lse == -torch.inf, 0.0, torch.exp(lse - merged_lse))
    return factor.transpose(1, 2).unsqueeze(-1)


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merges a second partial into (out, lse) in place.

    Args:
        out: [B,S,H,D] float32 or float64. lse: [B,H,S], same dtype.
        other_out, other_lse: the second partial, any floating dtype.
    """
    if out.is_cuda:
        from megatron_cp_plugin.kernels.fused import merge_cuda_

        merge_cuda_(out, lse, other_out, other_lse)
        return
    merged = torch.logaddexp(lse, other_lse)
    out.mul_(weight(lse, merged)).addcmul_(other_out.to(out.dtype), weight(other_lse, merged))
    lse.copy_(merged)


class Accumulator:
    """Running merge of the partials of one block of queries.

    The first partial that covers all rows is kept as the kernel gave it; float32 buffers exist
    only once there is something to merge. Rows that no partial covered end as out 0, lse -inf.
    """

    def __init__(self, q: Tensor) -> None:
        """Args: q: [B,S,H,D]; shape, dtype and device of the output to come."""
        self._q = q
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._owned = False

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merges a partial of some rows: out [B,rows,H,D], lse [B,H,rows]."""
        whole = out.shape[1] == self._q.shape[1]
        if self._out is None and whole:
            self._out, self._lse = out, lse
            return
        acc_out, acc_lse = self._buffers()
        merge_(acc_out[:, rows], acc_lse[:, :, rows], out, lse)

    def _buffers(self) -> tuple[Tensor, Tensor]:
        """The float32 accumulators, made of the first partial or empty."""
        if not self._owned:
            batch, tokens, heads, _ = self._q.shape
            dtype = accumulation_dtype(self._q.dtype)
            if self._out is None or self._lse is None:
                self._out = self._q.new_zeros(self._q.shape, dtype=dtype)
                self._lse = self._q.new_full((batch, heads, tokens), -torch.inf, dtype=dtype)
            else:
                self._out = self._out.to(dtype, copy=True)
                self._lse = self._lse.to(dtype, memory_format=torch.contiguous_format, copy=True)
            self._owned = True
        assert self._out is not None and self._lse is not None
        return self._out, self._lse

    def result(self) -> tuple[Tensor, Tensor]:
        """Returns: out [B,S,H,D] in q's dtype, lse [B,H,S] float32 (float64 for float64)."""
        if self._out is None:
            self._buffers()
        assert self._out is not None and self._lse is not None
        return self._out.to(self._q.dtype), self._lse


class GradientSum:
    """Running sum of partial gradients of one block, in float32 from the second one on."""

    def __init__(self, like: Tensor) -> None:
        """Args: like: [B,S,heads,D]; shape, dtype and device of the gradient."""
        self._like = like
        self._sum: Tensor | None = None
        self._owned = False

    def add(self, rows: slice, gradient: Tensor) -> None:
        """Adds the gradient of some rows [B,rows,heads,D]."""
        whole = gradient.shape[1] == self._like.shape[1]
        if self._sum is None and whole:
            self._sum = gradient
            return
        self._buffer()[:, rows].add_(gradient)

    def _buffer(self) -> Tensor:
        if not self._owned:
            dtype = accumulation_dtype(self._like.dtype)
            if self._sum is None:
                self._sum = torch.zeros_like(self._like, dtype=dtype)
            else:
                self._sum = self._sum.to(dtype, copy=True)
            self._owned = True
        assert self._sum is not None
        return self._sum

    def result(self, dtype: torch.dtype | None = None) -> Tensor:
        """The sum, contiguous, in `dtype` (default: the dtype of the tensor it is a gradient of)."""
        if self._sum is None:
            self._buffer()
        assert self._sum is not None
        return self._sum.to(dtype or self._like.dtype).contiguous()


def delta_of(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout * out): [B,S,H,D] twice -> [B,H,S] in float32 (float64 for float64)."""
    dtype = accumulation_dtype(out.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).contiguous()

