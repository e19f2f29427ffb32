"""`megatron-cp invariance`: whether context parallelism changes a model's log-probabilities.

Each run is a job of `token_log_probs` with the same flags and samples. What `log_prob_report` makes
of them is printed, and written as JSON and as a picture.
"""

from __future__ import annotations

import json
from argparse import SUPPRESS, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import lcm
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin import registry
from megatron_cp_plugin.commands import parser_of
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.harness.compare import logged
from megatron_cp_plugin.harness.token_log_probs import MODULE, read_batch
from megatron_cp_plugin.harness.train import CommandLine
from megatron_cp_plugin.integration.args import MEGATRON
from megatron_cp_plugin.log_prob_report import LogProbReport, draw, log_prob_report, tables

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Settings of Megatron that choose a dtype, or how much is trained: with a value, and switches.
_VALUES = (
    *("fp8_format", "fp4_format", "save", "global_batch_size", "rampup_batch_size"),
    *("train_samples", "lr_decay_samples", "lr_warmup_samples"),
)
_SWITCHES = ("bf16", "fp16")
_OF_DATA = ("data_path", "split")  # nothing is read with --batch
# A forward pass of the model at the start, in evaluation mode.
_FORWARD = "--train-iters 1 --skip-train --eval-iters 1 --eval-interval 1 --micro-batch-size 1"
_OF_DOCUMENTS = ("dataloader_inter_document_masking", "sft")


@dataclass(frozen=True)
class Run:
    """A job. Attributes: name: for people. file: of its log and folder. words: its flags."""

    name: str
    file: str
    words: tuple[str, ...]
    section: Mapping[str, Any]


@dataclass(frozen=True)
class DtypeRuns:
    """The runs of one dtype.

    Attributes:
        reference, noise: Without context parallelism.
        split_experts: Whether the others have a part of the experts on each rank.
    """

    reference: Run
    noise: Run | None
    others: tuple[Run, ...]
    split_experts: bool = False


