"""Algorithms and kernels of other installed packages: known wherever a name is given."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin import registry
from megatron_cp_plugin.core.kernel import Problem
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels import choice, kernel_names, register_kernel, resolve
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.packages import load_installed
from tests.oracle import expected_attention
from tests.test_conformance import Case, assert_matches, run
from tests.test_foreign_algorithm import example

KERNEL = """
from megatron_cp_plugin.kernels import register_kernel
from megatron_cp_plugin.kernels.reference import Reference


@register_kernel
class Ours(Reference):
    name = "ours"
"""


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where packages are installed, for one test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_algorithms", dict(registry._algorithms))
    monkeypatch.setattr(choice, "_KERNELS", dict(choice._KERNELS))
    load_installed.cache_clear()
    yield tmp_path
    for module in ("striped_package", "kernel_package"):
        sys.modules.pop(module, None)
    resolve.cache_clear()
    load_installed.cache_clear()


def install(packages: Path, module: str, code: str) -> None:
    """As pip does, a package with one module that it lists as an entry point."""
    (packages / f"{module}.py").write_text(code)
    about = packages / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[megatron_cp_plugin]\n{module} = {module}\n")


def test_pip_installs_into_the_environment_that_runs() -> None:
    """CONTRIBUTING.md installs a package with it; one from outside would do so somewhere else."""
    command = [sys.executable, "-m", "pip", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (Path(sys.executable).parent / "pip").exists()


def test_a_script_beside_the_checkout_finds_the_package(tmp_path: Path) -> None:
    """The checkout's folder has the package's name."""
    (tmp_path / "megatron_cp_plugin").mkdir()
    find = "from importlib.util import find_spec\nassert find_spec('megatron_cp_plugin').origin\n"
    (tmp_path / "script.py").write_text(find)  # a folder without __init__.py has no origin
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_name_is_enough(packages: Path) -> None:
    install(packages, "striped_package", example())
    install(packages, "kernel_package", KERNEL)
    expected = expected_attention(seq_len=30, causal=True)
    case = Case("striped_here", (("travels", "queries"),))
    results, _ = run(case, expected, 3, kernel="ours")
    assert_matches(case, results, expected, bound=1e-10)
    assert "striped_here" in cp.available("softmax")
    assert "ours" in kernel_names()


def test_other_processes_know_them(packages: Path) -> None:
    """Those that programs start, in which nobody imports anything by hand."""
    install(packages, "striped_package", example())
    words = "-m", "megatron_cp_plugin.cli", "draw", "--algo", "striped_here", "--size", "3"
    path = os.pathsep.join((str(packages), str(Path(cp.__file__).parents[1])))
    found = subprocess.run(
        (sys.executable, *words),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "striped_here · 3 ranks" in found.stdout


def test_one_that_cannot_be_imported_is_named(packages: Path) -> None:
    install(packages, "striped_package", "import nothing_of_that_name")
    cp.attention(*torch.randn(3, 1, 8, 2, 4), algo="zigzag")  # which needs no other package
    with pytest.raises(ConfigError, match=r"^striped_package lists .* 'nothing_of_that_name'\): "):
        cp.available()
    with pytest.raises(ConfigError, match="striped_package lists striped_package"):
        registry.algorithm_class("striped_here")


def test_auto_takes_no_kernel_that_was_registered() -> None:
    problem = Problem(torch.device("cpu"), torch.float64, 4, 2, 8)

    @register_kernel
    class _Ours(Reference):
        name = "ours"

    assert resolve("auto", problem).name in ("torch_cpu", "reference")
    assert isinstance(resolve("ours", problem), _Ours)
    for name in ("ours", "auto", "reference", ""):
        with pytest.raises(ConfigError, match=f"kernel Other has the name '{name}': set another"):
            register_kernel(type("Other", (Reference,), {"name": name}))
    with pytest.raises(ConfigError, match="kernel 'half' has no method backward: define it in"):
        register_kernel(type("Half", (choice.SoftmaxKernel,), {"name": "half"}))
