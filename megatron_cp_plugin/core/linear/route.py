"""Runs of consecutive tokens, and the order in which states pass through those of all ranks."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from megatron_cp_plugin.core.layout import Layout

Interval = tuple[int, int]


@dataclass(frozen=True)
class Runs:
    """Runs that follow each other in a rank's local tokens, each of one document or more.

    Attributes: documents: by run, the local tokens (start, stop) of every document in it; a run
        without tokens has one without tokens.
    """

    documents: tuple[tuple[Interval, ...], ...]

    @staticmethod
    def single(tokens: int) -> "Runs":
        """One run of one document."""
        return Runs((((0, tokens),),))

    def __len__(self) -> int:
        return len(self.documents)

    @cached_property
    def _hash(self) -> int:
        return hash(self.documents)

    def __hash__(self) -> int:
        # What is made of runs is looked up by them several times in a call.
        return self._hash

    @cached_property
    def firsts(self) -> tuple[Interval, ...]:
        """Of each run the first document: a state that comes from before the run goes on there."""
        return tuple(documents[0] for documents in self.documents)

    @cached_property
    def lasts(self) -> tuple[Interval, ...]:
        """Of each run the last document, whose state goes on behind the run."""
        return tuple(documents[-1] for documents in self.documents)


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
    def ways(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Of each run, by rank, and of the end: the runs that a state passes one after another to
        get there, none where a document begins; and 0, or -1 if it does not come from where the
        route begins.
        """
        runs = [run for of_rank in self.runs for run in of_rank]
        found: list[tuple[tuple[int, ...], int]] = [((), -1)] * len(runs)
        passed: tuple[int, ...] = ()
        begin = 0
        for number in sorted(range(len(runs)), key=lambda number: runs[number]):
            start, stop = runs[number]
            if self.lasts(start, start):
                found[number] = passed, begin
            if not self.lasts(start, stop - 1):
                passed, begin = (), -1
            passed += (number,)
        return *found, (passed, begin)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Of all runs, by rank, in tokens."""
        return tuple(stop - start for runs in self.runs for start, stop in runs)

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
