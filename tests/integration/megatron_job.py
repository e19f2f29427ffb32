"""Runs Megatron jobs as a user would, in real processes, and reads what they print."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forks import ForkedJob, places_of

import megatron_cp_plugin

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"
LAUNCHER = ("-m", "megatron_cp_plugin.launch")
PROGRAM = Path(__file__).with_name("program_job.py")
# The same as a file, for `run_warm`.
LAUNCH = Path(megatron_cp_plugin.__file__).with_name("launch.py")
TIMEOUT_S = 240

# The weights are large enough for attention to be sharp: with Megatron's default of 0.02 it is
# nearly uniform in a model this small, and the losses of a wrong one are the same to six digits.
TINY = tuple(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 2 --train-iters 3 "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 127 --eval-iters 0 --eval-interval 1000 --log-interval 1 --attention-dropout 0 "
    "--hidden-dropout 0 --init-method-std 0.2 --cp-platform cpu".split()
)

# For gradients of later iterations: steps of Adam are of one size whatever the gradient's, so that
# with larger ones the rounding of a gradient near zero would show in the next iteration's.
SLOWLY = ("--lr", "1e-4", "--min-lr", "1e-5")

_LINE = re.compile(r"iteration +\d+/.*lm loss: ([\d.E+-]+) .*grad norm: ([\d.]+) ")


@dataclass(frozen=True)
class Process:
    """One finished process."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Job:
    """All processes of a finished job, by rank; one process if torchrun started them."""

    processes: tuple[Process, ...]

    @property
    def _curve(self) -> list[tuple[float, float]]:
        lines = _LINE.findall(self.text)
        return [(float(loss), float(norm)) for loss, norm in lines]

    @property
    def text(self) -> str:
        return "\n".join(p.stdout + p.stderr for p in self.processes)

    @property
    def losses(self) -> list[float]:
        return [loss for loss, _ in self._curve]

    @property
    def grad_norms(self) -> list[float]:
        return [norm for _, norm in self._curve]

    def succeeded(self) -> "Job":
        codes = [p.returncode for p in self.processes]
        assert not any(codes), f"exit codes {codes}\n{self.text[-6000:]}"
        return self


def run(
    *arguments: str,
    ranks: int = 1,
    program: Sequence[str] = (str(SCRIPT),),
    variables: Mapping[str, str] | None = None,
    nodes: bool = False,
) -> Job:
    """Runs `python *program *arguments` in `ranks` processes, with more variables.

    Args: nodes: whether each process is a node to NCCL, so that several can use the same GPU.
    """
    _store, places = places_of(ranks)  # which is there while it is held
    environment = process_environment() | dict(variables or {})
    command = [sys.executable, *program, *arguments]
    if nodes:
        alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_SOCKET_IFNAME": "lo"}
        places = [place | alone | {"NCCL_HOSTID": f"node{place['RANK']}"} for place in places]
    return _finish(command, [environment | place for place in places])


class WarmJob:
    """A job of `run` that has been started, in forks of a process that has imported Megatron.

    Attributes:
        ranks: Its processes.
    """

    def __init__(self, folder: Path, *arguments: str, ranks: int, script: Path = SCRIPT) -> None:
        """Args: folder: for what the ranks print. arguments: of the script."""
        folder.mkdir(parents=True, exist_ok=True)
        self._logs = [(folder / f"{r}.out", folder / f"{r}.err") for r in range(ranks)]
        self._job = ForkedJob(script, arguments, self._logs)
        self.ranks = self._job.ranks

    def text(self) -> str:
        """What the ranks have printed so far."""
        paths = (path for logs in self._logs for path in logs)
        return "\n".join(path.read_text() for path in paths if path.exists())

    def finish(self) -> Job:
        codes = self._job.finish(TIMEOUT_S)
        texts = [tuple(path.read_text() for path in logs) for logs in self._logs]
        return Job(tuple(Process(c, out, err) for c, (out, err) in zip(codes, texts, strict=True)))


def run_warm(folder: Path, *arguments: str, ranks: int = 1, script: Path = SCRIPT) -> Job:
    """Runs a script, by default our own, in `ranks` processes; `folder` is for what they print."""
    return WarmJob(folder, *arguments, ranks=ranks, script=script).finish()


def run_program(folder: Path, *words: str, ranks: int = 1) -> Job:
    """Runs `python *words` in an empty `folder`, in forks as `run_warm`.

    As under torchrun, a rank may say in `folder`/RANK/error.json why it ended.
    """
    return run_warm(folder / "printed", str(folder), *words, ranks=ranks, script=PROGRAM)


def run_torchrun(folder: Path, *arguments: str, ranks: int) -> Job:
    """Runs `torchrun --nproc-per-node ranks *arguments`: a fork, whose ranks start as users' do."""
    options = ("--standalone", f"--nproc-per-node={ranks}")
    return run_program(folder, "-m", "torch.distributed.run", *options, *arguments)


def _finish(command: Sequence[str], environments: Sequence[dict[str, str]]) -> Job:
    with tempfile.TemporaryDirectory() as folder:
        outputs = [
            [Path(folder, f"{number}.{kind}") for kind in ("out", "err")]
            for number in range(len(environments))
        ]
        started = []
        try:
            for environment, (out, err) in zip(environments, outputs, strict=True):
                with out.open("w") as stdout, err.open("w") as stderr:
                    started.append(
                        subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr)
                    )
            _wait(started)
        finally:
            for process in started:
                process.kill()
                process.wait()
        texts = [(out.read_text(), err.read_text()) for out, err in outputs]
    # Of a process that hung: the signal.
    return Job(tuple(Process(p.returncode, *t) for p, t in zip(started, texts, strict=True)))


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits for all; once one has failed, the others get ten seconds."""
    deadline = time.monotonic() + TIMEOUT_S
    while None in (codes := [p.poll() for p in processes]) and time.monotonic() < deadline:
        if any(codes):
            deadline = min(deadline, time.monotonic() + 10)
        time.sleep(0.05)


def process_environment() -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK"))}
    # Megatron refuses to start on Hopper with more connections.
    return inherited | {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
