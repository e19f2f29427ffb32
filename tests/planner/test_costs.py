"""What `megatron-cp plan` says of each algorithm."""

from pathlib import Path

import pytest

from megatron_cp_plugin import cli
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.errors import ConfigError, KernelUnavailableError
from megatron_cp_plugin.planner.costs import cost, peak
from megatron_cp_plugin.planner.layer import planned
from megatron_cp_plugin.registry import available

SHAPE = Shape(1, 4096, 32, 8, 128)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_an_unbalanced_ring_waits_and_the_others_do_not(size: int) -> None:
    """P^2 / 2 blocks in P - 1/2 block times of P ranks: the first step has half blocks only."""
    shape = Shape(1, 2 * 3 * 5 * 16 * 8, 30, 30, 64)
    assert cost("ring", size, shape).idle == pytest.approx((size - 1) / (2 * size - 1), 1e-3)
    for algo in ("zigzag", "attention2d", "allgather"):
        assert cost(algo, size, shape).idle == pytest.approx(0, abs=1e-3)


def test_bytes() -> None:
    found = cost("zigzag", 4, SHAPE, Mask(causal=False))
    # K and V of 1024 tokens, 8 heads, bfloat16, to the next rank, three times.
    assert found.forward_bytes == 3 * 2 * 1024 * 8 * 128 * 2


def test_bytes_of_the_pages() -> None:
    """Of the rank that sends most, in units of one whole Q: docs/algorithms.md."""
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    model = {"gradients": "model"}
    for name, algo, options in (
        ("zigzag", "zigzag", model | {"backward": "kv"}),
        ("distflash", "distflash", {}),
        ("allgather", "allgather", {}),
        ("ulysses", "ulysses", {}),
        ("usp, teams of 4", "usp", model | {"ulysses": 4}),
        ("attention2d", "attention2d", {}),
    ):
        cells = []
        for kv_heads, size in ((32, 8), (32, 64), (8, 8), (8, 64)):
            shape = Shape(1, 16384, 32, kv_heads, 128)
            found = cost(algo, size, shape, options=options)
            unit = shape.seq_len * shape.query_width * shape.element_bytes
            cells.append(f"{(found.forward_bytes + found.backward_bytes) / unit:.2f}")
            if size > 8:
                continue
            algorithm = planned(algo, size, shape, Mask(), options)
            plans = [algorithm.plan(shape, Mask(), phase) for phase in PHASES]
            each = [[plan.sent(rank, shape).bytes for plan in plans] for rank in range(size)]
            assert max(each, key=sum) == [found.forward_bytes, found.backward_bytes]
        assert f"| {name} | {' | '.join(cells)} |" in text


def test_a_window_leaves_less_to_send() -> None:
    whole, windowed = (cost("distflash", 8, SHAPE, mask) for mask in (None, Mask(window=64)))
    assert windowed.forward_bytes < whole.forward_bytes
    # Of each of a rank's two chunks of 256 tokens the last 63: to all ranks, or to one that sees
    # them.
    gathered = cost("allgather", 8, SHAPE, Mask(window=64), {"transport": "group"})
    assert 512 * gathered.forward_bytes == 126 * cost("allgather", 8, SHAPE).forward_bytes
    assert 7 * cost("allgather", 8, SHAPE, Mask(window=64)).forward_bytes == gathered.forward_bytes


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"use one of 1, 2, 4, 8, or 0 to have it chosen$"):
        cost("usp", 8, SHAPE, options={"ulysses": 3})


def test_plan_has_a_line_for_every_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --size 8 --seq-len 4096 --heads 12 --kv-heads 4"
    assert cli.main(words.split()) == 0
    out = capsys.readouterr().out
    assert "one layer, 12:4 heads, 4096 tokens, 8 ranks" in out
    for algo in available("softmax"):
        assert algo in out
    assert "ulysses, filled up to 16 heads" in out
    found = cost("zigzag", 8, Shape(1, 4096, 12, 4, 128))
    (line,) = [line for line in out.splitlines() if line.startswith("│ zigzag ")]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == [
        "zigzag",
        "zigzag",
        f"{found.forward_bytes / 2**20:.1f}",
        f"{found.backward_bytes / 2**20:.1f}",
        str(found.messages),
        "0.0%",
    ]


