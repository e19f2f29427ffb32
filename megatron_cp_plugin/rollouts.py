"""Rollouts that share prefixes, packed so that each prefix is computed once.

A policy is trained on lists of tokens that begin alike: answers to one prompt, turns of one
conversation. Every token but the first of a rollout is the label of a loss term, which the tokens
before it predict. Two rollouts have a term in common if they agree up to its label. A pack has one
token for each different term: the token before the label. So each token of a pack has one label,
as models and losses take them, and where rollouts part, the last token that they share is there
once for each way to go on. The last token of a rollout predicts nothing and is a label only, so
that a pack is no longer than a tree of all tokens would be.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp_plugin.core.masks.slices import Slice
from megatron_cp_plugin.errors import ContextParallelError, brief, whole_number

type Tokens = Sequence[int] | Tensor | NDArray[np.integer]
type Weights = Sequence[float] | Tensor | NDArray[np.floating] | NDArray[np.bool_]
type Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Pack:
    """Some rollouts in one sequence of N tokens, for a model that sees by `spans`.

    Attributes:
        tokens: int64 [N].
        labels: int64 [N]: the token that each one predicts.
        positions: int64 [N]: of each token in its rollouts, for rotary embeddings.
        weights: float64 [N]: of each token's loss, summed over the rollouts that share the term.
        spans: a token sees the earlier tokens of its rollouts, and itself. Padding is in none, and
            has token, label, position and weight 0.
        rollouts: numbers of the rollouts, ascending.
        places: int64 [L - 1] for each of these rollouts, of L tokens: where in the pack the tokens
            are that predict its second token to its last.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    weights: Tensor
    spans: list[Slice]
    rollouts: tuple[int, ...]
    places: tuple[Tensor, ...]

    def per_rollout(self, x: Tensor) -> list[Tensor]:
        """Numbers of the pack's tokens, such as log-probs of labels, for each rollout.

        Differentiable: tokens that rollouts share get the sum of their gradients.

        Args: x: N numbers, [N] or [1,N].

        Returns: [L - 1] for each of `rollouts`.

        Raises: ContextParallelError for another number of tokens, such as a rank's part.
        """
        if x.numel() != len(self.tokens):
            raise ContextParallelError(
                f"per_rollout needs numbers of the pack's {len(self.tokens)} tokens, got "
                f"{list(x.shape)}: unshard them first"
            )
        flat = x.reshape(-1)
        return [flat[places.to(x.device)] for places in self.places]

    def batch(self) -> dict[str, Any]:
        """The pack as a micro-batch [1,N] of `get_batch_on_this_cp_rank`; loss_mask has weights."""
        return {
            "tokens": self.tokens[None],
            "labels": self.labels[None],
            "loss_mask": self.weights[None].float(),
            "position_ids": self.positions[None],
            "attention_mask": None,
            "attention_spans": self.spans,
            "attention_positions": self.positions[None],
        }


