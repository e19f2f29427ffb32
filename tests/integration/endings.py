"""Runs many jobs in a row and counts how they end: python tests/integration/endings.py train

`train` trains with Megatron, `functional` uses the functional interface, and `forgetful` without
giving back what it holds. Jobs of 2 to 5 ranks, two
at a time. The ranks are forks of this process, which has imported what they need, and end as any
Python program does. Their main threads give the GIL away only when they wait, so that threads
of gloo are late more often than by chance. Exits 1 if a rank of any job ends with another code
than 0.
"""

import argparse
import importlib
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
# Ranks run on one core or less each.
os.environ["OMP_NUM_THREADS"] = "1"

from forks import free_port

import megatron_cp_plugin  # noqa: F401
from tests.integration.megatron_job import SCRIPT, TINY

FUNCTIONAL = Path(__file__).parent / "functional_job.py"
ALGOS = ("zigzag", "ring", "distflash", "ulysses", "usp", "allgather")
FUNCTIONAL_ALGOS = (*ALGOS, "lasp")
TIMEOUT_S = 120


@dataclass(frozen=True)
class Program:
    """What a rank runs: a script and its command line."""

    script: Path
    arguments: tuple[str, ...]


@dataclass
class Job:
    """A job under way, or ended when it has a code for each rank."""

    program: Program
    folder: Path
    pids: tuple[int, ...]
    started: float
    codes: dict[int, int]


def programs(kind, number):
    """That many of them with their numbers of ranks."""
    sizes, algos = cycle((2, 3, 4, 5)), cycle(ALGOS if kind == "train" else FUNCTIONAL_ALGOS)
    for size, algo in islice(zip(sizes, algos, strict=False), number):
        if kind != "train":
            yield size, Program(FUNCTIONAL, ("--forget", algo) if kind == "forgetful" else (algo,))
            continue
        heads = "--num-attention-heads", str(size), "--hidden-size", str(8 * size)
        flags = "--context-parallel-algo", algo, "--context-parallel-size", str(size)
        lengths = "--seq-length", "120", "--max-position-embeddings", "120"
        yield size, Program(SCRIPT, (*TINY, *heads, *lengths, *flags, "--train-iters", "1"))


def start(program, size, folder):
    """Returns the started job; in its ranks None, with all set for the program."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            for name, descriptor in (("out", 1), ("err", 2)):
                os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
            os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank))
            sys.argv = [str(program.script), *program.arguments]
            return None
        pids.append(pid)
    return Job(program, folder, tuple(pids), time.monotonic(), {})


def run_all(kind, number, at_once):
    """Runs the jobs and returns the exit code; in ranks the script that they are to run."""
    waiting = programs(kind, number)
    running, endings, folders = [], Counter(), tempfile.TemporaryDirectory()
    started = 0
    while True:
        while len(running) < at_once and (following := next(waiting, None)):
            folder = Path(folders.name, str(started))
            folder.mkdir()
            job = start(following[1], following[0], folder)
            if job is None:
                folders._finalizer.detach()  # the folder is the other process's
                return following[1].script
            running.append(job)
            started += 1
        if not running:
            break
        time.sleep(0.05)
        for job in running:
            if time.monotonic() - job.started > TIMEOUT_S:
                for pid in set(job.pids) - set(job.codes):
                    os.kill(pid, signal.SIGKILL)
            for pid in set(job.pids) - set(job.codes):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    job.codes[pid] = os.waitstatus_to_exitcode(status)
        for job in [job for job in running if len(job.codes) == len(job.pids)]:
            running.remove(job)
            codes = [job.codes[pid] for pid in job.pids]
            endings["ended with 0" if not any(codes) else f"ended with {codes}"] += 1
            if any(codes):
                errors = [path.read_text().strip() for path in sorted(job.folder.glob("*.err"))]
                last = [text.splitlines()[-1] for text in errors if text]
                print(job.program.script.name, job.program.arguments[-4:], codes, last, flush=True)
    for ending, count in sorted(endings.items()):
        print(f"{count} of {number} jobs {ending}")
    return int(set(endings) != {"ended with 0"})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("train", "functional", "forgetful"))
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.kind == "train":
        importlib.import_module("scripts.forked")
    sys.setswitchinterval(1000)
    return run_all(arguments.kind, arguments.jobs, arguments.at_once)


if __name__ == "__main__":
    result = main()
    if isinstance(result, int):
        sys.exit(result)
    # As `python script` would: what the script's globals hold is held until Python is finalized.
    exec(compile(result.read_text(), result, "exec"))
