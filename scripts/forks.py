"""Runs Megatron jobs on the CPU in forks of one process that has imported Megatron.

Importing Megatron takes longer than training a tiny model, and on a few cores the ranks of a job
wait for each other's imports. A fork starts in a fraction of a second. Apart from that it is a
process as any other, with its own torch.distributed, that runs a script from the top.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from threading import Lock

from torch.distributed import TCPStore  # type: ignore[attr-defined]

# What a rank may take to end by itself once another one has failed.
GRACE_S = 30
# Of multiprocessing's list of processes and their exit codes, which it lets one thread read only:
# starting one looks for others that have ended.
_bookkeeping = Lock()


class ForkedJob:
    """A job that has been started.

    Attributes:
        ranks: Its processes.
    """

    def __init__(
        self, script: Path, arguments: Sequence[str], logs: Sequence[tuple[Path, Path]]
    ) -> None:
        """Starts one process for each of `logs`.

        Args:
            script: A training script that imports Megatron.
            arguments: Its command line.
            logs: For each rank the files that its stdout and its stderr are added to.
        """
        start_server()
        self._store, places = places_of(len(logs))
        self.ranks = []
        for place, (stdout, stderr) in zip(places, logs, strict=True):
            settings = (script, tuple(arguments), place, stdout, stderr)
            process = multiprocessing.get_context("forkserver").Process(target=_run, args=settings)
            with _bookkeeping:
                process.start()
            self.ranks.append(process)

    def finish(self, timeout: float) -> list[int]:
        """Waits for all ranks, and kills those that hang.

        Args:
            timeout: Seconds to wait; fewer once a rank has failed.

        Returns:
            The exit codes; -SIGKILL of a rank that had to be killed.
        """
        deadline = time.monotonic() + timeout
        try:
            while None in (codes := self._codes()) and time.monotonic() < deadline:
                if any(codes):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                time.sleep(0.02)
        finally:
            for rank in self.ranks:
                assert rank.pid is not None
                rank.kill()
                # And what it started: Megatron writes checkpoints by other processes.
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
            while None in (codes := self._codes()):
                time.sleep(0.02)
        return [code or 0 for code in codes]

    def _codes(self) -> list[int | None]:
        with _bookkeeping:
            return [rank.exitcode for rank in self.ranks]


def places_of(ranks: int) -> tuple[TCPStore, list[dict[str, str]]]:
    """Where the ranks of a job meet, as long as it is held, and the variables of each rank.

    As torchrun has it: whoever starts a store on a port of the system's choice has that port, which
    nobody can take from a job that has not started; and where rank 0 starts the store, ranks that
    come before it try again half a second later.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    return store, [common | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]


def free_port() -> int:
    """Returns the number of a TCP port that nothing listens on.

    Below those that systems give to sockets which ask for none in particular: such a one may be
    taken before the job that is to have it has started.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def start_server() -> None:
    """Starts the process to be forked, if there is none; it imports Megatron meanwhile."""
    # It imports this, and not we: it activates the CPU platform.
    forkserver.set_forkserver_preload(["scripts.forked"])
    forkserver.ensure_running()


def _run(
    script: Path, arguments: Sequence[str], place: Mapping[str, str], stdout: Path, stderr: Path
) -> None:
    """One rank: does what `python script *arguments` would."""
    os.setsid()
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(place)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
