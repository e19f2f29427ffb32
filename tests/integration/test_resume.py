"""Checkpoints: a run goes on at another split, and after a rank was killed, as if nothing had been.

The reference is one run of Megatron's own attention on the whole sequence, never interrupted.
"""

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_cp_plugin.harness.parity import Recording, Tolerances
from tests.integration.megatron_job import TINY, Job, WarmJob, run_warm

pytestmark = pytest.mark.timeout(300)

SAVED, STEPS = 2, 5
MODEL = (*TINY, "--position-embedding-type", "rope", "--group-query-attention")
MODEL = (*MODEL, "--num-query-groups", "2", "--swiglu", "--normalization", "RMSNorm")
# The vocabulary is padded to the same size at every tensor-parallel size.
MODEL = (*MODEL, "--train-iters", str(STEPS), "--make-vocab-size-divisible-by", "64")
# The killed run was to be a long one.
MODEL = (*MODEL, "--override-opt-param-scheduler")
DISTRIBUTED = ("--use-distributed-optimizer",)
# What Megatron needs to load a distributed optimizer at another TP or PP.
RESHARDABLE = (*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable")


@dataclass(frozen=True)
class Curve:
    losses: list[float]
    grad_norms: list[float]


def train(folder: Path, *flags: str, ranks: int = 1) -> tuple[Curve, Job]:
    job = run_warm(folder, *MODEL, *flags, "--cp-record", str(folder), ranks=ranks).succeeded()
    recording = Recording.load(folder)
    return Curve(recording.losses()["lm loss"], recording.grad_norms()), job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Curve:
    saving = ("--save", str(folder / "distributed"), "--save-interval", str(SAVED))
    flags = ("--context-parallel-algo", "megatron", *DISTRIBUTED)
    curve, _ = train(folder / "reference", *flags, *saving)
    assert len(curve.losses) == STEPS
    return curve


@pytest.fixture(scope="module")
def checkpoints(uninterrupted: Curve, folder: Path) -> dict[str, tuple[str, ...]]:
    """What loads the checkpoints of iteration SAVED: of the reference, and of a split run."""
    name = "reshardable"
    flags = ("--context-parallel-algo", "zigzag", "--context-parallel-size", "2", *RESHARDABLE)
    interval = ("--save-interval", str(SAVED), "--exit-interval", str(SAVED))
    curve, _ = train(folder / "saving", *flags, *interval, "--save", str(folder / name), ranks=2)
    assert len(curve.losses) == SAVED
    step = ("--ckpt-step", str(SAVED))
    return {
        "distributed": ("--load", str(folder / "distributed"), *step, *DISTRIBUTED),
        name: ("--load", str(folder / name), *step, *RESHARDABLE),
    }


@pytest.mark.parametrize(
    ("optimizer", "split", "ranks"),
    [
        pytest.param(
            *("distributed", "--context-parallel-algo ring --context-parallel-size 2", 2),
            marks=pytest.mark.slow,
        ),
        pytest.param("reshardable", "--context-parallel-algo megatron", 1, marks=pytest.mark.slow),
        # Saved by zigzag, and goes on by what the planner takes, which is another one.
        ("reshardable", "--context-parallel-algo auto --context-parallel-size 2", 2),
        pytest.param(
            "reshardable",
            "--context-parallel-algo ulysses --context-parallel-size 2 "
            "--tensor-model-parallel-size 2",
            4,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "reshardable",
            "--cp-comm-type p2p a2a --context-parallel-size 2 --pipeline-model-parallel-size 2",
            4,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_resumes_at_another_split(
    uninterrupted: Curve,
    checkpoints: dict[str, tuple[str, ...]],
    tmp_path: Path,
    optimizer: str,
    split: str,
    ranks: int,
) -> None:
    curve, job = train(tmp_path, *split.split(), *checkpoints[optimizer], ranks=ranks)
    assert_continues(curve, uninterrupted)
    assert f"successfully loaded checkpoint from {checkpoints[optimizer][1]}" in job.text
    # The algorithm is no part of a checkpoint.
    assert not re.search(r"(?i)mismatch.*(algo|context)|(algo|context).*mismatch", job.text)


@pytest.mark.slow
def test_evaluates_at_another_size(checkpoints: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    """What was trained on two ranks, by each on as many as named; on one by Megatron's own."""
    words = "--skip-train --eval-iters 3 --mock-data --context-parallel-algo"
    found = {}
    for algo, size in (("megatron", 1), ("zigzag", 1), ("distflash", 4)):
        flags = [*words.split(), algo, "--context-parallel-size", str(size)]
        logs = tmp_path / f"{algo}-{size}"
        job = run_warm(logs, *MODEL, *flags, *checkpoints["reshardable"], ranks=size).succeeded()
        assert f"successfully loaded checkpoint from {checkpoints['reshardable'][1]}" in job.text
        lines = re.findall(rf"iteration {SAVED} on \w+ set.*lm loss value: (\S+)", job.text)
        found[algo, size] = [float(loss) for loss in lines]
    wanted = found["megatron", 1]
    assert len(wanted) == 2  # of validation and of testing
    for (algo, size), losses in found.items():
        assert losses == pytest.approx(wanted, rel=Tolerances().loss), (algo, size)


def assert_continues(curve: Curve, uninterrupted: Curve) -> None:
    bounds = Tolerances()
    assert len(curve.losses) == STEPS - SAVED
    assert curve.losses == pytest.approx(uninterrupted.losses[SAVED:], rel=bounds.loss)
    assert curve.grad_norms == pytest.approx(uninterrupted.grad_norms[SAVED:], rel=bounds.grad_norm)


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(
    uninterrupted: Curve, tmp_path: Path
) -> None:
    """kill -9 in mid-step: the others end, soon and with a reason; the run goes on."""
    # Of one process a rank: any other one would keep the connections of a killed rank.
    form = ("--ckpt-format", "torch")
    saving = ("--save", str(tmp_path), "--save-interval", str(SAVED), *form)
    split = ("--context-parallel-algo", "zigzag", "--context-parallel-size", "2")
    # Enough to be killed in; with many more Megatron would give the data in another order.
    flags = (*MODEL, *saving, *split, "--train-iters", "20000")
    job = WarmJob(tmp_path / "killed", *flags, ranks=2)
    try:
        deadline = time.monotonic() + 120
        while not re.search(rf"iteration +{SAVED + 1}/", job.text()):
            assert all(rank.is_alive() for rank in job.ranks), job.text()[-3000:]
            assert time.monotonic() < deadline, job.text()[-3000:]
            time.sleep(0.01)
        os.kill(job.ranks[1].pid, signal.SIGKILL)
        job.ranks[0].join(60)
        assert job.ranks[0].exitcode == 1
    finally:
        killed = job.finish()
    # Megatron's own collectives may be the first to notice.
    assert re.search(r"lost the others|Connection (reset|closed)", killed.text)
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    last = max(map(int, re.findall(r"iteration +(\d+)/", killed.text)))
    assert saved >= (last - 1) // SAVED * SAVED  # a checkpoint is written after the line is
    loading = ("--load", str(tmp_path), "--ckpt-step", str(SAVED), *form)
    other = ("--context-parallel-algo", "ring", "--context-parallel-size", "2")
    curve, _ = train(tmp_path / "resumed", *loading, *other, ranks=2)
    assert_continues(curve, uninterrupted)
