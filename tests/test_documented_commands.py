"""Commands that the README and other pages show: run here, or looked up."""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_cp_plugin import cli
from tests.integration.megatron_job import Process, run_program

ROOT = Path(__file__).parents[1]
# What a user reads from beginning to end. The papers' tables, docs/data and the pages that programs
# write are looked up; CONTRIBUTING.md is for those who change the code.
LOOKED_UP = "reference", "capabilities", "open"
READ = (
    "README.md",
    *sorted(
        f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md") if page.stem not in LOOKED_UP
    ),
    *sorted(f"docs/how/{page.name}" for page in (ROOT / "docs" / "how").glob("*.md")),
)
PAGES = (*READ, "CONTRIBUTING.md")
# Words: of all that is read, of a page, and of pages that are mostly tables.
ALL_WORDS, WORDS, OF_TABLES = 20_000, 1_200, {"docs/benchmarks.md": 3_000, "docs/papers.md": 3_000}
PROGRAMS = "make python torchrun megatron-cp pytest pip git bash source uv".split()

# What a command is run with beside what the page shows, and what it must print.
RUN: dict[str, tuple[str, str]] = {
    "megatron-cp prepare-data --output data/stdlib": ("README.md", "documents"),
    "megatron-cp plan --model llama3-8b --tokens 256K --gpus 128 --machine h100": (
        "",
        "16 sequences of 262144 tokens a step",
    ),
    "megatron-cp plan --documents 8192 ...": (
        "--size 4 --seq-len 64K --heads 8 --machine h200",
        "documents",
    ),
    "megatron-cp draw --algo distflash --size 3": ("", "│ 0    │ q0 k0  │ q2 k0       │"),
    "megatron-cp draw --algo distflash --size 8": ("", "q7 k7"),
    "megatron-cp hooks --check": ("", "0 difference(s)"),
    "megatron-cp capabilities": ("", "| `zigzag` "),
    "make help": ("", "make test"),
}
# Other commands of the README and the guide: the test that runs one with small sizes, or why none
# does.
_INSTALLS = "downloads packages: `python scripts/check_installs.py` runs it"
_SMOKE = "test_convergence_smoke.py::test_wrong_key_gradient_in_training_is_caught"
_DOCTOR = "test_doctor.py::test_real_ranks_find_all_algorithms_right"
_COMPARE = "test_compare.py::test_two_ranks_against_one"
_LAUNCHED = "integration/test_training.py::test_ring_through_the_launcher"
_LAYER = "planner/test_command.py::test_a_layer"
_LENGTHS = "test_documented_commands.py::test_the_table_of_lengths_is_as_planned_now"
_LOG_PROBS = "test_compare_log_probs.py::test_experts_of_a_checkpoint_that_ranks_have_parts_of"
_NAME = "the name of a command, inside a sentence"
_ON_GPUS = "measures for minutes, on several GPUs or on one of a known speed"
ELSEWHERE = {
    "git clone <this repository> && cd <its folder>": "has the repository's address to fill in",
    "source .venv/bin/activate": "changes the shell in which it is typed",
    "make smoke": _SMOKE,
    "python scripts/convergence_smoke.py --config configs/tiny_zigzag.yaml --algos ring,zigzag "
    "--cp 1,2,4 --iters 20": _SMOKE,
    "python scripts/convergence_smoke.py --config FILE --algos zigzag --cp 1,4 -- <your flags>": (
        _SMOKE
    ),
    "torchrun --nproc-per-node 8 -m megatron_cp_plugin.launch /path/to/pretrain_gpt.py "
    "--context-parallel-algo zigzag --context-parallel-size 8 <your own flags>": _LAUNCHED,
    "megatron-cp doctor": "test_doctor.py::test_all_algorithms_are_right_here",
    "torchrun --nproc-per-node 4 -m megatron_cp_plugin.cli doctor": _DOCTOR,
    "torchrun --nproc-per-node 2 -m megatron_cp_plugin.cli doctor": _DOCTOR,
    "megatron-cp check torchrun --nproc-per-node 8 pretrain_gpt.py --context-parallel-algo zigzag "
    "<your own flags>": "test_check.py::test_a_command_line_of_megatron",
    "megatron-cp train --config tiny_zigzag": (
        "integration/test_mistakes.py::test_an_interrupt_is_one_line"
    ),
    "megatron-cp train --config FILE": "integration/test_training.py::test_a_run_file",
    "torchrun ... scripts/pretrain_gpt.py --config FILE": (
        "integration/test_training.py::test_a_run_file"
    ),
    "megatron-cp compare --iters 20 --config FILE ...": _COMPARE,
    "megatron-cp compare --reference cp1 --iters 20 --gradients --config FILE ...": _COMPARE,
    "megatron-cp compare --log-probs": _LOG_PROBS,
    "megatron-cp compare --log-probs --config tiny_zigzag": _LOG_PROBS,
    "megatron-cp plan --model llama3-8b --gpus 8 --machine h100 --tokens ...": _LENGTHS,
    "megatron-cp plan --tokens 1M --gpus 16": _LENGTHS,
    "megatron-cp plan --size 16 --seq-len 256K --heads 32:8 --machine h100": _LAYER,
    "python scripts/rollout_packs.py": "test_rollout_packs.py::test_table",
    "python scripts/predictions.py": (
        "planner/test_predictions.py::test_a_table_of_the_papers_is_made_again"
    ),
    "torchrun --nproc-per-node 4 scripts/benchmark_attention.py --tokens 32K,128K "
    "--heads 32:32,32:8": _ON_GPUS,
    "python scripts/benchmark_rank.py --ranks 8,64 --tokens 16K": _ON_GPUS,
    "python scripts/packed_documents.py --machine h200_nvlink --lengths "
    "16K,2K,configs/lengths/long_tail.csv --sizes 8 --tokens 16K --heads 32:8 --packs 3 --algos "
    "zigzag:layout=documents,distflash,ulysses": "test_packed_documents.py::test_ranks_together",
    "pip install .": _INSTALLS,
    "pip install '.[megatron]'": _INSTALLS,
    "pip install '.[report]'": _INSTALLS,
    "pip install -e '.[dev]'": _INSTALLS,
    "pip install '.[gpu]'": "downloads kernels of NVIDIA GPUs",
    "pip install -e": "has a package of the reader's to fill in",
    "pip install pybind11": "downloads a package of others",
    **dict.fromkeys(("megatron-cp plan", "megatron-cp check", "megatron-cp train"), _NAME),
    "megatron-cp calibrate": _NAME,
}
# docs/planner.md shows lines of what it prints.
PRINTED = "megatron-cp plan --model llama3-8b --tokens 256K --gpus 128 --machine h100"


