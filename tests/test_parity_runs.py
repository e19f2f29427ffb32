"""The rows of the parity runs, how a run is judged, and a few of the runs themselves."""

import argparse
import csv
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from megatron.training.arguments import add_megatron_arguments
from omegaconf import OmegaConf
from parity import Job, Row, Verdict

from megatron_cp_plugin.harness.parity import Comparison, RankRecording, Recording, Worst
from megatron_cp_plugin.integration.args import add_arguments, split_flags
from megatron_cp_plugin.integration.checks import check_arguments
from megatron_cp_plugin.integration.rules import check
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.integration.yaml_config import yaml_to_argv
from tests import forked_launch
from tests.test_parity import recording, scale_gradient, set_iteration

ROWS = {platform: parity.rows_of(platform) for platform in ("cpu", "cuda")}
JOBS = {job.name: job for row in ROWS["cuda"] for job in row.jobs}


def row_of(key: str, platform: str = "cuda") -> Row:
    (found,) = (row for row in ROWS[platform] if row.key == key)
    return found


# Ranks and samples without a token that counts, by tokens, of further tokens; padded documents, cut
# apart; experts over the ranks, with auxiliary losses and padding; and one refused.
CELLS = {
    "mtp-per-token/zigzag": "equal",
    "thd-mla/distflash:layout=thd": "equal",
    "moe-ep-cp/distflash": "equal",
    "moe-drop/zigzag": "refused: --context-parallel-algo zigzag does not support dropping tokens",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two iterations."""
    short = [replace(row, iterations=2) for row in ROWS["cpu"]]
    monkeypatch.setattr(parity, "rows_of", lambda _: short)
    words = ["cpu", "--output", str(tmp_path), "--table", str(tmp_path / "rows.csv")]
    assert parity.main([*words, "--commit", "abc", "--only", *CELLS]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == CELLS.keys()
    for name, verdict in CELLS.items():
        assert lines[name].startswith(verdict)
    with (tmp_path / "rows.csv").open() as table:
        rows = {f"{row['key']}/{row['algorithm']}": row for row in csv.DictReader(table)}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        name: verdict.partition(":")[0] for name, verdict in CELLS.items()
    }
    assert float(rows["mtp-per-token/zigzag"]["later_gradient"]) < 1e-4


@pytest.mark.slow
def test_run_files_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Megatron's parser and the start-up checks, so that no GPU is asked in vain: the last run
    of each row, and a yardstick.
    """
    monkeypatch.setattr("megatron.core.ssm.gated_delta_net.HAVE_FLA", True)
    parser, both = (
        add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)) for _ in range(2)
    )
    add_arguments(both)
    for job in (*(row.jobs[-1] for row in ROWS["cuda"]), JOBS["bf16/yardstick"]):
        config = job.config
        config.megatron.data_path = ["text"]
        OmegaConf.save(config, tmp_path / "run.yaml")
        flags, rest = split_flags(yaml_to_argv(str(tmp_path / "run.yaml"), both))
        assert flags.platform == "cuda"
        flags.check()
        args = parser.parse_args(rest)
        args.world_size = job.run.processes
        assert (flags.algo is None) == (job.run.variant is None)
        if flags.algo is not None:
            of_run, device = flags.config(args.context_parallel_size), torch.device("cuda")
            check("validated", Settings(args, of_run, device))
            if flags.kernel in ("auto", "chunked"):  # which are tried where they run
                device, args.cuda_graph_impl = torch.device("cpu"), "none"
            check_arguments(args, of_run, device)
    assert {"bf16/zigzag", "bf16/usp", "fp8/yardstick"} < JOBS.keys()


def test_the_table_has_runs_of_these_rows() -> None:
    """On the CPU of all of them; and the page says so."""
    with parity.TABLE.open() as lines:
        found = list(csv.DictReader(lines))
    for platform, rows in ROWS.items():
        names = {job.name for row in rows for job in row.jobs} | {
            f"{row.key}/te:p2p" for row in rows
        }
        ran = {f"{r['key']}/{r['algorithm']}" for r in found if r["platform"] == platform}
        assert ran <= names
    of_cpu = [row["verdict"] for row in found if row["platform"] == "cpu"]
    page = (parity.TABLE.parents[1] / "parity.md").read_text()
    assert f"{len(of_cpu)} cells: {of_cpu.count('equal')} equal, 1 refused" in page
    assert sum(len(row.variants) for row in ROWS["cpu"]) == len(of_cpu)


def test_the_reference_shards_no_parameters() -> None:
    """It has Megatron's own data parallelism, whatever the runs have."""
    reference, *runs = row_of("fsdp", "cpu").jobs
    assert "use_torch_fsdp2" not in reference.config.megatron
    assert all(job.config.megatron.use_torch_fsdp2 for job in runs)


def verdict(loss: float, gradients: Mapping[str, float], key: str = "bf16") -> Verdict:
    found = Verdict(Job(row_of(key), "zigzag", JOBS["bf16/zigzag"].run))
    found.comparison = Comparison(*[Worst(1e-7)] * 4)
    found.loss, found.gradients = loss, gradients
    return found


STICK = verdict(1e-4, {"a": 1e-2, "b": 2e-2, "c": 3e-2})


