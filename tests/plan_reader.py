"""Reads plans as the planner writes them in JSON: what the file says is the whole plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_cp_plugin.core.blocks.rows import Rows
from megatron_cp_plugin.core.blocks.visible_rows import TokenMap
from megatron_cp_plugin.core.call import HeadGroup
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.masks.slices import Slice, Slices
from megatron_cp_plugin.core.plans.plan import Block, Compute, Kept, Move, Plan
from megatron_cp_plugin.core.ranges import Ranges, Span
from megatron_cp_plugin.core.tiles import Mask


@dataclass(frozen=True)
class Recorded(Layout):
    """What ranks hold, as a file says it."""

    of_ranks: tuple[Ranges, ...]
    name = "recorded"

    def spans(self, rank: int, size: int, seq_len: int) -> Ranges:
        return self.of_ranks[rank]

    def multiple(self, size: int) -> int:
        return 1


def from_json(document: Mapping[str, Any]) -> Plan:
    """The plan of which `to_json` made this."""
    mask = document["mask"]
    documents, slices = tuple(mask["documents"]), None
    if mask["slices"] is not None:
        slices = Slices.cut((Slice(*one) for one in mask["slices"]), documents)
        documents = ()
    held = [Ranges.of([Span(*span) for span in one["positions"]]) for one in document["ranks"]]
    return Plan(
        document["phase"],
        Mask(mask["causal"], mask["window"], documents, slices),
        document["rectangular"],
        TokenMap(Recorded(tuple(held)), len(held), 0),
        tuple(map(_heads_of, document["head_groups"])),
        document["steps"],
        tuple(
            Compute(
                one["step"],
                one["rank"],
                _block_of(one["queries"]),
                _block_of(one["keys"]),
                _heads_of(one["heads"]),
                one["share"],
            )
            for one in document["computes"]
        ),
        tuple(map(_move_of, document["transfers"])),
        document["relay"],
        _kept_of(document),
        document["shares"],
    )


def _kept_of(document: Mapping[str, Any]) -> tuple[Kept, ...]:
    return tuple(
        Kept(
            rank,
            tuple(kept["tensors"]),
            tuple(kept["owners"]),
            kept["share"],
            None if kept["rows"] is None else _rows_of(kept["rows"]),
        )
        for rank, own in enumerate(document["ranks"])
        for kept in own["keeps"]
    )


def _move_of(document: Mapping[str, Any]) -> Move:
    return Move(
        document["posted"],
        document["needed"],
        document["source"],
        document["target"],
        tuple(map(tuple, document["messages"])),
        _block_of(document["block"]),
        document["tokens"],
        _heads_of(document["heads"]),
        document["share"],
        document["wide"],
    )


def _block_of(document: Mapping[str, Any]) -> Block:
    return Block(tuple(document["owners"]), _rows_of(document["rows"]))


def _rows_of(ranges: Sequence[Sequence[int]]) -> Rows:
    return tuple((start, stop) for start, stop in ranges)


def _heads_of(document: Mapping[str, Any]) -> HeadGroup:
    q, kv = (slice(*document[name]) for name in ("q", "kv"))
    return HeadGroup(q, kv, document["first"], document["last"])
