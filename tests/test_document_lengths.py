"""Distributions of lengths: what is drawn from them, and their words on the command line."""

import json
from argparse import ArgumentTypeError
from itertools import pairwise
from math import log
from pathlib import Path
from random import Random
from statistics import mean, stdev

import pytest

from megatron_cp_plugin.document_lengths import (
    Exponential,
    Histogram,
    LogNormal,
    lengths_of,
    random_documents,
)

LONG_TAIL = Path(__file__).parents[1] / "configs" / "lengths" / "long_tail.csv"


def drawn(words: str, count: int = 20_000) -> list[float]:
    lengths, source = lengths_of(words), Random(1)
    return [lengths.draw(source) for _ in range(count)]


def test_what_the_words_mean(tmp_path: Path) -> None:
    assert lengths_of("16K") == Exponential(16384)
    assert lengths_of("lognormal:4K:1.5") == LogNormal(4096, 1.5)
    pairs = [[128, 0.25], [1024, 0.75]]
    table, listed = tmp_path / "a.csv", tmp_path / "a.json"
    table.write_text("# of one corpus\nupper_edge,share\n128,0.25\n\n1024,0.75\n")
    listed.write_text(json.dumps(pairs))
    assert lengths_of(str(table)) == Histogram("as in a.csv", (128, 1024), (0.25, 0.75))
    assert lengths_of(str(listed)) == Histogram("as in a.json", (128, 1024), (0.25, 0.75))
    table.write_text("128,0.25\n1024,0.75\n")
    assert lengths_of(str(table)) == Histogram("as in a.csv", (128, 1024), (0.25, 0.75))


def test_moments() -> None:
    assert mean(drawn("1000")) == pytest.approx(1000, rel=0.03)
    lengths = drawn("lognormal:1000:0.8")
    assert mean(lengths) == pytest.approx(1000, rel=0.03)
    assert stdev(map(log, lengths)) == pytest.approx(0.8, rel=0.03)


def test_the_long_tail_is_as_published() -> None:
    lengths = drawn(str(LONG_TAIL), 100_000)
    assert min(lengths) >= 64
    for edge, share in ((512, 0.47), (2048, 0.87), (32768, 0.995)):
        assert sum(n <= edge for n in lengths) / len(lengths) == pytest.approx(share, abs=0.004)


def test_lengths_are_multiples_and_repeat() -> None:
    lengths = lengths_of("lognormal:300:1.5")
    starts = random_documents(64_000, lengths, multiple=16, seed=3)
    assert starts == random_documents(64_000, lengths, multiple=16, seed=3)
    assert starts != random_documents(64_000, lengths, multiple=16, seed=4)
    assert all(start % 16 == 0 for start in starts)
    whole = random_documents(64_000, lengths, seed=3)
    padded = [b - a for a, b in pairwise((0, *starts))]
    assert padded[:50] == [-(-(b - a) // 16) * 16 for a, b in pairwise((0, *whole))][:50]


@pytest.mark.parametrize(
    "words", ["", "0", "many", "lognormal:4K", "lognormal:0:1", "lognormal:4K:x"]
)
def test_other_words_are_refused(words: str) -> None:
    with pytest.raises(ArgumentTypeError, match="takes a mean such as 16K, lognormal:MEAN:SIGMA"):
        lengths_of(words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("upper,share\n100,x\n", "ValueError"),
        ("100\n", "ValueError"),
        ("", "ascending edges of more than 1 token"),
        ("200,1\n100,1\n", "ascending edges of more than 1 token"),
        ("100,0\n", "shares of 0 or more that are not all 0"),
        ("100,-1\n200,2\n", "shares of 0 or more that are not all 0"),
    ],
)
def test_other_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ArgumentTypeError, match=said):
        lengths_of(str(path))
    with pytest.raises(ArgumentTypeError, match="FileNotFoundError"):
        lengths_of(str(tmp_path / "b.csv"))
