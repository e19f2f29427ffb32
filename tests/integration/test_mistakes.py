"""Usual mistakes, made as users make them: one line, said once and last. Rules have tests of their
own: here is one of each way to a message.

Under torchrun those that end in ways of their own; the others in forks, which are started in a
fraction of the time, with what torchrun gives its ranks.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_cp_plugin.harness import prepare_data
from tests.integration.megatron_job import (
    LAUNCHER,
    SCRIPT,
    TINY,
    process_environment,
    run,
    run_program,
    run_torchrun,
)

CONFIGS = Path(__file__).parents[2] / "configs"
LINES = 12
PREFIX = re.compile(r"\b(?:megatron_cp_plugin|megatron-cp|\w+): error: ")


def of(config: str) -> tuple[str, ...]:
    return (str(SCRIPT), "--config", str(CONFIGS / f"{config}.yaml"))


@dataclass(frozen=True)
class Mistake:
    """What a user types after torchrun, and what has to be said."""

    name: str
    flags: str
    says: str
    ranks: int = 2
    program: tuple[str, ...] = field(default=of("tiny_zigzag"))

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.program, *self.flags.split())


ON_TWO = (*of("tiny_zigzag"), "--context-parallel-size", "2")
PLAIN = (str(SCRIPT), *TINY)
ZIGZAG = (*PLAIN, "--context-parallel-algo", "zigzag", "--context-parallel-size", "2")
LAUNCHED = (*LAUNCHER, "script.py", *TINY)
# As little of a script that is not ours as reads its command line.
FOREIGN = """
from megatron.training.arguments import parse_and_validate_args

