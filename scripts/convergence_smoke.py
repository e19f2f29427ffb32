#!/usr/bin/env python
r"""Trains the same model with and without context parallelism, and compares the two.

The reference is Megatron's own attention on an unsplit sequence (CP 1); for layers of linear
attention, which Megatron has not, the first algorithm at CP 1. Every run starts from the
same weights and reads the same data; compared are the losses and the gradient norm of every
iteration, and every parameter's gradient at the first, the middle and the last one. Exit code: 0
all equal within the tolerances, 1 not equal or a run failed, 2 the command or the run file is
wrong.

    python scripts/convergence_smoke.py --config configs/tiny_zigzag.yaml \
        --algos ring,zigzag --cp 1,2,4

Flags of Megatron after `--` go to every run, the reference included, and override the run file:

    ... --cp 2 -- --tensor-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from convergence_runs import Outcome, Run, parse_sizes, parse_variants, plan, run_file
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.harness.parity import Recording, Tolerances, compare
from megatron_cp_plugin.harness.train import CommandLine
from megatron_cp_plugin.integration.args import MEGATRON
from megatron_cp_plugin.integration.yaml_config import load_run_file
from megatron_cp_plugin.terminal import check_folder

LAUNCHER = Path(__file__).with_name("pretrain_gpt.py")
# How the launcher begins the line that says what is wrong with a run's settings.
_ERROR_PREFIX = "megatron_cp_plugin: error: "
_LOG_TAIL = 30


def launch(
    run: Run,
    folder: Path,
    extra: Sequence[str],
    timeout: float,
    on_iterations: Callable[[int], None],
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = (),
) -> str:
    """Trains; returns the empty string, or one line that says why it failed.

    Args:
        run: What to train; its run file is in `folder`.
        folder: Where log and recording go.
        extra: Flags of Megatron.
        timeout: Seconds after which the run is ended.
        on_iterations: Called with the number of iterations done whenever it may have changed.
        environment: Variables that the processes have beside those of this one.
        program: What each rank starts; empty: the launcher with the run file.

    Raises:
        ConfigError: The run ended because its settings are wrong.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(run.processes), "--no-python"]
    command += program or with_run_file(folder)
    command += ["--cp-record", str(folder / "recording")]
    # One thread a process, also for one process: torchrun does so for several, and runs that share
    # cores would otherwise spend their time waiting for each other's threads.
    variables = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
    log = folder / "log.txt"
    progress = folder / "recording" / "rank00000.jsonl"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *extra],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + timeout
            while process.poll() is None:
                if time.monotonic() > deadline:
                    return f"not done after {timeout:g} s (see --timeout)"
                if progress.is_file():
                    on_iterations(len(progress.read_text().splitlines()))
                time.sleep(0.2)
        finally:
            _end(process)
    if process.returncode == 0:
        return ""
    if refused := refusal(log):
        raise ConfigError(f"{run.label}, CP {run.cp}: {refused}")
    return f"exit code {process.returncode}"


def with_run_file(folder: Path) -> list[str]:
    """The launcher with the run file of a folder, as a rank starts it."""
    return [sys.executable, "-u", str(LAUNCHER), "--config", str(folder / "run.yaml")]


def refusal(log: Path) -> str:
    """Returns the line in which the launcher refused a run, or the empty string."""
    for line in log.read_text(errors="replace").splitlines():
        # torchrun reports it as the "traceback" of the rank that failed first.
        before, prefix, reason = line.partition(_ERROR_PREFIX)
        if prefix and before.strip() in ("", "traceback :"):
            return reason
    return ""


def check_is(recording: Recording, run: Run, iterations: int) -> list[str]:
    """Says in what a recording is not the run that was asked for: a silent fallback is an error."""
    settings = recording.settings
    wanted: dict[str, object] = {
        "context_parallel_algo": run.algo,
        "context_parallel_size": run.cp,
        "world_size": run.processes,
    }
    found = [
        f"{name} was {settings[name]!r}, not {value!r}"
        for name, value in wanted.items()
        if settings[name] != value
    ]
    done = {len(rank.iterations) for rank in recording.ranks}
    if done != {iterations}:
        found.append(f"recorded {sorted(done)} iterations, not {iterations}")
    # What Megatron's own path sends is not counted.
    if run.variant is not None and run.cp > 1 and not recording.sent_bytes():
        found.append("no rank sent anything for attention: the sequence was not split")
    return found