def pack_rollouts(
    rollouts: Sequence[Tokens],
    weights: Sequence[Weights] | None = None,
    *,
    budget: int | None = None,
    multiple: int = 1,
    ranks: int = 1,
    token_work: int = 24_576,
) -> list[Pack]:
    """Packs rollouts so that equal prefixes are computed once, with the same loss and gradients.

    `pack_rollouts([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 4]])` is one pack, which shows:

        token     5 6 6 7 7
        label     6 4 7 8 9
        position  0 1 1 2 2
        sees      x . . . .
                  x x . . .
                  x . x . .
                  x . x x .
                  x . x . x    6 is there twice: it predicts 4 and 7. So is 7.

    The sum of `weights` times the losses -log p(label) over all packs is that sum over all rollouts
    one by one, and so are its gradients. A loss that is not linear in the log-probs, such as a
    clipped one, takes the log-probs that `Pack.per_rollout` gives back.

    Args:
        rollouts: tokens of each, prompt included; prompts may differ.
        weights: for each token of each rollout, of the loss that it has as a label: 0 for prompts
            and for text of tools, advantage / length for a mean that counts by its reward. The
            first token is nobody's label, so its weight counts nowhere. None: 1 everywhere.
        budget: tokens that a pack has at most, with padding. A prefix is computed once in each pack
            that needs it. None: one pack.
        multiple: of the lengths of packs, which are padded to it: P for layouts that need equal
            parts, 2P for batches that are split by zigzag (`layout="thd"`).
        ranks: data-parallel ranks. Their number divides the number of packs, and `packs[r::ranks]`,
            which are rank r's, are about the same work for all, and the largest first: the n-th of
            all ranks are alike, too. Where rollouts are too few, some packs have none, and a
            short one's tokens with weights 0.
        token_work: cost of a token beside attention, in pairs of a query and a key: six times
            the hidden size. Only with `ranks`.

    Returns: packs; every rollout is in one of them.

    Raises: ContextParallelError for a rollout that is no list of 2 or more tokens, weights that do
        not fit, and a budget that is too small for one of the rollouts.

    Source: best fit, the largest subtrees first, each into the pack with which it shares most. For
    ranks the longest packs first, each to the rank with the least work.
    """
    multiple, ranks = whole_number("multiple", multiple), whole_number("ranks", ranks)
    if multiple < 1:
        raise ContextParallelError(f"multiple needs 1 or more tokens, got {multiple}")
    if ranks < 1:
        raise ContextParallelError(f"ranks needs 1 or more data-parallel ranks, got {ranks}")
    if not hasattr(rollouts, "__iter__"):
        raise ContextParallelError(f"rollouts need to be lists of tokens, got {brief(rollouts)}")
    tokens = [_tokens(number, rollout) for number, rollout in enumerate(rollouts)]
    weighed = _weights(weights, tokens)
    room = _room(tokens, budget, multiple)
    # Big-endian, so that bytes are in the order of tokens: equal beginnings are side by side.
    order = sorted(range(len(tokens)), key=lambda number: tokens[number].astype(">i8").tobytes())
    ordered = [tokens[number] for number in order]
    terms = np.array([len(each) - 1 for each in ordered], np.int64)
    shared = np.array([0, *map(_common_terms, ordered[:-1], ordered[1:])], np.int64)
    tree = _Tree(terms, shared[: len(terms)], token_work)
    bins = tree.bins(room)
    if bins and ranks > 1:
        bins = tree.dealt(bins, room, ranks)
    shortest = [min(order, key=lambda number: len(tokens[number]))] if bins else []
    packs = [
        _pack([order[at] for at in members] or shortest, tokens, weighed, multiple)
        for members in bins
    ]
    for at in (at for at, members in enumerate(bins) if not members):  # adds nothing to a loss
        zeros = torch.zeros_like(packs[at].weights)
        packs[at] = replace(packs[at], weights=zeros, rollouts=(), places=())
    return packs


def _tokens(number: int, rollout: Tokens) -> Numbers:
    try:
        found = torch.as_tensor(rollout)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = torch.empty(0, 0)
    if found.dim() != 1 or found.is_floating_point() or found.dtype == torch.bool:
        raise ContextParallelError(
            f"a rollout is a list of tokens, got {brief(rollout)} as number {number}: pass whole "
            "numbers, without padding"
        )
    if len(found) < 2:
        raise ContextParallelError(
            f"a rollout needs 2 tokens or more, for the first predicts the second, got "
            f"{len(found)} in number {number}: leave it out"
        )
    array: Numbers = found.to("cpu", torch.int64).numpy()
    if array.min() < 0:
        raise ContextParallelError(
            f"tokens need to be 0 or more, got {array.min()} in rollout {number}: leave padding out"
        )
    return array


def _weights(
    weights: Sequence[Weights] | None, tokens: Sequence[Numbers]
) -> list[NDArray[np.float64]]:
    """Of each token of each rollout."""
    if weights is None:
        return [np.ones(len(each)) for each in tokens]
    try:
        found = [torch.as_tensor(x, dtype=torch.float64).detach().cpu().numpy() for x in weights]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ContextParallelError(
            f"weights need a list of numbers for each rollout, got {brief(weights)}"
        ) from None
    wrong = [at for at, (a, b) in enumerate(zip(found, tokens, strict=False)) if a.shape != b.shape]
    if wrong or len(found) != len(tokens):
        got = f"{list(found[wrong[0]].shape)} for number {wrong[0]}" if wrong else f"{len(found)}"
        raise ContextParallelError(
            f"weights need a number for each token of the {len(tokens)} rollouts, got {got}: "
            "tokens of a prompt have weights too, of 0"
        )
    for number, each in enumerate(found):
        if not np.isfinite(each).all():
            raise ContextParallelError(f"weights need to be finite, got others for number {number}")
    return found


