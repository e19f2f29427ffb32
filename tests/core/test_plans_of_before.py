"""Plans are those that were made before there was one derivation of them: equal move for move.

`plans_of_before.json` has a digest of each of the `cases`, by size, written at commit 19689a0
(those of distflash with layout thd later) by

    python -m tests.core.test_plans_of_before

Which order counts: of what is posted and needed in the same steps, all that comes to one rank of
one block, for results are added in the order in which they come; and the computations of a rank in
a step. In which order a plan names blocks and ranks says nothing, as long as two ranks have their
messages to each other in one order (`test_plan`). Of what ranks keep a rank's part has its own.
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron_cp_plugin.core.call import HeadGroup, Shape
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.plans.plan import PHASES, Block, Kept, Move, Plan
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.registry import create
from tests.any_placement import registered
from tests.span_masks import mask_of, random_spans

DIGESTS = Path(__file__).with_name("plans_of_before.json")
SIZES = (1, 2, 3, 4, 5, 6, 8, 9)
MASKS = 3  # of each variant and size
SAMPLED = 7  # one case of so many is kept, of each size other variants

Options = dict[str, Any]


def variants(size: int) -> Iterator[tuple[str, Options]]:
    """Every algorithm with what changes its plan; `world` and `heads` are not options.

    What chooses by itself today is named as it was then.
    """
    for name, options in _variants(size):
        gathered = name in GRIDS and options.get("world") != "peer"
        before = {"transport": "group"} if gathered else DEFAULTS.get(name, {})
        yield name, before | options


GRIDS = ("allgather", "attention2d")
DEFAULTS: dict[str, Options] = {
    **{name: {"route": "ring"} for name in ("ring", "zigzag", "usp")},
    "distflash": {"helpers": "distance"},
}


def _variants(size: int) -> Iterator[tuple[str, Options]]:
    for rule in ("kv", "query"):
        for heads in ((32, 8), (4, 4)):
            yield "ring", {"backward": rule, "heads": heads}
        yield "zigzag", {"backward": rule}
        yield "zigzag", {"backward": rule, "chunks": 2, "gradients": "model"}
        for route in ("straight", "double"):
            yield "zigzag", {"backward": rule, "route": route, "world": "nodes"}
            yield "ring", {"backward": rule, "route": route, "world": "nodes"}
            yield "zigzag", {"backward": rule, "route": route, "world": "nodes", "layout": "thd"}
        for layout in ("documents", "thd", "contiguous"):
            yield "zigzag", {"backward": rule, "layout": layout, "keep": "local"}
    yield "ring", {"layout": "thd"}
    yield "ring", {"keep": "local", "world": "peer"}
    for helpers in ("distance", "none"):
        for last_step in ("owner", "shared"):
            yield "distflash", {"helpers": helpers, "last_step": last_step, "chunks": 2}
        yield "distflash", {"helpers": helpers, "layout": "thd"}
    yield "distflash", {"world": "peer", "heads": (4, 4)}
    for world in ("", "peer"):
        yield "allgather", {"world": world}
        yield "allgather", {"chunks": 3, "world": world, "heads": (6, 3)}
        yield "allgather", {"world": world, "layout": "contiguous"}
        yield "allgather", {"world": world, "layout": "thd", "gradients": "float32"}
        yield "attention2d", {"world": world, "partials": "float32", "heads": (4, 4)}
        yield "attention2d", {"world": world, "layout": "contiguous", "chunks": 2}
        yield "attention2d", {"world": world, "layout": "thd"}
    for rows in range(1, size + 1):
        if size % rows == 0:
            for world in ("", "peer", "nodes"):
                yield "attention2d", {"rows": rows, "world": world, "chunks": 8}
            yield "attention2d", {"rows": rows, "variant": "no", "gradients": "float32"}
            yield "attention2d", {"rows": rows, "variant": "overlap"}
    for keep in ("exchanged", "local"):
        yield "ulysses", {"keep": keep, "chunks": 2}
        yield "ulysses", {"keep": keep, "layout": "zigzag", "heads": (4, 4), "chunks": 3}
        yield "ulysses", {"keep": keep, "layout": "thd", "chunks": 4}
        for team in range(1, size + 1):
            if size % team == 0:
                yield "usp", {"keep": keep, "ulysses": team, "chunks": 2}
                yield "usp", {"ulysses": team, "layout": "contiguous", "backward": "query"}
                yield "usp", {"ulysses": team, "layout": "thd", "route": "straight", "keep": keep}
                yield "usp", {"ulysses": team, "route": "double", "world": "nodes"}
    for layout in ("zigzag", "contiguous", "cyclic", "documents"):
        for relay in ("none", "keys", "queries"):
            yield "any", {"layout": layout, "relay": relay, "seed": size}
        yield "any", {"layout": layout, "parts": 3, "seed": size, "chunks": 2}
        yield "any", {"layout": layout, "hosts": "owners", "seed": size, "gradients": "float32"}
    for hosts in ("any", "owners"):
        yield "random_balanced", {"ranks": hosts, "seed": size}
    yield "halves", {"chunks": 2}


def masks(size: int) -> Iterator[tuple[str, int, Mask]]:
    """Names, tokens and masks."""
    even, uneven, source = 200 * size, 200 * size + 3, Random(size)
    yield "causal", uneven, Mask()
    yield "full", even, Mask(causal=False)
    yield "window", uneven, Mask(window=70)
    yield "long window", even, Mask(window=450, documents=(even // 3,))
    yield "documents", even, Mask(documents=random_documents(even, 130, seed=size))
    yield "few documents", uneven, Mask(documents=(37, 75 * size))
    yield "full documents", even, Mask(causal=False, documents=(4, 6, 70 * size, 70 * size + 1))
    yield "spans", uneven, mask_of(random_spans(source, uneven), uneven)
    yield "more spans", even, mask_of(random_spans(source, even), even, [0, size, even], 90)
    halves = [(0, even // 2, 0, even // 2, "causal"), (even // 2, even, even // 3, even, "causal")]
    yield "causal spans", even, mask_of(halves, even)
    # Of lengths that layout thd can divide.
    unit = 2 * size
    starts = random_documents(even, 60, multiple=unit, seed=size)
    yield "thd", even, Mask(documents=starts)
    yield "full thd", even, Mask(causal=False, documents=(10 * unit, 70 * unit))
    yield "one thd", even, Mask()
    yield "window thd", even, Mask(window=33, documents=(20 * unit,))
    yield "spans thd", even, mask_of(random_spans(source, even), even, [0, 30 * unit, even])


def cases(size: int) -> Iterator[tuple[str, int, str]]:
    """Variant, size and mask of each: one of `SAMPLED` of a few masks of each variant, other ones
    of other variants and sizes.
    """
    names, count = [name for name, _, _ in masks(size)], size
    for number, (name, options) in enumerate(variants(size)):
        thd = options.get("layout") == "thd"
        suited = [mask for mask in names if mask.endswith("thd") == thd]
        first = size + MASKS * number
        for turn in range(first, first + MASKS):
            if count % SAMPLED == 0:
                yield f"{number} {label(name, options)}", size, suited[turn % len(suited)]
            count += 1


def label(name: str, options: Options) -> str:
    return ":".join([name, *(f"{key}={value}" for key, value in options.items())])


def plans(
    name: str, options: Options, size: int, seq_len: int, mask: Mask
) -> Iterator[tuple[Plan, int | None]]:
    """Of both passes: of all ranks, and of two ranks."""
    options = dict(options)
    heads, world = options.pop("heads", (32, 8)), options.pop("world", "")
    per_node = size // 2 if world == "nodes" and size % 2 == 0 else size
    topology = VirtualWorld(size, ranks_per_node=per_node, peer_access=world == "peer").topology(0)
    shape = Shape(1, seq_len, *heads, 64)
    made = create(name, topology, options).within(mask.followed)
    for phase in PHASES:
        for rank in (None, size // 3, size - 1):
            yield made.plan(shape, mask, phase, rank=rank, rectangular=size % 2 == 0), rank


def digest_of(variant: str, size: int, mask: str) -> str:
    """Of all plans of a case."""
    number = int(variant.split()[0])
    name, options = list(variants(size))[number]
    _, seq_len, of = next(each for each in masks(size) if each[0] == mask)
    found = sha256()
    try:
        for plan, rank in plans(name, options, size, seq_len, of):
            found.update(json.dumps(content(plan, rank)).encode())
    except ContextParallelError as error:
        return type(error).__name__
    return found.hexdigest()[:10]


def content(plan: Plan, rank: int | None) -> list[Any]:
    """What counts of a plan, in JSON's types. Args: rank: of which it is a part."""
    moves = sorted(plan.moves, key=_arrival)
    computes = sorted(plan.computes, key=attrgetter("step", "rank"))
    return [
        [plan.phase, plan.rectangular, plan.steps, plan.relay, plan.shares],
        list(map(_heads, plan.groups)),
        [[[span.start, span.stop, span.step] for span in spans] for spans in plan.spans],
        list(map(_move, moves)),
        [
            [one.step, one.rank, one.share, _heads(one.heads), *map(_block, one[2:4])]
            for one in computes
        ],
        [
            sorted((_kept(one) for one in kept if rank in (None, one.rank)), key=str)
            for kept in (
                [one for one in plan.kept if one.rows is None],
                [one for one in plan.kept if one.rows is not None],
            )
        ],
        sorted({(time.result, bool(time.side), time.posted, time.needed) for time in plan.times}),
    ]


