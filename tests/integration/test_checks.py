"""Start-up checks: each refusal is one line that names what, got, and what to do."""

import argparse
import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import add_megatron_arguments
from megatron.training.models.gpt import GPTModelConfig

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ContextParallelError, KernelUnavailableError
from megatron_cp_plugin.integration import checks, rules
from megatron_cp_plugin.integration.checks import check_arguments, describe, describe_graphs
from megatron_cp_plugin.integration.features import FEATURES, Rule
from megatron_cp_plugin.integration.rules import check
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.kernels.selfcheck import check_kernel
from megatron_cp_plugin.kernels.torch_flash import CpuFlashAttention

CPU = torch.device("cpu")

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
    config = ContextParallelConfig(algo, args.context_parallel_size, kernel=kernel)
    with pytest.raises(ContextParallelError) as error:
        check_arguments(args, config, CPU)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("algo", ["ring", "zigzag"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_plain_model_passes(args: argparse.Namespace, algo: str, size: int) -> None:
    args.context_parallel_size = size
    check_arguments(args, ContextParallelConfig(algo, size), CPU)


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
    vars(args).update(multi_latent_attention=True, apply_rope_fusion=False)
    vars(args).update(qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
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


@pytest.mark.parametrize("impl", GRAPHS)
@pytest.mark.parametrize("algo", registry.available())
def test_every_algorithm_may_be_captured(args: argparse.Namespace, algo: str, impl: str) -> None:
    args.cuda_graph_impl = impl
    config = ContextParallelConfig(algo, 4)
    check("validated", Settings(args, config, GPU))
    if registry.kind_of(algo) == "softmax":
        check("model", Settings(args, config))


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
