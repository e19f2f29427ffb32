"""Pictures of the matrix of scores, and the command that draws them."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import megatron_cp_plugin as cp
from megatron_cp_plugin import cli, registry
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.drawing import held, picture
from megatron_cp_plugin.planner.svg import color, matrix, scores_of

TOKENS = 72
MASKS = {
    "causal": Mask(),
    "full": Mask(causal=False),
    "window": Mask(window=9),
    "documents": Mask(documents=(5, 30, 31)),
}


def visible(mask: Mask, tokens: int) -> np.ndarray:
    """bool [N,N]: which keys a query sees, pair by pair."""
    seen = np.ones((tokens, tokens), bool)
    for query in range(tokens):
        for key in range(tokens):
            if mask.causal and key > query:
                seen[query, key] = False
            if mask.window is not None and key <= query - mask.window:
                seen[query, key] = False
            if any(min(query, key) < start <= max(query, key) for start in mask.documents):
                seen[query, key] = False
    return seen


@pytest.mark.parametrize(("size", "phase"), [(4, "forward"), (3, "backward")])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("algo", cp.available("softmax"))
def test_every_visible_score_and_no_other(algo: str, size: int, mask: str, phase: Phase) -> None:
    drawn = picture(algo, size, seq_len=TOKENS, mask=MASKS[mask], phase=phase)
    scores, seen = scores_of(drawn), visible(MASKS[mask], TOKENS)
    assert ((scores.part >= 0) == seen).all()
    steps = drawn.plan.steps // len(drawn.plan.groups)
    assert {part.step for part in scores.parts} <= set(range(steps))
    assert set(scores.part[seen].tolist()) == set(range(len(scores.parts)))


def test_work_of_a_contiguous_causal_ring() -> None:
    """The last of four ranks has 7 of 16 units where the mean is 4."""
    assert picture("ring", 4, seq_len=256).balance == "busiest rank: 1.75 of the mean"


def test_the_picture_paints_each_score_once() -> None:
    of = picture("distflash", 5, seq_len=60, mask=MASKS["window"])
    drawn = scores_of(of)
    root = ElementTree.fromstring(matrix(of))
    paths = [x for x in root.iter() if x.tag.endswith("path")]
    assert len(paths) == len(drawn.parts)
    for number, path in enumerate(paths):
        painted = np.zeros((60, 60), int)
        for x, y, w, h in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)", path.attrib["d"]):
            painted[int(y) : int(y) + int(h), int(x) : int(x) + int(w)] += 1
        assert (painted == (drawn.part == number)).all()
        assert path.attrib["fill"] == color(drawn.parts[number].ranks[0], 5)


def test_shares_of_heads_are_striped() -> None:
    drawn = picture("ulysses", 3, seq_len=TOKENS)
    scores = scores_of(drawn)
    assert {part.ranks for part in scores.parts} == {(0, 1, 2)}
    assert 'fill="url(#r0-1-2)"' in matrix(drawn)


def test_colors_differ() -> None:
    for size in (2, 8, 32):
        assert len({color(rank, size) for rank in range(size)}) == size


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "zigzag.svg"
    words = ["draw", "--algo", "zigzag", "--size", "2", "--tokens"]
    assert cli.main([*words, "--output", str(path)]) == 0
    drawn = picture("zigzag", 2, seq_len=64)
    assert path.read_text() == matrix(drawn)
    assert "1.00 of the mean" in capsys.readouterr().out
    assert cli.main([*words, "--seq-len", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["rank 0 holds tokens 0-1, 6-7", "rank 1 holds tokens 2-3, 4-5"]
    assert cli.main([*words, "--seq-len", "128K"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank 0 holds tokens 0-32767, 98304-131071",
        "rank 1 holds tokens 32768-65535, 65536-98303",
    ]
    assert cli.main("draw --algo ring --size 2 --tokens --seq-len 2".split()) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank 0 holds tokens 0",
        "rank 1 holds tokens 1",
    ]


@pytest.mark.parametrize(
    ("algo", "options"),
    [
        ("zigzag", {"layout": "documents"}),
        *((algo, {}) for algo in ("ring", "distflash", "zigzag", "attention2d")),
    ],
)
def test_each_token_is_held_once(algo: str, options: dict[str, object]) -> None:
    drawn = picture(algo, 4, seq_len=TOKENS, mask=MASKS["documents"], options=options)
    lines, owner = held(drawn), scores_of(drawn).owner.tolist()
    found = {}
    for rank, line in enumerate(lines):
        for run in line.removeprefix(f"rank {rank} holds tokens ").split(", "):
            first, _, last = run.partition("-")
            found |= dict.fromkeys(range(int(first), int(last or first) + 1), rank)
    assert [found[token] for token in range(TOKENS)] == owner
    layout = registry.layout_of(algo, options).for_documents(MASKS["documents"].documents)
    for rank in range(4):
        held_there = [x for span in layout.spans(rank, 4, TOKENS) for x in span.positions]
        assert [token for token in range(TOKENS) if found[token] == rank] == sorted(held_there)


@pytest.mark.parametrize(
    ("algo", "size", "seq_len", "said"),
    [
        ("ring", 64, None, "--tokens draws at most 32 ranks, got 64: leave --tokens out"),
        ("ring", 4, 4096, "--tokens draws each token, at most 512, got 4096: make --seq-len"),
    ],
)
def test_what_is_not_drawn(algo: str, size: int, seq_len: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        scores_of(picture(algo, size, seq_len=seq_len))
