"""Span masks: any slices, on every layout, alone and beside documents and windows; and the makers
of the masks in use.
"""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.blocks.visible_rows import sees, visible_rows
from megatron_cp_plugin.core.document_layout import Balanced, PaddedDocuments
from megatron_cp_plugin.core.layout import Contiguous, Cyclic, Layout, Zigzag
from megatron_cp_plugin.core.masks.slices import KINDS, Slices
from megatron_cp_plugin.core.masks.tile_batches import packed_calls
from megatron_cp_plugin.core.ranges import Span
from megatron_cp_plugin.core.tiles import Mask, plan_tiles
from megatron_cp_plugin.errors import ContextParallelError
from tests.random_tests import TILE_KINDS, examples
from tests.span_masks import dense, mask_of, pairs_of, random_lengths, random_spans, random_window


def computed(q: Sequence[Span], kv: Sequence[Span], mask: Mask, kinds: dict[str, bool]) -> Tensor:
    """[N,N]: how often tiles compute a query and a key of two blocks of at most 64 tokens."""
    rows, cols = (torch.tensor([p for s in spans for p in s.positions]) for spans in (q, kv))
    tiles = plan_tiles(q, kv, mask, **kinds)
    assert kinds["rectangular"] or all(not x.causal or x.rows == x.cols for x in tiles)
    found = torch.zeros(64, 64, dtype=torch.int64)
    found[rows.long()[:, None], cols.long()] += pairs_of(tiles, (len(rows), len(cols)))
    return found


def assert_visible(q: Sequence[Span], kv: Sequence[Span], mask: Mask, found: Tensor) -> None:
    """The rows of both blocks that meet, and with positions that have a step perhaps more."""
    for spans, touched, meets in zip(
        (q, kv), visible_rows(q, kv, mask), (found.any(1), found.any(0)), strict=True
    ):
        positions = [p for span in spans for p in span.positions]
        rows = [row for row, p in enumerate(positions) if meets[p]]
        covered = [row for start, stop in touched for row in range(start, stop)]
        gaps = any(span.step > 1 for span in (*q, *kv))
        assert set(covered) >= set(rows) if gaps else covered == rows
        assert all(before[1] < after[0] for before, after in pairwise(touched))


LAYOUTS = [Contiguous(), Zigzag(), Cyclic(), Balanced(), PaddedDocuments()]


