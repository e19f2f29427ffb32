"""What the simulator predicts beside what was measured: writes docs/predictions.md.

`docs/data/measured.csv` has the rows of docs/data/benchmarks_log.md, `docs/data/published.csv`
those of others. `--fit NAME` fits numbers of a machine's file to the rows that say so; nothing else
sees them.
"""

import argparse
import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import sqrt
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
from benchmark_rank import NODE, Case
from headlines import section

import megatron_cp_plugin  # noqa: F401  (registers the algorithms)
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.planner.dry_run import RecordedKernel
from megatron_cp_plugin.planner.event_simulation import Timeline, play, tile_seconds
from megatron_cp_plugin.planner.layer import Layer
from megatron_cp_plugin.planner.machine import Links, Machine, Rate
from megatron_cp_plugin.planner.model import MODELS, Split
from megatron_cp_plugin.planner.products import product_seconds
from megatron_cp_plugin.planner.simulate import simulate, sums_in, traces_of
from megatron_cp_plugin.planner.step import TrainingStep, step
from megatron_cp_plugin.tokens import tokens_of

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data"
PAGE, ROWS = ROOT / "docs" / "predictions.md", DATA / "predictions.md"
MS = 1e3


@dataclass(frozen=True)
class Row:
    """A measured row: times of forward, and forward and backward, in ms; None: not measured.

    Attributes: use: "fit", "held" or "left out".
    """

    table: str
    machine: str
    gpus: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    documents: int
    algorithm: str
    options: str
    kernel: str
    captured: int
    forward_ms: float | None
    step_ms: float | None
    use: str

    @property
    def problem(self) -> tuple[object, ...]:
        """What rows have in common whose algorithms are compared."""
        shape = self.heads, self.kv_heads, self.head_dim, self.value_dim, self.documents
        kernel = "" if self.algorithm == "single" else self.kernel
        return (self.table, self.machine, self.gpus, self.tokens, *shape, self.captured, kernel)


