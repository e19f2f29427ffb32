"""DISTFLASHATTN where all ranks share each document evenly (layout thd): equal work, few bytes."""

from itertools import accumulate
from random import Random

import pytest

from megatron_cp_plugin.algorithms.distflash import DistFlash, HelpedPlacement
from megatron_cp_plugin.core.call import Shape, head_groups
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.placement import BlockPlacement
from megatron_cp_plugin.core.plans.plan import Plan
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import Exponential, Lengths, LogNormal, random_documents
from megatron_cp_plugin.registry import create, read_options
from tests.plan_check import check

PHASES: tuple[Phase, ...] = ("forward", "backward")
HEADS = {"MHA": (8, 8), "MQA": (8, 1)}
SIZES = range(2, 10)


def pack(size: int) -> tuple[int, Mask]:
    """Tokens and mask of four documents, of which a rank has 12 tokens each."""
    lengths = [2 * size * n for n in (1, 3, 0, 2)]
    *starts, seq_len = accumulate(lengths)
    return seq_len, Mask(documents=tuple(sorted(set(starts))))


def works(plan: Plan) -> list[list[float]]:
    """Pairs of a query and a key, by step and rank."""
    found = [[0.0] * plan.size for _ in range(plan.steps)]
    for compute in plan.computes:
        found[compute.step][compute.rank] += float(plan.pairs(compute))
    return found


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", SIZES)
def test_every_step_is_equal_work(size: int, heads: str, causal: bool) -> None:
    seq_len, mask = pack(size)
    mask = Mask(causal, documents=mask.documents)
    made = create("distflash", VirtualWorld(size).topology(0), {"layout": "thd"})
    for phase in PHASES:
        plan = made.within(mask.followed).plan(Shape(1, seq_len, *HEADS[heads], 8), mask, phase)
        check(plan)
        steps = works(plan)
        assert len(steps) == size
        assert all(len(set(step)) == 1 and step[0] > 0 for step in steps)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", SIZES)
def test_bytes_by_hand(size: int, heads: str) -> None:
    """With one KV head all keys travel; with as many as query heads, to the ranks that come next.

    Queries of rank q see the first half of the keys of rank k if q > k; if q < k the second half of
    the queries sees all of them. Forward, of n heads: the keys of all pairs with q - k = t (mod P)
    have (P + t) n d bytes per token of a rank, the queries, with results, (2P - t) n d; backward
    (2P + 2t) n d and (3P - 3t/2) n d.
    """
    seq_len, mask = pack(size)
    rows, (n, g) = seq_len // size, HEADS[heads]
    query, keys, row = n * 16 * 2, g * 2 * 16 * 2, n * 4
    shape = Shape(1, seq_len, n, g, 16)
    made = create("distflash", VirtualWorld(size).topology(0), {"layout": "thd"})
    made = made.within(mask.followed)
    sent = {phase: [0] * size for phase in PHASES}
    for q in range(size):
        for k in set(range(size)) - {q}:
            distance = (q - k) % size
            of_queries, of_keys = (rows, rows // 2) if q > k else (rows // 2, rows)
            if heads == "MHA" and 2 * distance >= size:
                sent["forward"][q] += of_queries * query
                sent["forward"][k] += of_queries * (query + row)
            else:
                sent["forward"][k] += of_keys * keys
            if heads == "MHA" and 7 * distance >= 2 * size:
                sent["backward"][q] += of_queries * 2 * (query + row)
                sent["backward"][k] += of_queries * query
            else:
                sent["backward"][k] += of_keys * keys
                sent["backward"][q] += of_keys * keys
    for phase in PHASES:
        plan = made.plan(shape, mask, phase)
        assert [plan.sent(rank, shape).bytes for rank in range(size)] == sent[phase]


class Helping(DistFlash):
    """With helpers as on contiguous chunks, which know nothing of documents."""

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> BlockPlacement:
        groups = head_groups(shape.heads, shape.kv_heads, 1, share_kv=False)
        return HelpedPlacement(self.layout, self.topology.size, groups)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "lengths",
    [Exponential(2048), Exponential(16384), LogNormal(2048, 1.0), LogNormal(16384, 1.0)],
    ids=lambda lengths: lengths.label,
)
def test_less_than_with_helpers(lengths: Lengths, size: int) -> None:
    """Work and bytes of the rank that has most are no more, and with few KV heads half at most."""
    seq_len = 2**17 // (2 * size) * 2 * size
    mask = Mask(documents=random_documents(seq_len, lengths, multiple=2 * size, seed=size))
    options = read_options("distflash", {"layout": "thd"})
    assert isinstance(options, DistFlash.Options)
    topology = VirtualWorld(size).topology(0)
    for heads in ((32, 32), (32, 4)):
        shape = Shape(1, seq_len, *heads, 128)
        for phase in PHASES:
            plan, other = (
                kind(topology, options).within(mask.followed).plan(shape, mask, phase)
                for kind in (DistFlash, Helping)
            )
            work, most = (max(map(sum, zip(*works(one), strict=True))) for one in (plan, other))
            assert work <= most * (1 + 1e-9)
            sent, others = (
                [one.sent(rank, shape).bytes for rank in range(size)] for one in (plan, other)
            )
            less = 1.0 if heads == (32, 32) else 0.5
            assert max(sent) <= less * max(others)
            # Half way round the busiest rank counts, not the sum.
            assert sum(sent) <= (1.02 if heads == (32, 32) else 0.5) * sum(others)


def test_neighbours_in_a_window_are_few_steps() -> None:
    """Of eight ranks the two beside a rank hold keys that it sees."""
    mask = Mask(window=5, documents=(160,))
    made = create("distflash", VirtualWorld(8).topology(0), {"layout": "thd"})
    plan = made.within(mask.followed).plan(Shape(1, 480, 8, 1, 8), mask)
    check(plan)
    assert plan.steps == 3


@pytest.mark.parametrize("size", [3, 4])
def test_without_helpers_keys_travel(size: int) -> None:
    seq_len, mask = pack(size)
    options = {"layout": "thd", "balanced": False}
    made = create("distflash", VirtualWorld(size).topology(0), options).within(mask.followed)
    assert not any(move.result for move in made.plan(Shape(1, seq_len, 8, 8, 8), mask).moves)


def test_random_documents_are_right() -> None:
    """Of any lengths that divide, by the mask's definition; windows too."""
    source = Random(0)
    for size in (2, 3, 4):
        made = create("distflash", VirtualWorld(size).topology(0), {"layout": "thd"})
        for _ in range(5):
            lengths = [2 * size * source.randint(0, 3) for _ in range(source.randint(1, 5))]
            *starts, seq_len = accumulate([*lengths, 2 * size])
            mask = Mask(True, source.choice([None, 3, 9]), tuple(sorted(set(starts) - {0})))
            for heads in HEADS.values():
                for phase in PHASES:
                    shape = Shape(1, seq_len, *heads, 8)
                    check(made.within(mask.followed).plan(shape, mask, phase))
