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
from tests.any_placement import registered
from tests.peer_world import PeerWorld, run_virtual


def test_transport_peer_is_refused_where_a_rank_holds_many_blocks() -> None:
    topology = PeerWorld(4).topology(0)
    plan = create("distflash", topology, {}).plan(Shape(1, 32, 4, 2, 8), Mask())
    with pytest.raises(ConfigError, match="mine transport peer needs ranks to hold the blocks of"):
        Transport("mine", topology, "peer").split(plan, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 12, "parts": 2},  # a rank's own partials, of some rows, wait
        {"seed": 26, "steps": 3},  # a rank has none of its own
    ],
    ids=str,
)
def test_gradients_are_in_no_receive_buffer(options: dict[str, object]) -> None:
    """Not even where all rows come from another rank, and few or none are a rank's own: where
    another package's algorithm computes with parts of blocks. The next call overwrites what came.
    """
    whole = [torch.randn(1, 24, 2, 8, dtype=torch.float64) for _ in range(4)]

    @torch.no_grad()
    def body(topology: Topology) -> None:
        algorithm = create("any", topology, {"steps": 1, "chunks": 1, **options})
        q, k, v, dout = (shard(x, 1, algorithm.layout, topology.rank, 2) for x in whole)
        shape = Shape.of(q, k, v, 24)
        compiled = Compiled(algorithm, Call(shape, Mask(causal=False), 1.0, Reference()))
        found = compiled.backward().differentiate(dout, compiled.forward.attend(q, k, v)[2])
        before = [x.clone() for x in found]
        compiled.backward().differentiate(2 * dout, compiled.forward.attend(k, q, v)[2])
        assert all(map(torch.equal, found, before))

    with registered():
        run_virtual(2, body, peer_access=True)
