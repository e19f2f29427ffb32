"""A model takes no tokens but those that the plugin has cut for it, however a script gets them."""

import json
import re
from pathlib import Path

import pytest

from tests.integration.foreign_batches_job import SEEN_BY_ALL, Ways
from tests.integration.megatron_job import TINY, run_warm

JOB = Path(__file__).with_name("foreign_batches_job.py")
WAYS = list(Ways(dict, 0, 2).all())


@pytest.mark.parametrize(
    ("algorithm", "size"),
    [
        ("zigzag", 2),
        pytest.param("ring", 2, marks=pytest.mark.slow),
        pytest.param("attention2d", 4, marks=pytest.mark.slow),
    ],
)
def test_a_batch_that_was_cut_otherwise_is_refused(
    tmp_path: Path, algorithm: str, size: int
) -> None:
    flags = ["--context-parallel-algo", algorithm, "--context-parallel-size", str(size)]
    if algorithm == "attention2d":
        flags += ["--cp-options", "variant=no"]
    job = run_warm(tmp_path, *TINY, *flags, ranks=size, script=JOB).succeeded()
    own = {"zigzag": "zigzag", "ring": "contiguous", "attention2d": "cyclic"}[algorithm]
    for rank, process in enumerate(job.processes):
        tried: dict[str, str] = json.loads(process.stdout.split("TRIED")[-1].splitlines()[0])
        assert tried.pop("first: right") == tried.pop("later: right") == "taken"
        assert tried.pop("first: copies") == tried.pop("later: copies") == "taken"
        assert len(tried) == 2 * len(WAYS) - SEEN_BY_ALL
        for way, error in tried.items():
            # Tokens that a script cuts by the very layout of the run are the right ones.
            assert error or way.endswith(f": {own}"), f"rank {rank} of {size} took a batch {way}"
            assert "\n" not in error
    assert len(job.losses) == 3


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_with_such_batches_ends_before_its_first_loss(tmp_path: Path, stages: int) -> None:
    words = f"--context-parallel-algo zigzag --context-parallel-size 2 --way contiguous \
        --pipeline-model-parallel-size {stages}"
    job = run_warm(tmp_path, *TINY, *words.split(), ranks=2 * stages, script=JOB)
    said = [re.findall("megatron_cp_plugin: error: .*", p.stderr) for p in job.processes]
    assert not job.losses
    assert [p.returncode for p in job.processes[:2]] == [2, 2]
    assert all(p.returncode for p in job.processes)
    assert said[0] == said[1]  # of the first stage
    for lines in said[:2]:
        assert len(lines) == 1
        assert (
            "needs batches that the plugin splits by the zigzag layout, got input_ids" in lines[0]
        )
        assert "these are the tokens of rank 0 in the contiguous layout" in lines[0]
