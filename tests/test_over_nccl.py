"""Ranks on GPUs compare every call by their hosts, which wait for no GPU.

Two ranks on two GPUs, or on one as two nodes: pytest -m gpu tests/test_over_nccl.py
"""

import faulthandler
import json
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import pytest
import torch
import torch.distributed as dist

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.communication.devices import capture
from megatron_cp_plugin.core.communication.process_groups import topology_of
from megatron_cp_plugin.process_exit import whole_program
from tests.integration import steps_job
from tests.integration.megatron_job import Job, run
from tests.oracle import Expected, expected_attention, relative_error
from tests.peer_world import share_gpu

# A job that hangs ends by itself, and says where.
LIMIT_S = 150
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(LIMIT_S + 60)]


def found_by(job: Job) -> list[dict]:
    """What each rank of a job saw."""
    lines = [p.stdout.split("FOUND")[-1].splitlines()[0] for p in job.succeeded().processes]
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    """What each rank saw."""
    return found_by(run(program=(__file__,), ranks=2, nodes=torch.cuda.device_count() < 2))


def test_calls_are_right(ranks: list[dict]) -> None:
    for found in ranks:
        assert max(found["errors"].values()) < 1e-2


@pytest.mark.parametrize("way", steps_job.CASES)
def test_what_differs_in_any_step_is_refused_on_all_ranks(ranks: list[dict], way: str) -> None:
    for name in steps_job.CASES[way]:
        for step in steps_job.STEPS:
            said = [rank[way][name][str(step)] for rank in ranks]
            assert steps_job.refused_together(*said), (name, step, said)


def test_a_comparison_does_not_wait_for_what_is_queued(ranks: list[dict]) -> None:
    assert [found["waits"] for found in ranks] == [False, False]


def test_calls_are_compared_while_a_graph_is_captured(ranks: list[dict]) -> None:
    for found in ranks:
        assert found["captured"]["error"] < 1e-2
        assert found["captured"]["refused"].startswith("all ranks need one scale, got None on ran")


def test_ranks_of_two_groups_share_memory_in_both() -> None:
    job = run("two groups", program=(__file__,), ranks=3, nodes=True)
    assert [max(found["errors"]) < 1e-2 for found in found_by(job)] == [True] * 3


def of_two_groups() -> list[float]:
    """Errors of algorithms on ranks of which the first is in two groups, and then on all."""
    members = [0, 1], [0, 2], [0, 1, 2]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = [group for ranks, group in zip(members, groups, strict=True) if dist.get_rank() in ranks]
    expected = expected_attention(seq_len=768, head_dim=64, causal=True, dtype=torch.bfloat16)
    algos = "zigzag", "attention2d", "distflash"
    return [error_of(algo, expected, group) for algo in algos for group in mine]


def errors() -> dict[str, float]:
    """Of every algorithm."""
    expected = expected_attention(seq_len=512, head_dim=64, causal=True, dtype=torch.bfloat16)
    return {algo: error_of(algo, expected) for algo in cp.available("softmax")}


def error_of(algo: str, expected: Expected, group: dist.ProcessGroup | None = None) -> float:
    tensors = expected.q, expected.k, expected.v
    q, k, v = (cp.shard(x.cuda(), 1, algo=algo, group=group) for x in tensors)
    for number in range(4):
        cp.attention(q, k, v, algo=algo, group=group, causal=number % 2 == 0)
    out = cp.attention(q, k, v, algo=algo, group=group)
    out = cp.unshard(out, 1, algo=algo, group=group)
    return relative_error(out.cpu(), expected.out)


def waits() -> bool:
    """Whether a comparison waits for what is queued on the GPU."""
    topology = topology_of(dist.new_group())
    for _ in range(2):
        topology.numbers((7, 0))
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * 10**9)  # seconds
    queued = torch.cuda.Event()
    queued.record()
    topology.numbers((7, 0))
    return queued.query()


def captured() -> dict[str, object]:
    """What replays are off by, and what is said of another call on a rank during a capture."""
    x = cp.shard(torch.randn(1, 512, 4, 64, device="cuda").bfloat16(), 1, algo="zigzag")
    meet = torch.cuda.synchronize
    graph, out = capture(lambda: cp.attention(x, x, x, algo="zigzag"), meet)
    graph.replay()
    want = cp.attention(x, x, x, algo="zigzag")
    error = relative_error(out.cpu(), want.cpu())
    scale = 0.5 if dist.get_rank() else None
    cp.attention(x, x, x, algo="zigzag", scale=0.5)
    other = partial(cp.attention, x, x, x, algo="zigzag", scale=scale)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        said = steps_job.said_by(other)
    return {"error": error, "refused": said}


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    two_groups = sys.argv[1:] == ["two groups"]
    if two_groups:
        share_gpu(3)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=30))
    found: dict[str, object]
    if two_groups:
        found = {"errors": of_two_groups()}
    else:
        found = {"errors": errors(), "waits": waits(), "captured": captured()}
        found |= steps_job.of_ways(device)
    dist.barrier()
    print("FOUND" + json.dumps(found), flush=True)


if __name__ == "__main__":
    with whole_program():
        main()
