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
from dataclasses import fields
from typing import Any

from megatron_cp_plugin.core.call import HeadGroup, Shape
from megatron_cp_plugin.core.masks.slices import starts_and_slices
from megatron_cp_plugin.core.plans.plan import Move, Plan, move_row_bytes

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
        "head_groups": _plain(plan.groups),
        "ranks": [
            {
                "positions": [[span.start, span.stop, span.step] for span in spans],
                "node": nodes[rank],
                "sends": plan.sent(rank, shape)._asdict(),
                "sends_to_other_nodes": plan.sent(rank, shape, nodes)._asdict(),
                "keeps": [
                    {name: value for name, value in _plain(kept).items() if name != "rank"}
                    for kept in plan.kept
                    if kept.rank == rank
                ],
            }
            for rank, spans in enumerate(plan.spans)
        ],
        "computes": [{**_plain(one), "pairs": float(plan.pairs(one))} for one in plan.computes],
        "transfers": [{**_plain(move), **_sent(move, shape, nodes)} for move in plan.moves],
    }


def _sent(move: Move, shape: Shape, nodes: Sequence[int]) -> Json:
    end = move.target if move.result else move.source
    return {
        "bytes": shape.batch * move.tokens * move_row_bytes(move, shape),
        "kind": "result" if move.result else "input",
        "route": "direct" if end in move.block.owners else "relay",
        "link": "node" if nodes[move.source] == nodes[move.target] else "network",
    }


def _plain(x: Any) -> Any:
    """An object for a tuple with names, a list for other tuples."""
    if isinstance(x, HeadGroup):
        return {one.name: _plain(getattr(x, one.name)) for one in fields(x)}
    if isinstance(x, slice):
        return [x.start, x.stop]
    if not isinstance(x, tuple):
        return x
    if hasattr(x, "_asdict"):
        return {name: _plain(value) for name, value in x._asdict().items()}
    return list(map(_plain, x))
