"""Which rank holds which tokens, and computes which scores.

A row of the matrix of scores is a query token, a column a key token. Made from an algorithm's plan,
as the schedule of `drawing` is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.plans.plan import Plan
from megatron_cp_plugin.core.ranges import Span
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.drawing import check_size, plan_to_draw, titles

MOST_TOKENS, MOST_RANKS = 512, 32
_TOKENS = 64  # of a picture whose number of tokens was not asked for, about


class StepPart(NamedTuple):
    """Computations of some ranks in one step; each rank computes its share of the heads."""

    step: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class TokenPicture:
    """Who computes which scores, and when.

    Attributes:
        title, subtitle: algorithm and options; ranks, mask, tokens, pass.
        size: number of ranks.
        steps: number of steps of a head group.
        owner: int [N], the rank that holds a token.
        part: int [N,N], the number of the part that computes a score; -1: hidden by the mask.
        parts: all parts.
    """

    title: str
    subtitle: str
    size: int
    steps: int
    owner: NDArray[np.int64]
    part: NDArray[np.int64]
    parts: tuple[StepPart, ...]

    @property
    def tokens(self) -> int:
        """N, the number of tokens."""
        return len(self.owner)

    @property
    def scores(self) -> tuple[float, ...]:
        """Of each rank, how many scores it computes, for all heads together."""
        count = np.zeros(self.size)
        for number, (_, ranks) in enumerate(self.parts):
            count[list(ranks)] += np.count_nonzero(self.part == number) / len(ranks)
        return tuple(count.tolist())

    @property
    def balance(self) -> str:
        """The work of the busiest rank beside the mean."""
        mean = sum(self.scores) / self.size
        return f"busiest rank: {max(self.scores) / mean:.2f} of the mean" if mean else "no scores"


def token_picture(
    algo: str,
    size: int,
    *,
    seq_len: int | None = None,
    mask: Mask | None = None,
    options: Mapping[str, object] | None = None,
    phase: Phase = "forward",
) -> TokenPicture:
    """Plans one pass of a softmax algorithm, and says which rank computes which score.

    Args:
        algo: A name of `available("softmax")`.
        size: Number of context-parallel ranks, at most 32.
        seq_len: Global tokens, at most 512; default: about 64.
        mask: Default: causal.
        options: Of the algorithm; values may be text.
        phase: Which pass.

    Raises:
        ConfigError: The algorithm computes no scores; too many tokens or ranks; or as `picture`.
    """
    mask, options = mask or Mask(), options or {}
    if registry.kind_of(algo) == "linear":
        raise ConfigError(f"{algo} computes no matrix of scores: leave --tokens out")
    check_size(size)
    if size > MOST_RANKS:
        raise ConfigError(
            f"--tokens draws at most {MOST_RANKS} ranks, got {size}: leave --tokens out"
        )
    seq_len = seq_len or _some_tokens(algo, size, options)
    if seq_len > MOST_TOKENS:
        raise ConfigError(
            f"--tokens draws each token, at most {MOST_TOKENS}, got {seq_len}: "
            "make --seq-len smaller"
        )
    plan = plan_to_draw(algo, size, seq_len, mask, options, phase)
    owner = np.zeros(seq_len, np.int64)
    for rank in range(size):
        owner[plan.spans[rank].elements] = rank
    part, parts = _step_parts(plan, seq_len)
    title, subtitle = titles(algo, size, seq_len, mask, options, phase)
    if len(plan.groups) > 1:
        subtitle += f" · 1 of {len(plan.groups)} head groups"
    steps = plan.steps // len(plan.groups)
    return TokenPicture(title, subtitle, size, steps, owner, part, parts)


def _some_tokens(algo: str, size: int, options: Mapping[str, object]) -> int:
    """About 64 tokens that the ranks can split."""
    multiple = registry.layout_of(algo, options).multiple(size)
    return -(-_TOKENS // multiple) * multiple


def held(
    algo: str, size: int, seq_len: int | None, mask: Mask, options: Mapping[str, object]
) -> Iterator[str]:
    """A line for each rank: the tokens that it holds, in its order, any number of them.

    Args: seq_len: None: about 64.

    Raises: ConfigError as `picture`.
    """
    seq_len = seq_len or _some_tokens(algo, size, options)
    if registry.kind_of(algo) == "linear":
        layout = registry.layout_of(algo, options)
        every = [layout.spans(rank, size, seq_len) for rank in range(size)]
    else:
        every = list(plan_to_draw(algo, size, seq_len, mask, options, "forward").spans)
    for rank, spans in enumerate(every):
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