def judge(
    run: Run, folder: Path, reference: Recording | None, tolerances: Tolerances, iterations: int
) -> Outcome:
    """Compares what a finished run recorded with the reference, and with what was asked for.

    Args:
        run: What was asked for.
        folder: The run's folder.
        reference: None if the run is the reference itself.
        tolerances: Largest relative errors allowed.
        iterations: How many were asked for.
    """
    try:
        recording = Recording.load(folder / "recording")
    except ContextParallelError as error:
        return Outcome(run, failure=str(error))
    problems = check_is(recording, run, iterations)
    if reference is None:
        return Outcome(run, recording, failure="; ".join(problems))
    comparison = compare(reference, recording, tolerances)
    comparison.problems[:0] = problems
    return Outcome(run, recording, comparison)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the harness; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    console = Console()
    if not console.is_terminal:
        # A file or a CI log has no width; the table must not be folded.
        console = Console(width=140)
    try:
        args = _parse(words[:at])
        return _compare_all(args, words[at + 1 :], console)
    except ContextParallelError as error:
        print(f"convergence_smoke: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Tolerances()
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML run file")
    parser.add_argument(
        "--algos",
        metavar="NAMES",
        help="algorithms, with options if wanted: ring,zigzag:backward=kv "
        "(default: the run file's algorithm)",
    )
    parser.add_argument("--cp", default="1,2,4", metavar="SIZES", help="default: %(default)s")
    parser.add_argument("--iters", type=int, default=20, help="iterations; default: %(default)s")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel size of all runs")
    parser.add_argument(
        "--loss-tolerance",
        type=float,
        help=f"largest relative error of a loss (default, float32 only: {default.loss:g})",
    )
    parser.add_argument(
        "--grad-tolerance",
        type=float,
        help="largest relative error of gradient norms and of each parameter's gradient "
        f"(default, float32 only: {default.gradient:g})",
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a run")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: results/convergence/NAME-OF-CONFIG"
    )
    return parser.parse_args(words)


def _compare_all(args: argparse.Namespace, extra: Sequence[str], console: Console) -> int:
    config = load_run_file(args.config)
    line = CommandLine.of(["--config", args.config, *extra])
    for name in ("train-iters", "context-parallel-size", "context-parallel-algo", "cp-record"):
        if any(word.partition("=")[0] == f"--{name}" for word in extra):
            raise ConfigError(
                f"--{name} cannot follow --: the harness sets it (--iters, --cp, --algos and "
                "--output say what)"
            )
    if args.iters < 1 or args.dp < 1 or args.timeout <= 0:
        raise ConfigError("--iters, --dp and --timeout must be positive")
    tolerances = _tolerances(args, line)
    algos = args.algos if args.algos is not None else _own_algo(config, args.config)
    own_model = (config.get("context_parallel") or {}).get("linear_model") is not None
    runs = plan(parse_variants(algos), parse_sizes(args.cp), line, args.dp, own_model)
    output: Path = args.output or Path("results", "convergence", Path(args.config).stem)
    check_folder("--output", output)
    output.mkdir(parents=True, exist_ok=True)
    numbers = output / "report.json"
    numbers.unlink(missing_ok=True)  # that of an earlier call would be taken for this one's

    outcomes: list[Outcome] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("iterations"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("starting", total=args.iters * len(runs))
        for number, run in enumerate(runs):
            progress.update(task, description=f"{escape(run.label)}, CP {run.cp}")
            folder = output / "runs" / run.folder
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            OmegaConf.save(run_file(config, run, args.iters), folder / "run.yaml")
            before = number * args.iters
            failure = launch(
                run,
                folder,
                extra,
                args.timeout,
                lambda done, before=before: progress.update(task, completed=before + done),  # type: ignore[misc]
            )
            progress.update(task, completed=before + args.iters)
            if failure:
                print_tail(folder / "log.txt", console)
                outcome = Outcome(run, failure=f"{failure}; log: {folder / 'log.txt'}")
            else:
                reference = outcomes[0].recording if outcomes else None
                outcome = judge(run, folder, reference, tolerances, args.iters)
            outcomes.append(outcome)
            if outcomes[0].failure:
                # Nothing to compare with.
                break

    show(outcomes, tolerances, console)
    about = {"config": args.config, "iterations": args.iters, "flags": list(extra)}
    write_report(outcomes, tolerances, about, numbers)
    console.print(f"numbers: {numbers}", markup=False, highlight=False, soft_wrap=True)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def show(outcomes: Sequence[Outcome], tolerances: Tolerances, console: Console) -> None:
    """Prints the table, and one line for every problem."""
    reference = outcomes[0].run.variant
    what = f"{reference.label} (CP 1)" if reference else "Megatron's own attention"
    table = Table(title=f"Relative errors against {what} on the unsplit sequence")
    table.add_column("algorithm", no_wrap=True)
    table.add_column("CP", justify="right")
    table.add_column("first loss", justify="right")
    table.add_column("last loss", justify="right")
    table.add_column(f"losses\n(≤ {tolerances.loss:g})", justify="right")
    table.add_column(f"grad norms\n(≤ {tolerances.grad_norm:g})", justify="right")
    table.add_column(f"gradients\n(≤ {tolerances.gradient:g})", justify="right")
    table.add_column("sent per rank\nand iteration", justify="right")
    table.add_column("ms per\niteration", justify="right")
    table.add_column("", justify="left")
    for outcome in outcomes:
        cells = [escape(outcome.run.label), str(outcome.run.cp)]
        recording, comparison = outcome.recording, outcome.comparison
        if recording is None:
            table.add_row(*cells, *[""] * 7, "[red]failed[/]")
            continue
        losses = next(iter(recording.losses().values()), [math.nan])
        cells += [f"{losses[0]:.5f}", f"{losses[-1]:.5f}"]
        if comparison is None:
            cells += ["", "", ""]
        else:
            gradient = max(comparison.gradient.error, comparison.later_gradient.error)
            errors = (comparison.loss.error, comparison.grad_norm.error, gradient)
            cells += [f"{error:.1e}" if error else "0" for error in errors]
        cells.append(_size(recording.sent_bytes()) if outcome.run.cp > 1 else "")
        cells.append(f"{recording.seconds() * 1e3:.0f}")
        verdict = "" if comparison is None else "[green]equal[/]"
        table.add_row(*cells, verdict if outcome.passed else "[red]DIFFERENT[/]")
    console.print(table)
    for outcome in outcomes:
        problems = outcome.comparison.problems if outcome.comparison else []
        for problem in [outcome.failure] if outcome.failure else problems:
            text = f"{outcome.run.label}, CP {outcome.run.cp}: {problem}"
            console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def write_report(
    outcomes: Sequence[Outcome], tolerances: Tolerances, about: Mapping[str, object], path: Path
) -> None:
    """Writes everything that was measured as JSON."""
    runs = []
    for outcome in outcomes:
        row: dict[str, object] = {
            "algorithm": outcome.run.label,
            "context_parallel_size": outcome.run.cp,
            "processes": outcome.run.processes,
            "passed": outcome.passed,
            "failure": outcome.failure,
        }
        if outcome.recording is not None:
            recording = outcome.recording
            row["settings"] = recording.settings
            row["losses"] = recording.losses()
            row["grad_norms"] = recording.grad_norms()
            row["seconds_per_iteration"] = recording.seconds()
            row["sent_bytes_by_rank"] = [rank.sent_bytes[1] for rank in recording.ranks]
        if outcome.comparison is not None:
            row["comparison"] = {"passed": outcome.comparison.passed, **asdict(outcome.comparison)}
        runs.append(row)
    passed = all(outcome.passed for outcome in outcomes)
    report = {**about, "passed": passed, "tolerances": asdict(tolerances), "runs": runs}
    path.write_text(json.dumps(_plain(report), indent=2, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """Returns a value with NaN and infinities as text: JSON has none of them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def _tolerances(args: argparse.Namespace, line: CommandLine) -> Tolerances:
    half = next((name for name in ("bf16", "fp16") if line.given(name, False)), "")
    if half and (args.loss_tolerance is None or args.grad_tolerance is None):
        raise ConfigError(
            f"the default tolerances are for float32, got {half}: "
            f"give --loss-tolerance and --grad-tolerance, or leave {half} out"
        )
    default = Tolerances()
    loss = default.loss if args.loss_tolerance is None else args.loss_tolerance
    gradient = default.gradient if args.grad_tolerance is None else args.grad_tolerance
    return Tolerances(loss, gradient, gradient, gradient)


def _own_algo(config: DictConfig, path: str) -> str:
    algo = (config.get("context_parallel") or {}).get("algo")
    if not algo or algo == MEGATRON:
        raise ConfigError(f"{path} names no algorithm of the plugin: give --algos")
    return str(algo)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a run that is still going; torchrun passes the signal on to its workers."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def print_tail(log: Path, console: Console) -> None:
    """Prints what the processes of a failed run said last."""
    lines = log.read_text(errors="replace").splitlines()
    # What torchrun says about the end of its workers would hide what they said themselves.
    ends = (n for n, line in enumerate(lines) if "/elastic/multiprocessing/api.py" in line)
    lines = lines[: next(ends, len(lines))][-_LOG_TAIL:]
    console.print(f"the last lines of {log}:", style="red", soft_wrap=True)
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    # As Ctrl-C does, so that a run under way is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
