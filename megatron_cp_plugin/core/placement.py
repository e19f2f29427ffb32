"""Placements: which rank computes each pair of blocks in which step. They define an algorithm.

A placement says which rank computes which queries against which keys, in which step, and which rank
sends it what it does not own. `core.plans.compile` derives from it what is sent, and when.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import ClassVar, NamedTuple

import numpy as np

from megatron_cp_plugin.core.blocks.visible_rows import sees
from megatron_cp_plugin.core.call import HeadGroup
from megatron_cp_plugin.core.layout import Layout, TokenMap
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError


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
            spans on layouts without gaps: there blocks travel as if `masked` were true.
        assembled: collective operations gather the blocks. Each rank joins the queries of all pairs
            that `pairs_of` names into one block, and their keys into another, and computes the two
            in step 0. Blocks are padded to equal lengths, and all ranks that get a block get the
            same rows of it. Tensors of one kind travel as one; lse and delta travel once for all
            heads.
        cyclic: `place(query + n, key + n)` is `place(query, key)` with each rank plus n, modulo
            `size`, and so pairs with equal query - key meet on different ranks in the same step.
            Then one rank's part of a plan is found without placing all pairs.
    """

    layout: Layout
    size: int
    groups: tuple[HeadGroup, ...]
    wide_gradients: bool = False
    relay: ClassVar[bool] = False
    masked: ClassVar[bool] = True
    assembled: ClassVar[bool] = False
    cyclic: ClassVar[bool] = False

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


Placement = BlockPlacement | HeadPlacement


@lru_cache(maxsize=64)  # a planner asks for many ranks
def check_placement(name: str, placement: BlockPlacement, seq_len: int, mask: Mask) -> None:
    """Raises: ConfigError unless every token belongs to one rank, and every pair has one place, on
    a rank of the group.
    """
    owned = TokenMap.of(placement.layout.for_documents(mask.resolved), placement.size, seq_len)
    _check_owned(owned)
    ranks, whole = range(placement.size), Place(0, 0)[2:]
    # Only these pairs of a cyclic placement are asked for.
    for query, key in product(ranks, ranks[:1] if placement.cyclic else ranks):
        places = list(placement.place(query, key))
        if len(places) == 1 and isinstance(places[0], Place):
            rank, step, *part = places[0]
            if (*part,) == whole and rank in ranks and step >= 0:
                continue  # most pairs have one place with all rows
        met = f"queries of rank {query} meet keys of rank {key}"
        if not all(isinstance(place, Place) for place in places):
            raise ConfigError(f"{name} says that {met} at {places}: let `place` yield a Place")
        for place in places:
            if not (0 <= place.rank < placement.size and place.step >= 0):
                raise ConfigError(
                    f"in {name} {met} on rank {place.rank} in step {place.step}: use ranks 0 to "
                    f"{placement.size - 1} and steps from 0"
                )
        if not places:
            apart = ranks if placement.cyclic else ranks[:1]
            pairs = [
                (owned[(query + n) % len(ranks)], owned[(key + n) % len(ranks)]) for n in apart
            ]
            if any(sees(*pair, mask) for pair in pairs):
                raise ConfigError(f"{name} does not say where {met}: let `place` yield a place")
        edges = sorted((Fraction(i, n), Fraction(i + parts, n)) for *_, (i, n), parts in places)
        starts, stops = zip(*edges, strict=True) if edges else ((0,), (1,))
        if (*starts, 1) != (0, *stops):
            at = ", ".join(f"{_part_in_words(place)} on rank {place.rank}" for place in places)
            raise ConfigError(f"in {name} {met} as {at}: let `place` yield each row once")


def _part_in_words(place: Place) -> str:
    """Which part of the query rows a pair has, in words."""
    first, count = place.part
    if place.parts == 1:
        return f"part {first} of {count}"
    return f"parts {first} to {first + place.parts - 1} of {count}"


def _check_owned(owned: TokenMap) -> None:
    """Raises: ConfigError unless each token is one rank's, and spans of a rank ascend."""
    layout, tokens = f"layout {owned.layout.name}", owned.seq_len
    owners = np.zeros(tokens, np.int64)
    for rank, spans in enumerate(owned):
        end = held = 0
        for span in filter(len, spans):
            if span.start < end or span.positions[-1] >= tokens:
                raise ConfigError(
                    f"{layout} gives rank {rank} positions {span.start} to {span.positions[-1]} "
                    f"after {end} of {tokens} tokens: let spans of a rank ascend, and end there"
                )
            end, held = span.stop, held + len(span)
            owners[span.start : span.stop : span.step] += 1
        if held != owned.lengths[rank]:
            raise ConfigError(
                f"{layout} gives rank {rank} {held} tokens by `spans` and {owned.lengths[rank]} by "
                "`length`: let them agree"
            )
    for token in np.flatnonzero(owners != 1)[:1]:
        raise ConfigError(
            f"{layout} gives token {token} of {tokens} to {owners[token]} of {len(owned)} ranks: "
            "let `spans` give each token to one"
        )