@examples(200)
@given(
    st.booleans(),
    st.sampled_from(LAYOUTS),
    st.sampled_from([None, *LAYOUTS]),
    st.integers(1, 5),
    st.integers(1, 60),
    st.randoms(use_true_random=False),
    TILE_KINDS,
)
def test_tiles_cover_every_pair_once(
    beside: bool,
    q_layout: Layout,
    kv_layout: Layout | None,
    size: int,
    seq_len: int,
    source: Random,
    kinds: dict[str, bool],
) -> None:
    """Args: beside: there are documents and a window too. kv_layout: None: that of queries."""
    layouts = q_layout, kv_layout or q_layout
    multiple = 2 * size if "thd" in [layout.name for layout in layouts] else 1
    seq_len = -(-seq_len // multiple) * multiple
    spans, lengths, window = random_spans(source, seq_len), None, None
    if beside:
        lengths, window = random_lengths(source, seq_len, multiple), random_window(source, seq_len)
    mask, wanted = (made(spans, seq_len, lengths, window) for made in (mask_of, dense))
    whole = dense(spans, seq_len, lengths)
    assert wanted.max() <= 1
    assert mask.causal == (not whole.triu(1).any())
    assert mask.bands.area(seq_len) == wanted.sum()
    assert mask.bands.keys_of(seq_len).tolist() == wanted.sum(1).tolist()
    queries, keys = (
        [layout.for_documents(mask.resolved).spans(rank, size, seq_len) for rank in range(size)]
        for layout in layouts
    )
    total = torch.zeros(64, 64, dtype=torch.int64)
    for q in queries:
        for kv in keys:
            met = computed(q, kv, mask, kinds)
            assert sees(q, kv, mask) == met.any()
            assert_visible(q, kv, mask, met)
            total += met
    assert torch.equal(total[:seq_len, :seq_len], wanted)
    assert not total[seq_len:].any()


def picture(spans: Sequence[Sequence[object]], seq_len: int) -> list[str]:
    named = dense(spans, seq_len)
    assert named.max() <= 1
    return ["".join("x" if seen else "." for seen in row) for row in named.tolist()]


@pytest.mark.parametrize(
    ("maker", "name"),
    [
        (lambda: cp.spans.documents([0, 2, 5]), "x.... xx... ..x.. ..xx. ..xxx"),
        (lambda: cp.spans.documents([0, 2, 5], window=2), "x.... xx... ..x.. ..xx. ...xx"),
        (lambda: cp.spans.documents([0, 2, 5], causal=False), "xx... xx... ..xxx ..xxx ..xxx"),
        (lambda: cp.spans.prefix_lm(2, 4), "xx.. xx.. xxx. xxxx"),
        (
            lambda: cp.spans.prefix_lm(0, 2) + cp.spans.prefix_lm(2, 2, start=2),
            "x... xx.. ..xx ..xx",
        ),
        (lambda: cp.spans.shared_prefix((2, [1, 2])), "x.... xx... xxx.. xx.x. xx.xx"),
        (
            lambda: cp.spans.shared_prefix((1, [(1, [1, 1]), 1]), start=1),
            "...... .x.... .xx... .xxx.. .xx.x. .x...x",
        ),
        (lambda: cp.spans.image_blocks(5, [(1, 3)]), "x.... xxx.. xxx.. xxxx. xxxxx"),
        (lambda: cp.spans.image_blocks(4, [(0, 2), (2, 4)]), "xx.. xx.. xxxx xxxx"),
        (lambda: cp.spans.image_blocks(2, [(1, 2)], start=1), "... .x. .xx"),
        (lambda: cp.spans.image_blocks(4, [(0, 1), (1, 4)]), "x... xxxx xxxx xxxx"),
        (
            lambda: cp.spans.block_diffusion(4, 2),
            "xx...... xx...... ..xxxx.. ..xxxx.. ....xx.. ....xx.. ....xxxx ....xxxx",
        ),
        (lambda: cp.spans.block_diffusion(3, 2), "xx.... xx.... ..xxx. ...xx. ...xx. ...xxx"),
    ],
    ids=lambda value: value if isinstance(value, str) else "spans",
)
def test_makers_by_hand(maker, name: str) -> None:
    expected = name.split()
    assert picture(maker(), len(expected)) == expected


def test_kinds_have_numbers_in_a_tensor() -> None:
    q = torch.randn(1, 8, 2, 8, dtype=torch.float64)
    for number, kind in enumerate(KINDS):
        by_name, by_number = (
            cp.attention(q, q, q, algo="ring", spans=spans)
            for spans in ([(2, 6, 1, 8, kind)], torch.tensor([[2, 6, 1, 8, number]]))
        )
        assert torch.equal(by_name, by_number)
        assert by_name[:, 2:6].any()


@pytest.mark.parametrize(
    ("spans", "settings", "message"),
    [
        ([7], {}, r"four whole numbers and a kind, each, got \[7\]"),
        ([(0, 4, 0, 4, [])], {}, r"a kind, each, got \[\(0, 4, 0, 4, \[\]\)\]"),
        (
            [(0, 4, 0)],
            {},
            r"spans need \(q_start, .*, four whole numbers and a kind, each, got \(0, 4, 0",
        ),
        (
            [(0, 4, 0, 4.5, "full")],
            {},
            r"four whole numbers and a kind, each, got \(0, 4, 0, 4.5, 'full'",
        ),
        ([(0, 4, 0, 4, 4)], {}, r"four whole numbers and a kind, each, got \(0, 4, 0, 4, 4\)"),
        ([(0, 4, 0, 4, -1)], {}, r"four whole numbers and a kind, each, got \(0, 4, 0, 4, -1\)"),
        (
            [(0, 4, 0, 4, "casual")],
            {},
            r"unknown kind of span 'casual' \(did you mean 'causal'\?\)",
        ),
        (
            [(0, 4, 5, 9, "full")],
            {},
            r"0 <= start <= stop <= seq_len = 8, got \(0, 4, 5, 9, 'full'",
        ),
        (
            [(4, 3, 0, 4, "full")],
            {},
            r"0 <= start <= stop <= seq_len = 8, got \(4, 3, 0, 4, 'full'",
        ),
        (
            [(0, 4, 0, 8, "full"), (2, 6, 2, 6, "causal")],
            {},
            r"got query 3 and key 2 in \(0, 4, 0, 8, 'full'\) and in \(2, 6, 2, 6, 'causal'\): cut",
        ),
        ([], {"causal": False}, "spans replace causal=False, got both"),
        ([], {"window": 0}, "a window is 1 or more and needs causal attention, got 0 with causal"),
        ([], {"cu_seqlens": [0, 9]}, r"ascending numbers from 0 to seq_len = 8, got \[0, 9\]"),
    ],
)
def test_what_makes_no_sense_is_refused(spans, settings, message: str) -> None:
    q = torch.ones(1, 8, 2, 8)
    with pytest.raises(ContextParallelError, match=message) as error:
        cp.attention(q, q, q, algo="ring", spans=spans, **settings)
    assert "\n" not in str(error.value)


@examples(100)
@given(st.randoms(use_true_random=False), st.integers(1, 24))
def test_pairs_that_are_named_twice_are_found(source: Random, seq_len: int) -> None:
    def edges() -> list[int]:
        return sorted(source.choices(range(seq_len + 1), k=2))

    spans = [(*edges(), *edges(), source.choice(KINDS)) for _ in range(source.randint(1, 4))]
    named = dense(spans, seq_len)
    if named.max() <= 1:
        assert Slices.of(spans, seq_len).bands.area(seq_len) == named.sum()
        return
    with pytest.raises(ContextParallelError, match="may name a query and a key once") as error:
        Slices.of(spans, seq_len)
    words = str(error.value).split("got query ")[1].split(" and key ")
    query, key = int(words[0]), int(words[1].split()[0])
    assert named[query, key] > 1


@pytest.mark.parametrize(
    ("maker", "message"),
    [
        (lambda: cp.spans.documents([0, 4, 2]), "documents needs a length of 0 or more, got -2"),
        (lambda: cp.spans.documents([0, 2.5]), "documents needs a whole number, got 2.5: cast"),
        (lambda: cp.spans.documents([0, 4], window=0), "got 0 with causal ones: leave window out"),
        (lambda: cp.spans.documents([0, 4], causal=False, window=2), "got 2 with full ones"),
        (lambda: cp.spans.prefix_lm(5, 4), "prefix_lm needs 5 tokens or more .*, got 4"),
        (lambda: cp.spans.shared_prefix((2, [-1])), "nodes of 0 or more tokens, got -1"),
        (lambda: cp.spans.image_blocks(4, [(2, 3), (0, 1)]), "ascending images .*: sort them"),
        (lambda: cp.spans.image_blocks(4, [(2, 5)]), "within 0 to 4, got"),
        (lambda: cp.spans.block_diffusion(4, 0), "a block of 1 or more tokens, got 0"),
    ],
)
def test_makers_refuse_what_makes_no_sense(maker, message: str) -> None:
    with pytest.raises(ContextParallelError, match=message):
        maker()


@pytest.mark.parametrize("numbers", [torch.tensor, np.array])
def test_makers_take_numbers_of_other_libraries(numbers) -> None:
    """And keep none: who gives a tensor may fill it anew for the next batch."""
    cu_seqlens = numbers([0, 3, 3, 8])
    made = cp.spans.documents(cu_seqlens)
    tokens, *children = numbers([2, 1, 2])
    tree = tokens, list(children)
    assert cp.spans.shared_prefix(tree) == cp.spans.shared_prefix((2, [1, 2]))
    assert cp.spans.shared_prefix_positions(tree) == [0, 1, 2, 2, 3]
    cu_seqlens[1:] = 4
    assert made == cp.spans.documents([0, 3, 3, 8])
    assert all(type(edge) is int for one in made for edge in one[:4])


def test_rollouts_of_one_prefix_are_two_kernel_calls() -> None:
    """However many they are: all of them against the prefix, and each against itself."""
    mask = Mask.of(Slices.of(cp.spans.shared_prefix((100, [50] * 8)), 500))
    prefix, rollouts = Span(0, 100), Span(100, 500)
    (full,) = plan_tiles((rollouts,), (prefix,), mask)
    assert (full.rows, full.cols, full.causal) == (400, 100, False)
    own = plan_tiles((rollouts,), (rollouts,), mask)
    (call,) = packed_calls(own, 4)
    assert call.packing.edges[0].tolist() == [[*range(0, 400, 50)], [*range(50, 401, 50)]]
