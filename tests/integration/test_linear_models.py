"""Layers of linear attention: against their formulas, in specs, and in Megatron's own loop."""

from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint as torch_checkpoint
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_cp_plugin.config import LINEAR_MODELS, ContextParallelConfig
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration.args import split_flags
from megatron_cp_plugin.integration.documents import DocumentMask
from megatron_cp_plugin.integration.linear_models import MODELS, transnormer_rates
from megatron_cp_plugin.integration.runtime import Runtime
from tests.integration.megatron_job import TINY, run_warm

HEADS, HEAD_DIM, TOKENS, BATCH = 4, 8, 12, 3
WIDTH = HEADS * HEAD_DIM


class Projection(nn.Linear):
    """Stands for Megatron's parallel linear layers, on one tensor-parallel rank."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **others: Any) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def config(**changes: Any) -> TransformerConfig:
    settings: dict[str, Any] = {"num_layers": 3, "hidden_size": WIDTH, "attention_dropout": 0.0}
    settings |= {"num_attention_heads": HEADS, "add_bias_linear": False}
    return TransformerConfig(**(settings | changes))


def attention(model: str, group: dist.ProcessGroup, **changes: Any) -> Any:
    runtime = Runtime(ContextParallelConfig("lasp2", 1, linear_model=model))
    spec = ModuleSpec(
        module=MODELS[model],
        params={"runtime": runtime},
        submodules=SelfAttentionSubmodules(Projection, nn.Identity, Projection),
    )
    arguments: dict[str, Any] = {
        "config": config(),
        "layer_number": 2,
        "attn_mask_type": AttnMaskType.causal,
        "pg_collection": ProcessGroupCollection(tp=group, cp=group),
    }
    return build_module(spec, **(arguments | changes))


def parts_of(module: Any, x: Tensor, count: int) -> list[Tensor]:
    """The projections of x [s,b,hidden], head by head: [b,h,s,d] each."""
    groups = module.config.num_query_groups
    shared = HEADS // groups
    weight = module.linear_qkv.weight.view(groups, -1, HEAD_DIM, WIDTH)
    queries, key, value, gates = weight.tensor_split((shared, shared + 1, shared + 2), 1)
    parts = queries, *(x.expand(-1, shared, -1, -1) for x in (key, value)), gates
    return [torch.einsum("hdw,sbw->bhsd", part.flatten(0, 1), x) for part in parts[:count]]


def same_document(starts: tuple[int, ...]) -> Tensor:
    """[s,s]: whether two tokens are of one document."""
    document = torch.tensor([sum(start <= token for start in starts) for token in range(TOKENS)])
    return document[:, None] == document[None, :]


def expected_transnormer(
    module: Any, x: Tensor, causal: bool, starts: tuple[int, ...] = ()
) -> Tensor:
    """TransNormerLLM's attention by its quadratic form."""
    q, k, v, gate = parts_of(module, x, 4)
    q, k = q * torch.sigmoid(q), k * torch.sigmoid(k)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None, :]
    groups = module.config.num_query_groups
    rates = torch.tensor(transnormer_rates(groups, 2, 3), dtype=torch.float64)
    rates = rates.repeat_interleave(HEADS // groups)
    decay = rates[:, None, None] ** distance.abs()
    if causal:
        decay = decay * (distance >= 0)
    decay = decay * same_document(starts)
    out = ((q @ k.transpose(-1, -2)) * decay) @ v
    squares = out.square().sum((1, 3), keepdim=True) / WIDTH
    out = gate * out / (squares + 1e-5).sqrt()
    return out.permute(2, 0, 1, 3).flatten(2) @ module.linear_proj.weight.T


def expected_linear_transformer(
    module: Any, x: Tensor, causal: bool, starts: tuple[int, ...] = ()
) -> Tensor:
    """The Linear Transformer's attention by its quadratic form."""
    q, k, v = parts_of(module, x, 3)
    q, k = (torch.where(t > 0, t + 1, t.exp()) for t in (q, k))
    weights = q @ k.transpose(-1, -2)
    if causal:
        weights = weights.tril()
    weights = weights * same_document(starts)
    out = weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)
    return out.permute(2, 0, 1, 3).flatten(2) @ module.linear_proj.weight.T


EXPECTED = {
    "transnormer": expected_transnormer,
    "linear_transformer": expected_linear_transformer,
}


