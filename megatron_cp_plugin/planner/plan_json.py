"""Writes plans as JSON.

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

from collections.abc import Sequence
from typing import Any

from megatron_cp_plugin.core.blocks.rows import Rows
from megatron_cp_plugin.core.call import HeadGroup
from megatron_cp_plugin.core.masks.slices import starts_and_slices
from megatron_cp_plugin.core.plans.plan import Block, Kept, Move, Plan, move_row_bytes
from megatron_cp_plugin.core.shape import Shape

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


def _block(block: Block) -> Json:
    return {"owners": list(block.owners), "rows": _ranges(block.rows)}


def _ranges(rows: Rows) -> list[list[int]]:
    return [[start, stop] for start, stop in rows]


def _heads(group: HeadGroup) -> Json:
    return {
        "q": [group.q.start, group.q.stop],
        "kv": [group.kv.start, group.kv.stop],
        "first": group.first,
        "last": group.last,
    }
