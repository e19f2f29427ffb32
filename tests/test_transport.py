"""Which way messages may go: refusals that need no GPU."""

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.virtual import run_virtual
from megatron_cp_plugin.errors import ConfigError


def test_peer_transport_without_peer_access_is_refused():
    def body(topology):
        q = torch.randn(1, 4, 2, 8)
        cp.attention(q, q, q, algo="zigzag", group=topology, transport="peer")

    with pytest.raises(ConfigError, match="zigzag transport peer needs GPUs of one node"):
        run_virtual(2, body)
