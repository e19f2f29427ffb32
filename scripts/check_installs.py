"""Makes empty environments, installs the package in each in one of its ways, and tries it.

python scripts/check_installs.py [--only torch sdist megatron report editable]

Builds wheel and source distribution, installs each with no extra, the wheel with [megatron] and
with [report], and the clone editable with [dev], each in an environment of its own with the
versions of requirements.lock, and runs what each of them must be able to do. Needs uv, and a
package index or wheels.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1200

_EXAMPLE = """
# Long enough to be a data set too, in the trials that train on it:
# the sequence of one sample is split over many ranks, and each computes its part of attention
# against what the others send; forward and backward, causal or not, by an algorithm of your choice.
import torch, megatron_cp_plugin as cp
q, k, v = (torch.randn(1, 64, 4, 16, requires_grad=True) for _ in range(3))
cp.attention(q, k, v, algo="zigzag").sum().backward()
assert k.grad is not None
"""
_TRAIN = "megatron-cp train --config tiny_zigzag --train-iters 2 --log-interval 1"


@dataclass(frozen=True)
class Trial:
    """A command that must work, or be refused.

    Attributes: says: what must be in its output. code: its exit code.
    """

    command: str
    says: str = ""
    code: int = 0


@dataclass(frozen=True)
class Environment:
    """A way to install the package, and what it must be able to do then."""

    install: str
    trials: tuple[Trial, ...]


_TORCH_ALONE = (
    Trial("python example.py"),
    Trial("megatron-cp --help", "prepare-data"),
    Trial("megatron-cp draw --algo distflash --size 4", "q3 k3"),
    Trial("megatron-cp doctor --head-dim 16", "verdict: ok, "),
    Trial(
        "torchrun --nproc-per-node 2 -m megatron_cp_plugin.cli doctor --head-dim 16",
        "2 over gloo, 1 node(s)",
    ),
)
_REFUSED = (
    Trial(_TRAIN, "pip install 'megatron-cp-plugin[megatron]'", 2),
    Trial("python -m megatron_cp_plugin.launch example.py", "megatron-cp-plugin[megatron]", 2),
    Trial("megatron-cp prepare-data --output x", "pip install 'megatron-cp-plugin[megatron]'", 2),
    Trial("megatron-cp hooks --check", "pip install 'megatron-cp-plugin[megatron]'", 2),
)
ENVIRONMENTS = {
    "torch": Environment("{wheel}", (*_TORCH_ALONE, *_REFUSED)),
    "sdist": Environment("{sdist}", _TORCH_ALONE),
    "megatron": Environment(
        "{wheel}[megatron]",
        (
            *_TORCH_ALONE,
            Trial("megatron-cp hooks --check", "0 difference(s)"),
            Trial(
                "megatron-cp plan --size 8 --seq-len 128K --heads 32:8 --machine h200", "auto chose"
            ),
            Trial("megatron-cp train --help", "--context-parallel-algo NAME"),
            Trial(_TRAIN, "megatron-cp prepare-data --output data/stdlib", 2),
            Trial(
                "megatron-cp prepare-data example.py --output data/stdlib --document-bytes 1",
                "documents",
            ),
            Trial(f"{_TRAIN} --seq-length 16", "iteration        2/"),
            Trial(
                "torchrun --nproc-per-node 2 -m megatron_cp_plugin.cli train --config tiny_zigzag "
                "--context-parallel-size 2 --train-iters 1 --log-interval 1 --seq-length 16",
                "iteration        1/",
            ),
        ),
    ),
    "report": Environment(
        "{wheel}[report]",
        (
            *_TORCH_ALONE,
            *_REFUSED,
            Trial("megatron-cp draw --algo ring --size 4 --tokens --output ring.svg", "ring.svg"),
        ),
    ),
    "editable": Environment(
        "--editable {root}[dev]",
        (
            *_TORCH_ALONE,
            Trial(
                "megatron-cp prepare-data example.py --output data/stdlib --document-bytes 1",
                "documents",
            ),
            Trial(
                "torchrun --nproc-per-node 2 {root}/scripts/pretrain_gpt.py --config "
                "{root}/configs/tiny_zigzag.yaml --context-parallel-size 2 --train-iters 1 "
                "--log-interval 1 --seq-length 16",
                "iteration        1/",
            ),
            Trial("pytest -q {root}/tests/test_import.py", "passed"),
        ),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script; returns its exit code: 1 if something does not do what it must."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(ENVIRONMENTS), default=list(ENVIRONMENTS))
    parser.add_argument("--python", default=sys.executable, help="default: the one that runs this")
    args = parser.parse_args(argv)
    uv = shutil.which("uv") or shutil.which(str(ROOT / ".venv-uv" / "bin" / "uv"))
    if uv is None:
        parser.error("needs uv, got none on PATH nor in .venv-uv: pip install uv")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        # By way of the source distribution, so that a stale build folder is not in it.
        build = [uv, "build", "--quiet", "--python", args.python, "--out-dir", folder]
        _run([*build, str(ROOT)], place)
        (wheel,), (sdist,) = place.glob("*.whl"), place.glob("*.tar.gz")
        places = {"wheel": wheel, "sdist": sdist, "root": ROOT}
        for name in args.only:
            failed += _try(name, ENVIRONMENTS[name], uv, args.python, places)
    print(f"{failed} failed")
    return 1 if failed else 0


def _try(
    name: str, environment: Environment, uv: str, python: str, places: Mapping[str, Path]
) -> int:
    """Makes an environment and runs its trials; returns how many failed.

    Args: places: of what is installed, by name.
    """
    # A folder of its own, so that nothing of the checkout is found by chance.
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        interpreter = str(place / "venv" / "bin" / "python")
        start = time.monotonic()
        _run([uv, "venv", "--quiet", "--python", python, "venv"], place)
        _run(
            [
                *(uv, "pip", "install", "--quiet", "--python", interpreter),
                *("--constraint", str(ROOT / "requirements.lock")),
                *environment.install.format(**places).split(),
            ],
            place,
        )
        print(f"{name}: installed in {time.monotonic() - start:.0f} s", flush=True)
        (place / "example.py").write_text(_EXAMPLE)
        failed = 0
        for trial in environment.trials:
            command = trial.command.format(**places).split()
            command[0] = str(place / "venv" / "bin" / command[0])
            start = time.monotonic()
            done = subprocess.run(
                command, cwd=place, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            right = done.returncode == trial.code and trial.says in done.stdout + done.stderr
            failed += not right
            verdict = "ok" if right else f"FAILED (exit code {done.returncode})"
            took = time.monotonic() - start
            print(f"{name}: {verdict}: {trial.command} ({took:.0f} s)", flush=True)
            if not right:
                print((done.stdout + done.stderr)[-3000:], flush=True)
        return failed


def _run(command: Sequence[str], place: Path) -> None:
    subprocess.run(command, cwd=place, check=True, timeout=TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
