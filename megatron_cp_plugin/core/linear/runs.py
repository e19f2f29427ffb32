"""A rank's runs of consecutive tokens, and the documents in them."""

from dataclasses import dataclass
from functools import cached_property

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
