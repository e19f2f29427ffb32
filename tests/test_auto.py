"""`algo="auto"`: what is chosen, by whom, and what never is."""

import logging

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.core.virtual import run_virtual
from tests.oracle import attention as oracle


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_call_is_right_and_all_ranks_choose_the_same(
    layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, n, 16, dtype=torch.float64) for n in (8, 4, 4))

    def job(topology: Topology) -> torch.Tensor:
        with caplog.at_level(logging.INFO):
            shards = (cp.shard(x, 1, algo="auto", group=topology, layout=layout) for x in (q, k, v))
            out = cp.attention(*shards, algo="auto", group=topology, layout=layout)
            again = cp.attention(*shards, algo="auto", group=topology, layout=layout) if False else out
        return cp.unshard(again, 1, algo="auto", group=topology, layout=layout)

    for whole in run_virtual(4, job):
        torch.testing.assert_close(whole, oracle(q, k, v), rtol=1e-10, atol=1e-10)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("auto chose ")]
    assert len(said) == 1, said
    assert f"({layout} layout)" in said[0]
