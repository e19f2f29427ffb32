"""Start-up checks: each refusal is one line that names what, got, and what to do."""

import argparse
import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import add_megatron_arguments
from megatron.training.models.gpt import GPTModelConfig

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ConfigError, ContextParallelError, KernelUnavailableError
from megatron_cp_plugin.integration import checks, rules
from megatron_cp_plugin.integration.checks import check_arguments, describe, describe_graphs
from megatron_cp_plugin.integration.rules import FEATURES, Rule, check
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.kernels.selfcheck import check_kernel
from megatron_cp_plugin.kernels.torch_flash import CpuFlashAttention

CPU = torch.device("cpu")

# A value for each setting that asks for the refused feature.
ASKING: dict[str, Any] = {
    "moe_router_load_balancing_type": "sinkhorn",
    "attention_dropout": 0.1,
    "experimental_attention_variant": "dsv4_hybrid",
    "hybrid_layer_pattern": "D*",
    "attention_backend": AttnBackend.local,
    "flash_attention_version": 3,
    "position_embedding_type": "relative",
    "cuda_graph_impl": "local",
    "yaml_cfg": "file.yaml",
    "recompute_modules": ["core_attn", "mlp"],
    "micro_batch_size": 2,
    "recompute_granularity": "full",
    "cuda_graph_warmup_steps": 0,
    "mtp_num_layers": 1,
    "tensor_parallel_num_weight_shards": 2,
    "expert_tensor_parallel_num_weight_shards": 2,
    "save": "checkpoints",
    "load": "checkpoints",
}
# What is refused only beside another setting, or by another value than `ASKING` has, by the
# feature's name.
DOCUMENTS = {"dataloader_inter_document_masking": True}
EXPERTS = {"num_experts": 4}
GATED = {"experimental_attention_variant": "gated_delta_net"}
SPARSE = {"experimental_attention_variant": "dsa", "context_parallel_size": 4}
LATENT = {"multi_latent_attention": True, "apply_rope_fusion": False}
BESIDE: dict[str, dict[str, Any]] = {
    "attention sinks split by tensor parallelism in Megatron-FSDP": {
        "softmax_type": "learnable",
        "tensor_model_parallel_size": 2,
        "world_size": 8,
    },
    "Megatron-FSDP in a pipeline": {"pipeline_model_parallel_size": 2, "world_size": 8},
    "documents of several samples in a pipeline": {
        **DOCUMENTS,
        "pipeline_model_parallel_size": 2,
        "world_size": 8,
    },
    "a mixture of experts in CUDA graphs of whole layers or iterations": EXPERTS,
    "packed documents in CUDA graphs": DOCUMENTS,
    "packed documents in CUDA graphs with a mixture of experts": DOCUMENTS | EXPERTS,
    "documents of several samples in CUDA graphs": {
        **DOCUMENTS,
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": ["mlp"],
    },
    "recurrent layers in CUDA graphs": GATED,
    "multi-token prediction with gated delta net layers": GATED,
    "QK clipping of attention in CUDA graphs": {"cuda_graph_impl": "local"},
    "logging the largest attention logit in CUDA graphs": {"cuda_graph_impl": "local"},
    "optimizer states in checkpoints of FSDP": {"use_torch_fsdp2": True},
    "loading optimizer states with FSDP": {"use_torch_fsdp2": True},
    "Megatron-FSDP in CUDA graphs": {"cuda_graph_impl": "local"},
    "FSDP in CUDA graphs": {"cuda_graph_impl": "transformer_engine"},
    "full recompute in CUDA graphs of layers": {"cuda_graph_impl": "local"},
    "recomputed attention in local CUDA graphs": {"recompute_granularity": "selective"},
    "a whole iteration in a CUDA graph from the first one on": {
        "cuda_graph_impl": "full_iteration"
    },
    "packed documents with DSA layers": SPARSE,
    "packed conversations with DSA layers": SPARSE,
    "packed documents with gated delta net layers": GATED,
    "packed conversations with gated delta net layers": GATED,
    "position embeddings of the model besides those of multi-latent attention": {
        **LATENT,
        "position_embedding_type": "yarn",
    },
}
# Not settings of Megatron 0.19, but of its development branch and of ModelOpt.
ELSEWHERE = {"dynamic_context_parallel", "modelopt_enabled"}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture
def args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    words += "--context-parallel-size 4 --attention-dropout 0 --position-embedding-type rope"
    parsed = parser.parse_args(words.split())
    parsed.world_size = 4
    return parsed


