"""The benchmark of attention: its command line, runs on CPU ranks, and its picture."""

import json
from pathlib import Path

import benchmark_attention
import pytest
import rivals

from megatron_cp_plugin.errors import ConfigError
from tests.integration.megatron_job import run_program

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "benchmark_attention.py"
LONG_TAIL = str(ROOT / "configs" / "lengths" / "long_tail.csv")


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
        for name in (*algos, "one GPU / 2: reference")  # torch_cpu takes one sequence
    }
    assert all(row["error"] < 1e-5 and row["share_of_limit"] > 0 for row in rows)
    assert "documents" in (tmp_path / "table.md").read_text().splitlines()[2]


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
