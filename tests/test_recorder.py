"""What a run records: when, and what it cannot."""

import argparse
from pathlib import Path

import pytest
import torch

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.harness.recorder import Recorder, _counted_replays


@pytest.mark.parametrize(
    ("train_iters", "done", "recorded"),
    [(20, 0, {1, 10, 20}), (3, 0, {1, 2, 3}), (1, 0, {1}), (15, 5, {1, 5, 10}), (None, 0, {1})],
)
def test_a_recording_begins_anew(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train_iters: int | None,
    done: int,
    recorded: set[int],
) -> None:
    """By the rank's own files: others may have begun before it."""
    args = argparse.Namespace(train_iters=train_iters, iteration=done, cuda_graph_impl="none")
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    for suffix in (".jsonl", ".json", ".3.pt"):
        for rank in (1, 2, 10):
            (tmp_path / f"rank{rank:05d}{suffix}").touch()
    recorder = Recorder(tmp_path, "ring")
    recorder._begin()
    assert recorder._recorded == recorded
    assert {path.name[:9] for path in tmp_path.iterdir()} == {"rank00002", "rank00010"}


def test_reductions_that_were_captured_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With them each rank has the gradients of its part of the parameters only."""
    args = argparse.Namespace(train_iters=2, iteration=0, use_distributed_optimizer=True)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    args.cuda_graph_impl = "local"
    Recorder(tmp_path, "ring")._begin()
    args.cuda_graph_impl = "full_iteration"
    with pytest.raises(ContextParallelError, match="which a captured iteration does not give"):
        Recorder(tmp_path, "ring")._begin()


def test_the_replays_of_an_iteration_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[object] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replayed.append)
    with _counted_replays() as counted:
        torch.cuda.CUDAGraph.replay("a graph")  # type: ignore[arg-type]
    torch.cuda.CUDAGraph.replay("another")  # type: ignore[arg-type]
    assert (len(counted), replayed) == (1, ["a graph", "another"])
