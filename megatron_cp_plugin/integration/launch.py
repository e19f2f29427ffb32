"""Starts a Megatron training script with the plugin in force."""

from __future__ import annotations

import argparse
import atexit
import os
import runpy
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration.args import (
    MEGATRON,
    PLATFORMS,
    OneLineParser,
    add_arguments,
    algorithm_flag,
    split_flags,
)

_USAGE = "torchrun ... -m megatron_cp_plugin.launch /path/to/pretrain_gpt.py [flags]"


def main() -> None:
    """Runs a training script, unmodified, as the main program of this process."""
    with whole_program():
        if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
            raise ConfigError(f"the first argument must be a training script: {_USAGE}")
        script = Path(sys.argv[1])
        if not script.is_file():
            raise ConfigError(f"no training script at {script}: {_USAGE}")
        # As `python script` would: the script's checkout comes first, the launcher is not seen.
        sys.path[0] = str(script.resolve().parent)
        sys.argv = [str(script), *prepare(sys.argv[2:])]
        runpy.run_path(str(script), run_name="__main__")


@contextmanager
def whole_program() -> Iterator[None]:
    """Runs the body as all that this process does; where there is no accelerator, ends the process.

    Errors of the plugin become one line, as in `one_line_errors`.
    """
    code: str | int | None = None
    try:
        with one_line_errors():
            yield
    except SystemExit as end:
        code = end.code
    if torch.accelerator.is_available():
        sys.exit(code)
    _end(code)


def _end(code: str | int | None) -> NoReturn:
    """Does what `sys.exit(code)` does, except that Python is not finalized.

    A thread of gloo that waits for the GIL, to let go of a tensor, when Python is finalized aborts
    the process after a right result (torch 2.11 to 2.15, pytorch/pytorch#190489). Such threads live
    until nobody holds their process group, and Megatron holds some to the end.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    # The rest of an orderly end: threads, exit handlers, buffers.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns errors of the plugin into one line on stderr and exit code 2."""
    try:
        yield
    except ContextParallelError as error:
        print(f"megatron_cp_plugin: error: {error}", file=sys.stderr, flush=True)
        if dist.is_initialized():
            # Ranks that did not fail may be waiting in a collective: leave at once.
            sys.stdout.flush()
            os._exit(2)
        sys.exit(2)


def prepare(argv: Sequence[str], run_file: bool = False) -> list[str]:
    """Makes this process ready for a Megatron training script.

    Call before Megatron is imported.

    Args:
        argv: Command line with flags of Megatron and of the plugin, program name excluded.
        run_file: The script is this package's own: it takes `--config FILE`, and needs what the
            wheel of Megatron lacks even without an algorithm of the plugin.

    Returns:
        The command line for Megatron.

    Raises:
        ContextParallelError: A flag has a value that is not allowed.
    """
    path, words = _split_run_file(argv) if run_file else (None, list(argv))
    if not {"-h", "--help"}.isdisjoint(words):
        # Megatron's own help follows, from the script.
        add_arguments(OneLineParser(usage=argparse.SUPPRESS, add_help=False)).print_help()
    flags, _ = split_flags(words)
    if path is None:
        flags.check()
    platform, why = _platform(flags.platform or _platform_in(path))
    if platform == "cpu":
        from megatron_cp_plugin.integration import cpu

        cpu.install(flags.allow_untested_megatron)
    if run_file:
        from megatron_cp_plugin.integration import compat

        compat.check("script", allow_untested=flags.allow_untested_megatron)
    if path is not None:
        words = _read_run_file(path) + words
    flags, rest = split_flags(words)
    flags.check()
    if platform == "cpu":
        rest, added = cpu.complete_flags(rest)
        _say(f"CPU platform in force ({why}); added {' '.join(added) or 'no flags'}")
    if flags.algo is None:
        _check_own_path(rest)
        if platform == "cuda" and flags.record is None and not run_file:
            # A GPU is there and Megatron's own path is asked for: nothing is touched.
            return rest

    from megatron_cp_plugin.integration.hooks import Hooks, skip_built_helpers

    skip_built_helpers()
    if flags.record is not None:
        from megatron_cp_plugin.harness.parity import Recorder

        algo, allow_untested = flags.algo or MEGATRON, flags.allow_untested_megatron
        Recorder(flags.record, algo, allow_untested).install()
    if flags.algo is not None:
        if platform == "cuda":
            _allow_one_connection(rest)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cpu") if platform == "cpu" else torch.device("cuda", local_rank)
        Hooks(flags, device).install()
        rest = [*rest, *algorithm_flag(flags.algo)]
    return rest


def _split_run_file(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", default=None)
    known, rest = parser.parse_known_args(list(argv))
    return known.config, rest


def _read_run_file(path: str) -> list[str]:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_cp_plugin.integration.yaml_config import yaml_to_argv

    parser = argparse.ArgumentParser(allow_abbrev=False)
    return yaml_to_argv(path, add_arguments(add_megatron_arguments(parser)))


def _platform_in(path: str | None) -> str:
    """Returns the platform that a run file names; it is needed before Megatron is imported."""
    if path is None:
        return "auto"
    try:
        platform = OmegaConf.select(OmegaConf.load(path), "context_parallel.platform")
    except Exception:
        # Whatever is wrong with the file is reported when it is read.
        return "auto"
    return platform if platform in PLATFORMS else "auto"


def _platform(wanted: str) -> tuple[str, str]:
    """Returns the platform, cpu or cuda, and the reason for the choice."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("--cp-platform cuda needs a GPU, got none: use --cp-platform cpu")
    if wanted == "auto":
        return ("cuda", "a GPU is there") if available else ("cpu", "no GPU found")
    return wanted, f"--cp-platform {wanted}"


def _check_own_path(argv: Sequence[str]) -> None:
    """Refuses Megatron's own context parallelism without Transformer Engine, as Megatron does.

    It does so when a layer is built, in hundreds of lines. A `--spec` may have other attention.
    """
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--transformer-impl", default=None)
    parser.add_argument("--spec", nargs="*", default=None)
    given, _ = parser.parse_known_args(list(argv))
    if given.context_parallel_size < 2 or given.spec is not None:
        return
    if given.transformer_impl == "local":
        got = "--transformer-impl local"
    elif find_spec("transformer_engine") is None:
        got = "none installed"
    else:
        return
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
        _say(f"{name} set to 1, as Megatron demands")


def _say(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"megatron_cp_plugin: {message}", flush=True)
