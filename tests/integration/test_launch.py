"""The launcher: what it replaces of Megatron, and how it ends a run that cannot start."""

import json
import os
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration import installer, launch
from megatron_cp_plugin.integration.args import split_flags
from megatron_cp_plugin.integration.inputs import CutInputs
from megatron_cp_plugin.integration.installer import LauncherInstaller
from megatron_cp_plugin.integration.runtime import Runtime
from tests.integration.megatron_job import LAUNCH, TINY, Job, run_warm
from tests.integration.ranks import ALONE

# What a process does once it has imported Megatron, each in a fork of its own.
_FORKS = """
import os, sys
import torch
# Seconds of imports, for nothing that is looked at.
sys.modules["wandb"] = None
compile, torch.compile = torch.compile, lambda function=None, **_: function or torch.compile
import megatron.training.training, megatron.core.datasets.utils, megatron.core.recompute
import megatron.training.models.gpt, megatron.core.models.gpt.gpt_model
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import random
from megatron.core.transformer import multi_token_prediction

torch.compile = compile
del sys.modules["wandb"]

for number, program in enumerate(sys.argv[1:]):
    sys.stdout.flush()
    if not os.fork():
        print("PROGRAM", number)
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"program {number} failed")
"""

# Prints which names of Megatron, torch and torch.cuda are others after `prepare`, and under which
# names Megatron had what the table says is replaced.
_DIFFERENCE = """
import importlib, json
from megatron_cp_plugin.integration import launch
from megatron_cp_plugin.integration.compat import running_version
from megatron_cp_plugin.integration.contract import NAMES

def names():
    modules = {n: m for n, m in sys.modules.items() if m and n.split(".")[0] == "megatron"}
    modules |= {"torch": torch, "torch.cuda": torch.cuda, "torch.accelerator": torch.accelerator}
    modules |= {"Tensor": torch.Tensor, "Optimizer": torch.optim.Optimizer}
    for name, module in list(modules.items()):
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                modules[name + "." + key] = value
    return {
        n + "." + k: id(v) for n, m in modules.items() for k, v in vars(m).items()
        if not k.startswith("__") or k in ("__init__", "__new__", "__post_init__")
    }

if GPU:
    torch.cuda.is_available = lambda: True
version, _ = running_version()
rows = [row for row in NAMES if row.part in PARTS and row.is_in(version)]
for row in rows:
    importlib.import_module(row.module)
before = names()
paths = {row.path for row in rows}
originals = {before[path] for path in paths} - {id(None)}
listed = sorted(n for n in before if before[n] in originals or n in paths)
for argv in ARGV:
    rest = launch.prepare(argv.split())
after = names()
changed = sorted(n for n in before if n in after and before[n] != after[n])
print("RESULT" + json.dumps({"rest": rest, "changed": changed, "listed": listed}))
"""


def difference(*argv: str, gpu: bool, parts: tuple[str, ...] = ()) -> str:
    program = _DIFFERENCE.replace("GPU", str(gpu)).replace("PARTS", str(parts))
    return program.replace("ARGV", str(argv))


_IMPORTERS = """
from megatron_cp_plugin.integration import launch

torch.cuda.is_available = lambda: True
originals = transformer_engine.te_checkpoint, random.checkpoint
launch.prepare("--context-parallel-algo ring".split())
for name, module in sorted(sys.modules.items()):
    if name.startswith("megatron."):
        for key, value in vars(module).items():
            if any(value is original for original in originals):
                print("LEFT", name + "." + key)
"""
# A worker that a program starts with what `prepare` has left to it.
_WORKER = """
from megatron.training.arguments import parse_args
sys.argv = "worker --lr 1 --context-parallel-algo ring".split()
sys.stderr = sys.stdout
try:
    parse_args()
except SystemExit as end:
    print("CODE", end.code)
"""

