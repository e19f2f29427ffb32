"""Rollouts that share prefixes: packs of them are the rollouts one by one."""

import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_cp_plugin as cp
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.rollouts import _Tree
from tests.random_tests import examples
from tests.span_masks import dense

VOCABULARY = 7
SEEDS = st.integers(0, 1 << 32)

Rollouts = list[list[int]]
Weights = list[list[float]]


def random_rollouts(source: Random) -> tuple[Rollouts, Weights]:
    """Conversations of several prompts, whose turns part, stop, begin alike by chance, or come
    twice; a weight for each token, 0 for what the policy did not write.
    """

    def turn(least: int, most: int) -> list[int]:
        return source.choices(range(VOCABULARY), k=source.randint(least, most))

    def go_on(tokens: list[int], written: list[bool], depth: int) -> None:
        for _ in range(source.randint(1, 3)):
            said, tool = turn(1, 6), turn(0, 3)
            one = [*tokens, *said, *tool]
            flags = [*written, *[True] * len(said), *[False] * len(tool)]
            goes_on = depth and source.random() < 0.5
            if goes_on:
                go_on(one, flags, depth - 1)
            if not goes_on or source.random() < 0.5:
                found.append((one, flags))

    system = turn(0, 3)
    found: list[tuple[list[int], list[bool]]] = []
    for _ in range(source.randint(1, 3)):
        prompt = [*(system if source.random() < 0.8 else []), *turn(1, 6)]
        go_on(prompt, [False] * len(prompt), source.randint(0, 2))
    if source.random() < 0.3:
        found.append(source.choice(found))
    source.shuffle(found)
    # Of rollouts that are the same an advantage of its own each.
    weights = [
        [flag * advantage for flag in flags]
        for advantage, (_, flags) in ((source.uniform(-1, 1), one) for one in found)
    ]
    return [tokens for tokens, _ in found], weights


