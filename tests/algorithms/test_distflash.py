"""DISTFLASHATTN's schedule: who does what, how much idles, what travels, in which order."""

import logging
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from megatron_cp_plugin.algorithms import distflash
from megatron_cp_plugin.algorithms.distflash import Schedule, plan
from megatron_cp_plugin.core.algorithm import Algorithm, Call
from megatron_cp_plugin.core.comm import (
    Communicator,
    Described,
    Pending,
    Receive,
    Send,
    record_communication,
)
from megatron_cp_plugin.core.layout import shard, unshard
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.core.virtual import VirtualTopology, VirtualWorld, run_virtual
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels.base import Statistics
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.registry import create
from tests.oracle import expected_attention, relative_error

CAUSAL = Mask(causal=True)
# Figure 1 (b): queries and keys by worker and step, counted from 1; "" waits.
FIGURE_1 = """
    11 81 71 61 --
    22 21 82 72 --
    33 32 31 83 --
    44 43 42 41 --
    55 54 53 52 51
    66 65 64 63 62
    77 76 75 74 73
    88 87 86 85 84
"""


def balanced(size: int, tokens: int = 6) -> Schedule:
    return plan(size, tokens * size, CAUSAL, balanced=True, last_step="owner")


def test_eight_ranks_do_what_figure_1_shows() -> None:
    rows = [line.split() for line in FIGURE_1.strip().splitlines()]
    drawn = [
        [f"{t.query_owner + 1}{t.key_owner + 1}" if t else "--" for t in tasks]
        for tasks in balanced(8).steps
    ]
    assert list(map(list, zip(*drawn, strict=True))) == rows


@pytest.mark.parametrize("size", range(1, 17))
def test_idle_fraction_is_that_of_the_paper(size: int) -> None:
    schedule = balanced(size)
    assert len(schedule.steps) == size // 2 + 1
    assert schedule.idle_fraction == (0 if size % 2 else Fraction(1, 2 * size))
    ring = plan(size, 6 * size, CAUSAL, balanced=False, last_step="owner")
    assert len(ring.steps) == size
    assert ring.idle_fraction == Fraction(size**2 - size, 2 * size**2)


@pytest.mark.parametrize("size", range(2, 17))
def test_every_step_after_the_first_has_equal_work(size: int) -> None:
    for tasks in balanced(size).steps[1:]:
        assert {task.pairs for task in tasks if task} == {36}


