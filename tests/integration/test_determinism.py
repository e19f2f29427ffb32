"""Megatron's deterministic mode: two runs are equal to the bit."""

from pathlib import Path

import pytest

from megatron_cp_plugin.harness.parity import Recording
from tests.integration.megatron_job import TINY, run_warm

pytestmark = pytest.mark.timeout(300)

# With two ranks, sums have two terms, and their order makes no difference.
RANKS = 3
MODEL = (*TINY, "--position-embedding-type", "none", "--num-layers", "4", "--deterministic-mode")
MODEL = (*MODEL, "--context-parallel-size", str(RANKS), "--seq-length", "96")
MODEL = (*MODEL, "--num-attention-heads", "6", "--hidden-size", "48", "--train-iters", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers",
    [
        ("--cp-layers", "zigzag, attention2d, allgather, usp"),
        ("--cp-layers", "distflash, ring, lasp, lasp2", "--cp-linear-model", "linear_transformer"),
    ],
)
def test_two_runs_are_equal_to_the_bit(layers: tuple[str, ...], tmp_path: Path) -> None:
    runs = []
    for name in ("once", "again"):
        folder = tmp_path / name
        run_warm(folder, *MODEL, *layers, "--cp-record", str(folder), ranks=RANKS).succeeded()
        runs.append(Recording.load(folder))
    once, again = runs
    assert len(once.losses()["lm loss"]) == 2
    assert once.losses() == again.losses()
    assert once.grad_norms() == again.grad_norms()
    for mine, theirs in zip(once.ranks, again.ranks, strict=True):
        # Digests of all bytes of every weight and every gradient.
        assert set(mine.gradients) == {1, 2}
        assert len(mine.gradients[1]) >= 4 * 8
        assert mine.weights == theirs.weights
        assert mine.gradients == theirs.gradients
