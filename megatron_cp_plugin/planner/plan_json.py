"""Writes plans as JSON and reads them back.

A plan is an object with

- phase: forward or backward. steps: how many. mask: causal, window (null: none), documents (where
  all but the first begin), slices (null: none; of a span mask, each as of `Slice`). rectangular,
  relay, shares: see `Plan`.
- head_groups: objects with q and kv, each [start, stop), and first and last, see `HeadGroup`.
- ranks: by rank, objects with positions, which are [start, stop, step) in the order in which the
  rank holds its tokens; node; sends and sends_to_other_nodes, each with bytes and messages; keeps:
  what it has at the end of a forward, or at the beginning of a backward, beside the tensors of
  its own tokens, each with tensors, owners, share and rows (null: all).
- computes: objects with step, rank, queries, keys, heads, share, and pairs: how many pairs of a
  query and a key, times the part of all heads.
- transfers: objects with posted and needed, the steps; source and target, ranks; messages: the
  tensors of each; block, tokens, heads, share; wide: results in float32; bytes: of all messages;
  kind: input or result; route: direct (from the block's owner, or of results to it) or relay; link:
  node or network.

A block (queries, keys, block) has owners, whose tokens it is of, and rows, a list of ranges [start,
stop) of these, which are packed one behind the other.
heads are as in head_groups.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_cp_plugin.core.blocks.rows import Rows
from megatron_cp_plugin.core.blocks.token_map import TokenMap
from megatron_cp_plugin.core.head_groups import HeadGroup
from megatron_cp_plugin.core.masks.slices import Slice, Slices, starts_and_slices
from megatron_cp_plugin.core.plans.plan import Block, Compute, Kept, Move, Plan, move_row_bytes
from megatron_cp_plugin.core.ranges import Span
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask

Json = dict[str, Any]


def to_json(plan: Plan, shape: Shape, nodes: Sequence[int]) -> Json:
    """A plan as JSON's types. Args: shape: for bytes. nodes: of each rank."""
    return {
        "phase": plan.phase,
        "steps": plan.steps,
        "mask": {
            "causal": plan.mask.causal,
            "window": plan.mask.window,
            "documents": list(starts_and_slices(plan.mask.followed)[0]),
            "slices": None if plan.mask.slices is None else list(map(list, plan.mask.slices)),
        },
        "rectangular": plan.rectangular,
        "relay": plan.relay,
        "shares": plan.shares,
        "head_groups": [_heads(group) for group in plan.groups],
        "ranks": [
            {
                "positions": [[span.start, span.stop, span.step] for span in spans],
                "node": nodes[rank],
                "sends": plan.sent(rank, shape)._asdict(),
                "sends_to_other_nodes": plan.sent(rank, shape, nodes)._asdict(),
                "keeps": _kept(plan.kept, rank),
            }
            for rank, spans in enumerate(plan.spans)
        ],
        "computes": [
            {
                "step": compute.step,
                "rank": compute.rank,
                "queries": _block(compute.queries),
                "keys": _block(compute.keys),
                "heads": _heads(compute.heads),
                "share": compute.share,
                "pairs": float(plan.pairs(compute)),
            }
            for compute in plan.computes
        ],
        "transfers": [_transfer(move, shape, nodes) for move in plan.moves],
    }


def from_json(document: Mapping[str, Any]) -> Plan:
    """The plan of which `to_json` made this."""
    mask = document["mask"]
    documents, slices = tuple(mask["documents"]), None
    if mask["slices"] is not None:
        slices = Slices.cut((Slice(*one) for one in mask["slices"]), documents)
        documents = ()
    return Plan(
        document["phase"],
        Mask(mask["causal"], mask["window"], documents, slices),
        document["rectangular"],
        TokenMap.recorded(
            [tuple(Span(*span) for span in rank["positions"]) for rank in document["ranks"]]
        ),
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


def _kept(all_ranks: Sequence[Kept], rank: int) -> list[Json]:
    return [
        {
            "tensors": list(kept.tensors),
            "owners": list(kept.owners),
            "share": kept.share,
            "rows": None if kept.rows is None else _ranges(kept.rows),
        }
        for kept in all_ranks
        if kept.rank == rank
    ]


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


def _transfer(move: Move, shape: Shape, nodes: Sequence[int]) -> Json:
    end = move.target if move.result else move.source
    return {
        "posted": move.posted,
        "needed": move.needed,
        "source": move.source,
        "target": move.target,
        "messages": [list(message) for message in move.messages],
        "block": _block(move.block),
        "tokens": move.tokens,
        "heads": _heads(move.heads),
        "share": move.share,
        "wide": move.wide,
        "bytes": shape.batch * move.tokens * move_row_bytes(move, shape),
        "kind": "result" if move.result else "input",
        "route": "direct" if end in move.block.owners else "relay",
        "link": "node" if nodes[move.source] == nodes[move.target] else "network",
    }


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


def _block(block: Block) -> Json:
    return {"owners": list(block.owners), "rows": _ranges(block.rows)}


def _block_of(document: Mapping[str, Any]) -> Block:
    return Block(tuple(document["owners"]), _rows_of(document["rows"]))


def _ranges(rows: Rows) -> list[list[int]]:
    return [[start, stop] for start, stop in rows]


def _rows_of(ranges: Sequence[Sequence[int]]) -> Rows:
    return tuple((start, stop) for start, stop in ranges)


def _heads(group: HeadGroup) -> Json:
    return {
        "q": [group.q.start, group.q.stop],
        "kv": [group.kv.start, group.kv.stop],
        "first": group.first,
        "last": group.last,
    }


def _heads_of(document: Mapping[str, Any]) -> HeadGroup:
    q, kv = (slice(*document[name]) for name in ("q", "kv"))
    return HeadGroup(q, kv, document["first"], document["last"])