def test_plan_shows_what_the_papers_compare_with(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --size 8 --seq-len 4096 --heads 32 --memory"
    assert cli.main(words.split()) == 0
    rows = {
        cells[0]: cells[1:]
        for line in capsys.readouterr().out.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│").split("│")]) == 7
    }
    whole = 4096 * 32 * 128 * 2 / 2**20 * 7 / 8
    tensor, ring = rows["tensor + sequence parallel"], rows["Ring Self-Attention"]
    assert tensor[1:6] == [f"{4 * whole:.1f}", f"{6 * whole:.1f}", "70", "0.0%", ""]
    assert rows["the same, full recompute"][2] == f"{10 * whole:.1f}"
    assert ring[1:3] == [f"{2 * whole:.1f}", f"{6 * whole:.1f}"]


def test_documents_leave_less_to_do_and_ranks_waiting() -> None:
    mask = Mask(documents=random_documents(SHAPE.seq_len, SHAPE.seq_len // 16))
    whole, packed = (cost("distflash", 8, SHAPE, given) for given in (None, mask))
    assert packed.forward_bytes < whole.forward_bytes / 4
    assert packed.idle > 0.2
    assert cost("ulysses", 8, SHAPE, mask).idle == 0  # every rank has all documents


def test_random_documents_are_as_long_as_asked() -> None:
    starts = random_documents(10**6, 1000)
    assert 900 < len(starts) < 1100
    assert starts == random_documents(10**6, 1000)
    assert random_documents(1, 5) == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--size 4 --seq-len 0 --heads 4", "--seq-len must be more than 0, got 0"),
        ("--size 4 --seq-len 64 --heads 4 --kv-heads 3", "--kv-heads must divide the 4 heads"),
        ("--size 4 --seq-len 64 --heads 4 --mask full --window 3", "needs causal attention"),
    ],
)
def test_plan_refuses(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_memory_of_a_layer() -> None:
    """Receive buffers of two ranks that exchange K and V: two of these, which sums may share."""
    kv = 2048 * 8 * 2 * 128 * 2
    local = {"backward": "kv", "keep": "local"}
    peer = peak("zigzag", 2, 0, SHAPE, options=local)
    assert peer.peer in (2 * kv, 3 * kv)
    group = peak("zigzag", 2, 0, SHAPE, options=local | {"transport": "group"})
    assert group.peer == 0
    assert group.saved == peer.saved == 2048 * 32 * (128 * 2 + 4)
    # The block that came last is kept where that is little.
    assert peak("zigzag", 2, 0, SHAPE, options={"backward": "kv"}).saved == peer.saved + kv
    windowed = peak("distflash", 4, 0, SHAPE, Mask(window=64))
    assert windowed.forward < peak("distflash", 4, 0, SHAPE).forward
    with pytest.raises(ConfigError, match="attention2d needs"):
        peak("attention2d", 5, 0, SHAPE, options={"rows": 2})
    with pytest.raises(KernelUnavailableError, match="did you mean 'flash4'"):
        peak("zigzag", 2, 0, SHAPE, kernel="flash44")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--option chunks=2", "--option needs --algo"),
        ("--algo zigzg", "did you mean 'zigzag'"),
        ("--algo lasp", "softmax attention got 'lasp'"),
        ("--algo usp --option ulysses=4 --size 6", "usp needs ulysses to divide"),
    ],
)
def test_errors_of_the_command_are_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", *"--size 2 --seq-len 64 --heads 8".split(), *words.split()]
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
