"""The command `megatron-cp`: what it refuses, and that it needs torch alone."""

import argparse
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_cp_plugin
from megatron_cp_plugin import cli
from megatron_cp_plugin.terminal import text_table, tokens_of

# Stands for an environment that has torch and nothing else of what the extras bring.
ALONE = """
import sys

MISSING = sys.argv.pop(1).split(",")

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import importlib.util
real = importlib.util.find_spec
def find_spec(name, package=None):
    return None if name.partition(".")[0] in MISSING else real(name, package)
importlib.util.find_spec = find_spec
"""
EXTRAS = "megatron,omegaconf,yaml,rich"


# Each command in a fork of one process, which imports what all need; its output goes to files.
RUN = """
import json, os
from megatron_cp_plugin import cli, launch

folder, commands = sys.argv[1:]
for number, (program, *words) in enumerate(json.loads(commands)):
    if os.fork() == 0:
        for name, descriptor in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv = [program, *words]
        module = "launch" if program == "launch" else "cli"
        sys.exit(importlib.import_module(f"megatron_cp_plugin.{module}").main())
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
SERVED = {
    "megatron-cp doctor --head-dim 16 --heads 8:2": "verdict: ok, 9 results are right; missing: ",
    "megatron-cp prepare-data --help": "megatron-cp prepare-data [-h]",
    "megatron-cp draw --algo distflash --size 3": "│ 0    │ q0 k0  │ q2 k0       │",
}
REFUSED = (
    "megatron-cp train --config tiny_zigzag",
    "megatron-cp prepare-data --output x",
    "megatron-cp hooks --check",
    "megatron-cp plan --size 4 --seq-len 4K --heads 8 --machine h200",
    f"launch {__file__}",
)


@pytest.mark.slow
def test_torch_is_enough_or_what_is_missing_is_said(tmp_path: Path) -> None:
    commands = json.dumps([words.split() for words in (*SERVED, *REFUSED)])
    words = [sys.executable, "-u", "-c", ALONE + RUN, EXTRAS, str(tmp_path), commands]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["0"] * len(SERVED) + ["2"] * len(REFUSED)
    out, err = (
        [(tmp_path / f"{n}.{name}").read_text() for n in range(8)] for name in ("out", "err")
    )
    for number, said in enumerate(SERVED.values()):
        assert err[number] == ""
        assert said in out[number]
    for number in range(len(SERVED), len(out)):
        (line,) = err[number].splitlines()
        assert out[number] == ""
        assert "needs megatron" in line or "needs yaml" in line
        assert line.endswith("installed: pip install 'megatron-cp-plugin[megatron]'")


LAYER = "--size 4 --seq-len 32K --heads 32 --machine h200"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan --sise 8", "unknown flag --sise (did you mean '--size'?): see --help"),
        ("plan --size 8 --seq-len 128X --heads 8", "--seq-len takes a number of tokens, such as"),
        (
            "plan --size eight --seq-len 1K --heads 8",
            "a whole number above 0, got 'eight'",
        ),
        ("plam", "invalid choice: 'plam'"),
        ("doctor --heads 30:8", "KV heads, which divide them, such as 32 or 32:8, got '30:8'"),
        ("calibrate --output x.yaml --heads 8:0", "such as 32 or 32:8, got '8:0'"),
        ("plan --size 4 --seq-len 4K --heads 8/2", "such as 32 or 32:8, got '8/2'"),
        ("doctor --head-dim 64 0", "--head-dim takes a whole number above 0, got '0'"),
        ("prepare-data", "the following arguments are required: --output: see --help"),
        ("prepare-data --outptu x", "unknown flag --outptu (did you mean '--output'?): see --help"),
        ("draw --algo ring --size 2 --output /proc/x.svg", "--output got /proc, where nothing can"),
        (
            f"plan {LAYER} --yaml /x/y.yaml",
            "got /x/y.yaml, and there is no folder '/x': make it first",
        ),
        ("train --config tiny_zigzg --nproc-per-node 1", "did you mean 'tiny_zigzag'?"),
        ("train --config tiny_zigzag --nproc-per-node 0", "takes a whole number above 0, got '0'"),
    ],
)
def test_mistakes_are_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = cli.main(words.split())
    except SystemExit as end:
        code = end.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_one_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"megatron-cp {megatron_cp_plugin.__version__}\n"
    assert importlib.metadata.version("megatron-cp-plugin") == megatron_cp_plugin.__version__


@pytest.mark.parametrize(
    ("text", "tokens"), [("512", 512), ("128K", 131072), ("1m", 1048576), ("65_536", 65536)]
)
def test_tokens(text: str, tokens: int) -> None:
    assert tokens_of(text) == tokens


@pytest.mark.parametrize("text", ["", "K", "1.5K", "-1", "1G"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 131072 or 128K, got"):
        tokens_of(text)


def test_the_last_column_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "45")
    rows = [("a", "1", "one two three four five six seven eight"), ("bb", "22", "nine")]
    assert text_table(("x", "y", "z"), rows, right={1}).splitlines() == [
        "┌────┬────┬─────────────────────────────┐",
        "│ x  │ y  │ z                           │",
        "├────┼────┼─────────────────────────────┤",
        "│ a  │  1 │ one two three four five six │",
        "│    │    │ seven eight                 │",
        "│ bb │ 22 │ nine                        │",
        "└────┴────┴─────────────────────────────┘",
    ]


def test_shipped_run_files_are_those_of_the_checkout() -> None:
    root = Path(__file__).parents[1]
    names = {path.name for path in (root / "configs").glob("*.yaml")}
    assert names == {p.name for p in (root / "megatron_cp_plugin" / "configs").glob("*.yaml")}
