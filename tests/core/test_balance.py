"""Layouts that give ranks equal work, whatever the documents or spans."""

from bisect import bisect_right
from itertools import accumulate, pairwise, product
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.layout import positions
from megatron_cp_plugin.core.layouts.balance import deal
from megatron_cp_plugin.core.layouts.document_layout import Balanced
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.tiles import Mask, visible_pairs
from megatron_cp_plugin.document_lengths import lengths_of, random_documents
from tests.random_tests import examples
from tests.span_masks import dense, random_spans

LONG_TAIL = str(Path(__file__).parents[2] / "configs" / "lengths" / "long_tail.csv")


@pytest.mark.parametrize("size", [2, 3, 8, 16, 32, 64])
@pytest.mark.parametrize("words", ["2K", "16K", "lognormal:4K:1.5", LONG_TAIL])
def test_ranks_have_equal_work_whatever_the_documents(words, size):
    """The zigzag layout leaves ranks waiting for a fifth to half of the time."""
    seq_len = 8192 * size
    for seed in range(4):
        mask = Mask(documents=random_documents(seq_len, lengths_of(words), seed=seed))
        bounds = torch.tensor((0, *mask.documents, seq_len))
        tokens = torch.arange(seq_len)
        seen = 1 + tokens - bounds[torch.bucketize(tokens, bounds, right=True) - 1]
        layout = Balanced(mask.documents)
        work = [int(seen[positions(layout, r, size, seq_len)].sum()) for r in range(size)]
        assert sum(work) == visible_pairs(seq_len, mask)
        assert max(work) <= 1.02 * sum(work) / size


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", ["prefix", "images", "diffusion", "prefix_lm", "sequences"])
def test_ranks_have_equal_work_whatever_the_spans(name, size):
    """The zigzag layout has up to 1.28 times the mean on a rank. In few parts a rank."""
    seq_len = 1024 * size
    eighth = seq_len // 16
    spans = {
        "prefix": cp.spans.shared_prefix((seq_len // 2, [eighth] * 8)),
        "images": cp.spans.image_blocks(
            seq_len, [(n, n + 99) for n in range(0, seq_len - 99, 400)]
        ),
        "diffusion": cp.spans.block_diffusion(seq_len // 2, 64),
        "prefix_lm": cp.spans.prefix_lm(seq_len // 3, seq_len),
        "sequences": cp.spans.prefix_lm(seq_len // 3, seq_len // 2)
        + cp.spans.image_blocks(seq_len // 2, [(0, 100)], start=seq_len // 2),
    }[name]
    seen = dense(spans, seq_len).sum(1) if seq_len <= 2048 else None
    slices = Slices.of(spans, seq_len)
    layout, keys = Balanced().within(slices), torch.from_numpy(slices.bands.keys_of(seq_len))
    if seen is not None:
        assert torch.equal(keys, seen)
    held = [positions(layout, rank, size, seq_len) for rank in range(size)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(seq_len))
    assert {len(own) for own in held} == {seq_len // size}
    work = [int(keys[own].sum()) for own in held]
    assert max(work) <= 1.03 * sum(work) / size
    assert max(len(layout.spans(rank, size, seq_len)) for rank in range(size)) <= 12


@pytest.mark.parametrize("seed", range(30))
def test_keys_of_each_query(seed):
    spans = random_spans(Random(seed), 40)
    assert Slices.of(spans, 40).bands.keys_of(40).tolist() == dense(spans, 40).sum(1).tolist()


def parts_of(layout, size, seq_len):
    """By document: (rank, number of tokens before the part, tokens) of each part, ascending."""
    bounds = (0, *layout.documents, seq_len)
    found = {number: [] for number in range(len(bounds) - 1)}
    for rank in range(size):
        for span, (number, edges) in product(
            layout.spans(rank, size, seq_len), enumerate(pairwise(bounds))
        ):
            start, stop = max(span.start, edges[0]), min(span.stop, edges[1])
            if start < stop:
                found[number].append((rank, start - edges[0], stop - start))
    return {number: sorted(parts, key=lambda part: part[1]) for number, parts in found.items()}


def test_few_documents_are_cut():
    """About one a rank, nearly all so that keys go to ranks further up only."""
    size, cut, ascending = 32, 0, 0
    for seed in range(4):
        documents = random_documents(8192 * size, lengths_of(LONG_TAIL), seed=seed)
        for parts in parts_of(Balanced(documents), size, 8192 * size).values():
            cut += len(parts) > 1
            ascending += len(parts) > 1 and all(a[0] <= b[0] for a, b in pairwise(parts))
    assert cut <= 4 * size * 1.1
    assert ascending >= 0.9 * cut


def test_a_long_document_is_on_as_few_ranks_as_its_work_allows():
    """Two of 16K tokens on 4 ranks: two each. One beside 112 short ones, of which no rank could
    hold enough for its share: one chunk on each, the shorter the later.
    """
    for parts in parts_of(Balanced((16384,)), 4, 32768).values():
        assert len({rank for rank, *_ in parts}) == 2
    long, *_ = parts_of(Balanced(tuple(range(16384, 131072, 1024))), 16, 131072).values()
    assert [rank for rank, *_ in long] == list(range(16))
    assert [tokens for *_, tokens in long[1:]] == sorted(
        (tokens for *_, tokens in long[1:]), reverse=True
    )


def test_one_document_in_all_is_zigzag():
    """Where there is nothing light but its own beginning."""
    assert deal([(0, 64)], 4, lambda start, stop: (stop - start) * (start + stop + 1) // 2) == [
        [(24, 40)],
        [(40, 48), (16, 24)],
        [(48, 56), (8, 16)],
        [(56, 64), (0, 8)],
    ]


def test_equal_parts_stay_whole():
    dealt = deal([(n, n + 8) for n in range(0, 64, 8)], 4, lambda start, stop: stop - start)
    assert sorted(rows for rank in dealt for rows in rank) == [(n, n + 8) for n in range(0, 64, 8)]
    assert [len(rank) for rank in dealt] == [2] * 4


@examples(200)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 8), st.data())
def test_any_work_is_dealt(lengths, size, data):
    """Of any mask: rows in all, and equally many; work of some of them may not divide."""
    weights = [data.draw(st.integers(1, 5)) for _ in lengths]
    bounds = list(accumulate(lengths, initial=0))

    def work(start, stop):
        part = bisect_right(bounds, start) - 1
        return 0 if start == stop else weights[part] * (stop - start)

    dealt = deal(list(pairwise(bounds)), size, work)
    rows = sorted(row for rank in dealt for start, stop in rank for row in range(start, stop))
    assert rows == list(range(bounds[-1]))
    counts = [sum(stop - start for start, stop in rank) for rank in dealt]
    assert max(counts) - min(counts) <= 1
