"""Usual mistakes, made under torchrun as users make them: one line, said once and last."""

import re
import resource
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.megatron_job import LAUNCHER, SCRIPT, TINY, process_environment, torchrun

CONFIGS = Path(__file__).parents[2] / "configs"
LINES = 12
SECONDS = 20
PREFIX = "megatron_cp_plugin: error: "


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


MISTAKES = (
    Mistake(
        "dropout",
        "--attention-dropout 0.1",
        "attention dropout, got --attention-dropout 0.1 .*: add --attention-dropout 0",
        ranks=4,
    ),
    Mistake(
        "flag", "--seq-lenght 1024", r"unknown flag --seq-lenght \(did you mean '--seq-length'"
    ),
    Mistake(
        "our flag of a script that is not ours",
        "--context-paralel-algo zigzag",
        "unknown flag --context-paralel-algo .did you mean '--context-parallel-algo'",
        program=(*LAUNCHER, str(SCRIPT), *TINY),
    ),
)
QUICK = ("dropout", "flag", "our flag of a script that is not ours")

# What a run says before it is looked at, and what torchrun says of itself.
_START = re.compile(
    r"^\S+: \w*Warning: |^  +warnings\.warn\(|^  warn\(|^\*+$|^Setting OMP_NUM_THREADS|^$"
    r"|No CUDA runtime is found|DeprecationWarning|^-+ .* -+$|^  \w+ \.{2,} |^using world size"
    r"|^Number of virtual stages|^setting |^WARNING|^INFO|^> "
)
_TORCHRUN = "Traceback (most recent call last):\n  File"


@dataclass(frozen=True)
class Said:
    """The output of a job that was refused: what is neither Megatron's start nor torchrun's own."""

    lines: tuple[str, ...]
    report: str
    code: int
    seconds: float


def make(words: tuple[str, ...], ranks: int, cwd: Path | None = None) -> Said:
    before_s = _processor_seconds()
    done = subprocess.run(
        torchrun(*words, ranks=ranks),
        env=process_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
    )
    seconds = _processor_seconds() - before_s
    before, _, report = done.stdout.partition(_TORCHRUN)
    lines = tuple(line for line in before.splitlines() if not _START.search(line))
    return Said(lines, report, done.returncode, seconds)


def _processor_seconds() -> float:
    """Of all children that have ended: what else the machine does is not in it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(m, id=m.name, marks=() if m.name in QUICK else pytest.mark.slow)
        for m in MISTAKES
    ],
)
def test_a_mistake_is_one_line_said_once_and_last(mistake: Mistake, tmp_path: Path) -> None:
    said = make(mistake.words, mistake.ranks, cwd=tmp_path)
    everything = "\n".join((*said.lines, said.report))
    assert everything.count(PREFIX) == 1, everything
    message, rule = said.report.rstrip().splitlines()[-2:]
    assert set(rule) == {"="}
    assert re.search(mistake.says, message.partition(PREFIX)[2]), message
    # torchrun's own report is one traceback and one failure, of the rank that has the message.
    assert "Traceback" not in said.report
    assert said.report.count("exitcode  : ") == said.report.count("exitcode  : 2 ") == 1
    assert len(said.lines) <= LINES, "\n".join(said.lines)
    assert said.code == 1  # torchrun's own, whatever the ranks end with
    assert said.seconds < SECONDS
