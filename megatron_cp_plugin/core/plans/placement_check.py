"""Checks that layout and placement are complete; asked once per algorithm in every run.

`core.plans.plan_check` goes through whole plans, token by token, for the tests.
"""

from fractions import Fraction
from itertools import product

import numpy as np

from megatron_cp_plugin.core.blocks.token_map import TokenMap
from megatron_cp_plugin.core.blocks.visible_rows import sees
from megatron_cp_plugin.core.placement import BlockPlacement, Place, Placement
from megatron_cp_plugin.core.plans.plan import Plan, during
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError


def check_placement(name: str, placement: Placement, seq_len: int, mask: Mask) -> None:
    """Raises: ConfigError unless every token is one rank's, and every pair has one place."""
    assert isinstance(placement, BlockPlacement)
    owned = TokenMap.of(placement.layout.within(mask.followed), placement.size, seq_len)
    _check_layout(owned)
    _check_places(name, placement, owned, mask)


def check_steps(name: str, plan: Plan) -> None:
    """Raises: ConfigError unless every block is where it is computed with, or passed on, by then.

    Args: plan: in which blocks go from rank to rank, not gathered ones.
    """
    each = plan.steps // len(plan.groups)
    for move in during(plan):
        block = f"a block of rank {move.block.owners[0]}"
        if not move.result and move.needed % each == 0:
            raise ConfigError(
                f"{name} places {block} on rank {move.target} in step 0, in which a rank has only "
                "its own: use steps from 1"
            )
        if move.needed <= move.posted:
            raise ConfigError(
                f"{name} lets rank {move.source} pass {block} on to rank {move.target} in step "
                f"{move.needed % each}, but has it there no earlier: use a later step"
            )


def _check_layout(owned: TokenMap) -> None:
    """Raises: ConfigError unless each token is one rank's, and spans of a rank ascend."""
    layout, tokens = f"layout {owned.layout.name}", owned.seq_len
    holders = np.zeros(tokens, np.int64)
    for rank, spans in enumerate(owned):
        end = held = 0
        for span in filter(len, spans):
            if span.start < end or span.positions[-1] >= tokens:
                raise ConfigError(
                    f"{layout} gives rank {rank} positions {span.start} to {span.positions[-1]} "
                    f"after {end} of {tokens} tokens: let spans of a rank ascend, and end there"
                )
            end, held = span.stop, held + len(span)
            holders[span.start : span.stop : span.step] += 1
        if held != owned.lengths[rank]:
            raise ConfigError(
                f"{layout} gives rank {rank} {held} tokens by `spans` and {owned.lengths[rank]} by "
                "`length`: let them agree"
            )
    for token in np.flatnonzero(holders != 1)[:1]:
        raise ConfigError(
            f"{layout} gives token {token} of {tokens} to {holders[token]} of {len(owned)} ranks: "
            "let `spans` give each token to one"
        )


def _check_places(name: str, placement: BlockPlacement, owned: TokenMap, mask: Mask) -> None:
    """Raises: ConfigError unless all rows of queries meet all keys that the mask shows, once."""
    for query, key in product(range(placement.size), repeat=2):
        places = list(placement.place(query, key))
        met = f"queries of rank {query} meet keys of rank {key}"
        if not all(isinstance(place, Place) for place in places):
            raise ConfigError(f"{name} says that {met} at {places}: let `place` yield a Place")
        if len(places) == 1 and places[0].part == (0, 1):
            continue
        if not places:
            if sees(owned[query], owned[key], mask):
                raise ConfigError(f"{name} does not say where {met}: let `place` yield a place")
            continue
        edges = sorted((Fraction(i, n), Fraction(i + 1, n)) for i, n in (x.part for x in places))
        starts, stops = zip(*edges, strict=True)
        if (*starts, 1) != (0, *stops):
            at = ", ".join("part {} of {}".format(*x.part) + f" on rank {x.rank}" for x in places)
            raise ConfigError(f"in {name} {met} as {at}: let `place` yield each row once")
