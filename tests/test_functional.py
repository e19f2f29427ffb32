"""The functional interface: what the ranks hold, and what a call must not do beside its work."""

import gc
import json
import re
import weakref
from pathlib import Path

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.layout import LAYOUTS, positions
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.registry import create
from tests.integration.megatron_job import run_warm
from tests.peer_world import run_virtual
from tests.plan_check import traffic_of

JOB = Path(__file__).parent / "functional_job.py"
README = Path(__file__).parents[1] / "README.md"
RANKS = 4


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What each rank of the job saw."""
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
        if "cp.Context" in block
    ]
    file = tmp_path_factory.mktemp("readme") / "example.py"
    file.write_text(code)
    job = run_warm(file.parent, str(file), ranks=RANKS, script=JOB)
    processes = job.succeeded().processes
    return [json.loads(process.stdout.splitlines()[-1]) for process in processes]


def test_the_readme_s_snippet_splits(job):
    shape = Shape(1, 512, 8, 8, 64, element_bytes=4)
    for rank, found in enumerate(job):
        zigzag = create("zigzag", VirtualWorld(RANKS).topology(rank), {})
        sent = traffic_of(zigzag, shape, Mask(), rank)
        expected = f"(1, 128, 8, 64) {sent.backward_bytes} {sent.backward_messages}\n"
        assert found["snippet"]["printed"] == expected
        assert sent.backward_bytes > 0
        assert found["snippet"]["error"] < 1e-6


def test_processes_without_a_group_are_refused(job):
    message = (
        "4 processes (WORLD_SIZE) need a process group to split a sequence, got none: call "
        "torch.distributed.init_process_group first, or pass group="
    )
    for found in job:
        assert set(found["without_a_group"].values()) == {message}


@pytest.mark.parametrize("algo", cp.available())
def test_unequal_shards_without_their_length_are_refused_on_all_ranks(job, algo):
    for found in (rank[algo] for rank in job):
        assert found["even"] == 128
        assert found["first"] == job[0][algo]["first"] == found["again"]
        assert found["first"].startswith("ranks hold unequally many tokens, got 12")
        assert found["first"].endswith(": pass seq_len=510")
    assert sorted(found[algo]["right"] for found in job) == [127, 127, 128, 128]


def test_a_rank_that_does_not_come_is_missed_within_the_timeout_of_the_group(job):
    for rank, found in enumerate(job):
        assert len(found["timeouts"]) > 2
        assert set(found["timeouts"]) == {20}
        if rank != 1:
            call, group = found["absent"]["call"], found["absent"]["group"]
            assert call.startswith(f"rank {rank} of 4 lost the others in a comparison; has one of")
            assert "compare their call, attention with algo 'zigzag', options " in call
            assert group.startswith(f"rank {rank} of 4 lost the others making a process group; has")
            assert "\n" not in call + group


@pytest.mark.parametrize("algo", ["zigzag", "ring", "lasp"])
@pytest.mark.parametrize("wrong", [[0], [2], [1, 3]], ids=str)
def test_wrong_tokens_are_named_on_all_ranks(algo, wrong):
    def body(topology):
        layout = LAYOUTS["cyclic" if topology.rank in wrong else "zigzag"]
        if algo != "zigzag" and topology.rank not in wrong:
            layout = LAYOUTS["contiguous"]
        held = positions(layout, topology.rank, RANKS, 64)
        try:
            cp.check_layout(held.expand(2, -1), algo=algo, group=topology)
        except ContextParallelError as error:
            return str(error)

    messages = run_virtual(RANKS, body)
    assert len(set(messages)) == 1
    assert f"got others on rank {wrong[0]}: token " in messages[0]
    assert f"these are the tokens of rank {wrong[0]} in the cyclic layout" in messages[0]
    assert "\n" not in messages[0]


def test_groups_that_are_no_more_are_forgotten():
    """Who calls with ever new groups does not keep all of them in memory."""
    x = torch.randn(1, 4, 2, 8)
    seen = weakref.WeakSet()
    for _ in range(300):
        topology = VirtualWorld(1).topology(0)
        seen.add(topology)
        cp.attention(x, x, x, algo="zigzag", group=topology)
        cp.linear_attention(x, x, x, algo="lasp", decay=0.5, group=topology)
    del topology
    gc.collect()
    assert len(seen) <= 256


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_attention_is_a_break_between_two_graphs(size):
    """torch.compile neither traces into the planner nor compiles anew for every length."""
    graphs = []

    def backend(module, inputs):
        graphs.append({str(n.target) for n in module.graph.nodes if n.op.startswith("call")})
        return module.forward

    def layer(x, algo, topology):
        q = cp.shard(x.mul(2), 1, algo=algo, group=topology)
        if algo == "lasp":
            return cp.linear_attention(q, q, q, algo=algo, group=topology, decay=0.5).relu()
        return cp.attention(q, q, q, algo=algo, group=topology).relu()

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend)

    def body(topology):
        for tokens in range(16, 96, 16):
            for algo in ("zigzag", "lasp"):
                x = torch.randn(1, tokens, 2, 8, requires_grad=True)
                found = []
                for function in (compiled, layer):
                    out = function(x, algo, topology)
                    found.append((out, *torch.autograd.grad(out.sum(), x)))
                assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))

    run_virtual(size, body)
    assert all(names in ({"mul"}, {"relu"}) for names in graphs)
    # For the first length, and once for all others.
    assert len(graphs) <= 8 * size


MASKS = {
    # More pieces than are copied one by one.
    "documents": {"cu_seqlens": [*range(0, 301, 7), 301, 480]},
    "spans": {"spans": cp.spans.shared_prefix((9, [11, 5, (8, [4] * 109), 11]))},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("algo", [*cp.available(), "documents"])
def test_another_default_device(algo, mask):
    """Host tensors stay on the host where `torch.set_default_device` names a GPU, or here none."""
    settings = {"algo": algo, **MASKS[mask]}
    if algo == "documents":
        settings |= {"algo": "zigzag", "layout": "documents"}
    if algo in cp.available("linear"):
        if mask == "spans":
            return
        settings["decay"] = 0.9
    layout = {name: value for name, value in settings.items() if name != "decay"}
    x = torch.randn(1, 480, 2, 8, dtype=torch.float64)

    def body(topology, device):
        with torch.device(device):
            held = cp.shard(torch.arange(480, device="cpu"), 0, group=topology, **layout)
            cp.check_layout(held, group=topology, **layout)
            own = cp.shard(x, 1, group=topology, **layout).requires_grad_()
            attention = cp.linear_attention if "decay" in settings else cp.attention
            out = attention(own, own, own, group=topology, **settings)
            return out.detach(), *torch.autograd.grad(out.square().sum(), own)

    # First of all: what a call has made is kept for others.
    got = run_virtual(3, lambda topology: body(topology, "meta"), peer_access=True)
    want = run_virtual(3, lambda topology: body(topology, "cpu"))
    for one, other in zip(got, want, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
