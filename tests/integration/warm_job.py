"""Runs Megatron jobs in forks of one process that has imported Megatron.

A rank starts in a fraction of a second instead of eight, so that a test can run many jobs. Apart
from that the jobs are those of `megatron_job.run`: real processes, each of which runs
scripts/pretrain_gpt.py from the top.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.integration.megatron_job import Job, Process, free_port

TIMEOUT_S = 120
# What a rank may take to end by itself once another one has failed.
GRACE_S = 30


class WarmJob:
    """A job that has been started.

    Attributes:
        ranks: Its processes.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], ranks: int) -> None:
        """Args: folder: for what the ranks print. arguments: of scripts/pretrain_gpt.py."""
        # Imported by the server of the forks, and not here: it puts the CPU platform in force.
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["tests.integration.warm_rank"])
        folder.mkdir(parents=True, exist_ok=True)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        self._logs = [(folder / f"{r}.out", folder / f"{r}.err") for r in range(ranks)]
        self.ranks = []
        for rank, logs in enumerate(self._logs):
            place = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            target, settings = _run_rank, (tuple(arguments), place, *logs)
            self.ranks.append(server.Process(target=target, args=settings))
            self.ranks[-1].start()

    def text(self) -> str:
        """What the ranks have printed so far."""
        paths = (path for logs in self._logs for path in logs)
        return "\n".join(path.read_text() for path in paths if path.exists())

    def finish(self) -> Job:
        """Waits for all ranks; those that hang are killed, and have no exit code of their own."""
        deadline = time.monotonic() + TIMEOUT_S
        failed = False
        while any(rank.is_alive() for rank in self.ranks) and time.monotonic() < deadline:
            if not failed and any(rank.exitcode for rank in self.ranks):
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
            time.sleep(0.02)
        for rank in self.ranks:
            rank.kill()
            # And what it has started: Megatron writes checkpoints with the help of other processes.
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.join()
        codes = [rank.exitcode or 0 for rank in self.ranks]
        texts = [tuple(path.read_text() for path in logs) for logs in self._logs]
        return Job(tuple(Process(c, out, err) for c, (out, err) in zip(codes, texts, strict=True)))


def run_warm(folder: Path, *arguments: str, ranks: int = 1) -> Job:
    """Runs scripts/pretrain_gpt.py in `ranks` processes; `folder` is for what they print."""
    return WarmJob(folder, arguments, ranks).finish()


def _run_rank(
    arguments: Sequence[str], environment: dict[str, str], stdout: Path, stderr: Path
) -> None:
    os.setsid()
    from tests.integration import warm_rank

    warm_rank.main(arguments, environment, stdout, stderr)
