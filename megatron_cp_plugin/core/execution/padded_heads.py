"""Splits any number of heads over ranks, with zero heads and copies of KV heads."""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm
from typing import Self

from torch import Tensor
from torch.nn.functional import pad

from megatron_cp_plugin.core.blocks.rows import narrowed, token_dim
from megatron_cp_plugin.core.partial import accumulation_dtype


@dataclass(frozen=True)
class PaddedHeads:
    """H query heads, `shared` of them for each of G KV heads, and what they are filled up to.

    Query heads are added to every KV head first, then KV heads with as many query heads each. A
    query head of zeros, whose dout is 0 too, has gradients of 0 and adds 0 to those of its KV head;
    so has a KV head of zeros. KV heads that several ranks need are sent to each: V in all.

    Attributes: kv_heads, shared: as given. all_kv_heads, all_shared: with the zero heads.
        sent_kv_heads: V, with copies.
    """

    kv_heads: int
    shared: int
    all_kv_heads: int
    all_shared: int
    sent_kv_heads: int

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, heads: int, kv_heads: int, ranks: int) -> Self:
        """The fewest query heads that `ranks` can split; then the fewest KV heads that are sent,
        and of these the fewest that are copies.
        """
        shared = heads // kv_heads

        def shared_by(all_kv_heads: int) -> int:
            step = ranks // gcd(ranks, all_kv_heads)
            return -(-shared // step) * step

        best = min(
            range(kv_heads, kv_heads + ranks),
            key=lambda count: (count * shared_by(count), lcm(count, ranks), -count),
        )
        return cls(kv_heads, shared, best, shared_by(best), lcm(best, ranks))

    @property
    def heads(self) -> int:
        """Query heads, zero heads among them."""
        return self.all_kv_heads * self.all_shared

    def fill_queries(self, x: Tensor) -> Tensor:
        """[B,S,H,D], rows [B,H,S], with the zero heads."""
        return _filled(x, (self.kv_heads, self.shared), (self.all_kv_heads, self.all_shared))

    def own_queries(self, x: Tensor) -> Tensor:
        """[B,S,all,D], rows [B,all,S], without the zero heads; contiguous."""
        return _own(x, (self.kv_heads, self.shared), (self.all_kv_heads, self.all_shared))

    def fill_states(self, x: Tensor) -> Tensor:
        """States of linear attention [B,H,D,E], one KV head each, with those of zero heads."""
        missing = self.heads - x.shape[1]
        return pad(x, (0, 0, 0, 0, 0, missing)) if missing else x

    def own_states(self, x: Tensor) -> Tensor:
        """[B,all,D,E] without those of zero heads; contiguous."""
        return x[:, : self.kv_heads].contiguous()

    def fill_keys(self, x: Tensor) -> Tensor:
        """[B,S,G,D] with the zero heads, and copies: [B,S,V,D]."""
        x = _filled(x, (self.kv_heads, 1), (self.all_kv_heads, 1))
        copies = self.sent_kv_heads // self.all_kv_heads
        return x.repeat_interleave(copies, 2) if copies > 1 else x

    def own_keys(self, gradient: Tensor) -> Tensor:
        """[B,S,V,D], summed over copies in float32, without the zero heads: [B,S,G,D]."""
        if self.sent_kv_heads != self.all_kv_heads:
            parts = gradient.unflatten(2, (self.all_kv_heads, -1))
            wide = accumulation_dtype(gradient.dtype)
            gradient = parts.sum(3, dtype=wide).to(gradient.dtype)
        return _own(gradient, (self.kv_heads, 1), (self.all_kv_heads, 1))


def _filled(x: Tensor, own: tuple[int, int], all_of: tuple[int, int]) -> Tensor:
    """Args: own, all_of: KV heads, and query heads for each."""
    if own == all_of:
        return x
    dim, missing = 3 - token_dim(x), [total - part for part, total in zip(own, all_of, strict=True)]
    behind = [0] * (2 * (x.dim() - dim - 1))
    filled = pad(x.unflatten(dim, own), [*behind, 0, missing[1], 0, missing[0]])
    return filled.flatten(dim, dim + 1)


def _own(x: Tensor, own: tuple[int, int], all_of: tuple[int, int]) -> Tensor:
    if own == all_of:
        return x
    dim = 3 - token_dim(x)
    parts = narrowed(x.unflatten(dim, all_of), dim, 0, own[0])
    return narrowed(parts, dim + 1, 0, own[1]).flatten(dim, dim + 1).contiguous()
