#!/usr/bin/env python
r"""Trains a model long, with and without context parallelism, in as many calls as it takes.

    python scripts/convergence_long.py --config configs/tnl400m_lasp2_16k.yaml --iters 1000 \
        --part 500 --output results/tnl400m

trains the unsplit sequence (CP 1) and then the run file's algorithm for 500 iterations each, saves
checkpoints and ends; the same command once more goes on from there. Data, weights at the start and
learning rates are those of one run that was never interrupted. Writes the losses of all iterations
so far, and their picture; where they are is drawn again, also elsewhere, by

    python scripts/convergence_long.py --draw results/tnl400m/report.json

Flags of Megatron after `--` go to every run. How far losses may differ is not judged here: that is
what convergence_smoke.py does, in float32.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from convergence_report import Curve, draw
from convergence_runs import Run, Settings, parse_sizes, parse_variants, plan, run_file
from convergence_smoke import launch, print_tail
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.harness.parity import Iteration
from megatron_cp_plugin.integration.yaml_config import load_run_file
from megatron_cp_plugin.paths import check_folder
from megatron_cp_plugin.process_exit import one_line_errors

_LAST = 100  # iterations whose mean loss is shown


class Training:
    """One run, in parts.

    Args:
        run: What is trained.
        folder: Of what it writes.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        self._folder = folder
        self._checkpoints = folder / "checkpoints"

    @property
    def done(self) -> int:
        """The iteration of the last checkpoint."""
        tracker = self._checkpoints / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.is_file() else 0

    def go_on(
        self, config: DictConfig, iterations: int, part: int, extra: Sequence[str], timeout: float
    ) -> str:
        """Trains to the end of the next part; returns the empty string, or why it failed."""
        made = run_file(config, self.run, iterations)
        made.megatron.save = made.megatron.load = str(self._checkpoints)
        made.megatron.save_interval = made.megatron.exit_interval = part
        folder = self._folder / f"from-{self.done:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(made, folder / "run.yaml")
        failure = launch(self.run, folder, extra, timeout, lambda _: None)
        # Gradients and checkpoints take gigabytes each.
        for gradients in folder.glob("recording/*.pt"):
            gradients.unlink()
        if failure:
            print_tail(folder / "log.txt", Console(stderr=True))
            return failure
        for checkpoint in sorted(self._checkpoints.glob("iter_*"))[:-1]:
            shutil.rmtree(checkpoint)
        return ""

    def steps(self) -> tuple[list[float], list[float]]:
        """Returns the losses and the milliseconds of all iterations up to the checkpoint.

        Of recordings: what Megatron logs second is the mean of two losses.
        """
        found: dict[int, tuple[float, float]] = {}
        for path in sorted(self._folder.glob("from-*/recording/rank00000.jsonl")):
            before = int(path.parts[-3].removeprefix("from-"))
            for line in path.read_text().splitlines():
                step = Iteration(**json.loads(line))
                found[before + step.iteration] = step.losses["lm loss"], 1000 * step.seconds
        rows = [found[step] for step in range(1, self.done + 1)]
        return [loss for loss, _ in rows], [time for _, time in rows]


def report_of(trainings: Sequence[Training], about: dict[str, object]) -> dict[str, object]:
    """Returns what is written: all losses of all runs."""
    runs = []
    for training in trainings:
        losses, times = training.steps()
        run = training.run
        runs.append(
            {
                "algorithm": run.variant.label if run.variant else run.label,
                "context_parallel_size": run.cp,
                "ms_per_iteration": median(times) if times else None,
                "losses": losses,
            }
        )
    return {**about, "runs": runs}


def show(report: dict[str, object], console: Console) -> None:
    """Prints a row a run."""
    table = Table(title=f"{report['config']}, {report['iterations']} iterations")
    for header in ("algorithm", "CP", "iterations", "last loss", f"mean of last {_LAST}"):
        table.add_column(header, justify="right")
    for header in ("distance of the mean\nfrom the first run's", "largest of\nan iteration"):
        table.add_column(header, justify="right")
    table.add_column("ms per\niteration", justify="right")
    expected: list[float] | None = None
    for run in report["runs"]:  # type: ignore[attr-defined]
        losses: list[float] = run["losses"]
        cells = [run["algorithm"], str(run["context_parallel_size"]), str(len(losses))]
        if not losses:
            table.add_row(*cells)
            continue
        cells += [f"{losses[-1]:.5f}", f"{fmean(losses[-_LAST:]):.5f}"]
        if expected:
            pairs = list(zip(losses, expected, strict=False))
            own, first = (fmean(side[-_LAST:]) for side in zip(*pairs, strict=True))
            largest = max(abs(a - b) / b for a, b in pairs)
            cells += [f"{(own - first) / first:+.2%}", f"{largest:.1e}"]
        else:
            cells += ["", ""]
        table.add_row(*cells, f"{run['ms_per_iteration']:.0f}")
        expected = expected or losses
    console.print(table)


def picture(report: dict[str, object], path: Path) -> None:
    """Draws a report."""
    curves: list[Curve] = [
        (f"{run['algorithm']}, CP {run['context_parallel_size']}", run["losses"])
        for run in report["runs"]  # type: ignore[attr-defined]
        if run["losses"]
    ]
    draw(curves, f"{Path(str(report['config'])).stem}: loss", path)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains a part of every run, or draws; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    args, extra = _parse(words[:at]), words[at + 1 :]
    if args.draw:
        report = json.loads(args.draw.read_text())
        picture(report, args.draw.with_name("loss.png"))
        show(report, Console(width=140))
        return 0
    config = load_run_file(args.config)
    part = args.part or args.iters
    if args.iters < 1 or part < 1 or args.iters % part:
        raise ConfigError(
            f"--iters must be a multiple of --part, got {args.iters} and {part}: change one"
        )
    section = config.get("context_parallel") or {}
    algos = args.algos or section.get("algo")
    if not algos:
        raise ConfigError(f"{args.config} names no algorithm: give --algos")
    settings = Settings(config, args.config, extra)
    own_model = section.get("linear_model") is not None
    runs = plan(parse_variants(algos), parse_sizes(args.cp), settings, 1, own_model)
    check_folder("--output", args.output)
    trainings = [Training(run, args.output / run.folder) for run in runs]
    code = 0
    for training in trainings:
        before = training.done
        if before >= args.iters or code:
            continue
        failure = training.go_on(config, args.iters, part, extra, args.timeout)
        if failure or training.done <= before:
            reason = failure or "it saved no checkpoint"
            print(f"{training.run.label}, CP {training.run.cp}: {reason}", file=sys.stderr)
            code = 1
    report = report_of(trainings, {"config": args.config, "iterations": args.iters, "flags": extra})
    (args.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    picture(report, args.output / "loss.png")
    show(report, Console(width=140))
    return code


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML run file")
    parser.add_argument(
        "--algos", metavar="NAMES", help="as for convergence_smoke.py; default: the run file's"
    )
    parser.add_argument("--cp", default="2", metavar="SIZES", help="default: %(default)s")
    parser.add_argument("--iters", type=int, default=1000, help="default: %(default)s")
    parser.add_argument(
        "--part", type=int, metavar="N", help="iterations of each run in one call; default: all"
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a part of a run")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default=Path("results/long"),
        help="checkpoints too; default: %(default)s",
    )
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw a report.json and end")
    args = parser.parse_args(words)
    if (args.config is None) == (args.draw is None):
        parser.error("give --config or --draw")
    return args


if __name__ == "__main__":
    # As Ctrl-C does, so that a run under way is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with one_line_errors("convergence_long: error"):
        sys.exit(main())
