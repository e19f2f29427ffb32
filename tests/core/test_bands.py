"""Bands: which keys each query sees, against a mask of all pairs."""

from itertools import accumulate
from random import Random

import pytest
import torch

from megatron_cp_plugin.core.masks.bands import Bands
from megatron_cp_plugin.core.masks.slices import Slices
from tests.span_masks import dense, random_spans

SEQ_LEN = 40


@pytest.mark.parametrize("seed", range(30))
def test_bands_are_their_pairs(seed: int) -> None:
    """Counted by row, by column and in all, also of a beginning, a window, and documents."""
    random = Random(seed)
    spans = random_spans(random, SEQ_LEN)
    seen, bands = dense(spans, SEQ_LEN), Slices.of(spans, SEQ_LEN).bands
    part, window = random.randint(1, SEQ_LEN), random.randint(1, SEQ_LEN)
    documents = sorted(random.sample(range(1, SEQ_LEN), random.randint(0, 6)))
    position = torch.arange(SEQ_LEN)
    near = position[:, None] - position < window
    number = torch.bucketize(position, torch.tensor(documents), right=True)
    for found, want in (
        (bands, seen),
        (bands.transposed, seen.T),
        (bands.restricted_to_window(window), seen & near),
        (bands.of_each(documents), seen & (number[:, None] == number)),
    ):
        for count in (SEQ_LEN, part):
            some = want[:count, :count]
            assert found.keys_of(count).tolist() == some.sum(1).tolist()
            assert found.area(count) == some.sum()
        assert (found.table[::2] < found.table[1::2])[:2].all()  # none is empty


@pytest.mark.parametrize("seed", range(30))
def test_a_staircase_is_one_band_and_triangles(seed: int) -> None:
    """Also one that begins with fewer keys than queries, beside other spans of the same rows, and
    one that documents cut.
    """
    random = Random(seed)
    edges = sorted(random.sample(range(3, SEQ_LEN // 2 - 2), 6))
    right, shift = random.choice([0, SEQ_LEN // 2]), random.randint(-3, 3)
    k_start = right + max(0, edges[1] + shift - random.randint(1, 8))
    kinds = random.choices(["full", "causal"], k=len(edges) - 1)
    spans = [
        (first, last, k_start, right + last + shift, kind)
        for first, last, kind in zip(edges, edges[1:], kinds, strict=False)
    ]
    other = [(*edges[::5], SEQ_LEN // 2 - right, SEQ_LEN // 2 - right + 3, "full")] if right else []
    found = Slices.of(spans + other, SEQ_LEN)
    several = sum(kind == "full" and b - a > 1 for a, b, *_, kind in spans)
    assert len(found.bands) <= 1 + several + len(other)
    for documents in ((), (edges[2], right + 7)):
        cut = Slices.of(spans + other, SEQ_LEN, tuple(sorted(set(documents))))
        seen = dense(spans + other, SEQ_LEN, [0, *cut.documents, SEQ_LEN])
        assert seen.max() == 1
        assert cut.bands.keys_of(SEQ_LEN).tolist() == seen.sum(1).tolist()
        assert cut.bands.transposed.keys_of(SEQ_LEN).tolist() == seen.sum(0).tolist()


def test_of_documents() -> None:
    """A band each, the last of which ends where a sequence does."""
    lengths = [3, 1, 6]
    *starts, total = accumulate(lengths)
    for low, high in ((None, 0), (None, None), (-1, 1)):
        bands = Bands.of_documents(starts, low, high)
        want = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()
        if high is not None:
            want = want.tril(high)
        if low is not None:
            want = want.triu(low)
        assert len(bands) == len(lengths)
        assert bands.keys_of(total).tolist() == want.sum(1).tolist()
