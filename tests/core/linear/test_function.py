"""Calls of linear attention that are refused."""

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import shard
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.registry import layout_of


def test_wrong_gates_are_refused() -> None:
    x, gate = torch.zeros(1, 8, 4, 2), torch.zeros(1, 8, 4)

    def refused(match: str, **given: object) -> None:
        with pytest.raises(ContextParallelError, match=match):
            cp.linear_attention(*given.pop("qkv", (x, x, x)), **given)

    refused("take the place of decay", gate=gate, decay=0.5)
    refused("need causal=True", gate=gate, causal=False)
    refused(r"4 heads of k and v, \(1, 8, 4\), got torch.float32 \(1, 8, 2\)", gate=gate[..., :2])
    refused(r"beta needs a floating dtype.*\[B,S,H\] with", beta=gate.int())
    refused(r"divides the largest.*got \[4, 3, 3\]", qkv=(x, x[:, :, :3], x[:, :, :3]))
    refused(r"got \[6, 2, 3\]", qkv=(torch.cat((x, x[:, :, :2]), 2), x[:, :, :2], x[:, :, :3]))
    assert cp.linear_attention(x, x[:, :, :2], x).shape == x.shape


@pytest.mark.parametrize("decay", [0.0, 1.5, -0.5, float("nan")])
def test_rates_out_of_range_are_refused(decay: float) -> None:
    x = torch.zeros(1, 4, 2, 4)
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        cp.linear_attention(x, x, x, decay=decay)


def test_wrong_calls_are_refused() -> None:
    x = torch.zeros(1, 4, 2, 4)
    with pytest.raises(ConfigError, match="one rate for each of 2 heads, got 3"):
        cp.linear_attention(x, x, x, decay=[0.5, 0.5, 0.5])
    with pytest.raises(ConfigError, match="not differentiable"):
        cp.linear_attention(x, x, x, decay=torch.ones(2, requires_grad=True))
    with pytest.raises(ConfigError, match="'ring', which is softmax attention"):
        cp.linear_attention(x, x, x, decay=1.0, algo="ring")
    with pytest.raises(ConfigError, match="'lasp', which is linear attention"):
        cp.attention(x, x, x, algo="lasp")
    with pytest.raises(ConfigError, match="use one of contiguous, zigzag, thd, documents"):
        cp.linear_attention(x, x, x, decay=1.0, algo="lasp2", layout="cyclic")
    with pytest.raises(ContextParallelError, match=r"\[B,H,D,E\] = \(1, 2, 4, 4\)"):
        cp.linear_attention(x, x, x, decay=1.0, initial_state=torch.zeros(1, 2, 4, 5))
    with pytest.raises(ContextParallelError, match=r"q, k \[B,S,H,D\] and v \[B,S,H,E\]"):
        cp.linear_attention(x, x[:, :2], x[:, :2], decay=1.0)
    with pytest.raises(ContextParallelError, match="one dtype"):
        cp.linear_attention(x, x, x.double(), decay=1.0)


def test_zigzag_needs_chunks_of_equal_length() -> None:
    def body(topology: Topology) -> None:
        layout = layout_of("lasp2", {"layout": "zigzag"})
        x = shard(torch.zeros(1, 9, 2, 4), 1, layout, topology.rank, topology.size)
        cp.linear_attention(
            x, x, x, decay=1.0, algo="lasp2", layout="zigzag", group=topology, seq_len=9
        )

    with pytest.raises(ConfigError, match="divisible by 4, got 9: use 12"):
        run_virtual(2, body)
