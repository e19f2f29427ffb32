"""The executor over slots of memory, as copy engines use them, and over process groups."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import Call
from megatron_cp_plugin.core.comm import Communicator, Described, Pending, Receive, Send
from megatron_cp_plugin.core.layout import shard, unshard
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.virtual import VirtualTopology, run_virtual
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.registry import create, layout_of
from tests.oracle import expected_attention, relative_error


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
    """Attributes: slots: channels by name."""

    peer_access = True  # type: ignore[assignment]
    slots: dict[str, _Slots]

    def peer_channel(self, name: str, slots: int) -> Communicator:
        if name not in self.slots:
            self.slots[name] = _Slots(self.channel(name), slots)
        return self.slots[name]


CASES: list[tuple[str, dict[str, object]]] = [
    ("ring", {"backward": "kv"}),
    ("zigzag", {"backward": "query", "chunks": 2}),
    ("zigzag", {"backward": "kv", "chunks": 2}),
    ("zigzag", {"backward": "kv", "gradients": "model"}),
    ("distflash", {"overlap": True}),
    ("distflash", {"overlap": False, "chunks": 2}),
    ("distflash", {"last_step": "owner"}),
]


def compare(
    algo: str, options: dict[str, object], size: int, mask: Mask, seq_len: int
) -> list[dict[str, _Slots]]:
    """Runs attention over slots, holds it against float64. Returns: the channels of every rank."""
    expected = expected_attention(
        seq_len=seq_len,
        heads=4,
        kv_heads=2,
        head_dim=8,
        causal=mask.causal,
        window=mask.window,
        cu_seqlens=(0, *mask.documents, seq_len),
    )

    def body(topology: Any) -> tuple[dict[str, _Slots], tuple[Tensor, ...]]:
        topology.__class__ = _PeerTopology
        topology.slots = {}
        algorithm = create(algo, topology, options)
        q, k, v, dout = (
            shard(x, 1, algorithm.layout, topology.rank, size)
            for x in (expected.q, expected.k, expected.v, expected.dout)
        )
        call = Call(seq_len, mask, 8**-0.5, Reference())
        out, _, saved = algorithm.forward(q, k, v, call)
        return topology.slots, (out, *algorithm.backward(dout, saved, call))

    results = run_virtual(size, body)
    layout = layout_of(algo, options)
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        whole = unshard([tensors[index] for _, tensors in results], 1, layout)
        assert relative_error(whole, getattr(expected, name)) < 1e-12, name
    return [slots for slots, _ in results]


@pytest.mark.parametrize(
    "mask", [Mask(), Mask(False), Mask(window=7), Mask(documents=(3, 7))], ids=str
)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("algo", "options"), CASES, ids=str)
def test_copy_engines_find_what_they_need(
    algo: str, options: dict[str, object], size: int, mask: Mask
) -> None:
    """Blocks of unequal lengths: all ranks have slots of one size, used in the same turns.

    With documents some ranks pass sums on to which they add nothing.
    """
    if size == 1:
        mask = replace(mask, documents=())
    by_rank = compare(algo, options, size, mask, 5 * size + size // 2)
    for name in by_rank[0]:
        channels = [slots[name] for slots in by_rank]
        assert len({(channel.turn, tuple(channel.growth)) for channel in channels}) == 1
        # No slot grows while messages travel: all ranks know the largest before the first one.
        assert all(turn == channels[0].growth[0][0] for turn, _ in channels[0].growth[:1])


@pytest.mark.parametrize(("algo", "options"), CASES, ids=str)
def test_copy_engines_are_used_where_each_rank_has_one_peer_at_a_time(
    algo: str, options: dict[str, object]
) -> None:
    (slots, *_) = compare(algo, options, 4, Mask(), 32)
    results = "returns" if algo == "distflash" else "sums"
    # Sums of a contiguous ring go on and home at once: so its backward uses the process group.
    exchanges = {name: channel.turn for name, channel in slots.items()}
    assert set(exchanges) == {"fetches", results}
    assert (exchanges[results] > 0) == (algo != "ring")
    assert exchanges["fetches"] >= 2


def test_transport_peer_is_refused_where_a_rank_has_two_peers() -> None:
    with pytest.raises(ConfigError, match="ring transport peer needs each rank to exchange with"):
        compare("ring", {"backward": "kv", "transport": "peer"}, 4, Mask(), 32)