@pytest.mark.parametrize(
    ("starts", "groups"),
    [((), HEADS), ((1, 5, 9), HEADS), ((1, 5, 9), 2)],
    ids=["one document", "documents", "grouped queries"],
)
@pytest.mark.parametrize("recompute", [None, "selective"])
@pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("model", LINEAR_MODELS)
def test_against_the_formula(
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    mask: AttnMaskType,
    recompute: str | None,
    starts: tuple[int, ...],
    groups: int,
) -> None:
    calls = []

    def checkpoint(function: Any, distribute: bool, x: Tensor) -> Any:
        """Megatron's keeps the state of the GPU's random numbers."""
        calls.append(x.shape)
        return torch_checkpoint.checkpoint(function, x, use_reentrant=False)

    monkeypatch.setattr(tensor_parallel, "checkpoint", checkpoint)
    torch.manual_seed(0)
    settings = config(recompute_granularity=recompute, num_query_groups=groups)
    module = attention(model, group, attn_mask_type=mask, config=settings)
    x = torch.randn(TOKENS, BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
    packed = DocumentMask(seq_len=TOKENS, starts=starts) if starts else None
    out, bias = module(x, attention_mask=None, rotary_pos_emb=None, packed_seq_params=packed)
    assert bias is None
    assert len(calls) == (recompute == "selective")
    want = EXPECTED[model](module, x, mask is AttnMaskType.causal, starts)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    inputs = [x, *module.parameters()]
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, dout)
    for gradient, right in zip(got, torch.autograd.grad(want, inputs, dout), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("groups", [HEADS, 2])
def test_linearized_positions_of_the_first_layer(group: dist.ProcessGroup, groups: int) -> None:
    """LRPE by its defining form: a product of features is one of cosines of angle x distance."""
    torch.manual_seed(0)
    settings = config(use_cpu_initialization=True, num_query_groups=groups)
    module = attention("transnormer", group, layer_number=1, config=settings)
    theta = module.positions.theta
    width = groups * HEAD_DIM
    published = [10000 ** (-2 * channel / width) for channel in range(width)]
    assert theta.flatten().tolist() == pytest.approx(published, rel=1e-6)
    assert attention("transnormer", group, layer_number=2, config=settings).positions is None
    x = torch.randn(TOKENS, BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
    out, _ = module(x)
    q, k, v, gate = parts_of(module, x, 4)
    q, k = q * torch.sigmoid(q), k * torch.sigmoid(k)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None, :]
    shared = HEADS // groups
    angles = theta.double().repeat_interleave(shared, 0)[:, None, None, :]
    angles = angles * distance[None, :, :, None]
    scores = torch.einsum("bhsd,bhtd,hstd->bhst", q, k, angles.cos())
    rates = torch.tensor(transnormer_rates(groups, 1, 3), dtype=torch.float64)
    rates = rates.repeat_interleave(shared)
    mixed = (scores * (rates[:, None, None] ** distance.abs()) * (distance >= 0)) @ v
    squares = mixed.square().sum((1, 3), keepdim=True) / WIDTH
    mixed = gate * mixed / (squares + 1e-5).sqrt()
    want = mixed.permute(2, 0, 1, 3).flatten(2) @ module.linear_proj.weight.T
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    inputs = [x, *module.parameters()]
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, dout)
    for gradient, right in zip(got, torch.autograd.grad(want, inputs, dout), strict=True):
        # The angles' parameter, and so their gradient, is float32.
        bounds = (1e-9, 1e-11) if gradient.dtype == torch.float64 else (1e-6, 1e-6)
        torch.testing.assert_close(gradient, right, rtol=bounds[0], atol=bounds[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("model", "layer", "units"),
    [
        # The projection's parts (the gate among them), q, k, v as attention takes them, its output.
        ("transnormer", 2, 4 + 3 + 1),
        ("transnormer", 1, 4 + (2 + 2 + 1) + 1),
        # Attention has 8 columns more than the head dim of 8, twice.
        ("linear_transformer", 2, 3 + (1 + 1 + 2) + 2),
    ],
)
def test_what_is_kept_for_the_backward(
    group: dist.ProcessGroup, model: str, layer: int, units: int, dtype: torch.dtype
) -> None:
    """Bytes between the projections, in units of one tensor [s,b,h*d]."""
    module = attention(model, group, layer_number=layer, config=config(use_cpu_initialization=True))
    tokens, batch = 256, 2
    width = module.linear_qkv.out_features
    mixed = torch.randn(tokens, batch, width, dtype=dtype, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = module._core(mixed)
    assert out.shape == (tokens, batch, WIDTH)
    # What is less than a unit: numbers for each token or head, and a state.
    assert sum(kept.values()) // (tokens * batch * WIDTH * dtype.itemsize) == units


def test_groups_have_the_rates_of_as_many_heads(group: dist.ProcessGroup) -> None:
    module = attention("transnormer", group, config=config(num_query_groups=2))
    layer, layers = module.layer_number, module.config.num_layers
    assert module._decay.rates == transnormer_rates(2, layer, layers)


def test_rates_are_those_of_the_published_model() -> None:
    slopes = [2.0**-n for n in range(1, 9)]
    first = transnormer_rates(8, 1, 24)
    assert first == pytest.approx([exp(-slope * (1 + 1e-5)) for slope in slopes], rel=1e-12)
    middle = transnormer_rates(8, 12, 24)
    assert middle == pytest.approx([exp(-s * (1 - 11 / 23 + 1e-5)) for s in slopes], rel=1e-12)
    last = transnormer_rates(8, 24, 24)
    assert last == pytest.approx([exp(-slope * 1e-5) for slope in slopes], rel=1e-12)
    twelve = [*slopes, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert transnormer_rates(12, 1, 1) == pytest.approx(
        [exp(-slope * (1 + 1e-5)) for slope in twelve], rel=1e-12
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_query_groups": 2, "tensor_model_parallel_size": 4},
            "num_query_groups divisible by tensor_model_parallel_size = 4, got 2",
        ),
        ({"qk_l2_norm": True}, "does not support --qk-l2-norm"),
    ],
)
def test_what_a_model_may_not_ask_for(
    group: dist.ProcessGroup, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ContextParallelError, match=message):
        attention("transnormer", group, config=config(**changes))


@pytest.mark.parametrize(
    "argument",
    ["key_value_states", "inference_context", "attention_bias", "sequence_len_offset"],
)
def test_what_a_call_may_not_ask_for(group: dist.ProcessGroup, argument: str) -> None:
    module = attention("transnormer", group)
    x = torch.zeros(TOKENS, BATCH, WIDTH, dtype=torch.float64)
    with pytest.raises(ContextParallelError, match="linear attention does not support"):
        module(x, **{argument: x})


def test_documents_that_a_call_may_not_ask_for(group: dist.ProcessGroup) -> None:
    x = torch.zeros(TOKENS, BATCH, WIDTH, dtype=torch.float64)
    module = attention("transnormer", group)
    with pytest.raises(ContextParallelError, match=r"need to fill the 12 tokens .* end at 11"):
        module(x, packed_seq_params=DocumentMask(seq_len=11, starts=(3,)))
    with pytest.raises(ContextParallelError, match="need a GPTModel or HybridModel, got Tensor"):
        module(x, packed_seq_params=x)
    with pytest.raises(ContextParallelError, match="linear attention does not support spans"):
        module(x, packed_seq_params=DocumentMask(spans=((0, 12, 0, 12, "full"),)))
    module = attention("transnormer", group, attn_mask_type=AttnMaskType.no_mask)
    with pytest.raises(ContextParallelError, match="padded documents need causal attention"):
        module(x, packed_seq_params=DocumentMask(seq_len=TOKENS, starts=(3,), padding=((2, 3),)))


def test_flags() -> None:
    words = ["--cp-layers", "lasp2*7, zigzag", "--cp-linear-model", "transnormer", "--seed", "1"]
    flags, rest = split_flags(words)
    flags.check()
    assert rest == ["--seed", "1"]
    assert flags.algo == "zigzag"
    assert flags.config(4).layers == ("lasp2",) * 7 + ("zigzag",)
    assert flags.config(4).layout.name == "zigzag"
    with pytest.raises(ConfigError, match="needs algorithms of the plugin, got megatron"):
        split_flags(["--cp-layers", "lasp2", "--context-parallel-algo", "megatron"])


POSITIONS = (*TINY, "--num-layers", "4", "--init-method-std", "0.1")
POSITIONS = (*POSITIONS, "--position-embedding-type", "learned_absolute")
HYBRID = (*POSITIONS, "--cp-layers", "lasp2*3, zigzag", "--cp-linear-model", "transnormer")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hybrid_and_its_checkpoint(tmp_path: Path) -> None:
    """Saved on one rank, loaded with other tensor, pipeline and context parallelism."""
    checkpoints = str(tmp_path / "checkpoints")
    saved = ("--save", checkpoints, "--save-interval", "2", "--ckpt-format", "torch_dist")
    flags = (*HYBRID, *saved, "--exit-interval", "2")
    whole = run_warm(tmp_path / "whole", *flags).succeeded()
    split = (*HYBRID, "--context-parallel-size", "2")
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags = (*split, *recompute.split(), "--exit-interval", "2")
    again = run_warm(tmp_path / "again", *flags, ranks=2).succeeded()
    assert again.losses == pytest.approx(whole.losses, rel=1e-5)
    loaded = ("--load", checkpoints, "--ckpt-format", "torch_dist")
    reference = run_warm(tmp_path / "reference", *HYBRID, *loaded).succeeded()
    assert len(reference.losses) == 1
    tensor = ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "64")
    pipeline = ("--pipeline-model-parallel-size", "2")
    others = {"tensor": ((*split, *tensor), 4), "pipeline": ((*HYBRID, *pipeline), 2)}
    for name, (other, ranks) in others.items():
        job = run_warm(tmp_path / name, *other, *loaded, ranks=ranks)
        assert job.succeeded().losses == pytest.approx(reference.losses, rel=1e-5)
