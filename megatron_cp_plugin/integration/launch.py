"""Starts a Megatron training script with the plugin installed."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megatron_cp_plugin.errors import ConfigError, ContextParallelError, nearest
from megatron_cp_plugin.integration.args import (
    ALGORITHM,
    HELP,
    MEGATRON,
    OneLineParser,
    PluginFlags,
    add_arguments,
    make_help_printable,
    split_flags,
)
from megatron_cp_plugin.integration.settings import PACKING, Settings
from megatron_cp_plugin.packages import need
from megatron_cp_plugin.process_exit import for_a_reader, whole_program
from megatron_cp_plugin.terminal import check_folder, flag_of, say_nothing_of_cuda

_USAGE = "torchrun ... -m megatron_cp_plugin.launch /path/to/pretrain_gpt.py [flags]"
_EXAMPLE = (
    "torchrun --nproc-per-node 8 -m megatron_cp_plugin.launch pretrain_gpt.py \\\n"
    "      --context-parallel-algo zigzag --context-parallel-size 8 <your own flags>"
)
_USAGE_OF_OURS = "megatron-cp train, or torchrun ... scripts/pretrain_gpt.py, --config FILE [flags]"
_EXAMPLE_OF_OURS = (
    "torchrun --nproc-per-node 4 scripts/pretrain_gpt.py --config configs/tiny_zigzag.yaml \\\n"
    "      --seq-length 1024"
)
HELPS = {"-h", "--help", HELP}
_RUN_FILE = (
    "YAML file with flags of Megatron and the plugin, or the name of a run file of this "
    "package; flags on the command line override it"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a training script as the main program of this process, and ends the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    with whole_program():
        if words and words[0] in HELPS:
            _print_help(words, run_file=False)
            return
        if not words or words[0].startswith("-"):
            raise ConfigError(f"the first argument must be a training script: {_USAGE}")
        script = Path(words[0])
        if not script.is_file():
            raise ConfigError(f"no training script at {script}: {_USAGE}")
        # As `python script` would: the script's checkout comes first, the launcher is not seen.
        sys.path[0] = str(script.resolve().parent)
        sys.argv = [str(script), *prepare(words[1:])]
        runpy.run_path(str(script), run_name="__main__")


def prepare(argv: Sequence[str], run_file: bool = False) -> list[str]:
    """Makes this process ready for a Megatron training script; call it before Megatron is imported.

    Args: run_file: the script is this package's own: it takes `--config FILE`, and needs what the
        wheel of Megatron lacks even without an algorithm of the plugin.

    Returns: the command line for Megatron.

    Raises: ContextParallelError for a value of a flag that is not allowed.
    """
    need("training with Megatron", "megatron")
    say_nothing_of_cuda()
    path, words = split_run_file(argv) if run_file else (None, list(argv))
    if not HELPS.isdisjoint(words):
        _print_help(words, run_file)
        sys.exit()
    flags, rest = own_flags(path, words)
    if run_file:
        _let_first_rank_warn()
    # Needed before Megatron is imported.
    platform, why = _platform(flags.platform or "auto")
    if platform == "cpu":
        from megatron_cp_plugin.integration import cpu

        cpu.activate(flags.allow_untested_megatron)
    if run_file:
        from megatron_cp_plugin.integration import compat

        compat.check_megatron("script", allow_untested=flags.allow_untested_megatron)
        words = with_run_file(path, words)
        flags, rest = split_flags(words)
        flags.check()
    elif flags.algo is None:
        _check_spelling(rest)
    if platform == "cpu":
        rest, added = cpu.complete_flags(rest)
        _print(f"using the CPU platform ({why}); added {' '.join(added) or 'no flags'}")
    if flags.algo is None:
        _check_own_path(rest)
        if run_file:
            # With an algorithm it is done when Megatron's arguments are validated.
            from megatron_cp_plugin.integration.rules import check

            check("files", Settings(all_flags().parse_known_args(rest)[0]))
        if platform == "cuda" and flags.record is None and not run_file:
            # A GPU is there and Megatron's own path is asked for: nothing is touched.
            return rest
    return _install(flags, platform, rest)


def _install(flags: PluginFlags, platform: str, rest: list[str]) -> list[str]:
    """Installs the recorder and the algorithm. Returns: the command line for Megatron."""
    from megatron_cp_plugin.integration.installer import LauncherInstaller, skip_built_helpers

    allow_untested = flags.allow_untested_megatron
    skip_built_helpers()
    if flags.record is not None:
        check_folder("--cp-record", flags.record)
        from megatron_cp_plugin.harness.recorder import Recorder

        Recorder(flags.record, flags.algo or MEGATRON, allow_untested).install()
    if flags.algo is not None:
        if platform == "cuda":
            _allow_one_connection(rest)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cpu") if platform == "cpu" else torch.device("cuda", local_rank)
        LauncherInstaller(flags, device).install(allow_untested=allow_untested)
        rest = [*rest, ALGORITHM, flags.algo]
    return rest


def split_run_file(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns what `--config` gives, and the rest of a command line of our own script."""
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", default=None)
    known, rest = parser.parse_known_args(list(argv))
    return known.config, rest


def read_run_file(path: str | None) -> dict[str, Any]:
    """Returns the sections of a run file as they are written; {}: there is none. Needs no Megatron.

    Raises: ConfigError if it cannot be read, or has a section that there is not.
    """
    if path is None:
        return {}
    need("--config", "omegaconf", "yaml")
    from megatron_cp_plugin.integration.yaml_config import as_written

    return as_written(path)


