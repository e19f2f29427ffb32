"""`megatron-cp check`: what a launch would say of a command line, without ranks or GPUs.

The launcher's own code reads the flags and checks them. Where this machine has no GPU, rules about
installed packages, data and folders are left out, and Megatron's questions about the GPU and
Transformer Engine are answered as on a GPU.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib import import_module
from io import StringIO
from math import lcm
from textwrap import fill
from typing import Any
from unittest.mock import patch

import torch

from megatron_cp_plugin import registry
from megatron_cp_plugin.commands import parser_of
from megatron_cp_plugin.errors import ContextParallelError, nearest
from megatron_cp_plugin.integration import launch
from megatron_cp_plugin.integration.args import PluginFlags, split_flags
from megatron_cp_plugin.integration.auto import kinds_of_layers, memory_of, nodes_of
from megatron_cp_plugin.integration.installer import LauncherInstaller
from megatron_cp_plugin.integration.rules import check
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.planner.choose import GIB, CallSite, peak_at
from megatron_cp_plugin.planner.detected_machine import kernel_on, machine_named

_SAID = "megatron_cp_plugin: "
_PROCESSES = re.compile(r"--(nproc[-_]per[-_]node|nnodes)[= ](\d+)")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0: a launch would train, 1: it would refuse."""
    known, words = parser_of("check").parse_known_args(argv)
    words, processes = split_program(words)
    try:
        lines = list(findings(words, known.machine, known.gpus or processes))
    except ContextParallelError as error:
        print(f"refused: {error}")
        return 1
    print("served")
    for topic, text in lines:
        print(fill(text, 100, initial_indent=f"  {topic:<9} ", subsequent_indent=" " * 12))
    return 0


def split_program(words: Sequence[str]) -> tuple[list[str], int | None]:
    """Separates the flags of a training script from the words that start it.

    Returns: the flags; and the number of processes, None where no word gives it.
    """
    scripts = [at for at, word in enumerate(words) if word.endswith(".py")]
    start = scripts[0] + 1 if scripts else 0
    given = dict(_PROCESSES.findall(" ".join(words[:start]).replace("_", "-")))
    flags = [word for word in words[start:] if word != "--"]
    if "nproc-per-node" not in given:
        return flags, None
    return flags, int(given["nproc-per-node"]) * int(given.get("nnodes", 1))


def findings(
    words: Sequence[str], machine_name: str, gpus: int | None
) -> Iterator[tuple[str, str]]:
    """What a launch would say, as topics and texts.

    Args: gpus: number of processes; None: the fewest that the flags need.

    Raises: ContextParallelError: The launch would refuse them so.
    """
    path, given = launch.split_run_file(words)
    parser = launch.all_flags()
    if path is not None:
        given = launch.with_run_file(path, given)
    _, unknown = parser.parse_known_args(given)
    flags, rest = split_flags(given)
    flags.check()
    if flags.algo is None:
        flags = replace(flags, algo=registry.AUTO)
        yield "note", "no algorithm is named: Megatron's own would run; this is what auto would do"
    if flags.is_auto:
        flags = replace(flags, machine=flags.machine or machine_name)
    machine = machine_named(flags.machine or machine_name)
    for flag in (word.partition("=")[0] for word in unknown if word.startswith("--")):
        near = nearest(flag, parser._option_string_actions)
        yield "note", f"no flag of Megatron {flag}{near}: the script must define it"
    installer = LauncherInstaller(flags, torch.device("cuda"))
    with warnings.catch_warnings(), redirect_stdout(StringIO()) as printed, _as_on_gpus():
        warnings.simplefilter("ignore")
        validated = _validated(installer, rest, gpus)
    settings = Settings(validated, installer.config(validated.context_parallel_size))
    check("training", settings)
    yield "gpus", f"{validated.world_size}{'' if gpus else ', the fewest for these flags: --gpus'}"
    lines = [line for line in printed.getvalue().splitlines() if line.startswith(_SAID)]
    yield from (("launch", line.removeprefix(_SAID)) for line in lines)
    site = CallSite(machine, nodes_of(settings, machine.gpus_per_node), kernel_on(machine, "auto"))
    if settings.cp.has_softmax_layers and settings.cp.kernel == "auto":
        yield "kernel", f"{site.kernel}, the fastest measured on {machine.name}"
    yield "memory", _memory(flags, settings, site)


def _validated(installer: LauncherInstaller, rest: list[str], gpus: int | None) -> Any:
    """Megatron's arguments, after the checks of the plugin and of Megatron."""
    arguments = import_module("megatron.training.arguments")
    with patch.object(sys, "argv", ["check", *rest]):
        args = arguments.parse_args(ignore_unknown_args=True)
    s = Settings(args)
    dense, experts = s.tensor * s.ranks * s.stages, s.expert_ranks * s.stages
    args.rank, args.world_size = 0, gpus or max(1, lcm(dense, experts if s.has_experts else 1))
    return installer.validate_args(arguments.validate_args, args)


@contextmanager
def _as_on_gpus() -> Iterator[None]:
    """Answers Megatron's questions about the GPU and Transformer Engine, where there is no GPU."""
    if torch.cuda.is_available():
        yield
        return
    arguments = import_module("megatron.training.arguments")
    # From architecture 10 on Megatron reads no environment variable of the machine.
    answers = {"get_device_arch_version": 10, "is_te_min_version": True}
    named: dict[str, Any] = {
        name: lambda *_, x=x: x for name, x in answers.items() if hasattr(arguments, name)
    }
    with (
        patch.multiple(arguments, **named),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (10, 0)),
    ):
        yield


def _memory(flags: PluginFlags, settings: Settings, site: CallSite) -> str:
    """Whether the step fits into a GPU of the machine."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    lacks = [name for name in names if not getattr(settings, name)]
    if settings.is_recurrent or settings.is_sparse or settings.hybrid_layer_pattern:
        lacks.append("a count of gated delta net, Mamba or DSA layers")
    if lacks or not settings.tokens:
        return f"not known: the planner lacks {' and '.join(lacks or ['seq_length'])}"
    named = settings.cp.layers or (settings.cp.algo,)
    asked = replace(flags, layers=tuple(map(registry.kind_of, settings.cp.layers)))
    kinds = kinds_of_layers(asked, settings)
    each = {(named[at % len(named)], kind) for at, kind in enumerate(kinds)}
    peaks = [peak_at(algo, settings.cp.options_of(algo), kind, site) / GIB for algo, kind in each]
    parts = memory_of(settings, settings.shape(settings.tokens)) | {"attention": max(peaks)}
    total, gib = sum(parts.values()), site.machine.memory_gib
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    words = ", ".join(f"{name} {size:.1f}" for name, size in largest)
    verdict = "fits" if total <= gib else "does not fit"
    return f"{verdict}: {total:.1f} of {gib:g} GiB on {site.machine.name} by estimate: {words}"
