"""Every call is compared before it sends anything: what ranks say, and how often."""

from collections import Counter

import numpy as np
import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.agree import Digest, SameCall, words_of
from megatron_cp_plugin.core.comm import Recent
from megatron_cp_plugin.core.communication.virtual import VirtualTopology, run_virtual
from megatron_cp_plugin.errors import ContextParallelError
from tests.integration.steps_job import FUNCTIONAL, STEPS, refused_together, step_of

RANKS = 2


@pytest.fixture
def sent(monkeypatch):
    """Counts comparisons, and gatherings of what ranks disagree about."""
    found = Counter()
    for name in ("numbers", "gather"):
        original = getattr(VirtualTopology, name)

        def counting(self, mine, name=name, original=original):
            found[name] += 1
            return original(self, mine)

        monkeypatch.setattr(VirtualTopology, name, counting)
    return found


def test_each_call_is_compared_by_one_message(sent):
    def body(topology):
        for tokens, settings in ((32, {}), (32, {}), (64, {}), (32, {}), (64, {"seq_len": 64})):
            for algo in ("zigzag", "ulysses"):
                x = cp.shard(torch.randn(1, tokens, 4, 8), 1, algo=algo, group=topology)
                cp.attention(x, x, x, algo=algo, group=topology, **settings)
                cp.unshard(x, 1, algo=algo, group=topology, **settings)

    with cp.record_communication() as log:
        run_virtual(4, body)
    assert sent == {"numbers": 20 * 4}
    assert {row.channel for row in log.rows} >= {"unshard"}
    assert not any(name in row.channel for row in log.rows for name in ("gather", "numbers"))


def test_one_rank_compares_nothing(sent):
    x = torch.randn(1, 7, 2, 8)
    cp.attention(x, x, x, algo="zigzag")
    cp.check_layout(torch.arange(7), algo="zigzag")
    assert sent == {"gather": 1}  # which the second call is for


# What is said of some of them; of others the same with another name.
SAID = {
    "tokens": "ranks hold unequally many tokens, got 8 on rank 0 and 16 on rank 1: shard with",
    "no length": "all ranks need one seq_len, got 16 on rank 0 and None on rank 1: pass the global",
    "documents": "all ranks need one cu_seqlens, got [0, 5, 16] on rank 0 and [0, 7, 16] on rank 1",
    "KV heads": "all ranks need one shape of q, k, v beside tokens, got ((1, 4, 8), (1, 4, 8), (1,",
    "training": "all ranks need one requires_grad of q, got True on rank 0 and False on rank 1: ",
    "sink": "all ranks need one sink, got None on rank 0 and (torch.float64, 4) on rank 1",
    "option": "all ranks need one options, got () on rank 0 and (('chunks', 2),) on rank 1: make",
    "function": "all ranks need one function, got 'attention' on rank 0 and 'linear_attention' on",
    "refusal": "window needs a whole number, got 1.5: cast it first (rank 1)",
}


@pytest.mark.parametrize("step", STEPS[:2])
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_what_differs_in_any_step_is_refused_on_all_ranks(name, step):
    """And the next good call is right. Late steps, of real ranks: integration/test_steps.py."""
    difference = FUNCTIONAL[name]
    first, second = run_virtual(
        RANKS, lambda topology: step_of(difference, topology, topology.rank, RANKS, step)
    )
    assert refused_together(first, second)
    assert first.startswith(SAID.get(name, ""))


def test_local_functions_send_nothing(sent):
    """Of an odd number of tokens, on one rank, between calls without seq_len."""

    def body(topology):
        c, x = cp.Context(algo="zigzag", group=topology), torch.randn(1, 32, 4, 8)
        own = c.shard(x)
        for _ in range(2):
            c.attention(own, own, own)
            if topology.rank == 1:
                c.positions(511)
                cp.shard(torch.randn(1, 33, 4, 8), 1, algo="zigzag", group=topology)
            c.attention(own, own, own)

    run_virtual(RANKS, body)
    assert sent == {"numbers": 4 * RANKS}


@pytest.mark.parametrize("raised", [OverflowError("too\nlarge"), ContextParallelError("no")])
def test_every_exception_in_a_call_reaches_the_others(raised):
    """Whose words the others say; a rank that raises one of another class keeps its own."""

    def body(topology):
        with pytest.raises((ContextParallelError, OverflowError)) as error:  # noqa: PT012, SIM117
            with SameCall(topology, "this"):
                if topology.rank == 1:
                    raise raised
        with SameCall(topology, "this"):
            pass
        return type(error.value), str(error.value)

    first, second = run_virtual(2, body)
    if isinstance(raised, ContextParallelError):
        assert first == second == (ContextParallelError, "no (rank 1)")
    else:
        assert first == (ContextParallelError, "OverflowError: too (rank 1)")
        assert second == (OverflowError, "too\nlarge")


def test_a_rank_that_made_no_call_is_told():
    """A call that a rank made without the others is not taken for their next one."""

    def body(topology):
        topology.calls += topology.rank
        said = "one number of calls before, got 0 on rank 0"
        with pytest.raises(ContextParallelError, match=said), SameCall(topology, "this"):
            pass

    run_virtual(2, body)


def test_digests():
    many = list(range(10_000))
    assert repr(Digest(many)) == repr(Digest(torch.tensor(many))) == repr(Digest(np.array(many)))
    assert repr(Digest(many)) != repr(Digest([*many[:-1], 0]))
    assert repr(Digest(None)) != repr(Digest(()))
    assert words_of(Digest(many)).endswith(" ...")
    assert len(words_of(Digest(many))) <= 80


def test_what_a_rank_remembers_is_bounded():
    recent = Recent(3)
    for value in (1, 2, 3, 1, 4):
        recent.add(value)
    assert [value in recent for value in (1, 2, 3, 4)] == [True, False, True, True]
    topology = VirtualTopology.__new__(VirtualTopology)
    for tokens in range(10_000):
        topology.cut.add(("zigzag", tokens))
    assert len(topology.cut) == 4096
