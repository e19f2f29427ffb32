#!/usr/bin/env python
r"""Trains the same model with and without context parallelism, and compares the two.

The reference is Megatron's own attention on an unsplit sequence (CP 1); for layers of linear
attention, which Megatron has not, the first algorithm at CP 1. Every run starts from the
same weights and reads the same data; compared are the losses and the gradient norm of every
iteration, and every parameter's gradient at the first one. Exit code: 0 all equal within the
tolerances, 1 not equal or a run failed, 2 the command or the run file is wrong.

    python scripts/convergence_smoke.py --config configs/tiny_zigzag.yaml \
        --algos ring,zigzag --cp 1,2,4

Flags of Megatron after `--` go to every run, the reference included, and override the run file:

    ... --cp 2 -- --tensor-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration.args import MEGATRON
from megatron_cp_plugin.integration.parity import Comparison, Recording, Tolerances, compare
from megatron_cp_plugin.integration.yaml_config import load_run_file

LAUNCHER = Path(__file__).with_name("pretrain_gpt.py")
# How the launcher begins the line that says what is wrong with a run's settings.
_ERROR_PREFIX = "megatron_cp_plugin: error: "
_LOG_TAIL = 30


@dataclass(frozen=True)
class Variant:
    """An algorithm with options, as in `--algos ring,zigzag:backward=kv`."""

    algo: str
    options: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The words that it was made of."""
        return ":".join([self.algo, *(f"{name}={value}" for name, value in self.options)])


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        variant: The algorithm; None for Megatron's own path.
        cp: context_parallel_size.
        processes: World size.
        is_reference: Whether the others are compared with it.
    """

    variant: Variant | None
    cp: int
    processes: int
    is_reference: bool = False

    @property
    def label(self) -> str:
        """For tables: the algorithm."""
        name = self.variant.label if self.variant else "Megatron"
        return f"{name} (reference)" if self.is_reference else name

    @property
    def algo(self) -> str:
        """The name for --context-parallel-algo."""
        return self.variant.algo if self.variant else MEGATRON

    @property
    def folder(self) -> str:
        """Name of the folder for what the run writes."""
        if self.is_reference or self.variant is None:
            return f"reference-cp{self.cp}"
        return f"{self.variant.label.replace(':', '-')}-cp{self.cp}"


@dataclass(frozen=True)
class Outcome:
    """What became of a run; `failure` is one line if it did not finish."""

    run: Run
    recording: Recording | None = None
    comparison: Comparison | None = None
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether it finished and, unless it is the reference, equals the reference."""
        return not self.failure and (self.comparison is None or self.comparison.passed)


def parse_variants(text: str) -> list[Variant]:
    """Reads `ring,zigzag:backward=kv`.

    Raises:
        ConfigError: An algorithm or an option does not exist, or one is named twice.
    """
    variants = []
    for word in filter(None, (w.strip() for w in text.split(","))):
        algo, *pairs = word.split(":")
        options = []
        for pair in pairs:
            name, equals, value = pair.partition("=")
            if not equals:
                raise ConfigError(f"--algos: write NAME:OPTION=VALUE, got {word!r}")
            options.append((name, value))
        registry.layout_of(algo, dict(options))
        variants.append(Variant(algo, tuple(options)))
    if not variants:
        raise ConfigError(f"--algos needs a name, got {text!r}: {', '.join(registry.available())}")
    if len(set(variants)) != len(variants):
        raise ConfigError(f"--algos names an algorithm twice: {text}")
    return variants