PROGRAMS = {
    "nothing": difference(
        "--lr 1",
        "--lr 1 --context-parallel-algo megatron",
        "--lr 1 --cp-platform cuda",
        gpu=True,
    ),
    # The loss in chunks replaces one more.
    "algorithm": difference(
        "--lr 1 --context-parallel-algo ring --cp-chunked-loss",
        gpu=True,
        parts=("any", "algorithm", "training"),
    ),
    "cpu": difference("--lr 1 --cp-platform cpu", gpu=False, parts=("any", "cpu")),
    "importers": _IMPORTERS,
    "worker": _WORKER,
}


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """By each of `PROGRAMS`."""
    output = subprocess.run(
        [sys.executable, "-c", _FORKS, *PROGRAMS.values()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert output.returncode == 0, output.stderr
    _, *texts = re.split(r"^PROGRAM \d+$", output.stdout, flags=re.MULTILINE)
    return dict(zip(PROGRAMS, texts, strict=True))


def result(printed: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(printed.split("RESULT")[1])
    return found


@pytest.mark.slow
def test_without_an_algorithm_nothing_of_megatron_changes(printed: dict[str, str]) -> None:
    found = result(printed["nothing"])
    assert (found["changed"], found["rest"]) == ([], ["--lr", "1"])


@pytest.mark.slow
def test_an_algorithm_replaces_the_names_of_the_table_and_no_others(
    printed: dict[str, str],
) -> None:
    """Wherever modules of Megatron have imported them."""
    found = result(printed["algorithm"])
    assert found["rest"] == ["--lr", "1", "--context-parallel-algo", "ring"]
    assert found["changed"] == found["listed"]
    assert len(found["listed"]) > 12  # some under several names


@pytest.mark.slow
def test_the_cpu_platform_replaces_the_names_of_the_table_and_no_others(
    printed: dict[str, str],
) -> None:
    # Only what a run needs; nothing is in force beside it without an algorithm.
    found = result(printed["cpu"])
    assert "torch.cuda.is_available" in found["changed"]
    assert [n for n in found["changed"] if n.startswith("megatron.")] == found["listed"]
    assert found["rest"][:4] == ["--lr", "1", "--distributed-backend", "gloo"]


@pytest.mark.slow
def test_no_module_of_megatron_keeps_a_checkpoint_that_runs_attention_twice(
    printed: dict[str, str],
) -> None:
    """Multi-token prediction takes `te_checkpoint` from where it is defined, when it runs."""
    lines = printed["importers"].splitlines()
    assert [line for line in lines if line.startswith("LEFT")] == []


@pytest.mark.slow
def test_a_worker_without_the_plugin_refuses_the_same_command_line(printed: dict[str, str]) -> None:
    """It would train with Megatron's own attention, and without a word."""
    *_, refusal, code = printed["worker"].splitlines()
    assert refusal.endswith(": error: unrecognized arguments: --context-parallel-algo ring")
    assert code == "CODE 2"


def refused(job: Job) -> str:
    """The one line that every rank of a refused job prints."""
    assert [p.returncode for p in job.processes] == [2] * len(job.processes), job.text[-3000:]
    errors = {
        line
        for process in job.processes
        for line in process.stderr.splitlines()
        if line.startswith("megatron_cp_plugin: error: ")
    }
    assert len(errors) == 1
    for process in job.processes:
        assert process.stderr.count("megatron_cp_plugin: error: ") == 1
        assert "Traceback" not in process.stderr
    assert not job.losses
    return errors.pop().removeprefix("megatron_cp_plugin: error: ")


@pytest.mark.parametrize(("rank", "said"), [("0", 3), ("1", 1)])
def test_one_rank_says_what_is_not_installed(
    rank: str, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        launch._let_first_rank_warn()
        for message, module in (
            ("Apex is not installed. Falling back to Torch Norm", "megatron.core.models.backends"),
            ("Only TE>=1.7.0 supports it, but your version is 0.0.0.", "megatron.core.extensions"),
            ("The loss is not a number", "megatron.training.training"),
        ):
            warnings.warn_explicit(message, UserWarning, "file.py", 1, module)
    assert len(caught) == said
    assert str(caught[-1].message).startswith("The loss")


def test_model_that_megatron_refuses_to_build(tmp_path: Path) -> None:
    """It does so by an assertion, once all ranks are there."""
    flags = "--context-parallel-algo zigzag --context-parallel-size 2"
    flags += " --num-distributed-optimizer-instances 2"
    said = refused(run_warm(tmp_path, *TINY, *flags.split(), ranks=2))
    assert said.startswith(
        "the model or its optimizer cannot be built: Partial DistOpt cannot be used without "
        "DistOpt (distributed_data_parallel.py, line "
    )


@pytest.mark.skipif(
    find_spec("transformer_engine") is not None,
    reason="what is said where Transformer Engine is missing, and here it is installed",
)
@pytest.mark.parametrize("stack", ["", "megatron.core.models.hybrid.hybrid_layer_specs x"])
def test_layers_that_are_not_installed(stack: str, tmp_path: Path) -> None:
    flags = "--context-parallel-algo zigzag --hybrid-layer-pattern *-"
    words = [*flags.split(), *(["--spec", *stack.split()] if stack else [])]
    said = refused(run_warm(tmp_path, *TINY, *words))
    assert said == (
        "Megatron's hybrid models have layers of Transformer Engine, which is not installed, got "
        "--hybrid-layer-pattern *-: install it, or name a stack of other layers with --spec"
    )


def test_script_that_builds_a_model_before_its_arguments_are_checked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from megatron.core.models.gpt import GPTModel\nGPTModel(None, None, 1, 1)\n")
    words = (str(script), *TINY, "--context-parallel-algo", "ring")
    job = run_warm(tmp_path, *words, script=LAUNCH)
    assert "needs a script that lets Megatron validate its arguments before" in refused(job)


def served_model() -> GPTModel:
    """A model without layers, whose inputs are looked at."""
    gpt = GPTModel.__new__(GPTModel)
    torch.nn.Module.__init__(gpt)
    CutInputs(gpt, Runtime(ContextParallelConfig("ring", 1)), ALONE)
    return gpt


def test_model_of_another_kind_is_refused() -> None:
    of_ring = LauncherInstaller(
        split_flags(["--context-parallel-algo", "ring"])[0], torch.device("cpu")
    )

    def set_up(*models: Any) -> Any:
        return of_ring._set_up_model(lambda: (list(models), "adam", "schedule"))

    gpt, other = served_model(), torch.nn.Linear(1, 1)
    assert set_up(gpt) == ([gpt], "adam", "schedule")
    with pytest.raises(
        ContextParallelError, match="ring supports GPTModel and HybridModel, got Lin"
    ):
        set_up(gpt, other)


def test_the_inner_wrapper_of_megatron_fsdp_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    monkeypatch.setattr(mcore_fsdp_adapter, "HAVE_MEGATRON_FSDP", True)
    monkeypatch.setattr(mcore_fsdp_adapter, "MegatronFSDP", Wrapper, raising=False)
    gpt = served_model()
    of_ring = LauncherInstaller(
        split_flags(["--context-parallel-algo", "ring"])[0], torch.device("cpu")
    )
    models = [Wrapper(gpt)]
    assert of_ring._set_up_model(lambda: (models,)) == (models,)


@pytest.mark.parametrize(
    ("flag", "set_to"), [("", "1"), ("--use-torch-fsdp2", None), ("--use-megatron-fsdp", None)]
)
def test_connections_that_megatron_demands(
    flag: str, set_to: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with context parallelism; with sharded data parallelism anything else."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(LauncherInstaller, "install", lambda self, **_: None)
    monkeypatch.setattr(installer, "skip_built_helpers", lambda: None)
    # To be taken back, whatever is set.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "2")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    launch.prepare(["--context-parallel-algo", "ring", *flag.split()])
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == set_to


@pytest.mark.parametrize(
    ("flags", "installed", "got"),
    [
        ("--context-parallel-size 4", False, "none installed"),
        ("--context-parallel-size 4 --transformer-impl local", True, "--transformer-impl local"),
        ("--context-parallel-size=4", True, None),
        ("--context-parallel-size 4 --spec some stack", False, None),
        ("--context-parallel-size 1", False, None),
        ("--sft", False, "none installed"),
        ("--dataloader-inter-document-masking", True, None),
        ("", False, None),
    ],
)
def test_megatrons_own_path_on_gpus(
    flags: str, installed: bool, got: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch, "find_spec", lambda name: name if installed else None)
    if got is None:
        assert launch.prepare(flags.split()) == flags.split()
        return
    what = "--sft: use --context-parallel-algo zigzag" if "sft" in flags else "context_parallel_s"
    with pytest.raises(ConfigError, match=f"Transformer Engine, got {got} and {what}"):
        launch.prepare(flags.split())


def test_help_may_be_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `head`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        launch._print_help([], run_file=True)
