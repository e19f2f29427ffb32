"""--multi-latent-attention: losses and all gradients are those of Megatron's own attention."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.attention import ContextParallelAttention
from megatron_cp_plugin.integration.documents import DocumentMask
from megatron_cp_plugin.integration.latent_attention import normed, send_latents
from megatron_cp_plugin.integration.rope import _keep_documents, use_layout
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.registry import create
from tests.integration.ranks import Place

pytestmark = pytest.mark.timeout(300)


def test_heads_that_an_algorithm_takes_latents_for() -> None:
    """Of a tensor-parallel rank of DeepSeek-V3."""
    sizes = {"kv_lora_rank": 512, "qk_pos_emb_head_dim": 64, "qk_head_dim": 128, "v_head_dim": 128}
    heads = {"num_attention_heads": 128, "tensor_model_parallel_size": 8, "bf16": True}
    made = SimpleNamespace(multi_latent_attention=True, **sizes, **heads)
    shape = Settings(made).shape_of_latents(4096)
    assert (shape.heads, shape.kv_heads, shape.kv_width) == (16, 2, 640)
    assert (shape.seq_len, shape.head_dim, shape.value_dim) == (4096, 192, 128)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_norm_within_a_linear_map(normalization: str, zero_centered: bool) -> None:
    """As Transformer Engine has it for latents."""
    norm: Any = nn.RMSNorm(6, 1e-3) if normalization == "RMSNorm" else nn.LayerNorm(6, 1e-3)
    weight, bias = torch.rand(6), torch.rand(6)
    linear = SimpleNamespace(
        layer_norm_weight=weight - 1 if zero_centered else weight,
        layer_norm_bias=bias,
        zero_centered_gamma=zero_centered,
        normalization=normalization,
        eps=1e-3,
    )
    x = torch.randn(3, 2, 6)
    with torch.no_grad():
        norm.weight.copy_(weight)
        if normalization == "LayerNorm":
            norm.bias.copy_(bias)
        torch.testing.assert_close(normed(linear, x), norm(x))
    assert normed(linear, x.bfloat16()).dtype == torch.bfloat16


def layer_with(linear: nn.Module, size: int) -> Any:
    """A layer of multi-latent attention, of which only what is looked at is there."""
    layer: Any = MLASelfAttention.__new__(MLASelfAttention)
    nn.Module.__init__(layer)
    layer.pg_collection = SimpleNamespace(cp=Place(0, size))
    core: Any = ContextParallelAttention.__new__(ContextParallelAttention)
    nn.Module.__init__(core)
    topology: Any = SimpleNamespace(rank=0, size=size, nodes=(0,) * size)
    core.algorithm = create("zigzag", topology, {"chunks": 1})
    core.runtime = SimpleNamespace(has_groups=False)
    sizes = {"kv_lora_rank": 8, "qk_pos_emb_head_dim": 2, "qk_head_dim": 4, "v_head_dim": 4}
    layer.config = SimpleNamespace(multi_latent_attention=True, num_attention_heads=2, **sizes)
    layer.core_attention, layer.linear_kv_up_proj = core, linear
    return layer


def test_layers_that_send_latents() -> None:
    """A rank alone sends none; of projections of programs nothing is known."""
    layer = layer_with(nn.Linear(8, 16), 1)
    send_latents(layer)
    assert "forward" not in vars(layer.linear_kv_up_proj)
    with pytest.raises(ContextParallelError, match="own linear_kv_up_proj, got Linear: leave it"):
        send_latents(layer_with(nn.Linear(8, 16), 2))
    linear = ColumnParallelLinear.__new__(ColumnParallelLinear)
    nn.Module.__init__(linear)
    layer = layer_with(linear, 2)
    send_latents(layer)
    assert "forward" in vars(linear)


def test_latents_that_tensor_parallel_ranks_split() -> None:
    """Of which Megatron loses gradients; the fused projection is always split."""
    runtime = Runtime(ContextParallelConfig("ring", 1))

    def model(rows: int, tensor: int = 2, name: str = "linear_kv_down_proj") -> nn.Module:
        layer = layer_with(nn.Linear(8, 16), 1)
        layer.config.tensor_model_parallel_size = tensor
        setattr(layer, name, nn.Linear(6, rows))
        return nn.Sequential(layer)

    use_layout(model(8 + 2), runtime)
    use_layout(model(8 + 2, tensor=1), runtime)
    for split in (model(5), model(8 + 2, name="linear_qkv_down_proj")):
        with pytest.raises(ContextParallelError, match=r"latents whole on each .* got one split"):
            use_layout(split, runtime)


@pytest.mark.parametrize(
    ("twice", "checkpointed", "packed", "refused"),
    [
        (True, True, True, True),
        # Each of them alone, or without documents, is served.
        (False, True, True, False),
        (True, False, True, False),
        (True, True, False, False),
    ],
)
def test_what_is_recomputed_alone(
    twice: bool, checkpointed: bool, packed: bool, refused: bool
) -> None:
    class Core(ContextParallelAttention):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            config = ContextParallelConfig("ring", 1, recompute_attention=twice)
            self.runtime = Runtime(config)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core_attention, self.checkpoint_core_attention = Core(), checkpointed

    layer, mask = Layer(), DocumentMask(seq_len=8, starts=(3,)) if packed else None
    if refused:
        with pytest.raises(ContextParallelError, match="cannot be recomputed alone"):
            _keep_documents(layer, (), {"packed_seq_params": mask})
        return
    assert _keep_documents(layer, (), {"packed_seq_params": mask}) == (
        (),
        {"packed_seq_params": None},
    )
    assert layer.core_attention.packed is mask
