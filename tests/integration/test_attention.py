"""The core-attention module against attention written out, and its place in layer specs."""

import copy
import inspect
import json
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
    get_gpt_heterogeneous_layer_spec,
)
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    HeterogeneousTransformerConfig,
)
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration import spec as spec_module
from megatron_cp_plugin.integration.attention import ContextParallelAttention
from megatron_cp_plugin.integration.documents import DocumentMask
from megatron_cp_plugin.integration.linear_models import TransNormerAttention
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.spec import build_model, with_attention, with_plugin
from tests.oracle import expected_attention, naive_attention, relative_error

HEADS, KV_HEADS, HEAD_DIM, TOKENS, BATCH = 4, 2, 8, 12, 3


@pytest.fixture
def runtime() -> Runtime:
    return Runtime(ContextParallelConfig("zigzag", 1))


def config(**changes: Any) -> TransformerConfig:
    settings = {"num_layers": 2, "hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS}
    settings |= {"num_query_groups": KV_HEADS, "attention_dropout": 0.0}
    return TransformerConfig(**(settings | changes))


def attention(group: dist.ProcessGroup, runtime: Runtime, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "config": config(),
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "cp_comm_type": None,
        "softmax_scale": None,
        "pg_collection": ProcessGroupCollection(tp=group, cp=group),
    }
    # As Megatron's Attention builds it from a spec.
    ours = ModuleSpec(module=ContextParallelAttention, params={"runtime": runtime})
    return build_module(ours, **(arguments | changes))


@pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("layer", [1, 3])
def test_against_attention_written_out(
    group: dist.ProcessGroup,
    runtime: Runtime,
    mask: AttnMaskType,
    scale: float | None,
    layer: int,
) -> None:
    expected = expected_attention(
        batch=BATCH, seq_len=TOKENS, causal=mask is AttnMaskType.causal, scale=scale
    )
    # The scaling by the layer number cancels out.
    scaled = config(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True)
    module = attention(group, runtime, config=scaled, layer_number=layer, softmax_scale=scale)
    q, k, v = (
        x.detach().transpose(0, 1).clone().requires_grad_()
        for x in (expected.q, expected.k, expected.v)
    )
    out = module(q, k, v, None, attn_mask_type=mask, attention_bias=None, packed_seq_params=None)
    assert out.shape == (TOKENS, BATCH, HEADS * HEAD_DIM)
    out.backward(expected.dout.transpose(0, 1).flatten(2))
    assert relative_error(out, expected.out.transpose(0, 1).flatten(2)) < 1e-10
    for got, wanted in ((q, expected.dq), (k, expected.dk), (v, expected.dv)):
        assert relative_error(got.grad, wanted.transpose(0, 1)) < 1e-10


@pytest.mark.parametrize("asked", [{"qk_clip": True}, {"log_max_attention_logit": True}, {}])
def test_the_largest_scores_since_megatron_has_read_them(
    group: dist.ProcessGroup, runtime: Runtime, asked: dict[str, bool]
) -> None:
    """By head, of all micro-batches."""
    module = attention(group, runtime, config=config(**asked))
    q = torch.zeros(TOKENS, BATCH, HEADS, HEAD_DIM)
    k = torch.ones(TOKENS, BATCH, KV_HEADS, HEAD_DIM)
    for head, score in ((1, 3.0), (2, 5.0), (1, 2.0)):
        q[:] = -1
        q[TOKENS // 2, 1, head] = score
        module(q, k, k)
    found = module.current_max_attn_logits
    if not asked:
        assert found is None
        return
    want = torch.tensor([-1.0, 3.0, 5.0, -1.0]) * HEAD_DIM**0.5
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize(("layer", "window"), [(1, 4), (2, None), (3, 4)])
def test_window_of_megatrons_layers(
    group: dist.ProcessGroup, runtime: Runtime, layer: int, window: int | None
) -> None:
    """The query's own key and 3 before it; every second layer sees all."""
    settings = config(window_size=(3, 0), window_attn_skip_freq=2)
    expected = expected_attention(batch=BATCH, seq_len=TOKENS, causal=True, window=window)
    module = attention(group, runtime, config=settings, layer_number=layer)
    out = module(*(x.detach().transpose(0, 1) for x in (expected.q, expected.k, expected.v)))
    assert relative_error(out, expected.out.transpose(0, 1).flatten(2)) < 1e-10


def test_mask_type_of_the_constructor_is_the_default(
    group: dist.ProcessGroup, runtime: Runtime
) -> None:
    q = torch.randn(TOKENS, 1, HEADS, HEAD_DIM)
    k = torch.randn(TOKENS, 1, KV_HEADS, HEAD_DIM)
    full = attention(group, runtime, attn_mask_type=AttnMaskType.no_mask)
    causal = attention(group, runtime)
    assert torch.equal(full(q, k, k, None), causal(q, k, k, None, AttnMaskType.no_mask))
    assert not torch.equal(full(q, k, k, None), causal(q, k, k, None))


def test_nothing_is_saved_in_checkpoints(group: dist.ProcessGroup, runtime: Runtime) -> None:
    module = attention(group, runtime)
    assert not list(module.parameters())
    assert not module.state_dict()
    assert not module.sharded_state_dict(metadata={"dp_cp_group": group})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_mask_type": AttnMaskType.padding}, "must be causal or no_mask, got padding"),
        ({"config": config(window_size=(4, 1))}, "window-size needs LEFT,0"),
    ],
)
def test_what_it_cannot_compute_is_refused_when_built(
    group: dist.ProcessGroup, runtime: Runtime, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ContextParallelError, match=message):
        attention(group, runtime, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"query": torch.zeros(1, 1, HEADS, HEAD_DIM)},
            f"as keys, got 1 and {TOKENS}, as with a KV cache",
        ),
        ({"attn_mask_type": AttnMaskType.arbitrary}, "got arbitrary"),
        ({"attention_bias": torch.zeros(1)}, "attention bias"),
        ({"packed_seq_params": object()}, "got object: pass packed_seq_params to the model"),
        ({"packed_seq_params": DocumentMask(seq_len=1)}, "cu_seqlens that end at 1"),
    ],
)
def test_what_it_cannot_compute_is_refused_when_called(
    group: dist.ProcessGroup, runtime: Runtime, changes: dict[str, Any], message: str
) -> None:
    q = torch.randn(TOKENS, 1, HEADS, HEAD_DIM)
    with pytest.raises(ContextParallelError, match=message):
        attention(group, runtime)(**({"query": q, "key": q, "value": q} | changes))