@dataclass(frozen=True)
class LogProbs:
    """The results of a job.

    Attributes:
        weights: norms of parameters, by rank.
        log_probs, labels, counts, ranks: [B,S].
    """

    weights: list[dict[str, float]]
    log_probs: Tensor
    labels: Tensor
    counts: Tensor
    ranks: Tensor

    @classmethod
    def load(cls, folder: Path) -> LogProbs:
        """Joins the results of all ranks.

        Raises:
            ContextParallelError: They wrote nothing, or a token is not there exactly once.
        """
        found = [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank*.pt"))]
        if not found:
            raise ContextParallelError(f"no log-probabilities in {folder}: see {folder}.log")
        batches, tokens = len(found[0]["parts"]), found[0]["tokens"]
        kinds = torch.float32, torch.int64, torch.float32, torch.int64
        every = [torch.zeros(batches, tokens, dtype=kind) for kind in kinds]
        seen = torch.zeros(batches, tokens)
        for one in found:
            for row, (numbers, *parts) in enumerate(one["parts"]):
                seen[row, numbers] += 1
                for whole, part in zip(every, (*parts, torch.tensor(one["rank"])), strict=True):
                    whole[row, numbers] = part.to(whole.dtype)
        if not (seen == 1).all():
            raise ContextParallelError(
                f"the ranks of {folder} split {tokens} tokens into parts that are no partition: "
                f"{int((seen != 1).sum())} are missing or there twice"
            )
        return cls([one["weights"] for one in found], *every)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ContextParallelError: A flag cannot be served, or a run failed.
    """
    parser = parser_of("invariance")
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", help=SUPPRESS)
    for name in _VALUES:
        parser.add_argument("--" + name.replace("_", "-"), help=SUPPRESS)
    known, words = parser.parse_known_args(argv)
    dtypes = known.dtypes.split(",")
    if unknown := [each for each in dtypes if each not in _DTYPES]:
        raise ConfigError(f"--dtypes takes {' or '.join(_DTYPES)}, got {unknown[0]}: leave it out")
    if known.samples < 1:
        raise ConfigError(f"--samples must be at least 1, got {known.samples}")
    line = CommandLine.read("invariance", words)
    plan = runs_of(line, known)
    known.output.mkdir(parents=True, exist_ok=True)
    reports = [report_of(plan, dtype, line, known) for dtype in dtypes]
    print(tables(reports))
    path = known.output / "report.json"
    path.write_text(json.dumps([report.as_dict() for report in reports], indent=1) + "\n")
    print(f"wrote {path}")
    if find_spec("matplotlib"):
        draw(reports, known.output / "report.svg")
        print(f"wrote {known.output / 'report.svg'}")
    print("\n".join(report.verdict() for report in reports))
    return int(not all(report.passed for report in reports))


def runs_of(line: CommandLine, known: Namespace) -> DtypeRuns:
    """The runs that a command line asks for.

    Raises:
        ConfigError: The sizes do not fit.
    """
    algo, given = line.of_plugin("algo"), line.given
    size, tensor, _ = line.sizes.values()
    if size < 2:
        raise ConfigError(
            f"invariance needs 2 or more context-parallel ranks, got {size}: add "
            "--context-parallel-size 2"
        )
    if (experts := given("expert_model_parallel_size", 1)) > 1 and not given("load", ""):
        raise ConfigError(
            f"new weights of experts depend on the rank, got expert_model_parallel_size {experts}: "
            "add --load with a checkpoint, or --expert-model-parallel-size 1"
        )
    spans = bool(known.batch and read_batch(known.batch)[1])
    if spans and MEGATRON in known.also.split(","):
        raise ConfigError(f"{MEGATRON} knows no attention_spans, got --also {known.also}")
    kernel, chunk = line.of_plugin("kernel", "auto"), line.of_plugin("chunked_loss")
    alone = ("--context-parallel-size", "1", "--expert-model-parallel-size", "1")
    other_tensor, ids = known.also_tensor, 0
    if other_tensor is not None and not given("load", ""):
        # Weights that depend on no rank, of as many ids for any tensor parallelism.
        ids = lcm(tensor, other_tensor) * given("make_vocab_size_divisible_by", 128)

    def run(name: str, file: str, *more: str, algo: str = "", kernel: str = kernel) -> Run:
        """Args: algo: in the place of all that the flags and the run file say; "": as they do."""
        words = [*(line.by(algo) if algo else line.rest), *more]
        if algo not in ("", MEGATRON):
            words += ["--cp-kernel", kernel]
            words += ["--cp-chunked-loss", str(chunk)] if chunk else []
        if ids:
            multiple = ids // (other_tensor if file == "tensor" else tensor)
            words += ["--use-cpu-initialization", "--make-vocab-size-divisible-by", str(multiple)]
        return Run(name, file, tuple(words), {} if algo else line.section)

    noise: Run | None = None
    if (
        line.of_plugin("layers")
        or registry.kind_of("zigzag" if algo == registry.AUTO else algo) == "linear"
    ):
        reference = run("CP 1", "cp1", *alone)
        if torch.cuda.is_available() and line.of_plugin("platform") != "cpu":
            noise = run("CP 1, kernel chunked", "noise", *alone, "--cp-kernel", "chunked")
    else:
        reference = run("CP 1, Megatron's own attention", "cp1", *alone, algo=MEGATRON)
        # Megatron's needs Transformer Engine for documents, and knows no spans.
        if spans or any(given(name, 0) for name in _OF_DOCUMENTS):
            name = "CP 1, kernel reference"
            reference = run(name, "cp1", *alone, algo="zigzag", kernel="reference")
        noise = run(f"CP 1, kernel {kernel}", "noise", *alone, algo="zigzag")
    others = [run(f"CP {size}, {algo}", "ours")]
    others += [run(f"CP {size}, {n}", n, algo=n) for n in filter(None, known.also.split(","))]
    if other_tensor is not None:
        more = ("--tensor-model-parallel-size", str(other_tensor))
        others.append(run(f"CP {size}, TP {other_tensor}, {algo}", "tensor", *more))
    return DtypeRuns(reference, noise, tuple(others), experts > 1)


def report_of(plan: DtypeRuns, dtype: str, line: CommandLine, known: Namespace) -> LogProbReport:
    """Runs all jobs of one dtype.

    Raises:
        ContextParallelError: A job failed, or its weights or samples are not those of the
            reference.
    """
    reference, *found = (
        _run_job(run, dtype, line, known)
        for run in (plan.reference, *([plan.noise] if plan.noise else []), *plan.others)
    )
    noise = found.pop(0) if plan.noise else None
    for run, one in zip(plan.others, found, strict=True):
        split = "" if run.file == "tensor" else ".experts." if plan.split_experts else None
        check_comparable(run.name, one, reference, split=split)
    named = dict(zip((run.name for run in plan.others), found, strict=True))
    return log_prob_report(
        reference.log_probs,
        {name: one.log_probs for name, one in named.items()},
        noise=None if noise is None else noise.log_probs,
        counts=reference.counts,
        ranks={name: one.ranks for name, one in named.items()},
        dtype=_DTYPES[dtype],
    )


def check_comparable(
    name: str, one: LogProbs, reference: LogProbs, *, split: str | None = None
) -> None:
    """Refuses to compare other tokens, or another model.

    Args:
        name: of the run.
        split: substrings of the names of parameters that are split among ranks.

    Raises: ContextParallelError if something differs.
    """
    different = []
    if one.labels.shape != reference.labels.shape or not torch.equal(one.labels, reference.labels):
        different.append("samples")
    first, *every = (
        {name: norm for name, norm in each.items() if split is None or split not in name}
        for each in (reference.weights[0], *one.weights)
    )
    if any(each != first for each in every):
        different.append("weights")
    if different:
        raise ContextParallelError(
            f"the run {name} has other {' and '.join(different)} than the reference, so that its "
            "log-probabilities say nothing: load a checkpoint, or give --batch"
        )


def _run_job(run: Run, dtype: str, line: CommandLine, known: Namespace) -> LogProbs:
    """Starts a job, and reads its results."""
    name = f"{run.file}-{dtype}"
    folder = known.output / name
    folder.mkdir(exist_ok=True)
    for path in folder.glob("rank*.pt"):
        path.unlink()
    samples, batch = known.samples, "-"
    of_batch: list[str] = []
    if known.batch is not None:
        rows, _ = read_batch(known.batch)
        samples, batch = len(rows), str(known.batch)
        of_batch = ["--mock-data", "--seq-length", str(len(rows[0]["tokens"]))]
    unread = (*_SWITCHES, *_VALUES, "fp8", "fp4", *(_OF_DATA if known.batch else ()))
    words = [
        *line.run_file(known.output / f"{name}.yaml", run.section, unread),
        *(*run.words, *of_batch, *_FORWARD.split(), "--global-batch-size", str(samples)),
        *(["--bf16"] if dtype == "bfloat16" else []),
    ]
    print(f"{dtype}: {run.name}", flush=True)
    ranks = ["--nproc-per-node", str(CommandLine.of(words).ranks)]
    logged(known.output / f"{name}.log", (MODULE, str(folder), batch, *ranks, *words), {})
    return LogProbs.load(folder)