def shown(page: str) -> list[str]:
    """The commands of a page: lines of code, and words in the text that begin as one."""
    text = (ROOT / page).read_text().replace("\\\n", "")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    shells = [block for kind, block in blocks if kind in ("", "bash", "sh")]
    lines = [line for block in shells for line in block.splitlines()]
    lines += [line for line in rest.splitlines() if line.startswith("    ")]
    lines += re.findall(r"`([^`]+)`", rest)
    commands = (" ".join(line.split("  #")[0].split()) for line in lines)
    return [c for c in commands if " " in c and c.split()[0] in PROGRAMS]


def lacks(command: str) -> str:
    """What a command names that is not there; an empty string if nothing is."""
    program, *words = command.split()
    files = [word for word in words if re.match(r"(scripts|tests|\.ci|examples)/", word)]
    lost = [word for word in files if not (ROOT / word.partition("::")[0]).exists()]
    if "-m" in words and find_spec(words[words.index("-m") + 1]) is None:
        lost.append(words[words.index("-m") + 1])
    if program == "megatron-cp" and words[0] not in cli.COMMANDS:
        lost.append(words[0])
    if program == "make" and not re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M):
        lost.append(words[0])
    return " ".join(lost)


def test_every_command_of_the_pages_can_be_started() -> None:
    """Those with names to be filled in, or that need GPUs, have a program; others are run below."""
    commands = {command for page in PAGES for command in shown(page)}
    assert lacks("megatron-cp plam") == "plam"
    assert {command: lost for command in commands if (lost := lacks(command))} == {}
    assert RUN.keys() - commands == set()  # no page shows them any more


def test_every_command_of_the_guide_is_run_or_has_a_reason() -> None:
    shown_there = {command for page in READ for command in shown(page)}
    assert ELSEWHERE.keys() == shown_there - RUN.keys() - DRAWN.keys()
    for file, name in (why.split("::") for why in ELSEWHERE.values() if "::" in why):
        assert f"def {name}" in (ROOT / "tests" / file).read_text()