@dataclass(frozen=True)
class RankRow:
    """A row of docs/data/ranks.csv: one rank alone, as `scripts/benchmark_rank.py` measures it.

    Attributes: captured: whether the step was replayed in a CUDA graph; then there is no
        forward_ms. use: "fit" or "held", as decided before it was measured.
    """

    case: Case
    algorithm: str
    rank: int
    captured: bool
    forward_ms: float | None
    step_ms: float
    use: str

    def predict(self, machine: Machine) -> tuple[float, float]:
        """Forward, and forward and backward, in ms."""
        name, *pairs = self.algorithm.split(":")
        case = self.case
        heads, kv_heads, dim, _ = case.sizes
        found = rank_alone(
            name,
            dict(pair.split("=", 1) for pair in pairs),
            Shape(1, case.seq_len, heads, kv_heads, dim),
            case.mask(case.seq_len),
            machine,
            [rank // NODE for rank in range(case.ranks)],
            self.rank,
            captured=self.captured,
        )
        return found.forward.seconds * MS, found.seconds * MS


def rank_alone(
    algo: str,
    options: Mapping[str, object],
    shape: Shape,
    mask: Mask,
    machine: Machine,
    nodes: Sequence[int],
    rank: int,
    *,
    captured: bool = False,
) -> Timeline:
    """One rank as `scripts/benchmark_rank.py` runs it: blocks of others come as fast as memory is.

    Args:
        rank: Of the job's.
        nodes: The node of each rank of the job.
        algo, options, shape, mask, machine, captured: As of `simulate`.

    Raises:
        ConfigError: As of `simulate`.
    """
    nodes = tuple(nodes)
    arrival = Links(Rate(machine.operation_seconds, machine.memory_bytes_per_second / 2))
    machine = replace(
        machine,
        inside=arrival,
        between=arrival,
        copy=None,
        group_share=1.0,
        between_total=None,
        cards_per_node=len(nodes),  # no rank of the node shares one with it
    )
    layer = Layer(algo, tuple(options.items()), shape, mask, nodes, peer_access=False)
    kernel = next(iter(machine.kernels))
    traces = traces_of(layer, (rank,), sums_in(kernel))
    return play(machine, nodes, traces, kernel, captured=captured)


def rank_rows() -> list[RankRow]:
    """The rows of docs/data/ranks.csv that were measured with the schedule of today's code.

    A captured step is a row of its own.
    """
    found = []
    with (DATA / "ranks.csv").open() as lines:
        for row in csv.DictReader(lines):
            if not row["step_ms"] or row["schedule"]:  # the code does it otherwise since
                continue
            case = Case(int(row["ranks"]), tokens_of(row["tokens"]), row["heads"], row["mask"], 0)
            of_row = case, row["algorithm"], int(row["rank"])
            times = float(row["forward_ms"]), float(row["step_ms"])
            found.append(RankRow(*of_row, False, *times, row["use"]))
            if row["captured_ms"]:
                found.append(RankRow(*of_row, True, None, float(row["captured_ms"]), row["use"]))
    return found


def measured() -> list[Row]:
    """All rows of docs/data/measured.csv."""
    with (DATA / "measured.csv").open() as lines:
        return [Row(**{k: _typed(k, v) for k, v in row.items()}) for row in csv.DictReader(lines)]


def _typed(name: str, text: str) -> Any:
    kind = Row.__annotations__[name]
    if kind in (str, int):
        return kind(text)
    return float(text) if text else None


def machine_of(name: str) -> Machine:
    """A shipped machine, or one of a single run, which is kept beside its rows."""
    own = DATA / f"{name}.yaml"
    return Machine.load(own if own.is_file() else name)


def predict(row: Row | RankRow, machine: Machine) -> tuple[float, float]:
    """Forward, and forward and backward, in ms."""
    if isinstance(row, RankRow):
        return row.predict(machine)
    starts = random_documents(row.tokens, row.documents) if row.documents else ()
    mask = Mask("full" not in row.options, None, starts)
    if row.algorithm == "single":
        return _single(row, machine, mask)
    nodes = machine.nodes(row.gpus)
    options = dict(pair.split("=", 1) for pair in row.options.split(":") if pair)
    shape: Shape | LinearShape
    if row.kernel == "fla":
        shape, kernel = LinearShape(1, row.tokens, row.heads, row.head_dim, row.value_dim), None
    else:
        dims = {"head_dim": row.head_dim, "value_dim": row.value_dim}
        shape, kernel = Shape(1, row.tokens, row.heads, row.kv_heads, **dims), row.kernel
    found = simulate(
        row.algorithm,
        options,
        shape,
        mask,
        machine,
        nodes,
        kernel=kernel or next(iter(machine.kernels)),
        captured=bool(row.captured),
    )
    return found.forward.seconds * MS, found.seconds * MS


def _single(row: Row, machine: Machine, mask: Mask) -> tuple[float, float]:
    """One GPU's kernel on the whole sequence, divided by the number of GPUs."""
    launch = 0 if row.captured else machine.host.kernel, machine.host.kernel_backward
    times = []
    for phase, host in (("forward", launch[0]), ("backward", launch[1])):
        host = 0.0 if row.captured or row.table == "kernels" else host
        if row.kernel == "fla":
            flop = 4.0 * row.tokens / row.gpus * row.heads * row.head_dim * row.value_dim
            times.append(flop / machine.linear_flops[phase] * MS)
            continue
        bounds = (0, *mask.documents, row.tokens)
        lengths = [b - a for a, b in pairwise(bounds) if b > a]
        area = sum(n * (n + 1) / 2 if mask.causal else n * n for n in lengths)
        mean = row.tokens // len(lengths)
        dims = row.heads, row.kv_heads, row.head_dim, row.value_dim
        name: Phase = "forward" if phase == "forward" else "backward"
        tile = RecordedKernel(name, 1, mean, mean, area, *dims, mask.causal)
        times.append((tile_seconds(machine, row.kernel, tile) + host) / row.gpus * MS)
    return times[0], sum(times)


# ---- fitting


def fit(name: str, rows: Sequence[Row | RankRow], keys: Sequence[str], rounds: int) -> Machine:
    """The machine with numbers that fit the rows, by damped least squares of logarithms.

    Args: keys: which numbers, as paths in the file. Each is held near what it was: a factor of e
        counts as much as an error of 10%.
    """
    values = machine_of(name).values()
    start = np.log([_number(values, key) for key in keys])
    found, scale = start.copy(), 10.0

    def residuals(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        changed = deepcopy(values)
        for key, value in zip(keys, np.exp(x), strict=True):
            _set(changed, key, float(value))
        machine, errors = Machine.of(changed), []
        for row in rows:
            for got, want in zip(predict(row, machine), (row.forward_ms, row.step_ms), strict=True):
                if want is not None:
                    errors.append(np.clip(np.log(got / want), -0.5, 0.5) * scale)
        return np.array([*errors, *(x - start)])

    damping, now = 1e-2, residuals(found)
    for number in range(rounds):
        columns = []
        for index in range(len(keys)):
            moved = found.copy()
            moved[index] += 0.05
            columns.append((residuals(moved) - now) / 0.05)
        slope = np.stack(columns, 1)
        while damping < 1e3:
            square = slope.T @ slope
            step = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slope.T @ now)
            trial = residuals(found + np.clip(step, -0.7, 0.7))
            if trial @ trial < now @ now:
                found, now, damping = found + np.clip(step, -0.7, 0.7), trial, damping / 5
                break
            damping *= 5
        print(f"round {number}: {float(now @ now):.3f}", flush=True)
    for key, value in zip(keys, np.exp(found), strict=True):
        print(f"  {key}: {_number(values, key):.4g} -> {value:.4g}")
        _set(values, key, float(value))
    return Machine.of(values)


def _number(values: Mapping[str, Any], key: str) -> float:
    found: Any = values
    for part in key.split("/"):
        found = found[int(part) if part.isdigit() and int(part) in found else part]
    return float(found)


def _set(values: dict[str, Any], key: str, value: float) -> None:
    *path, last = key.split("/")
    found: Any = values
    for part in path:
        found = found[int(part) if part.isdigit() and int(part) in found else part]
    found[last] = value


def numbers(values: Any, path: str = "") -> Iterable[str]:
    """Paths of all numbers of a machine's file that are above 0."""
    if isinstance(values, Mapping):
        for key, one in values.items():
            yield from numbers(one, f"{path}/{key}" if path else str(key))
    elif isinstance(values, float) and values > 0:
        yield path


# ---- the page


@dataclass(frozen=True)
class Prediction:
    """A number beside a measured one. Attributes: phase: "forward" or "step"."""

    row: Row
    phase: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Published:
    """A row of docs/data/published.csv: a rate in TFLOP/s a GPU."""

    source: str
    row: str
    machine: str
    gpus: int
    tokens: int
    heads: int
    kv_heads: int
    mask: str
    algorithm: str
    options: str
    kernel: str
    phase: str
    value: float
    unit: str


def predictions(rows: Iterable[Row]) -> list[Prediction]:
    """Of all rows but those left out."""
    found: list[Prediction] = []
    machines: dict[str, Machine] = {}
    for row in rows:
        if row.use == "left out":
            continue
        machine = machines.setdefault(row.machine, machine_of(row.machine))
        times = zip(
            ("forward", "step"), (row.forward_ms, row.step_ms), predict(row, machine), strict=True
        )
        found += [Prediction(row, phase, want, got) for phase, want, got in times if want]
    return found


def published() -> list[tuple[Published, float]]:
    """Rows of others, each with what is predicted, in its unit."""
    found, layers = [], {}
    with (DATA / "published.csv").open() as lines:
        given = list(csv.DictReader(lines))
    for values in given:
        kinds = Published.__annotations__
        row = Published(**{key: kinds[key](value) for key, value in values.items()})
        machine, mask = machine_of(row.machine), Mask(row.mask == "causal")
        key = row.algorithm, row.options, row.tokens, row.gpus, mask, row.machine, row.kernel
        if key not in layers:
            layers[key] = simulate(
                row.algorithm,
                dict(pair.split("=", 1) for pair in row.options.split(":") if pair),
                Shape(1, row.tokens, row.heads, row.kv_heads, 128),
                mask,
                machine,
                machine.nodes(row.gpus),
                transport="group",
                kernel=row.kernel,
            )
        time = layers[key]
        area = row.tokens * (row.tokens + 1) / 2 if mask.causal else row.tokens**2
        flop = 4.0 * row.heads * 128 * area / row.gpus
        forward, backward = time.forward.seconds, time.backward.seconds
        rates = {
            "forward": flop / forward,
            "backward": 2.5 * flop / backward,
            "step": 3.5 * flop / (forward + backward),
        }
        found.append((row, rates[row.phase] / 1e12))
    return found


def share_of_order(found: Sequence[Prediction], within: float = 0.05) -> tuple[int, int]:
    """Pairs of algorithms whose order is right, and all that differ by more than `within`."""
    right = pairs = 0
    groups: dict[tuple[object, ...], list[Prediction]] = {}
    for one in found:
        if one.row.algorithm != "single":
            groups.setdefault((one.row.problem, one.phase), []).append(one)
    for group in groups.values():
        for a, b in combinations(group, 2):
            if "fit" == a.row.use == b.row.use:
                continue
            if max(a.measured, b.measured) > (1 + within) * min(a.measured, b.measured):
                pairs += 1
                right += (a.measured < b.measured) == (a.predicted < b.predicted)
    return right, pairs


def _summary(errors: Sequence[float]) -> str:
    sizes = sorted(map(abs, errors))
    within = sum(size <= 0.2 for size in sizes) / len(sizes)
    return f"{len(sizes)} | {statistics.median(sizes):.1%} | {within:.0%} | {sizes[-1]:.0%}"


def pages() -> tuple[str, str]:
    """docs/predictions.md, and docs/data/predictions.md with all rows."""
    ours, others, whole = predictions(measured()), published(), steps()
    alone = of_ranks()
    held = [one for one in ours if one.row.use == "held"]
    fitted = [one for one in ours if one.row.use == "fit"]
    right, pairs = share_of_order(ours)
    of_alone = {
        use: [error for of, _, errors in alone if of.use == use for error in errors]
        for use in ("held", "fit")
    }
    near = [abs(error) <= 0.15 for error in of_alone["held"]]
    lines = [INTRODUCTION, "## How far off", ""]
    lines += [
        "| rows | numbers | median error | within 20% | largest |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines.append(f"| **ours, held out** | {_summary([one.error for one in held])} |")
    for table in dict.fromkeys(one.row.table for one in held):
        errors = [one.error for one in held if one.row.table == table]
        lines.append(f"| {table} | {_summary(errors)} |")
    for use, words in (
        ("held", "**one rank alone, held out**"),
        ("fit", "one rank alone, fitted to"),
    ):
        lines.append(f"| {words} | {_summary(of_alone[use])} |")
    lines.append(f"| ours, fitted to | {_summary([one.error for one in fitted])} |")
    for source in dict.fromkeys(row.source for row, _ in others):
        errors = [got / row.value - 1 for row, got in others if row.source == source]
        lines.append(f"| published: {source} | {_summary(errors)} |")
    of_products = products()
    errors = [got / row.tflops - 1 for row, got in of_products if row.use == "held"]
    lines.append(f"| published: matrix products, DeepGEMM, H800 | {_summary(errors)} |")
    for source in dict.fromkeys(map(source_of, whole)):
        errors = [one[1].seconds / one[0].seconds - 1 for one in whole if source_of(one) == source]
        lines.append(f"| steps: {source} | {_summary(errors)} |")
    by_ours = [
        one.seconds / row.seconds - 1 for row, one in steps(by_our_program=True) if row.host_seconds
    ]
    lines.append(f"| steps: LASP + DDP, A100, as by our program | {_summary(by_ours)} |")
    layers = [got / row.value - 1 for row, got in others]
    lines += [
        "",
        f"All published layers together: median {statistics.median(map(abs, layers)):.1%}. Errors "
        "are predicted / measured - 1, of times; of rates for published layers. One rank alone, "
        f"held out: {sum(near) / len(near):.0%} within 15%.",
        "",
        f"Order: of {pairs} pairs of algorithms on the same problem that differ by more than 5%, "
        f"not both fitted to, {right} ({right / pairs:.0%}) are predicted in the right order.",
        "",
        WRONG.rstrip(),
    ]
    rows = [
        "# Predictions and measurements: all rows",
        "",
        "Written by `python scripts/predictions.py`; do not edit. What they say is in "
        "[predictions.md](../predictions.md).",
        "",
        ABOUT_ROWS,
        DETAILS,
        "## Published figures",
        "",
        "Rates in TFLOP/s a GPU, measured / predicted, and the error. Nothing is fitted to them.",
        "",
    ]
    rows += _published_tables(others)
    rows += _step_table(whole)
    rows += _product_table(of_products)
    rows += section()
    rows += _rank_table(alone)
    rows += _emulated(ours)
    rows += [
        "## Ours",
        "",
        "Milliseconds, measured / predicted, and the error; *f*: fitted to.",
        "",
    ]
    rows += _own_tables(ours)
    return "\n".join(lines) + "\n", "\n".join(rows) + "\n"


def _published_tables(others: Sequence[tuple[Published, float]]) -> list[str]:
    lines: list[str] = []
    tables: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    for row, got in others:
        by_gpus = len({one.gpus for one, _ in others if one.source == row.source}) > 1
        column = f"{row.gpus} GPUs" if by_gpus else f"{row.tokens // 1024}K"
        cell = f"{row.value:g} / {got:.0f}, {got / row.value - 1:+.0%}"
        key = row.source, row.mask, row.phase
        tables.setdefault(key, {}).setdefault(row.row, {})[column] = cell
    for (source, mask, phase), rows in tables.items():
        columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
        lines += [f"{source}, {mask}, {'both passes' if phase == 'step' else phase}:", ""]
        lines += [f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
        for name, cells in rows.items():
            lines.append(f"| {name} | {' | '.join(cells.get(c, '-') for c in columns)} |")
        lines.append("")
    return lines


def _own_tables(ours: Sequence[Prediction]) -> list[str]:
    lines: list[str] = []
    for table in dict.fromkeys(one.row.table for one in ours):
        lines += [f"### {table}", "", "| problem | algorithm | forward | both passes |"]
        lines.append("| --- | --- | --- | --- |")
        rows: dict[Row, dict[str, Prediction]] = {}
        for one in ours:
            if one.row.table == table:
                rows.setdefault(one.row, {})[one.phase] = one
        for row, phases in rows.items():
            cells = [
                f"{p.measured:g} / {p.predicted:.4g}, {p.error:+.0%}" if p else ""
                for p in (phases.get("forward"), phases.get("step"))
            ]
            mark = " *f*" if row.use == "fit" else ""
            lines.append(f"| {_problem(row)} | {_name(row)}{mark} | {cells[0]} | {cells[1]} |")
        lines.append("")
    return lines


def _problem(row: Row) -> str:
    text = f"{row.tokens // 1024}K {row.heads}:{row.kv_heads}"
    if row.documents:
        text += f", documents of {row.documents // 1024}K"
    return text


def _name(row: Row) -> str:
    name = "one GPU's kernel" if row.algorithm == "single" else row.algorithm
    kernel = "" if row.kernel in ("flash4", "fla") else f" ({row.kernel})"
    options = f" `{row.options}`" if row.options else ""
    return f"{name}{options}{kernel}"


INTRODUCTION = """# Predictions and measurements

How long the simulator (`megatron_cp_plugin/planner`) says that a layer of attention takes, compared
with measurements. Written by `python scripts/predictions.py`; do not edit.

Each rank's own code runs on tensors without storage, which records what it launches, copies, sends
and waits for. These records are played on a machine file (`configs/machines/*.yaml`): kernels by
tile, memory, links of each class, launch time of the host. The simulator does not know any
algorithm. Up to 16 ranks all are simulated, of more a sample (`planner/simulate.py`).

[data/predictions.md](data/predictions.md) has all rows, how they were chosen, and each error that
is known, in detail. Some rows were used to fit a machine file; all others were held out, though we
had seen them.
"""

WRONG = """## Where it is wrong

- **Short sequences.** Where the host is the limit (8K, 16K tokens, many groups of heads) rows are
  off by up to 40%; the same code differs by 12% from run to run there.
- **Long runs** are 1 to 5% slower than predicted at 128K: clocks drop under load.
- **NCCL inside a node.** One number says how much slower kernels are while it moves data, and all
  machines have the H200's: rings with many steps are 5 to 10% faster than predicted.
- **Sockets** have one rate for all exchanges: distflash is 10 to 30% faster than predicted.
- **Several cards a node.** Rings between nodes of 8 A800 with 4 cards are up to 31% faster.
- **Linear attention** forwards at 256K take up to a third longer than predicted: what the host
  needs to launch fla's kernels.
- **Published steps.** LASP's are limited by their program's host, which is not modelled;
  DISTFLASHATTN's depend on how many network cards a node has, which the paper does not say.
- **Experts.** Published steps of four mixtures on H100, in FP8 but for the last, give 15% more
  tokens a second than predicted (Qwen3 30B, EP 16), 3% less (EP 8), 39% more (235B, 256 GPUs) and
  27% less (gpt-oss 120B, BF16). All experts get equally many tokens.
- **Not modelled**: contention of copies and kernels for memory, waves of tiles, the start of Triton
  and NCCL, a network's topology above its cards, other jobs.
"""

ABOUT_ROWS = """`docs/data/measured.csv` has the rows of
docs/data/benchmarks_log.md, each with the options for which
today's code follows the schedule that was measured. Some are left out, because that schedule no
longer exists (ulysses in four head groups at 32:8) or the machine file lacks the kernel
(torch_flash). `docs/data/published.csv` has measurements of others. Numbers marked *f* were used to
fit a machine file (`--fit`); all others were held out. Links over NVLink, memory and head dims come
from separate measurements. The sockets of each run were fitted to some of its rows, because the
three runs had networks that differ by a factor of two.
"""

DETAILS = """## Where it is wrong, in detail

- Rows were held out of the fits, but we had seen them. Three parts of the model were changed after
  held-out rows had shown them to be wrong: what nodes share on one loopback, that the process group
  slows kernels only while data moves, and what linear attention adds for earlier tokens. After
  looking at published rows one thing was changed: in LASP's steps each GPU keeps all optimizer
  states, as DDP does. The authors of the published machines' files knew those rows.
- Rows were measured at the commits that docs/data/benchmarks_log.md names, and are predicted
  with today's code, which has fewer copies around usp's and gathered attention: up to 5% of usp at
  16K.
- `group_share`, half of a kernel's speed beside NCCL, stands for multiprocessors, memory and clocks
  together, and all other machines use the H200's value. It is too pessimistic for rings over NCCL
  inside a node with many steps (attention2d `overlap`: 5 to 10% too slow), too optimistic for
  gathers of two ranks.
- Long runs are 1 to 5% slower than predicted at 128K: clocks drop under load, and kernels
  were measured at 8K and 32K tokens.
- One rank alone (docs/data/ranks.csv): which rows are fitted to was written down before any was
  measured. Before the model was mended 77 numbers held out had a median error of 12.4%, 57% of
  them within 15%. What was wrong, found on the rows to fit to: documents were as fast as their mean
  length says (what kernels lose is in inverse proportion to each length); flips, permuted copies
  and concatenations were as fast as other copies (they are half as fast); a first call was
  simulated, which makes what later ones find; steps of a relay in which a rank has no part cost
  its host something; and launches cost the host less than they do on this one, our own kernels in
  Triton most of all. The last is in docs/data/h200_alone.yaml alone, because the rows over NVLink,
  of an older code on another host, contradict it: there an operation takes 6 us, here 77. So 77
  numbers came to 5.0% and 87%. On 27 November 2026 all rows were measured again (5f1fff8c), twice;
  each time is the shorter one, because what disturbs the host only adds to it. Of the times of the
  two runs 90% differ by at most 15%, and one by 89%: the same call of one process can take its
  host 1.7 ms in one half-second and 3.0 in the next. One more fault was found on the rows to fit
  to: the second edge of a window cost the kernel nothing. A cost of the host for each message of an
  exchange was tried: the rows to fit to came nearer, the rows held out did not.
- Where the host is the limit (8K, 16K tokens and groups of heads) single rows are off by up to 40%:
  the same code differs by 12% from run to run there, and hosts differ by more.
- Sockets: one rate of exchanges for all. Fewer messages at a time are faster (distflash 10 to 30%
  faster than predicted), and in each run short messages had another rate than long ones. A fourth
  run, of linear attention by heads on 2 GPUs, has no file of its own: it is 69% off.
- Emulated nodes: the forward of zigzag's ring was measured at 545 ms, 124 predicted. By reasoning
  it is not the ring that makes it slow: `route=straight` posts its hops in the same order, each
  after the one before, and took 159 (156 predicted, fitted to); and both passes took 218 ms more
  than the forward (211 predicted), though the backward goes round the other way by the same code
  with twice the bytes. What is left is that two processes share a GPU in turns there, so that a hop
  inside a node goes on only while both of its ranks have theirs, and that it was the first to be
  measured. Neither was tried, and nothing in the model says so. Backwards of gathers are faster
  than predicted, also with all-to-alls at the rate of exchanges, which was tried and changes 1%.
- Linear attention: a launch of one of fla's kernels takes the host 0.1 to 0.2 ms, eight a layer,
  here as long as an attention kernel's. With 0.1 ms the forwards at 256K came from 26 to 31% below
  what was measured to 13 to 15%, but both passes of lasp2 from 14% to 27% above: left as it was.
- BurstEngine's rings between nodes of 8 A800 with 4 cards are up to 31% faster than predicted up
  to 512K tokens: eight GPUs take turns at four cards here, one message after another.
- MagiAttention's ring on 8 GPUs is slower than predicted by 29%: it is Transformer Engine's.
  Gradients travel in the model's dtype there, as is predicted now; until 24 November 2026 the
  prediction had them in float32, as our own ring passes them on.
- Steps: LASP's own never take less than 1.08 s on 16 GPUs to 1.27 s on 128, which are 2K tokens:
  that is taken for their program's host, as measured there (fitted to). And their kernels pass a
  state on after they have computed with it, as the paper has it, where ours do before: predicted as
  so many kernels after one another. Both were put in after these rows had been 46 to 77% off for
  long; which of two ways of adding up (the longer of host and GPUs, and not their sum) was decided
  by what a host does, but beside the rows. Their memory is 36 and 52 GB on 16 GPUs at 128K and
  256K, predicted 31 and 43. Of their 14 steps from 128K tokens on the predictions of some are that
  host's time and nothing else; the table has them apart.
- Steps: DISTFLASHATTN's two boxes are "interconnected by 100 Gbps Infiniband": if that is one card
  for eight GPUs, its rows are predicted up to four times too slow; if it is one for each GPU, 3 to
  14%. Which it was the paper does not say; the page of the papers takes the latter, which was
  chosen after both had been seen. Ulysses there is 31% slower than predicted.
- Matrix products: the rule (the root of the sum of squares of computing and moving) was chosen of
  three beside DeepGEMM's figures; the longer of the two has a median error of 28% there, their sum
  one of 11%, but would count twice what a rate measured with large products has in it. DeepGEMM's
  are in FP8; products in bfloat16, and cuBLAS's one for each expert, were not measured.
- Experts: no step with experts was measured. Published ones (Megatron-Bridge, performance summary
  archive, DGX H100, 4,096 tokens, micro-batches of 1), beside `step` on `h100_400g` in bfloat16:

  | model | GPUs | precision | TP, PP, EP | sequences | published, tokens/s a GPU | predicted |
  | --- | --- | --- | --- | --- | --- | --- |
  | Qwen3 30B-A3B (26.04.01) | 16 | FP8 | 1, 1, 16 | 1024 | 8960 | 7779 |
  | Qwen3 30B-A3B (26.02.01) | 16 | FP8 | 1, 2, 8 | 1024 | 9058 | 9314 |
  | Qwen3 235B-A22B (26.04.01) | 256 | FP8 | 2, 8, 32 | 8192 | 1712 | 1230 |
  | gpt-oss 120B (26.04.01) | 64 | BF16 | 1, 4, 8 | 1280 | 5824 | 7990 |

  Messages of experts are 31% and 17% of the first two, 40% of the third, whose EP 32 spans four
  nodes: programs overlap them, the estimate does not. gpt-oss is estimated without its windows and
  sinks. All experts get equally many tokens there; left out are what a message to each of hundreds
  of ranks takes the host, the weights that go along with tokens, and messages that overlap
  computation.
- Not modelled: contention of copies and kernels for memory, kernels' quantisation into waves, the
  start of Triton and NCCL, a network's topology above its cards, other jobs.
- Not compared: NeMo's steps in FP8, BurstAttention's charts, Transformer Engine's own rows.
"""


@dataclass(frozen=True)
class StepRow:
    """A row of docs/data/steps.csv.

    Attributes: host_seconds: of the same program with so few tokens that its host alone counts.
    """

    source: str
    model: str
    layers: int
    machine: str
    gpus: int
    tokens: int
    algorithm: str
    options: str
    recompute: Literal["none", "full"]
    seconds: float
    host_seconds: float


def steps(*, by_our_program: bool = False) -> list[tuple[StepRow, TrainingStep]]:
    """Whole steps, each with what is predicted.

    Args: by_our_program: LASP's without what `_as_lasp_did` adds, as predictions of other lengths
        and models have them.
    """
    found = []
    with (DATA / "steps.csv").open() as lines:
        for values in csv.DictReader(lines):
            # torch's DDP keeps all states of the optimizer on every GPU.
            split = "DDP" not in values["source"]
            kinds: dict[str, Any] = {"layers": int, "gpus": int, "tokens": int, "seconds": float}
            kinds["host_seconds"] = float
            row = StepRow(**{k: kinds.get(k, str)(v) for k, v in values.items()})
            predicted = step(
                replace(MODELS[row.model], layers=row.layers),
                Split(context=row.gpus, recompute=row.recompute, distributed_optimizer=split),
                row.tokens,
                machine_of(row.machine),
                row.algorithm,
                dict(pair.split("=", 1) for pair in row.options.split(":") if pair),
            )
            if not split and not by_our_program:
                predicted = _as_lasp_did(row, predicted)
            found.append((row, predicted))
    return found


def source_of(found: tuple[StepRow, TrainingStep]) -> str:
    """Whose step it is; those apart whose prediction is the host's time, to which it is fitted."""
    row, one = found
    return row.source + (", the host's time (fitted to)" if one.seconds == row.host_seconds else "")


def _as_lasp_did(row: StepRow, found: TrainingStep) -> TrainingStep:
    """A step of LASP's own program, beside which that of ours is predicted.

    Its host is the limit of short sequences. Its kernels add the state that comes to the outputs,
    and update it, before they send it (Algorithms 2 and 3), so that ranks compute one after
    another; ours make their part of the state before.
    """
    machine, model = machine_of(row.machine), MODELS[row.model]
    flop = 4.0 * row.tokens / row.gpus * model.heads * model.head_dim**2
    kernels = sum(flop / machine.linear_flops[phase] for phase in ("forward", "backward"))
    waited = row.layers * (row.gpus - 1) * kernels
    return replace(found, seconds=max(row.host_seconds, found.seconds + waited))


def _step_table(found: Sequence[tuple[StepRow, TrainingStep]]) -> list[str]:
    lines = ["## Steps of whole models", ""]
    lines += [
        "Seconds, measured / predicted (`planner/step.py`). The rate of matrix products, and how",
        "often a layer touches its activations, are of one profile (128K, 4 GPUs, distflash).",
        "",
        "| | GPUs | tokens | algorithm | recompute | seconds | GiB predicted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row, one in found:
        error = one.seconds / row.seconds - 1
        cells = (
            f"{row.source}: {row.model}, {row.layers} layers",
            f"{row.gpus} | {row.tokens // 1024}K | {row.algorithm} | {row.recompute}",
            f"{row.seconds:.3g} / {one.seconds:.3g}, {error:+.0%} | {one.gib:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Measured memory of Llama 7B's four layers on 4 GPUs at 128K: 31.5 GiB without recompute, "
        "17.5 with it.",
        "",
    ]
    return lines


@dataclass(frozen=True)
class ProductRow:
    """A row of docs/data/products.csv: as many products of rows with [inner, outer] as experts.

    Attributes: tflops: of the FLOP that are asked for. use: "fit" or "held".
    """

    source: str
    experts: int
    rows: int
    outer: int
    inner: int
    tflops: float
    use: str

    @property
    def flop(self) -> float:
        """Of all of them."""
        return 2.0 * self.experts * self.rows * self.outer * self.inner

    @property
    def moved_bytes(self) -> int:
        """Operands in FP8, results in bfloat16."""
        operands = self.rows * self.inner + self.inner * self.outer
        return self.experts * (operands + 2 * self.rows * self.outer)


def products() -> list[tuple[ProductRow, float]]:
    """Matrix products of others, each with the predicted TFLOP/s.

    Memory is as fast as in the file of H100; the rate of very large products is the one with which
    the row to fit to comes out.
    """
    kinds, found = ProductRow.__annotations__, []
    with (DATA / "products.csv").open() as lines:
        for values in csv.DictReader(lines):
            found.append(ProductRow(**{key: kinds[key](value) for key, value in values.items()}))
    memory = Machine.load("h100_400g").memory_bytes_per_second
    (largest,) = (row for row in found if row.use == "fit")
    seconds = largest.flop / largest.tflops / 1e12
    flops = largest.flop / sqrt(seconds**2 - (largest.moved_bytes / memory) ** 2)
    return [
        (row, row.flop / product_seconds(row.flop, row.moved_bytes, flops, memory) / 1e12)
        for row in found
    ]


def _product_table(found: Sequence[tuple[ProductRow, float]]) -> list[str]:
    lines = ["## Matrix products by their rows", ""]
    lines += [
        "TFLOP/s in FP8, measured / predicted (`planner/products.py`), as an early README of",
        "DeepGEMM has them. With few rows a matrix takes longer to be read than to be multiplied.",
        "",
        "| products | rows of each | matrix | TFLOP/s |",
        "| --- | --- | --- | --- |",
    ]
    for row, got in found:
        mark = " *f*" if row.use == "fit" else ""
        cells = f"{row.tflops:g} / {got:.0f}, {got / row.tflops - 1:+.0%}{mark}"
        lines.append(f"| {row.experts} | {row.rows} | {row.inner} x {row.outer} | {cells} |")
    return [*lines, ""]


_OfRank = tuple[RankRow, tuple[float, float], list[float]]


def of_ranks() -> list[_OfRank]:
    """Ranks alone, each with what is predicted in ms, and errors of what was measured."""
    machine, found = machine_of(RANKS_ON), []
    for row in rank_rows():
        predicted = row.predict(machine)
        pairs = zip((row.forward_ms, row.step_ms), predicted, strict=True)
        errors = [got / want - 1 for want, got in pairs if want is not None]
        found.append((row, predicted, errors))
    return found


def _rank_table(alone: Sequence[_OfRank]) -> list[str]:
    """One rank alone, each row."""
    lines = ["## One rank alone", ""]
    lines += [
        "`scripts/benchmark_rank.py`, 32:8 heads, one H200; ms, measured / predicted, error.",
        "",
        "| P, tokens a rank | mask | algorithm | forward | both passes |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row, predicted, _ in alone:
        case, mark = row.case, " *f*" if row.use == "fit" else ""
        cells = [
            "" if want is None else f"{want:.2f} / {got:.2f}, {got / want - 1:+.0%}"
            for want, got in zip((row.forward_ms, row.step_ms), predicted, strict=True)
        ]
        name = f"{row.algorithm}{', captured' if row.captured else ''}{mark}"
        words = f"{case.ranks}, {case.tokens // 1024}K | {case.words} | {name}"
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return [*lines, ""]


def _emulated(ours: Sequence[Prediction]) -> list[str]:
    """The order of algorithms on emulated nodes."""
    lines = ["## Emulated nodes, 2 x 2: the order", "", "Fastest first, both passes in ms:", ""]
    found = [p for p in ours if p.row.table.startswith("emulated") and p.phase == "step"]
    for name, key in (("measured", attrgetter("measured")), ("predicted", attrgetter("predicted"))):
        order = [f"{_name(p.row)} {key(p):.0f}" for p in sorted(found, key=key)]
        lines.append(f"- {name}: {', '.join(order)}")
    return [*lines, ""]


RANKS_ON = "h200_alone"  # where ranks alone were measured
# What is fitted of a machine: beginnings of tables, and of numbers in its file.
FITS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "h200_nvlink": (
        ("NVLink", "graphs", "linear", "kernels"),
        (
            "kernels/flash4/by_pass",
            "kernels/cudnn/by_pass",
            "linear_flops",
            "group_share",
            "host",
        ),
    ),
    RANKS_ON: ((), ("host",)),
    "h200_emulated_nodes": (("emulated",), ("inside", "between")),
    **{
        f"h200_sockets{run}": (("sockets",), ("between",))  # of three runs
        for run in ("", "_b", "_c")
    },
}


def main() -> None:
    """Writes the page, or fits a machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", choices=FITS, help="fit this machine's file instead")
    name = parser.parse_args().fit
    if name is None:
        for path, text in zip((PAGE, ROWS), pages(), strict=True):
            path.write_text(text)
        return
    tables, beginnings = FITS[name]
    rows: list[Row | RankRow] = [
        row
        for row in measured()
        if row.machine == name and row.use == "fit" and row.table.startswith(tables)
    ]
    if name == RANKS_ON:
        rows += [row for row in rank_rows() if row.use == "fit"]
    keys = [key for key in numbers(machine_of(name).values()) if key.startswith(beginnings)]
    own, shipped = DATA / f"{name}.yaml", ROOT / "configs" / "machines" / f"{name}.yaml"
    fit(name, rows, keys, rounds=6).save(own if own.is_file() else shipped)


if __name__ == "__main__":
    main()
