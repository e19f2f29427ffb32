"""Layouts: which global token positions each rank of a context-parallel group holds; and checks
that a rank was given these tokens, by their positions or by how tensors were split.

N is the global sequence length, P the number of ranks. A layout is pure Python; functions apply it
to tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import eq
from operator import index as whole_number
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.ranges import Ranges, Span, joined
from megatron_cp_plugin.errors import ContextParallelError, brief

# A layout may depend on these: where documents begin, as `document_starts` gives it, or the slices
# of a span mask (`core.masks.slices`).
type Documents = tuple[int, ...] | tuple[tuple[int, int, int, int, str], ...]


def document_starts(cu_seqlens: Sequence[int], seq_len: int) -> tuple[int, ...]:
    """Positions at which documents begin, but for the first, from cumulative lengths (0, n1, n1 +
    n2, ..., N); empty documents do not count.

    Raises: ContextParallelError unless they are whole numbers that ascend from 0 to seq_len.
    """
    try:
        cu_seqlens = list(map(whole_number, cu_seqlens))
    except TypeError:
        raise ContextParallelError(
            f"cu_seqlens needs whole numbers from 0 to seq_len = {seq_len}, got "
            f"{brief(cu_seqlens)}: cast them first, in one dimension"
        ) from None
    descends = any(a > b for a, b in pairwise(cu_seqlens))
    if descends or [*cu_seqlens[:1], *cu_seqlens[-1:]] != [0, seq_len]:
        raise ContextParallelError(
            f"cu_seqlens needs ascending numbers from 0 to seq_len = {seq_len}, got "
            f"{brief(cu_seqlens)}"
        )
    return tuple(sorted(set(cu_seqlens) - {0, seq_len}))


def chunk_bounds(index: int, chunks: int, seq_len: int) -> tuple[int, int]:
    """Bounds of one of `chunks` consecutive pieces of seq_len; the first pieces take the rest."""
    size, rest = divmod(seq_len, chunks)
    start = index * size + min(index, rest)
    return start, start + size + (index < rest)


class Layout(ABC):
    """Assignment of global positions to ranks. Spans of one rank are disjoint and ascending.

    Layouts are values: two of one kind and of the same fields are equal.

    Attributes: follows_documents: which tokens a rank holds depends on documents or spans.
    """

    name: str
    follows_documents: bool = False

    @abstractmethod
    def spans(self, rank: int, size: int, seq_len: int) -> Sequence[Span]:
        """Positions that `rank` of `size` ranks holds, in its local order."""

    @abstractmethod
    def multiple(self, size: int) -> int:
        """What seq_len must be divisible by for every rank to hold the same number of tokens,
        in chunks of equal length.
        """

    def length(self, rank: int, size: int, seq_len: int) -> int:
        """Number of tokens that `rank` holds."""
        return sum(map(len, self.spans(rank, size, seq_len)))

    def for_documents(self, documents: "Documents") -> "Layout":
        """The layout of a sequence with documents, or under a span mask; most layouts return
        themselves.

        Without documents a layout that has documents already keeps them.
        """
        return self


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank p holds the p-th of P consecutive chunks."""

    name = "contiguous"

    def spans(self, rank: int, size: int, seq_len: int) -> tuple[Span, ...]:
        return (Span(*chunk_bounds(rank, size, seq_len)),)

    def multiple(self, size: int) -> int:
        return size


@dataclass(frozen=True)
class Zigzag(Layout):
    """Rank p holds chunks p and 2P-1-p of 2P: equal causal work for every rank.

    Megatron's and Transformer Engine's own layout.
    """

    name = "zigzag"

    def spans(self, rank: int, size: int, seq_len: int) -> tuple[Span, ...]:
        return tuple(
            Span(*chunk_bounds(chunk, 2 * size, seq_len)) for chunk in (rank, 2 * size - 1 - rank)
        )

    def multiple(self, size: int) -> int:
        return 2 * size


@dataclass(frozen=True)
class Cyclic(Layout):
    """Rank p holds positions p, p + P, p + 2P, ... (Attention2D, section 3.2)."""

    name = "cyclic"

    def spans(self, rank: int, size: int, seq_len: int) -> tuple[Span, ...]:
        return (Span(min(rank, seq_len), seq_len, size),)

    def multiple(self, size: int) -> int:
        return size