def terms_of(rollouts: Rollouts) -> set[tuple[int, ...]]:
    """Different loss terms: the tokens up to their label."""
    return {tuple(each[:stop]) for each in rollouts for stop in range(2, len(each) + 1)}


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("bounded", [False, True])
@examples(60)
@given(SEEDS)
def test_packs_have_each_term_once(bounded: bool, multiple: int, seed: int) -> None:
    source = Random(seed)
    rollouts, weights = random_rollouts(source)
    longest = -(-(max(map(len, rollouts)) - 1) // multiple) * multiple
    budget = longest + source.randint(0, 40) if bounded else None
    packs = cp.pack_rollouts(rollouts, weights, budget=budget, multiple=multiple)
    assert len(packs) == 1 or bounded
    numbers = [number for pack in packs for number in pack.rollouts]
    assert sorted(numbers) == list(range(len(rollouts)))
    for pack in packs:
        length = len(pack.tokens)
        terms = terms_of([rollouts[number] for number in pack.rollouts])
        assert length == -(-len(terms) // multiple) * multiple
        assert budget is None or length <= budget
        assert list(pack.rollouts) == sorted(pack.rollouts)
        seen, sums = dense(pack.spans, length), torch.zeros(length, dtype=torch.float64)
        assert seen.max() == 1
        for number, places in zip(pack.rollouts, pack.places, strict=True):
            rollout = torch.tensor(rollouts[number])
            assert torch.equal(pack.tokens[places], rollout[:-1])
            assert torch.equal(pack.labels[places], rollout[1:])
            assert torch.equal(pack.positions[places], torch.arange(len(places)))
            for place, own in zip(places.tolist(), seen[places], strict=True):
                before = places[: int(pack.positions[place]) + 1]
                assert own.nonzero().flatten().tolist() == sorted(before.tolist())
            sums[places] += torch.tensor(weights[number][1:], dtype=torch.float64)
        assert torch.equal(pack.weights, sums)
        assert not seen[len(terms) :].any()
        for numbers_of in (pack.tokens, pack.labels, pack.positions, pack.weights):
            assert not numbers_of[len(terms) :].any()


def test_by_hand() -> None:
    rollouts = [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 4]]
    (pack,) = cp.pack_rollouts(rollouts, [[0, 0, 1, 2], [0, 0, 3, 4], [9, 0, 5]], multiple=4)
    assert pack.tokens.tolist() == [5, 6, 6, 7, 7, 0, 0, 0]
    assert pack.labels.tolist() == [6, 4, 7, 8, 9, 0, 0, 0]
    assert pack.positions.tolist() == [0, 1, 1, 2, 2, 0, 0, 0]
    assert pack.weights.tolist() == [0, 5, 4, 2, 4, 0, 0, 0]
    assert [each.tolist() for each in pack.places] == [[0, 2, 3], [0, 2, 4], [0, 1]]
    picture = ["".join("x" if x else "." for x in row) for row in dense(pack.spans, 5).tolist()]
    assert picture == ["x....", "xx...", "x.x..", "x.xx.", "x.x.x"]
    back = pack.per_rollout(torch.arange(8.0)[None])
    assert [each.tolist() for each in back] == [[0, 2, 3], [0, 2, 4], [0, 1]]


def test_what_goes_on_alone_is_one_slice() -> None:
    """As turns of a conversation that are rollouts each."""
    (pack,) = cp.pack_rollouts([[1, 2, 3, 4, 5], [1, 2], [1, 2, 3], [1, 2, 3]])
    assert pack.spans == [(0, 4, 0, 4, "causal")]
    assert pack.weights.tolist() == [4, 3, 1, 1]


def test_one_prompt_with_many_answers_has_one_slice_for_each_and_two_more() -> None:
    (pack,) = cp.pack_rollouts([[0, 1, 2, answer, 3, 4, 5] for answer in range(8)])
    assert len(pack.tokens) == 2 + 8 * 4
    assert len(pack.spans) == 10


def test_packs_share_what_they_can() -> None:
    """Two prompts of 40 tokens with answers of 10 each: packs of one prompt, with 6 answers."""
    rollouts = [[prompt] * 40 + [answer] * 10 for answer in range(4, 16) for prompt in (1, 2)]
    packs = cp.pack_rollouts(rollouts, budget=100)
    assert [len(pack.tokens) for pack in packs] == [39 + 6 * 10] * 4
    for pack in packs:
        assert len({rollouts[number][0] for number in pack.rollouts}) == 1
    packs = cp.pack_rollouts(rollouts, budget=160)  # one whole subtree fits, two do not
    assert [len(pack.tokens) for pack in packs] == [159, 159]


@examples(40)
@given(SEEDS)
def test_packs_for_ranks_are_about_equal(seed: int) -> None:
    source = Random(seed)
    rollouts, _ = random_rollouts(source)
    ranks = source.randint(2, 4)
    token_work = source.choice([0, 1, 50])
    longest = max(map(len, rollouts)) - 1
    budget = source.choice([None, longest, 3 * longest])
    packs = cp.pack_rollouts(rollouts, budget=budget, ranks=ranks, token_work=token_work)
    assert len(packs) % ranks == 0
    assert sorted(n for pack in packs for n in pack.rollouts) == list(range(len(rollouts)))
    assert budget is None or max(len(pack.tokens) for pack in packs) <= budget
    tokens = [len(pack.tokens) for pack in packs]
    pairs = [int(dense(pack.spans, len(pack.tokens)).sum()) for pack in packs]
    works = [token_work * n + seen for n, seen in zip(tokens, pairs, strict=True)]
    fillers = [at for at, pack in enumerate(packs) if not pack.rollouts]
    assert all(len(pack.rollouts) < 2 for pack in packs) or not fillers
    assert len(fillers) < ranks
    for at in fillers:
        works[at] = 0
        assert not packs[at].weights.any()
        assert packs[at].per_rollout(torch.ones(len(packs[at].tokens))) == []
    loads = [sum(works[rank::ranks]) for rank in range(ranks)]
    # Dealing leaves less than the largest pack between two ranks, where counts need not be equal.
    assert max(loads) - min(loads) <= max(works)
    for rank in range(ranks):
        assert works[rank::ranks] == sorted(works[rank::ranks], reverse=True)


def test_packs_for_ranks_by_hand() -> None:
    """Prompts of 40 tokens with answers of 10 each: 12 for one prompt, and 4 for the other."""
    rollouts = [[1] * 40 + [answer] * 10 for answer in range(4, 16)]
    rollouts += [[2] * 40 + [answer] * 10 for answer in range(4, 8)]
    packs = cp.pack_rollouts(rollouts, ranks=2)
    assert [len(pack.tokens) for pack in packs] == [39 + 10 * 10, 39 + 2 * 10 + 39 + 4 * 10]
    packs = cp.pack_rollouts(rollouts, ranks=4, token_work=1000)
    assert len(packs) == 4
    assert max(len(pack.tokens) for pack in packs) <= 39 + 5 * 10


def test_no_rollouts_make_no_packs() -> None:
    assert cp.pack_rollouts([]) == cp.pack_rollouts([], [], budget=8) == []


def test_any_integers_and_masks_are_taken() -> None:
    kinds: list[Any] = [torch.tensor([1, 2, 3], dtype=torch.int32), np.array([1, 2, 4]), (1, 2)]
    masks: list[Any] = [torch.tensor([False, True, True]), np.array([0, 1, 0]), [0, 0.5]]
    (pack,) = cp.pack_rollouts(kinds, masks)
    assert pack.labels.tolist() == [2, 3, 4]
    assert pack.weights.tolist() == [2.5, 1, 0]


def test_a_batch_for_megatron() -> None:
    (pack,) = cp.pack_rollouts([[5, 6, 7], [5, 6, 8]], multiple=2)
    batch = pack.batch()
    assert {key: batch[key].tolist() for key in ("tokens", "labels", "loss_mask")} == {
        "tokens": [[5, 6, 6, 0]],
        "labels": [[6, 7, 8, 0]],
        "loss_mask": [[2, 1, 1, 0]],
    }
    assert batch["loss_mask"].dtype == torch.float32
    assert batch["attention_spans"] is pack.spans
    for key in ("position_ids", "attention_positions"):
        assert batch[key].tolist() == [[0, 1, 1, 0]]


def test_the_snippet_of_the_page_on_rollouts() -> None:
    page = (Path(__file__).parents[1] / "docs" / "rollouts.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert len(names["log_probs"]) == len(names["pack"].rollouts)
    assert names["loss"].shape == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rollouts": None}, "rollouts need to be lists of tokens, got None"),
        ({"rollouts": "words"}, "a rollout is a list of tokens, got 'w' as number 0"),
        ({"rollouts": [[1, 2], [3]]}, "2 tokens or more, .*, got 1 in number 1: leave it out"),
        ({"rollouts": [[1.0, 2.0]]}, "list of tokens, got [1.0, 2.0] as number 0: pass whole"),
        ({"rollouts": [[[1, 2]]]}, "list of tokens, got [[1, 2]] as number 0: pass whole"),
        ({"rollouts": ["abc"]}, "a rollout is a list of tokens, got 'abc' as number 0: pass whole"),
        ({"rollouts": [[1, -2, 3]]}, "tokens need to be 0 or more, got -2 in rollout 0"),
        ({"rollouts": [[1, 10**30]]}, "a rollout is a list of tokens, got [1, 10"),
        ({"weights": [[1, 1, 1]] * 2}, "for each token of the 1 rollouts, got 2: tokens of"),
        ({"weights": [[1]]}, "1 rollouts, got [1] for number 0: tokens of a prompt"),
        ({"weights": [[0.0, float("nan"), 1.0]]}, "weights need to be finite, got others for"),
        ({"weights": ["many"]}, "weights need a list of numbers for each rollout, got ['many']"),
        ({"budget": 1, "multiple": 4}, "in multiples of 4 needs .* takes 2: raise it to 4"),
        ({"multiple": 0}, "multiple needs 1 or more tokens, got 0"),
        ({"ranks": 0}, "ranks needs 1 or more data-parallel ranks, got"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], words: str) -> None:
    pattern = re.escape(words).replace(r"\.\*", ".*")
    with pytest.raises(ContextParallelError, match=pattern) as error:
        cp.pack_rollouts(**({"rollouts": [[1, 2, 3]]} | given))
    assert "\n" not in str(error.value)


def test_numbers_of_another_length_are_refused() -> None:
    (pack,) = cp.pack_rollouts([[1, 2], [1, 2, 3, 4, 5, 6]])
    with pytest.raises(ContextParallelError, match=r"the pack's 5 tokens, got \[1, 3\]: unshard"):
        pack.per_rollout(torch.zeros(1, 3))


def test_more_ranks_than_anyone_has() -> None:
    assert len(cp.pack_rollouts([[1, 2, 3], [1, 2, 4]], ranks=100_000)) == 100_000


def test_halves_of_a_pack_have_about_equal_work() -> None:
    """Three short rollouts on one side, a long one on the other."""
    tree = _Tree(np.array([2, 2, 2, 10]), np.zeros(4, np.int64), token_work=0)
    assert tree._halves([0, 1, 2, 3]) == ([0, 1, 2], [3])
