"""Checks of placements that others have written, of their plans, and of the memory of messages."""

from fractions import Fraction
from functools import lru_cache
from itertools import product, zip_longest

import numpy as np

from megatron_cp_plugin.core.blocks.visible_rows import sees
from megatron_cp_plugin.core.layout import TokenMap
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.plans.plan import KEYS, QUERIES, Move, Plan, Side, during
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError


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


@lru_cache(maxsize=64)
def check_steps(name: str, plan: Plan) -> None:
    """Raises: ConfigError unless every block has arrived at a rank before the rank computes with
    it, or passes it on.

    Args: plan: a plan in which blocks go from rank to rank, without gathers.
    """
    each = plan.steps // len(plan.groups)
    for move in during(plan):
        if move.needed <= move.posted:
            raise ConfigError(
                f"{name} lets rank {move.source} pass a block of rank {move.block.owners[0]} on to "
                f"rank {move.target} in step {move.needed % each}, but has it there no earlier: "
                "use a later step"
            )
        if move.needed % each == 0 and not move.result:
            raise ConfigError(
                f"{name} places a block of rank {move.block.owners[0]} on rank {move.target} in "
                "step 0, in which a rank has only its own: use steps from 1"
            )


@lru_cache(maxsize=64)
def fits_slots(plan: Plan, slots: int) -> bool:
    """Whether inputs fit into `slots` receive buffers a rank, which its exchanges use in rotation.

    A block may be computed with, or sent on, until another one comes into its buffer. Inputs that
    take several steps come into other memory.
    """
    inputs = [
        move
        for move in plan.moves
        if not move.result and (plan.merged or move.needed == move.posted + 1)
    ]
    exchanges = sorted({(move.posted, move.needed) for move in inputs})
    numbers = {exchange: number for number, exchange in enumerate(exchanges)}
    # By rank and buffer, the exchanges in which the rank receives: their numbers, and what comes.
    received: dict[tuple[int, int], dict[int, list[Move]]] = {}
    for move in sorted(inputs, key=lambda move: (move.posted, move.needed)):
        number = numbers[move.posted, move.needed]
        of_buffer = received.setdefault((move.target, number % slots), {})
        of_buffer.setdefault(number, []).append(move)
    # The last step with a block, by rank, owner, side, and first query head.
    until: dict[tuple[int, int, Side, int], int] = {}
    for (rank, _), of_buffer in received.items():
        for number, after in zip_longest(of_buffer, [*of_buffer][1:]):
            last = plan.steps if after is None else exchanges[after][0] - 1
            for move in of_buffer[number]:
                until[rank, move.block.owners[0], move.side, move.heads.q.start] = last
    uses = [
        (compute.step, compute.rank, owner, side, compute.heads.q.start)
        for compute in plan.computes
        for block, side in ((compute.queries, QUERIES), (compute.keys, KEYS))
        for owner in block.owners
    ]
    uses += [
        (move.needed - 1, move.source, move.block.owners[0], move.side, move.heads.q.start)
        for move in inputs
    ]
    return all(step <= until.get((*block,), plan.steps) for step, *block in uses)