@dataclass(frozen=True)
class Grouped(Layout):
    """Tokens of teams: each team holds the tokens of `members` consecutive ranks of another layout.

    Attributes: parts: the layout of single ranks, whose spans have no gaps.
    """

    parts: Layout
    members: int

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the layout of single ranks."""
        return self.parts.name

    def spans(self, rank: int, size: int, seq_len: int) -> Ranges:
        ranks, size = range(rank * self.members, (rank + 1) * self.members), size * self.members
        return joined([Ranges.of(self.parts.spans(one, size, seq_len)) for one in ranks]).united

    def multiple(self, size: int) -> int:
        return self.parts.multiple(size * self.members)

    def length(self, rank: int, size: int, seq_len: int) -> int:
        ranks, size = range(rank * self.members, (rank + 1) * self.members), size * self.members
        return sum(self.parts.length(one, size, seq_len) for one in ranks)

    @property
    def follows_documents(self) -> bool:  # type: ignore[override]
        """Whether the layout of single ranks does."""
        return self.parts.follows_documents

    def for_documents(self, documents: "Documents") -> "Grouped":
        return Grouped(self.parts.for_documents(documents), self.members)


@dataclass(frozen=True, eq=False)
class TokenMap(Sequence[Ranges]):
    """The positions that each rank holds; maps with equal positions are equal.

    A rank's positions are made on demand: with many documents, making all ranks' positions takes
    longer than planning one rank.

    Attributes: layout: for the documents of the mask.
    """

    layout: Layout
    size: int
    seq_len: int

    @staticmethod
    @lru_cache(maxsize=16)  # both passes of a micro-batch have the same
    def of(layout: Layout, size: int, seq_len: int) -> "TokenMap":
        """What the ranks hold in a layout."""
        return TokenMap(layout, size, seq_len)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenMap):
            return NotImplemented
        mine, others = ((x.layout, x.size, x.seq_len) for x in (self, other))
        # Different layouts differ in the first ranks, so positions of the others need not be made.
        return mine == others or (len(self) == len(other) and all(map(eq, self, other)))

    def __hash__(self) -> int:
        return hash(self.lengths)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Ranges:  # type: ignore[override]
        rank, made = range(self.size)[index], self._made
        if rank not in made:
            made[rank] = Ranges.of(self.layout.spans(rank, self.size, self.seq_len))
        return made[rank]

    @cached_property
    def _made(self) -> dict[int, Ranges]:
        """Positions that were asked for, by rank."""
        return {}

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of positions that each rank holds."""
        ranks = range(self.size)
        return tuple(self.layout.length(rank, self.size, self.seq_len) for rank in ranks)

    @cached_property
    def gaps(self) -> bool:
        """Whether a rank holds positions with a step."""
        if self.layout.follows_documents:
            return False
        return not all(spans.plain for spans in self)

    def all_see_all(self, causal: bool) -> bool:
        """Whether some query of every rank's block sees some key of every block, without windows,
        documents and spans: from each block's first and last position.
        """
        found = [(block[0].start, block[-1].positions[-1]) for block in self if len(block)]
        if len(found) < len(self):
            return False
        first, last = zip(*found, strict=True)
        return not causal or min(last) >= max(first)


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Contiguous(), Zigzag(), Cyclic())}


