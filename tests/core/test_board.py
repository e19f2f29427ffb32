"""Ranks of one machine show each other numbers in memory: each sees those of this call."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from megatron_cp_plugin.core.communication import board
from megatron_cp_plugin.core.communication.board import Board, shared_board


def run_ranks(
    folder: Path, size: int, body: Callable[[Board, int], None], seconds: float = 30
) -> list[int | None]:
    """Exit codes of processes that share a board, by rank."""
    path = folder / "board"
    path.write_bytes(bytes(2 * size * 4 * 8))
    fork = multiprocessing.get_context("fork")
    opened = fork.Barrier(size)

    def run(rank: int) -> None:
        mine = Board(path, rank, size, seconds)
        opened.wait(30)
        body(mine, rank)

    processes = [fork.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    return [process.exitcode for process in processes]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_see_the_numbers_of_each_call(tmp_path: Path, size: int) -> None:
    def body(mine: Board, rank: int) -> None:
        random = Random(rank)
        for call in range(500):
            if random.random() < 0.02:
                time.sleep(random.random() * 0.01)
            found = mine.compare(-1 if call % 7 == rank else call, (call << 40) + rank)
            assert found == [
                (-1 if call % 7 == other else call, (call << 40) + other) for other in range(size)
            ]

    assert run_ranks(tmp_path, size, body) == [0] * size


def test_a_rank_that_waits_shortly_does_not_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's shortest sleep takes as long as two kernels' launches."""

    class Clock:
        monotonic = staticmethod(time.monotonic)

    monkeypatch.setattr(board, "_YIELDS", 60)
    monkeypatch.setattr(board, "time", Clock)

    def body(mine: Board, rank: int) -> None:
        time.sleep(0.01 * rank)
        mine.compare(1, rank)

    assert run_ranks(tmp_path, 2, body) == [0, 0]


def test_a_rank_whose_process_ends_is_missed_at_once(tmp_path: Path) -> None:
    def body(mine: Board, rank: int) -> None:
        mine.compare(1, 0)
        if rank == 2:
            time.sleep(0.2)
            os._exit(3)
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="the process of rank 2 has ended"):
            mine.compare(2, 0)
        assert time.monotonic() - begun < 20

    assert run_ranks(tmp_path, 3, body) == [0, 0, 3]


def test_numbers_of_a_rank_that_has_ended_since_are_seen(tmp_path: Path) -> None:
    def body(mine: Board, rank: int) -> None:
        time.sleep(0.5 * rank)
        assert mine.compare(7, rank) == [(7, 0), (7, 1)]
        if rank == 0:
            time.sleep(0.5)

    assert run_ranks(tmp_path, 2, body) == [0, 0]


def test_a_rank_that_does_not_come_is_waited_for_so_long(tmp_path: Path) -> None:
    def body(mine: Board, rank: int) -> None:
        if rank:
            time.sleep(1)
            return
        with pytest.raises(RuntimeError, match="rank 1 did not come in 0 s"):
            mine.compare(1, 0)

    assert run_ranks(tmp_path, 2, body, seconds=0.2) == [0, 0]


def test_hosts_without_shared_memory_have_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_FOLDER", Path("/nowhere"))
    assert shared_board(0, 1, 30, lambda mine: [mine]) is None
    monkeypatch.undo()
    assert shared_board(0, 2, 30, lambda mine: [mine, False if mine is True else mine]) is None
    alone = shared_board(0, 1, 30, lambda mine: [mine])
    assert alone is not None
    assert alone.compare(3, 4) == [(3, 4)]
    assert not list(board._FOLDER.glob("megatron_cp_plugin-*"))
