"""Which channels carry the messages of a pass, and what its results keep of their memory."""

import pytest
import torch

from megatron_cp_plugin.core.algorithm import Compiled
from megatron_cp_plugin.core.call import Call, Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.execution.executor import Transport
from megatron_cp_plugin.core.layout import shard
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.registry import create
from tests.peer_world import PeerWorld, run_virtual


def test_transport_peer_is_refused_where_a_rank_holds_many_blocks() -> None:
    topology = PeerWorld(4).topology(0)
    plan = create("distflash", topology, {}).plan(Shape(1, 32, 4, 2, 8), Mask())
    with pytest.raises(ConfigError, match="mine transport peer needs ranks to hold the blocks of"):
        Transport("mine", topology, "peer").channels(plan, slots=1)


@pytest.mark.parametrize(
    ("algo", "options", "documents"),
    [
        ("zigzag", {"backward": "kv"}, (15,)),
        ("zigzag", {"backward": "kv", "route": "straight"}, (15,)),
        ("attention2d", {"rows": 1}, (15,)),
        ("attention2d", {"rows": 1}, (9, 15)),
    ],
    ids=str,
)
def test_gradients_are_in_no_receive_buffer(
    algo: str, options: dict[str, object], documents: tuple[int, ...]
) -> None:
    """Not even where all rows come from another rank and few are a rank's own: with documents and
    a kernel that computes one at a time. The next call overwrites what came.
    """
    whole = [torch.randn(1, 24, 2, 8, dtype=torch.float64) for _ in range(4)]

    @torch.no_grad()
    def body(topology: Topology) -> None:
        kernel = Reference()
        kernel.packs = False
        algorithm = create(algo, topology, {"chunks": 1, **options})
        q, k, v, dout = (shard(x, 1, algorithm.layout, topology.rank, 2) for x in whole)
        compiled = Compiled(
            algorithm, Call(Shape.of(q, k, v, 24), Mask(False, documents=documents), 1.0, kernel)
        )
        found = compiled.backward().differentiate(dout, compiled.forward.attend(q, k, v)[2])
        before = [x.clone() for x in found]
        compiled.backward().differentiate(2 * dout, compiled.forward.attend(k, q, v)[2])
        assert all(map(torch.equal, found, before))

    run_virtual(2, body, peer_access=True)
