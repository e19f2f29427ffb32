"""Whether the tests find faults: plants those of `faults.py` one at a time, and runs the tests.

    .venv/bin/python -m tests.mutations.check [NUMBER ...] [--named] [--jobs 2] [--report FILE]

In copies of the tree, with the tests that `make test` runs: first the one that found the fault
before, then those of the changed module. A fault is found if a test fails which passes without it.
Exits 1 if more than three of all faults are not found, or if the text of one is not in the tree.
Tests run in forks of a process that has imported torch and Megatron, but nothing of the package.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from time import monotonic, sleep

from tests.mutations.faults import FAULTS, PACKAGE, Fault

ROOT = Path(__file__).parents[2]
ALLOWED = 3  # of all faults, that may stay unfound
# A deadlock is found too, but sooner than by the suite's own limit. Random tests draw the same.
PYTEST = "-q -x -p no:cacheprovider --timeout 120 --hypothesis-seed 0".split()
QUICK = ("-m", "not slow")
IMPORTED = [
    "torch",
    "pytest",
    "hypothesis",
    "megatron.training.arguments",
    "megatron.core.models.gpt",
]
_starting = Lock()  # multiprocessing lets one thread at a time start a process, or look at one


@dataclass(frozen=True)
class Outcome:
    """What became of a fault. Attributes: test: the one that found it, "" if none did."""

    fault: Fault
    test: str
    seconds: float
    applies: bool = True

    def row(self, number: int) -> str:
        """Of the table."""
        file, what = self.fault.file, self.fault.what
        found = f"`{self.test}`" if self.test else "**not found**"
        if not self.applies:
            found = "**its text is not in the file once**"
        return f"| {number} | {file} | {what} | {found} | {self.seconds:.0f} |"


class Tree:
    """A copy of a tree of sources, in which one fault at a time is planted."""

    def __init__(self, source: Path, folder: Path, all_tests: bool, named: bool) -> None:
        """Args: all_tests: the slow ones too. named: only the test that the fault names."""
        ignored = shutil.ignore_patterns(".*", "__pycache__", "data", "results", "*.egg-info")
        self.root = Path(shutil.copytree(source, folder, ignore=ignored))
        self._marked = () if all_tests else QUICK
        self._named = named
        self._passes: dict[str, bool] = {}  # whether a test does without a fault

    def find(self, fault: Fault) -> Outcome:
        """Plants a fault, runs the tests until one fails, takes it out again."""
        start, path = monotonic(), self.root / PACKAGE / fault.file
        text = path.read_text() if path.exists() else ""
        if not fault.applies(text):
            return Outcome(fault, "", 0, applies=False)
        with self._written(path, text.replace(fault.before, fault.after)):
            failed = next(self._failures(fault), "")
        if failed and not self._passes_without(failed):
            raise RuntimeError(f"{failed} fails without a fault too")
        return Outcome(fault, failed, monotonic() - start)

    def _failures(self, fault: Fault) -> Iterator[str]:
        for files in [[f"tests/{fault.test}"]] if self._named else self._stages(fault):
            code, printed = self._pytest(*self._marked, *files)
            found = re.findall(r"^(?:FAILED|ERROR) (tests/\S.*?)(?: - .*)?$", printed, re.M)
            if found:
                yield found[0]
            elif code not in (0, 5):  # 5: no tests
                raise RuntimeError(f"{fault.what}: {printed[-4000:]}")

    def _stages(self, fault: Fault) -> list[list[str]]:
        """Tests in the order of hope: its own, those of the module, of its folder, others, those
        that train.
        """
        path = Path(fault.file)
        module = ".".join((PACKAGE, *path.with_suffix("").parts))
        stages: list[list[str]] = [[], [], [], []]
        for file in sorted((self.root / "tests").rglob("test_*.py")):
            folder = file.parent.name
            if folder == "mutations":
                continue  # which fails wherever a fault is planted
            if f"{module} " in file.read_text() or file.stem[5:] == path.stem:
                stage = 0
            elif folder == path.parts[0]:
                stage = 1
            else:
                stage = 3 if folder == "integration" else 2
            stages[stage].append(str(file.relative_to(self.root)))
        # The widest come first.
        stages[2].sort(key=lambda name: "conformance" not in name)
        return [[f"tests/{fault.test}"], *filter(None, stages)]

    def _passes_without(self, test: str) -> bool:
        if test not in self._passes:
            self._passes[test] = self._pytest(test)[0] == 0
        return self._passes[test]

    def _pytest(self, *words: str) -> tuple[int | None, str]:
        """Its exit code, and what it prints."""
        log = self.root / "pytest.log"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        process = context.Process(target=_run_pytest, args=(self.root, words, log))
        with _starting:
            process.start()
        while (code := _code_of(process)) is None:
            sleep(0.05)
        return code, log.read_text(errors="replace")

    @contextmanager
    def _written(self, path: Path, text: str) -> Iterator[None]:
        before = path.read_text()
        try:
            self._write(path, text)
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # What is compiled is taken for current where size and second are the same.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def _code_of(process: multiprocessing.process.BaseProcess) -> int | None:
    with _starting:
        return process.exitcode


def _run_pytest(root: Path, words: Sequence[str], log: Path) -> None:
    """Ends the process with pytest's exit code. Args: root: of the tree that is tested."""
    import pytest

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.chdir(root)
    os.environ["PYTHONPATH"] = sys.path[0] = str(root)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    where = find_spec(PACKAGE)
    assert PACKAGE not in sys.modules
    assert where is not None
    assert Path(str(where.origin)).parents[1] == root, where
    code = pytest.main([*PYTEST, *words])
    sys.stdout.flush()
    os._exit(int(code))


