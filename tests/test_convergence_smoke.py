"""The script that trains with and without context parallelism, and says whether runs are equal."""

import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from megatron_cp_plugin.harness import prepare_data
from megatron_cp_plugin.harness.parity import Recording
from megatron_cp_plugin.harness.train import CommandLine
from tests import forked_launch
from tests.test_parity import recording, scale_gradient, set_iteration, write

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "convergence_smoke.py"


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        return importlib.import_module("convergence_smoke")


def variant(*settings: Any) -> Any:
    """An algorithm with options; call after the harness has been imported."""
    return sys.modules["convergence_runs"].Variant(*settings)


def test_run_that_fell_back_is_seen(harness: ModuleType) -> None:
    run = harness.Run(variant("zigzag"), 2, 2)
    assert harness.check_is(recording(2), run, 3) == []
    assert "was 'megatron'" in harness.check_is(recording(2, algo="megatron"), run, 3)[0]
    assert "recorded [3] iterations, not 4" in harness.check_is(recording(2), run, 4)[0]
    assert "not split" in harness.check_is(recording(2, sent=0), run, 3)[0]
    found = harness.check_is(recording(1), run, 3)
    assert found == ["context_parallel_size was 1, not 2", "world_size was 1, not 2"]


RUN_FILE = """
megatron:
  num_layers: 2
  context-parallel-size: 8
  train_iters: 100
  lr_decay_iters: ${megatron.train_iters}
  save: checkpoints
  seq_length: 64
context_parallel:
  algo: ring
  kernel: reference
  platform: cpu
  backward: kv
"""


def test_run_file_of_one_run(harness: ModuleType) -> None:
    config = OmegaConf.create(RUN_FILE)

    def made(*run: object) -> dict[str, dict[str, object]]:
        return OmegaConf.to_container(  # type: ignore[return-value]
            harness.run_file(config, harness.Run(*run), 7), resolve=True
        )

    ring = made(variant("ring"), 4, 4)
    assert ring["megatron"] == {
        "num_layers": 2,
        "lr_decay_iters": 7,
        "seq_length": 64,
        "context_parallel_size": 4,
        "train_iters": 7,
    }
    assert ring["context_parallel"] == {
        "algo": "ring",
        "kernel": "reference",
        "platform": "cpu",
        "backward": "kv",
    }
    forced = made(variant("ring", (("backward", "query"),)), 4, 4)["context_parallel"]
    assert forced["backward"] == "query"
    # The options of ring are not those of zigzag, and Megatron's own path has no kernel of ours.
    zigzag = made(variant("zigzag"), 4, 4)["context_parallel"]
    assert zigzag == {"algo": "zigzag", "kernel": "reference", "platform": "cpu"}
    assert made(None, 1, 1)["context_parallel"] == {"algo": "megatron", "platform": "cpu"}


def line_of(folder: Path, *extra: str) -> CommandLine:
    """The run file above, and flags."""
    path = folder / "run.yaml"
    path.write_text(RUN_FILE)
    return CommandLine.of(["--config", str(path), *extra])


def test_plan(harness: ModuleType, tmp_path: Path) -> None:
    line = line_of(tmp_path, "--tensor-model-parallel-size", "2", "--seq-length", "96")
    runs = harness.plan(harness.parse_variants("ring,zigzag"), [1, 3], line, 2)
    assert [(run.algo, run.cp, run.processes) for run in runs] == [
        ("megatron", 1, 4),
        ("ring", 1, 4),
        ("ring", 3, 12),
        ("zigzag", 1, 4),
        ("zigzag", 3, 12),
    ]
    assert len({run.folder for run in runs}) == len(runs)


