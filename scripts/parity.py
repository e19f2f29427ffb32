#!/usr/bin/env python
"""Trains the rows of parity.yaml, and says whether each run equals the one it is compared with.

On the CPU a row is Megatron's own features with every algorithm, against the same model, data and
flags at context-parallel size 1 with Megatron's own attention (linear models: with their first
algorithm). On GPUs the reference is Transformer Engine's attention at CP 1. In float32 (without
TF32) runs are held to bounds; in bfloat16 the yardstick is Transformer Engine's own p2p at CP 2,
and a run may be off by a multiple of its error. Runs in CUDA graphs must equal the same runs
without to the bit, in Megatron's deterministic mode, and must have replayed graphs that hold all of
attention, where it is captured.

    python scripts/parity.py cpu                                # all
    python scripts/parity.py cpu --only '*/zigzag' 'moe*/*'
    python scripts/parity.py cuda --table rows.csv              # two GPUs, about ten minutes
    python scripts/parity.py cuda --share-gpu --only 'fp32/*'   # one GPU
    python scripts/parity.py cuda --megatron-lm ../Megatron-LM --only 'script*'

A run is equal, or refused at start-up in one line; anything else is exit code 1. Each verdict goes
into a CSV table, docs/data/parity.csv by default, in place of the one that it has of that run.
"""

from __future__ import annotations

import argparse
import csv
import math
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from convergence_runs import Run, Variant, parse_variants, run_file
from convergence_smoke import LAUNCHER, check_is, launch, refusal, with_run_file
from forks import ForkedJob
from megatron.training.arguments import add_megatron_arguments
from omegaconf import DictConfig, OmegaConf

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.harness import prepare_data
from megatron_cp_plugin.harness.parity import Comparison, Recording, Tolerances, compare
from megatron_cp_plugin.integration.args import add_arguments
from megatron_cp_plugin.integration.yaml_config import yaml_to_argv

ROWS = Path(__file__).with_name("parity.yaml")
TABLE = Path(__file__).parents[1] / "docs" / "data" / "parity.csv"
COLUMNS = [
    "key",
    "algorithm",
    "platform",
    "loss",
    "gradient",
    "later_gradient",
    "times_p2p",
    "verdict",
    "measured",
]
# Samples of the CPU's runs are filled up with PAD; where --null-tokenizer-pad-id says so, it has no
# loss. The other ends the documents of the data sets that have some.
PAD, END_OF_DOCUMENT, SEQ_LENGTH = 125, 124, 96
# How many times the yardstick's error is allowed. Errors of a gradient are sums over thousands of
# roundings, which vary little; those of ten losses do.
GRADIENT_FACTOR, LOSS_FACTOR = 2.0, 3.0
UNBOUNDED, EXACT = (Tolerances(bound, bound, bound, bound) for bound in (math.inf, 0.0))
# What captured runs and those that they are to be equal to have in common: other weights would come
# of other numbers, and Megatron cannot look for NaN in a captured iteration.
BEFORE_GRAPHS = {"te_rng_tracker": True, "check_for_nan_in_loss_and_grad": False}
# Who captures: see docs/graphs.md.
GRAPHS = {"local": "local", "te": "transformer_engine", "full": "full_iteration"}
# What Megatron sets in deterministic mode, from the first kernel on.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
# Ranks that NCCL takes for nodes may share a GPU. Messages between them go through the host.
NODES = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
AS_A_NODE = 'NCCL_HOSTID=node$RANK LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 exec "$0" "$@"'
JUDGES = ("reference", "yardstick")


