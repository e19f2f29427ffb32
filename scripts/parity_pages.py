"""What the parity runs of GPUs found, as parts of docs/data/parity.md and graphs.md."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from convergence_runs import Variant
from parity_judging import GRADIENT_FACTOR, LOSS_FACTOR, judge, worst_ratio
from parity_matrix import ON_GPUS, TABLE

from megatron_cp_plugin import registry

ITERATIONS = 10  # that most runs train
GRAPHS_PAGE = TABLE.with_name("graphs.md")
ON_CAPTURED_RUNS = "## What was run"
# What stands below the table.
NOTES = """Bold: beyond the bound. `linear` in bfloat16 exceeds it for one kind of parameter, the
position angles, whose gradient is a sum over all tokens with much cancellation: in float32 its
error is 3e-5 to 5e-5, about 500 roundings, and as many bfloat16 roundings are as large as the
gradient itself; all other gradients are within the bound. Gated delta net in bfloat16
(`delta-net`) could not be run: flash-linear-attention 0.6.0 refuses Triton 3.6 on Hopper, with
Megatron's own split as well. `megatron-fsdp` in bfloat16 is bold only because its recording
compared the bytes of the weights before the first iteration: the optimizer's float32 weights with
the reference's bfloat16 weights. Values are compared since then (equal on CPUs; the row is to be
run again); its losses and gradients are within the bounds. `script*`: the pretrain_gpt.py of
Megatron-LM core_v0.19.0, started with `megatron_cp_plugin.launch`. `fusion*`: the algorithm's runs
sum weight gradients with apex's extension (`--gradient-accumulation-fusion`, apex 6424da3), the
reference and p2p do not.
"""


@dataclass(frozen=True)
class CapturedRow:
    """A model in docs/data/graphs.md.

    Attributes:
        key: Of its runs without CUDA graphs.
        about: Names it in the table.
        variants: The algorithms.
        captured: By who captures, as Megatron's flag says it, the key of the runs in CUDA graphs.
    """

    key: str
    about: str
    variants: Sequence[Variant]
    captured: Mapping[str, str]


def section(report: Mapping[str, Any]) -> str:
    """Returns the part of docs/data/parity.md on GPUs.

    Args:
        report: What rows.json holds.
    """
    about = report["about"]
    lines = [
        ON_GPUS,
        "",
        f"Written by `scripts/parity_gpus.py` on {about['date']}, commit {about['commit']}: "
        f"{about['versions']}, {about['device']}.",
        "",
        f"A run trains a GPT of 4 layers with head dim 128 for {ITERATIONS} iterations on two",
        "sequences of 4096 tokens at CP 2, with Transformer Engine's layers. It is compared",
        "with Transformer Engine's own attention at CP 1 (linear attention: lasp2 at CP 1):",
        "relative errors of the worst loss of any iteration / the worst gradient of any",
        "parameter at the first, middle and last one. In float32, TF32 off, the bounds are those",
        "above. In bfloat16, errors of gradients are in the Euclidean norm, and the bounds are",
        f"{LOSS_FACTOR:g} times (loss) and {GRADIENT_FACTOR:g} times (gradients) the error of",
        "Transformer Engine's p2p at CP 2; the number in brackets is this ratio for the worst",
        "gradient. Linear attention keeps the bounds above in bfloat16 too.",
        "",
        "| key | combination | p2p | algorithms |",
        "| --- | --- | --- | --- |",
    ]
    for one in report["rows"]:
        stick = one["yardstick"]
        found = "" if stick is None else _errors(stick)
        runs = ", ".join(f"{run['role']} {cell(run, stick)}" for run in one["runs"])
        lines.append(f"| `{one['key']}` | {one['about']} | {found} | {runs} |")
    return "\n".join([*lines, "", NOTES])


def graphs_section(report: Mapping[str, Any] | None, models: Sequence[CapturedRow]) -> str:
    """Returns the part of docs/data/graphs.md on what was run.

    Args:
        report: What rows.json holds; None: nothing was run yet.
        models: All that may be run, each with the same captors.
    """
    captors = [name for model in models[:1] for name in model.captured]
    lines = [ON_CAPTURED_RUNS, ""]
    if report is not None:
        about = report["about"]
        lines += [
            f"Written by `scripts/parity_gpus.py` on {about['date']}, commit {about['commit']}: "
            f"{about['versions']}, {about['device']}.",
            "",
        ]
    lines += [
        "A GPT of 4 layers with Transformer Engine's layers at CP 2, two micro-batches per",
        "step, in Megatron's deterministic mode. Equal: all losses, and the gradients of every",
        "parameter at the first, middle and last iteration, are bitwise those of the same run",
        "without graphs, and everything captured was replayed in the last iteration. Without:",
        "the difference of the run without graphs from CP 1, as in [parity.md](../parity.md) but",
        "without the gradient of the embedding, which Megatron sums in bfloat16 in this mode;",
        'or "trained" if it was not compared. Empty: not run.',
        "",
        f"| {' | '.join(['model', 'algorithm', 'transport', 'without', *captors])} |",
        "|" + " --- |" * (4 + len(captors)),
    ]
    rows = {one["key"]: one for one in (report or {"rows": ()})["rows"]}
    for model in models:
        for variant in model.variants:
            cells = [model.about, variant.label, _transport(variant)]
            for key in (model.key, *model.captured.values()):
                row = rows.get(key, {"runs": (), "yardstick": None})
                found = [run for run in row["runs"] if run["role"] == variant.label]
                other = "" if key == model.key else model.key
                cells.append(cell(found[0], row["yardstick"], other) if found else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _transport(variant: Variant) -> str:
    """What blocks travel by on GPUs of one node."""
    kind = registry.algorithm_class(variant.algo).Options
    if "transport" not in kind.__dataclass_fields__:
        return "process group"
    chosen = dict(variant.options).get("transport", "auto")
    return "process group" if chosen == "group" else "peer memory"


def cell(run: Mapping[str, Any], yardstick: Mapping[str, Any] | None, eager: str = "") -> str:
    """What the tables say of a run. Args: eager: key of the runs that it must equal, if any."""
    if run["failure"]:
        return "**failed**"
    if eager:
        return "**differs**" if run["problems"] else "equal"
    if "gradient_errors" not in run:
        return "**failed**" if run["problems"] else "trained"
    text = _errors(run)
    if yardstick is not None and yardstick.get("gradient_errors"):
        text += f" ({worst_ratio(run, yardstick)[0]:.1f})"
    return f"**{text}**" if judge(run, yardstick) else text


def _errors(run: Mapping[str, Any]) -> str:
    if "gradient_errors" not in run:
        return "**failed**"
    return f"{run['loss_error']:.0e} / {max(run['gradient_errors'].values(), default=math.nan):.0e}"


def write_pages(report: Mapping[str, Any], models: Sequence[CapturedRow]) -> None:
    """Puts what rows.json holds into the pages; a page that it has nothing for stays as it is."""
    captured = {key for model in models for key in (model.key, *model.captured.values())}
    parts = [one for one in report["rows"] if one["key"] in captured]
    others = [one for one in report["rows"] if one["key"] not in captured]
    for page, heading, rows, text in (
        (TABLE, ON_GPUS, others, section),
        (GRAPHS_PAGE, ON_CAPTURED_RUNS, parts, partial(graphs_section, models=models)),
    ):
        if rows:
            before, _, _ = page.read_text().partition(heading)
            page.write_text(f"{before.rstrip()}\n\n{text({**report, 'rows': rows})}")


def describe(commit: str, *, shared: bool = False) -> dict[str, str]:
    """What the numbers were measured with. Args: shared: whether ranks shared a GPU."""
    packages = "torch", "megatron-core", "transformer-engine"
    versions = [f"Python {platform.python_version()}"]
    for name in packages:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    if not commit:
        words = ["git", "rev-parse", "--short", "HEAD"]
        result = subprocess.run(words, cwd=TABLE.parent, capture_output=True, text=True)
        commit = result.stdout.strip() or "unknown"
    count = torch.cuda.device_count()
    device = f"{count} x {torch.cuda.get_device_name()}" if count else "no GPU"
    if shared:
        device += ", shared by the ranks of a run, which NCCL takes for nodes"
    date = str(datetime.date.today())
    return {"date": date, "commit": commit, "versions": ", ".join(versions), "device": device}
