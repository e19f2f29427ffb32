#!/usr/bin/env python
"""Trains with every algorithm on two GPUs, among Transformer Engine's layers, and tabulates.

The reference is Megatron with Transformer Engine's own attention at context-parallel size 1, with
the same weights, data and flags. In float32 (without TF32) runs are held to the bounds of the other
parity harnesses. In bfloat16 the yardstick is Transformer Engine's own p2p at CP 2: it rounds too,
and a run may be off by so many times what it is off, in the losses and in the gradient of every
parameter. Linear attention, which Transformer Engine has not, is compared with lasp2 at CP 1, in
bfloat16 with the bounds of parity_matrix.py.

Runs in CUDA graphs must equal the same runs without to the bit, in Megatron's deterministic mode,
and must have replayed graphs that hold all of attention, where it is captured. Rows that need more
GPUs than there are (`graphs-tp`, `graphs-pp*`, `graphs-vpp*`: four) are left out without --only.

    python scripts/parity_gpus.py --output results/parity_gpus      # two GPUs, about ten minutes
    python scripts/parity_gpus.py --share-gpu --only 'fp32/*'       # one GPU
    python scripts/parity_gpus.py --megatron-lm ../Megatron-LM --only 'script*'
    python scripts/parity_gpus.py --only 'bf16/*' --output results/parity_gpus
    python scripts/parity_gpus.py --table results/parity_gpus/rows.json    # into the pages

Rows of captured runs go into docs/data/graphs.md, the others into docs/data/parity.md.

Many small jobs share the GPUs, since starting one takes longer than training. Exit code 1: a run
failed or is further off than allowed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import parity_gpu_rows
import torch
from convergence_runs import Run, run_file
from convergence_smoke import check_is, launch, with_run_file
from megatron.training.arguments import add_megatron_arguments
from omegaconf import DictConfig, OmegaConf
from parity_flags import choose, make_parser
from parity_gpu_rows import GpuCombination, captured_models
from parity_judging import check_digests, check_graphs, judge
from parity_matrix import padded_documents, write_data
from parity_pages import (
    ITERATIONS,
    cell,
    describe,
    graphs_section,
    section,
    write_pages,
)

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.harness import prepare_data
from megatron_cp_plugin.harness.parity import Recording, Tolerances, compare
from megatron_cp_plugin.integration.args import add_arguments
from megatron_cp_plugin.integration.yaml_config import yaml_to_argv

UNBOUNDED = Tolerances(math.inf, math.inf, math.inf, math.inf)
SHARDED = ("use_torch_fsdp2", "use_megatron_fsdp")
# What Megatron sets in deterministic mode, from the first kernel on.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
JUDGES = ("reference", "yardstick")
# Ranks that NCCL takes for nodes may share a GPU. Messages between them go through the host.
NODES = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
AS_A_NODE = 'NCCL_HOSTID=node$RANK LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 exec "$0" "$@"'


@dataclass(frozen=True)
class Job:
    """One run. Attributes: role: reference, yardstick, or the algorithm with its options."""

    combination: GpuCombination
    role: str
    run: Run

    @property
    def name(self) -> str:
        """For the command line."""
        return f"{self.combination.key}/{self.role}"

    @property
    def folder(self) -> str:
        """For what the run writes."""
        return self.name.replace(":", "-")

    @property
    def data(self) -> str:
        """Which data set."""
        padded = self.combination.data == padded_documents.__name__
        return padded_documents.__name__ if padded else "text"

    @property
    def iterations(self) -> int:
        """How many it trains."""
        return self.combination.iterations or ITERATIONS

    @property
    def equals(self) -> Job | None:
        """The run that this one is to be equal to: the same without CUDA graphs."""
        if not self.combination.eager:
            return None
        (eager,) = (one for one in parity_gpu_rows.ROWS if one.key == self.combination.eager)
        return replace(self, combination=eager)

    @property
    def judged_by(self) -> Job | None:
        """The run that this one is compared with."""
        one = self.combination
        if one.eager:
            return self.equals
        if one.alone or self.role == "reference":
            return None
        return Job(one, "reference", one.reference)

    @property
    def captures_attention(self) -> bool:
        """Whether CUDA graphs hold all of attention."""
        modules = self.config.megatron.get("cuda_graph_modules")
        return bool(self.combination.eager) and (not modules or "attn" in modules)

    @property
    def config(self) -> DictConfig:
        """The run file that the runs of the row have in common, with the flags of this one."""
        return self.combination.config_of(self.run)

    def environment(self, number: int, gpus: int, shared: bool = False) -> dict[str, str]:
        """What the processes need; jobs of one GPU take the GPUs in turn."""
        # Megatron's own path refuses to start with any other number on Hopper, and sharded data
        # parallelism with this one. The second: torch would start a compiler for each core in
        # each process.
        sharded = any(self.config.megatron.get(name) for name in SHARDED)
        found = {
            "CUDA_DEVICE_MAX_CONNECTIONS": "8" if sharded else "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        if not self.combination.megatron.get("bf16"):
            # Nothing is rounded to ten bits where all else is float32.
            found["NVIDIA_TF32_OVERRIDE"] = "0"
        if self.config.megatron.get("deterministic_mode"):
            found |= DETERMINISTIC
        if shared:
            found |= NODES
        if (shared or self.run.processes == 1) and gpus > 1:
            found["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
        return found

    def program(self, folder: Path, megatron_lm: Path | None, shared: bool) -> list[str]:
        """What each rank starts, with the run file of a folder."""
        words = with_run_file(folder)
        if self.combination.unmodified:
            assert megatron_lm is not None  # else the row is left out
            parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
            flags = yaml_to_argv(folder / "run.yaml", add_arguments(parser))
            script = str(megatron_lm / "pretrain_gpt.py")
            words = [sys.executable, "-u", "-m", "megatron_cp_plugin.launch", script, *flags]
        return ["sh", "-c", AS_A_NODE, *words] if shared else words


def jobs_of(combination: GpuCombination) -> list[Job]:
    """The runs of a row, those that the others are judged by first."""
    jobs = []
    if not combination.alone and not combination.eager:
        jobs.append(Job(combination, "reference", combination.reference))
    if combination.yardstick and not combination.alone:
        jobs.append(Job(combination, "yardstick", combination.yardstick))
    return jobs + [Job(combination, v.label, combination.run(v)) for v in combination.variants]


def train(job: Job, number: int, folder: Path, gpus: int, args: argparse.Namespace) -> str:
    """Runs a job; returns the empty string, or one line that says why it failed."""
    place = folder / job.folder
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    config = job.config
    config.megatron.data_path = [str(folder / job.data)]
    # Jobs that start at once would write into one cache.
    config.megatron.data_cache_path = str(place / "cache")
    OmegaConf.save(run_file(config, job.run, job.iterations), place / "run.yaml")
    environment = job.environment(number, gpus, args.share_gpu)
    program = job.program(place, args.megatron_lm, args.share_gpu)
    started = time.monotonic()
    try:
        failure = launch(job.run, place, [], args.timeout, lambda done: None, environment, program)
    except ContextParallelError as error:
        failure = str(error)
    spent = time.monotonic() - started
    print(f"{job.name}: {failure or 'trained'} ({spent:.0f} s)", flush=True)
    return failure


def measure(
    job: Job, recording: Callable[[], Recording], reference: Callable[[], Recording] | None
) -> dict[str, Any]:
    """What a finished run is, and how far from the one that it is judged by, in plain types.

    Args: recording, reference: of these two. Raise ContextParallelError if there is none.
    """
    found: dict[str, Any] = {"role": job.role, "failure": "", "problems": []}
    try:
        run = recording()
    except ContextParallelError as error:
        return found | {"failure": str(error)}
    found["losses"] = run.losses()
    found["problems"] = check_is(run, job.run, job.iterations)
    if job.role not in JUDGES:
        found["problems"] += check_graphs(
            run, captured=bool(job.combination.eager), attention=job.captures_attention
        )
    if reference is None:
        return found
    try:
        wanted = reference()
    except ContextParallelError:
        return found | {"failure": "the run to compare with failed"}
    if job.combination.eager:
        found["problems"] += check_digests(wanted, run)
    bounded = job.combination.yardstick is None
    comparison = compare(wanted, run, job.combination.tolerances if bounded else UNBOUNDED)
    found["problems"] += comparison.problems
    losses = wanted.losses()
    found["loss_error"] = max(
        _relative(got, want)
        for name in losses
        for got, want in zip(run.losses().get(name, [math.nan]), losses[name], strict=False)
    )
    found["gradient_errors"] = comparison.gradients if bounded else comparison.euclidean
    if job.config.megatron.get("deterministic_mode") and job.config.megatron.get("bf16"):
        # Megatron sums it token by token in bfloat16 then: the order of the tokens is all it shows.
        found["gradient_errors"] = {
            name: error
            for name, error in found["gradient_errors"].items()
            if not name.startswith("embedding.word_embeddings.weight")
        }
    return found


def _relative(got: float, want: float) -> float:
    return abs(got - want) / abs(want) if want else math.inf if got else 0.0


class Collector:
    """Compares each run as soon as it and its judge have ended, and writes rows that are complete.

    A recording is read once, and forgotten when all that are compared with it are.
    """

    def __init__(
        self, jobs: Sequence[Job], folder: Path, output: Path, about: Mapping[str, str]
    ) -> None:
        self._jobs = jobs
        self._folder = folder
        self._output = output
        self._failures: dict[str, str] = {}
        # One thread each: those of one operation would wait for each other wherever torch sees
        # more cores than it gets, ten times as long as the operation takes.
        threads = min(8, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        self._recordings: dict[str, Future[Recording]] = {}
        self._measured: dict[str, Future[dict[str, Any]]] = {}
        self._done: set[str] = set()
        self._report: dict[str, Any] = {"about": about, "rows": []}
        self.good = True

    def add(self, job: Job, failure: str) -> None:
        """Takes note of a run that has ended."""
        self._failures[job.name] = failure
        place = self._folder / job.folder
        if failure:
            log = place / "log.txt"
            if log.is_file():
                shutil.copy(log, self._output / f"{job.folder.replace('/', '_')}.log")
        else:
            loaded = self._pool.submit(Recording.load, place / "recording")
            self._recordings[job.name] = loaded
        for one in self._jobs:
            needed = [one, *([one.judged_by] if one.judged_by else [])]
            if one.name not in self._measured and all(x.name in self._failures for x in needed):
                # After what it waits for, so that this has a thread by then.
                self._measured[one.name] = self._pool.submit(self._measure, one)
        for key in sorted({one.combination.key for one in self._jobs} - self._done):
            mine = [one for one in self._jobs if one.combination.key == key]
            if all(one.name in self._measured for one in mine):
                self._finish(key, mine)
        self._forget()

    def _measure(self, job: Job) -> dict[str, Any]:
        if failure := self._failures[job.name]:
            return {"role": job.role, "failure": failure, "problems": []}
        wanted = partial(self._recording, job.judged_by) if job.judged_by else None
        return measure(job, partial(self._recording, job), wanted)

    def _recording(self, job: Job) -> Recording:
        if failure := self._failures[job.name]:
            raise ContextParallelError(failure)
        return self._recordings[job.name].result()

    def _forget(self) -> None:
        """Gradients take some hundred MiB a row."""
        for key in self._done:
            others = (one for one in self._jobs if one.combination.eager == key)
            if all(one.combination.key in self._done for one in others):
                shutil.rmtree(self._folder / key, ignore_errors=True)
                for name in [name for name in self._recordings if name.split("/")[0] == key]:
                    del self._recordings[name]

    def _finish(self, key: str, jobs: Sequence[Job]) -> None:
        self._done.add(key)
        combination = jobs[0].combination
        runs = [self._measured[job.name].result() for job in jobs]
        stick = next((run for run in runs if run["role"] == "yardstick"), None)
        others = [run for run in runs if run["role"] not in JUDGES]
        for run in runs:
            judged = run in others
            problems = judge(run, stick) if judged else [run["failure"], *run["problems"]]
            problems = [problem for problem in problems if problem]
            self.good &= not problems
            name = f"{combination.key}/{run['role']}"
            errors = cell(run, stick, combination.eager) if judged and not run["failure"] else ""
            print(f"{name}: {'; '.join(problems) or f'as it should be {errors}'}", flush=True)
        self._report["rows"].append(
            {
                "key": combination.key,
                "about": combination.about,
                "eager": combination.eager,
                "reference": next((run for run in runs if run["role"] == "reference"), None),
                "yardstick": stick,
                "runs": others,
            }
        )
        order = [row.key for row in parity_gpu_rows.ROWS]
        self._report["rows"].sort(key=lambda row: order.index(row["key"]))
        # NaN and infinities are written as Python's json module reads them.
        (self._output / "rows.json").write_text(json.dumps(self._report, indent=1) + "\n")
        (self._output / "rows.md").write_text(
            f"{section(self._report)}\n{graphs_section(self._report, captured_models())}"
        )


def run_all(args: argparse.Namespace, jobs: Sequence[Job]) -> bool:
    """Runs all jobs, several at once; returns whether all are as they should be."""
    args.output.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        folder = Path(name)
        prepare_data.main(["--output", str(folder / "text"), "--document-bytes", "700"])
        write_data(folder / padded_documents.__name__, padded_documents(multiple=128))
        about = describe(args.commit, shared=args.share_gpu)
        collector = Collector(jobs, folder, args.output, about)
        waiting: dict[Future[str], Job] = {
            pool.submit(train, job, number, folder, gpus, args): job
            for number, job in enumerate(jobs)
        }
        for ended in as_completed(waiting):
            collector.add(waiting[ended], ended.result())
    return collector.good


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script; returns its exit code."""
    parser = make_parser(__doc__, "parity_gpus", timeout_s=240.0)
    parser.add_argument("--jobs", type=int, default=10, help="at once; default: %(default)s")
    parser.add_argument("--commit", default="", help="for the table; default: what git says")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="put a rows.json into the pages and end"
    )
    parser.add_argument(
        "--share-gpu", action="store_true", help="ranks of a run share a GPU, as if each was a node"
    )
    parser.add_argument(
        "--megatron-lm", type=Path, metavar="DIR", help="checkout, for the rows script*"
    )
    args = parser.parse_args(argv)
    if args.table:
        write_pages(json.loads(args.table.read_text()), captured_models())
        return 0
    rows = [one for one in parity_gpu_rows.ROWS if args.megatron_lm or not one.unmodified]
    every = {job.name: job for row in rows for job in jobs_of(row)}
    gpus = torch.cuda.device_count()
    if gpus and not args.only and not args.share_gpu:
        every = {name: job for name, job in every.items() if job.run.processes <= gpus}
    wanted = [every[name] for name in choose(every, args, parser)]
    wanted += [job.equals for job in wanted if job.equals]
    keys = {job.combination.key for job in wanted}
    names = {job.name for job in wanted}
    jobs = [
        job
        for combination in rows
        if combination.key in keys
        for job in jobs_of(combination)
        if job.name in names or job.role in JUDGES
    ]
    if args.list:
        print("\n".join(job.name for job in jobs))
        return 0
    most = 1 if args.share_gpu else max(job.run.processes for job in jobs)
    if gpus < most and any(j.combination.config.context_parallel.platform == "cuda" for j in jobs):
        parser.error(f"needs {most} GPUs, got {gpus}: see --only and --share-gpu")
    return 0 if run_all(args, jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
