"""The parity runs of GPUs, as far as they can be tested without one."""

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.training.arguments import add_megatron_arguments
from omegaconf import OmegaConf

from megatron_cp_plugin.harness.parity import Iteration, RankRecording, Recording
from megatron_cp_plugin.integration.args import add_arguments, split_flags
from megatron_cp_plugin.integration.checks import check_arguments
from megatron_cp_plugin.integration.rules import check
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.integration.yaml_config import yaml_to_argv
from tests import forked_launch

SCRIPT = Path(__file__).parents[1] / "scripts" / "parity_gpus.py"


@pytest.fixture(scope="module")
def gpus() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        return importlib.import_module("parity_gpus")


@pytest.fixture(scope="module")
def table(gpus: ModuleType) -> ModuleType:
    return importlib.import_module("parity_gpu_rows")


@pytest.fixture(scope="module")
def pages(gpus: ModuleType) -> ModuleType:
    return importlib.import_module("parity_pages")


@pytest.mark.slow
def test_run_files_are_accepted(
    gpus: ModuleType, table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Megatron's parser and by the start-up checks, so that no GPU is asked in vain."""
    monkeypatch.setattr("megatron.core.ssm.gated_delta_net.HAVE_FLA", True)
    parser, both = (
        add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)) for _ in range(2)
    )
    add_arguments(both)
    names = set()
    for job in (job for row in table.ROWS for job in gpus.jobs_of(row)):
        names.add(job.name)
        config = job.config
        config.megatron.data_path = ["text"]
        made = gpus.run_file(config, job.run, job.iterations)
        OmegaConf.save(made, tmp_path / "run.yaml")
        argv = yaml_to_argv(str(tmp_path / "run.yaml"), both)
        flags, rest = split_flags(argv)
        assert flags.platform == "cuda"
        flags.check()
        args = parser.parse_args(rest)
        args.world_size = job.run.processes
        assert (flags.algo is None) == (job.run.variant is None)
        if flags.algo is not None:
            config = flags.config(args.context_parallel_size)
            device = torch.device("cuda")
            check("validated", Settings(args, config, device))
            if flags.kernel in ("auto", "chunked"):  # which are tried where they run
                device, args.cuda_graph_impl = torch.device("cpu"), "none"
            check_arguments(args, config, device)
    assert {f"bf16/{algo}" for algo in table.SOFTMAX.split(",")} < names
    assert "fp8/yardstick" in names


def measured(loss: float, **gradients: float) -> dict[str, Any]:
    return {
        "role": "zigzag",
        "failure": "",
        "problems": [],
        "loss_error": loss,
        "gradient_errors": gradients,
    }


STICK = measured(1e-4, a=1e-2, b=2e-2, c=3e-2)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (measured(2.9e-4, a=3.9e-2, b=3.9e-2, c=5.9e-2), ""),
        # Half the median one: allowed what the median one is.
        (measured(1e-4, a=4.2e-2, b=1e-2, c=1e-2), "off by 4.2e-02, 2.1 times the yardstick: a"),
        (measured(1e-4, a=1e-2, b=1e-2, c=6.3e-2), "off by 6.3e-02, 2.1 times the yardstick: c"),
        (measured(1e-4, a=math.nan, b=1e-2, c=1e-2), "inf times the yardstick: a"),
        (measured(3.1e-4, a=1e-2), "a loss is off by 3.1e-04 (allowed 3.0e-04)"),
        (measured(math.nan, a=1e-2), "a loss is off by nan"),
        (measured(0.0, a=0.0) | {"problems": ["one"]}, "one"),
        (measured(0.0, a=0.0) | {"failure": "exit code 1"}, "exit code 1"),
    ],
)
def test_runs_are_held_to_the_yardstick(gpus: ModuleType, run: dict[str, Any], said: str) -> None:
    found = gpus.judge(run, STICK)
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_a_yardstick_that_failed_measures_nothing(gpus: ModuleType) -> None:
    run = measured(0.0, a=0.0)
    broken = {"role": "yardstick", "failure": "exit code 1", "problems": []}
    assert gpus.judge(run, broken) == ["the yardstick failed"]
    assert gpus.judge(run, STICK | {"problems": ["diverged"]}) == ["the yardstick failed"]
    assert gpus.judge(run, None) == []


