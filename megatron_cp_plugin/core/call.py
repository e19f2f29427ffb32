"""One call of softmax attention: its sizes, and the groups of heads by which it is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Self

import torch
from torch import Tensor

from megatron_cp_plugin.core.kernel import SoftmaxKernel
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.core.tiles import Mask


@dataclass(frozen=True)
class Shape:
    """What the volume of communication depends on.

    Attributes:
        seq_len: global.
        element_bytes: of q, k, v and out.
        wide_bytes: of lse and of float32 sums.
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

    def travel_bytes(self) -> tuple[int, int]:
        """Bytes that both passes send of a token's query, and of its key, to compute with them on
        another rank: q, out and lse, and q, dout, delta, lse and dq; k and v twice, dk and dv.
        """
        e, w = self.element_bytes, self.wide_bytes
        of_query = 3 * self.query_width * e + 2 * self.out_width * e + 3 * self.heads * w
        return of_query, 3 * self.kv_width * e

    def flop(self, size: int) -> int:
        """FLOP of one rank's forward without a mask, of `size` ranks."""
        width = self.query_width + self.out_width
        return 2 * self.batch * width * self.seq_len**2 // size

    def elements(self, size: int) -> int:
        """Number of elements of q on the rank with the most tokens, of `size` ranks."""
        return self.batch * -(-self.seq_len // size) * self.query_width


_MOST_GROUPS = 4
_GROUP_FLOP = 10**12  # below that a group costs more in launches than it hides
_LARGE = 2**27


@dataclass(frozen=True)
class HeadGroup:
    """Some query heads, and the KV heads that they use.

    Attributes: first, last: whether the group is the first, and the last, of those that use these
        KV heads.
    """

    q: slice
    kv: slice
    first: bool
    last: bool

    def __hash__(self) -> int:
        # Of the groups in one key only one ends there: plans have a key for each of many messages.
        return hash(self.q.stop)

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.q.stop - self.q.start

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.kv.stop - self.kv.start

    def offset_into(self, outer: "HeadGroup") -> "HeadGroup":
        """These heads of some heads, as heads of the whole."""
        q, kv = (
            slice(whole.start + part.start, whole.start + part.stop)
            for part, whole in ((self.q, outer.q), (self.kv, outer.kv))
        )
        return HeadGroup(q, kv, self.first and outer.first, self.last and outer.last)


def together(groups: Sequence[HeadGroup]) -> HeadGroup:
    """One group with all heads of successive groups."""
    q, kv = groups[-1].q.stop, groups[-1].kv.stop
    return HeadGroup(slice(0, q), slice(0, kv), first=True, last=True)


@lru_cache(maxsize=1024)  # of as many heads in every candidate of a planner
def head_groups(
    heads: int, kv_heads: int, most: int, *, share_kv: bool = True
) -> tuple[HeadGroup, ...]:
    """At most `most` groups of equally many heads, none with parts of more than one KV head.

    Args:
        heads, kv_heads: H and G; G divides H.
        share_kv: whether several groups may use the same KV head; otherwise there are at most G.
    """
    count = max(
        n
        for n in range(1, max(1, min(most, heads)) + 1)
        if not kv_heads % n or (share_kv and not n % kv_heads and not heads % n)
    )
    q_width, kv_width = heads // count, max(1, kv_heads // count)
    sharing = max(1, count // kv_heads)
    groups = []
    for index in range(count):
        kv_start = index // sharing * kv_width
        groups.append(
            HeadGroup(
                slice(index * q_width, (index + 1) * q_width),
                slice(kv_start, kv_start + kv_width),
                first=index % sharing == 0,
                last=index % sharing == sharing - 1,
            )
        )
    return tuple(groups)


def group_count(chunks: int, flop: int, elements: int = 0) -> int:
    """Number of groups of heads into which attention is split to hide communication.

    Args:
        chunks: this number; 0: the number that suits the other two.
        flop: see `flop_of_rank`.
        elements: of a rank's q, of which many are worth two groups under any mask.
    """
    return chunks or min(_MOST_GROUPS, max(1 + (elements >= _LARGE), flop // _GROUP_FLOP))


def successive_groups(
    heads: int, kv_heads: int, chunks: int, elements: int
) -> tuple[HeadGroup, ...]:
    """Groups of heads that are computed one after another, to save memory.

    Blocks in transit, sums and results of kernels then have the heads of one group.

    Args: chunks: how many groups at most; 0: one, or two where a rank's q has enough elements that
        kernels are as fast with half of the heads.
    """
    wanted = chunks or (2 if elements >= _LARGE else 1)
    return head_groups(heads, kv_heads, wanted, share_kv=False)


def flop_of_rank(shape: Shape, mask: Mask, size: int) -> int:
    """Mean FLOP of one rank's forward, of `size` ranks, by which groups of heads are counted.

    A mask without window, documents and spans counts as no mask. Any other mask counts by the share
    of a causal mask's pairs that it lets through.
    """
    flop, tokens = shape.flop(size), shape.seq_len
    if not mask.special or not tokens:
        return flop
    return min(flop, 2 * flop * mask.bands.area(tokens) // (tokens * (tokens + 1)))


@dataclass(frozen=True)
class Call:
    """One attention over the whole split sequence.

    Attributes:
        shape: sizes of the whole problem.
        dq, dkv: whether the gradient of q, and those of k and v, are wanted; the same on all ranks.
    """

    shape: Shape
    mask: Mask
    scale: float
    kernel: SoftmaxKernel
    dq: bool = True
    dkv: bool = True

    @cached_property
    def packed(self) -> bool:
        """Whether one kernel call computes several tiles: with masks that make many of them."""
        return self.kernel.packs and bool(self.mask.special)

    @cached_property
    def places_outputs(self) -> bool:
        """Whether the kernel writes a block's first partial output where the merged one will be."""
        return self.kernel.places_outputs and not self.packed

    @cached_property
    def places_gradients(self) -> bool:
        """Whether the kernel writes a block's first gradients where their sums will be."""
        return self.kernel.places_gradients and not self.packed
