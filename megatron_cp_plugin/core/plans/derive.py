"""Derives a plan from a placement: what every rank computes, sends and receives."""

from collections.abc import Iterable
from copy import copy
from functools import lru_cache

from megatron_cp_plugin.core.blocks.owned import Owned
from megatron_cp_plugin.core.blocks.touched import keys_seen, sees
from megatron_cp_plugin.core.layout import Layout, Spans
from megatron_cp_plugin.core.placement import BlockPlacement, HeadPlacement, Placement
from megatron_cp_plugin.core.plans.derive_blocks import Derivation
from megatron_cp_plugin.core.plans.derive_gathers import OneGathering
from megatron_cp_plugin.core.plans.derive_heads import with_teams
from megatron_cp_plugin.core.plans.derive_ring import OneOfARing
from megatron_cp_plugin.core.plans.plan import Plan, Setting
from megatron_cp_plugin.core.tiles import Mask


@lru_cache(maxsize=64)
def plan_of(placement: Placement, setting: Setting) -> Plan:
    """The plan of one pass, made once: at short lengths a step of training is bound by the host."""
    if isinstance(placement, HeadPlacement):
        between = plan_of(placement.between, setting._replace(rank=None))
        return with_teams(placement, between, setting.rank)
    goes_round = _goes_round(placement, setting)
    alone = setting.rank if placement.assembled or goes_round else None
    shared = Setting(setting.seq_len, setting.mask, "forward", rank=alone)
    making = copy(_meeting(placement, shared))
    making.setting = setting
    return making.plan()


@lru_cache(maxsize=16)  # both passes of a micro-batch have the same, where placements are
def _meeting(placement: BlockPlacement, setting: Setting) -> Derivation:
    if setting.rank is None or not setting.mask.special:
        return Derivation(placement, setting)
    return (OneGathering if placement.assembled else OneOfARing)(placement, setting)


def _goes_round(placement: BlockPlacement, setting: Setting) -> bool:
    """Whether one rank's part of a ring can be made without that of others."""
    if placement.goes_round is None or not setting.mask.special:
        return False
    layout = placement.layout.within(setting.mask.followed)
    return not Owned.of(layout, placement.size, setting.seq_len).gaps


def sees_all(layout: Layout, size: int, seq_len: int, mask: Mask) -> bool:
    """Whether some query of every rank's block sees some key of every block."""
    layout = layout.within(mask.followed)
    blocks = Owned.of(layout, size, seq_len)
    if not mask.special:
        return _all_see_all(blocks, mask)
    if blocks.gaps:
        return all(sees(queries, keys, mask) for queries in blocks for keys in blocks)
    return all(len(seen) == size for seen in keys_seen(layout, size, seq_len, mask))


def _all_see_all(blocks: Iterable[Spans], mask: Mask) -> bool:
    """The same without windows, documents and spans: by the first and the last of each block."""
    found = [[span.positions for span in block if len(span)] for block in blocks]
    if not all(found):
        return False
    latest = (max(positions[-1] for positions in one) for one in found)
    first = (min(positions[0] for positions in one) for one in found)
    return not mask.causal or min(latest) >= max(first)
