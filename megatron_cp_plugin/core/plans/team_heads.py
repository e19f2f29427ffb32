"""Plans of ranks whose teams split the heads, made from the plan of whole teams; and zero heads,
where the ranks of a team cannot split the heads evenly.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, permutations
from math import gcd, lcm
from typing import Self

from torch import Tensor
from torch.nn.functional import pad

from megatron_cp_plugin.core.blocks.assembly import narrowed, token_dim
from megatron_cp_plugin.core.call import HeadGroup
from megatron_cp_plugin.core.layout import TokenMap
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.core.placement import HeadPlacement
from megatron_cp_plugin.core.plans.plan import (
    OF_KEYS,
    RESULTS,
    Block,
    Compute,
    Kept,
    Move,
    Plan,
    TensorNames,
    Time,
)
from megatron_cp_plugin.core.ranges import between

Exchanged = tuple[tuple[TensorNames, ...], HeadGroup]  # messages, and the heads of their tensors


class TeamHeads:
    """Makes the plan of ranks from that of teams.

    Attributes: ranks, shares: ranks that the plan covers, and their shares of the heads.
    """

    def __init__(self, placement: HeadPlacement, of_teams: Plan, rank: int | None = None) -> None:
        """Args: of_teams: the plan of the teams, each as if it were one rank; for a plan of one
        rank, its team's part alone.
        """
        self.placement, self.of_teams = placement, of_teams
        self.members, self.rank = placement.members, rank
        size, seq_len = len(of_teams.spans) * self.members, sum(of_teams.spans.lengths)
        layout = placement.layout.for_documents(of_teams.mask.resolved)
        self.spans = TokenMap.of(layout, size, seq_len)
        self.ranks = range(size) if rank is None else (rank,)
        self.shares = range(self.members) if rank is None else (rank % self.members,)

    def plan(self) -> Plan:
        """The plan of the ranks."""
        exchanged = tuple(self.exchanged())
        times = {Time(move.result, move.side, move.posted, move.needed) for move in exchanged}
        return replace(
            self.of_teams,
            spans=self.spans,
            computes=tuple(self.computes()),
            moves=(*exchanged, *self.moved()),
            kept=tuple(self.kept()),
            shares=self.members,
            # All teams exchange at the same times.
            times=frozenset(
                time
                for time in (() if self.rank is None else (*times, *self.of_teams.times))
                if time.needed >= 0 and time.posted < self.of_teams.steps
            ),
        )

    def computes(self) -> Iterator[Compute]:
        for compute in self.of_teams.computes:
            queries, keys = self._block(compute.queries), self._block(compute.keys)
            for share in self.shares:
                rank = compute.rank * self.members + share
                yield compute._replace(rank=rank, queries=queries, keys=keys, share=share)

    def moved(self) -> Iterator[Move]:
        """Moves between teams, from each rank to the rank with the same share of the heads."""
        for move in self.of_teams.moves:
            block = self._block(move.block)
            for share in self.shares:
                source, target = (
                    rank * self.members + share for rank in (move.source, move.target)
                )
                yield move._replace(source=source, target=target, block=block, share=share)

    def exchanged(self) -> Iterator[Move]:
        """Moves of the all-to-alls; the next group of heads is exchanged while one is computed."""
        of_teams, exchanges = self.of_teams, self.placement.exchanges
        each = of_teams.steps // len(of_teams.groups)
        # Sums of the teams reach their owners some steps after the last computation.
        times = (
            one.needed - one.posted // each * each
            for one in (of_teams.moves if self.rank is None else of_teams.times)
            if one.result
        )
        late = max(times, default=each - 1) - (each - 1)
        starts = list(accumulate((count * each for _, count in exchanges), initial=0))
        for index, (group, _) in enumerate(exchanges):
            start, last = starts[index], starts[index + 1] - 1 + late
            before = starts[index - 1] if index else -1
            after = max(last + 1, starts[index + 2] - 1 if index + 2 < len(starts) else 0)
            for messages, heads in self.inputs(group, index):
                yield from self._all_to_all(before, start, messages, heads)
            for messages, heads in self.results(group):
                yield from self._all_to_all(last, after, messages, heads)

    def kept(self) -> Iterator[Kept]:
        if self.of_teams.phase == "backward" and self.placement.keep:
            for rank in self.ranks:
                team, share = divmod(rank, self.members)
                yield Kept(rank, ("q", "k", "v", "lse"), self._members((team,)), share)

    def _members(self, teams: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(team * self.members + share for team in teams for share in range(self.members))

    def _block(self, block: Block) -> Block:
        return block._replace(owners=self._members(block.owners))

    def inputs(self, group: HeadGroup, index: int) -> Iterator[Exchanged]:
        """Messages that are exchanged before the `index`-th group of heads is computed."""
        again = self.of_teams.phase == "forward" or not self.placement.keep
        if self.of_teams.phase == "backward":
            if not index:
                rows = (("delta",), ("lse",)) if again else (("delta",),)
                yield rows, self.of_teams.heads
            yield (("dout",),), group
        if again:
            yield (("q",),), group
            if group.first:
                yield (("k",), ("v",)), group

    def results(self, group: HeadGroup) -> Iterator[Exchanged]:
        """Messages that are exchanged after a group of heads is computed."""
        if self.of_teams.phase == "forward":
            yield (("out",), ("lse",)), group
            return
        yield (("dq",),), group
        if group.last:
            yield (("dk",), ("dv",)), group

    def _all_to_all(
        self, posted: int, needed: int, messages: tuple[TensorNames, ...], heads: HeadGroup
    ) -> Iterator[Move]:
        back = messages[0][0] in RESULTS
        lengths, width = self.spans.lengths, max(self.spans.lengths)
        for first in dict.fromkeys(rank // self.members * self.members for rank in self.ranks):
            for source, target in permutations(range(first, first + self.members), 2):
                if self.rank not in (None, source, target):
                    continue
                share = (source if back else target) % self.members
                owner = target if back else source
                block = Block((owner,), between(0, lengths[owner]))
                yield Move(posted, needed, source, target, messages, block, width, heads, share)


@dataclass(frozen=True)
class PaddedHeads:
    """H query heads, `shared` of them for each of G KV heads, and the numbers with zero heads
    added.

    Query heads are added to every KV head first, then KV heads with as many query heads each. A
    query head of zeros, whose dout is 0 too, has gradients of 0 and adds 0 to those of its KV head;
    so has a KV head of zeros. KV heads that several ranks need are sent to each: V in all.

    Attributes:
        kv_heads, shared: as given.
        all_kv_heads, all_shared: with the zero heads.
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
        """Chooses the fewest query heads that `ranks` can split; among these, the fewest KV heads
        that are sent, and then the fewest copies.
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

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Adds the zero heads to [B,S,heads,D] and rows [B,H,S], by name, and copies to keys."""
        found = dict[str, Tensor]()
        for name, x in tensors.items():
            own, every = (1, 1) if name in OF_KEYS else (self.shared, self.all_shared)
            found[name] = _fill_heads(x, (self.kv_heads, own), (self.all_kv_heads, every))
            if name in OF_KEYS and (copies := self.sent_kv_heads // self.all_kv_heads) > 1:
                found[name] = found[name].repeat_interleave(copies, 2)
        return found

    def own_queries(self, x: Tensor) -> Tensor:
        """[B,S,all,D], rows [B,all,S], without the zero heads; contiguous."""
        return _own(x, (self.kv_heads, self.shared), (self.all_kv_heads, self.all_shared))

    def own_keys(self, gradient: Tensor) -> Tensor:
        """[B,S,V,D], summed over copies in float32, without the zero heads: [B,S,G,D]."""
        if self.sent_kv_heads != self.all_kv_heads:
            parts = gradient.unflatten(2, (self.all_kv_heads, -1))
            wide = accumulation_dtype(gradient.dtype)
            gradient = parts.sum(3, dtype=wide).to(gradient.dtype)
        return _own(gradient, (self.kv_heads, 1), (self.all_kv_heads, 1))


def _fill_heads(x: Tensor, own: tuple[int, int], all_of: tuple[int, int]) -> Tensor:
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