def refusal(args: argparse.Namespace, algo: str = "zigzag", **changes: Any) -> str:
    kernel = changes.pop("kernel", "auto")
    for name, value in changes.items():
        assert hasattr(args, name), name
        setattr(args, name, value)
    config = ContextParallelConfig(algo, args.context_parallel_size, kernel)
    with pytest.raises(ContextParallelError) as error:
        check_arguments(args, config, CPU)
    message = str(error.value)
    assert "\n" not in message
    return message


def copy_of(args: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**(vars(args) | changes))


@pytest.mark.parametrize("algo", ["ring", "zigzag"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_plain_model_passes(args: argparse.Namespace, algo: str, size: int) -> None:
    args.context_parallel_size = size
    check_arguments(args, ContextParallelConfig(algo, size), CPU)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.setting)
def test_every_refused_feature_is_named(args: argparse.Namespace, feature: Rule) -> None:
    value = ASKING.get(feature.setting, True)
    vars(args).update({feature.setting: value} | BESIDE.get(feature.name, {}))
    message, value = refusal(args), getattr(args, feature.setting)
    assert feature.name in message
    assert f"got {feature.flag} {getattr(value, 'name', value)}" in message
    assert message.endswith(feature.instead)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--cuda-graph-impl local", "a mixture of experts"),
        ("--cuda-graph-impl local --cuda-graph-modules attn moe_router", "a mixture of experts"),
        ("--cuda-graph-impl local --cuda-graph-modules moe_router", ""),
        ("--cuda-graph-impl full_iteration", "a mixture of experts"),
        ("--cuda-graph-impl transformer_engine", "a mixture of experts"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules full", "a mixture of experts"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router", ""),
    ],
)
def test_a_mixture_of_experts_in_graphs(
    parser: argparse.ArgumentParser, args: argparse.Namespace, flags: str, refused: str
) -> None:
    vars(args).update(EXPERTS)
    parser.parse_args(flags.split(), namespace=args)
    if refused:
        assert refused in refusal(args)
    else:
        check("model", Settings(args, ContextParallelConfig("zigzag", 4)))


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--cuda-graph-impl local --cuda-graph-modules mlp", "packed documents"),
        ("--cuda-graph-impl full_iteration", "packed documents"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp", "packed documents"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules full", "packed documents"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules mlp", ""),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-modules mlp --micro-batch-size 2",
            "documents of several samples in CUDA graphs",
        ),
    ],
)
def test_packed_documents_in_graphs(
    parser: argparse.ArgumentParser, args: argparse.Namespace, flags: str, refused: str
) -> None:
    vars(args).update(DOCUMENTS)
    parser.parse_args(flags.split(), namespace=args)
    if refused:
        assert refused in refusal(args)
    else:
        check("model", Settings(args, ContextParallelConfig("zigzag", 4)))


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.setting)
def test_every_refused_setting_exists(args: argparse.Namespace, feature: Rule) -> None:
    fields = {
        f.name for kind in (TransformerConfig, GPTModelConfig) for f in dataclasses.fields(kind)
    }
    known = vars(args).keys() | fields | ELSEWHERE
    assert feature.setting in known


def test_flags_of_refused_features_are_flags_of_megatron(parser: argparse.ArgumentParser) -> None:
    options = {option for action in parser._actions for option in action.option_strings}
    dests = {action.dest for action in parser._actions}
    for feature in FEATURES:
        if feature.setting in dests:
            assert feature.flag in options


def test_the_model_configuration_is_checked_too() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.1
    )
    with pytest.raises(ContextParallelError, match="attention dropout"):
        check("model", Settings(config, ContextParallelConfig("ring", 1)))
    config.attention_dropout = 0.0
    check("model", Settings(config, ContextParallelConfig("ring", 1)))
    config.fp8_dot_product_attention = True
    with pytest.raises(ContextParallelError, match="FP8 attention"):
        check("model", Settings(config, ContextParallelConfig("ring", 1)))


