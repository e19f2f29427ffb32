"""Whether the tests find faults: plants those of `faults.txt` one at a time, and runs the tests.

    .venv/bin/python -m tests.mutations.check [NUMBER ...] [--named] [--jobs 2] [--report FILE]

In copies of the tree, with the tests that `make test` runs: first the one that found the fault
before, then those of the changed module. A fault is found if a test fails which passes without it.
Exits 1 if more than three of all faults are not found, or if one is not tried to the end.

A fault in `faults.txt` is four lines or more: its file in the package and, in words, what goes
wrong; the lines that the file has once, after "-"; those that take their place, after "+"; and the
test that found it last. A fault whose lines have gone from its file fails a test: give it the lines
that have taken their place, or put another fault of the kind in its place.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import NamedTuple

PACKAGE = "megatron_cp_plugin"
ROOT = Path(__file__).parents[2]
ALLOWED = 3  # of all faults, that may stay unfound
# A deadlock is found too, but sooner than by the suite's own limit. Random tests draw the same.
PYTEST = "-q -x -p no:cacheprovider --timeout 120 --hypothesis-seed 0".split()
QUICK = ("-m", "not slow")


class Fault(NamedTuple):
    """A change of the code that makes it wrong.

    Attributes: file: in the package. before: text that the file has once. after: what takes its
        place. what: the fault in words. test: the one that found it last, in the folder of tests,
        and is tried first.
    """

    file: str
    before: str
    after: str
    what: str
    test: str

    def applies(self, text: str) -> bool:
        """Whether the file's text has the place."""
        return text.count(self.before) == 1


def _faults(text: str) -> Iterator[Fault]:
    for row in re.split(r"\n{2,}", text.strip()):
        head, *lines = row.split("\n")
        if head.startswith("#"):
            continue
        *changes, test = lines
        before, after = ("\n".join(x[1:] for x in changes if x[0] == sign) for sign in "-+")
        file, _, what = head.partition(": ")
        yield Fault(file, before, after, what, test)


FAULTS = tuple(_faults(Path(__file__).with_name("faults.txt").read_text()))


@dataclass(frozen=True)
class Outcome:
    """What became of a fault. Attributes: test: the one that found it, "" if none did. problem:
    why it was not tried to the end.
    """

    fault: Fault
    test: str
    seconds: float
    problem: str = ""

    def row(self, number: int) -> str:
        """Of the table."""
        file, what = self.fault.file, self.fault.what
        found = f"`{self.test}`" if self.test else f"**{self.problem or 'not found'}**"
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
        probe = "import megatron_cp_plugin as package; print(package.__file__)"
        where = self._run("-c", probe).stdout.strip()
        if Path(where).parents[1] != self.root:
            raise RuntimeError(f"the tests in {self.root} would test {where}")

    def find(self, fault: Fault) -> Outcome:
        """Plants a fault, runs the tests until one fails, takes it out again."""
        start, path = monotonic(), self.root / PACKAGE / fault.file
        text = path.read_text() if path.exists() else ""
        if not fault.applies(text):
            return Outcome(fault, "", 0, "its text is not in the file once")
        with self._written(path, text.replace(fault.before, fault.after)):
            failed = next(self._failures(fault), "")
        if failed and not self._passes_without(failed):
            raise RuntimeError(f"{failed} fails without a fault too")
        return Outcome(fault, failed, monotonic() - start)

    def _failures(self, fault: Fault) -> Iterator[str]:
        for files in [[f"tests/{fault.test}"]] if self._named else self._stages(fault):
            done = self._run("-m", "pytest", *PYTEST, *self._marked, *files)
            found = re.findall(r"^(?:FAILED|ERROR) (tests/\S.*?)(?: - .*)?$", done.stdout, re.M)
            if found:
                yield found[0]
            elif done.returncode not in (0, 5):  # 5: no tests
                raise RuntimeError(f"{fault.what}: {done.stdout[-2000:]}{done.stderr[-2000:]}")

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
            done = self._run("-m", "pytest", *PYTEST, test)
            self._passes[test] = done.returncode == 0
        return self._passes[test]

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": str(self.root)},
            capture_output=True,
            text=True,
            check=False,
        )

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
            except RuntimeError as error:  # the others are still worth knowing
                return Outcome(fault, "", 0, str(error))
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
    lost = [outcome for outcome in outcomes if outcome.problem]
    unfound = sum(not outcome.test for outcome in outcomes) - len(lost)
    found = len(outcomes) - len(lost) - unfound
    total = f"{found} of {len(outcomes)} found, {unfound} not, {len(lost)} not tried to the end."
    print(f"\n{total}")
    if args.report:
        table = [*title, *(rows[number] for number in sorted(rows)), "", total]
        args.report.write_text("\n".join(table) + "\n")
    return int(unfound > ALLOWED or bool(lost))


if __name__ == "__main__":
    sys.exit(main())
