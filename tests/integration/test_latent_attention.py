"""--multi-latent-attention: losses and all gradients are those of Megatron's own attention."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.harness.parity import Recording, Tolerances, compare
from megatron_cp_plugin.integration.attention import ContextParallelAttention
from megatron_cp_plugin.integration.documents import DocumentMask
from megatron_cp_plugin.integration.latent_attention import (
    normed,
    send_latents,
)
from megatron_cp_plugin.integration.rope import _keep_documents
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.registry import create
from tests.integration.megatron_job import SLOWLY, TINY, run_warm
from tests.integration.ranks import Place

pytestmark = pytest.mark.timeout(300)

# Heads of three dims: 24 of q and k, of which 8 are rotated, and 12 of v.
LATENT = (
    *TINY,
    *SLOWLY,
    *"--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8".split(),
    *"--v-head-dim 12 --position-embedding-type rope --normalization RMSNorm".split(),
)
YARN = "--rope-type yarn --rotary-scaling-factor 4 --mscale-all-dim 0.5 --q-lora-rank 12"
# Runs with the same parts of the model on each rank start from the same weights.
REFERENCES = {
    "layers": ("--rope-type rope --num-layers 4", 1),
    "tensor": (
        f"{YARN} --qk-layernorm --tensor-model-parallel-size 2 --sequence-parallel "
        "--mtp-num-layers 1",
        2,
    ),
    "stages": (f"{YARN} --pipeline-model-parallel-size 2 --softmax-type learnable", 2),
}
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# Not of mla_up_proj, for which Megatron compiles something first: scripts/parity.yaml.
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn"


def train(folder: Path, flags: str, ranks: int) -> Recording:
    words = (*flags.split(), "--cp-record", str(folder))
    run_warm(folder, *LATENT, *words, ranks=ranks).succeeded()
    return Recording.load(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recording]:
    """Each of `REFERENCES` with Megatron's own attention."""

    @cache
    def of(kind: str) -> Recording:
        flags, ranks = REFERENCES[kind]
        words = f"{flags} --context-parallel-algo megatron"
        return train(tmp_path_factory.mktemp(kind), words, ranks)

    return of


@pytest.mark.parametrize(
    ("kind", "flags", "size"),
    [
        pytest.param(
            "layers", "--cp-layers zigzag,attention2d,allgather,usp", 4, marks=pytest.mark.slow
        ),
        ("layers", "--cp-layers zigzag,attention2d,allgather,zigzag --cp-send-latents", 2),
        pytest.param(
            "layers",
            f"--cp-layers ring,distflash,ulysses,ring {SELECTIVE}",
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "layers",
            f"--context-parallel-algo zigzag {FULL} --cp-recompute-attention",
            1,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "tensor",
            f"--context-parallel-algo zigzag {FULL} --cp-send-latents",
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "stages", f"--cp-layers distflash,ulysses {SELECTIVE}", 2, marks=pytest.mark.slow
        ),
    ],
)
def test_equals_megatron(
    reference: Callable[[str], Recording], tmp_path: Path, kind: str, flags: str, size: int
) -> None:
    same, shards = REFERENCES[kind]
    words = f"{same} {flags} --context-parallel-size {size}"
    comparison = compare(reference(kind), train(tmp_path, words, shards * size), Tolerances())
    assert comparison.passed, comparison.problems
    # Gradients of K are far smaller than those of V, and are seen apart.
    assert any("linear_kv_up_proj.weight[key]" in name for name in comparison.gradients)


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
    topology: Any = SimpleNamespace(rank=0, size=size)
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
