"""A placement: what an algorithm is, for given numbers of ranks and heads, in one pass.

It says which rank computes which queries against which keys, in which step, and from whom it gets
what it does not own. What travels, and when, follows: see `core.derive`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, product
from typing import ClassVar, Literal, NamedTuple, final

from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.pipeline import HeadGroup


class Place(NamedTuple):
    """Where and when a block of queries meets a block of keys.

    Attributes:
        step: from 0; with blocks of other ranks, which have to come, from 1 where they go from rank
            to rank. part: (i, n): only the i-th of n parts of the query rows.
    """

    rank: int
    step: int
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class BlockPlacement(ABC):
    """Pairs of the ranks' blocks, each pair on one rank; subclasses say where and when.

    Attributes:
        layout: of the tokens. size: number of ranks. groups: of heads, that are computed one after
            another in the same way. wide_partials, wide_gradients: partial outputs, and sums of
            gradients, travel in float32, not in the model's dtype.
        relay: a block goes from one rank that needs it to the next, its sums behind it; otherwise
            from its owner straight to each, and results straight back.
        masked: only what the mask needs travels; otherwise every block goes wherever it has a
            place, unless the mask has a window or documents and positions are without gaps.
        assembled: by collective operations. All that a rank computes, in step 0, is one block of
            queries and one of keys, of all pairs that `pairs_of` names; blocks are padded to equal
            lengths; tensors of one kind travel as one; lse and delta of all heads at once. Rows
            that travel are the same for all that get a block.
    """

    layout: Layout
    size: int
    groups: tuple[HeadGroup, ...]
    wide_partials: bool = False
    wide_gradients: bool = False
    relay: ClassVar[bool] = False
    masked: ClassVar[bool] = True
    assembled: ClassVar[bool] = False

    @abstractmethod
    def place(self, query: int, key: int) -> Iterable[Place]:
        """Where and when the queries of one rank meet the keys of another, whatever the mask."""

    def pairs_of(self, rank: int) -> Iterable[tuple[int, int]]:
        """Owners of queries and of keys among which are all that have a place on a rank.

        So that what one rank does can be looked at without placing all pairs of a thousand ranks.
        """
        return product(range(self.size), range(self.size))

    @final
    def met(self, rank: int) -> Iterable[tuple[int, int]]:
        """Pairs that tell a rank's part of a plan: of what it computes, and of its own blocks.

        All pairs where blocks come in several steps.
        """
        size = range(self.size)
        if not self.assembled:
            return product(size, size)
        held = [key for key in size if self.key_holder(key) == rank]
        pairs = chain(self.pairs_of(rank), product((rank,), size), product(size, held))
        return dict.fromkeys(pairs)

    @property
    def goes_round(self) -> Literal["queries", "keys"] | None:
        """Which blocks go round one ring of all ranks, one rank a step: keys up, to rank + 1, or
        queries down. Others stay where they are, and nothing is retained. None: it is otherwise.
        """
        return None

    def leg(self, rank: int) -> int:
        """Which part of a relay a rank belongs to.

        The first rank of a leg gets a block from the first one of the leg before, and has `lag`
        steps for it; the last rank of a leg sends its sum to the block's owner.
        """
        return 0

    @property
    def lag(self) -> int:
        """Steps that messages between legs may take."""
        return 1

    def key_holder(self, owner: int) -> int:
        """The rank that has a block of keys before any computation, another one for each block.

        Others get it from there; it comes to it before the first step, whatever the algorithm.
        """
        return owner

    def retained_by(self, owner: int) -> int | None:
        """The rank that keeps a block of keys from its last step of the forward on, if one does.

        In the backward the block goes to others from there, not from its owner.
        """
        return None


@dataclass(frozen=True)
class HeadPlacement:
    """Teams of consecutive ranks split the heads; `between` places the blocks of whole teams.

    All tokens of a team come together by all-to-alls inside it, for each rank's share of the
    heads, and results go back the same way, one group of heads after another.

    Attributes:
        layout: of the single ranks. members: ranks of a team. between: of the teams, for one share
            of the heads; its groups are those that it computes one after another.
        exchanges: groups of heads that are exchanged at a time, each with the number of groups of
            `between` in it. keep: q, k, v and lse stay exchanged for the backward.
    """

    layout: Layout
    members: int
    between: BlockPlacement
    exchanges: tuple[tuple[HeadGroup, int], ...]
    keep: bool


Placement = BlockPlacement | HeadPlacement
