"""Layouts that follow documents, or spans: equal work, few parts, and padded documents."""

from itertools import batched, pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_cp_plugin as cp
from megatron_cp_plugin import registry
from megatron_cp_plugin.core.balance import TEAM
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.document_layout import Balanced, BalancedTeams
from megatron_cp_plugin.core.layout import positions
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import lengths_of, random_documents
from megatron_cp_plugin.errors import ContextParallelError
from tests.span_masks import dense

LONG_TAIL = str(Path(__file__).parents[2] / "configs" / "lengths" / "long_tail.csv")


@pytest.mark.parametrize("size", [2, 3, 8, 16, 32, 64])
@pytest.mark.parametrize("words", ["2K", "16K", "lognormal:4K:1.5", LONG_TAIL])
def test_ranks_have_equal_work_whatever_the_documents(words, size):
    """The zigzag layout leaves ranks waiting for a fifth to half of the time.

    A rank, or a team of eight, has its share of what the ranks before it have as well; a key that
    comes from others counts as 144 pairs of its own, at most a 32nd of a row's in the mean.
    """
    team, seq_len = TEAM if size % TEAM == 0 and size > TEAM else 1, 8192 * size
    for seed in range(4):
        mask = Mask(documents=random_documents(seq_len, lengths_of(words), seed=seed))
        bounds = torch.tensor((0, *mask.documents, seq_len))
        tokens = torch.arange(seq_len)
        document = torch.bucketize(tokens, bounds, right=True) - 1
        seen = 1 + tokens - bounds[document]
        of_a_key = min(144, mask.bands.area(seq_len) // seq_len // 32)
        layout, works, costs = Balanced(mask.documents), [], []
        for first in range(0, size, team):
            of_team = range(first, first + team)
            own = torch.cat([positions(layout, rank, size, seq_len) for rank in of_team])
            last = torch.full_like(bounds, -1).scatter_reduce(0, document[own], own, "amax")
            needed = tokens <= last[document]
            needed[own] = False
            works.append(int(seen[own].sum()))
            costs.append(works[-1] + of_a_key * int(needed.sum()))
        assert sum(works) == mask.bands.area(seq_len)
        for rank, cost in enumerate(costs):
            assert cost <= 1.02 * (cost + sum(works[:rank])) / (rank + 1)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("words", ["2K", "16K", LONG_TAIL])
def test_keys_of_other_ranks_are_little_work_beside_many_tokens(words, size):
    """Pairs alone, with 32K tokens a rank: within 6% of the mean."""
    seq_len = 32768 * size
    for seed in range(4):
        mask = Mask(documents=random_documents(seq_len, lengths_of(words), seed=seed))
        bounds = torch.tensor((0, *mask.documents, seq_len))
        tokens = torch.arange(seq_len)
        seen = 1 + tokens - bounds[torch.bucketize(tokens, bounds, right=True) - 1]
        layout = Balanced(mask.documents)
        work = [int(seen[positions(layout, r, size, seq_len)].sum()) for r in range(size)]
        assert max(work) <= 1.06 * sum(work) / size


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
    layout, keys = Balanced().for_documents(slices), torch.from_numpy(slices.bands.keys_of(seq_len))
    if seen is not None:
        assert torch.equal(keys, seen)
    held = [positions(layout, rank, size, seq_len) for rank in range(size)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(seq_len))
    assert {len(own) for own in held} == {seq_len // size}
    work = [int(keys[own].sum()) for own in held]
    assert max(work) <= 1.03 * sum(work) / size
    assert max(len(layout.spans(rank, size, seq_len)) for rank in range(size)) <= 12


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


@pytest.mark.parametrize(("size", "members"), [(4, 2), (6, 3), (12, 4), (16, 8), (64, 8), (6, 4)])
def test_the_ranks_of_a_team_have_its_tokens_in_order(size, members):
    """Equally many, in all those that the team has where each rank has equal work. Nobody has such
    teams of four among six ranks.
    """
    seq_len = 512 * size + size // 2
    documents = random_documents(seq_len, lengths_of(LONG_TAIL), seed=1)
    layout = registry.layout_of("usp", {"layout": "documents", "ulysses": members})
    layout = layout.for_documents(documents)
    assert layout == BalancedTeams(documents, members) != Balanced(documents)
    found, ranks = (
        [positions(x, rank, size, seq_len) for rank in range(size)]
        for x in (layout, Balanced(documents))
    )
    assert [*map(len, found)] == [*map(len, ranks)]
    for team, same in zip(batched(found, members), batched(ranks, members), strict=True):
        whole = torch.cat(same)
        assert torch.equal(torch.cat(team), whole if size % members else whole.sort().values)


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
    hold enough for its share: one chunk on each, in a team the shorter the later.
    """
    for parts in parts_of(Balanced((16384,)), 4, 32768).values():
        assert len({rank for rank, *_ in parts}) == 2
    long, *_ = parts_of(Balanced(tuple(range(16384, 131072, 1024))), 16, 131072).values()
    assert [rank for rank, *_ in long] == list(range(16))
    for team in (long[1:TEAM], long[TEAM:]):
        tokens = [tokens for *_, tokens in team]
        assert tokens == sorted(tokens, reverse=True)


documents = st.lists(st.integers(1, 200), max_size=12)


@given(documents, st.integers(1, 9), st.integers(1, 400))
def test_a_layout_that_follows_documents(starts, size, seq_len):
    """Each token on one rank, equally many on each if they can be, local ones in their order."""
    layout = Balanced().for_documents(tuple(sorted({n for n in starts if n < seq_len})))
    held = [positions(layout, rank, size, seq_len).tolist() for rank in range(size)]
    assert sorted(token for mine in held for token in mine) == list(range(seq_len))
    assert all(mine == sorted(mine) for mine in held)
    if layout.documents:
        assert {len(mine) for mine in held} <= {seq_len // size, -(-seq_len // size)}


def test_a_rank_holds_two_chunks_of_each_document() -> None:
    """By hand: documents of 4 and 8 tokens on two ranks."""
    tokens = torch.arange(12)
    held = run_virtual(
        2,
        lambda topology: cp.shard(
            tokens, 0, algo="ulysses", layout="thd", cu_seqlens=[0, 4, 12], group=topology
        ),
    )
    assert [mine.tolist() for mine in held] == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]


def test_lengths_that_are_not_padded_are_refused() -> None:
    message = (
        r"the thd layout needs lengths of documents divisible by 2 \* context_parallel_size = 4, "
        r"got 6 tokens in document 2 of 2: pad it to 8"
    )

    def shard(topology: Topology) -> None:
        q = torch.ones(1, 5, 2, 8)
        settings = {"algo": "ring", "layout": "thd", "group": topology, "cu_seqlens": [0, 4, 10]}
        with pytest.raises(ContextParallelError, match=message):
            cp.attention(q, q, q, **settings)
        with pytest.raises(ContextParallelError, match=message):
            cp.shard(torch.ones(10), 0, **settings)
        with pytest.raises(ContextParallelError, match=r"from 0 to seq_len = 10, got \[0, 4, 12\]"):
            cp.attention(q, q, q, **settings | {"cu_seqlens": [0, 4, 12]})

    run_virtual(2, shard)
