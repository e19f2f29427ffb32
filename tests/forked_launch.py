"""`convergence_smoke.launch` in forks of a process that has imported Megatron, on the CPU.

As a script, in each of them: forked_launch.py VARIABLES LAUNCHER [flags], VARIABLES as JSON.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forks import ForkedJob


def launch(
    run: Any,
    folder: Path,
    extra: Sequence[str],
    timeout: float,
    on_iterations: Callable[[int], None],
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = (),
) -> str:
    """Trains; returns the empty string, or one line that says why it failed.

    Args: program: what ranks would start elsewhere.
    """
    launcher = sys.modules["convergence_smoke"].LAUNCHER
    words = [json.dumps(dict(environment or {})), str(launcher)]
    words += ["--config", str(folder / "run.yaml"), "--cp-record", str(folder / "recording")]
    log = folder / "log.txt"
    log.touch()
    logs = [(log, log)] * run.processes
    job = ForkedJob(Path(__file__), [*words, "--cp-platform", "cpu", *extra], logs)
    code = max(abs(code) for code in job.finish(timeout))
    on_iterations(len((folder / "recording" / "rank00000.jsonl").read_text().splitlines()))
    return f"exit code {code}" if code else ""


if __name__ == "__main__":
    os.environ.update(json.loads(sys.argv.pop(1)))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
