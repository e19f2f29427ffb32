"""`megatron-cp compare`: one training run with Megatron's own attention and with the plugin."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_cp_plugin import cli
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.harness import compare, train
from megatron_cp_plugin.harness.compare import Printed, commands, side_by_side
from megatron_cp_plugin.harness.train import CommandLine
from tests import forked_launch
from tests.integration.megatron_job import TINY

CP = ("--context-parallel-algo", "zigzag", "--context-parallel-size", "2")


def log(losses: tuple[float, ...], times: tuple[float, ...], *others: str) -> Printed:
    lines = [
        f" [2026-11-24 00:00:00.1] iteration {n:8d}/{len(times):8d} | consumed samples:     2 | "
        f"elapsed time per iteration (ms): {ms} | learning rate: 1.000000E-03 | global batch size: "
        f"    2 | lm loss: {loss:.6E} | mtp_1 loss: {2 * loss:.6E} | loss scale: 1.0 | "
        "grad norm: 1.000 | number of skipped iterations:   0 |"
        for n, (loss, ms) in enumerate(zip(losses, times, strict=True), 1)
    ]
    return Printed.of([*others, *lines])


def test_what_megatron_prints_is_read() -> None:
    found = log(
        (5.5, 5.25),
        (900.0, 12.5),
        "[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: 2048.00 | x",
        "[Rank 4] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 3072.00 | x",
        "[INFO     | DotProductAttention]: Selected backend = FusedAttention (sub-backend 1)",
        "[INFO     | DotProductAttention]: Selected backend = FusedAttention (sub-backend 1)",
        "INFO:DotProductAttention:Running with FlashAttention backend (version 2.8.3)",
    )
    assert found == Printed(
        {"lm loss": [5.5, 5.25], "mtp_1 loss": [11, 10.5]},
        [900.0, 12.5],
        3072.0,
        "FusedAttention (sub-backend 1); FlashAttention backend (version 2.8.3)",
    )


def test_the_report_has_both_runs_side_by_side() -> None:
    peak = "memory (MB) | max allocated: {} | x"
    said = "megatron_cp_plugin: context parallelism by zigzag on 2 rank(s), kernel auto (flash4)"
    text = side_by_side(
        log((5.0, 4.0, 2.0), (99.0, 10.0, 10.0), peak.format(2048)),
        log((5.0, 4.0002, float("nan")), (99.0, 5.0, 7.0), peak.format(1024), said),
    )
    rows = [re.findall(r"[\w.+-]+", line) for line in text.splitlines()]
    assert ["2", "4.000000", "4.000200", "5.0e-05", "8.000000", "8.000400"] in [x[:6] for x in rows]
    assert "largest difference of lm loss: inf" in text
    assert "median step without the first: 10.0 and 6.0 ms, ratio 0.60" in text
    assert "peak memory: 2.00 and 1.00 GiB, ratio 0.50" in text
    assert "kernel of the reference: Megatron's own attention" in text
    assert (
        "kernel of ours: context parallelism by zigzag on 2 rank(s), kernel auto (flash4)" in text
    )


def known(folder: Path, **changes: Any) -> argparse.Namespace:
    settings = {"nproc_per_node": None, "iters": 3, "reference": "cp1", "gradients": False}
    return argparse.Namespace(output=folder, **(settings | changes))


def test_both_have_the_same_flags_but_those_of_the_plugin(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    megatron = {"context_parallel_size": 2, "seq_length": 64, "save": "x", "lr": "${a.b}"}
    plugin = {"algo": "zigzag", "layout": "documents", "platform": "cpu"}
    path.write_text(yaml.safe_dump({"megatron": megatron, "context_parallel": plugin}))
    words = ["--config", str(path), "--cp-kernel", "reference", "--tensor-model-parallel-size", "3"]
    for kind, ranks in (("cp1", "3"), ("te", "6")):
        reference, ours = commands(
            CommandLine.read("compare", words), known(tmp_path, reference=kind)
        )
        assert reference[:2] == ["--nproc-per-node", ranks]
        assert ours[:2] == ["--nproc-per-node", "6"]
        assert ("--context-parallel-size" in reference) == (kind == "cp1")
        assert "--cp-kernel" in ours
        assert "--cp-kernel" not in reference
        for line in (reference, ours):
            assert "--tensor-model-parallel-size" in line
            assert line[-4:] == ["--train-iters", "3", "--log-interval", "1"]
    written = [yaml.safe_load((tmp_path / f"{x}.yaml").read_text()) for x in ("reference", "ours")]
    del megatron["save"]
    assert [each["megatron"] for each in written] == [megatron, megatron]
    assert [each["context_parallel"] for each in written] == [{}, plugin]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "compare needs an algorithm of the plugin, got none: add --context-parallel-algo"),
        ("--context-parallel-algo megatron", "compare needs an algorithm of the plugin, got none"),
        (" ".join(CP) + " --nproc-per-node 3", "--nproc-per-node must be a multiple of 2 ranks"),
        (" ".join(CP) + " --cp-record x", "compare records runs itself, got --cp-record"),
        (" ".join(CP) + " --iters 1", "--iters must be at least 2, got 1"),
        (" ".join(CP) + " --reference megatron", "--reference invalid choice: 'megatron'"),
    ],
)
def test_mistakes_are_one_line(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ContextParallelError, SystemExit)) as error:
        compare.main([*words.split(), "--output", str(tmp_path)])
    text = str(error.value) if isinstance(error.value, ConfigError) else capsys.readouterr().err
    assert said in text
    assert "\n" not in text.strip()


def test_what_a_run_prints_goes_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "it.log"
    assert train.logged(path, ("json.tool", "--help"), {})[0].startswith("usage: ")
    with pytest.raises(ContextParallelError, match=r"run of it failed, see .*it\.log: .*--wrong"):
        train.logged(path, ("json.tool", "--wrong"), {})


@pytest.mark.slow
def test_two_ranks_against_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "logged", forked_launch.logged)
    assert cli.main(["compare", "--iters", "3", "--gradients", *TINY, *CP]) == 0
    printed = capsys.readouterr().out
    assert float(re.findall("largest difference of lm loss: (.*)", printed)[0]) < 1e-5
    assert "kernel of ours: context parallelism by zigzag on 2 rank(s)" in printed
    assert printed.splitlines()[-1] == "equal within the rounding of the dtype"
    broken = ["compare", *TINY, *CP, "--num-layers", "0.5"]
    with pytest.raises(SystemExit) as end:
        cli.main(broken)
    assert end.value.code == 2
    assert "the run of reference failed, see comparison/reference.log: " in capsys.readouterr().err
