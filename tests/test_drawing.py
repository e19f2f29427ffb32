"""Pictures of plans, and the command that draws them."""

from pathlib import Path

import pytest

import megatron_cp_plugin as cp
from megatron_cp_plugin import cli, registry
from megatron_cp_plugin.core.tiles import Mask, visible_pairs
from megatron_cp_plugin.core.virtual import VirtualWorld
from megatron_cp_plugin.drawing import _ranks, picture, table_width
from megatron_cp_plugin.figures import save


def draw(*words: str) -> int:
    return cli.main(["draw", *words])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("algo", cp.available("softmax"))
def test_every_algorithm_can_be_drawn(algo: str, causal: bool, tmp_path: Path) -> None:
    mask = Mask(causal)
    drawn = picture(algo, 4, seq_len=64, mask=mask)
    pairs = sum(cell.pairs for step in drawn.steps for cell in step if cell)
    assert pairs == pytest.approx(visible_pairs(64, mask))
    save(drawn, tmp_path / "plan.svg")
    assert "<svg" in (tmp_path / "plan.svg").read_text()


def test_who_waits_and_how_long() -> None:
    drawn = picture("distflash", 8, options={"last_step": "owner"})
    assert drawn.waiting == 4
    # Time in squares: half for the first step, one for each of four; work: P * P / 2 of them.
    assert drawn.idle_share == pytest.approx(1 - 32 / (8 * 4.5), abs=1e-3)
    assert picture("distflash", 8).waiting == 0
    assert picture("distflash", 8).idle_share == pytest.approx(0, abs=1e-12)
    assert picture("ring", 8).waiting == 28
    assert picture("zigzag", 8).idle_share == pytest.approx(0, abs=1e-12)


def test_cells_name_the_blocks() -> None:
    first, second = picture("distflash", 3).steps
    assert [cell.text if cell else None for cell in first] == ["q0 k0", "q1 k1", "q2 k2"]
    assert [cell.text if cell else None for cell in second] == ["q2 k0", "q1 k0", "q2 k1"]
    assert [cell.queries if cell else None for cell in second] == ["others", "own", "own"]


def test_linear_attention_by_states(tmp_path: Path) -> None:
    own, states = picture("lasp", 4, seq_len=64).steps
    assert [cell.text if cell else None for cell in own] == ["q0 k0", "q1 k1", "q2 k2", "q3 k3"]
    assert [cell.text if cell else None for cell in states] == [None, "q1 S0", "q2 S0-1", "q3 S0-2"]
    # Of 3 products a token, rank 0 spares one.
    drawn = picture("lasp2", 4, seq_len=64)
    assert drawn.idle_share == pytest.approx(1 / 12)
    save(drawn, tmp_path / "plan.svg")
    assert "q3 S0-2" in (tmp_path / "plan.svg").read_text()


def test_linear_attention_by_heads() -> None:
    drawn = picture("linear_ulysses", 4, seq_len=64)
    (step,) = drawn.steps
    assert [cell.text if cell else None for cell in step] == ["q0-3 k0-3 1/4 heads"] * 4
    assert drawn.idle_share == 0


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_every_token_meets_the_states_of_all_that_it_sees(layout: str, causal: bool) -> None:
    size, seq_len = 3, 24
    algorithm = registry.create_linear("lasp2", VirtualWorld(size).topology(0), {"layout": layout})
    held = [
        [n for span in algorithm.layout.spans(rank, size, seq_len) for n in (span.start, span.stop)]
        for rank in range(size)
    ]
    met: dict[int, set[int]] = {rank: set() for rank in range(size)}
    for work in algorithm.trace(seq_len, causal=causal):
        met[work.host] |= set(work.state_owners)
        # A rank's own runs: the state and the output; else what came before a run.
        runs = 1 if layout == "contiguous" else 2
        assert work.products in ({2 * 8} if not work.state_owners else {8, 8 // runs})
    for rank in range(size):
        seen = {
            other for other in range(size) if not causal or min(held[other]) < max(held[rank]) - 1
        }
        if layout == "contiguous":
            seen -= {rank}
        assert met[rank] == seen


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
    row = next(line for line in lines if line.startswith("│    0 "))
    assert row.replace("│", "").split() == ["0", "q0", "k0", "q3", "k0", "waits"]
    assert any("waiting in 2 of 12 rank-steps" in line for line in lines)


def test_a_wide_table_is_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert draw("--algo", "ring", "--size", "24") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line[1:6].strip().isdigit() for line in lines if line.startswith("│")) == 24
    assert max(map(len, lines)) <= table_width(picture("ring", 24))


def test_options_and_the_full_mask(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--algo", "distflash", "--size", "3", "--option", "balanced=false"]
    assert draw(*words) == 0
    assert "waiting in 3 of 9" in capsys.readouterr().out
    assert draw(*words, "--mask", "full") == 0
    assert "waiting in 0 of 9" in capsys.readouterr().out


def test_a_png_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    assert draw("--algo", "zigzag", "--size", "2", "--output", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--algo", "distflsh", "--size", "4"), "did you mean 'distflash'"),
        (("--algo", "lasp", "--size", "4", "--window", "8"), "lasp does not serve sliding"),
        (
            ("--algo", "lasp", "--size", "4", "--seq-len", "64", "--documents", "9"),
            "lasp does not serve documents, got",
        ),
        (("--algo", "ring", "--size", "2", "--documents", "9"), "--documents needs a mean of 1"),
        (("--algo", "ring", "--size", "0"), "size must be 1 or more, got 0"),
        (("--algo", "ring", "--size", "2", "--seq-len", "0"), "seq-len must be 1 or more"),
        (("--algo", "ring", "--size", "2", "--option", "x"), "--option takes KEY=VALUE"),
        (("--algo", "ring", "--size", "2", "--output", "a.pdf"), "'a.pdf': change its ending"),
        (("--algo", "ring", "--size", "2", "--output", "nowhere/a.png"), "no folder 'nowhere'"),
    ],
)
def test_errors_are_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert draw(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
