"""What the planner counts of a model, against Megatron's own models: parameters, and what a layer
saves for its backward.
"""

import json
from typing import Any

import pytest

from megatron_cp_plugin.planner.memory import activation_bytes
from megatron_cp_plugin.planner.model import Model, Split
from tests.integration.megatron_job import run_program

VOCABULARY, TOKENS = 64, 256
# Elementwise operations and attention save what their kernels on GPUs do.
PROGRAM = """
import json, os, sys
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

class Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        out = q.new_ones(*q.shape[:2], q.shape[2] * v.shape[3])
        ctx.save_for_backward(q, k, v, out)
        return out

class Norm(torch.nn.Module):
    def forward(self, x):
        return Normed.apply(x)

class Attention(torch.nn.Module):
    def forward(self, q, k, v, *others, **more):
        return Attended.apply(q.contiguous(), k.contiguous(), v.contiguous())

def measured(settings, vocabulary, tokens):
    torch.manual_seed(0)
    latent = "multi_latent_attention" in settings
    config = (MLATransformerConfig if latent else TransformerConfig)(
        **settings, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, bias_activation_fusion=True, bias_dropout_fusion=False,
        normalization="RMSNorm", attention_dropout=0.0, hidden_dropout=0.0, bf16=True,
        params_dtype=torch.bfloat16, use_cpu_initialization=True,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(config, spec, vocabulary, tokens, position_embedding_type="rope",
                     share_embeddings_and_output_weights=False).bfloat16()
    parameters = sum(
        x.numel() for name, x in model.named_parameters() if x.dim() > 1 and "router" not in name
    )
    saved, of_layer, where = {}, [0] * len(model.decoder.layers), [None]

    def pack(x):
        storage = x.untyped_storage()
        if storage._cdata not in known and storage._cdata not in saved and where[0] is not None:
            of_layer[where[0]] += storage.nbytes()
        saved[storage._cdata] = x  # lives on, so that no other has its place
        return x

    for layer in model.decoder.layers:
        layer.input_layernorm, layer.pre_mlp_layernorm = Norm(), Norm()
    known = {x.untyped_storage()._cdata for x in model.parameters()}
    for number, layer in enumerate(model.decoder.layers):
        layer.self_attention.core_attention = Attention()
        layer.register_forward_pre_hook(lambda *_, number=number: where.__setitem__(0, number))
        layer.register_forward_hook(lambda *_: where.__setitem__(0, None))
    ids = torch.arange(tokens)[None] % vocabulary
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(ids, torch.arange(tokens)[None], None, labels=ids)
    return parameters, [size / tokens for size in of_layer]

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
parallel_state.initialize_model_parallel()
given = json.loads(sys.argv[1])
print("FOUND", json.dumps([measured(one, *map(int, sys.argv[2:])) for one in given]))
"""

LLAMA: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 160,
}
EXPERTS: dict[str, Any] = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
SHARED: dict[str, Any] = {
    "moe_shared_expert_intermediate_size": 72,
    "moe_layer_freq": [0, 1, 1],
}
LATENT: dict[str, Any] = {
    "num_query_groups": 4,
    "kv_channels": None,
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "rope_type": "rope",
    "apply_rope_fusion": False,
}
OF_LLAMA = (3, 64, 160, 4, 2, 16, VOCABULARY)
OF_EXPERTS = (3, 64, 48, 4, 2, 16, VOCABULARY)
LATENTS = {"value_dim": 12, "query_rank": 24, "key_rank": 20, "rotary_dim": 8}
OF_ALL = {"experts": 8, "active": 2, "shared": 72, "dense": 1, "dense_ffn": 160}
CASES = [
    (LLAMA, Model("Llama", *OF_LLAMA)),
    (LLAMA | EXPERTS, Model("Mixtral", *OF_EXPERTS, experts=8, active=2)),
    (LLAMA | EXPERTS | SHARED, Model("shared", *OF_EXPERTS, **OF_ALL)),
    (LLAMA | LATENT, Model("latents", 3, 64, 160, 4, 4, 24, VOCABULARY, **LATENTS)),
    (
        LLAMA | LATENT | {"q_lora_rank": None},
        Model("latent keys", 3, 64, 160, 4, 4, 24, VOCABULARY, **(LATENTS | {"query_rank": 0})),
    ),
    (
        LLAMA | EXPERTS | SHARED | LATENT,
        Model("DeepSeek", 3, 64, 48, 4, 4, 24, VOCABULARY, **LATENTS, **OF_ALL),
    ),
]
# Bytes of a token that are not counted: cosines and sines of q and of k, for each rotated element,
# which layers share on GPUs, and the router's numbers and places.
_ROTATED, _ROUTED = 8, 108


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    words = [json.dumps([settings for settings, _ in CASES]), str(VOCABULARY), str(TOKENS)]
    folder = tmp_path_factory.mktemp("measured")
    done = run_program(folder, "-c", PROGRAM, *words).processes[0]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("FOUND ")] or [done.stderr]
    return list(json.loads(line.removeprefix("FOUND ")))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[model.name for _, model in CASES])
def test_counts_are_those_of_megatrons_model(measured: list[Any], number: int) -> None:
    model, (parameters, saved) = CASES[number][1], measured[number]
    assert model.parameters == parameters
    counted = activation_bytes(model, Split())
    more = _ROTATED * (model.rotary_dim or model.head_dim) + _ROUTED * model.expert_share
    assert sum(saved) / len(saved) == pytest.approx(counted + more, rel=1e-9)