@pytest.mark.parametrize("kind", ["vanilla", "off-by-one", "learnable"])
def test_sinks_are_those_of_megatron(
    group: dist.ProcessGroup, runtime: Runtime, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers from the same seed, under the same name in checkpoints."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    model = config(softmax_type=kind, init_method_std=0.5, params_dtype=torch.float64)
    groups = ProcessGroupCollection(tp=group, cp=group)
    torch.manual_seed(0)
    theirs: Any = DotProductAttention(model, 1, AttnMaskType.causal, "self", pg_collection=groups)
    torch.manual_seed(0)
    ours = attention(group, runtime, config=model)
    saved = [module.sharded_state_dict("core.", metadata={"dp_cp_group": group})
             for module in (theirs, ours)]  # fmt: skip
    assert list(saved[0]) == list(saved[1]) == ["core.softmax_offset"] * (kind == "learnable")
    if kind == "vanilla":
        assert ours.softmax_offset is None
        return
    assert torch.equal(ours.softmax_offset, theirs.softmax_offset)
    q, k, v = (
        torch.randn(BATCH, TOKENS, h, HEAD_DIM).double() for h in (HEADS, KV_HEADS, KV_HEADS)
    )
    out = ours(*(x.transpose(0, 1) for x in (q, k, v)), None).detach()
    sink = theirs.softmax_offset.detach()
    want = naive_attention(q, k, v, causal=True, scale=HEAD_DIM**-0.5, sink=sink)
    assert relative_error(out.transpose(0, 1).flatten(2), want.flatten(2)) < 1e-12


def core_of(spec: ModuleSpec) -> Any:
    return spec.submodules.self_attention.submodules.core_attention


def test_local_layer_spec(runtime: Runtime) -> None:
    spec = get_gpt_layer_local_spec()
    swapped = with_attention(spec, runtime)
    assert core_of(swapped).module is ContextParallelAttention
    assert core_of(swapped).params["runtime"] is runtime
    # The spec that was given may be shared: it stays as it was, and the rest of it is kept.
    assert core_of(spec) is DotProductAttention
    assert swapped.submodules.mlp is spec.submodules.mlp
    ours, theirs = swapped.submodules.self_attention, spec.submodules.self_attention
    assert ours.params == theirs.params
    assert ours.submodules.linear_qkv is theirs.submodules.linear_qkv


def test_heterogeneous_layers(runtime: Runtime) -> None:
    """Layers without attention, and with a linear map in its place, stay as they are."""
    plain: dict[str, Any] = {"no_op": False, "replace_with_linear": False}
    attentions = [
        plain | {"n_heads_in_group": 2},
        plain | {"n_heads_in_group": None, "no_op": True},
        plain | {"n_heads_in_group": None, "replace_with_linear": True},
    ]
    blocks = [{"attention": one, "ffn": plain | {"ffn_mult": 1.0}} for one in attentions]
    model = HeterogeneousTransformerConfig(
        num_layers=3,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        normalization="RMSNorm",
        heterogeneous_layers_config_encoded_json=json.dumps({"block_configs": blocks}),
    )
    spec = get_gpt_heterogeneous_layer_spec(model, use_te=False, pp_rank=0)
    served, none, linear = with_attention(spec, runtime).layer_specs
    assert core_of(served).module is ContextParallelAttention
    assert none.submodules.self_attention.module is IdentityOp
    assert linear.submodules.self_attention.module is ColumnParallelLinearGathered


def test_transformer_engine_spec(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    class TransformerEngineAttention:
        """Stands for TEDotProductAttention, which needs Transformer Engine."""

    monkeypatch.setattr(spec_module, "TEDotProductAttention", TransformerEngineAttention)
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = TransformerEngineAttention
    assert core_of(with_attention(spec, runtime)).module is ContextParallelAttention


def linear_runtime() -> Runtime:
    return Runtime(ContextParallelConfig("lasp2", 1, linear_model="transnormer"))


def test_spec_of_a_stack(runtime: Runtime) -> None:
    """A hybrid model's: of the kinds of attention that it has, its pattern takes one."""
    layers = {
        "attention_layer": get_gpt_layer_local_spec(),
        "mla_layer": get_gpt_layer_local_spec(multi_latent_attention=True),
    }
    stack = ModuleSpec(HybridStack, submodules=HybridStackSubmodules(**layers))
    swapped = with_attention(stack, runtime).submodules
    for layer in (swapped.attention_layer, swapped.mla_layer):
        assert core_of(layer).module is ContextParallelAttention
    served = with_attention(stack, linear_runtime()).submodules
    assert served.mla_layer is layers["mla_layer"]
    assert served.attention_layer.submodules.self_attention.module is TransNormerAttention
    assert swapped.dsa_layer is IdentityOp
    alone = ModuleSpec(HybridStack, submodules=HybridStackSubmodules(mla_layer=layers["mla_layer"]))
    assert with_attention(alone, runtime).submodules.attention_layer is IdentityOp


@pytest.mark.parametrize(
    ("layers", "got"),
    [
        ({"hybrid_layer_pattern": "G*"}, r"G\*"),
        ({"hybrid_override_pattern": "G*"}, r"G\*"),
        ({"hybrid_attention_ratio": 0.5}, "M"),
    ],
)
def test_layers_of_a_hybrid_model_that_no_flag_names(
    group: dist.ProcessGroup,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    layers: dict[str, Any],
    got: str,
) -> None:
    """They cut the sequence by Megatron's own layout, whatever that of the run is."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # a model sets NVTE_FUSED_ATTN and others
    stack = ModuleSpec(HybridStack, submodules=HybridStackSubmodules())
    model, of_model = HybridModel.__new__(HybridModel), config(use_cpu_initialization=True)
    signature = inspect.signature(HybridModel.__init__)
    call = signature.bind(model, of_model, stack, 8, 8, **{"post_process": False} | layers)
    parallel_state.initialize_model_parallel()
    try:
        with pytest.raises(ContextParallelError, match=f"got --hybrid-layer-pattern {got}"):
            build_model(HybridModel.__init__, call, runtime, None)
    finally:
        parallel_state.destroy_model_parallel()


def test_other_attention_is_refused(runtime: Runtime) -> None:
    sparse = get_gpt_layer_local_spec(multi_latent_attention=True)
    sparse.submodules.self_attention.submodules.core_attention = DSAttention
    assert with_attention(sparse, runtime) is sparse
    # Of another program, which only it cuts by.
    sparse.submodules.self_attention.module = type("DSAOfAProgram", (torch.nn.Module,), {})
    sparse.submodules.self_attention.submodules.core_attention = torch.nn.Identity
    with pytest.raises(ContextParallelError, match="got DSAOfAProgram"):
        with_attention(sparse, runtime)
    assert with_attention(sparse, Runtime(runtime.config, callers=True)) is sparse
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = torch.nn.Identity
    with pytest.raises(ContextParallelError, match="got Identity"):
        with_attention(spec, runtime)
    # Swapping twice would hide a mistake.
    with pytest.raises(ContextParallelError, match="got ContextParallelAttention"):
        with_attention(with_attention(get_gpt_layer_local_spec(), runtime), runtime)


@pytest.mark.parametrize("algo", ["zigzag", "lasp2"])
def test_checkpoints_of_linear_layers_are_not_stacked(algo: str) -> None:
    linear = {"linear_model": "transnormer"} if algo == "lasp2" else {}
    served = Runtime(ContextParallelConfig(algo, 1, **linear))
    model = config(num_query_groups=HEADS)
    with_plugin(get_gpt_layer_local_spec(), model, None, served)
    assert model.hetereogenous_dist_checkpoint == (algo == "lasp2")


def test_specs_can_be_copied(runtime: Runtime) -> None:
    spec = copy.deepcopy(with_attention(get_gpt_layer_local_spec(), runtime))
    assert core_of(spec).params["runtime"] is runtime