@dataclass(frozen=True)
class Row:
    """A row of parity.yaml, whose keys most of these are.

    Attributes:
        megatron: Flags of Megatron. own: those that only the runs of the plugin have.
        plugin: Settings of the plugin; linear_model: the layers are linear attention.
        cp, dp: Sizes; reference_dp: that of the reference.
        yardstick: Whether runs are held to Transformer Engine's p2p, and not to `tolerances`.
        captured_from: Key of the row with the same runs without CUDA graphs, which those of this
            row must equal to the bit; empty: they are not captured.
        alone: Whether nothing is judged but what is equal to it.
        unmodified: Whether the runs are started with Megatron-LM's own pretrain_gpt.py.
    """

    key: str
    about: str
    platform: str
    megatron: Mapping[str, Any]
    algos: str
    cp: int
    iterations: int
    yardstick: bool
    tolerances: Tolerances = field(default_factory=Tolerances)
    own: Mapping[str, Any] = field(default_factory=dict)
    plugin: Mapping[str, Any] = field(default_factory=dict)
    dp: int = 1
    reference_dp: int = 1
    captured_from: str = ""
    alone: bool = False
    unmodified: bool = False

    @property
    def has_documents(self) -> bool:
        """Whether documents are packed."""
        return bool(self.megatron.get("dataloader_inter_document_masking"))

    @property
    def data(self) -> str:
        """Which data set: samples that are more or less padded, short documents, or text."""
        if self.has_documents and "layout=thd" in self.algos:
            return "padded_documents"
        on_cpu = "documents" if self.has_documents else "samples"
        return on_cpu if self.platform == "cpu" else "text"

    @property
    def variants(self) -> list[Variant]:
        """The algorithms."""
        return parse_variants(self.algos)

    def _run(self, variant: Variant | None, cp: int, dp: int, *, reference: bool = False) -> Run:
        shards = self.megatron.get("tensor_model_parallel_size", 1)
        shards *= self.megatron.get("pipeline_model_parallel_size", 1)
        return Run(variant, cp, shards * dp * cp, is_reference=reference)

    @property
    def jobs(self) -> list[Job]:
        """The runs, those that the others are judged by first.

        The reference is Megatron's own, or the first algorithm's at CP 1: Megatron has no linear
        attention, and without packed documents its multi-token prediction knows nothing of their
        ends.
        """
        found = []
        if not self.alone and not self.captured_from:
            further = self.has_documents and "mtp_num_layers" in self.megatron
            own_model = "linear_model" in self.plugin or further
            first = self.variants[0] if own_model else None
            run = self._run(first, 1, self.reference_dp, reference=True)
            found.append(Job(self, "reference", run))
            if self.yardstick:
                found.append(Job(self, "yardstick", Run(None, 2, 2)))
        return found + [
            Job(self, one.label, self._run(one, self.cp, self.dp)) for one in self.variants
        ]


