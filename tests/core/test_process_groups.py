"""How long a process that ends waits for threads of gloo, by what the system says of them."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_cp_plugin.core.communication import process_groups

# The name of a thread, its state, and how often it fell asleep.
Thread = tuple[str, str, int]
LOOP = "pt_gloo_runloop"
ASLEEP, AWAKE, BLOCKED = (LOOP, "S", 1), (LOOP, "R", 1), (LOOP, "D", 1)
SLEPT_AGAIN = (LOOP, "S", 2)
OTHER = ("python", "R", 1)


@pytest.mark.parametrize(
    ("seen", "sleeps"),
    [
        ([()], 0),
        ([(OTHER,)], 0),  # no thread of gloo
        ([(ASLEEP,)], 1),  # it may have run before
        ([(ASLEEP, OTHER)], 1),
        ([(AWAKE,), (AWAKE,), (ASLEEP,)], 3),
        ([(ASLEEP,), (SLEPT_AGAIN,)], 2),  # it was awake in between
        ([(ASLEEP, AWAKE), (ASLEEP, AWAKE), (ASLEEP, ASLEEP)], 3),  # one of two works
        ([(BLOCKED,), (BLOCKED,), ()], 2),
        ([(AWAKE,)], 5),  # and never ends: no longer than the patience
    ],
)
def test_a_process_waits_until_all_threads_of_gloo_have_slept(
    seen: list[tuple[Thread, ...]],
    sleeps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Args: seen: threads before each sleep, the last ones for ever."""
    tasks, slept = tmp_path / "task", list[float]()

    def show() -> None:
        shutil.rmtree(tasks, ignore_errors=True)
        (tasks / "0").mkdir(parents=True)  # a thread that has ended meanwhile has no status
        for number, (name, state, times) in enumerate(seen[min(len(slept), len(seen) - 1)], 1):
            (tasks / str(number)).mkdir()
            status = f"Name:\t{name}\nState:\t{state} (so)\nvoluntary_ctxt_switches:\t{times}\n"
            status += "nonvoluntary_ctxt_switches:\t0\n"
            (tasks / str(number) / "status").write_text(status)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert len(slept) < 9
        show()

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: float(len(slept)))
    monkeypatch.setattr(process_groups, "_TASKS", tasks)
    monkeypatch.setattr(process_groups, "time", clock)
    show()
    process_groups._wait_for_gloo()
    assert len(slept) == sleeps