def report(*runs: dict[str, Any]) -> dict[str, Any]:
    about = {"date": "2026-11-22", "commit": "abc", "versions": "torch 2", "device": "2 x H200"}
    row = {"key": "bf16", "about": "bfloat16", "yardstick": STICK, "runs": runs}
    failed = row | {"key": "fp8", "runs": [{"role": "ring", "failure": "x", "problems": []}]}
    fixed = row | {"key": "fp32", "yardstick": None}
    return {"about": about, "rows": [row, failed, fixed]}


def test_the_table_goes_into_the_page(
    gpus: ModuleType, pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "parity.md"
    page.write_text("# Parity\n\nof CPUs\n")
    graphs = tmp_path / "graphs.md"
    graphs.write_text("as it was")
    monkeypatch.setattr(pages, "TABLE", page)
    monkeypatch.setattr(pages, "GRAPHS_PAGE", graphs)
    rows = tmp_path / "rows.json"
    for error in (1e-2, 9e-2):
        rows.write_text(json.dumps(report(measured(1e-5, a=error))))
        assert gpus.main(["--table", str(rows)]) == 0
    text = page.read_text()
    assert text.startswith("# Parity\n\nof CPUs\n\n## On GPUs\n\n")
    assert text.count(pages.ON_GPUS) == 1
    assert "on 2026-11-22, commit abc: torch 2, 2 x H200." in text
    assert "| `bf16` | bfloat16 | 1e-04 / 3e-02 | zigzag **1e-05 / 9e-02 (4.5)** |" in text
    assert "ring **failed** |" in text
    assert "| `fp32` | bfloat16 |  | zigzag 1e-05 / 9e-02 |" in text
    assert graphs.read_text() == "as it was"


def test_captured_runs_go_into_a_page_of_their_own(
    gpus: ModuleType,
    table: ModuleType,
    pages: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other, page = tmp_path / "parity.md", tmp_path / "graphs.md"
    other.write_text("as it was")
    page.write_text(f"# Graphs\n\n{pages.graphs_section(None, table.captured_models())}")
    monkeypatch.setattr(pages, "TABLE", other)
    monkeypatch.setattr(pages, "GRAPHS_PAGE", page)
    found = report(measured(1e-5, a=1e-2))
    eager = found["rows"][0] | {"key": "graphs"}
    local, te, full = (
        {"key": f"graphs-{who}", "about": "", "yardstick": None, "runs": [run]}
        for who, run in (
            ("local", measured(0.0, a=0.0)),
            ("te", measured(0.0, a=0.0) | {"problems": ["a gradient differs"]}),
            ("full", {"role": "zigzag", "failure": "exit code 1", "problems": []}),
        )
    )
    (tmp_path / "rows.json").write_text(json.dumps(found | {"rows": [eager, local, te, full]}))
    assert gpus.main(["--table", str(tmp_path / "rows.json")]) == 0
    text = page.read_text()
    assert other.read_text() == "as it was"
    assert text.count(pages.ON_CAPTURED_RUNS) == 1
    assert "commit abc: torch 2, 2 x H200." in text
    cells = "1e-05 / 1e-02 (0.5) | equal | **differs** | **failed**"
    assert f"| bfloat16 | zigzag | peer memory | {cells} |" in text
    assert "| bfloat16 | ulysses | process group |  |  |  |  |" in text


def test_the_page_on_graphs_has_what_is_run(
    gpus: ModuleType, table: ModuleType, pages: ModuleType
) -> None:
    """So that a new algorithm cannot be forgotten there; results are the GPUs'."""
    page = pages.GRAPHS_PAGE.read_text()

    def names(text: str) -> list[list[str]]:
        table = text.partition(pages.ON_CAPTURED_RUNS)[2].splitlines()
        return [line.split(" | ")[:3] for line in table if line.startswith("|")]

    assert names(page) == names(pages.graphs_section(None, table.captured_models()))


def recorded(replays: int, sent: int, digest: str = "a") -> Recording:
    """What two ranks recorded of their only iteration."""
    rank = RankRecording(
        settings={},
        shard=(0, 0, 0),
        weights={},
        gradients={1: {"weight": digest}},
        communication={},
        iterations=[],
        replays={1: replays},
        sent_bytes={1: sent},
    )
    return Recording([rank, rank], {})


@pytest.mark.parametrize(
    ("replays", "sent", "captured", "said"),
    [
        (8, 0, True, ""),
        (0, 64, False, ""),
        (0, 64, True, "rank 0 replayed 0 CUDA graphs in iteration 1"),
        (0, 0, True, "rank 0 replayed 0 CUDA graphs in iteration 1"),
        (8, 64, True, "rank 0 sent 64 bytes for attention outside of CUDA graphs"),
        (8, 0, False, "rank 0 replayed 8 CUDA graphs in iteration 1"),
    ],
)
def test_a_run_was_captured_as_it_should_be(
    gpus: ModuleType, replays: int, sent: int, captured: bool, said: str
) -> None:
    found = gpus.check_graphs(recorded(replays, sent), captured=captured, attention=captured)
    assert found[:1] == ([said] if said else [])


def test_attention_may_run_beside_captured_mlps(gpus: ModuleType, table: ModuleType) -> None:
    jobs = {job.name: job for row in table.ROWS for job in gpus.jobs_of(row)}
    assert not jobs["graphs-documents-te/zigzag"].captures_attention
    assert jobs["graphs-moe-te/zigzag"].captures_attention
    assert not jobs["graphs/zigzag"].captures_attention
    assert gpus.check_graphs(recorded(8, 64), captured=True, attention=False) == []
    assert len(gpus.check_graphs(recorded(0, 64), captured=True, attention=False)) == 2


def test_a_captured_run_equals_the_eager_one_to_the_bit(gpus: ModuleType) -> None:
    assert gpus.check_digests(recorded(0, 64), recorded(8, 0)) == []
    found = gpus.check_digests(recorded(0, 64), recorded(8, 0, "b"))
    assert found[0] == "1 of 1 gradients of rank 0 differ in iteration 1: weight"


def test_captured_rows_are_run_beside_eager_ones(
    gpus: ModuleType, table: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpus.main(["--list", "--only", "graphs-te/zigzag"]) == 0
    names = capsys.readouterr().out.split()
    assert names == ["graphs/reference", "graphs/yardstick", "graphs/zigzag", "graphs-te/zigzag"]
    (captured,) = (j for row in table.ROWS for j in gpus.jobs_of(row) if j.name == names[-1])
    eager, given = captured.equals.config.megatron, captured.config.megatron
    assert {name: given[name] for name in given if given[name] != eager.get(name)} == {
        "cuda_graph_impl": "transformer_engine"
    }
    assert captured.environment(0, 2)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_ranks_that_share_a_gpu_are_nodes(
    gpus: ModuleType, table: ModuleType, pages: ModuleType
) -> None:
    """Each finds the GPU at index 0, and NCCL one rank on each host."""
    assert pages.describe("abc", shared=True)["device"].endswith("NCCL takes for nodes")
    (row,) = (row for row in table.ROWS if row.key == "fp32")
    job = gpus.jobs_of(row)[-1]
    environment = job.environment(3, 2, shared=True)
    assert environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert "NCCL_SOCKET_IFNAME" not in job.environment(3, 2)
    shell = job.program(Path("run"), None, shared=True)[:3]
    names = "NCCL_HOSTID", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"
    program = f"import os, sys; print(*map(os.environ.get, {names}), *sys.argv[1:])"
    started = subprocess.run(
        [*shell, sys.executable, "-c", program, "a b", "c"],
        env=os.environ
        | {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert started.stdout == "node1 0 1 2 a b c\n"


def test_the_script_of_megatron_lm_gets_flags(
    gpus: ModuleType, table: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It knows nothing of run files; without a checkout its rows are left out."""
    (row,) = (row for row in table.ROWS if row.key == "script")
    job = gpus.jobs_of(row)[-1]
    assert job.run.label == "ulysses"
    OmegaConf.save(gpus.run_file(job.config, job.run, job.iterations), tmp_path / "run.yaml")
    words = job.program(tmp_path, Path("checkout"), shared=False)
    at = words.index("checkout/pretrain_gpt.py")
    assert words[at - 2 : at] == ["-m", "megatron_cp_plugin.launch"]
    flags, rest = split_flags(words[at + 1 :])
    assert (flags.algo, flags.platform) == ("ulysses", "cuda")
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(rest)
    assert (args.train_iters, args.context_parallel_size, args.bf16) == (30, 2, True)
    assert not args.gradient_accumulation_fusion
    for checkout, count in (([], 0), (["--megatron-lm", "checkout"], 11)):
        assert gpus.main(["--list", *checkout]) == 0
        names = capsys.readouterr().out.split()
        assert sum(name.startswith("script") for name in names) == count


def test_each_recording_is_read_once_by_one_thread(
    gpus: ModuleType,
    table: ModuleType,
    pages: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And none is kept, on disk or in memory, when nothing is compared with it any more."""
    read: list[tuple[str, int]] = []

    def load(folder: Path) -> Recording:
        read.append((str(folder.relative_to(tmp_path)), torch.get_num_threads()))
        captured = "-te" in folder.parts[-3]
        recording = recorded(8 * captured, 64 * (not captured))
        for rank in recording.ranks:
            rank.iterations.append(Iteration(1, {"lm loss": 2.0}, 1.0, skipped=False, seconds=1.0))
        recording.gradients[1] = {(0, 0, 0): {"weight": torch.ones(3)}}
        return recording

    monkeypatch.setattr(Recording, "load", load)
    monkeypatch.setattr(gpus, "check_is", lambda *_: [])
    rows = [row for row in table.ROWS if row.key in ("graphs", "graphs-te")]
    jobs = [job for row in rows for job in gpus.jobs_of(row)]
    (tmp_path / "out").mkdir()
    collector = gpus.Collector(jobs, tmp_path, tmp_path / "out", pages.describe("abc"))
    for job in reversed(jobs):
        (tmp_path / job.folder).mkdir(parents=True)
        # Captured, and one without graphs that it is compared with.
        failed = job.name == "graphs/ulysses"
        collector.add(job, "exit code 1" if failed else "")
    assert sorted(read) == sorted(
        (f"{job.folder}/recording", 1) for job in jobs if job.name != "graphs/ulysses"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not collector._recordings
    eager, captured = json.loads((tmp_path / "out" / "rows.json").read_text())["rows"]
    failures = [(run["role"], run["failure"]) for run in eager["runs"] + captured["runs"]]
    assert [each for each in failures if each[1]] == [
        ("ulysses", "exit code 1"),
        ("ulysses", "the run to compare with failed"),
    ]
    assert not any(run["problems"] for run in eager["runs"] + captured["runs"])
    assert not collector.good


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_are_trained_and_judged(
    gpus: ModuleType, table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row on CPU processes, whose yardstick is another algorithm."""
    megatron = table.MODEL | table.LOCAL
    megatron |= {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 64, "seq_length": 128}
    row = table.GpuCombination(
        "tiny",
        "a test",
        megatron,
        2,
        "zigzag",
        yardstick=gpus.Run(importlib.import_module("convergence_runs").Variant("ring"), 2, 2),
    )
    monkeypatch.setattr(table, "ROWS", (row,))
    monkeypatch.setattr(gpus, "ITERATIONS", 4)
    monkeypatch.setattr(gpus, "launch", forked_launch.launch)
    # In float32 a yardstick may by chance be off by nothing.
    monkeypatch.setattr(gpus, "judge", lambda run, yardstick: run["problems"])
    words = ["--output", str(tmp_path), "--jobs", "2", "--commit", "abc"]
    assert gpus.main([*words, "--only", "*/zigzag"]) == 0
    (one,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    (run,) = one["runs"]
    for found in (run, one["yardstick"]):
        steps = {name.rsplit(" ", 1)[1] for name in found["gradient_errors"]}
        assert steps == {"1", "2", "4"}
        assert 0 < max(found["gradient_errors"].values()) < 1e-4
        assert found["loss_error"] < 1e-5
    assert "commit abc" in (tmp_path / "rows.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_was_not_captured_is_found(
    gpus: ModuleType, table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU processes, which capture nothing: the runs are equal, and that is not enough."""
    megatron = table.MODEL | table.LOCAL
    megatron |= {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 64, "seq_length": 128}
    eager = table.GpuCombination("tiny", "a test", megatron, 2, "zigzag,ring", alone=True)
    monkeypatch.setattr(table, "GRAPHS", {"local": {"cuda_graph_impl": "none"}})
    monkeypatch.setattr(table, "ROWS", table.graphs(eager, local=("zigzag", {})))
    monkeypatch.setattr(gpus, "ITERATIONS", 2)
    monkeypatch.setattr(gpus, "launch", forked_launch.launch)
    words = ["--output", str(tmp_path), "--jobs", "2", "--commit", "abc"]
    assert gpus.main([*words, "--only", "tiny-local/*"]) == 1
    first, captured = json.loads((tmp_path / "rows.json").read_text())["rows"]
    (run,) = first["runs"]
    assert (run["role"], run["failure"], run["problems"]) == ("zigzag", "", [])
    (run,) = captured["runs"]
    assert run["gradient_errors"]
    assert set(run["gradient_errors"].values()) == {0.0}
    assert [problem.removeprefix("rank 0 ") for problem in run["problems"][:2]] == [
        "replayed 0 CUDA graphs in iteration 2",
        f"sent {run['problems'][1].split()[3]} bytes for attention outside of CUDA graphs",
    ]
