"""Pictures of plans, and the command that draws them."""

import re

import pytest

import megatron_cp_plugin as cp
from megatron_cp_plugin import cli, registry
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.planner.drawing import Picture, _ranks, picture, text
from megatron_cp_plugin.planner.svg import scores_of


def draw(*words: str) -> int:
    return cli.main(["draw", *words])


SEQ_LEN = 4096
MASKS = {
    "causal": Mask(),
    "full": Mask(causal=False),
    "window": Mask(window=300),
    "documents": Mask(documents=random_documents(SEQ_LEN, SEQ_LEN // 6)),
}
PAPER = {"variant": "overlap"}


def cells_of(drawn: Picture) -> dict[tuple[int, int], list[str]]:
    """Lines of the cells of a printed schedule, by rank and step."""
    found: dict[tuple[int, int], list[str]] = {}
    rows = [row.split("│")[1:-1] for row in text(drawn).splitlines() if row.startswith("│")][1:]
    for rank, *cells in rows:
        now = int(rank) if rank.strip() else now  # noqa: F821 (of the row before)
        for step, line in enumerate(map(str.strip, cells)):
            if line:
                found.setdefault((now, step), []).append(line)
    return found


def numbers(words: str) -> set[int]:
    """Of "0,2-4" or "1-5:2"."""
    found: set[int] = set()
    for piece in words.split(","):
        run, _, step = piece.partition(":")
        first, _, last = run.partition("-")
        found.update(range(int(first), int(last or first) + 1, int(step or 1)))
    return found


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("algo", cp.available("softmax"))
def test_all_that_travels_and_is_computed_is_shown(algo: str, mask: str, phase: Phase) -> None:
    size, seq_len = 4, SEQ_LEN
    drawn = picture(algo, size, seq_len=seq_len, mask=MASKS[mask], phase=phase)
    pairs = sum(cell.pairs for step in drawn.steps for cell in step if cell)
    assert pairs == pytest.approx(MASKS[mask].bands.area(seq_len))
    shown = {
        (rank, step, line[0], end)
        for (rank, step), lines in cells_of(drawn).items()
        for line in lines[1:]
        for ends in re.findall(r" (?:from|to) ([\d:-]+(?:,[\d:-]+)*)", line)
        for end in numbers(ends)
    }
    algorithm = registry.create(algo, VirtualWorld(size).topology(0), {})
    plan = algorithm.plan(Shape(1, seq_len, 16, 16, 1), MASKS[mask], phase)
    expected = {
        (m.source, m.posted, "→", m.target) if m.result else (m.target, m.needed, "←", m.source)
        for m in plan.moves
    }
    assert shown == expected


def test_blocks_on_their_way() -> None:
    ring = cells_of(picture("zigzag", 3))
    assert ring[0, 1] == ["q0 k2", "← k2 from 2"]
    assert ring[0, 2] == ["q0 k1", "← k1 from 2"]
    helped = cells_of(picture("distflash", 4, options={"last_step": "owner"}))
    assert helped[0, 1] == ["q3 k0", "← q3 from 3", "→ o3 to 3"]
    assert helped[0, 2] == ["waits"]
    back = cells_of(picture("ring", 3, phase="backward", options={"backward": "kv"}))
    assert [back[2, step][2] for step in (1, 2)] == ["→ dk1 to 1", "→ dk0 to 0"]
    assert back[1, 1] == ["q1 k0", "← k0 from 0", "→ dk0 to 2"]
    grid = cells_of(picture("attention2d", 9))
    assert grid[0, 0] == ["q0-2 k0-6:3", "← q1-2 from 1-2, k3,6 from 3,6", "→ o1-2 to 1-2"]
    heads = cells_of(picture("ulysses", 3))
    assert heads[1, 0][1:] == ["← q0,2 from 0,2, k0,2 from 0,2", "→ o0,2 to 0,2"]


def test_who_waits_and_how_long() -> None:
    drawn = picture("distflash", 8, options={"last_step": "owner"})
    assert drawn.waiting == 4
    # Time in squares: half for the first step, one for each of four; work: P * P / 2 of them.
    assert drawn.idle_share == pytest.approx(1 - 32 / (8 * 4.5), abs=1e-3)
    assert picture("distflash", 8).waiting == 0
    assert picture("distflash", 8).idle_share == pytest.approx(0, abs=1e-12)
    assert picture("ring", 8).waiting == 28


@pytest.mark.parametrize("algo", ["ring", "ulysses", "attention2d"])
def test_a_mask_under_which_no_query_sees_a_key(algo: str) -> None:
    mask = Mask.of(Slices.of([], 64))
    drawn = picture(algo, 2, seq_len=64, mask=mask)
    assert drawn.steps == ()
    assert "waiting in 0 of 0 rank-steps" in text(drawn)
    assert scores_of(drawn).parts == ()
    assert drawn.balance == "no scores"


@pytest.mark.parametrize(("phase", "said"), [("forward", "outputs"), ("backward", "gradients")])
def test_results_are_partial_or_complete(phase: Phase, said: str) -> None:
    for algo, partial in (("distflash", "partial "), ("ulysses", "")):  # else of some heads
        assert f": {partial}{said} of its " in text(picture(algo, 4, phase=phase))


@pytest.mark.parametrize(
    ("owners", "text"),
    [((3,), "3"), ((2, 0, 1), "0-2"), ((0, 1, 3), "0-1,3"), ((1, 3, 5), "1-5:2"), ((0, 4), "0,4")],
)
def test_names_of_several_ranks(owners: tuple[int, ...], text: str) -> None:
    assert _ranks(owners) == text


def test_the_terminal_shows_ranks_by_steps(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--algo", "distflash", "--size", "4", "--seq-len", "400"]
    assert draw(*words, "--option", "last_step=owner") == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].rstrip() == "distflash, last_step=owner · 4 ranks · causal · 400 tokens · forward"
    )
    assert lines[-1].endswith("o1: partial outputs of its queries")
    assert any("waiting in 2 of 12 rank-steps" in line for line in lines)


def test_a_wide_table_is_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert draw("--algo", "ring", "--size", "24") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line[1:7].strip().isdigit() for line in lines if line.startswith("│")) == 24
    own = picture("ring", 24)
    texts = [cell.text if cell else "waits" for step in own.steps for cell in step]
    assert all(any(text in line for line in lines) for text in texts)