def _arrival(move: Move) -> tuple[Any, ...]:
    """What comes to a rank of a block, at a time."""
    block = move.side, move.block.owners, move.share, move.heads.q.start, move.heads.q.stop
    return move.result, move.posted, move.needed, move.target, block


def _move(move: Move) -> list[Any]:
    ends = [move.posted, move.needed, move.source, move.target]
    of = [move.messages, _block(move.block), move.tokens, _heads(move.heads), move.share, move.wide]
    return [*ends, *of]


def _block(block: Block) -> list[Any]:
    return [block.owners, block.rows]


def _heads(group: HeadGroup) -> list[Any]:
    return [group.q.start, group.q.stop, group.kv.start, group.kv.stop, group.first, group.last]


def _kept(kept: Kept) -> list[Any]:
    return [kept.rank, kept.tensors, kept.owners, kept.share, kept.rows]


@pytest.mark.parametrize("size", SIZES)
def test_plans_are_those_of_before(size: int) -> None:
    tried = zip(cases(size), json.loads(DIGESTS.read_text())[str(size)], strict=True)
    with registered():
        changed = [case for case, digest in tried if digest_of(*case) != digest]
    assert not changed


def write() -> None:
    with registered():
        found = {size: [digest_of(*case) for case in cases(size)] for size in SIZES}
    lines = (f'"{size}": {json.dumps(digests)}' for size, digests in found.items())
    DIGESTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write()
