"""The command `megatron-cp`: shows algorithms, checks the machine, plans and trains."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_cp_plugin import __version__
from megatron_cp_plugin.document_lengths import lengths_of
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.extras import need
from megatron_cp_plugin.integration.args import OneLineParser
from megatron_cp_plugin.paths import check_file
from megatron_cp_plugin.process_exit import for_a_reader, one_line_errors
from megatron_cp_plugin.text_table import text_table
from megatron_cp_plugin.tokens import heads_of, tokens_of

if TYPE_CHECKING:
    from megatron_cp_plugin.core.shape import Shape
    from megatron_cp_plugin.core.tiles import Mask
    from megatron_cp_plugin.planner.costs import Cost
    from megatron_cp_plugin.planner.drawing import Picture


# Commands with parsers of their own, most of whose flags are Megatron's: module, and what it does.
_OF_HARNESS = {
    "train": ("train", "train a GPT in Megatron's own loop, configured by a run file"),
    "compare": (
        "compare",
        "train with Megatron's own attention and with the plugin, side by side",
    ),
    "check": (
        "check_recipe",
        "say offline whether a recipe of Megatron, Bridge, verl, slime or ms-swift is served",
    ),
    "invariance": (
        "invariance",
        "whether context parallelism changes a model's log-probabilities",
    ),
    "prepare-data": ("prepare_data", "make a Megatron dataset from text files"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: Command line without the program's name; default: that of the process.

    Returns:
        The exit code: 0; 1 if `doctor` finds a wrong result; 2 with one line on stderr if something
        cannot be done.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with for_a_reader():
        return _of_harness(*words) if words and words[0] in _OF_HARNESS else _own(words)
    return 0


def _of_harness(command: str, *words: str) -> int:
    with one_line_errors("megatron-cp: error"), warnings.catch_warnings():
        if command == "check":
            need("megatron", "check", "megatron", "yaml")
            # Megatron says at every import what is not installed.
            warnings.simplefilter("ignore")
        module: Any = import_module(f"megatron_cp_plugin.harness.{_OF_HARNESS[command][0]}")
        return module.main(words)


def _own(words: Sequence[str]) -> int:
    parser, commands = parsers()
    try:
        arguments, unknown = parser.parse_known_args(words)
        if unknown:
            # Of the subcommand's own flags the nearest is named.
            commands.choices[words[0]].error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments.run(arguments)
    except ContextParallelError as error:
        if "LOCAL_RANK" in os.environ:
            with one_line_errors("megatron-cp: error"):
                raise
        print(f"megatron-cp: {error}", file=sys.stderr)
        return 2


def parsers() -> tuple[OneLineParser, Any]:
    """The parser of `megatron-cp`, and the parsers of its commands, by name in `choices`."""
    parser = OneLineParser(prog="megatron-cp", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (_, words) in _OF_HARNESS.items():
        commands.add_parser(name, help=words)
    for add in (_add_draw, _add_plan, _add_doctor, _add_calibrate, _add_capabilities, _add_hooks):
        add(commands)
    return parser, commands


def _add_capabilities(commands: Any) -> None:
    parser = commands.add_parser(
        "capabilities",
        help="what every algorithm supports, and which features of Megatron are refused",
        description="Prints docs/capabilities.md.",
    )
    parser.set_defaults(run=_capabilities)


def _capabilities(arguments: argparse.Namespace) -> int:
    from megatron_cp_plugin.capabilities import markdown

    print(markdown(), end="")
    return 0


def _add_hooks(commands: Any) -> None:
    parser = commands.add_parser(
        "hooks",
        help="what the plugin replaces and relies on in Megatron, and whether yours has it",
        description="Prints the tables of megatron_cp_plugin/integration/contract.md.",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the installed Megatron against it instead; exit code 2 if something is missing",
    )
    parser.set_defaults(run=_hooks)


def _hooks(arguments: argparse.Namespace) -> int:
    if arguments.check:
        need("megatron", "hooks --check", "megatron")
        with warnings.catch_warnings():
            # Megatron says at every import what is not installed.
            warnings.simplefilter("ignore")
            from megatron_cp_plugin.harness.compatibility import report

            version, problems = report()
        for line in problems:
            print(line)
        print(f"Megatron {version}: {len(problems)} difference(s) from what the plugin expects")
        return 2 if problems else 0
    from megatron_cp_plugin.integration.contract import PAGE

    print(PAGE, end="")
    return 0


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what is installed, which kernel auto takes, and a check of kernels and algorithms",
        description="Checks this machine with virtual ranks, or with real ranks under torchrun "
        "--nproc-per-node P -m megatron_cp_plugin.cli doctor. Compares kernels and "
        "algorithms with attention in float64, and ends with a verdict: exit code 0 if all "
        "results are right, whatever is missing; 1 if one is wrong.",
    )
    _add_heads(parser, 32)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128], metavar="D")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help=".json to write: the findings, links and kernels as calibrate measures them, and the "
        "time of each algorithm; to send to the maintainers from machines that they have not",
    )
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from torch import distributed

    from megatron_cp_plugin.doctor import examine, join, leave, measured, verdict

    if arguments.report is not None:
        check_file("--report", arguments.report)
    heads = _heads(arguments, 8)
    findings = examine(*heads, arguments.head_dim)
    found: dict[str, object] = {}
    if arguments.report is not None:
        found = measured(join(), *heads, arguments.head_dim[0])
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        if arguments.report is not None:
            lines = [(f.topic, f.name, f.text, f.right) for f in findings]
            content = {"version": __version__, "findings": lines, **found}
            arguments.report.write_text(json.dumps(content, indent=1) + "\n")
        rows = [(f.topic, f.name, f"WRONG: {f.text}" if f.failed else f.text) for f in findings]
        print(text_table(("", "what", "finding"), rows))
        print(verdict(findings))
    leave()
    return int(any(finding.failed for finding in findings))


def _add_calibrate(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine's links and kernels for the planner",
        description="Measures links, kernels, memory and the host on the ranks of torchrun "
        "(torchrun --nproc-per-node P -m megatron_cp_plugin.cli calibrate --output FILE), "
        "in less than two minutes, and writes a machine file.",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=".yaml to write")
    _add_heads(parser, 32)
    parser.add_argument("--head-dim", type=int, default=128, metavar="D")
    parser.set_defaults(run=_calibrate)


def _add_heads(parser: argparse.ArgumentParser, default: int | None) -> None:
    parser.add_argument(
        "--heads",
        type=heads_of,
        default=None if default is None else (default, None),
        metavar="H[:G]",
        help="query heads, or query heads:KV heads, such as 32:8",
    )
    parser.add_argument(
        "--kv-heads", type=int, metavar="G", help="KV heads, if --heads does not say them"
    )


def _heads(arguments: argparse.Namespace, otherwise: int | None = None) -> tuple[int, int]:
    """Returns the numbers of query heads and of KV heads.

    Args: otherwise: KV heads where nothing says them; None: as many as query heads.

    Raises: ConfigError if they are said twice.
    """
    (heads, said), given = arguments.heads, arguments.kv_heads
    if said is not None and given is not None:
        raise ConfigError(
            f"--heads {heads}:{said} says the KV heads, got --kv-heads {given} too: leave one out"
        )
    found = [n for n in (said, given, otherwise) if n is not None]
    return heads, found[0] if found else heads


def _calibrate(arguments: argparse.Namespace) -> int:
    from megatron_cp_plugin.core.communication.process_groups import topology_of
    from megatron_cp_plugin.doctor import check_heads, join, leave
    from megatron_cp_plugin.planner.calibrate import calibrate

    check_file("--output", arguments.output)
    heads, kv_heads = _heads(arguments, 8)
    check_heads(heads, kv_heads, [arguments.head_dim])
    device, path = join(), arguments.output
    topology = topology_of(None)
    machine = calibrate(path.stem, topology, device, heads, kv_heads, arguments.head_dim)
    if topology.rank == 0:
        machine.save(path)
        print(f"wrote {path}")
    leave()
    return 0


def _add_mask(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seq-len", type=tokens_of, metavar="N", help="global tokens, such as 128K"
    )
    parser.add_argument("--mask", choices=("causal", "full"), default="causal")
    parser.add_argument("--window", type=tokens_of, metavar="W", help="sliding window of W tokens")
    parser.add_argument(
        "--documents",
        type=lengths_of,
        metavar="T",
        help="packed documents of random lengths: the mean T in tokens, lognormal:MEAN:SIGMA, "
        "or a histogram, FILE.csv or FILE.json of upper edges and shares; needs --seq-len",
    )


def _option(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"takes KEY=VALUE, got {text!r}: write for example a=1")
    return key, value


def _add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the algorithm; may be repeated",
    )


def _mask(arguments: argparse.Namespace) -> Mask:
    from megatron_cp_plugin.core.tiles import Mask
    from megatron_cp_plugin.document_lengths import random_documents

    documents: tuple[int, ...] = ()
    if arguments.documents is not None:
        if arguments.seq_len is None:
            raise ConfigError("--documents needs --seq-len, got none: add it")
        documents = random_documents(arguments.seq_len, arguments.documents)
    return Mask(arguments.mask == "causal", arguments.window, documents)


def _add_draw(commands: Any) -> None:
    """Each subcommand adds its own parser and the function that runs it."""
    parser = commands.add_parser(
        "draw",
        help="draw an algorithm's schedule: workers x steps, and who waits",
        description="Draws the schedule of one attention forward from its plan: which rank "
        "computes which queries (q) against which keys (k) or states (S) in which step, and who "
        "waits.",
    )
    parser.add_argument(
        "--algo", required=True, metavar="NAME", help="algorithm, such as distflash or zigzag"
    )
    parser.add_argument("--size", required=True, type=int, metavar="P", help="number of ranks")
    _add_mask(parser)
    _add_option(parser)
    parser.add_argument("--phase", choices=("forward", "backward"), default="forward")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="draw the matrix of scores, each token a row and a column, coloured by the rank that "
        "computes it; --output is a .svg, or a .html page that plays the steps",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help=".png or .svg to write")
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="draw the simulated timeline on this machine, forward and backward, instead of "
        "the schedule; --output may also be a .json for chrome://tracing; needs --seq-len",
    )
    _add_heads(parser, 32)
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="with --machine")
    parser.set_defaults(run=_draw)


def _draw_times(arguments: argparse.Namespace) -> int:
    from megatron_cp_plugin.core.linear.algorithm import LinearShape
    from megatron_cp_plugin.core.shape import Shape
    from megatron_cp_plugin.doctor import check_heads
    from megatron_cp_plugin.planner.detected_machine import machine_named
    from megatron_cp_plugin.planner.picture import save
    from megatron_cp_plugin.planner.simulate import simulate
    from megatron_cp_plugin.registry import kind_of

    if arguments.output is None or arguments.seq_len is None:
        missing = "--output" if arguments.output is None else "--seq-len"
        raise ConfigError(f"--machine needs --output and --seq-len, got no {missing}: add it")
    check_file("--output", arguments.output)
    (heads, kv_heads), dim = _heads(arguments), arguments.head_dim
    check_heads(heads, kv_heads, [dim])
    shape: Shape | LinearShape = Shape(1, arguments.seq_len, heads, kv_heads, dim)
    if kind_of(arguments.algo) == "linear":
        shape = LinearShape(1, arguments.seq_len, heads, dim, dim)
    machine = machine_named(arguments.machine)
    options = dict(arguments.option)
    nodes = machine.nodes(arguments.size)
    found = simulate(arguments.algo, options, shape, _mask(arguments), machine, nodes)
    title = f"{arguments.algo}, {arguments.size} ranks, {arguments.seq_len} tokens, "
    title += f"{heads}:{kv_heads} heads on {machine.name}: {found.forward.seconds * 1e3:.2f} + "
    title += f"{found.backward.seconds * 1e3:.2f} ms"
    save(found, title, arguments.output)
    print(title)
    print(f"wrote {arguments.output}")
    return 0


def _draw(arguments: argparse.Namespace) -> int:
    if arguments.machine is not None:
        return _draw_times(arguments)
    if arguments.tokens:
        return _draw_tokens(arguments)
    from megatron_cp_plugin.planner.drawing import picture, table, table_width
    from megatron_cp_plugin.planner.figures import save

    drawn = picture(arguments.algo, arguments.size, **_pass(arguments))
    if arguments.output:
        check_file("--output", arguments.output)
        save(drawn, arguments.output)
    if find_spec("rich") is None:
        _print_plainly(drawn)
        return 0
    from rich.console import Console

    console = Console()
    console = Console(width=max(console.width, table_width(drawn)))
    console.print(table(drawn))
    if arguments.output:
        console.print(f"wrote {arguments.output}")
    return 0


def _pass(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "seq_len": arguments.seq_len,
        "mask": _mask(arguments),
        "options": dict(arguments.option),
        "phase": arguments.phase,
    }


def _draw_tokens(arguments: argparse.Namespace) -> int:
    from megatron_cp_plugin.planner.token_picture import save, text, token_picture

    drawn = token_picture(arguments.algo, arguments.size, **_pass(arguments))
    if arguments.output is None:
        print(text(drawn))
        return 0
    check_file("--output", arguments.output)
    save(drawn, arguments.output)
    print(drawn.balance)
    print(f"wrote {arguments.output}")
    return 0


def _print_plainly(drawn: Picture) -> None:
    steps = [f"step {number}" for number in range(len(drawn.steps))]
    rows = [
        (str(rank), *(cell.text if cell else "waits" for cell in cells))
        for rank, cells in enumerate(zip(*drawn.steps, strict=True))
    ]
    print(drawn.title)
    print(text_table(("rank", *steps), rows))
    print("\n".join(drawn.summary))


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="which algorithm is the fastest for your model and machine, and what each sends",
        description="For each softmax algorithm with its default options: bytes and messages of "
        "the rank that sends most in one layer, forward and backward, and the share of the "
        "forward pass that ranks spend waiting; with --memory also the peak memory, "
        "besides q, k, v and dout, of the GPU that needs most. Below them, for comparison: "
        "Megatron's tensor + sequence parallelism, for attention and MLP together, and "
        "Ring Self-Attention, which computes all pairs whatever the mask. With --machine "
        "all options are tried, times are simulated, and the fastest is chosen, as "
        "--context-parallel-algo auto does. With --model whole training steps are "
        "simulated, for all ways to split the model. Nothing is executed.",
    )
    parser.add_argument("--size", type=int, metavar="P", help="number of ranks")
    _add_heads(parser, None)
    parser.add_argument("--head-dim", type=int, default=128, metavar="D")
    parser.add_argument("--value-dim", type=int, metavar="E", help="head dim of values; default: D")
    parser.add_argument("--batch", type=int, metavar="B", help="samples; with --model per step")
    parser.add_argument("--model", metavar="NAME", help="a whole model, such as llama3-8b")
    parser.add_argument(
        "--tokens", type=tokens_of, metavar="N", help="length of its sequences, such as 128K"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs to train it on")
    _add_mask(parser)
    parser.add_argument("--algo", metavar="NAME", help="only this one")
    _add_option(parser)
    parser.add_argument(
        "--memory",
        action="store_true",
        help="peak memory, with flash-attn 4 and GPUs of one node; some seconds with many ranks",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the plan of --algo and each rank's peak memory: see planner/plan_json.py",
    )
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="a machine of configs/machines, such as h200 or h100, or a file written by "
        "megatron-cp calibrate",
    )
    parser.add_argument(
        "--yaml", type=Path, metavar="FILE", help="write the choice as a run file; needs --machine"
    )
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.model is not None:
        return _plan_model(arguments)
    arguments.batch = 1 if arguments.batch is None else arguments.batch
    for name in ("size", "seq_len", "heads"):
        if getattr(arguments, name) is None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"plan needs --size, --seq-len and --heads, or --model, got no {flag}: add it"
            )
    shape, mask = _shape(arguments), _mask(arguments)
    title = f"one layer, {shape.heads}:{shape.kv_heads} heads, {shape.seq_len} tokens, "
    title += "1 rank" if arguments.size == 1 else f"{arguments.size} ranks"
    if mask.documents:
        title += f", {len(mask.documents) + 1} documents"
    if arguments.machine is None:
        if arguments.yaml:
            raise ConfigError("--yaml needs --machine, got none: name a machine")
        return _plan_bytes(arguments, title, shape, mask)
    for name in ("algo", "option", "memory", "json"):
        if getattr(arguments, name):
            raise ConfigError(f"--machine tries all algorithms and options: leave --{name} out")
    if arguments.yaml:
        check_file("--yaml", arguments.yaml)
    from megatron_cp_plugin.planner.command import plan_layer

    print(title)
    plan_layer(arguments.machine, arguments.size, shape, mask, arguments.yaml)
    return 0


def _plan_model(arguments: argparse.Namespace) -> int:
    for name in ("tokens", "gpus", "machine"):
        if getattr(arguments, name) is None:
            raise ConfigError(f"--model needs --tokens, --gpus and --machine, got no --{name}")
    if arguments.gpus < 1 or arguments.tokens < 1:
        raise ConfigError(
            f"--tokens and --gpus must be more than 0, got {arguments.tokens} and {arguments.gpus}"
        )
    if arguments.batch is not None and arguments.batch < 1:
        raise ConfigError(f"--batch must be more than 0, got {arguments.batch}")
    for name in ("size", "seq_len", "heads", "kv_heads", "algo", "option", "memory", "json"):
        if getattr(arguments, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"--model sets its own sizes, got {flag}: leave it out")
    if arguments.yaml:
        check_file("--yaml", arguments.yaml)
    from megatron_cp_plugin.planner.command import plan_model

    arguments.seq_len = arguments.tokens
    plan_model(
        arguments.model,
        arguments.tokens,
        arguments.gpus,
        arguments.machine,
        _mask(arguments),
        arguments.batch,
        arguments.yaml,
    )
    return 0


def _plan_bytes(arguments: argparse.Namespace, title: str, shape: Shape, mask: Mask) -> int:
    from megatron_cp_plugin.planner.baselines import BASELINES
    from megatron_cp_plugin.planner.costs import document
    from megatron_cp_plugin.registry import algorithm_class, available

    options = dict(arguments.option)
    rows: list[tuple[str, dict[str, str]]] = [(algo, {}) for algo in available("softmax")]
    if mask.documents:
        rows.append(("zigzag", {"layout": "documents"}))
    if arguments.algo:
        algorithm_class(arguments.algo)
        rows = [(arguments.algo, options)]
    elif options or arguments.json:
        raise ConfigError("--option and --json need --algo, got none: name an algorithm")
    headers = ["algorithm", "layout", "forward MiB", "backward MiB", "messages", "waits"]
    if arguments.memory:
        headers += ["peak GiB"]
    refused, table = [], []
    for algo, chosen in rows:
        try:
            table.append(_plan_cells(arguments, algo, chosen, shape, mask))
        except ConfigError as error:
            if arguments.algo:
                raise
            refused.append(f"{algo}: {error}")
    if not arguments.algo:
        for one in BASELINES:
            found = one.cost(arguments.size, shape, mask)
            table.append(_cost_cells(arguments, one.name, found, ""))
    if arguments.json:
        check_file("--json", arguments.json)
        written = document(arguments.algo, arguments.size, shape, mask, options)
        arguments.json.write_text(json.dumps(written, indent=1) + "\n")
    print(title)
    print(text_table(headers, table, right=range(2, len(headers))))
    for line in refused:
        print(line)
    if arguments.json:
        print(f"wrote {arguments.json}")
    return 0


def _shape(arguments: argparse.Namespace) -> Shape:
    from megatron_cp_plugin.core.shape import Shape
    from megatron_cp_plugin.doctor import check_heads

    heads, kv_heads = _heads(arguments)
    if arguments.value_dim is None:
        arguments.value_dim = arguments.head_dim
    for name in ("size", "seq_len", "value_dim", "batch"):
        if getattr(arguments, name) <= 0:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be more than 0, got {getattr(arguments, name)}")
    check_heads(heads, kv_heads, [arguments.head_dim])
    return Shape(
        arguments.batch,
        arguments.seq_len,
        heads,
        kv_heads,
        arguments.head_dim,
        value_dim=arguments.value_dim,
    )


def _plan_cells(
    arguments: argparse.Namespace, algo: str, options: Mapping[str, str], shape: Shape, mask: Mask
) -> list[str]:
    from megatron_cp_plugin.planner.costs import cost, peak

    size = arguments.size
    found = cost(algo, size, shape, mask, options)
    grid = f" {found.grid[0]}x{found.grid[1]}" if found.grid and algo == "attention2d" else ""
    filled = f", filled up to {found.heads} heads" if found.heads != shape.heads else ""
    memory = ""
    if arguments.memory:
        peaks = (peak(algo, size, rank, shape, mask, options) for rank in range(size))
        memory = f"{max(max(one.forward, one.backward) for one in peaks) / 2**30:.2f}"
    return _cost_cells(arguments, algo + grid + filled, found, memory)


def _cost_cells(arguments: argparse.Namespace, name: str, found: Cost, memory: str) -> list[str]:
    cells = [
        name,
        found.layout,
        f"{found.forward_bytes / 2**20:.1f}",
        f"{found.backward_bytes / 2**20:.1f}",
        str(found.messages),
        f"{found.idle:.1%}",
    ]
    if arguments.memory:
        cells.append(memory)
    return cells


if __name__ == "__main__":
    sys.exit(main())
