"""Every command and every script says what it does and takes."""

from pathlib import Path

import pytest

from megatron_cp_plugin.commands import COMMANDS
from tests.integration.megatron_job import run_program

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    path
    for path in (ROOT / "scripts").glob("*.py")
    if 'if __name__ == "__main__"' in path.read_text() and path.stem != "benchmark_train_job"
)
PROGRAMS = {
    **{
        f"megatron-cp {name}": ["-m", "megatron_cp_plugin.cli", *name.split()]
        for name in ("", *COMMANDS)
    },
    "launch": ["-m", "megatron_cp_plugin.launch"],
    **{path.name: [str(path)] for path in SCRIPTS},
    **{
        name: [str(ROOT / "tests" / name)]
        for name in ("distributed_conformance.py", "stress_transport.py")
    },
}
# Ours come first, and Megatron's after them.
OF_MEGATRON = ("megatron-cp train", "launch", "pretrain_gpt.py")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "megatron-cp " else pytest.mark.slow) for n in PROGRAMS],
)
def test_help(name: str, tmp_path: Path) -> None:
    """In forks: test_packages.py starts the command as users do."""
    (done,) = run_program(tmp_path, *PROGRAMS[name], "--help").processes
    if "No module named 'triton'" in done.stderr:
        pytest.skip("needs triton")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("usage: ")
    assert "Traceback" not in done.stderr
    if name in OF_MEGATRON:
        ours, _, theirs = done.stdout.partition("Any flag of Megatron-LM may follow")
        assert "--context-parallel-algo" in ours
        assert "default" in ours
        assert "example:" in ours
        assert "--num-layers" in theirs
        assert "--context-parallel-algo" not in theirs