parse_and_validate_args()
"""
MODULE = ("-m", "megatron_cp_plugin.cli")
TRAIN = ("train", "--config", "tiny_zigzag")
UNWRITABLE = "got /proc/x, where nothing can be written"

MISTAKES = (
    Mistake(
        "dropout",
        "--attention-dropout 0.1",
        "attention dropout, got --attention-dropout 0.1 .*: add --attention-dropout 0",
        program=ON_TWO,
    ),
    Mistake(
        "flag", "--seq-lenght 1024", r"unknown flag --seq-lenght \(did you mean '--seq-length'"
    ),
    Mistake(
        "our flag of a script that is not ours",
        "--context-paralel-algo zigzag",
        "unknown flag --context-paralel-algo .did you mean '--context-parallel-algo'",
        program=LAUNCHED,
    ),
    Mistake(
        "flag of a script that is not ours",
        "--context-parallel-algo ring --seq-lenght 8",
        "unknown flag --seq-lenght .did you mean '--seq-length'",
        program=LAUNCHED,
    ),
    Mistake("word", "1024", "'1024' belongs to no flag"),
    Mistake("kernel", "--cp-kernel flsh4 --mock-data", "did you mean 'flash4'", program=ON_TWO),
    Mistake(
        "no such run file",
        "",
        "tiny_zigzg: no such run file .did you mean 'tiny_zigzag'",
        program=(str(SCRIPT), "--config", "tiny_zigzg"),
    ),
    Mistake(
        "documents",
        "",
        "--output data/stdlib_pieces --document-bytes 200",
        program=of("tiny_documents"),
        ranks=4,
    ),
    Mistake("checkpoints", "--save /proc/x", f"--save {UNWRITABLE}", program=ZIGZAG),
    Mistake(
        "Megatron's own",
        "--context-parallel-algo megatron",
        "needs the attention of Transformer Engine, got",
        program=ON_TWO,
    ),
    Mistake(
        "positions",
        "--max-position-embeddings 32",
        "Megatron refuses these flags: .*max_position_embeddings",
        program=ZIGZAG,
    ),
    Mistake(
        "latent configuration",
        "--multi-latent-attention --attention-output-gate",
        "Megatron refuses these flags: Output gate is not supported for MLA yet",
        program=ZIGZAG,
    ),
    Mistake(
        "nothing at all", "train", "refuses these flags: assert args.micro_batch", program=MODULE
    ),
    Mistake("no such script", "", "no training script at x.py", program=(*LAUNCHER, "x.py")),
    # After torch.distributed has started.
    Mistake("data", "", "prepare-data --output data/stdlib, or add --mock-data", program=ON_TWO),
)
QUICK = ("dropout", "flag of a script that is not ours")
DOCTOR = (*MODULE, "doctor", "--heads", "30:8")

# What a run says before it is looked at, and what torchrun says of itself.
_START = re.compile(
    r"^\S+: \w*Warning: |^  +warnings\.warn\(|^  warn\(|^\*+$|^Setting OMP_NUM_THREADS|^$"
    r"|No CUDA runtime is found|DeprecationWarning|^-+ .* -+$|^  \w+ \.{2,} |^  \w{45,} "
    r"|^using world size|^Number of virtual stages|^setting |^WARNING|^INFO|^> "
)
_TORCHRUN = "Traceback (most recent call last):\n  File"


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(m, id=m.name, marks=() if m.name in QUICK else pytest.mark.slow)
        for m in MISTAKES
    ],
)
def test_a_mistake_is_said_by_one_rank(mistake: Mistake, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FOREIGN)
    job = run_program(tmp_path, *mistake.words, ranks=mistake.ranks)
    lines = [line for line in job.text.splitlines() if not _START.search(line)]
    codes = [process.returncode for process in job.processes]
    assert sorted(codes) == [*[0] * (mistake.ranks - 1), 2], job.text
    assert not PREFIX.findall(job.text), job.text
    assert len(lines) <= LINES, "\n".join(lines)
    (error_file,) = tmp_path.glob("*/error.json")
    message = json.loads(error_file.read_text())["message"]["message"]
    assert "\n" not in message
    assert re.search(mistake.says, PREFIX.split(message, maxsplit=1)[1]), message


@pytest.mark.slow
def test_a_mistake_is_one_line_said_once_and_last(tmp_path: Path) -> None:
    """Under torchrun, in its own report."""
    (launcher,) = run_torchrun(tmp_path, *DOCTOR, ranks=2).processes
    assert launcher.returncode == 1  # torchrun's own, whatever the ranks end with
    before, _, report = launcher.stderr.partition(_TORCHRUN)
    lines = [line for line in before.splitlines() if not _START.search(line)]
    assert len(lines) <= LINES, before
    assert len(PREFIX.findall(launcher.stdout + launcher.stderr)) == 1, launcher.stderr
    message, rule = report.rstrip().splitlines()[-2:]
    assert set(rule) == {"="}
    assert PREFIX.split(message)[1].startswith("--heads takes query heads, or query heads:KV")
    # One traceback and one failure, of the rank that has the message.
    assert "Traceback" not in report
    assert report.count("exitcode  : ") == report.count("exitcode  : 2 ") == 1


@pytest.mark.slow
def test_another_program_refuses_in_one_line() -> None:
    benchmark = str(SCRIPT.with_name("benchmark_attention.py"))
    (process,) = run(program=(benchmark,)).processes
    assert process.returncode == 2
    assert "needs a GPU for each of 1 ranks, got 0: add --device cpu" in process.stderr
    assert len(PREFIX.findall(process.stderr)) == 1


@pytest.mark.slow
def test_an_interrupt_is_one_line(tmp_path: Path) -> None:
    """Of documented commands, by users' own processes."""
    pages = [str(CONFIGS.parent / name) for name in ("README.md", "CONTRIBUTING.md")]
    data = str(tmp_path / "pages")
    assert prepare_data.main([*pages, "--output", data, "--document-bytes", "200"]) == 0
    flags = f"--data-path {data} --train-iters 100000 --log-interval 1 --seq-length 128 "
    flags += "--context-parallel-size 2"
    log = tmp_path / "log.txt"
    with log.open("w") as out:
        job = subprocess.Popen(
            [sys.executable, *MODULE, *TRAIN, "--nproc-per-node", "2", *flags.split()],
            env=process_environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        # After the first two iterations the first rank describes the model once more. The last rank
        # prints the fourth when both have run it.
        while " 4/  100000 |" not in log.read_text() and time.monotonic() < deadline:
            assert job.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        trained = len(log.read_text())
        # As a terminal does it: to all processes.
        os.killpg(job.pid, signal.SIGINT)
        code = job.wait(60)
    lines = [line for line in log.read_text()[trained:].splitlines() if " iteration " not in line]
    assert lines.count("megatron_cp_plugin: interrupted") == 1
    assert len(lines) <= LINES
    assert code == 130