@dataclass(frozen=True)
class Job:
    """One run. Attributes: role: reference, yardstick, or the algorithm with its options."""

    row: Row
    role: str
    run: Run

    @property
    def name(self) -> str:
        """For the command line."""
        return f"{self.row.key}/{self.role}"

    @property
    def judged_by(self) -> str:
        """The name of the run that this one is compared with; empty: of none."""
        if self.row.captured_from:
            return f"{self.row.captured_from}/{self.role}"
        return "" if self.row.alone or self.role == "reference" else f"{self.row.key}/reference"

    @cached_property
    def config(self) -> DictConfig:
        """The run file: with `own`, but for the reference and Megatron's own split."""
        own = self.row.own if self.role not in JUDGES else {}
        config = OmegaConf.create(
            {
                "megatron": {**self.row.megatron, **own},
                "context_parallel": {"platform": self.row.platform, **self.row.plugin},
            }
        )
        return run_file(config, self.run, self.row.iterations)

    @property
    def captures_attention(self) -> bool:
        """Whether CUDA graphs hold all of attention."""
        modules = self.config.megatron.get("cuda_graph_modules")
        return bool(self.row.captured_from) and (not modules or "attn" in modules)

    def environment(self, number: int, gpus: int, shared: bool = False) -> dict[str, str]:
        """What the processes need; jobs of one GPU take the GPUs in turn."""
        # Megatron's own path refuses to start with any other number on Hopper, and sharded data
        # parallelism with this one. The second: torch would start a compiler for each core in
        # each process.
        flags = self.config.megatron
        sharded = flags.get("use_torch_fsdp2") or flags.get("use_megatron_fsdp")
        found = {
            "CUDA_DEVICE_MAX_CONNECTIONS": "8" if sharded else "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        if not flags.get("bf16"):
            # Nothing is rounded to ten bits where all else is float32.
            found["NVIDIA_TF32_OVERRIDE"] = "0"
        if flags.get("deterministic_mode"):
            found |= DETERMINISTIC
        if shared:
            found |= NODES
        if (shared or self.run.processes == 1) and gpus > 1:
            found["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
        return found

    def program(self, folder: Path, megatron_lm: Path | None, shared: bool) -> list[str]:
        """What each rank starts, with the run file of a folder."""
        words = with_run_file(folder)
        if self.row.unmodified:
            assert megatron_lm is not None  # else the row is left out
            parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
            flags = yaml_to_argv(folder / "run.yaml", add_arguments(parser))
            script = str(megatron_lm / "pretrain_gpt.py")
            words = [sys.executable, "-u", "-m", "megatron_cp_plugin.launch", script, *flags]
        return ["sh", "-c", AS_A_NODE, *words] if shared else words


@dataclass
class Verdict:
    """What became of a run. Attributes: refused: the line that it was refused with."""

    job: Job
    comparison: Comparison | None = None
    loss: float = math.nan
    gradients: Mapping[str, float] = field(default_factory=dict)
    times_p2p: float | None = None
    problems: list[str] = field(default_factory=list)
    refused: str = ""

    @property
    def word(self) -> str:
        """For the table."""
        if self.refused:
            return "refused"
        if self.problems:
            return "failed" if self.comparison is None else "beyond the bound"
        if self.job.row.captured_from:
            return "bitwise"
        good = self.job.role if self.job.role == "yardstick" else "equal"
        return "trained" if self.comparison is None else good

    @property
    def line(self) -> str:
        """For the terminal."""
        said = self.refused or "; ".join(self.problems)
        return f"{self.job.name}: {self.word}" + (f": {said}" if said else self._errors())

    def _errors(self) -> str:
        named = zip(COLUMNS[3:7], self.cells, strict=True)
        numbers = [f"{name} {cell}" for name, cell in named if cell]
        return f": {', '.join(numbers)}" if numbers else ""

    @property
    def cells(self) -> list[str]:
        """Errors: loss, gradient, later gradient (CPU), times those of p2p."""
        if self.comparison is None or self.job.row.captured_from:
            return [""] * 4
        gradient, later = max(self.gradients.values(), default=math.nan), ""
        if self.job.row.platform == "cpu":
            gradient = self.comparison.gradient.error
            later = f"{self.comparison.later_gradient.error:.0e}"
        times = "" if self.times_p2p is None else f"{self.times_p2p:.1f}"
        return [f"{self.loss:.0e}", f"{gradient:.0e}", later, times]


# ---- the table


def rows_of(platform: str) -> list[Row]:
    """The rows of parity.yaml; those in CUDA graphs after the one that they are to be equal to."""
    everything = yaml.load(ROWS.read_text(), Loader=yaml.CSafeLoader)
    own = everything[platform]
    sets, flags = everything["algos"], everything["flags"] | own["flags"]
    model = everything["model"] | own["model"]

    def united(names: Iterable[str], more: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in names:
            found |= flags[name]
        return {**found, **more}

    def named(words: str) -> str:
        return ",".join(sets.get(word, word) for word in words.split(","))

    found = []
    for given in own["rows"]:
        megatron = model | united(given.pop("flags", ()), given.pop("megatron", {}))
        of_runs = united(given.pop("own_flags", ()), given.pop("own", {}))
        captured = given.pop("captured", {})
        tolerances = Tolerances.of(given.pop("bound", ""))
        algos = named(given.pop("algos", "softmax"))
        if captured:
            megatron, of_runs = megatron | BEFORE_GRAPHS, of_runs | {"deterministic_mode": True}
        settings = {**own["row"], **given, "own": of_runs, "tolerances": tolerances}
        row = Row(platform=platform, megatron=megatron, algos=algos, **settings)
        found.append(row)
        for who, what in captured.items():
            more = {} if isinstance(what, str) else {**what}
            words = named(more.pop("algos", what))
            graphs = {"cuda_graph_impl": GRAPHS[who], **more}
            one = replace(row, key=f"{row.key}-{who}", algos=words, own=of_runs | graphs)
            found.append(replace(one, captured_from=row.key, yardstick=False, tolerances=EXACT))
    return found


def chosen(rows: Iterable[Row], patterns: Sequence[str], gpus: int) -> list[Job]:
    """The runs that some patterns ask for, and those that these are judged by.

    Args: gpus: with how many all rows are left out that need more, without patterns; 0: none are.
    """
    every = {job.name: job for row in rows for job in row.jobs}
    wanted = {
        name
        for name, job in every.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns or ["*"])
        and (patterns or not gpus or job.run.processes <= gpus)
    }
    keys = {name.partition("/")[0] for name in wanted}
    wanted |= {job.judged_by for name, job in every.items() if name in wanted}
    keys |= {name.partition("/")[0] for name in wanted}
    judges = {f"{key}/{role}" for key in keys for role in JUDGES}
    return [job for name, job in every.items() if name in wanted | judges]


# ---- data


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


def write_data(folder: Path, names: Collection[str], platform: str) -> None:
    """Writes the data sets that some rows need."""
    # Imported on use: it takes seconds, and none of its warnings concerns a dataset.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    if "text" in names:
        prepare_data.main(["--output", str(folder / "text"), "--document-bytes", "700"])
    padded = padded_documents(8 if platform == "cpu" else 128)
    made = {"samples": samples(), "documents": documents(), "padded_documents": padded}
    for name in made.keys() & names:
        builder = IndexedDatasetBuilder(f"{folder / name}.bin", dtype=np.uint16)
        for document in made[name]:
            builder.add_document(document.astype(np.uint16), [len(document)])
        builder.finalize(f"{folder / name}.idx")


# ---- runs


def train(job: Job, number: int, folder: Path, args: argparse.Namespace) -> str:
    """Runs a job; returns the empty string, or one line that says why it failed."""
    place = folder / job.name.replace(":", "-")
    place.mkdir(parents=True)
    config = job.config
    config.megatron.data_path = [str(folder / job.row.data)]
    # Jobs that start at once would write into one cache.
    config.megatron.data_cache_path = str(place / "cache")
    OmegaConf.save(config, place / "run.yaml")
    log, started = place / "log.txt", time.monotonic()
    if job.row.platform == "cpu":
        words = ["--config", str(place / "run.yaml"), "--cp-record", str(place / "recording")]
        codes = ForkedJob(LAUNCHER, words, [(log, log)] * job.run.processes).finish(args.timeout)
        failure = f"exit codes {codes}" if any(codes) else ""
    else:
        shared, gpus = args.share_gpu, torch.cuda.device_count()
        environment = job.environment(number, gpus, shared)
        program = job.program(place, args.megatron_lm, shared)
        how = args.timeout, lambda done: None, environment, program
        try:
            failure = launch(job.run, place, [], *how)
        except ContextParallelError as error:
            failure = str(error)
    if failure and log.is_file():
        shutil.copy(log, args.output / f"{place.relative_to(folder)}.log".replace("/", "_"))
    spent = time.monotonic() - started
    print(f"{job.name}: {failure or 'trained'} ({spent:.0f} s)", file=sys.stderr, flush=True)
    return failure


def judged(jobs: Sequence[Job], failures: Mapping[str, str], folder: Path) -> list[Verdict]:
    """The verdicts on a row's runs, and on the rows of the same runs in CUDA graphs."""
    recordings: dict[str, Recording] = {}
    found, sticks = [], dict[str, Verdict]()
    for job in jobs:
        place, verdict = folder / job.name.replace(":", "-"), Verdict(job)
        if job.role == "yardstick":
            sticks[job.row.key] = verdict
        found.append(verdict)
        if failure := failures[job.name]:
            verdict.refused = refusal(place / "log.txt") if job.role not in JUDGES else ""
            verdict.problems = [failure]
            continue
        try:
            recordings[job.name] = Recording.load(place / "recording")
        except ContextParallelError as error:
            verdict.problems = [str(error)]
            continue
        wanted = recordings.get(job.judged_by)
        measure(verdict, recordings[job.name], wanted)
        if job.judged_by and wanted is None:
            verdict.problems.append("the run to compare with failed")
        elif job.row.key in sticks and job.role not in JUDGES:
            hold_to(verdict, sticks[job.row.key])
    return [one for one in found if one.job.role != "reference" or one.problems]


def measure(verdict: Verdict, run: Recording, wanted: Recording | None) -> None:
    """Says what a finished run is, and how far from the one that it is judged by."""
    job = verdict.job
    verdict.problems += check_is(run, job.run, job.row.iterations)
    captured = bool(job.row.captured_from)
    if job.role not in JUDGES and job.row.platform == "cuda":
        verdict.problems += check_graphs(run, captured=captured, attention=job.captures_attention)
    if wanted is None:
        return
    if captured:
        verdict.problems += check_digests(wanted, run)
    by_yardstick = job.row.yardstick
    tolerances = UNBOUNDED if by_yardstick else job.row.tolerances
    verdict.comparison = found = compare(wanted, run, tolerances)
    verdict.problems += found.problems
    verdict.loss = found.loss.error
    gradients = found.euclidean if by_yardstick else found.gradients
    if job.config.megatron.get("deterministic_mode") and job.config.megatron.get("bf16"):
        # Megatron sums it token by token in bfloat16 then: the order of the tokens is all it shows.
        embedding = "embedding.word_embeddings.weight"
        gradients = {k: v for k, v in gradients.items() if not k.startswith(embedding)}
    verdict.gradients = gradients


def hold_to(verdict: Verdict, yardstick: Verdict) -> None:
    """Adds what is beyond a multiple of the yardstick's errors.

    A gradient that the yardstick happens to have nearly right counts as its median one.
    """
    if yardstick.problems or not yardstick.gradients:
        verdict.problems.append("the yardstick failed")
        return
    allowed = LOSS_FACTOR * yardstick.loss
    # Not `>`: NaN is above everything.
    if not verdict.loss <= allowed:
        verdict.problems.append(f"a loss is off by {verdict.loss:.1e} (allowed {allowed:.1e})")
    errors = yardstick.gradients
    median = sorted(errors.values())[len(errors) // 2]
    verdict.times_p2p, at = -math.inf, ""
    for name, error in verdict.gradients.items():
        base = max(errors.get(name, 0.0), median)
        ratio = error / base if base else math.inf if error else 0.0
        ratio = math.inf if math.isnan(ratio) else ratio
        if ratio > verdict.times_p2p:
            verdict.times_p2p, at = ratio, name
    if not verdict.times_p2p <= GRADIENT_FACTOR:
        off = f"gradient is off by {verdict.gradients[at]:.1e}"
        verdict.problems.append(f"{off}, {verdict.times_p2p:.1f} times the yardstick: {at}")


def check_graphs(recording: Recording, *, captured: bool, attention: bool) -> list[str]:
    """Says whether a run replayed CUDA graphs otherwise than it should have, in its last iteration.

    Args:
        captured: Whether there should have been any. attention: whether in them.
    """
    found = []
    for number, rank in enumerate(recording.ranks):
        last = max(rank.gradients)
        replays, sent = rank.replays[last], sum(rank.sent_bytes[last].values())
        if bool(replays) != captured:
            found.append(f"rank {number} replayed {replays} CUDA graphs in iteration {last}")
        if attention and sent:
            found.append(f"rank {number} sent {sent} bytes for attention outside of CUDA graphs")
    return found


def check_digests(wanted: Recording, recording: Recording) -> list[str]:
    """Says where gradients of two runs differ by a bit."""
    found = []
    for number, (want, got) in enumerate(zip(wanted.ranks, recording.ranks, strict=True)):
        for step, digests in want.gradients.items():
            names = [n for n, digest in digests.items() if got.gradients[step].get(n) != digest]
            if names:
                found.append(
                    f"{len(names)} of {len(digests)} gradients of rank {number} differ in "
                    f"iteration {step}: {names[0]}"
                )
    return found


def run_all(args: argparse.Namespace, jobs: Sequence[Job]) -> bool:
    """Runs all jobs, several at once; returns whether all are as they should be."""
    args.output.mkdir(parents=True, exist_ok=True)
    commit = args.commit or described()
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.row.captured_from or job.row.key, []).append(job)
    good = True
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        folder = Path(name)
        write_data(folder, {job.row.data for job in jobs}, args.platform)
        waiting: dict[str, Future[str]] = {
            job.name: pool.submit(train, job, number, folder, args)
            for number, job in enumerate(jobs)
        }
        for group in groups.values():
            failures = {job.name: waiting[job.name].result() for job in group}
            verdicts = judged(group, failures, folder)
            good &= all(one.refused or not one.problems for one in verdicts)
            print(*(one.line for one in verdicts), sep="\n", flush=True)
            write_table(args.table, verdicts, commit)
            for job in group:  # gradients take some hundred MiB a row
                shutil.rmtree(folder / job.name.replace(":", "-"), ignore_errors=True)
    return good


def described() -> str:
    """The commit of this checkout."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, cwd=ROWS.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def write_table(path: Path, verdicts: Iterable[Verdict], commit: str) -> None:
    """Puts verdicts into a table, in place of those that it has of the same runs."""
    rows: dict[tuple[str, ...], list[str]] = {}
    if path.is_file():
        with path.open() as lines:
            rows = {tuple(row[:3]): row for row in list(csv.reader(lines))[1:]}
    for one in verdicts:
        name = "te:p2p" if one.job.role == "yardstick" else one.job.role
        key = one.job.row.key, name, one.job.row.platform
        rows[key] = [*key, *one.cells, one.word, commit]
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows.values()])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("platform", choices=("cpu", "cuda"))
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN", help="KEY/ALGORITHM, * for anything"
    )
    parser.add_argument("--list", action="store_true", help="list the runs and end")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run")
    parser.add_argument("--jobs", type=int, help="at once; default: 1 on the CPU, 10 on GPUs")
    parser.add_argument(
        "--output", type=Path, default=Path("results/parity"), help="logs of runs that failed"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="default: docs/data/parity.csv")
    parser.add_argument("--commit", default="", help="for the table; default: what git says")
    parser.add_argument(
        "--share-gpu", action="store_true", help="ranks of a run share a GPU, as if each was a node"
    )
    parser.add_argument(
        "--megatron-lm", type=Path, metavar="DIR", help="checkout, for the rows script*"
    )
    args = parser.parse_args(argv)
    args.jobs = args.jobs or (1 if args.platform == "cpu" else 10)
    rows = [row for row in rows_of(args.platform) if args.megatron_lm or not row.unmodified]
    gpus = 0 if args.platform == "cpu" or args.share_gpu else torch.cuda.device_count()
    jobs = chosen(rows, args.only, gpus)
    if not jobs:
        parser.error(f"no run matches {' '.join(args.only)}: see --list")
    if args.list:
        print("\n".join(job.name for job in jobs))
        return 0
    most = 1 if args.share_gpu else max(job.run.processes for job in jobs)
    if args.platform == "cuda" and max(gpus, torch.cuda.device_count()) < most:
        parser.error(f"needs {most} GPUs, got {gpus}: see --only and --share-gpu")
    return 0 if run_all(args, jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
