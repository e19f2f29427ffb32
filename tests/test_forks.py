"""Jobs that many threads start at once, in forks of one process."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forks import ForkedJob

THREADS, JOBS = 8, 24
SCRIPT = "import os, torch; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"


def test_threads_start_jobs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one thread a rank and its own exit code, and the environment stays as it is."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(number: int) -> tuple[list[int], str | None]:
        log = tmp_path / f"{number}.txt"
        job = ForkedJob(script, (), [(log, log)])
        return job.finish(timeout=120), os.environ.get("OMP_NUM_THREADS")

    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(run, range(JOBS)))
    assert found == [([0], "3")] * JOBS
    assert {log.read_text() for log in tmp_path.glob("*.txt")} == {"1 1\n"}