@pytest.mark.parametrize(
    ("loss", "gradients", "said"),
    [
        (2.9e-4, {"a": 3.9e-2, "b": 3.9e-2, "c": 5.9e-2}, ""),
        # Half the median one: allowed what the median one is.
        (1e-4, {"a": 4.2e-2, "b": 1e-2}, "off by 4.2e-02, 2.1 times the yardstick: a"),
        (1e-4, {"a": 1e-2, "c": 6.3e-2}, "off by 6.3e-02, 2.1 times the yardstick: c"),
        (1e-4, {"a": math.nan, "b": 1e-2}, "inf times the yardstick: a"),
        (3.1e-4, {"a": 1e-2}, "a loss is off by 3.1e-04 (allowed 3.0e-04)"),
        (math.nan, {"a": 1e-2}, "a loss is off by nan"),
    ],
)
def test_runs_are_held_to_the_yardstick(
    loss: float, gradients: Mapping[str, float], said: str
) -> None:
    run = verdict(loss, gradients)
    parity.hold_to(run, STICK)
    assert len(run.problems) == bool(said)
    assert said in "".join(run.problems)
    assert run.word == ("beyond the bound" if said else "equal")


@pytest.mark.parametrize(("off", "word"), [(1.03, "equal"), (1.05, "beyond the bound")])
def test_a_row_is_judged_by_its_reference_and_its_yardstick(
    off: float, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gradients p2p has one that is off by 2%: 4% are allowed, and 3 times its loss's error."""

    def load(folder: Path) -> Recording:
        role = folder.parent.name
        run = recording(1)
        for rank in run.ranks:
            rank.replays.update({3: 0})
            rank.sent_bytes.update({3: {}})
        scale = {"reference": 1.0, "yardstick": 1.02}.get(role, off)
        for name in ("layers.0.weight", "layers.0.bias"):
            for step in (1, 2, 3):
                scale_gradient(name, scale, step)(run)
        if role != "reference":
            set_iteration(run, 2, losses={"lm loss": 1.7 if role == "yardstick" else 1.72})
        return run

    monkeypatch.setattr(Recording, "load", load)
    monkeypatch.setattr(parity, "check_is", lambda *_: [])
    jobs = [job for job in JOBS.values() if job.row.key == "bf16"][:3]
    stick, run = parity.judged(jobs, {job.name: "" for job in jobs}, tmp_path)
    assert (stick.word, stick.problems) == ("yardstick", [])
    assert run.word == word
    assert run.times_p2p == pytest.approx((off - 1) / 0.02, rel=0.01)
    first, *others = parity.judged(
        jobs, {job.name: "no" for job in jobs[:1]} | {job.name: "" for job in jobs[1:]}, tmp_path
    )
    assert first.word == "failed"
    assert all("the run to compare with failed" in one.problems for one in others)


def test_verdicts_take_the_place_of_older_ones(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    first, second = verdict(1e-4, {"a": 1e-2}), verdict(2e-5, {"a": 3e-2}, key="fp32")
    parity.write_table(table, [first, second], "abc")
    again = replace(first, times_p2p=4.5, problems=["far off"])
    stick = replace(STICK, job=JOBS["bf16/yardstick"])
    refused = replace(second, refused="no", problems=["exit code 2"], comparison=None)
    parity.write_table(table, [again, stick, refused], "def")
    assert table.read_text().splitlines()[1:] == [
        "bf16,zigzag,cuda,1e-04,1e-02,,4.5,beyond the bound,def",
        "fp32,zigzag,cuda,,,,,refused,def",
        "bf16,te:p2p,cuda,1e-04,3e-02,,,yardstick,def",
    ]


def recorded(replays: int, sent: int, digest: str = "a") -> Recording:
    """What two ranks recorded of their only iteration."""
    rank = RankRecording(
        settings={},
        shard=(0, 0, 0),
        weights={},
        gradients={1: {"weight": digest}},
        iterations=[],
        replays={1: replays},
        sent_bytes={1: {"forward": sent}},
    )
    return Recording([rank, rank], {})


def test_a_captured_run_equals_the_eager_one_to_the_bit() -> None:
    assert parity.check_digests(recorded(0, 64), recorded(8, 0)) == []
    found = parity.check_digests(recorded(0, 64), recorded(8, 0, "b"))
    assert found[0] == "1 of 1 gradients of rank 0 differ in iteration 1: weight"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_are_judged_and_a_run_that_was_not_captured_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU, which captures nothing, in place of two GPUs."""
    megatron: dict[str, Any] = {**row_of("rope-gqa", "cpu").megatron, "num_layers": 1}
    megatron |= {"hidden_size": 64, "ffn_hidden_size": 64, "num_workers": 0}
    of_two = {"cp": 2, "iterations": 2, "yardstick": True, "plugin": {"platform": "cpu"}}
    eager = Row("tiny", "a test", "cuda", megatron, "zigzag,ring", alone=True, **of_two)
    captured = replace(
        eager, key="tiny-local", algos="zigzag", captured_from="tiny", yardstick=False
    )
    monkeypatch.setattr(parity, "rows_of", lambda _: [eager, captured])
    monkeypatch.setattr(Row, "data", "samples")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(parity, "launch", forked_launch.launch)
    table = tmp_path / "rows.csv"
    words = ["cuda", "--output", str(tmp_path), "--jobs", "2", "--table", str(table)]
    assert parity.main([*words, "--only", "tiny-local/*"]) == 1
    trained, wrong = capsys.readouterr().out.splitlines()
    assert trained == "tiny/zigzag: trained"
    assert wrong.startswith("tiny-local/zigzag: beyond the bound: rank 0 replayed 0 CUDA graphs")
    assert "bytes for attention outside of CUDA graphs" in wrong
    assert "differ" not in wrong
