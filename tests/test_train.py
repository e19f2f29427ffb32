"""Command lines of `megatron-cp train`, and run files."""

from pathlib import Path

import pytest
import yaml

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.harness.train import CommandLine, start

CONTENT = {
    "megatron": {"context-parallel-size": 4, "lr": 0.1, "save": "x", "bf16": True},
    "context_parallel": {"algo": "zigzag", "kernel": "reference", "layers": "ring,zigzag"},
}
USP = ["--context-parallel-algo", "usp"]


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(CONTENT))
    return str(path)


def test_flags_override_the_run_file(run_file: str) -> None:
    plain = CommandLine.of(["--config", run_file])
    assert plain.sizes["context_parallel_size"] == 4
    assert plain.ranks == 4
    assert [plain.of_plugin(name) for name in ("algo", "kernel")] == ["zigzag", "reference"]
    assert plain.of_plugin("layers") == "ring,zigzag"
    assert (plain.given("lr", 1.0), plain.given("seed", 7)) == (0.1, 7)
    words = "--context-parallel-size 2 --tensor-model-parallel-size 3 --cp-kernel flash4 --lr 0.5"
    line = CommandLine.of(["--config", run_file, *words.split(), "--context-parallel-algo", "ring"])
    assert line.ranks == 6
    assert [line.of_plugin(name) for name in ("algo", "kernel")] == ["ring", "flash4"]
    assert line.given("lr", 1.0) == 0.5
    assert line.by("usp") == [*words.replace("--cp-kernel flash4 ", "").split(), *USP]


def test_the_platform_stays_with_another_algorithm() -> None:
    line = CommandLine.of(["--cp-platform", "cpu", "--seed", "1"])
    assert line.by("usp") == ["--seed", "1", *USP, "--cp-platform", "cpu"]
    assert line.ranks == 1


def test_a_wrong_size_is_left_to_megatron() -> None:
    """One rank is enough to say which it is."""
    for word in ("0", "-2"):
        assert CommandLine.of(["--context-parallel-size", word]).ranks == 1
    with pytest.raises(ConfigError, match="size takes a whole number, got 'x': see --help"):
        _ = CommandLine.of(["--context-parallel-size", "x"]).ranks


def test_a_run_file_with_other_settings(run_file: str, tmp_path: Path) -> None:
    line = CommandLine.of(["--config", run_file])
    flags = line.run_file(tmp_path / "other.yaml", {"algo": "ulysses"}, {"save", "bf16"})
    assert flags == ["--config", str(tmp_path / "other.yaml")]
    assert yaml.safe_load((tmp_path / "other.yaml").read_text()) == {
        "megatron": {"context-parallel-size": 4, "lr": 0.1},
        "context_parallel": {"algo": "ulysses"},
    }
    assert CommandLine.of([]).run_file(tmp_path / "none.yaml", {}, ()) == []
    assert not (tmp_path / "none.yaml").exists()


def test_commands_that_start_their_own_ranks(run_file: str, monkeypatch) -> None:
    assert CommandLine.read("compare", ["--config", run_file]).ranks == 4
    with pytest.raises(ConfigError, match="compare needs an algorithm of the plugin, got none"):
        CommandLine.read("compare", ["--context-parallel-size", "2"])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="compare starts its own ranks, got those of torchrun"):
        CommandLine.read("compare", ["--config", run_file])


@pytest.mark.parametrize("count", ["0", "-1"])
def test_a_number_of_processes_that_cannot_be(count: str) -> None:
    with pytest.raises(ConfigError, match=f"--nproc-per-node must be 1 or more, got {count}"):
        start(["--nproc-per-node", count, *USP], "nothing")
