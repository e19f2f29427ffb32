"""Document masks: packed documents of any length, on every layout."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_cp_plugin as cp
from megatron_cp_plugin.algorithms.allgather import KvAllGather
from megatron_cp_plugin.core.layout import Contiguous, Cyclic, Layout, Zigzag
from megatron_cp_plugin.core.tiles import Mask, plan_tiles, visible_pairs
from megatron_cp_plugin.errors import ContextParallelError
from tests.oracle import expected_attention
from tests.pairwise import pairwise
from tests.random_tests import examples
from tests.test_conformance import Case, assert_conforms, assert_matches, run
from tests.test_windows import CASES as STATIC
from tests.test_windows import divides

CASES = [
    *STATIC,
    *(
        Case("zigzag", (("layout", "documents"), ("backward", rule), ("chunks", chunks)))
        for rule, chunks in (("kv", 1), ("query", 2))
    ),
    Case("allgather", (("layout", "documents"), ("chunks", 2))),
    Case("allgather", (("layout", "documents"), ("transport", "group"))),
]
# All that take the documents as somebody else has cut them.
CALLERS = [
    Case("zigzag", (("layout", "thd"), ("backward", "kv"))),
    Case("zigzag", (("layout", "thd"), ("backward", "query"), ("chunks", 2))),
    Case("zigzag", (("layout", "thd"), ("route", "straight"))),
    Case("ring", (("layout", "thd"),)),
    Case("distflash", (("layout", "thd"),)),
    Case("allgather", (("layout", "thd"), ("chunks", 2))),
    Case("allgather", (("layout", "thd"), ("transport", "group"))),
    Case("attention2d", (("layout", "thd"), ("rows", 2))),
    Case("attention2d", (("layout", "thd"), ("chunks", 2), ("transport", "group"))),
    Case("ulysses", (("layout", "thd"),)),
    Case("ulysses", (("layout", "thd"), ("keep", "local"))),
    Case("usp", (("layout", "thd"), ("ulysses", 2))),
    Case("zigzag", (("layout", "contiguous"),)),
    Case("allgather", (("layout", "contiguous"),)),
    Case("attention2d", (("layout", "contiguous"), ("rows", 2))),
    Case("usp", (("layout", "contiguous"), ("ulysses", 2))),
]


def serves(case: Case, size: int, *rest: object) -> bool:
    """Whether 4 heads, teams of 2 and two rows divide among so many ranks."""
    options = dict(case.options)
    if case.algo == "ulysses":
        return 4 % size == 0
    return size % 2 == 0 if {"ulysses", "rows"} & options.keys() else True


# Lengths before they are padded to multiples of 2P: odd, shorter than 2P, one long, a single one.
PADDED = {
    "odd": (13, 1, 7, 27, 5),
    "short": (1, 2, 1, 3),
    "long and short": (41, 1, 1),
    "one": (19,),
}
BLOCK = 6
# Cumulative lengths of documents, as parts of the whole: in the middle of chunks and at their
# edges, of one token, empty, a single one.
PACKINGS = {
    "halves": lambda n: [0, n // 2, n],
    "odd": lambda n: [0, 1, n // 3, n // 3 + 1, n - 5, n - 5, n],
    "tokens": lambda n: list(range(n + 1)),
    "one": lambda n: [0, n],
    "long and short": lambda n: [0, 2, 3, n - 6, n - 4, n],
}


@pytest.mark.parametrize(
    ("case", "size", "packing", "kernel"),
    pairwise(CASES, (2, 3, 4), tuple(PACKINGS), ("torch_cpu", "reference"), allowed=divides),
    ids=str,
)
def test_equals_unsplit_attention(case: Case, size: int, packing: str, kernel: str) -> None:
    seq_len = BLOCK * size + size // 2
    lengths = PACKINGS[packing](seq_len)
    assert_conforms(case, size, seq_len=seq_len, cu_seqlens=lengths, kernel=kernel)


MASKS: tuple[dict[str, Any], ...] = ({"causal": False}, {"window": 7})
SHORT = {"seq_len": 26, "cu_seqlens": [0, 3, 14, 26], "kernel": "reference"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_a_causal_mask_or_in_a_window(case: Case) -> None:
    """By turns."""
    assert_conforms(case, 4, **SHORT, **MASKS[CASES.index(case) % 2])


def test_own_outputs_that_are_complete_before_those_of_others() -> None:
    """A rank goes on with queries of others when all results for its own ones have come."""
    case = Case("attention2d", (("variant", "overlap"), ("rows", 1)))
    assert_conforms(case, 8, seq_len=19, cu_seqlens=[0, 2, 5, 15, 18, 19], kernel="reference")


@pytest.mark.parametrize(
    ("case", "size", "packing", "kv_heads"),
    pairwise(CALLERS, (1, 2, 3, 4), tuple(PADDED), (4, 2, 1), allowed=serves),
    ids=str,
)
def test_documents_as_their_callers_cut_them(
    case: Case, size: int, packing: str, kv_heads: int
) -> None:
    """Each padded to a multiple of 2P, zigzag inside each; or contiguous."""
    bounds = padded(PADDED[packing], size)
    assert_conforms(case, size, seq_len=bounds[-1], cu_seqlens=bounds, kv_heads=kv_heads)


@pytest.mark.parametrize("case", CALLERS, ids=str)
def test_documents_of_their_callers_without_a_causal_mask_or_in_a_window(case: Case) -> None:
    bounds = padded(PADDED["odd"], 4)
    settings = {"seq_len": bounds[-1], "cu_seqlens": bounds, "kernel": "reference"}
    assert_conforms(case, 4, **settings, **MASKS[CALLERS.index(case) % 2])


def padded(lengths: Sequence[int], size: int) -> list[int]:
    """Cumulative lengths of documents that are padded to multiples of 2P."""
    return list(accumulate((-(-n // (2 * size)) * 2 * size for n in lengths), initial=0))


@examples(150)
@given(
    st.sampled_from([Contiguous(), Zigzag(), Cyclic()]),
    st.integers(1, 5),
    st.integers(1, 40),
    st.lists(st.integers(0, 40), max_size=8),
    st.one_of(st.none(), st.integers(1, 12)),
    st.booleans(),
    st.booleans(),
)
def test_tiles_cover_every_pair_once(
    layout: Layout,
    size: int,
    seq_len: int,
    starts: list[int],
    window: int | None,
    causal: bool,
    rectangular: bool,
) -> None:
    documents = tuple(sorted({start for start in starts if 0 < start < seq_len}))
    mask = Mask(causal, window if causal else None, documents)
    document = [sum(start <= token for start in documents) for token in range(seq_len)]
    found: dict[tuple[int, int], int] = {}
    for owner in range(size):
        for other in range(size):
            q_spans, kv_spans = (layout.spans(r, size, seq_len) for r in (owner, other))
            rows, cols = ([p for s in spans for p in s.positions] for spans in (q_spans, kv_spans))
            for tile in plan_tiles(q_spans, kv_spans, mask, rectangular=rectangular):
                mine, seen = rows[tile.q], cols[tile.kv]
                assert (len(mine), len(seen)) == (tile.rows, tile.cols)
                if tile.reverse:
                    mine, seen = mine[::-1], seen[::-1]
                for i, x in enumerate(mine):
                    first = max((start for start in tile.document_bounds if start <= i), default=0)
                    last = i + tile.cols - tile.rows if tile.causal else tile.cols - 1
                    for y in seen[first : last + 1]:
                        found[x, y] = found.get((x, y), 0) + 1
    visible = {
        (x, y): 1
        for x in range(seq_len)
        for y in range(seq_len)
        if document[x] == document[y]
        and (not mask.causal or y <= x)
        and (mask.window is None or x - y < mask.window)
    }
    assert found == visible
    assert sum(found.values()) == visible_pairs(seq_len, mask)


def test_a_document_of_many_ranks_costs_no_further_kernel_calls() -> None:
    """Off the diagonal two blocks share one document at most."""
    spans = [Contiguous().spans(rank, 4, 400) for rank in range(4)]
    mask = Mask(documents=(30, 150, 160, 390))
    tiles = plan_tiles(spans[2], spans[1], mask, rectangular=True)
    assert [(tile.q, tile.kv) for tile in tiles] == [(slice(0, 100), slice(60, 100))]
    assert not plan_tiles(spans[2], spans[0], mask, rectangular=True)


def test_what_a_layout_that_follows_documents_sends() -> None:
    """Of whole ones nothing; of others a ring no less than what goes straight to where it is
    needed, which is less than what a collective operation sends.
    """
    for lengths, size, whole in ((range(0, 49, 8), 3, True), ((0, 20, 48, 60, 72, 90), 5, False)):
        bounds, sent = torch.tensor(lengths), []
        expected = expected_attention(
            seq_len=lengths[-1], heads=4, kv_heads=2, head_dim=8, causal=True, cu_seqlens=bounds
        )
        for algo, *transport in (
            ("allgather",),
            ("zigzag",),
            ("allgather", ("transport", "group")),
        ):
            case = Case(algo, (("layout", "documents"), *transport))
            results, log = run(case, expected, size, peer_access=False, cu_seqlens=bounds)
            assert_matches(case, results, expected, 1e-12, bounds)
            sent.append(log.bytes())
        assert sent == [0, 0, 0] if whole else 0 < sent[0] <= sent[1] < sent[2]


def test_whole_documents_are_one_kernel_call() -> None:
    (span,) = Contiguous().spans(1, 4, 400)
    mask = Mask(documents=(30, 130, 131, 150, 190, 390))
    (tile,) = plan_tiles([span], [span], mask)
    assert (tile.q, tile.kv, tile.causal) == (slice(0, 100), slice(0, 100), True)
    assert tile.document_bounds == (0, 30, 31, 50, 90, 100)
    assert tile.area == sum(n * (n + 1) // 2 for n in (30, 1, 19, 40, 10))


@pytest.mark.parametrize(
    "cu_seqlens", [[], [0], [1, 8], [0, 7], [0, 5, 3, 8], [0, 9]], ids=lambda x: str(x)
)
def test_lengths_that_are_none_are_refused(cu_seqlens: list[int]) -> None:
    q = torch.ones(1, 8, 2, 8)
    with pytest.raises(ContextParallelError, match="ascending numbers from 0 to seq_len = 8, got"):
        cp.attention(q, q, q, algo="ring", cu_seqlens=cu_seqlens)


def test_every_algorithm_takes_documents_and_one_that_does_not_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.ones(1, 8, 2, 8)
    for algo in cp.available("softmax"):
        cp.attention(q, q, q, algo=algo, cu_seqlens=[0, 3, 8])
    monkeypatch.setattr(KvAllGather, "windows", False)
    with pytest.raises(ContextParallelError, match="does not support documents, got 2 of them"):
        cp.attention(q, q, q, algo="allgather", cu_seqlens=[0, 4, 8])