def positions(
    layout: Layout, rank: int, size: int, seq_len: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Global positions of the tokens that a rank holds, in its local order.

    Returns: int64 tensor [S].
    """
    pieces = [
        torch.arange(s.start, s.stop, s.step, device=device)
        for s in layout.spans(rank, size, seq_len) or (Span(0, 0),)
    ]
    return torch.cat(pieces)


def unfit(
    layout: Layout, rank: int, size: int, seq_len: int, expected: int, tokens: int
) -> ContextParallelError:
    """Makes the error for a rank whose number of tokens is not the layout's."""
    return ContextParallelError(
        f"rank {rank} of {size} holds {expected} of {seq_len} tokens ({layout.name} layout), got "
        f"{tokens}: shard with cp.shard"
    )


def shard(x: Tensor, dim: int, layout: Layout, rank: int, size: int) -> Tensor:
    """The part of a whole tensor that a rank holds, in its local order.

    Args: x: whole tensor, N tokens along `dim`.

    Returns: a new contiguous tensor, S tokens along `dim`. Differentiable.
    """
    dim = dim % x.dim()
    index: list[slice] = [slice(None)] * x.dim()
    pieces = []
    for span in layout.spans(rank, size, x.shape[dim]) or (Span(0, 0),):
        index[dim] = slice(span.start, span.stop, span.step)
        pieces.append(x[tuple(index)])
    return torch.cat(pieces, dim)


def unshard(shards: Sequence[Tensor], dim: int, layout: Layout) -> Tensor:
    """Puts the shards of all ranks (index = rank) back in global order: the inverse of `shard`."""
    size = len(shards)
    dim = dim % shards[0].dim()
    seq_len = sum(s.shape[dim] for s in shards)
    device = shards[0].device
    order = torch.cat([positions(layout, r, size, seq_len, device) for r in range(size)])
    return torch.cat(list(shards), dim).index_select(dim, torch.argsort(order))


class ShardNote(NamedTuple):
    """How a tensor was split, as noted on its memory.

    Attributes:
        layout: within the documents.
        stride, tokens: of the dimension of tokens.
        version: of the tensor; changes in place count it up.
    """

    layout: Layout
    rank: int
    size: int
    seq_len: int
    stride: int
    tokens: int
    version: int


def remember(x: Tensor, dim: int, layout: Layout, seq_len: int, rank: int, size: int) -> None:
    """Notes how a tensor was split, for `check_cut` of it and of its views; see ShardNote."""
    with suppress(RuntimeError):  # no version in inference mode, no memory within torch.func
        of_x = x.stride(dim), x.shape[dim], x._version
        x.untyped_storage().cut = ShardNote(layout, rank, size, seq_len, *of_x)  # type: ignore[attr-defined]


def check_cut(
    call: str,
    dim: int,
    layout: Layout,
    layout_of: Callable[[int], Layout],
    rank: int,
    size: int,
    tensors: Mapping[str, Tensor],
) -> bool:
    """Refuses tensors that are known to be split in another way than a call takes them.

    A tensor is known if it was noted, or is a view of the same tokens of a noted tensor, until one
    of them is changed in place. Tensors that are not known pass.

    Args:
        call: in words.
        layout: that the call needs, for its documents.
        layout_of: that layout of a sequence of a length.

    Returns: whether one of the tensors is known to be split by this layout. Raises:
    ContextParallelError.
    """
    known = False
    for name, x in tensors.items():
        cut: ShardNote | None = getattr(x.untyped_storage(), "cut", None)
        if cut is None or x._version != cut.version:
            continue
        if x.dim() > dim and x.stride(dim) == cut.stride and x.shape[dim] == cut.tokens:
            needed = layout_of(cut.seq_len) if layout.follows_documents else layout
            elsewhere = (rank, size) != (cut.rank, cut.size)
            if elsewhere or (needed is not cut.layout and _differ(needed, cut)):
                raise ContextParallelError(_mismatch(call, name, needed, rank, size, cut))
            known = True
        elif cut.tokens > 1:
            for other in range(x.dim()):
                if x.stride(other) == cut.stride and x.shape[other] == cut.tokens:
                    raise ContextParallelError(
                        f"{call} takes tokens in dimension {dim} of {name}, got {tuple(x.shape)} "
                        f"with tokens in dimension {other}: give {name}.transpose({dim}, {other})"
                    )
    return known


def _differ(layout: Layout, cut: ShardNote) -> bool:
    """Whether another layout gives some rank other tokens than a tensor was cut by."""
    if layout == cut.layout:
        return False
    of_all = ((rank, cut.size, cut.seq_len) for rank in range(cut.size))
    return not all(torch.equal(positions(layout, *x), positions(cut.layout, *x)) for x in of_all)


def _mismatch(call: str, name: str, layout: Layout, rank: int, size: int, cut: ShardNote) -> str:
    if (rank, size) != (cut.rank, cut.size):
        found = f"the part of rank {cut.rank} of {cut.size} on rank {rank} of {size}"
        advice = "group"
    elif layout.name != cut.layout.name:
        found, advice = f"it as cut in the {cut.layout.name} layout", "algo and options"
    else:
        found, advice = "it as cut for other documents or spans", "cu_seqlens and spans"
    return (
        f"{call} needs {name} in the {layout.name} layout, got {found}: give both the same "
        f"{advice}, or use one cp.Context"
    )
