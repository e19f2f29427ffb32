"""What the simulator predicts beside what was measured and published: the tables of the pages.

    python scripts/predictions.py                   # docs/predictions.md, docs/papers/*.md
    python scripts/predictions.py --only figure6    # one table
    python scripts/predictions.py --fit h200_nvlink:calls

Reads docs/data: measured.csv and ranks.csv (ours), published.csv, products.csv and steps.csv, and
papers.yaml, which has the papers' steps of whole models. Writes each table between
`<!-- generated: NAME -->` and `<!-- end -->`, and every row of docs/predictions.md into
docs/data/predicted.csv. `--fit` fits numbers of a machine's file to the rows that say so; nothing
else sees them.
"""

import argparse
import csv
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from benchmark_rank import NODE, Case
from benchmark_train import SHAPES
from specs import algo_of

import megatron_cp_plugin  # noqa: F401  (registers the algorithms)
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.planner.dry_run import RecordedKernel
from megatron_cp_plugin.planner.event_simulation import Timeline, play, tile_seconds
from megatron_cp_plugin.planner.layer import Layer
from megatron_cp_plugin.planner.machine import Links, Machine, Rate
from megatron_cp_plugin.planner.memory import memory
from megatron_cp_plugin.planner.model import MODELS, Model, Recompute, Split
from megatron_cp_plugin.planner.products import product_seconds
from megatron_cp_plugin.planner.simulate import simulate, traces_of
from megatron_cp_plugin.planner.step import TrainingStep, nodes_of_split, step
from megatron_cp_plugin.terminal import tokens_of

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data"
PAGE, ROWS = ROOT / "docs" / "predictions.md", DATA / "predicted.csv"
PAGES = (PAGE, *sorted((ROOT / "docs" / "papers").glob("*.md")))
MS = 1e3
Options = Mapping[str, object]


@dataclass(frozen=True)
class Prediction:
    """A number beside a measured one.

    Attributes:
        table: Where it was measured, a row of docs/predictions.md.
        row: What it is of.
        phase: "forward" or "step"; of published layers "backward" too.
        measured, predicted: Ms, s or TFLOP/s.
        use: "held", "fit", or "published".
        problem: What rows have in common whose algorithms are compared.
    """

    table: str
    row: str
    phase: str
    measured: float
    predicted: float
    use: str = "published"
    problem: tuple[object, ...] = ()

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1


def read(name: str) -> Iterator[dict[str, str]]:
    """The rows of docs/data/NAME.csv."""
    with (DATA / f"{name}.csv").open() as lines:
        yield from csv.DictReader(lines)


@cache
def machine_of(name: str) -> Machine:
    """A shipped machine, or one of a single run, which is kept beside its rows."""
    own = DATA / f"{name}.yaml"
    return Machine.load(own if own.is_file() else name)


def options_of(text: str) -> Options:
    """Of `backward=kv:keep=local`."""
    return dict(pair.split("=", 1) for pair in text.split(":") if pair)


