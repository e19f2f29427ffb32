"""The code that splits batches in verl and slime, where it is installed."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from megatron.core.packed_seq_params import PackedSeqParams

from tests.integration.framework_batches_job import BATCHES, TRAINERS
from tests.integration.megatron_job import run_warm

JOB = Path(__file__).with_name("framework_batches_job.py")
ALGORITHMS = ("zigzag", "distflash", "ulysses", "attention2d")
_MODE = "cp_partition_mode"
BOUNDS = {"loss": 1e-5, "gradients": 1e-4}


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of a parent
        return False


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("layout", ["thd", "contiguous"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_batches_of(trainer: str, layout: str, size: int, tmp_path: Path) -> None:
    """Each document as alone through Megatron's own attention."""
    if not is_installed(TRAINERS[trainer][0]):
        pytest.skip(f"{TRAINERS[trainer][0]} is not installed")
    if (trainer, layout) == ("verl", "contiguous") and not hasattr(PackedSeqParams, _MODE):
        pytest.skip(f"verl cuts so for a Megatron whose PackedSeqParams have {_MODE}")
    words = (trainer, layout, str(size), ",".join(ALGORITHMS))
    job = run_warm(tmp_path, *words, ranks=size, script=JOB).succeeded()
    for process in job.processes:
        found = json.loads(process.stdout.split("FOUND")[-1].splitlines()[0])
        assert found.keys() == set(ALGORITHMS)
        for algo, errors in found.items():
            assert errors.keys() == BATCHES.keys()
            for batch, off in errors.items():
                for name, bound in BOUNDS.items():
                    assert off[name] <= bound, f"{algo}, {batch}: {name} is off by {off[name]:.1e}"
