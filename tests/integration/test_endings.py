"""How processes end: with the code that they deserve, whatever threads of gloo still do."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_cp_plugin.registry import available
from tests.integration.megatron_job import Process, run, run_program

ON_LINUX = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="threads are told apart as on Linux"
)

# Both ranks of a gloo group in one process. Once the all-gather is posted the main thread keeps the
# GIL until Python is finalized, while gloo's threads wait for it to let go of the tensors. In a
# real job that happens by chance. The handler is registered first, so that it runs last.
ALL_GATHER_AT_THE_END = """
import atexit

def all_gather():
    sys.setswitchinterval(1000)
    for group in groups.values():
        group.allgather([[torch.empty(1 << 20) for _ in (0, 1)]], [torch.ones(1 << 20)])
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass

atexit.register(all_gather)

import sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron_cp_plugin.integration import launch

store, groups = dist.HashStore(), {}

def join(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
launch.main()
"""

# A process group lives to the end, and a thread of gloo waits for the GIL, to let go of the tensors
# of its last operation, when Python is finalized. In a real job that happens by chance. Here rank 1
# comes to the operation when rank 0 gives the GIL away no more, until it is finalized.
FORGETFUL = """
import atexit, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import megatron_cp_plugin as cp

dist.init_process_group("gloo")
handled = []
atexit._clear()  # some of these handlers, and all output, give the GIL away
atexit.register(handled.append, "first")
x = cp.shard(torch.ones(1, 8, 2, 8), 1, algo="zigzag").requires_grad_()
out = cp.attention(x, x, x, algo="zigzag")
ones, posted = torch.ones(4), Path(sys.argv[1], "posted")
seen = ones.numpy()

def all_reduce():
    handled.append("last")
    sys.setswitchinterval(1000)
    if dist.get_rank() == 1:
        while not posted.exists():
            time.sleep(0.01)
        time.sleep(0.5)
    dist.all_reduce(ones, async_op=True)
    posted.touch()
    end = time.monotonic() + 60
    while min(seen) < 2 and time.monotonic() < end:
        pass
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass

class Global:
    def __del__(self, print=print, handled=handled, sleep=time.sleep):
        print(*handled)
        sleep(1)

atexit.register(all_reduce)
kept = Global()
sys.exit(3)
"""

# What is printed is buffered, for it goes to a file. Each process, without torchrun, ends its own
# way: that of its rank among its arguments.
PROGRAM = """
import atexit, os, sys, threading, time
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.process_exit import whole_program

def work():
    time.sleep(0.5)
    print("thread ends")

class Held:
    def __del__(self):
        print("finalized")

sys.held = Held()  # as modules of Megatron hold process groups
del os.environ["TORCHELASTIC_ERROR_FILE"]
with whole_program():
    atexit.register(print, "handler runs")
    threading.Thread(target=work).start()
    exec(sys.argv[1 + int(os.environ["RANK"])])
"""

# Runs a job in this process and prints which threads of gloo it left.
NAME_THREADS = """
import runpy, sys
from pathlib import Path

sys.argv = sys.argv[1:]
kept = runpy.run_path(sys.argv[0], run_name="__main__")
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print(*(name for name in names if "gloo" in name))
"""


@pytest.mark.slow
def test_a_job_ends_with_0_while_gloo_lets_go_of_tensors(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    program = ("-c", ALL_GATHER_AT_THE_END, str(script))
    run("--cp-platform", "cpu", program=program).succeeded()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="Python ends the process there")
def test_an_end_has_its_code_and_its_last_words(tmp_path: Path) -> None:
    endings = {
        "pass": (0, ""),
        "sys.exit(3)": (3, ""),
        "sys.exit('why')": (1, "why\n"),
        "raise ConfigError('why')": (2, "megatron_cp_plugin: error: why\n"),
    }
    job = run_program(
        tmp_path, "-c", PROGRAM, *endings, "raise ValueError('why')", ranks=len(endings) + 1
    )
    *ended, failed = job.processes
    assert failed.returncode == 1
    assert failed.stderr.endswith("ValueError: why\n")
    found = dict(zip(endings, ended, strict=True))
    said = "thread ends\nhandler runs\n"
    assert found == {last: Process(code, said, error) for last, (code, error) in endings.items()}


@ON_LINUX
@pytest.mark.parametrize(
    ("algos", "left"),
    # Lasp waits for its last message at its next call, which an output holds.
    [(available("softmax"), ("",)), (("lasp",), ("", "gloo_tcp_loop"))],
)
def test_no_thread_of_gloo_that_could_abort_is_left(
    tmp_path: Path, algos: Sequence[str], left: Sequence[str]
) -> None:
    """Though the program keeps an output, and what its gradient would need, to the end."""
    script = Path(__file__).parent / "functional_job.py"
    job = run_program(tmp_path, "-c", NAME_THREADS, str(script), *algos, ranks=2).succeeded()
    for process in job.processes:
        assert process.stdout.splitlines()[-1] in left


@ON_LINUX
def test_a_program_that_forgets_to_release_ends_with_its_code(tmp_path: Path) -> None:
    job = run(str(tmp_path), program=("-c", FORGETFUL), ranks=2)
    assert [process.returncode for process in job.processes] == [3, 3], job.text
    assert [process.stdout for process in job.processes] == ["last first\n"] * 2
