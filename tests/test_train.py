"""Command lines of `megatron-cp train`, and run files."""

import sys
from pathlib import Path

import pytest
import yaml

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.harness.train import CommandLine, main
from megatron_cp_plugin.integration import launch
from megatron_cp_plugin.integration.args import OneLineParser, add_arguments, split_flags

CONTENT = {
    "megatron": {"context-parallel-size": 4, "lr": 0.1, "save": "x", "bf16": True},
    "context_parallel": {"algo": "zigzag", "kernel": "reference", "layers": "usp,zigzag"},
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
    assert (plain.flags.algo, plain.flags.kernel) == ("zigzag", "reference")
    assert plain.flags.layers == ("usp", "zigzag")
    assert (plain.given("lr", 1.0), plain.given("seed", 7)) == (0.1, 7)
    words = "--context-parallel-size 2 --tensor-model-parallel-size 3 --cp-kernel flash4 --lr 0.5"
    line = CommandLine.of(
        ["--config", run_file, *words.split(), "--context-parallel-algo", "zigzag"]
    )
    assert line.ranks == 6
    assert (line.flags.algo, line.flags.kernel) == ("zigzag", "flash4")
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


def test_commands_that_start_their_own_ranks(
    run_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CommandLine.read("compare", ["--config", run_file]).ranks == 4
    with pytest.raises(ConfigError, match="compare needs an algorithm of the plugin, got none"):
        CommandLine.read("compare", ["--context-parallel-size", "2"])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="compare starts its own ranks, got those of torchrun"):
        CommandLine.read("compare", ["--config", run_file])


REFERRING = "megatron: {seq_length: 64}\ncontext_parallel: {algo: zigzag, chunked_loss: '%s'}"


@pytest.mark.parametrize(
    ("file", "words", "says"),
    [
        ("", "", "got an empty file"),
        ("contextparallel: {algo: ring}", "", "unknown section 'contextparallel' (did you mean"),
        (REFERRING % "${megatron.seq_lenght}", "", "'megatron.seq_lenght' not found; full_key: "),
        (REFERRING % "${megatron.seq_length", "", "full_key: context_parallel.chunked_loss"),
        ("context_parallel: {algo: zigzga}", "", "algo: unknown context-parallel algorithm"),
        ("context_parallel: {algo: ring, kernl: auto}", "", "kernl: unknown key (did you mean 'k"),
        ("context_parallel: {algo: ring, kernel: flash5}", "", "unknown kernel 'flash5' (did you"),
        ("context_parallel: {algo: ring, backward: kw}", "", "backward got 'kw' (did you mean"),
        ("context_parallel: {algo: ring, explain: 3}", "", "explain is a switch: true or false"),
        ("context_parallel: {algo: ring, chunked_loss: a}", "", "takes a whole number, got 'a'"),
        ("context_parallel: {algo: ring, chunked_loss: 0}", "", "loss must be at least 1, got 0"),
        ("context_parallel: {layers: 'zigzag*3, ring'}", "", "in place of ring use"),
        ("context_parallel: {algo: zigzag, layout: documents}", "", "documents, got neither --sft"),
        ("megatron: {cp_kernel: auto}", "", "write context_parallel.kernel"),
        ("context_parallel: {algo: ring}", "--context-parallel-algo zigzag --cp-kernel x", "'x'"),
        (REFERRING % "${megatron.lr}", "--lr 1 --cp-kernel x", "unknown kernel 'x'"),
    ],
)
def test_a_mistake_is_one_line_before_ranks_start(
    file: str,
    words: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing of Megatron is imported for it, which takes most of the time of a start."""
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    monkeypatch.setitem(sys.modules, "megatron.training", None)
    (path := tmp_path / "run.yaml").write_text(file)
    with pytest.raises(SystemExit) as end:
        main(["--config", str(path), "--nproc-per-node", "4", *words.split()])
    printed = "".join(capfd.readouterr())
    assert end.value.code == 2
    assert printed.count("\n") == 1
    assert says in printed
    assert printed.startswith(f"megatron_cp_plugin: error: {'' if words else path}")


@pytest.mark.parametrize("switch", ["--sft", "--dataloader-inter-document-masking"])
def test_a_layout_by_documents_where_a_flag_brings_them(switch: str, tmp_path: Path) -> None:
    (path := tmp_path / "run.yaml").write_text(
        "context_parallel: {algo: zigzag, layout: documents}"
    )
    CommandLine.of(["--config", str(path), switch]).check()
    key = switch.removeprefix("--")
    path.write_text(f"{path.read_text()}\nmegatron: {{{key}: true}}")
    CommandLine.of(["--config", str(path)]).check()
    path.write_text(path.read_text().replace("true", "false"))
    with pytest.raises(ConfigError, match="layout=documents needs documents"):
        CommandLine.of(["--config", str(path)]).check()


def test_the_help_of_the_plugins_flags_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.training", None)
    with pytest.raises(SystemExit) as end:
        launch.prepare(["--seq-length", "8", "--help-cp"])
    printed = capfd.readouterr().out
    assert end.value.code is None
    assert "--cp-allow-untested-megatron" in printed
    assert len(printed.splitlines()) < 100
    with pytest.raises(ConfigError, match="whole number, got 'x': see --help-cp"):
        split_flags(["--cp-chunked-loss", "x"])
    with pytest.raises(ConfigError, match=r"'--cp-kernel'\?.: see --help-cp"):
        add_arguments(OneLineParser()).parse_args(["--cp-kernl", "x"])
