"""What the simulator predicts beside what was measured: writes docs/predictions.md.

`docs/data/measured.csv` has the rows of docs/benchmarks.md, `docs/data/published.csv` those of
others. `--fit NAME` fits numbers of a machine's file to the rows that say so; nothing else sees
them.
"""

import argparse
import csv
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import megatron_cp_plugin  # noqa: F401  (registers the algorithms)
from megatron_cp_plugin.core.documents import random_documents
from megatron_cp_plugin.core.linear import LinearShape
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.machine import Machine, Pass
from megatron_cp_plugin.planner.simulate import simulate, tile_seconds
from megatron_cp_plugin.planner.trace import Tile

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data"
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


def predict(row: Row, machine: Machine) -> tuple[float, float]:
    """Forward, and forward and backward, in ms."""
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
        name: Pass = "forward" if phase == "forward" else "backward"
        tile = Tile(name, 1, mean, mean, area, *dims, mask.causal)
        times.append((tile_seconds(machine, row.kernel, tile) + host) / row.gpus * MS)
    return times[0], sum(times)


# ---- fitting


def fit(name: str, rows: Sequence[Row], keys: Sequence[str], rounds: int) -> Machine:
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


def main() -> None:
    """Writes the page, or fits a machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", metavar="NAME", help="fit this machine's file instead")
    parser.add_argument("--keys", nargs="+", default=[""], help="beginnings of paths to fit")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tables", nargs="+", default=[""], help="beginnings of tables to fit to")
    arguments = parser.parse_args()
    if arguments.fit:
        rows = [
            row
            for row in measured()
            if row.machine == arguments.fit
            and row.use == "fit"
            and row.table.startswith(tuple(arguments.tables))
        ]
        keys = [
            key
            for key in numbers(machine_of(arguments.fit).values())
            if key.startswith(tuple(arguments.keys))
        ]
        found = fit(arguments.fit, rows, keys, arguments.rounds)
        own = DATA / f"{arguments.fit}.yaml"
        shipped = ROOT / "configs" / "machines" / f"{arguments.fit}.yaml"
        found.save(own if own.is_file() else shipped)


if __name__ == "__main__":
    main()