@pytest.mark.parametrize("name", ["logits_save_dir", "logits_load_dir"])
@pytest.mark.parametrize("size", [3, 4])
def test_log_probabilities_of_another_run(args: argparse.Namespace, name: str, size: int) -> None:
    """A student at other tokens than its teacher's would learn nonsense, and no shape tells."""
    vars(args).update({name: "folder", "context_parallel_size": size, "world_size": size})
    args.seq_length = 60 * size
    assert refusal(args, "ring") == (
        f"--{name.replace('_', '-')} stores log-probabilities in the order of a rank's tokens, "
        "which needs to be Megatron's zigzag layout in all runs, got ring with the contiguous "
        "layout: use --context-parallel-algo zigzag"
    )
    for algo in ("zigzag", "allgather", "attention2d", "usp"):
        check_arguments(args, ContextParallelConfig(algo, size), CPU)
    unsplit = copy_of(args, context_parallel_size=1)
    check_arguments(unsplit, ContextParallelConfig("ring", 1), CPU)
    said = refusal(args, **DOCUMENTS)
    assert "without packed documents, got --dataloader-inter-document-masking: leave one" in said


def test_sequence_length(args: argparse.Namespace) -> None:
    message = refusal(args, seq_length=68)
    assert message == (
        "zigzag needs seq_length divisible by 2 * context_parallel_size = 8, got 68: "
        "use 64 or 72, or --context-parallel-algo ring"
    )
    check_arguments(args, ContextParallelConfig("ring", 4), CPU)
    assert "got 70: use 68 or 72" in refusal(args, "ring", seq_length=70)
    assert "got 70" in refusal(args, "ring", seq_length=None, encoder_seq_length=70)


def test_tokens_of_a_rank_under_sequence_parallelism(args: argparse.Namespace) -> None:
    changes = {"tensor_model_parallel_size": 2, "world_size": 8, "sequence_parallel": True}
    message = refusal(args, "ring", seq_length=68, **changes)
    assert "17 tokens" in message
    assert "use 64 or 72" in message


@pytest.mark.parametrize(
    ("algo", "window", "said"),
    [
        (
            "zigzag",
            (127, 1),
            "got 127,1: causal attention sees no later tokens, use --window-size 127,0",
        ),
        ("zigzag", (-2, 0), "needs LEFT,0 with LEFT >= 0, or -1 for all earlier tokens, got -2,0"),
    ],
)
def test_windows_that_cannot_be_had(
    args: argparse.Namespace, algo: str, window: tuple[int, int], said: str
) -> None:
    assert said in refusal(args, algo, window_size=window)


def test_windows_of_an_algorithm_that_serves_none(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.algorithm_class("usp"), "windows", False)
    said = refusal(args, "usp", window_size=(127, 0))
    assert said.startswith(
        "usp does not support sliding windows, got --window-size 127,0: leave it"
    )
    assert "usp" not in said.split("use --context-parallel-algo")[1]


@pytest.mark.parametrize("algo", registry.available("softmax"))
def test_windows_that_can_be_had(args: argparse.Namespace, algo: str) -> None:
    args.window_size = (127, 0)
    check_arguments(args, ContextParallelConfig(algo, 4), CPU)


