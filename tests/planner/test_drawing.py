"""Pictures of plans, and the command that draws them."""

from itertools import permutations

import pytest

import megatron_cp_plugin as cp
from megatron_cp_plugin import cli, registry
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask, visible_pairs
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.planner.drawing import _ranks, picture, text
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


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("algo", cp.available("softmax"))
def test_all_that_travels_and_is_computed_is_shown(algo: str, mask: str, phase: Phase) -> None:
    size, seq_len = 4, SEQ_LEN
    drawn = picture(algo, size, seq_len=seq_len, mask=MASKS[mask], phase=phase)
    pairs = sum(cell.pairs for step in drawn.steps for cell in step if cell)
    assert pairs == pytest.approx(visible_pairs(seq_len, MASKS[mask]))
    shown = {(t.before, t.source, t.target, t.kind == "results") for t in drawn.transfers}
    for collective in drawn.collectives:
        for source, target in permutations(collective.ranks, 2):
            shown.add((collective.before, source, target, collective.kind == "results"))
    algorithm = registry.create(algo, VirtualWorld(size).topology(0), {})
    plan = algorithm.plan(Shape(1, seq_len, 16, 16, 1), MASKS[mask], phase)
    assert shown == {
        (m.posted + 1 if m.result else m.needed, m.source, m.target, m.result) for m in plan.moves
    }


def test_blocks_on_their_way() -> None:
    hops = [(t.before, t.source, t.target, t.text) for t in picture("zigzag", 3).transfers]
    assert hops == [
        (1, 0, 1, "k0"),
        (1, 1, 2, "k1"),
        (1, 2, 0, "k2"),
        (2, 0, 1, "k2"),
        (2, 1, 2, "k0"),
        (2, 2, 0, "k1"),
    ]
    helped = picture("distflash", 4, options={"last_step": "owner"}).transfers
    assert [(*t[:3], t.text, t.kind) for t in helped if t.kind != "keys"] == [
        (1, 3, 0, "q3", "queries"),
        (2, 0, 3, "o3", "results"),
    ]
    back = picture("ring", 3, phase="backward", options={"backward": "kv"}).transfers
    assert [(*t[:3], t.text) for t in back if t.kind == "results"] == [
        (2, 1, 2, "dk0"),
        (2, 2, 1, "dk1"),
        (3, 2, 0, "dk0"),
    ]


def test_exchanges_of_all_with_all() -> None:
    rows, columns = [(0, 1, 2), (3, 4, 5), (6, 7, 8)], [(0, 3, 6), (1, 4, 7), (2, 5, 8)]
    drawn = picture("attention2d", 9)
    assert not drawn.transfers
    assert sorted(drawn.collectives) == sorted(
        [
            *((0, ranks, "all-gather", "q", "queries") for ranks in rows),
            *((0, ranks, "all-gather", "k, v", "keys") for ranks in columns),
            *((1, ranks, "reduce-scatter", "out, lse", "results") for ranks in rows),
        ]
    )
    assert [c[2:4] for c in picture("ulysses", 3).collectives] == [
        ("all-to-all", "k, v"),
        ("all-to-all", "q"),
        ("all-to-all", "out, lse"),
    ]


def test_who_waits_and_how_long() -> None:
    drawn = picture("distflash", 8, options={"last_step": "owner"})
    assert drawn.waiting == 4
    # Time in squares: half for the first step, one for each of four; work: P * P / 2 of them.
    assert drawn.idle_share == pytest.approx(1 - 32 / (8 * 4.5), abs=1e-3)
    assert picture("distflash", 8).waiting == 0
    assert picture("distflash", 8).idle_share == pytest.approx(0, abs=1e-12)
    assert picture("ring", 8).waiting == 28


def test_cells_name_the_blocks() -> None:
    first, second = picture("distflash", 3).steps
    assert [cell.text if cell else None for cell in first] == ["q0 k0", "q1 k1", "q2 k2"]
    assert [cell.text if cell else None for cell in second] == ["q2 k0", "q1 k0", "q2 k1"]


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
    assert picture("distflash", 4, phase=phase).results == f"partial {said}"
    assert picture("ulysses", 4, phase=phase).results == said  # of some heads


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
    at = next(number for number, line in enumerate(lines) if line.startswith("│ 0 "))
    assert lines[at].replace("│", "").split() == ["0", "q0", "k0", "q3", "k0", "waits"]
    assert lines[at + 1].replace("│", "").split() == ["←", "q3", "from", "3"]
    assert lines[at + 2].replace("│", "").split() == ["→", "o3", "to", "3"]
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
        (("--algo", "ring", "--size", "0"), "size must be 1 or more, got 0"),
        (("--algo", "ring", "--size", "2", "--seq-len", "0"), "seq-len must be 1 or more"),
        (("--algo", "ring", "--size", "2", "--option", "x"), "--option takes KEY=VALUE"),
        (("--algo", "usp", "--size", "6", "--option", "ulysses=4"), "use one of 1, 2, 3, 6"),
        (("--algo", "ring", "--size", "2", "--output", "a.svg"), "needs --tokens or --machine"),
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
