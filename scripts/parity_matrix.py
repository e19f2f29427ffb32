#!/usr/bin/env python
"""Trains with every algorithm in every combination with Megatron's own features, and tabulates.

Each cell is a run of the parity harness (convergence_smoke.py) on CPU processes: losses, gradient
norms and every gradient of all iterations, against the same model, data and flags at
context-parallel size 1 with Megatron's own attention (linear models: with their first algorithm).
A cell passes, or the run is refused at start-up in one line; anything else is exit code 1.

    python scripts/parity_matrix.py                          # all; writes docs/data/parity.md
    python scripts/parity_matrix.py --only '*/zigzag' 'moe*/*'
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from convergence_runs import Outcome, Run, Variant, run_file
from convergence_smoke import judge, refusal
from forks import ForkedJob
from omegaconf import OmegaConf
from parity_combinations import (
    BF16_BOUND,
    COMBINATIONS,
    END_OF_DOCUMENT,
    FP16_BOUND,
    PAD,
    PUBLISHED,
    SEQ_LENGTH,
    Combination,
)
from parity_flags import choose, make_parser

from megatron_cp_plugin.harness.parity import Recording, Tolerances

SCRIPT = Path(__file__).with_name("pretrain_gpt.py")
TABLE = Path(__file__).parents[1] / "docs" / "data" / "parity.md"
# Heading of what parity_gpus.py writes at its end.
ON_GPUS = "## On GPUs"
ITERATIONS = 3


def samples() -> Iterator[np.ndarray]:
    """SEQ_LENGTH tokens each, of which few, some, all or none are more than padding.

    One document is one sample: Megatron's loader adds the next one's first token as the last label.
    """
    random = np.random.default_rng(0)
    for number in range(64):
        length = (SEQ_LENGTH, SEQ_LENGTH // 3, 4, 0)[number % 4]
        tokens = np.full(SEQ_LENGTH, PAD, dtype=np.uint16)
        tokens[:length] = random.integers(0, PAD, length)
        yield tokens


def documents() -> Iterator[np.ndarray]:
    """A few tokens each, and the one that ends a document."""
    random = np.random.default_rng(0)
    for length in random.choice((0, 1, 4, 10, 17, 40, 89), 400):
        yield np.append(random.integers(0, END_OF_DOCUMENT, length), END_OF_DOCUMENT)


def padded_documents(multiple: int = 8) -> Iterator[np.ndarray]:
    """The same, of lengths that rows of the table with the layout thd need."""
    random = np.random.default_rng(0)
    for length in multiple * random.choice((1, 2, 3, 5, 11), 400):
        yield np.append(random.integers(0, END_OF_DOCUMENT, length - 1), END_OF_DOCUMENT)


def write_data(prefix: Path, content: Iterable[np.ndarray]) -> None:
    """Writes a data set of documents."""
    # Imported on use: it takes seconds, and none of its warnings concerns a dataset.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in content:
        builder.add_document(document.astype(np.uint16), [len(document)])
    builder.finalize(f"{prefix}.idx")


@dataclass(frozen=True)
class Cell:
    """What became of a cell; `refused` is the line that a run was refused with."""

    combination: Combination
    variant: Variant
    outcome: Outcome
    refused: str = ""

    @property
    def good(self) -> bool:
        """Whether it passed or was refused."""
        return bool(self.refused) or self.outcome.passed

    @property
    def verdict(self) -> str:
        """One line."""
        comparison = self.outcome.comparison
        if self.refused:
            return f"refused: {self.refused}"
        if comparison is None:
            return f"FAILED: {self.outcome.failure}"
        errors = ", ".join(
            f"{name} {worst.error:.1e}"
            for name, worst in (
                ("loss", comparison.loss),
                ("grad norm", comparison.grad_norm),
                ("gradient", comparison.gradient),
                ("later gradient", comparison.later_gradient),
            )
        )
        return f"equal: {errors}" if self.good else f"FAILED: {'; '.join(comparison.problems)}"


class Matrix:
    """Runs cells one after another; a reference serves all cells that have the same one.

    Args:
        folder: Where data and runs go.
        timeout: Seconds for one run.
        keep: Leave what the folder holds, and do not run it again.
    """

    def __init__(self, folder: Path, timeout: float, keep: bool) -> None:
        self._folder = folder
        self._timeout = timeout
        self._references: dict[str, Outcome] = {}
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        for content in (samples, documents, padded_documents):
            if not (folder / f"{content.__name__}.idx").is_file():
                write_data(folder / content.__name__, content())

    def holds(self, combination: Combination, variant: Variant) -> bool:
        """Whether a cell was run."""
        return self._result(combination, combination.run(variant)).is_file()

    def cell(self, combination: Combination, variant: Variant) -> Cell:
        """Runs a cell, and its reference before it if no other cell did."""
        run = combination.run(variant)
        reference = self._reference(combination)
        if reference.recording is None or reference.failure:
            failure = f"the reference failed: {reference.failure}"
            return Cell(combination, variant, Outcome(run, failure=failure))
        outcome, refused = self._train(combination, run, reference.recording)
        return Cell(combination, variant, outcome, refused)

    def _reference(self, combination: Combination) -> Outcome:
        what = combination.reference, combination.data
        key = f"{OmegaConf.to_yaml(combination.config)} {what}"
        if key not in self._references:
            self._references[key], _ = self._train(combination, combination.reference, None)
        return self._references[key]

    def _train(
        self, combination: Combination, run: Run, reference: Recording | None
    ) -> tuple[Outcome, str]:
        result = self._result(combination, run)
        folder = result.parent
        if not result.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            config = combination.config_of(run)
            config.megatron.data_path = [str(self._folder / combination.data)]
            OmegaConf.save(run_file(config, run, ITERATIONS), folder / "run.yaml")
            words = ["--config", str(folder / "run.yaml"), "--cp-record", str(folder / "recording")]
            log = folder / "log.txt"
            codes = ForkedJob(SCRIPT, words, [(log, log)] * run.processes).finish(self._timeout)
            result.write_text(f"exit codes {codes}, log: {log}" if any(codes) else "")
        if failure := result.read_text():
            return Outcome(run, failure=failure), refusal(folder / "log.txt")
        return judge(run, folder, reference, combination.tolerances, ITERATIONS), ""

    def _result(self, combination: Combination, run: Run) -> Path:
        return self._folder / combination.key / run.folder / "result.txt"


def table(cells: Sequence[Cell], planned: int) -> str:
    """Returns docs/data/parity.md: a combination a row, an algorithm a column.

    Args:
        cells: Those that were run.
        planned: How many there are.
    """
    failed = [cell for cell in cells if not cell.good]
    refused = list(dict.fromkeys(cell.refused for cell in cells if cell.refused))
    equal = sum(cell.good and not cell.refused for cell in cells)
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("megatron-core", "torch", "megatron-cp-plugin")
    )
    lines = [
        "# Parity",
        "",
        f"Written by `scripts/parity_matrix.py` on {datetime.date.today()}: Python "
        f"{platform.python_version()}, {versions}, CPU.",
        "",
        f"{len(cells)} of {planned} cells run: {equal} equal to the unsplit model, "
        f"{len(cells) - len(failed) - equal} refused, {len(failed)} failed.",
        "",
        "A cell trains a small GPT for three iterations in Megatron's own loop with the",
        "sequence split over the CP ranks, and compares it with CP 1 and Megatron's own",
        "attention (linear models: their first algorithm), with all other flags the same. It",
        "gives relative errors: the worst loss of any iteration / the worst gradient of any",
        "parameter in the first iteration / in the others, for gradients in the Euclidean or",
        "the maximum norm, whichever is worse. Gradient norms, auxiliary losses and the",
        "equality of all replicas are checked too. After the first iteration the weights differ",
        "by rounding; where a gradient is almost zero, by up to two steps of Adam. The bounds:",
        "",
        "| dtype | losses | gradient norms | gradients | gradients later |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {bound.loss:.0e} | {bound.grad_norm:.0e} | {bound.gradient:.0e} "
            f"| {bound.later_gradient:.0e} |"
            for name, bound in (
                ("float32", Tolerances()),
                ("bfloat16: 1, 5, 20, 40 roundings of 2^-9", BF16_BOUND),
                ("float16: 1, 5, 20, 40 roundings of 2^-11", FP16_BOUND),
            )
        ),
    ]
    sections: dict[str, list[Cell]] = {}
    for one in cells:
        sections.setdefault(_section(one.combination), []).append(one)
    for title, part in sections.items():
        lines += ["", f"## {title}", "", *_rows(part, refused)]
    if refused:
        lines += ["", "## Refused", ""]
        lines += [f"{number}. {line}" for number, line in enumerate(refused, 1)]
    lines += ["", "## What no split can reproduce", "", *_NO_PARITY]
    return "\n".join(lines) + "\n"


_NO_PARITY = (
    "Dropout of hidden states (`--hidden-dropout`), jitter of router inputs and random routing",
    "(`--moe-router-force-biased`, `--moe-router-force-load-balancing`) draw different random",
    "numbers for each split, with Megatron's own context parallelism as with the plugin.",
    "",
    "The rows with padding use `--eod-mask-loss`: without it Megatron's data set (0.19.2) keeps",
    "the loss mask of the first sample that a data-parallel rank reads, padding included, and",
    "applies it to all later ones. That is the same for every CP size, but not for every DP",
    "size.",
)


def _section(combination: Combination) -> str:
    if combination.algos == PUBLISHED:
        return "The papers' settings"
    linear = "linear_model" in combination.context_parallel
    return "Linear attention" if linear else "Softmax attention"


def _rows(cells: Sequence[Cell], refused: Sequence[str]) -> list[str]:
    algorithms = list(dict.fromkeys(cell.variant.label for cell in cells))
    combinations = {cell.combination.key: cell.combination for cell in cells}
    texts = {(c.combination.key, c.variant.label): _text(c, refused) for c in cells}
    return [
        f"| key | combination | CP | ranks | {' | '.join(algorithms)} |",
        "| --- | --- | --- | --- |" + " --- |" * len(algorithms),
        *(
            f"| `{key}` | {row.about} | {row.cp} | {row.run(row.variants[0]).processes} | "
            + " | ".join(texts.get((key, algorithm), "") for algorithm in algorithms)
            + " |"
            for key, row in combinations.items()
        ),
    ]


def _text(cell: Cell, refused: Sequence[str]) -> str:
    if cell.refused:
        return f"refused ({refused.index(cell.refused) + 1})"
    comparison = cell.outcome.comparison
    if comparison is None:
        return "**failed**"
    worst = comparison.loss, comparison.gradient, comparison.later_gradient
    errors = " / ".join(f"{one.error:.0e}" for one in worst)
    return errors if cell.good else f"**{errors}**"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script; returns its exit code: 1 if a cell neither passed nor was refused."""
    parser = make_parser(__doc__, "parity", timeout_s=300.0)
    parser.add_argument(
        "--keep",
        action="store_true",
        help="do not run again what an earlier call has run; the table has those cells too, and "
        "is written with --only as well",
    )
    args = parser.parse_args(argv)
    every = {
        f"{combination.key}/{variant.label}": (combination, variant)
        for combination in COMBINATIONS
        for variant in combination.variants
    }
    wanted = {name: every[name] for name in choose(every, args, parser)}
    if args.list:
        print("\n".join(wanted))
        return 0
    matrix = Matrix(args.output.resolve(), args.timeout, args.keep)
    cells = []
    for name, (combination, variant) in wanted.items():
        started = time.monotonic()
        cell = matrix.cell(combination, variant)
        cells.append(cell)
        print(f"{name}: {cell.verdict} ({time.monotonic() - started:.0f} s)", flush=True)
    if args.keep or not args.only:
        held = [matrix.cell(*cell) for cell in every.values() if matrix.holds(*cell)]
        _, heading, on_gpus = TABLE.read_text().partition(ON_GPUS)
        kept = f"\n{heading}{on_gpus}" if heading else ""
        TABLE.write_text(table(held, len(every)) + kept)
    return 0 if all(cell.good for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
