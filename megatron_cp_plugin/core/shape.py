"""The sizes of one attention, on which bytes and memory depend."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatron_cp_plugin.core.partial import accumulation_dtype


@dataclass(frozen=True)
class Shape:
    """What the volume of communication depends on.

    Attributes:
        seq_len: global. element_bytes: of q, k, v and out. wide_bytes: of lse and of float32 sums.
        value_dim: E, the head dim of v and out; 0: that of q and k.
    """

    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int = 2
    wide_bytes: int = 4
    value_dim: int = 0

    def __post_init__(self) -> None:
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, seq_len: int) -> Self:
        """The whole problem, from a rank's q [B,S,H,D], k [B,S,G,D] and v [B,S,G,E]."""
        return cls.of_sizes(q.shape, k.shape, v.shape, q.dtype, seq_len)

    @classmethod
    def of_sizes(
        cls, q: torch.Size, k: torch.Size, v: torch.Size, dtype: torch.dtype, seq_len: int
    ) -> Self:
        """The same, from their sizes."""
        batch, _, heads, dim = q
        wide_bytes = accumulation_dtype(dtype).itemsize
        return cls(batch, seq_len, heads, k[2], dim, dtype.itemsize, wide_bytes, v[3])

    @property
    def query_width(self) -> int:
        """Elements of a token's q, and of its dq: HD."""
        return self.heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Elements of a token's out, and of its dout: HE."""
        return self.heads * self.value_dim

    @property
    def kv_width(self) -> int:
        """Elements of a token's k and v, and of dk and dv: GD + GE."""
        return self.kv_heads * (self.head_dim + self.value_dim)

    def travel_bytes(
        self, wide_partials: bool = False, wide_gradients: bool = False
    ) -> tuple[int, int]:
        """Bytes that both passes send of a token's query, and of its key, to compute with them on
        another rank: q, out and lse, and q, dout, delta, lse and dq; k and v twice, dk and dv.
        """
        e, w = self.element_bytes, self.wide_bytes
        inputs_and_gradient = 2 * e + (w if wide_gradients else e)
        outs = self.out_width * (e + (w if wide_partials else e))
        of_query = self.query_width * inputs_and_gradient + outs + 3 * self.heads * w
        return of_query, self.kv_width * inputs_and_gradient

    def flop(self, size: int) -> int:
        """FLOP of the forward of one of `size` ranks without a mask."""
        width = self.query_width + self.out_width
        return 2 * self.batch * width * self.seq_len**2 // size

    def elements(self, size: int) -> int:
        """Elements of q of the rank with most tokens, of `size`."""
        return self.batch * -(-self.seq_len // size) * self.query_width
