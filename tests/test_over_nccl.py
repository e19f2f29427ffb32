"""Ranks on GPUs compare every call by their hosts, which wait for no GPU.

Two ranks on two GPUs, or on one as two nodes: pytest -m gpu tests/test_over_nccl.py. On two GPUs
also what comparisons cost: pytest -m gpu -s tests/test_over_nccl.py -k cost
"""

import faulthandler
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.agree import SameCall
from megatron_cp_plugin.core.communication.devices import capture
from megatron_cp_plugin.core.communication.process_groups import topology_of
from megatron_cp_plugin.process_exit import whole_program
from tests.integration import steps_job
from tests.integration.megatron_job import Job, run
from tests.oracle import expected_attention, relative_error

# A job that hangs ends by itself, and says where.
LIMIT_S = 150
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(LIMIT_S + 60)]
# Tokens of a rank; of steps with them the number between two looks at the clock, and how often with
# and without comparisons.
SIZES = {2048: (20, 9), 8192: (10, 9), 65536: (2, 3)}
LAYERS, HEADS, HEAD_DIM = 4, 16, 128


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


CASES = {"functional": tuple(steps_job.FUNCTIONAL)} | steps_job.CASES


@pytest.mark.parametrize("way", CASES)
def test_what_differs_in_any_step_is_refused_on_all_ranks(ranks: list[dict], way: str) -> None:
    for name in CASES[way]:
        for step in steps_job.STEPS:
            said = [rank[way][name][str(step)] for rank in ranks]
            assert steps_job.refused_together(*said), (name, step, said)


def test_a_comparison_does_not_wait_for_what_is_queued(ranks: list[dict]) -> None:
    assert [found["waits"] for found in ranks] == [False, False]


def test_calls_are_compared_while_a_graph_is_captured(ranks: list[dict]) -> None:
    for found in ranks:
        assert found["captured"]["error"] < 1e-2
        assert found["captured"]["refused"].startswith("all ranks need one scale, got None on ran")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_what_comparisons_cost() -> None:
    """Prints what steps of 4 layers take with comparisons, as a multiple of the time without."""
    found = found_by(run(program=(__file__, "cost"), ranks=2))[0]
    print(json.dumps(found, indent=1))
    for way, (_, comparisons) in found.items():
        assert comparisons == (LAYERS if way.startswith("eager") else 0)


def errors() -> dict[str, float]:
    """Of every algorithm."""
    expected = expected_attention(
        seq_len=512, heads=4, kv_heads=2, head_dim=64, causal=True, dtype=torch.bfloat16
    )
    found = {}
    for algo in cp.available("softmax"):
        q, k, v = (cp.shard(x.cuda(), 1, algo=algo) for x in (expected.q, expected.k, expected.v))
        for number in range(4):
            cp.attention(q, k, v, algo=algo, causal=number % 2 == 0)
        out = cp.unshard(cp.attention(q, k, v, algo=algo), 1, algo=algo)
        found[algo] = relative_error(out.cpu(), expected.out)
    return found


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


class Layers(nn.Module):
    """Attention and MLPs of a model of hidden size 2048."""

    def __init__(self) -> None:
        super().__init__()
        hidden = HEADS * HEAD_DIM
        self.qkv = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(hidden, 4 * hidden) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(4 * hidden, hidden) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, context: cp.Context) -> torch.Tensor:
        for qkv, up, down in zip(self.qkv, self.up, self.down, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
            x = x + context.attention(q, k, v).flatten(2)
            x = x + down(nn.functional.gelu(up(x)))
        return x


def seconds(step: Callable[[], object], times: int) -> float:
    """The mean of some steps, between two moments at which all GPUs are idle."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times


def cost() -> dict[str, tuple[float, int]]:
    """Of each way to make a step: the median ratio of times with and without comparisons, and the
    number of comparisons in a step.
    """
    found = {}
    topology, model = topology_of(None), Layers().cuda().bfloat16()
    for tokens, (times, pairs) in SIZES.items():
        context = cp.Context(algo="zigzag", seq_len=2 * tokens)
        x = torch.randn(1, tokens, HEADS * HEAD_DIM, device="cuda").bfloat16()

        def step(x: torch.Tensor = x, context: cp.Context = context) -> None:
            for parameter in model.parameters():
                parameter.grad = None
            model(x, context).sum().backward()

        for _ in range(3):
            step()
        ways: dict[str, Callable[[], object]] = {"eager": step}
        if tokens <= 8192:
            graph, _ = capture(step, dist.barrier)
            ways["captured"] = graph.replay
        for way, run_step in ways.items():
            before, ratios = topology.calls, []
            run_step()
            comparisons = topology.calls - before
            for _ in range(pairs):
                with_them = seconds(run_step, times)
                with patch.object(SameCall, "_compare", lambda self, error: None):
                    ratios.append(with_them / seconds(run_step, times))
            found[f"{way}, {tokens}"] = statistics.median(ratios), comparisons
    return found


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=30))
    if sys.argv[1:] == ["cost"]:
        found: dict[str, object] = {**cost()}
    else:
        found = {"errors": errors(), "waits": waits(), "captured": captured()}
        found |= {"functional": steps_job.of_functions()} | steps_job.of_ways(device)
    dist.barrier()
    print("FOUND" + json.dumps(found), flush=True)


if __name__ == "__main__":
    with whole_program():
        main()
