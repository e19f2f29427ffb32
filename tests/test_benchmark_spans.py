"""The benchmark of span masks, on CPU ranks."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_all_masks_agree_with_one_rank() -> None:
    words = (
        "-m torch.distributed.run --nproc-per-node 2 scripts/benchmark_spans.py --device cpu "
        "--tokens 512 --heads 2:1 --head-dim 8 --algos zigzag,allgather --iters 1 --warmup 0"
    )
    done = subprocess.run(
        [sys.executable, *words.split()], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["documents"] for row in rows[::3]] == ["tree", "images", "prefix", "diffusion"]
    for limit, *contenders in (rows[at : at + 3] for at in range(0, 12, 3)):
        assert "of causal" in limit["name"]
        for row in contenders:
            assert not row["note"]
            assert row["error"] < 1e-5
            assert row["share_of_limit"] == limit["step_ms"] / row["step_ms"]
