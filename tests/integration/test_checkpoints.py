"""A checkpoint that was cut off: Megatron's own words are a traceback, or none and exit code 0."""

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.checkpoints import damage_in_one_line, damaged
from tests.integration.megatron_job import TINY, run_warm

LAST = "latest_checkpointed_iteration.txt"


@pytest.fixture
def load(tmp_path: Path) -> Path:
    """Two checkpoints, as Megatron writes them, and one of a former format."""
    for number in (3, 6):
        folder = tmp_path / "new" / f"iter_{number:07d}"
        checkpoint.save({"x": torch.zeros(99)}, checkpoint_id=folder, no_dist=True)
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    old = tmp_path / "old" / "iter_0000006" / "mp_rank_00"
    old.mkdir(parents=True)
    torch.save({"x": torch.zeros(99)}, old / "model_optim_rng.pt")
    for kind in ("new", "old"):
        (tmp_path / kind / LAST).write_text("6")
    return tmp_path


def cut(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return file


@pytest.mark.parametrize(
    "name",
    [
        *(f"new/iter_0000006/{part}" for part in ("__0_0.distcp", ".metadata", "metadata.json")),
        *("new/iter_0000003/__0_0.distcp", f"new/{LAST}"),
        "old/iter_0000006/mp_rank_00/model_optim_rng.pt",
    ],
)
def test_the_file_is_named(load: Path, name: str) -> None:
    kind = load / name.split("/")[0]
    assert damaged(kind) is None
    file = cut(load / name)
    assert damaged(kind) == file

    def load_checkpoint() -> None:
        raise SystemExit

    said = f"got {file}, which is missing or cut off: copy it again"
    with pytest.raises(ContextParallelError, match=said), damage_in_one_line(str(kind)):
        load_checkpoint()
    # Of a program that ends for other reasons nothing is said.
    with pytest.raises(SystemExit), damage_in_one_line(str(kind)):
        raise SystemExit


@pytest.mark.slow
def test_a_job_that_loads_it_says_so_in_one_line(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    flags = [*TINY, *"--context-parallel-algo zigzag --context-parallel-size 2".split()]
    run_warm(tmp_path, *flags, "--save", str(saved), "--save-interval", "3", ranks=2).succeeded()
    file = cut(saved / "iter_0000003" / "__0_0.distcp")
    job = run_warm(tmp_path / "again", *flags, "--load", str(saved), ranks=2)
    assert [process.returncode for process in job.processes] == [2, 2]
    for process in job.processes:
        assert process.stderr.splitlines()[-1].startswith(
            f"megatron_cp_plugin: error: --load needs whole files, got {file}, which is missing or"
        )
