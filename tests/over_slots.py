"""Attention of virtual ranks whose messages go through slots of memory, as over copy engines."""

import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import Compiled
from megatron_cp_plugin.core.call import Call, Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.peer import SlottedCommunicator
from megatron_cp_plugin.core.layout import shard, unshard
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.registry import create, layout_of
from tests.oracle import expected_attention, relative_error
from tests.peer_world import run_virtual

Channels = dict[tuple[str, int], SlottedCommunicator]

CASES: list[tuple[str, dict[str, object]]] = [
    ("ring", {"backward": "kv"}),
    ("zigzag", {"backward": "query", "chunks": 2}),
    ("zigzag", {"backward": "kv", "chunks": 2}),
    ("zigzag", {"backward": "kv", "gradients": "model"}),
    ("distflash", {"helpers": "distance"}),
    ("distflash", {"helpers": "distance", "chunks": 2}),
    ("distflash", {"helpers": "distance", "last_step": "owner"}),
    ("distflash", {"transport": "peer"}),
]


def compare(
    algo: str, options: dict[str, object], size: int, mask: Mask, seq_len: int
) -> list[Channels]:
    """Runs attention over slots, holds it against float64. Returns: the channels of every rank."""
    expected = expected_attention(
        batch=2,
        seq_len=seq_len,
        heads=4,
        kv_heads=2,
        head_dim=8,
        causal=mask.causal,
        window=mask.window,
        cu_seqlens=(0, *mask.documents, seq_len),
    )

    def body(topology: Topology) -> tuple[Channels, tuple[Tensor, ...]]:
        algorithm = create(algo, topology, options)
        q, k, v, dout = (
            shard(x, 1, algorithm.layout, topology.rank, size)
            for x in (expected.q, expected.k, expected.v, expected.dout)
        )
        compiled = Compiled(algorithm, Call(Shape.of(q, k, v, seq_len), mask, 8**-0.5, Reference()))
        with torch.no_grad():
            out, _, saved = compiled.forward.attend(q, k, v)
            return topology._peer_channels, (out, *compiled.backward().differentiate(dout, saved))

    results = run_virtual(size, body, peer_access=True)
    layout = layout_of(algo, options)
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        whole = unshard([tensors[index] for _, tensors in results], 1, layout)
        assert relative_error(whole, getattr(expected, name)) < 1e-12, name
    return [channels for channels, _ in results]
