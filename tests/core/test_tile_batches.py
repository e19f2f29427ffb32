"""Which tiles become one kernel call: every pair once, few calls, and copies only where needed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.document_layout import PaddedDocuments
from megatron_cp_plugin.core.layout import Contiguous, Cyclic, Layout, Zigzag
from megatron_cp_plugin.core.masks.tile_batches import packed_calls, parts
from megatron_cp_plugin.core.partial import RowIndex
from megatron_cp_plugin.core.tiles import Mask, Tile, plan_tiles
from megatron_cp_plugin.document_lengths import random_documents
from tests.plan_check import table_of
from tests.random_tests import TILE_KINDS, examples
from tests.span_masks import pairs_of

CPU = torch.device("cpu")
# Packed, with gaps, forward.
WAYS = [
    *((True, gaps, forward) for gaps in (True, False) for forward in (True, False)),
    (False, False, False),
]


def computed(calls, shape) -> torch.Tensor:
    """How often each (row, column) of two blocks is computed."""
    found = torch.zeros(shape, dtype=torch.int64)
    for call in calls:
        if isinstance(call, Tile):
            found += pairs_of([call], shape)
            continue
        queries, keys = call.sides(CPU)
        rows, cols = (
            torch.arange(n)[side.taken] for n, side in zip(shape, (queries, keys), strict=True)
        )
        assert len(cols) == max(x.stop for x in call.packing.kv)
        assert call.packing.gaps <= call.apart
        taken_rows, taken_cols = torch.zeros(len(rows)), torch.zeros(len(cols))
        assert len(rows) == max(x.stop for x in call.packing.q)
        assert len(call.packing.q) > 1
        for mine, seen in zip(call.packing.q, call.packing.kv, strict=True):
            taken_rows[mine] += 1
            taken_cols[seen] += 1
            rows_of, cols_of = rows[mine], cols[seen]
            pairs = torch.ones(len(rows_of), len(cols_of), dtype=torch.int64)
            if call.causal:
                assert len(rows_of) <= len(cols_of)
                pairs = pairs.tril(len(cols_of) - len(rows_of))
            if call.window:
                pairs = pairs.triu(len(cols_of) - len(rows_of) - call.window + 1)
            found[rows_of[:, None], cols_of] += pairs
        assert taken_rows.max() == 1
        if call.forward:
            assert not keys.given
            taken_cols *= 0
        assert taken_cols.max() <= 1
        for side, taken, counts in ((queries, rows, taken_rows), (keys, cols, taken_cols)):
            given = torch.zeros(len(taken))
            for to in side.given:
                if isinstance(to, RowIndex):
                    of = torch.arange(len(taken)) if to.of is None else to.of
                    assert torch.equal(taken[of], to.to.long())
                    assert len(set(to.to.tolist())) == len(to.to)
                    given[of] += 1
                else:
                    assert torch.equal(torch.arange(10**6)[to], taken)
                    given += 1
            assert torch.equal(given, counts)
    return found


@examples(60)
@given(
    st.sampled_from([Contiguous(), Zigzag(), Cyclic()]),
    st.integers(1, 3),
    st.integers(1, 40),
    st.lists(st.integers(1, 39), max_size=8),
    st.one_of(st.none(), st.integers(1, 12)),
    st.booleans(),
    TILE_KINDS,
    st.sampled_from([1, 2**20, 2**26]),
)
def test_calls_compute_the_pairs_of_their_tiles(
    layout: Layout,
    size: int,
    seq_len: int,
    starts: list[int],
    window: int | None,
    causal: bool,
    kinds: dict[str, bool],
    heads: int,
) -> None:
    """heads: of which a call of 2**26 pairs, of 64 or of one is a large one."""
    documents = tuple(sorted({start for start in starts if start < seq_len}))
    mask = Mask(causal, window if causal else None, documents)
    blocks = [layout.spans(rank, size, seq_len) for rank in range(size)]
    everything = Contiguous().spans(0, 1, seq_len)
    for queries in blocks:
        for keys in (*blocks, everything):
            tiles = plan_tiles(queries, keys, mask, **kinds)
            rows, cols = sum(map(len, queries)), sum(map(len, keys))
            want = pairs_of(tiles, (rows, cols))
            for packed, gaps, forward in WAYS:
                way = {"packed": packed, "gaps": gaps, "forward": forward}
                calls = calls_of(tiles, heads, **way)
                assert torch.equal(computed(calls, (rows, cols)), want)
                found, reached = torch.zeros_like(want), 0
                for part in parts(tiles, rows, heads, packed, gaps):
                    length = part.rows.stop - part.rows.start
                    assert part.rows.start == reached
                    reached = part.rows.stop
                    calls = calls_of(part.tiles, heads, **way)
                    found[part.rows] += computed(calls, (length, cols))
                assert torch.equal(found, want)
                assert reached == rows


def calls_of(tiles, heads: int, *, packed: bool = True, **way: bool):
    """The calls of some tiles, or of a table of them."""
    table = table_of(tiles) if isinstance(tiles, list) else tiles
    return packed_calls(table, heads, **way) if packed else table.each


def planned(layout: Layout, query: int, key: int, documents: tuple[int, ...], *, rectangular=True):
    """The calls of two blocks of two ranks, with 4 heads."""
    within = layout.for_documents(documents)
    spans = [within.spans(rank, 2, 4096) for rank in (query, key)]
    return packed_calls(plan_tiles(*spans, Mask(documents=documents), rectangular=rectangular), 4)


DOCUMENTS = tuple(start // 4 * 4 for start in random_documents(4096, 200) if start >= 4)


def test_large_tiles_are_calls_of_their_own() -> None:
    """No copies for what keeps a GPU busy alone; and no call has more than twice the keys."""
    length = 2**10
    tiles = [
        Tile(slice(a, a + length), slice(a, a + length), length, length, False)
        for a in range(length, 17 * length, 2 * length)
    ]
    small, large = calls_of(tiles, 2**5), calls_of(tiles, 2**6)
    assert [len(call.rows) for call in small] == [4, 4]
    assert set(large) == set(tiles)
    same = [Tile(slice(a, a + 64), slice(0, 99), 64, 99, False) for a in range(0, 1024, 128)]
    assert [len(call.rows) for call in calls_of(same, 1)] == [2] * 4


def test_full_tiles_side_by_side_are_one() -> None:
    def tile(rows: slice, cols: slice) -> Tile:
        lengths = rows.stop - rows.start, cols.stop - cols.start
        return Tile(rows, cols, *lengths, causal=False)

    upper, lower, left, right = slice(0, 3), slice(3, 8), slice(4, 6), slice(6, 10)
    tiles = [tile(rows, cols) for cols in (right, left) for rows in (lower, upper)]
    assert calls_of(tiles, 1) == (tile(slice(0, 8), slice(4, 10)),)


def test_indices_go_to_a_device_once() -> None:
    (call,) = planned(PaddedDocuments(), 0, 1, DOCUMENTS)
    assert call.sides(CPU) is call.sides(CPU)
    assert call.packing.lengths(1, CPU) is call.packing.lengths(1, CPU)
    lengths = call.packing.lengths(2, CPU)
    rows = [0, *(x.stop for x in call.packing.q)]
    assert lengths.cu_q.tolist() == [*rows[:-1], *(rows[-1] + row for row in rows)]
    assert lengths.used_q is lengths.used_k is None
    assert lengths.cu_q.dtype == lengths.cu_k.dtype == torch.int32
    assert lengths.longest_q == max(len(x) for x in call.rows)
    assert lengths.longest_k == max(len(x) for x in call.cols)


def test_few_rows_far_apart_are_copied() -> None:
    """What is left out takes memory; and keys that ascend in another order than queries."""

    def calls(starts: list[int], cols: list[int]) -> tuple[object, ...]:
        tiles = [
            Tile(slice(a, a + 8), slice(b, b + 8), 8, 8, causal=False)
            for a, b in zip(starts, cols, strict=True)
        ]
        return calls_of(tiles, 1, gaps=True)

    for starts, cols, apart in (
        ([0, 56], [0, 56], True),
        ([0, 57], [0, 56], False),
        ([0, 56], [0, 57], False),
        ([0, 16], [16, 0], False),
        ([0, 16], [0, 7], False),
    ):
        [call] = calls(starts, cols)
        assert call.apart == apart


def test_keys_that_are_only_read_are_taken_where_they_are() -> None:
    """Images: each sees all before it. Gradients of keys need copies, or calls one by one."""
    tiles = [Tile(slice(a, a + 8), slice(0, a), 8, a, causal=False) for a in range(16, 160, 16)]
    [call] = calls_of(tiles, 4, gaps=True, forward=True)
    assert [side.taken for side in call.sides(CPU)] == [slice(16, 152), slice(0, 144)]
    assert call.packing.lengths(1, CPU).cu_k.tolist() == [0] * 9 + [144]
    for copies in (
        calls_of(tiles, 4, gaps=True),
        calls_of(tiles, 4, forward=True),
        calls_of(tiles, 4),
    ):
        assert len(copies) == 3
        assert not any(isinstance(one, Tile) or one.apart for one in copies)
    assert len(calls_of(tiles, 2**26, gaps=True, forward=True)) == 1
    assert len(calls_of(tiles, 2**26, gaps=True)) == len(tiles)


@pytest.mark.parametrize(("heads", "most"), [(4, 64), (8, 64), (128, 64), (256, 32), (2**13, 1)])
def test_few_queries_are_copied_at_a_time(heads: int, most: int) -> None:
    """Half the block's 2048, but 2**13 for all heads where half are fewer, and 2**17 at most."""
    tiles = [
        Tile(slice(a, a + 16), slice(a, a + 16), 16, 16, causal=True, reverse=True)
        for a in range(16, 2048, 32)
    ]
    calls = calls_of(tiles, heads, gaps=True)
    counts = [1 if isinstance(one, Tile) else len(one.rows) for one in calls]
    assert counts == [most] * (64 // most)
