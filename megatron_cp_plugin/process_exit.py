"""How a process ends, alone or as one of many ranks: a refusal is printed once, in one line."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron_cp_plugin.errors import CommunicationError, ConfigError, ContextParallelError

REFUSED = 2
INTERRUPTED = 130
# Raised by a checkpoint that was cut off.
_OF_FILES = EOFError, OSError, UnpicklingError
# How long ranks of one node wait for the others to refuse as well.
_PATIENCE_S = 10.0


@contextmanager
def whole_program() -> Iterator[None]:
    """Runs the body as all that this process does, and ends the process.

    Errors of the plugin become one line, as in `one_line_errors`; others have their traceback, and
    exit code 1.
    """
    code: str | int | None = None
    try:
        with one_line_errors():
            yield
    except SystemExit as end:
        code = end.code
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    _end(code)


@contextmanager
def one_line_errors(program: str = "megatron_cp_plugin: error") -> Iterator[None]:
    """Turns errors of the plugin into one line and exit code 2, an interrupt into one line and 130,
    the loss of another rank into one line and 1.

    Under torchrun the line stands at the end of torchrun's own report, once for each node.
    """
    try:
        yield
    except ContextParallelError as error:
        _refuse(f"{program}: {error}")
    except CommunicationError as error:
        print(f"{program}: {error}", file=sys.stderr, flush=True)
        _leave(1)
    except KeyboardInterrupt:
        # torchrun sends the signal of a terminal to its ranks once more.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.environ.get("RANK", "0") == "0":
            print(f"{program.partition(':')[0]}: interrupted", file=sys.stderr)
        _leave(INTERRUPTED)


@contextmanager
def for_a_reader() -> Iterator[None]:
    """Prints for somebody who may have enough before the end, such as `head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads the rest of the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def refusals_in_one_line() -> Iterator[None]:
    """Turns an exception of Megatron's about a command line into an error of one line."""
    try:
        yield
    except ContextParallelError:
        raise
    except (AssertionError, ValueError, RuntimeError, OSError) as error:
        # Many of its assertions have no message, and speak for themselves.
        why = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line
        raise ConfigError(f"Megatron refuses these flags: {why}") from error


@contextmanager
def model_errors_in_one_line() -> Iterator[None]:
    """Turns an exception from building a model and its optimizer into an error of one line."""
    try:
        yield
    except ContextParallelError:
        raise
    except (AssertionError, ValueError, NotImplementedError, ImportError, *_OF_FILES) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = " ".join(str(error).split()) or last.line
        place = f"{Path(last.filename).name}, line {last.lineno}"
        raise ContextParallelError(
            f"the model or its optimizer cannot be built: {why} ({place})"
        ) from error


def _refuse(line: str) -> NoReturn:
    # torchrun sets it for each rank; it is empty where torchrun was told to keep no files.
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        _refuse_under_torchrun(line, Path(error_file))
    print(line, file=sys.stderr, flush=True)
    if dist.is_initialized():
        # Ranks that did not fail may be waiting in a collective: leave at once.
        _leave(REFUSED)
    sys.exit(REFUSED)


def _refuse_under_torchrun(line: str, error_file: Path) -> NoReturn:
    """Lets one rank of this node fail, with the line in the file that torchrun reports it from.

    torchrun spends seven lines on each rank that fails, and two on each that it has to end. All
    ranks refuse the same as a rule: the others leave before it does, with 0. A rank that stays
    alone with its refusal does not wait for long.
    """
    folder = error_file.parent.parent
    ranks = range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    (error_file.parent / "refused").touch()
    deadline = time.monotonic() + _PATIENCE_S
    refused = [int(os.environ["LOCAL_RANK"])]
    while len(refused) < len(ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
        refused = [rank for rank in ranks if (folder / str(rank) / "refused").exists()]
    if str(min(refused)) != os.environ["LOCAL_RANK"]:
        _leave(0)
    message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
    error_file.write_text(json.dumps({"message": message}))
    # Until the others have left.
    time.sleep(0.2)
    _leave(REFUSED)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end(code: str | int | None) -> NoReturn:
    """Ends the process as `sys.exit(code)`, except that Python is not finalized.

    Finalization would destroy the process groups, which Megatron holds to the end. Threads of gloo
    can abort the process then, see core.communication.process_groups, and NCCL waits forever if
    its operations are in CUDA graphs, as with `--cuda-graph-impl full_iteration`.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    if not code and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # other ranks may need what this one still sends
    # The rest of an orderly end: threads, exit handlers, buffers.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _leave(code or 0)
