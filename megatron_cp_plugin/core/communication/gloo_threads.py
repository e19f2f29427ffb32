"""Threads of gloo when a process ends.

gloo drops the tensors of an operation in a thread of its own, some time after `wait` has returned,
and takes the GIL for it. Python ends a thread that asks for the GIL while it is finalized (3.12,
3.13); in the middle of C++ destructors this aborts the process, after a right result: "terminate
called without an active exception" (torch 2.11 to 2.15, pytorch/pytorch#190489). These threads live
until nobody holds their process group.
"""

import atexit
import time
from functools import cache
from pathlib import Path

# How long a process that ends waits at most, and for how long it watches the threads.
_PATIENCE_S = 5.0
_WATCHED_S = 0.02
_TASKS = Path("/proc/self/task")


@cache
def end_after_gloo() -> None:
    """From now on, when this process ends, it waits for threads of gloo first."""
    atexit.register(_wait_for_gloo)


def _wait_for_gloo() -> None:
    """Waits until no thread of gloo has anything left to do, `_PATIENCE_S` at most.

    While this thread sleeps, the GIL is free: a thread that was not awake meanwhile is not waiting
    for it.
    """
    if not _TASKS.exists():  # not Linux: nobody tells what threads do
        time.sleep(5 * _WATCHED_S)
        return
    deadline = time.monotonic() + _PATIENCE_S
    before, now = None, _threads_of_gloo()
    while now and (now != before or not _asleep(now)) and time.monotonic() < deadline:
        time.sleep(_WATCHED_S)
        before, now = now, _threads_of_gloo()


def _threads_of_gloo() -> dict[str, tuple[str, ...]]:
    """By the number of a thread that runs operations: its state, and how often it fell asleep and
    was interrupted.
    """
    found = {}
    for task in _TASKS.iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        status = dict(line.split(":", 1) for line in lines)
        if status["Name"].strip() == "pt_gloo_runloop":
            switches = (status[f"{kind}voluntary_ctxt_switches"] for kind in ("", "non"))
            found[task.name] = (status["State"], *switches)
    return found


def _asleep(threads: dict[str, tuple[str, ...]]) -> bool:
    return all(state.split()[0] == "S" for state, *_ in threads.values())
