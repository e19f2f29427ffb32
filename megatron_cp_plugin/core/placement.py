"""Placements: which rank computes each pair of blocks in which step. They define an algorithm.

A placement says which rank computes which queries against which keys, in which step, and which rank
sends it what it does not own. `core.plans.compile` derives from it what is sent, and when.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, NamedTuple

from megatron_cp_plugin.core.call import HeadGroup
from megatron_cp_plugin.core.layout import Layout


class Place(NamedTuple):
    """Where and when a block of queries meets a block of keys.

    Attributes:
        rank: the rank that computes the pair.
        step: counts from 0. A rank has blocks of other ranks from step 1, and gathered blocks
            (`assembled`) from step 0.
        part: (i, n): the pair has only the i-th of n equal parts of the query rows, i from 0.
        parts: how many of these parts the pair has, from the i-th on.
    """

    rank: int
    step: int
    part: tuple[int, int] = (0, 1)
    parts: int = 1

    @property
    def whole(self) -> bool:
        """Whether the pair has all query rows."""
        return self.parts == self.part[1]

    def rows(self, tokens: int) -> tuple[int, int]:
        """Rows [start, stop) of the queries that the pair has. Args: tokens: of their block."""
        first, count = self.part
        return tokens * first // count, tokens * (first + self.parts) // count


@dataclass(frozen=True)
class BlockPlacement(ABC):
    """Pairs of the ranks' blocks, each pair on one rank; subclasses say where and when.

    Attributes:
        layout: of the tokens.
        size: number of ranks.
        groups: groups of heads; the steps run once for each group, in this order.
        wide_gradients: sums of gradients travel in float32, not in the model's dtype.
        relay: a block goes from one rank that needs it to the next, and its sums follow the same
            way; otherwise it goes straight from its owner to each, and results straight back.
        masked: blocks travel only to ranks that need them under the mask. If false, whole blocks go
            to every rank where they have a place, except under masks with a window, documents or
            spans on layouts without gaps: there blocks that are not gathered travel as if `masked`
            were true.
        assembled: collective operations gather the blocks. Each rank joins the queries of all pairs
            that `pairs_of` names into one block, and their keys into another, and computes the two
            in step 0. Whole blocks travel, padded to equal lengths. Tensors of one kind travel as
            one; lse and delta travel once for all heads.
        cyclic: `place(query + n, key + n)` is `place(query, key)` with each rank plus n, modulo
            `size`, and so pairs with equal query - key meet on different ranks in the same step.
            Then one rank's part of a plan is found without placing all pairs.
        keeps_keys: if all steps that need keys of others are merged into one, and the rank that
            needs most needs such a number of rows, the backward takes the keys that came in the
            forward.
    """

    layout: Layout
    size: int
    groups: tuple[HeadGroup, ...]
    wide_gradients: bool = False
    relay: ClassVar[bool] = False
    masked: ClassVar[bool] = True
    assembled: ClassVar[bool] = False
    cyclic: ClassVar[bool] = False
    keeps_keys = range(0)

    @abstractmethod
    def place(self, query: int, key: int) -> Iterable[Place]:
        """Where and when the queries of one rank meet the keys of another, whatever the mask."""

    def pairs_of(self, rank: int) -> Iterable[tuple[int, int]]:
        """Pairs (owner of queries, owner of keys), among them all pairs that meet on a rank.

        Override it to name few pairs, so that one rank's part of a plan is found without placing
        all pairs of a thousand ranks. For a `cyclic` placement this class does so.
        """
        if not self.cyclic:
            return product(range(self.size), range(self.size))
        places = ((t, place.rank) for t in range(self.size) for place in self.place(t, 0))
        keys = ((t, (rank - where) % self.size) for t, where in places)
        return [((key + t) % self.size, key) for t, key in keys]

    def blocks_of(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Owners of the queries, and of the keys, of the pairs of a rank."""
        pairs = tuple(self.pairs_of(rank))
        return tuple({query: None for query, _ in pairs}), tuple({key: None for _, key in pairs})

    def node_segment(self, rank: int) -> int:
        """Which part of a relay a rank belongs to, as the ranks of one node.

        The first rank of a segment gets a block from the first rank of the segment before, within
        `latency` steps; the last rank of a segment sends its sum to the block's owner.
        """
        return 0

    @property
    def latency(self) -> int:
        """Steps that messages between node segments may take."""
        return 1

    @property
    def most_held(self) -> int:
        """How many blocks of others a rank holds at most, over peer memory."""
        return min(2, self.size - 1)

    def key_source(self, owner: int) -> int:
        """The rank from which others get a block of keys; a different one for each block.

        The block goes there from its owner before the first step.
        """
        return owner

    def retained_by(self, owner: int) -> int | None:
        """The rank that keeps a block of keys from its last step of the forward on; None: no rank.

        In the backward others get the block from there, not from its owner.
        """
        return None


@dataclass(frozen=True)
class HeadPlacement:
    """Teams of consecutive ranks split the heads; `of_teams` places the blocks of whole teams.

    All tokens of a team come together by all-to-alls inside it, for each rank's share of the
    heads, and results go back the same way, one group of heads after another.

    Attributes:
        layout: of the tokens on single ranks.
        members: number of ranks in a team.
        of_teams: the placement of the teams' blocks, for one rank's share of the heads.
        exchanges: (group of heads that one exchange moves, number of groups of `of_teams` in it),
            in the order of the exchanges.
        keep: q, k, v and lse stay exchanged for the backward.
    """

    layout: Layout
    members: int
    of_teams: BlockPlacement
    exchanges: tuple[tuple[HeadGroup, int], ...]
    keep: bool

    def team(self, rank: int) -> range:
        """The ranks of a rank's team."""
        first = rank // self.members * self.members
        return range(first, first + self.members)


Placement = BlockPlacement | HeadPlacement
