"""How processes end: with the code that they deserve, whatever threads of gloo still do."""

from pathlib import Path

import pytest
import torch

from megatron_cp_plugin.registry import available
from tests.integration.megatron_job import Process, run, run_program

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

# What is printed is buffered, for it goes to a file. Each process, without torchrun, ends its own
# way: that of its rank among its arguments.
PROGRAM = """
import atexit, os, sys, threading, time
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.ending import whole_program

def work():
    time.sleep(0.5)
    print("thread ends")

del os.environ["TORCHELASTIC_ERROR_FILE"]
with whole_program():
    atexit.register(print, "handler runs")
    threading.Thread(target=work).start()
    exec(sys.argv[1 + int(os.environ["RANK"])])
"""

# Runs a job in this process and prints how many threads of gloo it left.
COUNT_THREADS = """
import runpy, sys
from pathlib import Path

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
print(sum("gloo" in name for name in names), "threads of gloo")
"""


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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux does")
def test_the_functional_interface_leaves_no_thread_of_gloo(tmp_path: Path) -> None:
    script = Path(__file__).parent / "functional_job.py"
    words = "-c", COUNT_THREADS, str(script), *available("softmax")
    job = run_program(tmp_path, *words, ranks=2).succeeded()
    last = [process.stdout.splitlines()[-1] for process in job.processes]
    assert last == ["0 threads of gloo"] * 2