def test_options_and_the_full_mask(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--algo", "distflash", "--size", "3", "--option", "helpers=none"]
    assert draw(*words) == 0
    assert "waiting in 3 of 9" in capsys.readouterr().out
    assert draw(*words, "--mask", "full") == 0
    assert "waiting in 0 of 9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--algo", "distflsh", "--size", "4"), "did you mean 'distflash'"),
        (("--algo", "lasp", "--size", "4"), "which queries meet which keys, got lasp: use one of"),
        (("--algo", "ring", "--size", "2", "--documents", "9"), "--documents needs --seq-len"),
        (("--algo", "ring", "--size", "2", "--documents", "0"), "takes a mean such as 16K"),
        (("--algo", "ring", "--size", "0"), "--size takes a whole number above 0, got '0'"),
        (("--algo", "ring", "--size", "2", "--option", "x"), "--option takes KEY=VALUE"),
        (("--algo", "usp", "--size", "6", "--option", "ulysses=4"), "use one of 1, 2, 3, 6"),
        (("--algo", "ring", "--size", "2", "--output", "a.svg"), "--output needs --tokens, got"),
        (("--algo", "ring", "--size", "2", "--tokens", "--output", "a.pdf"), "change its ending"),
        (("--algo", "ring", "--size", "2", "--output", "nowhere/a.svg"), "no folder 'nowhere'"),
    ],
)
def test_errors_are_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert draw(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
