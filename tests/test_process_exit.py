"""Who of many processes says a refusal, and with which codes all end."""

import json
import os
from pathlib import Path

import pytest

from megatron_cp_plugin.process_exit import for_a_reader
from tests.integration.megatron_job import run_program

RANKS = 2
# Rank 0 comes late; the ranks of argv refuse.
PROGRAM = """
import os, sys, time
from megatron_cp_plugin import process_exit
from megatron_cp_plugin.errors import ConfigError

process_exit._PATIENCE_S = float(sys.argv[1])
rank = os.environ["LOCAL_RANK"]
with process_exit.one_line_errors():
    if rank == "0":
        time.sleep(0.5)
    if rank in sys.argv[2:]:
        raise ConfigError(f"why not, says rank {rank}")
"""


def end(folder: Path, program: str, *arguments: str) -> list[tuple[int, str, str]]:
    """Exit code, stderr and error file of every rank, where torchrun has its files."""
    job = run_program(folder, "-c", program, *arguments, ranks=RANKS)
    files = [folder / str(rank) / "error.json" for rank in range(RANKS)]
    texts = [file.read_text() if file.exists() else "" for file in files]
    return [(p.returncode, p.stderr, t) for p, t in zip(job.processes, texts, strict=True)]


def test_one_rank_speaks_for_all_that_refuse(tmp_path: Path) -> None:
    found = end(tmp_path, PROGRAM, "60", "0", "1")
    assert [(code, error) for code, error, _ in found] == [(2, ""), (0, "")]
    assert json.loads(found[0][2])["message"]["message"] == (
        "megatron_cp_plugin: error: why not, says rank 0"
    )
    assert [text for _, _, text in found[1:]] == [""]


def test_a_rank_that_refuses_alone_speaks_for_itself(tmp_path: Path) -> None:
    found = end(tmp_path, PROGRAM, "0.1", "1")
    assert [(code, error) for code, error, _ in found] == [(0, ""), (2, "")]
    assert "says rank 1" in found[1][2]


FUNCTIONAL = """
import torch
import torch.distributed as dist
import megatron_cp_plugin as cp

def main():
    dist.init_process_group("gloo")
    x = torch.randn(1, 8, 2, 4)
    cp.Context(algo="ring", seq_len=8).attention(x, x, x)

with cp.one_line_errors():
    main()
"""


def test_a_program_on_the_functional_interface_refuses_in_one_line(tmp_path: Path) -> None:
    """And says where; a traceback of each rank would be twenty times as much."""
    program = tmp_path / "example.py"
    program.write_text(FUNCTIONAL)
    found = end(tmp_path, f"import runpy; runpy.run_path({str(program)!r})")
    assert [(code, error) for code, error, _ in found] == [(2, ""), (0, "")]
    assert json.loads(found[0][2])["message"]["message"] == (
        "megatron_cp_plugin: error: rank 0 of 2 holds 4 of 8 tokens (contiguous layout), got 8: "
        "shard with cp.shard (example.py, line 9)"
    )


def test_a_second_interrupt_changes_nothing(tmp_path: Path) -> None:
    """torchrun gets the terminal's signal too, and sends it to its ranks."""
    program = """
import signal, sys
from megatron_cp_plugin.process_exit import whole_program

class Interrupted:
    def write(self, text):
        signal.raise_signal(signal.SIGINT)
        sys.__stderr__.write(text)

    def flush(self):
        sys.__stderr__.flush()

sys.stderr = Interrupted()
with whole_program():
    raise KeyboardInterrupt
"""
    found = end(tmp_path, program)
    assert found == [(130, "megatron_cp_plugin: interrupted\n", ""), (130, "", "")]


@pytest.mark.parametrize("ends", [False, True])
def test_whoever_reads_may_have_enough(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        with for_a_reader():
            print("a line", file=pipe)
            if ends:  # as argparse does after its help
                raise SystemExit(0)
        print("another one", file=pipe, flush=True)


def test_the_loss_of_a_rank_is_one_line(tmp_path: Path) -> None:
    """With another exit code than a refusal has: a job may start again."""
    program = """
from megatron_cp_plugin.errors import CommunicationError
from megatron_cp_plugin.process_exit import one_line_errors
with one_line_errors():
    raise CommunicationError("rank 0 of 2 lost the others")
"""
    for code, error, text in end(tmp_path, program):
        assert (code, text) == (1, "")
        assert error == "megatron_cp_plugin: error: rank 0 of 2 lost the others\n"
