"""Zero heads that fill attention up, so that ranks can split the heads however many there are."""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm
from typing import Self

from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class FilledHeads:
    """H query heads, `shared` of them for each of G KV heads, and what they are filled up to.

    Query heads are added to every KV head first, then KV heads with as many query heads each. A
    query head of zeros, whose dout is 0 too, has gradients of 0 and adds 0 to those of its KV head;
    so has a KV head of zeros.

    Attributes: kv_heads, shared: as given. all_kv_heads, all_shared: with the zero heads.
    """

    kv_heads: int
    shared: int
    all_kv_heads: int
    all_shared: int

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
        return cls(kv_heads, shared, best, shared_by(best))

    @property
    def heads(self) -> int:
        """Query heads, zero heads among them."""
        return self.all_kv_heads * self.all_shared

    def fill_queries(self, x: Tensor, dim: int = 2) -> Tensor:
        """[B,S,H,D] with the zero heads. Args: dim: of the heads."""
        return _filled(x, dim, (self.kv_heads, self.shared), (self.all_kv_heads, self.all_shared))

    def own_queries(self, x: Tensor, dim: int = 2) -> Tensor:
        """[B,S,all,D] without the zero heads, contiguous. Args: dim: of the heads."""
        return _own(x, dim, (self.kv_heads, self.shared), (self.all_kv_heads, self.all_shared))

    def fill_keys(self, x: Tensor) -> Tensor:
        """[B,S,G,D] with the zero heads."""
        return _filled(x, 2, (self.kv_heads, 1), (self.all_kv_heads, 1))

    def own_keys(self, x: Tensor) -> Tensor:
        """[B,S,all,D] without the zero heads, contiguous."""
        return _own(x, 2, (self.kv_heads, 1), (self.all_kv_heads, 1))


def _filled(x: Tensor, dim: int, own: tuple[int, int], all_of: tuple[int, int]) -> Tensor:
    """Args: own, all_of: KV heads, and query heads for each."""
    if own == all_of:
        return x
    missing = [total - part for part, total in zip(own, all_of, strict=True)]
    behind = [0] * (2 * (x.dim() - dim - 1))
    filled = pad(x.unflatten(dim, own), [*behind, 0, missing[1], 0, missing[0]])
    return filled.flatten(dim, dim + 1)


def _own(x: Tensor, dim: int, own: tuple[int, int], all_of: tuple[int, int]) -> Tensor:
    if own == all_of:
        return x
    parts = x.unflatten(dim, all_of).narrow(dim, 0, own[0]).narrow(dim + 1, 0, own[1])
    return parts.flatten(dim, dim + 1).contiguous()