def check(
    faults: Sequence[tuple[int, Fault]], source: Path, jobs: int, all_tests: bool, named: bool
) -> Iterator[tuple[int, Outcome]]:
    """The outcome of every fault, as it comes."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as threads:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(jobs):
            trees.put(Tree(source, Path(folder, str(number)), all_tests, named))

        def find(fault: Fault) -> Outcome:
            tree = trees.get()
            try:
                return tree.find(fault)
            finally:
                trees.put(tree)

        running = {threads.submit(find, fault): number for number, fault in faults}
        for done in as_completed(running):
            yield running[done], done.result()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table of all faults."""
    parser = argparse.ArgumentParser(description="Whether the tests find planted faults.")
    parser.add_argument("numbers", type=int, nargs="*", help="of faults; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout to be checked")
    parser.add_argument("--all", action="store_true", help="with the slow tests too")
    parser.add_argument("--named", action="store_true", help="only with the test of each row")
    parser.add_argument("--report", type=Path, help="a file for the table")
    args = parser.parse_args(argv)
    faults = [(n, f) for n, f in enumerate(FAULTS, 1) if not args.numbers or n in args.numbers]
    title = ["| | file | fault | found by | s |", "| --- | --- | --- | --- | --- |"]
    print("\n".join(title), flush=True)
    rows: dict[int, str] = {}
    outcomes = []
    for number, outcome in check(faults, args.tree.resolve(), args.jobs, args.all, args.named):
        outcomes.append(outcome)
        rows[number] = outcome.row(number)
        print(rows[number], flush=True)
    lost = [outcome for outcome in outcomes if not outcome.applies]
    unfound = sum(not outcome.test for outcome in outcomes) - len(lost)
    found = len(outcomes) - len(lost) - unfound
    total = f"{found} of {len(outcomes)} found, {unfound} not, {len(lost)} not in the tree."
    print(f"\n{total}")
    if args.report:
        table = [*title, *(rows[number] for number in sorted(rows)), "", total]
        args.report.write_text("\n".join(table) + "\n")
    return int(unfound > ALLOWED or bool(lost))


if __name__ == "__main__":
    sys.exit(main())
