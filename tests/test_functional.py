"""The functional interface: what the ranks hold, and what a call must not do beside its work."""

import json
import re
from pathlib import Path

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.algorithm import Shape
from megatron_cp_plugin.core.layout import LAYOUTS, positions
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.virtual import VirtualTopology, VirtualWorld, run_virtual
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.registry import create
from tests.integration.megatron_job import run

JOB = Path(__file__).parent / "functional_job.py"
README = Path(__file__).parents[1] / "README.md"
RANKS = 4


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What each rank of the job saw."""
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
        if "cp.attention" in block
    ]
    file = tmp_path_factory.mktemp("readme") / "example.py"
    file.write_text(code)
    processes = run(str(file), ranks=RANKS, program=(str(JOB),)).succeeded().processes
    return [json.loads(process.stdout) for process in processes]


def test_the_readme_s_snippet_splits(job):
    shape = Shape(1, 512, 8, 8, 64, element_bytes=4)
    for rank, found in enumerate(job):
        zigzag = create("zigzag", VirtualWorld(RANKS).topology(rank), {})
        sent = zigzag.traffic(shape, Mask(), rank)
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


def test_what_ranks_hold_by_mistake(job):
    assert {found["by_hand"]["error"] for found in job} == {
        "ranks hold unequally many tokens, got 126 on rank 0 and 127 on rank 1: shard with "
        "cp.shard, and pass seq_len="
    }
    assert {found["two_lengths"]["error"] for found in job} == {
        "all ranks need one seq_len, got 16 on rank 0 and 18 on rank 2: pass the global length on "
        "all"
    }
    for found in job:
        assert found["wrong_layout"]["right"] is None
        assert found["wrong_layout"]["wrong"] == (
            "zigzag on 4 ranks needs the zigzag layout of 32 tokens, got others on rank 1: token 0 "
            "is at position 8, expected 4: these are the tokens of rank 1 in the contiguous "
            "layout; shard with cp.shard(..., algo='zigzag')"
        )


@pytest.fixture
def gathered(monkeypatch):
    """What virtual ranks compared."""
    found = []
    gather = VirtualTopology.gather

    def counting(self, mine):
        found.append(mine)
        return gather(self, mine)

    monkeypatch.setattr(VirtualTopology, "gather", counting)
    return found


def test_lengths_are_compared_once(gathered):
    def body(topology):
        for tokens, settings in ((32, {}), (32, {}), (64, {}), (32, {}), (64, {"seq_len": 64})):
            for algo in ("zigzag", "ulysses"):
                x = cp.shard(torch.randn(1, tokens, 4, 8), 1, algo=algo, group=topology)
                cp.attention(x, x, x, algo=algo, group=topology, **settings)
                cp.unshard(x, 1, algo=algo, group=topology, **settings)

    with cp.record_communication() as log:
        run_virtual(RANKS, body)
    # 32 and 64 tokens, and for each of two layouts a global length.
    assert len(gathered) == 4 * RANKS
    assert {row.channel for row in log.rows} >= {"unshard"}
    assert not any("gather" in row.channel for row in log.rows)


def test_one_rank_compares_nothing(gathered):
    x = torch.randn(1, 7, 2, 8)
    cp.attention(x, x, x, algo="zigzag")
    cp.check_layout(torch.arange(7), algo="zigzag")
    assert len(gathered) == 1  # positions, which the second call is for


def test_documents_of_unequal_shards(gathered):
    """Where the layout follows documents, lengths do."""
    x = torch.randn(1, 30, 2, 8, dtype=torch.float64)

    def body(topology):
        for cu_seqlens in ((0, 3, 30), (0, 11, 12, 30), (0, 3, 30)):
            settings = {"algo": "zigzag", "layout": "documents", "cu_seqlens": cu_seqlens}
            own = cp.shard(x, 1, group=topology, **settings)
            cp.attention(own, own, own, group=topology, seq_len=30, **settings)
            held = cp.shard(torch.arange(30), 0, group=topology, **settings)
            cp.check_layout(held, group=topology, seq_len=30, **settings)

    run_virtual(RANKS, body)
    lengths = [mine for mine in gathered if mine is not None]
    assert len(lengths) == 2 * RANKS


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
