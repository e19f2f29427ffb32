"""What programs wrap around calls of the functional interface: data parallelism, checkpoints."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megatron_cp_plugin as cp
from megatron_cp_plugin import errors
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.tiles import Mask
from tests.integration.megatron_job import run_warm
from tests.peer_world import run_virtual

JOB = Path(__file__).with_name("wrappers_job.py")


def found_by_ranks(folder, *words, ranks):
    job = run_warm(folder, *words, ranks=ranks, script=JOB)
    found = (p.stdout.partition("FOUND")[2] for p in job.processes)
    return [json.loads(text.splitlines()[0]) for text in found if text]


@pytest.mark.slow
def test_data_parallelism_and_compilation_around_a_model(tmp_path):
    """DDP, FSDP2 and torch.compile, on two replicas of two context-parallel ranks."""
    results = found_by_ranks(tmp_path, "wrapped", ranks=4)
    assert len(results) == 4
    for found in results:
        cases = {f"{algo}, {way}" for algo in cp.available("softmax") for way in ("ddp", "fsdp")}
        assert found.keys() == cases | {"zigzag, compiled"}
        for case, off in found.items():
            assert off <= 1e-12, case


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_or_put_to_sleep_is_missed(tmp_path, how):
    results = found_by_ranks(tmp_path, "lost", how, ranks=3)
    assert len(results) == 2
    for rank, said in zip((0, 2), results, strict=True):
        for line in said.values():
            assert line.startswith(f"rank {rank} of 3 lost the others ")
            assert "\n" not in line
        assert " on channel '" in said["backward"]
        assert "in a comparison; has one of them died?" in said["forward"]
        assert "ranks were to compare their call, attention with algo 'zigzag', " in said["forward"]


def call(algo, x, topology):
    if algo in cp.available("linear"):
        return cp.linear_attention(x, x * 2, x + 1, algo=algo, group=topology, decay=0.9)
    return cp.attention(x, x * 2, x + 1, algo=algo, group=topology)


def whole():
    generator = torch.Generator().manual_seed(0)  # of its own: ranks are threads
    return torch.randn(2, 24, 6, 4, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("algo", cp.available())
def test_gradient_checkpointing(algo, use_reentrant):
    def body(topology, recomputed):
        own = cp.shard(whole(), 1, algo=algo, group=topology).requires_grad_()
        if recomputed:
            out = checkpoint(call, algo, own, topology, use_reentrant=use_reentrant)
        else:
            out = call(algo, own, topology)
        out.square().sum().backward()
        return out.detach(), own.grad

    want = run_virtual(3, lambda topology: body(topology, False))
    got = run_virtual(3, lambda topology: body(topology, True))
    for one, other in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


SPANS = cp.spans.shared_prefix((4, [3, 5]))
KEPT = {
    "spans": SPANS,
    "slices": Slices.of(SPANS, 12),
    "mask": Mask.of(Slices.of(SPANS, 12)),
    "configuration": ContextParallelConfig("zigzag", 2, options=(("chunks", 2),)),
    "log": cp.record_communication().__enter__(),
    **{
        name: getattr(errors, name)("one line")
        for name in ("ConfigError", "KernelUnavailableError", "CommunicationError")
    },
}


@pytest.mark.parametrize("name", KEPT)
def test_what_users_keep_can_be_copied_and_pickled(name):
    kept = KEPT[name]
    for other in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert type(other) is type(kept)
        if isinstance(kept, Exception):
            assert str(other) == str(kept)
        else:
            assert other == kept
            assert repr(other) == repr(kept)
    if isinstance(kept, Slices):
        assert hash(copy.deepcopy(kept)) == hash(kept)