@pytest.mark.parametrize("flag", ["sft", "dataloader_inter_document_masking"])
def test_documents(args: argparse.Namespace, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setattr(args, flag, True)
    check_arguments(args, ContextParallelConfig("zigzag", 4), CPU)
    linear = ContextParallelConfig("lasp", 4, linear_model="transnormer")
    with monkeypatch.context() as only_here:
        only_here.setattr(args, "position_embedding_type", "learned_absolute")
        check_arguments(args, linear, CPU)
    word = "--" + flag.replace("_", "-")
    monkeypatch.setattr(rules, "running_version", lambda: ((0, 18), "0.18.1"))
    assert f"got {word}: use Megatron 0.19 or later" in refusal(args)


@pytest.fixture
def latent(args: argparse.Namespace) -> argparse.Namespace:
    vars(args).update(LATENT, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
    return args


@pytest.mark.parametrize("algo", registry.available("softmax"))
def test_latent_attention(latent: argparse.Namespace, algo: str) -> None:
    check_arguments(latent, ContextParallelConfig(algo, 4), CPU)
    latent.multi_latent_attention, latent.hybrid_layer_pattern = False, "+-E/+"
    check_arguments(latent, ContextParallelConfig(algo, 4), CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"context_parallel_size": 1},
        # Megatron fuses rotary position embeddings only.
        {"position_embedding_type": "none"},
        {"multi_latent_attention": False},
    ],
)
def test_fused_positions_that_are_not_cut(
    latent: argparse.Namespace, changes: dict[str, Any]
) -> None:
    latent.apply_rope_fusion = True
    assert Settings(latent).cuts_fused_rotary
    vars(latent).update(changes)
    assert not Settings(latent).cuts_fused_rotary
    check_arguments(latent, ContextParallelConfig("zigzag", latent.context_parallel_size), CPU)


def test_linear_attention_has_no_latents(latent: argparse.Namespace) -> None:
    latent.position_embedding_type = "none"
    config = ContextParallelConfig("lasp", 4, linear_model="transnormer")
    with pytest.raises(
        ConfigError, match=r"--cp-linear-model transnormer cannot be combined with .* leave it out"
    ):
        check_arguments(latent, config, CPU)
    mixed = ContextParallelConfig(
        "ring", 4, layers=("lasp", "ring"), linear_model="linear_transformer"
    )
    with pytest.raises(ConfigError, match="got --multi-latent-attention"):
        check_arguments(latent, mixed, CPU)


