"""Which positions each rank holds, and which pairs of ranks are equivalent."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import eq
from typing import overload

from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.ranges import Ranges, Span
from megatron_cp_plugin.core.tiles import Mask


@dataclass(frozen=True, eq=False)
class TokenMap(Sequence[Ranges]):
    """The positions that each rank holds; equal to others that are the same.

    A rank's are made when they are asked for: with many documents all of them take longer than
    what one rank plans with them.

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

    @classmethod
    def recorded(cls, spans: Sequence[Sequence[Span]]) -> "TokenMap":
        """Positions that are known already."""
        return cls(_Recorded(tuple(map(Ranges.of, spans))), len(spans), 0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenMap):
            return NotImplemented
        mine, others = ((x.layout, x.size, x.seq_len) for x in (self, other))
        # Layouts that differ do so in the first ranks: positions of the others are not made.
        return mine == others or (len(self) == len(other) and all(map(eq, self, other)))

    def __hash__(self) -> int:
        return hash(self.lengths)

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Ranges: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Ranges, ...]: ...
    def __getitem__(self, index: int | slice) -> Ranges | tuple[Ranges, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        rank, made = range(self.size)[index], self._made
        if rank not in made:
            made[rank] = Ranges.of(self.layout.spans(rank, self.size, self.seq_len))
        return made[rank]

    @cached_property
    def _made(self) -> dict[int, Ranges]:
        """Those that were asked for, by rank."""
        return {}

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many positions each rank holds."""
        ranks = range(self.size)
        return tuple(self.layout.length(rank, self.size, self.seq_len) for rank in ranks)

    @cached_property
    def gaps(self) -> bool:
        """Whether a rank holds positions with a step."""
        if self.layout.follows_documents:
            return False
        return not all(spans.plain for spans in self)

    def alike(self, query: int, mask: Mask) -> Sequence[tuple[int, int]] | None:
        """See `Layout.alike`; None too if the mask knows distances."""
        distances = mask.window is not None or mask.slices is not None
        return None if distances else self.layout.alike(query, self.size)


@dataclass(frozen=True)
class _Recorded(Layout):
    """What ranks were found to hold."""

    of_ranks: tuple[Ranges, ...]
    name = "recorded"

    def spans(self, rank: int, size: int, seq_len: int) -> Ranges:
        return self.of_ranks[rank]

    def multiple(self, size: int) -> int:
        return 1
