"""Which rank holds which tokens, and computes which scores, in a picture's plan.

A row of the matrix of scores is a query token, a column a key token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.plans.plan import Plan
from megatron_cp_plugin.core.ranges import Span
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.drawing import Picture

MOST_TOKENS, MOST_RANKS = 512, 32
_TOKENS = 64  # of a picture whose number of tokens was not asked for, about


class StepPart(NamedTuple):
    """Computations of some ranks in one step; each rank computes its share of the heads."""

    step: int
    ranks: tuple[int, ...]


class Scores(NamedTuple):
    """Who computes which scores, and when.

    Attributes:
        owner: int [N], the rank that holds a token.
        part: int [N,N], the number of the part that computes a score; -1: hidden by the mask.
        parts: all parts.
    """

    owner: NDArray[np.int64]
    part: NDArray[np.int64]
    parts: tuple[StepPart, ...]

    @property
    def tokens(self) -> int:
        """N, the number of tokens."""
        return len(self.owner)


def scores_of(drawn: Picture) -> Scores:
    """Says which rank computes which score.

    Raises: ConfigError: The algorithm computes no scores; more than 512 tokens or 32 ranks.
    """
    if drawn.plan is None:
        raise ConfigError(f"{drawn.title} computes no matrix of scores: leave --tokens out")
    tokens = sum(drawn.plan.spans.lengths)
    if drawn.size > MOST_RANKS:
        raise ConfigError(
            f"--tokens draws at most {MOST_RANKS} ranks, got {drawn.size}: leave --tokens out"
        )
    if tokens > MOST_TOKENS:
        raise ConfigError(
            f"--tokens draws each token, at most {MOST_TOKENS}, got {tokens}: "
            "make --seq-len smaller"
        )
    owner = np.zeros(tokens, np.int64)
    for rank, spans in enumerate(drawn.plan.spans):
        owner[spans.elements] = rank
    return Scores(owner, *_step_parts(drawn.plan, tokens))


def some_tokens(algo: str, size: int, options: Mapping[str, object]) -> int:
    """About 64 tokens that the ranks can split."""
    multiple = registry.layout_of(algo, options).multiple(size)
    return -(-_TOKENS // multiple) * multiple


def held(drawn: Picture) -> Iterator[str]:
    """A line for each rank: the tokens that it holds, in its order."""
    for rank, spans in enumerate(drawn.spans):
        yield f"rank {rank} holds tokens {', '.join(map(_run, spans))}"


def _run(span: Span) -> str:
    """Tokens 4 to 7 are "4-7", every second one of them "4-6:2"."""
    first, last = span.start, span.positions[-1]
    one = str(first) if first == last else f"{first}-{last}"
    return one + (f":{span.step}" if span.step > 1 and first != last else "")


def _step_parts(plan: Plan, seq_len: int) -> tuple[NDArray[np.int64], tuple[StepPart, ...]]:
    first = min((compute.heads.q.start for compute in plan.computes), default=0)
    ranks = np.zeros((seq_len, seq_len), np.int64)  # one bit each
    step = np.zeros((seq_len, seq_len), np.int64)
    for compute in plan.computes:
        if compute.heads.q.start != first:
            continue
        queries = plan.positions(compute.queries).elements
        keys = plan.positions(compute.keys).elements
        for tile in plan.tiles(compute):
            rows, columns = queries[tile.q], keys[tile.kv]
            seen = np.ones((len(rows), len(columns)), np.bool_)
            if tile.causal:
                seen = np.tril(seen, len(columns) - len(rows))
            if tile.reverse:
                seen = seen[::-1, ::-1]
            row, column = seen.nonzero()
            at = rows[row], columns[column]
            ranks[at] |= 1 << compute.rank
            step[at] = compute.step
    named = np.where(ranks > 0, step << MOST_RANKS | ranks, -1)
    numbers, part = np.unique(named, return_inverse=True)
    part = part.reshape(named.shape) - (numbers[0] < 0)
    parts = tuple(
        StepPart(
            number >> MOST_RANKS,
            tuple(rank for rank in range(plan.size) if number >> rank & 1),
        )
        for number in numbers.tolist()
        if number >= 0
    )
    return part, parts