def parse_sizes(text: str) -> list[int]:
    """Reads `1,2,4`.

    Raises:
        ConfigError: It is not a list of different positive whole numbers.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--cp takes whole numbers from 1, such as 1,2,4, got {text!r}")
    sizes = [int(word) for word in words]
    if len(set(sizes)) != len(sizes):
        raise ConfigError(f"--cp names a size twice: {text}")
    return sizes


class Settings:
    """Megatron's settings of a run file, as far as the harness has to know them.

    Args:
        config: The run file.
        path: Its name, for errors.
        extra: Flags of Megatron that override it.
    """

    def __init__(self, config: DictConfig, path: str, extra: Sequence[str]) -> None:
        try:
            section = OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
        assert isinstance(section, dict)
        megatron = section.get("megatron")
        if not isinstance(megatron, dict):
            raise ConfigError(f"{path}: the section megatron is missing or no mapping")
        self._values = {str(key).replace("-", "_"): value for key, value in megatron.items()}
        self._path = path
        parser = _Parser(add_help=False, allow_abbrev=False)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "seq_length"):
            parser.add_argument(_flag(name), type=int)
        for name in ("bf16", "fp16"):
            parser.add_argument(_flag(name), action="store_true", default=None)
        for name in ("train_iters", "context_parallel_size", "context_parallel_algo", "cp_record"):
            parser.add_argument(_flag(name), action=_Refused)
        given, _ = parser.parse_known_args(list(extra))
        self._values.update({k: v for k, v in vars(given).items() if v is not None})

    def number(self, name: str, default: int | None = None) -> int:
        """Returns a positive whole number."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{self._path}: megatron.{name} must be a whole number, got {value!r}"
            )
        return value

    @property
    def half(self) -> str:
        """bf16, fp16 or the empty string for float32."""
        return next((name for name in ("bf16", "fp16") if self._values.get(name)), "")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(message)


class _Refused(argparse.Action):
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"{self.option_strings[0]} cannot follow --: the harness sets it "
            f"(--iters, --cp, --algos and --output say what)"
        )


def plan(
    variants: Sequence[Variant],
    sizes: Sequence[int],
    settings: Settings,
    dp: int,
    own_model: bool = False,
) -> list[Run]:
    """Lists the runs, the reference first.

    Args:
        variants: The algorithms.
        sizes: Of the context-parallel group.
        settings: Of the run file.
        dp: Data-parallel size.
        own_model: Megatron's own path does not have the model.

    Raises:
        ConfigError: A sequence cannot be split that way.
    """
    shards = settings.number("tensor_model_parallel_size", 1)
    shards *= settings.number("pipeline_model_parallel_size", 1)
    runs = [Run(variants[0] if own_model else None, 1, shards * dp, is_reference=True)]
    for variant in variants:
        for cp in sizes:
            if own_model and (variant, cp) == (variants[0], 1):
                continue
            config = ContextParallelConfig(variant.algo, cp, options=variant.options)
            config.check_sequence(settings.number("seq_length"))
            runs.append(Run(variant, cp, shards * dp * cp))
    return runs


def run_file(config: DictConfig, run: Run, iterations: int) -> DictConfig:
    """Returns the run file of one run: the given one with another algorithm, size and length.

    Options that the given file sets for its own algorithm are kept for that algorithm alone.
    """
    made = config.copy()
    for name in ("context_parallel_size", "train_iters", "save"):
        for key in [k for k in made.megatron if str(k).replace("-", "_") == name]:
            del made.megatron[key]
    made.megatron.context_parallel_size = run.cp
    made.megatron.train_iters = iterations
    given = made.get("context_parallel") or {}
    section = {"algo": run.algo}
    if "platform" in given:
        section["platform"] = given["platform"]
    # They say what the model is.
    section.update({key: given[key] for key in ("layers", "linear_model") if key in given})
    if run.variant is not None:
        if "kernel" in given:
            section["kernel"] = given["kernel"]
        if given.get("algo") == run.algo:
            section = {**given, **section}
        section.update(run.variant.options)
    made.context_parallel = section
    return made