def test_the_reference_of_packed_documents_has_a_mask_of_all_pairs(harness: ModuleType) -> None:
    config = OmegaConf.create(RUN_FILE)
    config.megatron["dataloader-inter-document-masking"] = True
    runs = harness.Run(None, 1, 1, is_reference=True), harness.Run(variant("ring"), 4, 4)
    own, ring = (harness.run_file(config, run, 3).megatron for run in runs)
    assert own.reset_attention_mask
    assert own.reset_position_ids
    assert "dataloader-inter-document-masking" not in own
    assert ring["dataloader-inter-document-masking"]
    assert "reset_attention_mask" not in ring


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algos", "zagzig"], "did you mean 'zigzag'?"),
        (["--algos", "ring:backward=kw"], "use one of auto, kv, query"),
        (["--algos", "ring:backward"], "write NAME:OPTION=VALUE"),
        (["--algos", "ring,ring"], "twice"),
        (["--algos", ""], "--algos needs a name"),
        (["--cp", "1,x"], "--cp takes whole numbers"),
        (["--cp", "0"], "--cp takes whole numbers"),
        (["--cp", "2,2"], "twice"),
        (["--cp", "5"], "ring needs seq_length divisible by context_parallel_size = 5, got 64"),
        (["--iters", "0"], "must be positive"),
        (["--config", "nope.yaml"], "no such run file"),
        (["--", "--bf16"], "give --loss-tolerance and --grad-tolerance"),
        (["--", "--train-iters", "3"], "--train-iters cannot follow --"),
        (["--", "--seq-length", "x"], "--seq-length takes a whole number, got 'x'"),
    ],
)
def test_wrong_commands_end_in_one_line(
    harness: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(harness, "launch", lambda *_: pytest.fail("a run was started"))
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE)
    output = ["--output", str(tmp_path / "out")]
    assert harness.main(["--config", str(path), *output, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture
def program(
    harness: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, Any]]:
    """Runs the whole program with recordings in place of trainings; that of CP 2 is not right.

    Returns: its exit code, what it prints, and the report.
    """

    def run(
        change: Callable[[Recording], None] = lambda run: None, failure: str = ""
    ) -> tuple[int, str, Any]:
        def launch(run: Any, folder: Path, *_: object) -> str:
            recorded = recording(run.cp, algo=run.algo)
            (folder / "log.txt").write_text("what went wrong\n")
            if run.cp == 2:
                change(recorded)
                if failure:
                    return failure
            write(recorded, folder / "recording")
            return ""

        monkeypatch.setattr(harness, "launch", launch)
        path, output = tmp_path / "run.yaml", tmp_path / "o"
        path.write_text(RUN_FILE)
        words = ["--config", str(path), "--cp", "1,2", "--iters", "3", "--output", str(output)]
        code = harness.main(words)
        return code, capsys.readouterr().out, json.loads((output / "report.json").read_text())

    return run


def test_program_passes_equal_runs(program: Any, tmp_path: Path) -> None:
    code, out, report = program()
    assert (code, report["passed"], out.count("│ equal")) == (0, True, 2)
    assert f"numbers: {tmp_path / 'o' / 'report.json'}" in out
    assert [run["context_parallel_size"] for run in report["runs"]] == [1, 1, 2]
    assert report["runs"][2]["losses"]["lm loss"][0] == 5.0


@pytest.mark.parametrize(
    "change",
    [
        scale_gradient("layers.0.bias", 1.001, 3),
        lambda run: set_iteration(run, 2, losses={"lm loss": math.nan}),
    ],
)
def test_program_fails_wrong_runs(program: Any, change: Callable[[Recording], None]) -> None:
    code, out, report = program(change)
    assert (code, report["passed"]) == (1, False)
    assert "DIFFERENT" in out
    assert "ring, CP 2: " in out
    assert [run["passed"] for run in report["runs"]] == [True, True, False]


def test_program_fails_if_a_run_does(program: Any) -> None:
    code, out, _ = program(failure="exit code 1")
    assert code == 1
    assert "what went wrong" in out
    assert "failed" in out
    assert "ring, CP 2: exit code 1; log: " in out


SABOTAGE = """
import runpy, sys
from megatron_cp_plugin.core.execution.executor import Executor

right = Executor.differentiate
calls = 0

def wrong(self, *args, **kwargs):
    global calls
    calls += 1
    dq, dk, dv = right(self, *args, **kwargs)
    return dq, dk * (1.001 if calls > {first}[self.transport._algorithm] else 1), dv

Executor.differentiate = wrong
sys.argv[0] = {launcher!r}
runpy.run_path({launcher!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def tiny_run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file with a corpus of its own, smaller than the shipped ones."""
    folder = tmp_path_factory.mktemp("tiny")
    text = str(ROOT / "megatron_cp_plugin")
    assert prepare_data.main([text, "--output", str(folder / "text")]) == 0
    config = OmegaConf.load(ROOT / "configs" / "tiny_zigzag.yaml")
    config.megatron.update(
        hidden_size=64, ffn_hidden_size=128, seq_length=64, data_path=[str(folder / "text")]
    )
    OmegaConf.save(config, folder / "run.yaml")
    return folder / "run.yaml"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wrong_key_gradient_in_training_is_caught(
    harness: ModuleType, tmp_path: Path, tiny_run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part in a thousand of dK, of zigzag from the first, of ring in the last iteration."""
    launcher = tmp_path / "sabotage.py"
    # Two layers and two micro-batches make four calls an iteration.
    first = {"zigzag": 0, "ring": 12}
    launcher.write_text(SABOTAGE.format(launcher=str(harness.LAUNCHER), first=first))
    monkeypatch.setattr(harness, "LAUNCHER", launcher)
    monkeypatch.setattr(harness, "launch", forked_launch.launch)
    words = ["--config", str(tiny_run_file), "--algos", "zigzag,ring", "--cp", "2", "--iters", "4"]
    assert harness.main([*words, "--output", str(tmp_path / "out")]) == 1
    reference, *runs = json.loads((tmp_path / "out" / "report.json").read_text())["runs"]
    assert [run["failure"] for run in (reference, *runs)] == ["", "", ""]
    for run, step in zip(runs, (1, 4), strict=True):
        assert_only_keys_are_wrong(run["comparison"], step)


def assert_only_keys_are_wrong(found: dict[str, Any], step: int) -> None:
    """From that iteration on, in which nothing above attention is wrong yet."""
    errors = {
        tuple(name.split(", iteration ")): error for name, error in found["gradients"].items()
    }
    wrong = {name for (name, at), error in errors.items() if error > 1e-4 and at == str(step)}
    assert {at for (_, at), error in errors.items() if error > 1e-4 and int(at) < step} == set()
    assert "decoder.layers.1.self_attention.linear_qkv.weight[key]" in wrong
    above = (
        "output_layer",
        "final_layernorm",
        "layers.1.mlp",
        "layers.1.self_attention.linear_proj",
    )
    assert not [name for name in wrong if any(part in name for part in above)]
    assert "decoder.layers.1.self_attention.linear_qkv.weight[query]" not in wrong