@pytest.mark.parametrize("size", range(2, 17, 2))
def test_a_shared_last_step_leaves_nobody_waiting(size: int) -> None:
    schedule = plan(size, 6 * size, CAUSAL, balanced=True, last_step="shared")
    assert schedule.waiting == 0
    work = [sum(tasks[rank].pairs for tasks in schedule.steps) for rank in range(size)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize("with_helpers", [True, False])
def test_full_attention_is_the_plain_ring(size: int, with_helpers: bool) -> None:
    schedule = plan(size, 6 * size, Mask(causal=False), balanced=with_helpers, last_step="owner")
    assert len(schedule.steps) == size
    assert schedule.waiting == 0
    assert not schedule.has_helpers


def test_full_attention_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    distflash._say_that_nobody_helps.cache_clear()
    algorithm = create("distflash", VirtualWorld(4).topology(0), {})
    with caplog.at_level(logging.INFO):
        for causal in (True, False, False):
            algorithm.check(algorithm.options, size=4, heads=4, kv_heads=4, causal=causal)
    (record,) = caplog.records
    assert "full attention keeps all 4 ranks busy" in record.getMessage()


@pytest.mark.parametrize("last_step", ["owner", "shared"])
@pytest.mark.parametrize("size", range(1, 10))
def test_traffic_is_the_closed_formula_for_equal_blocks(size: int, last_step: str) -> None:
    shape = Shape(batch=3, seq_len=6 * size, heads=8, kv_heads=2, head_dim=16)
    kv, query, row = 2 * 2 * 16 * 2, 8 * 16 * 2, 8 * 4
    helped = (size - 1) // 2
    for rank in range(size):
        topology = VirtualWorld(size).topology(rank)
        algorithm = create("distflash", topology, {"last_step": last_step})
        traffic = algorithm.traffic(shape, CAUSAL, rank)
        lends = min(size // 2, size - 1 - rank)
        owns = min(size // 2, rank)
        is_helped: Fraction | int = max(0, helped - (size - 1 - rank))
        helps: Fraction | int = max(0, helped - rank)
        if last_step == "shared" and size % 2 == 0:
            half = Fraction(1, 2)
            helps, is_helped = (
                helps + half * (2 * rank < size),
                is_helped + half * (2 * rank >= size),
            )
        forward = lends * kv + is_helped * query + helps * (query + row)
        backward = (lends + owns) * kv + is_helped * 2 * (query + row) + helps * query
        assert traffic.forward_bytes == 3 * 6 * forward
        assert traffic.backward_bytes == 3 * 6 * backward


class _Slots(Communicator):
    """What core.peer demands: slots of equal size on all ranks, used in turn, one peer each way.

    A slot is overwritten as soon as the exchange that reuses it is posted.
    """

    def __init__(self, inner: Communicator, slots: int) -> None:
        super().__init__(inner.channel, inner.rank, inner.size, inner.global_rank)
        self.inner = inner
        self.slabs = [torch.empty(0, dtype=torch.uint8)] * slots
        self.turn = 0
        self.growth: list[tuple[int, int]] = []

    def reserve(self, like: Sequence[Described]) -> None:
        needed = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in like)
        if needed > len(self.slabs[0]):
            self.growth.append((self.turn, needed))
            self.slabs = [torch.empty(needed, dtype=torch.uint8) for _ in self.slabs]

    def buffers(self, like: Sequence[Described], device: torch.device) -> tuple[Tensor, ...]:
        self.reserve(like)
        slab = self.slabs[self.turn % len(self.slabs)].fill_(255)  # NaN
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in like]
        pieces = slab[: sum(sizes)].split(sizes)
        return tuple(
            piece.view(dtype).view(shape)
            for piece, (shape, dtype) in zip(pieces, like, strict=True)
        )

    def _exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Pending[None]:
        assert len({to for _, to in sends}) <= 1
        assert len({source for _, source in receives}) <= 1
        self.turn += 1
        return self.inner._exchange(sends, receives)

    _all_gather = _reduce_scatter = _all_to_all = None  # type: ignore[assignment]


class _PeerTopology(VirtualTopology):
    peer_access = True  # type: ignore[assignment]

    def peer_channel(self, name: str, slots: int) -> Communicator:
        return _Slots(self.channel(name), slots)


@pytest.mark.parametrize("last_step", ["owner", "shared"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("size", range(1, 8))
def test_copy_engines_find_what_they_need(size: int, overlap: bool, last_step: str) -> None:
    expected = expected_attention(
        seq_len=5 * size + size // 2, heads=4, kv_heads=1, head_dim=8, causal=True
    )
    seq_len = expected.q.shape[1]

    def body(topology: VirtualTopology) -> tuple[Algorithm, tuple[Tensor, ...]]:
        topology.__class__ = _PeerTopology
        options = {"overlap": overlap, "last_step": last_step}
        algorithm = create("distflash", topology, options)
        q, k, v, dout = (
            shard(x, 1, algorithm.layout, topology.rank, size)
            for x in (expected.q, expected.k, expected.v, expected.dout)
        )
        call = Call(seq_len, CAUSAL, 8**-0.5, Reference())
        out, _, saved = algorithm.forward(q, k, v, call)
        return algorithm, (out, *algorithm.backward(dout, saved, call))

    results = run_virtual(size, body)
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        whole = unshard([tensors[index] for _, tensors in results], 1, results[0][0].layout)
        assert relative_error(whole, getattr(expected, name)) < 1e-12, name
    for name in ("_fetches", "_returns"):
        flows = [getattr(algorithm, name) for algorithm, _ in results]
        assert all(isinstance(flow, _Slots) for flow in flows)
        assert len({(flow.turn, tuple(flow.growth)) for flow in flows}) == 1


def test_peer_transport_without_peer_access_is_refused() -> None:
    with pytest.raises(ConfigError, match="distflash transport peer needs GPUs of one node"):
        create("distflash", VirtualWorld(2).topology(0), {"transport": "peer"})


class _Journal(Reference):
    """A kernel that notes its calls."""

    def __init__(self, entries: list[str]) -> None:
        self.entries = entries

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        self.entries.append("compute")
        return super().forward(q, k, v, scale=scale, causal=causal)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.entries.append("compute")
        return super().backward(dout, q, k, v, statistics, scale=scale, causal=causal)


def journals(overlap: bool) -> list[tuple[list[str], list[str]]]:
    """What each of 5 ranks posts, waits for and computes, in order: (forward, backward)."""

    def body(topology: Topology) -> tuple[list[str], list[str]]:
        algorithm = create("distflash", topology, {"overlap": overlap})
        entries: list[str] = []
        for name in ("fetches", "returns"):
            channel = getattr(algorithm, f"_{name}")

            def exchange(sends, receives, channel=channel, name=name):  # type: ignore[no-untyped-def]
                pending = type(channel).exchange(channel, sends, receives)
                if not receives:
                    return pending
                entries.append(f"post {name}")
                finish = pending._finish
                pending._finish = lambda: (entries.append(f"wait {name}"), finish())[1]
                return pending

            channel.exchange = exchange
        q, k, v, dout = (torch.randn(1, 4, 2, 8) for _ in range(4))
        call = Call(20, CAUSAL, 1.0, _Journal(entries))
        saved = algorithm.forward(q, k, v, call)[2]
        forward = list(entries)
        entries.clear()
        algorithm.backward(dout, saved, call)
        return forward, list(entries)

    return run_virtual(5, body)


def test_the_next_fetch_is_posted_before_the_present_computation() -> None:
    """Rank 2 of 5 owns two tasks and nobody helps it: nothing but fetches in its forward."""
    forward, _ = journals(overlap=True)[2]
    assert forward == [
        "post fetches",
        "compute",
        "wait fetches",
        "post fetches",
        "compute",
        "wait fetches",
        "compute",
    ]


def test_a_blocking_run_waits_for_every_message_where_it_is_posted() -> None:
    for forward, backward in journals(overlap=False):
        for entries in (forward, backward):
            for index, entry in enumerate(entries):
                if entry.startswith("post"):
                    assert entries[index + 1] == entry.replace("post", "wait")


def test_results_come_back_during_the_next_computation() -> None:
    """Rank 4 of 5 is helped in both steps after the first."""
    for entries in journals(overlap=True)[4]:
        posted = entries.index("post returns")
        assert "compute" in entries[posted : entries.index("wait returns")]


def test_fetches_and_returns_are_flows_of_their_own() -> None:
    with record_communication() as log:
        journals(overlap=True)
    forward = {row.channel for row in log.rows if row.phase == "forward"}
    assert forward == {"fetches", "returns"}