def launch(
    run: Run,
    folder: Path,
    extra: Sequence[str],
    timeout: float,
    on_iterations: Callable[[int], None],
) -> str:
    """Trains; returns the empty string, or one line that says why it failed.

    Args:
        run: What to train; its run file is in `folder`.
        folder: Where log and recording go.
        extra: Flags of Megatron.
        timeout: Seconds after which the run is ended.
        on_iterations: Called with the number of iterations done whenever it may have changed.

    Raises:
        ConfigError: The run ended because its settings are wrong.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(run.processes), str(LAUNCHER)]
    command += ["--config", str(folder / "run.yaml"), "--cp-record", str(folder / "recording")]
    # One thread a process, also for one process: torchrun does so for several, and runs that share
    # cores would otherwise spend their time waiting for each other's threads.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    log = folder / "log.txt"
    progress = folder / "recording" / "rank00000.jsonl"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *extra],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
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


def refusal(log: Path) -> str:
    """Returns the line in which the launcher refused a run, or the empty string."""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith(_ERROR_PREFIX):
            return line.removeprefix(_ERROR_PREFIX)
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
    if run.cp > 1 and not recording.sent_bytes():
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
            worst = (comparison.loss, comparison.grad_norm, comparison.gradient)
            cells += [f"{w.error:.1e}" for w in worst]
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
            row["communication_by_rank"] = [rank.communication for rank in recording.ranks]
        if outcome.comparison is not None:
            row["comparison"] = outcome.comparison.as_dict()
        runs.append(row)
    passed = all(outcome.passed for outcome in outcomes)
    report = {**about, "passed": passed, "tolerances": asdict(tolerances), "runs": runs}
    path.write_text(json.dumps(_plain(report), indent=2, allow_nan=False) + "\n")


def draw(outcomes: Sequence[Outcome], tolerances: Tolerances, title: str, path: Path) -> None:
    """Draws the loss curves, and their distances from the reference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    finished = [(o.run, o.recording) for o in outcomes if o.recording is not None]
    curves = [(run, next(iter(rec.losses().values()), [])) for run, rec in finished]
    if not curves:
        return
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    reference, expected = curves[0]
    top.plot(
        range(1, len(expected) + 1), expected, color="0.75", linewidth=6, label=reference.label
    )
    for number, (run, losses) in enumerate(curves[1:]):
        steps = range(1, len(losses) + 1)
        style: dict[str, Any] = {"color": f"C{number}", "linewidth": 1.4}
        style["linestyle"] = ("-", "--", ":", "-.")[number % 4]
        top.plot(steps, losses, label=f"{run.label}, CP {run.cp}", **style)
        errors = [
            # A logarithmic axis has no zero: exactly equal is drawn at the bottom.
            max(abs(got - want) / abs(want), 1e-9) if want else math.nan
            for got, want in zip(losses, expected, strict=False)
        ]
        bottom.plot(steps[: len(errors)], errors, marker=".", **style)
    bottom.axhline(tolerances.loss, color="0.4", linestyle="--", linewidth=1)
    bottom.annotate("allowed", (1, tolerances.loss * 0.8), va="top", color="0.4")
    bottom.set(yscale="log", ylabel="relative distance", xlabel="iteration")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    top.set(ylabel="loss", title=title)
    top.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


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
    settings = Settings(config, args.config, extra)
    if args.iters < 1 or args.dp < 1 or args.timeout <= 0:
        raise ConfigError("--iters, --dp and --timeout must be positive")
    tolerances = _tolerances(args, settings)
    algos = args.algos if args.algos is not None else _own_algo(config, args.config)
    own_model = (config.get("context_parallel") or {}).get("linear_model") is not None
    runs = plan(parse_variants(algos), parse_sizes(args.cp), settings, args.dp, own_model)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("matplotlib is missing: install the extra `report` of this package")
    output: Path = args.output or Path("results", "convergence", Path(args.config).stem)
    output.mkdir(parents=True, exist_ok=True)

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
                _print_tail(folder / "log.txt", console)
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
    write_report(outcomes, tolerances, about, output / "report.json")
    draw(outcomes, tolerances, f"{Path(args.config).stem}: loss", output / "loss.png")
    for what, path in (("picture", output / "loss.png"), ("numbers", output / "report.json")):
        if path.is_file():
            console.print(f"{what}: {path}", markup=False, highlight=False, soft_wrap=True)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _tolerances(args: argparse.Namespace, settings: Settings) -> Tolerances:
    if settings.half and (args.loss_tolerance is None or args.grad_tolerance is None):
        raise ConfigError(
            f"the default tolerances are for float32, got {settings.half}: "
            f"give --loss-tolerance and --grad-tolerance, or leave {settings.half} out"
        )
    default = Tolerances()
    loss = default.loss if args.loss_tolerance is None else args.loss_tolerance
    gradient = default.gradient if args.grad_tolerance is None else args.grad_tolerance
    return Tolerances(loss, gradient, gradient)


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


def _print_tail(log: Path, console: Console) -> None:
    lines = log.read_text(errors="replace").splitlines()
    # What torchrun says about the end of its workers would hide what they said themselves.
    ends = (n for n, line in enumerate(lines) if "/elastic/multiprocessing/api.py" in line)
    lines = lines[: next(ends, len(lines))][-_LOG_TAIL:]
    console.print(f"the last lines of {log}:", style="red", soft_wrap=True)
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


if __name__ == "__main__":
    # As Ctrl-C does, so that a run under way is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
