"""The order in which states pass through runs of consecutive tokens on several ranks."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.linear.runs import Interval, Runs


@dataclass(frozen=True, eq=False)
class Chains:
    """The runs of a route, by rank, as chains along each of which one state passes.

    The longest chains come first, so that those with a k-th run are the first ones. A run in which
    a document begins ends a chain, and begins the next one.

    Attributes:
        rounds: numbers of the first runs of all chains, of the second ones, and so on.
        arriving: of each run in which round a state arrives at it, and its place there; None: none.
        first: the chain in which the route begins.
        last, last_round: the chain in which it ends, and in which round.
        lengths: of all runs, in tokens.
    """

    rounds: tuple[tuple[int, ...], ...]
    arriving: tuple[tuple[int, int] | None, ...]
    first: int
    last: int
    last_round: int
    lengths: tuple[int, ...]

    @staticmethod
    def of(route: "Route") -> "Chains":
        """The chains of a route."""
        runs = [run for of_rank in route.runs for run in of_rank]
        chains: list[list[int]] = [[]]
        arriving: dict[int, tuple[int, int]] = {}  # of a run its chain, and its number there
        for number in sorted(range(len(runs)), key=lambda number: runs[number]):
            start, stop = runs[number]
            if not route.lasts(start, start) and chains[-1]:
                chains.append([])
            elif route.lasts(start, start):
                arriving[number] = len(chains) - 1, len(chains[-1])
            chains[-1].append(number)
            if not route.lasts(start + 1, stop - 1):
                chains.append([number])
        order = sorted(range(len(chains)), key=lambda chain: -len(chains[chain]))
        where = {chain: place for place, chain in enumerate(order)}
        rounds = tuple(
            tuple(chains[chain][number] for chain in order if len(chains[chain]) > number)
            for number in range(len(chains[order[0]]))
        )
        found = (arriving.get(run) for run in range(len(runs)))
        return Chains(
            rounds,
            tuple(None if one is None else (one[1], where[one[0]]) for one in found),
            where[0],
            where[len(chains) - 1],
            len(chains[-1]) - 1,
            tuple(stop - start for start, stop in runs),
        )


@dataclass(frozen=True, eq=False)
class Route:
    """Which part of the way each run covers, for states that travel over the whole sequence.

    Equal only to itself: what is made of one is kept by it.

    Attributes: runs: for each rank (start, stop) of its runs in their local order, counted from
    where the way begins. length: of the way, the global N. documents: where others than the first
    begin; no state goes on there.
    """

    runs: tuple[tuple[Interval, ...], ...]
    length: int
    documents: tuple[int, ...] = ()

    @staticmethod
    @lru_cache(maxsize=64)  # every pass has the same
    def of(layout: Layout, size: int, seq_len: int, documents: tuple[int, ...] = ()) -> "Route":
        """The way from the first token to the last."""
        return Route(
            tuple(
                tuple((span.start, span.stop) for span in layout.spans(rank, size, seq_len))
                for rank in range(size)
            ),
            seq_len,
            documents,
        )

    @cached_property
    def back(self) -> "Route":
        """The same runs on the way in the other direction."""
        return Route(
            tuple(
                tuple((self.length - stop, self.length - start) for start, stop in runs)
                for runs in self.runs
            ),
            self.length,
            tuple(self.length - start for start in reversed(self.documents)),
        )

    def lasts(self, start: int, stop: int) -> bool:
        """Whether no document begins from one place on the way to another, both included."""
        after = bisect_left(self.documents, start)
        return after == len(self.documents) or self.documents[after] > stop

    def local(self, rank: int) -> Runs:
        """The runs of a rank, by its local tokens."""
        return _local(self, rank)

    def owners_before(self, place: int) -> tuple[int, ...]:
        """Ranks with tokens before a place between runs."""
        return tuple(
            rank
            for rank, runs in enumerate(self.runs)
            if any(start < stop <= place for start, stop in runs)
        )

    @cached_property
    def last_rank(self) -> int:
        """The rank that holds the last run; of those without tokens the last one."""
        return max(range(len(self.runs)), key=lambda rank: (max(self.runs[rank]), rank))

    @cached_property
    def first_rank(self) -> int:
        """The rank that holds the first run; of those without tokens the first one."""
        return min(range(len(self.runs)), key=lambda rank: (min(self.runs[rank]), rank))

    @cached_property
    def chains(self) -> Chains:
        """The runs as chains."""
        return Chains.of(self)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many runs each rank has."""
        return tuple(map(len, self.runs))

    @cached_property
    def flipped(self) -> "Route":
        """The way from the last token to the first, each rank's tokens in reverse order."""
        back = self.back
        return replace(back, runs=tuple(runs[::-1] for runs in back.runs))


@lru_cache(maxsize=256)
def _local(route: Route, rank: int) -> Runs:
    found, before = [], 0
    for start, stop in route.runs[rank]:
        first, end = bisect_right(route.documents, start), bisect_left(route.documents, stop)
        edges = [before + at - start for at in (start, *route.documents[first:end], stop)]
        found.append(tuple(pairwise(edges)))
        before = edges[-1]
    return Runs(tuple(found))
