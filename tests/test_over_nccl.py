"""Ranks on GPUs compare calls and batches on a stream of its own, while other work goes on.

Two ranks on one GPU, as two nodes: pytest -m gpu tests/test_over_nccl.py
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import pytest
import torch
import torch.distributed as dist

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.agree import COMPARED_TOGETHER, same_on_all_ranks
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.batch import Batches
from megatron_cp_plugin.integration.inputs import SplitInputs
from tests.integration.megatron_job import run
from tests.integration.test_batch import KEYS, Trained, runtime, train_on
from tests.oracle import expected_attention, relative_error

pytestmark = pytest.mark.gpu
NUMBERS = (1, 2, 3, 40)  # of the batch that is another one on a rank
AT = (0, 15, 16)  # of the call, among known ones


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    """What each rank of the job saw."""
    processes = run(program=(__file__,), ranks=2, nodes=True).succeeded().processes
    return [json.loads(process.stdout.splitlines()[-1]) for process in processes]


def test_known_calls_are_right(ranks: list[dict]) -> None:
    for found in ranks:
        assert max(found["errors"].values()) < 1e-2


def test_a_new_call_that_is_another_one_on_a_rank(ranks: list[dict]) -> None:
    for found in ranks:
        assert found["new"] == (
            "all ranks need one causal, got True on rank 0 and False on rank 1: make the same call "
            "on all"
        )


@pytest.mark.parametrize("at", [str(at) for at in AT])
def test_known_calls_that_are_others_on_a_rank(ranks: list[dict], at: str) -> None:
    """Found by both ranks at one call."""
    assert ranks[0]["known"][at] == ranks[1]["known"][at]
    later, said = ranks[0]["known"][at]
    assert 0 < later < 2 * COMPARED_TOGETHER
    assert said.startswith("all ranks need the same calls of attention, linear_attention and unsh")


@pytest.mark.parametrize("number", [str(number) for number in NUMBERS])
def test_a_batch_of_other_samples_on_a_rank(ranks: list[dict], number: str) -> None:
    """Refused on both ranks, before its loss is computed."""
    for found in ranks:
        passed, said = found["batches"][number]
        assert passed == int(number) - 1
        assert said.startswith("ranks of a context-parallel group need the same whole samples")
        other = "other labels on rank 1 than on rank 0" if number == "1" else f"in batch {number} "
        assert other in said


def test_a_comparison_does_not_wait_for_what_is_queued_since(ranks: list[dict]) -> None:
    for found in ranks:
        same, waited, queued = found["waited"]
        assert same
        assert waited < 0.2 * queued


def errors() -> dict[str, float]:
    """Of every algorithm in calls of two settings, which are known from the third call on."""
    expected = expected_attention(
        seq_len=512, heads=4, kv_heads=2, head_dim=64, causal=True, dtype=torch.bfloat16
    )
    found = {}
    for algo in cp.available("softmax"):
        q, k, v = (cp.shard(x.cuda(), 1, algo=algo) for x in (expected.q, expected.k, expected.v))
        for number in range(2 * COMPARED_TOGETHER + 2):
            cp.attention(q, k, v, algo=algo, causal=number % 2 == 0)
        out = cp.unshard(cp.attention(q, k, v, algo=algo), 1, algo=algo)
        found[algo] = relative_error(out.cpu(), expected.out)
    return found


def attend(**settings) -> str | None:
    x = torch.ones(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16)
    try:
        cp.attention(x, x, x, algo="zigzag", **settings)
    except ContextParallelError as error:
        return str(error)
    return None


def known(at: int) -> tuple[int, str | None] | None:
    """How many calls after another one on rank 1 it was found, and what was said."""
    group = dist.new_group()
    for scale in (0.5, 0.25):
        attend(scale=scale, group=group)
    for number in range(at + 2 * COMPARED_TOGETHER + 1):
        scale = 0.25 if number == at and dist.get_rank() else 0.5
        if said := attend(scale=scale, group=group):
            return number - at, said
    return None


def batches(number: int) -> tuple[int, str]:
    """How many forward passes came to their ends, and what was said then."""
    group, made, model = dist.new_group(), Batches(runtime("contiguous")), Trained()
    SplitInputs(model, made, group)
    whole = {name: torch.arange(64.0, device="cuda")[None] for name in KEYS}
    for _ in range(number - 1):
        train_on(made, model, group, dict(whole))
    if dist.get_rank():
        whole["labels"] = whole["labels"].flip(1)
    try:
        train_on(made, model, group, whole)
    except ContextParallelError as error:
        return model.passed, str(error)
    return model.passed, ""


def waited() -> tuple[bool, float, float]:
    """Whether numbers are the same, and seconds for the answer, and of what was queued since."""
    group, numbers = dist.new_group(), torch.tensor([7], device="cuda")
    for _ in range(2):
        assert same_on_all_ranks(numbers, group)()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    same = same_on_all_ranks(numbers, group)
    started = time.perf_counter()
    torch.cuda._sleep(2 * 10**9)
    answer = same()
    answered = time.perf_counter()
    torch.cuda.synchronize()
    return answer, answered - started, time.perf_counter() - started


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    found = {
        "errors": errors(),
        "waited": waited(),
        "new": attend(causal=dist.get_rank() == 0, group=dist.new_group()),
        "known": {at: known(at) for at in AT},
        "batches": {number: batches(number) for number in NUMBERS},
    }
    dist.barrier()
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    cp.release()


if __name__ == "__main__":
    main()