# ---- attention, ours


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
        """Of the row without its algorithm; of one GPU's kernel nothing is compared."""
        if self.algorithm == "single":
            return ()
        shape = self.heads, self.kv_heads, self.head_dim, self.value_dim, self.documents
        return self.table, self.machine, self.gpus, self.tokens, *shape, self.captured, self.kernel

    @property
    def name(self) -> str:
        """In one line."""
        documents = f" documents of {self.documents}" if self.documents else ""
        options = f":{self.options}" if self.options else ""
        heads = f"{self.heads}:{self.kv_heads}"
        return f"{self.tokens} {heads}{documents} {self.algorithm}{options} {self.kernel}"

    def predict(self, machine: Machine) -> tuple[float, float]:
        """Forward, and forward and backward, in ms."""
        starts = random_documents(self.tokens, self.documents) if self.documents else ()
        mask = Mask("full" not in self.options, None, starts)
        if self.algorithm == "single":
            return self._single(machine, mask)
        shape: Shape | LinearShape
        kernel: str | None = self.kernel
        if kernel == "fla":
            shape = LinearShape(1, self.tokens, self.heads, self.head_dim, self.value_dim)
            kernel = next(iter(machine.kernels))
        else:
            dims = {"head_dim": self.head_dim, "value_dim": self.value_dim}
            shape = Shape(1, self.tokens, self.heads, self.kv_heads, **dims)
        of_layer = self.algorithm, options_of(self.options), shape, mask, machine
        nodes, captured = machine.nodes(self.gpus), bool(self.captured)
        found = simulate(*of_layer, nodes, kernel=kernel, captured=captured)
        return found.forward.seconds * MS, found.seconds * MS

    def _single(self, machine: Machine, mask: Mask) -> tuple[float, float]:
        """One GPU's kernel on the whole sequence, divided by the number of GPUs."""
        launches = machine.host.kernel, machine.host.kernel_backward
        phases: tuple[Phase, ...] = "forward", "backward"
        times = []
        for phase, launch in zip(phases, launches, strict=True):
            host = 0.0 if self.captured or self.table == "kernels" else launch
            if self.kernel == "fla":
                flop = 4.0 * self.tokens / self.gpus * self.heads * self.head_dim * self.value_dim
                times.append(flop / machine.linear_flops[phase] * MS)
                continue
            lengths = [b - a for a, b in pairwise((0, *mask.documents, self.tokens)) if b > a]
            area = sum(n * (n + 1) / 2 if mask.causal else n * n for n in lengths)
            mean = self.tokens // len(lengths)
            dims = self.heads, self.kv_heads, self.head_dim, self.value_dim
            kind = mask.causal, len(lengths) > 1
            tile = RecordedKernel(phase, 1, mean, mean, area, *dims, *kind)
            times.append((tile_seconds(machine, self.kernel, tile) + host) / self.gpus * MS)
        return times[0], sum(times)


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
    table: str = "one rank alone"
    machine: str = "h200_alone"
    problem: tuple[object, ...] = ()

    @property
    def name(self) -> str:
        """In one line."""
        case, captured = self.case, " captured" * self.captured
        return f"{case.ranks} x {case.tokens} {case.words} {self.algorithm}{captured}"

    def predict(self, machine: Machine) -> tuple[float, float]:
        """Forward, and forward and backward, in ms."""
        (name, options), case = algo_of(self.algorithm), self.case
        heads, kv_heads, dim, _ = case.sizes
        nodes = [rank // NODE for rank in range(case.ranks)]
        shape, mask = Shape(1, case.seq_len, heads, kv_heads, dim), case.mask(case.seq_len)
        layer = Layer(name, tuple(options.items()), shape, mask, tuple(nodes), False)
        found = rank_alone(layer, machine, self.rank, captured=self.captured)
        return found.forward.seconds * MS, found.seconds * MS


def rank_alone(layer: Layer, machine: Machine, rank: int, *, captured: bool = False) -> Timeline:
    """One rank as `scripts/benchmark_rank.py` runs it: blocks of others come as fast as memory is.

    Raises:
        ConfigError: As of `simulate`.
    """
    arrival = Links(Rate(machine.operation_seconds, machine.memory_bytes_per_second / 2))
    nodes = layer.nodes
    machine = replace(
        machine,
        inside=arrival,
        between=arrival,
        copy=None,
        group_share=1.0,
        between_total=None,
        cards_per_node=len(nodes),  # no rank of the node shares one with it
    )
    kernel = next(iter(machine.kernels))
    traces = traces_of(layer, (rank,))
    return play(machine, nodes, traces, kernel, captured=captured)


def rank_rows() -> list[RankRow]:
    """The rows of docs/data/ranks.csv that were measured with the schedule of today's code.

    A captured step is a row of its own.
    """
    found = []
    for row in read("ranks"):
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
    return [Row(**{k: _typed(k, v) for k, v in row.items()}) for row in read("measured")]


def _typed(name: str, text: str) -> Any:
    kind = Row.__annotations__[name]
    if kind in (str, int):
        return kind(text)
    return float(text) if text else None


def predictions(rows: Iterable[Row | RankRow]) -> list[Prediction]:
    """Of all rows but those left out."""
    found = []
    for row in (row for row in rows if row.use != "left out"):
        got = row.predict(machine_of(row.machine))
        for phase, want, ms in zip(
            ("forward", "step"), (row.forward_ms, row.step_ms), got, strict=True
        ):
            if want:
                of_row = row.table, row.name, phase
                found.append(Prediction(*of_row, want, ms, row.use, row.problem))
    return found


# ---- what others published, and steps of whole models


def published() -> list[Prediction]:
    """Layers of others: TFLOP/s a GPU."""
    layers: dict[tuple[object, ...], Timeline] = {}
    found = []
    for row in read("published"):
        machine, mask = machine_of(row["machine"]), Mask(row["mask"] == "causal")
        tokens, heads, gpus = (int(row[name]) for name in ("tokens", "heads", "gpus"))
        names = "algorithm", "options", "tokens", "gpus", "mask", "machine", "kernel"
        key = tuple(row[name] for name in names)
        if key not in layers:
            shape = Shape(1, tokens, heads, int(row["kv_heads"]), 128)
            machine = replace(machine, copy=None)  # theirs send by NCCL alone
            of_layer = row["algorithm"], options_of(row["options"]), shape, mask, machine
            layers[key] = simulate(*of_layer, machine.nodes(gpus), kernel=row["kernel"])
        forward, backward = (getattr(layers[key], name).seconds for name in ("forward", "backward"))
        flop = 4.0 * heads * 128 * (tokens * (tokens + 1) / 2 if mask.causal else tokens**2) / gpus
        rates = {
            "forward": flop / forward,
            "backward": 2.5 * flop / backward,
            "step": 3.5 * flop / (forward + backward),
        }
        what = f"{row['row']} {row['mask']} {tokens} on {gpus} GPUs"
        got = rates[row["phase"]] / 1e12
        source = f"published: {row['source']}"
        found.append(Prediction(source, what, row["phase"], float(row["value"]), got))
    return found


def steps() -> list[Prediction]:
    """Whole steps, in seconds; LASP's as its own program makes them, and as ours would."""
    found = []
    for row in read("steps"):
        # torch's DDP keeps all states of the optimizer on every GPU.
        split = "DDP" not in row["source"]
        gpus, tokens, layers = (int(row[name]) for name in ("gpus", "tokens", "layers"))
        machine, model = machine_of(row["machine"]), replace(MODELS[row["model"]], layers=layers)
        how = Split(context=gpus, recompute=row["recompute"], distributed_optimizer=split)  # type: ignore[arg-type]
        of_layer = model.shape(tokens), Mask(), machine, nodes_of_split(how, machine)
        layer = simulate(row["algorithm"], options_of(row["options"]), *of_layer)
        one = step(model, how, tokens, machine, attention=layer.seconds).seconds
        what = f"{row['model']}, {layers} layers, {tokens} on {gpus} GPUs, {row['algorithm']}"
        want, host, source = (float(row["seconds"]), float(row["host_seconds"]), row["source"])
        if host:
            ours = f"steps: {source}, as by our program"
            found.append(Prediction(ours, what, "step", want, one))
            one = max(host, one + _waited(model, machine, tokens, gpus))
            source += ", the host's time (fitted to)" * (one == host)
        found.append(Prediction(f"steps: {source}", what, "step", want, one))
    return found


def _waited(model: Model, machine: Machine, tokens: int, gpus: int) -> float:
    """Seconds that LASP's ranks compute one after another, and ours do not.

    Its kernels add the state that comes to the outputs, and update it, before they send it
    (Algorithms 2 and 3); ours make their part of the state before.
    """
    flop = 4.0 * tokens / gpus * model.heads * model.head_dim**2
    kernels = sum(flop / machine.linear_flops[phase] for phase in ("forward", "backward"))
    return model.layers * (gpus - 1) * kernels


def products() -> list[Prediction]:
    """Matrix products of others, as many of rows with [inner, outer] as experts: TFLOP/s in FP8.

    Memory is as fast as in the file of H100; the rate of very large products is the one with which
    the row to fit to comes out.
    """
    rows = []
    for row in read("products"):
        experts, own, outer, inner = (int(row[n]) for n in ("experts", "rows", "outer", "inner"))
        flop = 2.0 * experts * own * outer * inner
        moved = experts * ((own + outer) * inner + 2 * own * outer)  # operands in FP8, results not
        rows.append((row, f"{experts} x {own} x {inner} x {outer}", flop, moved))
    bandwidth = Machine.load("h100_400g").memory_bytes_per_second
    ((largest, _, flop, moved),) = (row for row in rows if row[0]["use"] == "fit")
    seconds = flop / float(largest["tflops"]) / 1e12
    rate = flop / sqrt(seconds**2 - (moved / bandwidth) ** 2)
    return [
        Prediction(
            "published: matrix products, DeepGEMM, H800",
            name,
            "step",
            float(row["tflops"]),
            flop / product_seconds(flop, moved, rate, bandwidth) / 1e12,
            "published" if row["use"] == "held" else "fit",
        )
        for row, name, flop, moved in rows
    ]


# ---- fitting


def fit(name: str, rows: Sequence[Row | RankRow], keys: Sequence[str], rounds: int) -> Machine:
    """The machine with numbers that fit the rows, by damped least squares of logarithms.

    Args: keys: which numbers, as paths in the file. Each is held near what it was: a factor of e
        counts as much as an error of 10%.
    """
    values = machine_of(name).values()
    given = dict(numbers(values))
    start = np.log([given[key] for key in keys])
    found, scale = start.copy(), 10.0

    def made(x: np.ndarray[Any, Any]) -> Machine:
        return Machine.of(changed(values, dict(zip(keys, np.exp(x).tolist(), strict=True))))

    def residuals(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        machine, errors = made(x), []
        for row in rows:
            for got, want in zip(row.predict(machine), (row.forward_ms, row.step_ms), strict=True):
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
            move = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slope.T @ now)
            trial = residuals(found + np.clip(move, -0.7, 0.7))
            if trial @ trial < now @ now:
                found, now, damping = found + np.clip(move, -0.7, 0.7), trial, damping / 5
                break
            damping *= 5
        print(f"round {number}: {float(now @ now):.3f}", flush=True)
    for key, value in zip(keys, np.exp(found), strict=True):
        print(f"  {key}: {given[key]:.4g} -> {value:.4g}")
    return made(found)


def numbers(values: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a machine's file that are above 0, by their paths."""
    if isinstance(values, Mapping):
        for key, one in values.items():
            yield from numbers(one, f"{path}/{key}" if path else str(key))
    elif isinstance(values, float) and values > 0:
        yield path, values


def changed(values: Any, others: Mapping[str, float], path: str = "") -> Any:
    """A machine's file with other numbers."""
    if isinstance(values, Mapping):
        found = {key: (f"{path}/{key}" if path else str(key)) for key in values}
        return {key: changed(values[key], others, where) for key, where in found.items()}
    return others.get(path, values)


# What is fitted of a machine: beginnings of tables, and of numbers in its file. Fit `:calls` after
# the others: since the older tables a call takes the host another time.
KERNELS = "kernels/flash4/by_pass", "kernels/cudnn/by_pass"
FITS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "h200_nvlink": (
        ("NVLink", "graphs", "linear", "kernels"),
        (*KERNELS, "linear_flops", "group_share", "host"),
    ),
    "h200_nvlink:calls": (
        ("documents, groups",),
        ("host/call", "kernels/flash4/by_pass/backward causal/packed"),
    ),
    "h200_alone": (("one rank alone",), ("host",)),
    "h200_emulated_nodes": (("emulated",), ("inside", "between")),
    **{f"h200_sockets{run}": (("sockets",), ("between",)) for run in ("", "_b", "_c")},
}


# ---- the papers' steps of whole models


def figure(
    model: str,
    machine: str,
    gpus: int,
    tokens: str,
    algo: str,
    layers: int | None = None,
    heads: int | None = None,
    options: Options | None = None,
    mask: str = "causal",
    quantity: str = "seconds",
    split: Options | None = None,
    again: bool = False,
) -> float:
    """A number of a cell of docs/data/papers.yaml, whose keys these are.

    Args:
        algo: An algorithm; "tp": tensor and sequence parallelism, which fills heads up to a
            multiple of its ranks.
        heads: As many in place of the model's, as wide together.
        quantity: "seconds" of a step, "forward" seconds of one alone, "GB" of a GPU.
        split: Settings of `Split`.
        again: Whether attention's forward runs twice.
    """
    on, shape, ways = machine_of(machine), SHAPES[model], gpus if algo == "tp" else 1
    if layers:
        shape = replace(shape, layers=layers)
    if heads:
        shape = replace(shape, heads=heads, kv_heads=heads, head_dim=shape.hidden // heads)
    filled = -(-shape.heads // ways) * ways
    shape = replace(
        shape,
        heads=filled,
        kv_heads=filled if shape.kv_heads == shape.heads else shape.kv_heads,
    )
    whole = Split(tensor=ways, context=gpus // ways, **(split or {}))  # type: ignore[arg-type]
    length = tokens_of(tokens)
    if quantity == "GB":
        return sum(memory(shape, whole, length).values()) * 2**30 / 1e9
    own = ("lasp" if shape.linear else "zigzag") if algo == "tp" else algo
    # Some heads of all tokens of a linear layer are as much work as all heads of some tokens.
    each = shape.shape(length // ways) if shape.linear and ways > 1 else shape.shape(length, ways)
    nodes = (0,) if algo == "tp" else nodes_of_split(whole, on)
    attention = simulate(own, options or {}, each, Mask(mask == "causal"), on, nodes)

    def seconds(split: Split, attention: float) -> float:
        found: TrainingStep = step(shape, split, length, on, attention=attention)
        return found.seconds

    if quantity == "forward":  # what full recompute adds to a step
        once, twice = (seconds(replace(whole, recompute=how), 0.0) for how in RECOMPUTED)
        return twice - once + shape.layers * attention.forward.seconds
    more = shape.layers * attention.forward.seconds if again else 0.0
    return seconds(whole, attention.seconds) + more


RECOMPUTED: tuple[Recompute, ...] = "none", "full"


def papers() -> dict[str, Any]:
    """docs/data/papers.yaml: tables by name."""
    found: dict[str, Any] = yaml.safe_load((DATA / "papers.yaml").read_text())
    return found


def paper_table(name: str) -> list[str]:
    """Lines of a table of docs/data/papers.yaml: rows and columns are settings of `figure`.

    A cell has a number for each of `ways`. What it says: "ratio", how many times the first takes of
    each of the others; "pair", both and their ratio; "error", theirs, ours and how far ours is off.
    """
    about, lines = papers()[name], []
    for title, row in about["rows"].items():
        cells = []
        for index, column in enumerate(about["columns"].values()):
            got = []
            for way in row.get("ways") or about["ways"]:
                settings = {**about["all"], **row, **column, **way}
                got.append(figure(**{k: v for k, v in settings.items() if k not in _OF_ROWS}))
            if about["cells"] == "ratio":
                cells.append(", ".join(f"{got[0] / one:.2f}x" for one in got[1:]))
            elif about["cells"] == "pair":
                cells.append(f"{got[0]:.3g} / {got[1]:.3g}, {got[0] / got[1]:.2f}x")
            else:
                want = row["theirs"][index]
                error = f", {got[0] / want - 1:+.0%}" if isinstance(want, float) else ""
                cells.append(f"{want} / {got[0]:.3g}{error}")
        lines.append([title, *cells])
    return table([about["title"], *about["columns"]], lines)


_OF_ROWS = "ways", "theirs"


# ---- the pages


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of markdown."""
    lines = [f"| {' | '.join(header)} |", "| --- |" + " --- |" * (len(header) - 1)]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def share_of_order(found: Sequence[Prediction], within: float = 0.05) -> tuple[int, int]:
    """Pairs of algorithms whose order is right, and all that differ by more than `within`."""
    right = pairs = 0
    groups: dict[tuple[object, ...], list[Prediction]] = {}
    for one in found:
        if one.problem:
            groups.setdefault((one.problem, one.phase), []).append(one)
    for group in groups.values():
        for a, b in combinations(group, 2):
            if "fit" == a.use == b.use:
                continue
            if max(a.measured, b.measured) > (1 + within) * min(a.measured, b.measured):
                pairs += 1
                right += (a.measured < b.measured) == (a.predicted < b.predicted)
    return right, pairs


def summary(name: str, found: Iterable[Prediction]) -> list[str]:
    """A row of docs/predictions.md."""
    sizes = sorted(abs(one.error) for one in found)
    within = sum(size <= 0.2 for size in sizes) / len(sizes)
    median = statistics.median(sizes)
    return [name, str(len(sizes)), f"{median:.1%}", f"{within:.0%}", f"{sizes[-1]:.0%}"]


def errors() -> list[str]:
    """The table of docs/predictions.md; writes docs/data/predicted.csv."""
    ours, alone = predictions(measured()), predictions(rank_rows())
    others = [*published(), *products(), *steps()]
    with ROWS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["table", "row", "phase", "use", "measured", "predicted"])
        for one in (*ours, *alone, *others):
            numbers = f"{one.measured:g}", f"{one.predicted:.4g}"
            writer.writerow([one.table, one.row, one.phase, one.use, *numbers])
    held, fitted = ([one for one in ours if one.use == use] for use in ("held", "fit"))
    rows = [summary("**ours, held out**", held)]
    for name in dict.fromkeys(one.table for one in held):
        rows.append(summary(name, (one for one in held if one.table == name)))
    of_rank = [one for one in alone if one.use == "held"]
    rows.append(summary("**one rank alone, held out**", of_rank))
    rows.append(summary("one rank alone, fitted to", (x for x in alone if x.use == "fit")))
    rows.append(summary("ours, fitted to", fitted))
    for name in dict.fromkeys(one.table for one in others):
        held_out = (one for one in others if one.table == name and one.use != "fit")
        rows.append(summary(name, held_out))
    right, pairs = share_of_order(ours)
    near = sum(abs(one.error) <= 0.15 for one in of_rank) / len(of_rank)
    return [
        *table(["rows", "numbers", "median error", "within 20%", "largest"], rows),
        "",
        f"One rank alone, held out: {near:.0%} within 15%. Of {pairs} pairs of algorithms on the",
        "same problem that differ by more than 5%, not both fitted to, "
        f"{right} ({right / pairs:.0%}) are predicted in the right order.",
    ]


def blocks(text: str) -> dict[str, str]:
    """What stands in each block of a page, by name."""
    mark = re.compile(r"<!-- generated: (\w+) -->\n(.*?)<!-- end -->", re.S)
    return {name: body.strip() for name, body in mark.findall(text)}


def written(text: str, name: str, lines: Sequence[str]) -> str:
    """The page with another block. Raises: ValueError if it has no such block, or two."""
    block = re.compile(rf"<!-- generated: {name} -->\n.*?<!-- end -->", re.S)
    new = f"<!-- generated: {name} -->\n\n" + "\n".join(lines) + "\n\n<!-- end -->"
    text, count = block.subn(lambda found: new, text)
    if count != 1:
        raise ValueError(f"the page needs one block {name}, has {count}")
    return text


def main() -> None:
    """Writes the tables, or fits a machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=("errors", *papers()), metavar="TABLE")
    parser.add_argument("--fit", choices=FITS, help="fit this machine's file instead")
    args = parser.parse_args()
    if args.fit:
        (beginnings, keys), name = FITS[args.fit], args.fit.partition(":")[0]
        every: list[Row | RankRow] = [*measured(), *rank_rows()]
        rows = [
            row
            for row in every
            if row.machine == name and row.use == "fit" and row.table.startswith(beginnings)
        ]
        every_path = dict(numbers(machine_of(name).values()))
        paths = [key for key in every_path if key.startswith(keys)]
        own = DATA / f"{name}.yaml"
        shipped = ROOT / "configs" / "machines" / f"{name}.yaml"
        fit(name, rows, paths, rounds=6).save(own if own.is_file() else shipped)
        return
    for page in PAGES:
        for name in blocks(page.read_text()):
            if not args.only or name in args.only:
                lines = errors() if name == "errors" else paper_table(name)
                page.write_text(written(page.read_text(), name, lines))


if __name__ == "__main__":
    main()
