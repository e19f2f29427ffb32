"""The script that counts what shared prefixes save."""

from argparse import Namespace
from itertools import pairwise

import numpy as np
import pytest
import rollout_packs


def test_counts_by_hand() -> None:
    """One prompt of 10 tokens with 2 answers of 5: 2 x 14 terms, of which 9 are shared."""
    prompt = np.arange(10)
    rollouts = [np.concatenate((prompt, np.full(5, answer))) for answer in (20, 21)]
    found = rollout_packs.row(rollouts, Namespace(size=1, budget=100, ranks=1))
    pairs, packed = 2 * 14 * 15 / 2, 9 * 10 / 2 + 2 * (5 * 9 + 5 * 6 / 2)
    assert found[:7] == ["2", "28", "20 in 1", "1.40x", f"{pairs / packed:.2f}x", "1.000", "1.000"]
    assert found[7] == "4"
    assert found[9] == "1.000"
    two = rollout_packs.row(rollouts, Namespace(size=1, budget=100, ranks=2))
    assert two[2] == "28 in 2"
    assert two[9] == "1.000"


def test_documents_share_evenly_what_zigzag_does_not() -> None:
    draw = np.random.default_rng(1)
    rollouts = list(rollout_packs.answers(draw, 1, 600, 6, 100))
    assert len({tuple(each[:600]) for each in rollouts}) == 1
    assert len(rollouts) == 6
    settings = Namespace(size=4, budget=2000, ranks=1)
    *_, zigzag, documents, _, _, _ = rollout_packs.row(rollouts, settings)
    assert float(documents) < 1.02 < 1.1 < float(zigzag)


def test_turns_of_agents_go_on() -> None:
    draw = np.random.default_rng(1)
    turns = list(rollout_packs.agents(draw, 1, 1, 4, each_turn=True))
    assert 2 <= len(turns) <= 6
    for before, after in pairwise(turns):
        assert np.array_equal(after[: len(before)], before)
    whole = list(rollout_packs.agents(np.random.default_rng(1), 1, 1, 4, each_turn=False))
    assert [each.tolist() for each in whole] == [turns[-1].tolist()]


@pytest.mark.slow
def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    rollout_packs.main(["--size", "2", "--budget", "64K"])
    said = capsys.readouterr().out
    assert all(name in said for name in rollout_packs.SETS)
