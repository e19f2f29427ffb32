"""Runs scripts/pretrain_gpt.py on the CPU in processes forked from one that imported Megatron.

Importing Megatron takes longer than training a tiny model, and on a few cores the ranks of a run
wait for each other's imports. Reads jobs from standard input, one JSON object a line

    {"arguments": [...], "ranks": 4, "log": "file", "timeout": 300}

and answers each by a line with the exit codes of its ranks; null for one that had to be killed.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

SCRIPT = Path(__file__).with_name("pretrain_gpt.py")


def main() -> None:
    """Serves until standard input ends."""
    _import_megatron()
    for line in sys.stdin:
        job = json.loads(line)
        codes = run(job["arguments"], job["ranks"], job["log"], job["timeout"])
        print(json.dumps(codes), flush=True)


def run(arguments: list[str], ranks: int, log: str, timeout: float) -> list[int | None]:
    """Runs one job and returns the exit codes of its ranks.

    Args:
        arguments: Command line of the training script.
        ranks: How many processes.
        log: Where their output goes.
        timeout: Seconds after which they are killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    codes: dict[int, int | None] = {
        _fork(arguments, rank, ranks, port, log): None for rank in range(ranks)
    }
    deadline = time.monotonic() + timeout
    while None in codes.values() and time.monotonic() < deadline:
        for pid in [pid for pid, code in codes.items() if code is None]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    # The others may wait for it for ever.
                    deadline = min(deadline, time.monotonic() + 10)
        time.sleep(0.02)
    for pid in [pid for pid, code in codes.items() if code is None]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return list(codes.values())


def _import_megatron() -> None:
    from megatron_cp_plugin.integration import cpu

    cpu.install()

    # Hooks must be in force before the training program is imported, but not before these.
    for name in (
        "megatron.core.datasets.blended_megatron_dataset_builder",
        "megatron.core.tokenizers.text",
        "megatron.training.training",
        "megatron_cp_plugin.integration.checks",
        "megatron_cp_plugin.integration.hooks",
        "megatron_cp_plugin.integration.spec",
        "megatron_cp_plugin.integration.yaml_config",
        "torch._dynamo",
    ):
        importlib.import_module(name)


def _fork(arguments: list[str], rank: int, ranks: int, port: int, log: str) -> int:
    """Returns the process id of a new rank."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with open(log, "a") as output, open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        sys.argv = [str(SCRIPT), *arguments]
        runpy.run_path(str(SCRIPT), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not the server's clean-up.
        os._exit(code)


if __name__ == "__main__":
    main()
