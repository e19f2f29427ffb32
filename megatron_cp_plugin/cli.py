"""The command `megatron-cp`: shows algorithms, checks the machine, plans and trains."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_cp_plugin import __version__
from megatron_cp_plugin.commands import COMMANDS, add_flags_of, settings_of
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration.args import OneLineParser
from megatron_cp_plugin.packages import need
from megatron_cp_plugin.process_exit import for_a_reader, one_line_errors
from megatron_cp_plugin.terminal import check_file, flag_of, say_nothing_of_cuda, text_table

if TYPE_CHECKING:
    from megatron_cp_plugin.core.tiles import Mask


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Returns: The exit code: 0; 1 if `doctor` finds a wrong result; 2 with one line on stderr if
    something cannot be done.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = COMMANDS.get(words[0], {}) if words else {}
    code = 0
    say_nothing_of_cuda()
    with for_a_reader(), warnings.catch_warnings():
        if "quiet" in command:  # Megatron warns at every import of packages that are not installed
            warnings.simplefilter("ignore")
        if "module" in command:
            with one_line_errors("megatron-cp: error"):
                if {"-h", "--help"}.isdisjoint(words):
                    need(words[0], *command["needs"])
                name = f"megatron_cp_plugin.harness.{command['module']}"
                module: Any = import_module(name)
                code = module.main(words[1:])
        else:
            code = _own_words(words)
    return code  # also where nobody reads any more


def _own_words(words: Sequence[str]) -> int:
    parser, commands = parsers()
    try:
        arguments, unknown = parser.parse_known_args(words)
        if unknown:
            # Of the subcommand's own flags the nearest is named.
            commands.choices[words[0]].error(f"unrecognized arguments: {' '.join(unknown)}")
        for name in ("output", "report", "yaml"):
            if path := getattr(arguments, name, None):
                check_file(f"--{name}", path)
        return _RUN[words[0]](arguments)
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
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command["help"], **settings_of(name))
        add_flags_of(one, name)
    return parser, commands


def _capabilities(arguments: argparse.Namespace) -> int:
    from megatron_cp_plugin.capabilities import markdown

    print(markdown(), end="")
    return 0


def _hooks(arguments: argparse.Namespace) -> int:
    if arguments.check:
        need("hooks --check", "megatron")
        from megatron_cp_plugin.integration.compat import report

        version, problems = report()
        for line in problems:
            print(line)
        print(f"Megatron {version}: {len(problems)} difference(s) from what the plugin expects")
        return 2 if problems else 0
    from megatron_cp_plugin.integration.contract import PAGE

    print(PAGE, end="")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from torch import distributed

    from megatron_cp_plugin.doctor import examine, join, leave, measured, verdict

    (heads, kv_heads), path = arguments.heads, arguments.report
    findings = examine(heads, kv_heads, arguments.head_dim)
    found = {} if path is None else measured(join(), heads, kv_heads, arguments.head_dim[0])
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        rows = [(f.topic, f.name, f"WRONG: {f.text}" if f.failed else f.text) for f in findings]
        print(text_table(("", "what", "finding"), rows))
        print(verdict(findings))
        if path is not None:
            lines = [(f.topic, f.name, f.text, f.right) for f in findings]
            content = {"version": __version__, "findings": lines, **found}
            path.write_text(json.dumps(content, indent=1) + "\n")
    leave()
    return int(any(finding.failed for finding in findings))


def _calibrate(arguments: argparse.Namespace) -> int:
    from megatron_cp_plugin.core.communication.process_groups import topology_of
    from megatron_cp_plugin.doctor import join, leave
    from megatron_cp_plugin.planner.calibrate import Calibration

    device, path = join(), arguments.output
    topology = topology_of(None)
    dims = *arguments.heads, arguments.head_dim
    machine = Calibration(topology, device, dims).machine(path.stem)
    if topology.rank == 0:
        machine.save(path)
        print(f"wrote {path}")
    leave()
    return 0


def _need(arguments: argparse.Namespace, who: str, *names: str) -> None:
    for name in names:
        if getattr(arguments, name) is None:
            raise ConfigError(f"{who}, got no {flag_of(name)}: add it")


def _mask(arguments: argparse.Namespace) -> Mask:
    from megatron_cp_plugin.core.tiles import Mask
    from megatron_cp_plugin.document_lengths import random_documents

    documents: tuple[int, ...] = ()
    if arguments.documents is not None:
        if arguments.seq_len is None:
            raise ConfigError("--documents needs --seq-len, got none: add it")
        documents = random_documents(arguments.seq_len, arguments.documents)
    return Mask(arguments.mask == "causal", arguments.window, documents)


def _draw(arguments: argparse.Namespace) -> int:
    from megatron_cp_plugin.planner.drawing import held, picture, text
    from megatron_cp_plugin.planner.svg import matrix, some_tokens

    path = arguments.output
    if path is not None:
        if not arguments.tokens:
            raise ConfigError("--output needs --tokens, got none: add it")
        if path.suffix != ".svg":
            raise ConfigError(f"--output is a .svg file, got {path.name!r}: change its ending")
    algo, size, options = arguments.algo, arguments.size, dict(arguments.option)
    tokens, given = arguments.seq_len, {"mask": _mask(arguments), "phase": arguments.phase}
    if arguments.tokens and tokens is None:
        tokens = some_tokens(algo, size, options)
    drawn = picture(algo, size, seq_len=tokens, options=options, **given)
    if not arguments.tokens:
        print(text(drawn))
    elif path is None:
        print("\n".join(held(drawn)))
    else:
        print(drawn.balance)
        path.write_text(matrix(drawn), encoding="utf-8")
        print(f"wrote {path}")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.model is not None:
        return _plan_model(arguments)
    arguments.batch = 1 if arguments.batch is None else arguments.batch
    needs = "plan needs --machine, --size, --seq-len and --heads, or --model"
    _need(arguments, needs, "size", "seq_len", "heads", "machine")
    from megatron_cp_plugin.core.call import Shape

    heads, kv_heads = arguments.heads
    shape = Shape(arguments.batch, arguments.seq_len, heads, kv_heads, arguments.head_dim)
    mask = _mask(arguments)
    title = f"one layer, {shape.heads}:{shape.kv_heads} heads, {shape.seq_len} tokens, "
    title += "1 rank" if arguments.size == 1 else f"{arguments.size} ranks"
    if mask.documents:
        title += f", {len(mask.documents) + 1} documents"
    from megatron_cp_plugin.planner.command import plan_layer

    plan_layer(title, arguments.machine, arguments.size, shape, mask, arguments.yaml)
    return 0


def _plan_model(arguments: argparse.Namespace) -> int:
    _need(arguments, "--model needs --tokens, --gpus and --machine", "tokens", "gpus", "machine")
    for name in ("size", "seq_len", "heads"):
        if getattr(arguments, name):
            flag = flag_of(name)
            raise ConfigError(f"--model sets its own sizes, got {flag}: leave it out")
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


_RUN: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "capabilities": _capabilities,
    "hooks": _hooks,
    "doctor": _doctor,
    "calibrate": _calibrate,
    "draw": _draw,
    "plan": _plan,
}


if __name__ == "__main__":
    sys.exit(main())