def own_flags(path: str | None, words: Sequence[str]) -> tuple[PluginFlags, list[str]]:
    """The plugin's flags as a run file and the command line give them; needs no Megatron.

    Returns: those, and the other flags of the command line.

    Raises: ContextParallelError if one is unknown, has a value that is not allowed, or clashes.
    """
    flags, rest = split_flags(words)
    if path is None:
        flags.check()
        return flags, rest
    need("--config", "omegaconf", "yaml")
    from megatron_cp_plugin.integration.yaml_config import own_arguments

    given = own_arguments(path, words)
    try:
        both, _ = split_flags([*given, *words])
        both.check()
    except ContextParallelError as error:
        if flags != split_flags([])[0]:  # the command line may be wrong
            raise
        raise ConfigError(f"{path}: context_parallel: {error}") from None
    return both, rest


def with_run_file(path: str | None, words: list[str]) -> list[str]:
    """Returns the command line of our own script, with what its run file says before it.

    Raises: ConfigError: A flag is none of Megatron's or ours, or the run file is wrong.
    """
    parser = all_flags()
    parser.parse_args(words)
    if path is None:
        return words
    from megatron_cp_plugin.integration.yaml_config import superseded, yaml_to_argv

    argv = yaml_to_argv(path, parser, words)
    dropped = superseded(read_run_file(path).get("context_parallel", {}), words)
    if dropped:
        settings = ", ".join(f"{name}: {value}" for name, value in dropped.items())
        _print(f"the command line chooses another algorithm than {path}: ignoring {settings}")
    return argv + words


def all_flags() -> argparse.ArgumentParser:
    """Megatron's flags and ours."""
    from megatron.training.arguments import add_megatron_arguments

    return add_arguments(add_megatron_arguments(OneLineParser(allow_abbrev=False)))


def _check_spelling(argv: Sequence[str]) -> None:
    """Refuses flags that are nearly ours where no algorithm is chosen.

    Megatron's own path would run, or a script that ignores unknown flags without the algorithm.
    """
    ours = add_arguments(OneLineParser(add_help=False))._option_string_actions
    flags = [word.partition("=")[0] for word in argv if word.startswith("--")]
    near = [flag for flag in flags if get_close_matches(flag, ours, cutoff=0.85)]
    if not near:
        return
    known = all_flags()._option_string_actions
    for flag in near:
        if flag not in known:
            raise ConfigError(f"unknown flag {flag}{nearest(flag, ours)}: see {HELP}")


def _print_help(words: Sequence[str], run_file: bool) -> None:
    """Prints our flags, then Megatron's unless ours alone are asked for, on the first rank."""
    if os.environ.get("RANK", "0") != "0":
        return
    ours = OneLineParser(usage=_USAGE_OF_OURS if run_file else _USAGE, add_help=False)
    if run_file:
        ours.add_argument_group("run file").add_argument("--config", metavar="FILE", help=_RUN_FILE)
    with for_a_reader():
        add_arguments(ours).add_argument(HELP, action="help", help="print these flags alone")
        ours.print_help()
        print(f"\nexample:\n  {_EXAMPLE_OF_OURS if run_file else _EXAMPLE}")
        print("\nAny flag of Megatron-LM may follow.", end=" ")
        if HELP in words:
            print("--help lists those of the installed one.")
            return
        print("Those of the installed one:\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.training.arguments import add_megatron_arguments
        parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
        make_help_printable(add_megatron_arguments(parser)).print_help()


def _platform(wanted: str) -> tuple[str, str]:
    """Returns the platform, cpu or cuda, and the reason for the choice."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("--cp-platform cuda needs a GPU, got none: use --cp-platform cpu")
    if wanted == "auto":
        return ("cuda", "a GPU is there") if available else ("cpu", "no GPU found")
    return wanted, f"--cp-platform {wanted}"


def _check_own_path(argv: Sequence[str]) -> None:
    """Refuses what Megatron's own attention needs Transformer Engine for, as Megatron does.

    It does so when a layer is built or runs, in hundreds of lines. A `--spec` may have other
    attention.
    """
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--transformer-impl", default=None)
    parser.add_argument("--spec", nargs="*", default=None)
    given, _ = parser.parse_known_args(list(argv))
    packing = [flag for flag in map(flag_of, PACKING) if flag in argv]
    if given.spec is not None or (given.context_parallel_size < 2 and not packing):
        return
    if given.transformer_impl == "local":
        got = "--transformer-impl local"
    elif find_spec("transformer_engine") is None:
        got = "none installed"
    else:
        return
    if given.context_parallel_size < 2:
        raise ConfigError(
            f"Megatron's own packed documents need the attention of Transformer Engine, got {got} "
            f"and {packing[0]}: use --context-parallel-algo zigzag, or leave {packing[0]} out"
        )
    raise ConfigError(
        f"Megatron's own context parallelism needs the attention of Transformer Engine, got {got} "
        f"and context_parallel_size {given.context_parallel_size}: use --context-parallel-algo "
        "zigzag, or --context-parallel-size 1"
    )


def _allow_one_connection(argv: Sequence[str]) -> None:
    """Sets what Megatron demands for context parallelism before the Blackwell architecture.

    With sharded data parallelism it demands anything else.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    sharded = {"--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp"}
    if name not in os.environ and sharded.isdisjoint(argv):
        os.environ[name] = "1"
        _print(f"{name} set to 1, as Megatron demands")


def _let_first_rank_warn() -> None:
    """Leaves it to the first rank to say, as Megatron does at its import, what is not installed."""
    if os.environ.get("RANK", "0") != "0":
        missing = r".*(is|are) not installed|.*your version is 0\.0\.0"
        warnings.filterwarnings("ignore", missing, UserWarning, r"megatron\.")


def _print(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"megatron_cp_plugin: {message}", flush=True)
