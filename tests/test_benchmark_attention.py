"""The benchmark of attention: its command line, runs on CPU ranks, and its picture."""

import json
from pathlib import Path

import bars
import benchmark_attention
import pytest
import rivals
from benchmark_attention import Row

from megatron_cp_plugin.document_lengths import Exponential, LogNormal
from megatron_cp_plugin.errors import ConfigError
from tests.integration.megatron_job import run_program

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "benchmark_attention.py"
LONG_TAIL = str(ROOT / "configs" / "lengths" / "long_tail.csv")


def test_several_distributions() -> None:
    args = benchmark_attention.parse(["--documents", "16K,lognormal:4K:1.5"])
    assert args.packed
    assert args.documents == [
        ("16K", Exponential(16384)),
        ("lognormal:4K:1.5", LogNormal(4096, 1.5)),
    ]
    assert args.rivals == "installed"
    assert not benchmark_attention.parse([]).packed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--documents", "16K", "--full"], "--documents are causal: leave --full out"),
        (["--documents", "16K,few"], "takes a mean such as 16K"),
        (["--documents", "no.csv"], "needs rows of an upper edge and a share in 'no.csv'"),
    ],
)
def test_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark_attention.parse(words)
    assert said in capsys.readouterr().err


def test_rivals_that_take_documents() -> None:
    with pytest.raises(ConfigError, match="takes no documents here: use one of te:p2p, te:all_ga"):
        rivals.make("ring_flash_attn:zigzag", 4, 2, (64, 64), causal=True, bounds=(0, 8))


@pytest.mark.slow
def test_all_contenders_get_the_same_documents(tmp_path: Path) -> None:
    """Of lengths that every layout can have; each is checked against one call with all of them."""
    algos = ["zigzag", "zigzag:layout=documents", "ring:layout=thd", "allgather"]
    words = (
        f"{SCRIPT} --device cpu --tokens 1K --heads 2:1 --head-dim 8 --documents 100,{LONG_TAIL} "
        f"--algos {','.join(algos)} --iters 1 --warmup 0 --output {tmp_path}"
    )
    run_program(tmp_path, *words.split(), ranks=2).succeeded()
    found = json.loads((tmp_path / "rows.json").read_text())
    assert "all of lengths that are multiples of 4" in found["title"]
    rows = found["rows"]
    assert [row["note"] for row in rows] == [""] * len(rows)
    assert {(row["documents"], row["name"]) for row in rows} == {
        (documents, name)
        for documents in ("100", LONG_TAIL)
        for name in (*algos, "one GPU / 2: torch_cpu")
    }
    assert all(row["error"] < 1e-5 and row["share_of_limit"] > 0 for row in rows)
    assert "documents" in (tmp_path / "table.md").read_text().splitlines()[2]


TITLE = (
    "attention, causal, batch 1, head dim 128, 4 x NVIDIA H200, TCP sockets of one host, emulating "
    "a slow network"
)


def rows(lengths: tuple[int, ...]) -> list[Row]:
    found = []
    for heads in ("32:32", "32:8"):
        for tokens in lengths:
            found.append(Row(tokens, heads, "", "one GPU / 4: flash4", 1.0, 3.0))
            found.append(Row(tokens, heads, "", "zigzag:backward=kv:gradients=model", 2.0, 5.0))
            found.append(Row(tokens, heads, "", "ulysses", note="ConfigError: no"))
            found.append(Row(tokens, heads, "", "distflash", 1.5, 4.5))
    return found


@pytest.mark.parametrize("lengths", [(32768,), (16384, 32768, 131072)])
def test_bars_side_by_side_under_titles_that_fit(lengths: tuple[int, ...], tmp_path: Path) -> None:
    panels = benchmark_attention.panels(rows(lengths))
    drawn = bars.figure(panels, benchmark_attention.LEGEND, TITLE)
    drawn.savefig(tmp_path / "time.png")
    assert len(drawn.axes) == 2 * len(lengths)
    for panel in drawn.axes:
        widths = [bar.get_width() for bar in panel.patches]
        assert widths == [2.0, 1.5, 3.0, 3.0]  # forward of each, then the rest of each
    whole = drawn.bbox
    titles = [panel.title for panel in drawn.axes]
    names = [label for label in drawn.axes[0].get_yticklabels() if label.get_text()]
    for text in (drawn.texts[0], *titles, *names):
        box = text.get_window_extent()
        assert whole.x0 <= box.x0
        assert box.x1 <= whole.x1
        assert box.y1 <= whole.y1


@pytest.mark.slow
def test_a_batch_with_a_kernel_of_its_own(tmp_path: Path) -> None:
    words = (
        f"{SCRIPT} --device cpu --tokens 64 --heads 4:4 --head-dim 16 --batch 2 --iters 1 --warmup "
        f"0 --algos ring:kernel=reference,zigzag:backward=query --output {tmp_path}"
    )
    run_program(tmp_path, *words.split(), ranks=2).succeeded()
    found = json.loads((tmp_path / "rows.json").read_text())
    assert "batch 2" in found["title"]
    timed = [row for row in found["rows"] if not row["note"]]
    assert [row["name"] for row in timed[1:]] == ["ring:kernel=reference", "zigzag:backward=query"]
    assert all(row["step_ms"] > 0 for row in timed)
    assert (tmp_path / "time.png").stat().st_size > 10_000