def _room(tokens: Sequence[Numbers], budget: int | None, multiple: int) -> int | None:
    """Tokens of a pack without padding."""
    if budget is None:
        return None
    budget = whole_number("budget", budget)
    room = budget // multiple * multiple
    longest = max(map(len, tokens), default=1) - 1
    if room < longest:
        raise ContextParallelError(
            f"a budget of {budget} tokens in multiples of {multiple} needs room for each rollout, "
            f"got one that takes {longest}: raise it to {-(-longest // multiple) * multiple} or "
            "cut the rollout"
        )
    return room


def _common_terms(one: Numbers, other: Numbers) -> int:
    """Loss terms that two rollouts have in common, from the first one on."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return max(0, (int(differs[0]) if len(differs) else length) - 1)


@dataclass(frozen=True)
class _Tree:
    """Rollouts in the order of their tokens.

    Attributes:
        terms: loss terms of each.
        shared: how many of them the one before has too.
        token_work: as in `pack_rollouts`.
    """

    terms: Numbers
    shared: Numbers
    token_work: int

    def bins(self, room: int | None) -> list[list[int]]:
        """Which rollouts share a pack. Args: room: terms of a pack at most; None: any number."""
        terms, shared = self.terms, self.shared
        if room is None or not len(terms):
            return [list(range(len(terms)))] if len(terms) else []
        # Terms of rollouts up to one, each shared one counted once.
        total = np.concatenate(([0], np.cumsum(terms - shared)))

        def size(start: int, stop: int) -> int:
            return int(total[stop] - total[start] + shared[start])

        units = sorted(_units(shared, room, size), key=lambda unit: -size(*unit))
        pack_of = np.full(len(terms), -1)
        sizes: list[int] = []
        for start, stop in units:
            # Tokens that each rollout which was placed shares with this unit.
            before = np.minimum.accumulate(shared[start:0:-1])[::-1]
            after = np.minimum.accumulate(shared[stop:])
            common = np.concatenate((before, np.zeros(stop - start, np.int64), after))
            most = np.zeros(len(sizes), np.int64)
            placed = pack_of >= 0
            np.maximum.at(most, pack_of[placed], common[placed])
            needed = size(start, stop)
            fitting = [at for at, filled in enumerate(sizes) if filled + needed - most[at] <= room]
            if fitting:
                chosen = max(fitting, key=lambda at: (most[at], sizes[at]))
                sizes[chosen] += needed - int(most[chosen])
            else:
                chosen = len(sizes)
                sizes.append(needed)
            pack_of[start:stop] = chosen
        return [np.flatnonzero(pack_of == at).tolist() for at in range(len(sizes))]

    def dealt(self, bins: list[list[int]], room: int | None, ranks: int) -> list[list[int]]:
        """As many for each rank, about equal work; rank r's are every `ranks`-th from r on.

        Returns: bins; [] where there are too few rollouts.
        """
        wanted = -(-len(bins) // ranks) * ranks
        # The smallest size for this number of packs, which are then about equal.
        least = int(self.terms.max())
        most = int((self.terms - self.shared).sum()) if room is None else room
        while most - least > max(1, most // 64):
            middle = (least + most) // 2
            fewer = self.bins(middle)
            if len(fewer) <= wanted:
                most, bins = middle, fewer
            else:
                least = middle
        works = [(float(self._works(members).sum()), members) for members in bins]
        while len(works) % ranks:
            several = [at for at, (_, members) in enumerate(works) if len(members) > 1]
            if not several:
                works += [(0.0, [])] * (-len(works) % ranks)
                break
            at = max(several, key=lambda at: works[at][0])
            works[at : at + 1] = [
                (float(self._works(half).sum()), half) for half in self._halves(works[at][1])
            ]
        works.sort(key=lambda pack: -pack[0])
        loads = [(0.0, at) for at in range(ranks)]
        of_ranks = [list[list[int]]() for _ in range(ranks)]
        for work, members in works:
            load, chosen = heappop(loads)
            of_ranks[chosen].append(members)
            if len(of_ranks[chosen]) < len(works) // ranks:
                heappush(loads, (load + work, chosen))
        return [members for step in zip(*of_ranks, strict=True) for members in step]

    def _works(self, members: Sequence[int]) -> NDArray[np.float64]:
        """The work that each rollout adds to its pack."""
        common = [0] + [int(self.shared[a + 1 : b + 1].min()) for a, b in pairwise(members)]
        known, all_of = np.array(common, float), self.terms[list(members)].astype(float)
        return self._prefix(all_of) - self._prefix(known)

    def _prefix(self, length: NDArray[np.float64]) -> NDArray[np.float64]:
        """The work of the first `length` terms of a rollout."""
        return self.token_work * length + length * (length + 1) / 2

    def _halves(self, members: list[int]) -> tuple[list[int], list[int]]:
        """Two packs of one, whose larger one is as small as it can be."""
        cuts = range(1, len(members))
        before = self._works(members).cumsum()
        again = [self._works(members[cut:])[0] - before[cut] + before[cut - 1] for cut in cuts]
        rest = before[-1] - before[:-1] + np.array(again)
        cut = 1 + int(np.maximum(before[:-1], rest).argmin())
        return members[:cut], members[cut:]


def _units(
    shared: Numbers, room: int, size: Callable[[int, int], int]
) -> Iterator[tuple[int, int]]:
    """The largest subtrees that fit into a pack, as ranges of rollouts."""
    waiting = [(0, len(shared))]
    while waiting:
        start, stop = waiting.pop()
        if size(start, stop) <= room:
            yield start, stop
            continue
        inside = shared[start + 1 : stop]
        cuts = start + 1 + np.flatnonzero(inside == inside.min())
        waiting += pairwise((start, *cuts.tolist(), stop))


def _pack(
    members: Sequence[int],
    tokens: Sequence[Numbers],
    weights: Sequence[NDArray[np.float64]],
    multiple: int,
) -> Pack:
    """Args: members: rollouts in the order of their tokens."""
    places: dict[int, Numbers] = {}
    runs: list[tuple[int, int]] = []
    length, previous = 0, np.empty(0, np.int64)
    for before, number in zip((None, *members[:-1]), members, strict=True):
        shared = 0 if before is None else _common_terms(tokens[before], tokens[number])
        new = len(tokens[number]) - 1 - shared
        previous = np.concatenate((previous[:shared], np.arange(length, length + new)))
        places[number] = previous
        if new:
            runs.append((shared, new))
            length += new
    padded = -(-length // multiple) * multiple
    found = {name: np.zeros(padded, np.int64) for name in ("tokens", "labels", "positions")}
    sums = np.zeros(padded)
    numbers = tuple(sorted(members))
    for number in numbers:
        at, own = places[number], tokens[number]
        found["tokens"][at], found["labels"][at] = own[:-1], own[1:]
        found["positions"][at] = np.arange(len(at))
        sums[at] += weights[number][1:]
    return Pack(
        **{name: torch.from_numpy(array) for name, array in found.items()},
        weights=torch.from_numpy(sums),
        spans=list(_tree_spans(runs)),
        rollouts=numbers,
        places=tuple(torch.from_numpy(places[number]) for number in numbers),
    )


class _Node(NamedTuple):
    """Tokens [start, stop) of a pack, one after another in the same rollouts, from a depth on."""

    depth: int
    start: int
    stop: int


def _tree_spans(runs: Iterable[tuple[int, int]]) -> Iterator[Slice]:
    """Spans of the tokens that each token sees, of a tree in the order of its rollouts.

    Args: runs: of each rollout, the number of tokens that it shares with the rollout before, and
        of new tokens, 1 or more, which follow all earlier ones.
    """
    path: list[_Node] = []  # of the last rollout, from the root
    here = 0
    for shared, new in runs:
        while path and path[-1].depth >= shared:
            yield from _seen(path.pop(), here)
        first = here
        if path:
            depth, start, stop = path[-1]
            parts = start + shared - depth
            if parts < stop:
                yield from _seen(_Node(shared, parts, stop), here)
            path[-1] = _Node(depth, start, parts)
            if parts == here:  # the rollout before goes on
                shared, first = path.pop()[:2]
        here += new
        path.append(_Node(shared, first, here))
    while path:
        yield from _seen(path.pop(), here)


def _seen(node: _Node, end: int) -> Iterator[Slice]:
    """Args: end: of all tokens below the node, which follow it."""
    _, start, stop = node
    yield Slice(start, stop, start, stop, "causal")
    if stop < end:
        yield Slice(stop, end, start, stop)
