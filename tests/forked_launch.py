"""What starts runs, in forks of a process that has imported Megatron, on the CPU.

As a script, in each of them: forked_launch.py VARIABLES FOLDER (LAUNCHER | -m MODULE) [flags],
VARIABLES as JSON.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forks import ForkedJob

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.harness.train import CommandLine


def launch(
    run: Any,
    folder: Path,
    extra: Sequence[str],
    timeout: float,
    on_iterations: Callable[[int], None],
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = (),
) -> str:
    """`convergence_smoke.launch`: the empty string, or one line that says why a run failed.

    Args: program: what ranks would start elsewhere.
    """
    launcher = sys.modules["convergence_smoke"].LAUNCHER
    words = [json.dumps(dict(environment or {})), "", str(launcher)]
    words += ["--config", str(folder / "run.yaml"), "--cp-record", str(folder / "recording")]
    log = folder / "log.txt"
    log.touch()
    logs = [(log, log)] * run.processes
    job = ForkedJob(Path(__file__), [*words, "--cp-platform", "cpu", *extra], logs)
    code = max(abs(code) for code in job.finish(timeout))
    on_iterations(len((folder / "recording" / "rank00000.jsonl").read_text().splitlines()))
    return f"exit code {code}" if code else ""


def logged(log: Path, program: Sequence[str], said: Mapping[str, str]) -> list[str]:
    """`train.logged`: its module is one of the ranks that it would start."""
    module, *words = program
    ranks = CommandLine.of(words).ranks
    if "--nproc-per-node" in words:
        at = words.index("--nproc-per-node")
        ranks = int(words[at + 1])
        del words[at : at + 2]
    log.write_text("")
    settings = [json.dumps(dict(said)), str(Path.cwd()), "-m", module, *words]
    codes = ForkedJob(Path(__file__), settings, [(log, log)] * ranks).finish(240)
    if any(codes):
        raise ContextParallelError(f"the run of {log.stem} failed, see {log}: exit codes {codes}")
    return log.read_text(errors="replace").splitlines()


if __name__ == "__main__":
    os.environ.update(json.loads(sys.argv.pop(1)))
    os.chdir(sys.argv.pop(1) or ".")
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