def test_the_kernel_is_asked_for_the_dims_of_latent_attention(
    latent: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = checks.resolve

    def resolve(kernel: str, problem: Any) -> Any:
        asked.append((problem.heads, problem.kv_heads, problem.head_dim, problem.value_dim))
        return real(kernel, problem)

    monkeypatch.setattr(checks, "resolve", resolve)
    check_arguments(latent, ContextParallelConfig("zigzag", 4), CPU)
    latent.multi_latent_attention = False
    check_arguments(latent, ContextParallelConfig("zigzag", 4), CPU)
    assert asked == [(8, 8, 24, 12), (8, 8, 8, 8)]


def test_linear_attention_has_no_window(args: argparse.Namespace) -> None:
    args.window_size, args.position_embedding_type = (127, 0), "none"
    config = ContextParallelConfig("lasp", 4, linear_model="transnormer")
    with pytest.raises(ConfigError, match="lasp computes linear attention, which has no sliding"):
        check_arguments(args, config, CPU)
    args.window_size = (-1, 0)
    check_arguments(args, config, CPU)


def test_world_size(args: argparse.Namespace) -> None:
    assert refusal(args, context_parallel_size=3) == (
        "context_parallel_size 3 must divide the number of processes, got 4: "
        "start a multiple of 3 processes, or use context_parallel_size 1 or 2 or 4"
    )
    message = refusal(args, context_parallel_size=4, tensor_model_parallel_size=2)
    assert "context_parallel_size 4 * tensor_model_parallel_size 2 = 8 must divide" in message
    assert "use context_parallel_size 1 or 2" in message
    assert "must be at least 1, got 0" in refusal(args, context_parallel_size=0)


def test_an_order_of_ranks_that_megatron_has_not(args: argparse.Namespace) -> None:
    split = {"use_tp_pp_dp_mapping": True, "pipeline_model_parallel_size": 2, "world_size": 8}
    assert refusal(copy_of(args, **split)) == (
        "--use-tp-pp-dp-mapping in a pipeline needs expert tensor parallel * expert parallel = "
        "tensor parallel * context parallel = 4, got 1: leave it out"
    )
    for changes in (
        {"expert_model_parallel_size": 4},
        {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        {"pipeline_model_parallel_size": 1},
        {"use_tp_pp_dp_mapping": False},
    ):
        check_arguments(copy_of(args, **(split | changes)), ContextParallelConfig("zigzag", 4), CPU)


@pytest.mark.parametrize(
    ("count", "group", "instead"),
    [
        (1, None, "--global-batch-size 8"),
        (3, None, "--global-batch-size 16"),
        (2, 1, "--microbatch-group-size-per-virtual-pipeline-stage 2"),
        (4, 3, "--global-batch-size 24"),
        (2, None, None),
        (4, None, None),
        (5, 3, None),
    ],
)
def test_micro_batches_of_an_interleaved_pipeline(
    args: argparse.Namespace, count: int, group: int | None, instead: str | None
) -> None:
    """2 stages; samples of 2 micro-batches on 2 data-parallel ranks."""
    args.pipeline_model_parallel_size = args.virtual_pipeline_model_parallel_size = 2
    args.micro_batch_size = args.data_parallel_size = 2
    args.global_batch_size = 4 * count
    args.microbatch_group_size_per_vp_stage = group
    if instead is None:
        check("validated", Settings(args))
        return
    with pytest.raises(ConfigError, match=f"got {count} micro-batches: use {instead}$"):
        check("validated", Settings(args))


def test_unknown_algorithm_names_the_nearest(args: argparse.Namespace) -> None:
    assert "'zigzga' (did you mean 'zigzag'?)" in refusal(args, "zigzga")


@pytest.mark.parametrize("groups", [3, 6])
def test_gqa_heads_and_tensor_parallelism(args: argparse.Namespace, groups: int) -> None:
    changes = {"tensor_model_parallel_size": 4, "context_parallel_size": 1}
    message = refusal(
        args, num_attention_heads=12, group_query_attention=True, num_query_groups=groups, **changes
    )
    assert (
        f"must be divisible by tensor_model_parallel_size 4 or divide it, got {groups}" in message
    )
    assert "use one of 1, 2, 4, 12" in message


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_gqa_heads_that_megatron_shares_among_ranks_pass(
    args: argparse.Namespace, groups: int
) -> None:
    args.world_size, args.tensor_model_parallel_size = 16, 4
    args.group_query_attention, args.num_query_groups = True, groups
    check_arguments(args, ContextParallelConfig("zigzag", 4), CPU)


def test_heads(args: argparse.Namespace) -> None:
    message = refusal(args, tensor_model_parallel_size=3, context_parallel_size=1, world_size=3)
    assert "num_attention_heads must be divisible by tensor_model_parallel_size 3, got 8" in message
    assert message.endswith("use tensor_model_parallel_size 1")
    args.tensor_model_parallel_size, args.world_size = 1, 4
    message = refusal(args, group_query_attention=True, num_query_groups=3)
    assert "num_attention_heads 8 must be divisible by num_query_groups, got 3" in message


@pytest.mark.parametrize("format", ["torch_dist", "torch_dcp"])
def test_what_fsdp_saves_and_loads(args: argparse.Namespace, format: str) -> None:
    """Weights, by torch_dist; neither without FSDP nor for them is anything refused."""
    flags = {"ckpt_format": format, "save": "there", "load": "there"}
    check_arguments(copy_of(args, **flags), ContextParallelConfig("zigzag", 4), CPU)
    sharded = flags | {"use_torch_fsdp2": True}
    assert "got --save there (Megatron's torch_dist does not save" in refusal(
        copy_of(args), **sharded
    )
    weights = sharded | {"no_save_optim": True, "ckpt_format": "torch_dist"}
    assert "got --load there (Megatron's torch_dist does not save" in refusal(
        copy_of(args), **weights
    )
    for other in ("no_load_optim", "finetune"):
        whole = copy_of(args, **weights, **{other: True})
        check_arguments(whole, ContextParallelConfig("zigzag", 4), CPU)


def test_megatron_fsdp_without_einops(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    assert refusal(args, use_megatron_fsdp=True) == (
        "--use-megatron-fsdp needs the package einops, got none: pip install einops, or use "
        "--use-torch-fsdp2"
    )
    monkeypatch.setattr(rules, "find_spec", lambda name: name)
    check_arguments(args, ContextParallelConfig("zigzag", 4), CPU)
    linear = ContextParallelConfig("lasp", 4, linear_model="transnormer")
    args.position_embedding_type = "none"
    check_arguments(args, linear, CPU)
    args.tensor_model_parallel_size, args.world_size = 2, 8
    with pytest.raises(ConfigError, match="transnormer with tensor parallelism does not work with"):
        check_arguments(args, linear, CPU)


def test_heads_that_ranks_cannot_split_are_filled_up(args: argparse.Namespace) -> None:
    args.world_size = args.context_parallel_size = 16
    args.seq_length = 256
    said = []
    for algo in ("zigzag", "ulysses"):
        config = ContextParallelConfig(algo, 16)
        check_arguments(args, config, CPU)
        said.append(checks.describe_heads(Settings(args, config)))
    assert said == [
        None,
        "ulysses computes 16 query heads instead of 8: zero heads are added so that the ranks "
        "can split them",
    ]


def test_the_chosen_kernel_is_said_at_start_up(args: argparse.Namespace) -> None:
    config = ContextParallelConfig("zigzag", 4)
    kernel = check_arguments(args, config, CPU)
    assert describe(config, kernel).endswith("kernel auto (torch_cpu)")


@pytest.mark.parametrize("kernel", ["cudnn", "flash5"])
def test_kernel_that_cannot_serve(args: argparse.Namespace, kernel: str) -> None:
    config = ContextParallelConfig("zigzag", 4, kernel)
    with pytest.raises(KernelUnavailableError, match=kernel) as error:
        check_arguments(args, config, CPU)
    assert "\n" not in str(error.value)


class TwiceTheKeys(CpuFlashAttention):
    """Computes wrong gradients of keys that several query heads share."""

    name = "twice"

    def backward(self, call: Any, *rest: Any) -> Any:
        dq, dk, dv = super().backward(call, *rest)
        return dq, dk * (2 if call.q.shape[2] > call.k.shape[2] else 1), dv


def test_a_wrong_kernel_is_refused_on_gpus(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs is checked with the heads and the dtype of the model, before it is built."""
    checked = []

    def check_here(kernel: Any, problem: Any) -> None:
        checked.append(problem)
        check_kernel(kernel, dataclasses.replace(problem, device=CPU))

    monkeypatch.setattr(checks, "resolve", lambda name, problem: TwiceTheKeys())
    monkeypatch.setattr(checks, "check_kernel", check_here)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    config, device = ContextParallelConfig("zigzag", 4), torch.device("cuda", 1)
    assert check_arguments(args, config, CPU) == "twice"
    assert not checked
    args.bf16 = True
    assert check_arguments(args, config, device) == "twice"
    args.group_query_attention, args.num_query_groups = True, 2
    with pytest.raises(KernelUnavailableError, match=r"8:2 heads of 8 in bfloat16: dk") as error:
        check_arguments(args, config, device)
    assert "\n" not in str(error.value)
    assert [(p.heads, p.kv_heads, p.head_dim) for p in checked] == [(8, 8, 8), (8, 2, 8)]
    assert {(p.device, p.dtype) for p in checked} == {(device, torch.bfloat16)}


GRAPHS = ("local", "transformer_engine", "full_iteration")
GPU = torch.device("cuda")


def refused_graphs(
    args: argparse.Namespace, impl: str, config: ContextParallelConfig, device: torch.device = GPU
) -> str:
    args.cuda_graph_impl = impl
    with pytest.raises(ConfigError) as error:
        check("validated", Settings(args, config, device))
    message = str(error.value)
    assert "\n" not in message
    assert f"--cuda-graph-impl {impl}" in message
    return message


@pytest.mark.parametrize("impl", GRAPHS)
@pytest.mark.parametrize("algo", registry.available())
def test_every_algorithm_may_be_captured(args: argparse.Namespace, algo: str, impl: str) -> None:
    args.cuda_graph_impl = impl
    config = ContextParallelConfig(algo, 4)
    check("validated", Settings(args, config, GPU))
    if registry.kind_of(algo) == "softmax":
        check("model", Settings(args, config))


@pytest.mark.parametrize("impl", GRAPHS)
def test_what_cannot_be_captured_is_refused(
    args: argparse.Namespace, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    zigzag = ContextParallelConfig("zigzag", 4)
    assert "needs GPUs, got the cpu platform: leave it out" in refused_graphs(
        args, impl, zigzag, CPU
    )
    documents = ContextParallelConfig("zigzag", 4, options=(("layout", "documents"),))
    assert "got one that follows documents" in refused_graphs(args, impl, documents)
    monkeypatch.setattr(rules, "running_version", lambda: ((0, 18), "0.18.1"))
    assert "Megatron 0.18.1 cannot capture" in refused_graphs(args, impl, zigzag)


def test_unequal_ranks_are_captured_by_some(args: argparse.Namespace) -> None:
    """Transformer Engine captures with samples of equal length."""
    ring = ContextParallelConfig("ring", 4)
    args.seq_length = 62
    assert "got seq_length 62 on 4: use a multiple of 4, or --cuda-graph-impl local" in (
        refused_graphs(args, "transformer_engine", ring)
    )
    for impl in ("local", "full_iteration"):
        args.cuda_graph_impl = impl
        check("validated", Settings(args, ring, GPU))
    args.cuda_graph_impl, args.seq_length = "transformer_engine", None
    check("validated", Settings(args, ring, GPU))


@pytest.mark.parametrize(
    ("impl", "modules", "recomputed", "refused"),
    [
        ("local", [], ["core_attn"], True),
        ("local", ["attn"], None, True),
        ("local", ["mlp"], ["core_attn"], True),
        ("local", ["moe_router"], ["core_attn"], False),
        ("local", [], ["layernorm"], False),
        ("transformer_engine", [], ["core_attn"], False),
        ("full_iteration", [], ["core_attn"], False),
    ],
)
def test_recomputed_attention_is_captured_by_some(
    args: argparse.Namespace,
    impl: str,
    modules: list[str],
    recomputed: list[str] | None,
    refused: bool,
) -> None:
    args.cuda_graph_impl, args.cuda_graph_modules = impl, modules
    args.recompute_granularity, args.recompute_modules = "selective", recomputed
    expected = pytest.raises(ConfigError, match="recomputed attention in local CUDA graphs")
    with expected if refused else nullcontext():
        check("model", Settings(args, ContextParallelConfig("zigzag", 4)))


def test_a_whole_iteration_goes_with_full_recompute(args: argparse.Namespace) -> None:
    args.cuda_graph_impl, args.recompute_granularity = "full_iteration", "full"
    check("model", Settings(args, ContextParallelConfig("zigzag", 4)))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", None),
        ("--cuda-graph-impl local", "local, whole layers): attention captured"),
        ("--enable-cuda-graph", "local, whole layers): attention captured"),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp",
            "transformer_engine, of each layer attn, mlp): attention captured",
        ),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-modules mlp",
            "transformer_engine, of each layer mlp): attention not captured",
        ),
        (
            "--cuda-graph-impl local --cuda-graph-modules mlp",
            "local, whole layers): attention captured",
        ),
        (
            "--cuda-graph-impl local --cuda-graph-modules mlp --hybrid-layer-pattern *-*-",
            "local, of each layer mlp): attention not captured",
        ),
        (
            "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 2",
            "full_iteration, whole iterations after 2): attention captured",
        ),
    ],
)
def test_what_is_captured_is_said(
    parser: argparse.ArgumentParser, flags: str, said: str | None
) -> None:
    line = describe_graphs(Settings(parser.parse_args(flags.split())))
    assert line == (said and f"CUDA graphs by Megatron ({said}")


@pytest.mark.parametrize(
    ("steps", "got"),
    [
        ({"train_iters": 0}, "--train-iters 0"),
        ({"train_iters": -3}, "--train-iters -3"),
        ({"train_samples": 0}, "--train-samples 0"),
        ({}, "neither"),
        ({"train_iters": 1}, None),
        ({"train_samples": 64}, None),
        ({"train_iters": 0, "skip_train": True}, None),
    ],
)
def test_runs_of_no_steps(steps: dict[str, Any], got: str | None) -> None:
    args = argparse.Namespace(
        **{"train_iters": None, "train_samples": None, "skip_train": False} | steps
    )
    if got is None:
        check("training", Settings(args))
        return
    with pytest.raises(ConfigError, match=f"of 1 or more, got {got}: add --train-iters 1, or"):
        check("training", Settings(args))
