"""What ranks compare, how often, and what is found later where hosts do not wait."""

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.agree import COMPARED_TOGETHER
from megatron_cp_plugin.core.communication.virtual import VirtualTopology, run_virtual
from megatron_cp_plugin.errors import ContextParallelError

RANKS = 4


@pytest.fixture
def gathered(monkeypatch):
    """What virtual ranks compared."""
    found = []
    gather = VirtualTopology.gather

    def counting(self, mine):
        found.append(mine[0] if isinstance(mine, tuple) else "call")
        return gather(self, mine)

    monkeypatch.setattr(VirtualTopology, "gather", counting)
    return found


@pytest.mark.parametrize("each", [True, False], ids=["by-hosts", "by-gpus"])
def test_what_is_compared_how_often(gathered, monkeypatch, each):
    """Where messages go from GPU to GPU the host would wait: each new call is compared there."""
    monkeypatch.setattr(VirtualTopology, "compares_each_call", each)

    def body(topology):
        for tokens, settings in ((32, {}), (32, {}), (64, {}), (32, {}), (64, {"seq_len": 64})):
            for algo in ("zigzag", "ulysses"):
                x = cp.shard(torch.randn(1, tokens, 4, 8), 1, algo=algo, group=topology)
                cp.attention(x, x, x, algo=algo, group=topology, **settings)
                cp.unshard(x, 1, algo=algo, group=topology, **settings)

    with cp.record_communication() as log:
        run_virtual(RANKS, body)
    # 32 and 64 tokens, and for each of two layouts a global length.
    if each:
        assert gathered.count("numbers of tokens") == 4 * RANKS
    # Two algorithms, attention and unshard: what they are called with.
    assert gathered.count("settings") == (0 if each else 4 * RANKS)
    # Each of 20 calls; or all that were not new together.
    assert COMPARED_TOGETHER == 20 - 4
    assert gathered.count("call") == (20 if each else 1) * RANKS
    assert {row.channel for row in log.rows} >= {"unshard"}
    assert not any("gather" in row.channel for row in log.rows)


OTHER_CALLS = {
    "scale": ("zigzag", {"scale": 0.5}, {"scale": 0.25}),
    "spans": (
        "allgather",
        {"spans": [(0, 32, 0, 32, "full")]},
        {"spans": [(0, 31, 0, 32, "full"), (31, 32, 0, 1, "full")]},
    ),
    "documents": ("lasp", {"cu_seqlens": [0, 16, 32]}, {"cu_seqlens": [0, 17, 32]}),
    "decay": ("lasp", {"decay": 0.5}, {"decay": 0.25}),
}


@pytest.mark.parametrize("at", [0, 15, 16])
@pytest.mark.parametrize("what", OTHER_CALLS)
def test_other_calls_after_known_ones_are_found_where_hosts_do_not_wait(what, at, monkeypatch):
    """As over NCCL: by all ranks at once, within 2 * COMPARED_TOGETHER calls."""
    monkeypatch.setattr(VirtualTopology, "compares_each_call", False)
    algo, usual, other = OTHER_CALLS[what]
    call = cp.linear_attention if algo == "lasp" else cp.attention
    fixed = {"algo": algo} | ({"decay": 0.9} if algo == "lasp" else {})

    def body(topology):
        x = torch.randn(1, 8, 2, 8)
        for settings in (other, usual):  # both are known from here on
            call(x, x, x, group=topology, **fixed | settings)
        for number in range(at + 2 * COMPARED_TOGETHER + 1):
            settings = other if number == at and topology.rank == 2 else usual
            try:
                call(x, x, x, group=topology, **fixed | settings)
            except ContextParallelError as error:
                return number - at, str(error)
        return None

    found = run_virtual(RANKS, body)
    assert len(set(found)) == 1
    later, said = found[0]
    assert 0 < later < 2 * COMPARED_TOGETHER
    assert said == (
        "all ranks need the same calls of attention, linear_attention and unshard, got others on "
        f"some rank among the last {2 * COMPARED_TOGETHER}: make the same calls, with the same "
        "settings, on all"
    )


def test_the_same_calls_are_found_to_be_the_same(monkeypatch):
    """And they are compared once in so many."""
    monkeypatch.setattr(VirtualTopology, "compares_each_call", False)
    compared = []
    comparison = VirtualTopology.comparison
    monkeypatch.setattr(
        VirtualTopology,
        "comparison",
        lambda topology, number: compared.append(topology.rank) or comparison(topology, number),
    )

    def body(topology):
        x = torch.randn(1, 8, 2, 8)
        for number in range(3 * COMPARED_TOGETHER + 2):
            scale = (0.5, 0.25)[number % 2]
            cp.attention(x, x, x, algo="zigzag", group=topology, scale=scale)

    run_virtual(RANKS, body)
    assert sorted(compared) == sorted(3 * [*range(RANKS)])  # the first two calls were new ones


def test_ranks_remember_that_there_are_unequal_shards(monkeypatch):
    """Rank 0 holds 4 tokens each time, and must not take that for what all hold, where known calls
    are not compared each.
    """
    monkeypatch.setattr(VirtualTopology, "compares_each_call", False)

    def body(topology):
        for tokens, settings in ((4, {}), (4 - topology.rank, {"seq_len": 7})):
            x = torch.randn(1, tokens, 2, 8)
            cp.attention(x, x, x, algo="ring", group=topology, **settings)
        with pytest.raises(ContextParallelError, match=r"got 4 on rank 0 and 3 .*: pass seq_len=7"):
            cp.attention(x, x, x, algo="ring", group=topology)

    run_virtual(2, body)


def test_one_rank_compares_nothing(gathered):
    x = torch.randn(1, 7, 2, 8)
    cp.attention(x, x, x, algo="zigzag")
    cp.check_layout(torch.arange(7), algo="zigzag")
    assert gathered == ["positions"]  # which the second call is for


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
    assert gathered.count("numbers of tokens") == 2 * RANKS
