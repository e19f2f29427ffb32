"""The benchmark of attention: documents on its command line, and a run on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import benchmark_attention
import rivals

from megatron_cp_plugin.core.document_lengths import Exponential, LogNormal
from megatron_cp_plugin.errors import ConfigError

ROOT = Path(__file__).parents[1]
LONG_TAIL = "configs/lengths/long_tail.csv"


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


def test_all_contenders_get_the_same_documents(tmp_path: Path) -> None:
    """Of lengths that every layout can have; each is checked against one call with all of them."""
    algos = ["zigzag", "zigzag:layout=documents", "ring:layout=thd", "allgather"]
    words = (
        "-m torch.distributed.run --nproc-per-node 2 scripts/benchmark_attention.py --device cpu "
        f"--tokens 1K --heads 2:1 --head-dim 8 --documents 100,{LONG_TAIL} --algos "
        f"{','.join(algos)} --iters 1 --warmup 0 --output {tmp_path}"
    )
    done = subprocess.run(
        [sys.executable, *words.split()], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
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
