"""The benchmark of a rank alone, on the CPU with a GPU that is made up."""

import csv
import json
from pathlib import Path
from random import Random
from time import perf_counter

import benchmark_rank as benchmark
import pytest
import torch

from megatron_cp_plugin.errors import ConfigError
from tests.gpu_model import Gpus, Stream, cuda

ROWS = Path(__file__).parents[1] / "docs" / "data" / "ranks.csv"
HEADER = "ranks,tokens,heads,mask,algorithm,captured,use\n"


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = perf_counter()

    def elapsed_time(self, other: "FakeEvent") -> float:
        return (other.at - self.at) * 1e3


class FakeProfiler:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def events(self):
        return []


@pytest.fixture
def made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**29)
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    monkeypatch.setattr(benchmark, "arrive", lambda *buffers: lambda: None)
    monkeypatch.setattr(benchmark, "new_profiler", FakeProfiler)
    spans = [("flash_fwd", 0.0, 40.0), ("merge", 50.0, 60.0), ("flash_bwd", 60.0, 160.4)]
    monkeypatch.setattr(benchmark, "device_spans", lambda events: spans)
    monkeypatch.setattr(benchmark, "_SECONDS", 0.0)


def test_blocks_that_arrive_are_random_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer ones than there are random numbers, too."""
    noise, gpus = torch.arange(1.0, 6.0), Gpus(Random(0))
    buffers = torch.zeros(2, 6), torch.zeros(3), torch.zeros(0, 4)
    with cuda(gpus):
        current, arrivals = Stream(), Stream()
        monkeypatch.setattr(benchmark, "_noise", lambda dtype: noise.to(dtype))
        monkeypatch.setattr(benchmark, "_arrivals", lambda: arrivals)
        with gpus.on(current):
            wait = benchmark.arrive(*buffers)
            wait()
            seen: list[torch.Tensor] = []
            current.do(lambda: seen.extend(x.clone() for x in buffers))
        gpus.finish()
    assert torch.equal(seen[0].view(-1), torch.cat((noise, noise, noise[:2])))
    assert torch.equal(seen[1], noise[:3])


def test_rows_of_a_file_are_measured_in_order(made_up_gpu, tmp_path, capsys):
    asked = tmp_path / "rows.csv"
    lines = (
        "4,64,4:2,causal,zigzag,0,fit",
        "4,64,4:2,documents:lognormal:32:1,distflash:helpers=work,0,held",
        "4,64,4:2,window:64,usp,0,held",
        "4,64,4:2,causal,zigzag:route=bent,0,held",
    )
    asked.write_text(HEADER + "\n".join(lines) + "\n")
    output = tmp_path / "out"
    benchmark.main(["--rows", str(asked), "--iters", "1", "--output", str(output)])
    rows = [json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == [line.split(",")[4] for line in lines]
    assert [row["use"] for row in rows] == ["fit", "held", "held", "held"]
    assert "bent" in rows[3]["note"], rows[3]
    for row in rows[:3]:
        assert row["note"] == "", row
        assert row["kernels"] == {"flash_fwd": [1, 40], "merge": [1, 10], "flash_bwd": [1, 100]}
        assert row["attention_us"] == [40, 100]
        assert row["step_ms"] >= row["host_ms"] * 0.99 > 0
        assert row["steady_limit_ms"] > 0
        assert row["steady_share"] == pytest.approx(row["steady_limit_ms"] / row["steady_ms"])
        assert row["idle_ms"] == pytest.approx(row["step_ms"] - 0.1504, abs=1e-6)
    printed = capsys.readouterr().out
    assert "row 4 of 4" in printed


def test_a_row_is_given_up(made_up_gpu, tmp_path):
    asked = "--ranks 4 --tokens 64 --heads 4:2 --algos zigzag --row-seconds 0.02 --output"
    benchmark.main([*asked.split(), str(tmp_path)])
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert "took more than 0.02 s" in row["note"]


def test_it_refuses_without_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    with pytest.raises(ConfigError, match="needs a GPU, got none"):
        benchmark.main(["--output", str(tmp_path)])


def test_rows_to_compare_with_are_split_in_halves_that_have_everything():
    with ROWS.open() as lines:
        rows = list(csv.DictReader(lines))
    names = {row["algorithm"].partition(":")[0] for row in rows}
    masks = {row["mask"] for row in rows}
    for use in ("fit", "held"):
        own = [row for row in rows if row["use"] == use]
        assert len(own) * 2 == pytest.approx(len(rows), abs=4)
        assert {row["algorithm"].partition(":")[0] for row in own} == names
        assert {row["mask"] for row in own} == masks