def test_commands_of_run_files_can_be_read() -> None:
    texts = [file.read_text().replace("\\\n#", "") for file in (ROOT / "configs").glob("*.yaml")]
    lines = [line for text in texts for line in re.findall(r"^#   megatron-cp (.*)$", text, re.M)]
    assert len(lines) > 8
    for line in lines:
        cli.parsers()[0].parse_args(shlex.split(line))


def test_pages_are_short() -> None:
    words = {page: len((ROOT / page).read_text().split()) for page in READ}
    assert {page: n for page, n in words.items() if n > OF_TABLES.get(page, WORDS)} == {}
    assert sum(words.values()) <= ALL_WORDS


# Pages have what they write.
DRAWN = dict.fromkeys(
    command for page in PAGES for command in shown(page) if " --output docs/pictures/" in command
)


@pytest.mark.parametrize("command", DRAWN)
def test_pictures_are_as_drawn_now(command: str, tmp_path: Path) -> None:
    *words, path = shlex.split(command)
    drawn = tmp_path / Path(path).name
    assert cli.main([*words[1:], str(drawn)]) == 0
    assert drawn.read_text() == (ROOT / path).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_commands_of_the_pages(command: str, tmp_path: Path) -> None:
    more, says = RUN[command]
    for name in ("configs", "scripts", "README.md", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = shlex.split(f"{command.removesuffix('...')} {more}")
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    done = run_in(tmp_path, words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert says in done.stdout
    if command == PRINTED:
        text = (ROOT / "docs" / "planner.md").read_text()
        (block,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        assert set(block.splitlines()) <= set(done.stdout.splitlines())


@pytest.mark.slow
def test_the_table_of_lengths_is_as_planned_now(capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"^\| (\d+[KM]) \| (.*) \|$", (ROOT / "docs" / "run.md").read_text(), re.M)
    assert len(rows) == 4
    for tokens, row in rows:
        words = f"plan --model llama3-8b --gpus 8 --machine h100 --tokens {tokens}"
        code, printed, cells = cli.main(words.split()), capsys.readouterr(), row.split(" | ")
        if code:
            assert cells[0].removeprefix("does not fit: ") in printed.err
            continue
        first = re.findall(r"^│ +(\d.*) │$", printed.out, re.M)[0]
        *sizes, marks, _, speed, _, _, memory, _ = (cell.strip() for cell in first.split("│"))
        pairs = (("S", "sharded", "whole"), ("R", "full", "none"), ("C", "chunked", "whole"))
        chosen = [yes if mark in marks else no for mark, yes, no in pairs]
        assert cells == [", ".join(sizes), *chosen, speed, memory]


def run_in(folder: Path, words: Sequence[str]) -> Process:
    """Runs a command in a folder."""
    if words[0] == "megatron-cp":
        return run_program(folder, "-m", "megatron_cp_plugin.cli", *words[1:]).processes[0]
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    return Process(done.returncode, done.stdout, done.stderr)


def test_code_on_pages_imports_what_it_uses() -> None:
    """Of what pages show as Python, also where nothing runs it."""
    blocks: list[str] = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        found = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        # Of one program there, of several files elsewhere.
        blocks += ["\n".join(found)] if page.name in ("functional.md", "spans.md") else found
    assert len(blocks) > 5
    for block in blocks:
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
        done = subprocess.run(command, input=block, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + block


def test_the_reference_is_as_the_code_says(tmp_path: Path) -> None:
    done = run_program(tmp_path, str(ROOT / "scripts" / "reference.py"), "--check").processes[0]
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_lead_somewhere() -> None:
    """Files that pages link to are there, and headings too."""
    lost = []
    for page in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "patches").glob("*.md"),
    ):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
            path, _, heading = link.partition("#")
            if "://" in link:
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (heading and heading not in headings(target)):
                lost.append(f"{page.name}: {link}")
    assert lost == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.slow
def test_pages_build(tmp_path: Path) -> None:
    """As `make docs` does: Sphinx warns of lost links, and of pages without a place."""
    words = ["sphinx", "-q", "-W", "--keep-going", "-b", "html", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pictures.html").exists()
