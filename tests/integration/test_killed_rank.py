"""A rank that is killed in mid-training ends the others, at once and with a reason."""

import os
import re
import signal
import subprocess
import sys
import time

from tests.integration.megatron_job import SCRIPT, TINY, free_port, process_environment

FIRST_STEPS = re.compile(r"iteration +5/")


def test_the_others_end_with_an_error(tmp_path):
    flags = (*TINY, "--train-iters", "100000", "--context-parallel-size", "2")
    command = [sys.executable, str(SCRIPT), *flags, "--context-parallel-algo", "zigzag"]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as output:
                ranks.append(
                    subprocess.Popen(
                        command,
                        env=process_environment() | common | place,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        deadline = time.monotonic() + 120
        while not any(FIRST_STEPS.search(log.read_text()) for log in logs):
            assert time.monotonic() < deadline, logs[0].read_text()[-3000:]
            assert all(rank.poll() is None for rank in ranks), logs[0].read_text()[-3000:]
            time.sleep(0.1)
        os.kill(ranks[1].pid, signal.SIGKILL)
        code = ranks[0].wait(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert code == 1
    # Megatron's own collectives may be the first to notice.
    assert re.search(r"lost the others|Connection (reset|closed)", logs[0].read_text())
