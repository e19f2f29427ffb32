"""Megatron's gated delta net layers beside softmax attention of the plugin, and what is refused.

The reference is Megatron's own attention on the whole sequence. The softmax layers have an output
gate, as those of Qwen3-Next.
"""

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.ssm import gated_delta_net as megatron
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.training.arguments import add_megatron_arguments
from torch import nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.harness.parity import Comparison, Recording, Tolerances, compare
from megatron_cp_plugin.integration import rules
from megatron_cp_plugin.integration.checks import check_arguments
from megatron_cp_plugin.integration.gated_delta_net import served
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.spec import with_attention
from tests.integration.megatron_job import TINY, run_warm
from tests.integration.ranks import ALONE
from tests.integration.recurrent_layers import Projection, check_documents, with_weights

JOB = Path(__file__).with_name("gated_delta_net_job.py")
WORDS = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
WORDS += "--linear-key-head-dim 8 --linear-value-head-dim 12 --linear-num-key-heads 4 "
WORDS += "--linear-num-value-heads 8 --attention-output-gate --qk-layernorm "
WORDS += "--position-embedding-type rope --rotary-percent 0.5 --swiglu --normalization RMSNorm "
WORDS += "--disable-bias-linear --group-query-attention --num-query-groups 2 "
MODEL = (*TINY, *WORDS.split(), "--spec", "gated_delta_net_job", "block")
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def train(folder: Path, flags: str, ranks: int = 1, script: Path = JOB) -> Recording:
    words = (*MODEL, *flags.split(), "--cp-record", str(folder))
    run_warm(folder, *words, ranks=ranks, script=script).succeeded()
    return Recording.load(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return train(tmp_path_factory.mktemp("whole"), "--context-parallel-algo megatron")


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (f"--context-parallel-algo zigzag --use-distributed-optimizer {RECOMPUTE}", 4),
        ("--context-parallel-algo ulysses", 2),
        pytest.param("--cp-layers allgather,usp", 2, marks=pytest.mark.slow),
        # Every layout is that of the whole sequence.
        ("--context-parallel-algo ring", 1),
    ],
)
def test_equals_the_whole_sequence(
    whole: Recording, tmp_path: Path, flags: str, ranks: int
) -> None:
    split = train(tmp_path, f"{flags} --context-parallel-size {ranks}", ranks)
    assert_equal(compare(whole, split, Tolerances()))


def assert_equal(comparison: Comparison) -> None:
    assert comparison.passed, comparison.problems
    parts = (
        *(f"in_proj.weight[{part}]" for part in ("query", "key", "value", "gate", "beta", "alpha")),
        *(f"conv1d.weight[{part}]" for part in ("query", "key", "value")),
        *("A_log", "dt_bias", "out_norm.weight", "out_proj.weight", "linear_qkv.weight[gate]"),
    )
    for part in parts:
        assert any(f"self_attention.{part}" in name for name in comparison.gradients), part


@pytest.mark.parametrize(
    ("model", "split"),
    [
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 4 "
            "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
            f"--context-parallel-algo zigzag --use-distributed-optimizer {RECOMPUTE}",
        ),
        pytest.param(
            "--pipeline-model-parallel-size 2",
            "--context-parallel-algo allgather",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_beside_model_parallelism(tmp_path: Path, model: str, split: str) -> None:
    reference = train(tmp_path / "whole", f"{model} --context-parallel-algo megatron", 2)
    run = train(tmp_path / "split", f"{model} {split} --context-parallel-size 2", 4)
    assert_equal(compare(reference, run, Tolerances()))


def test_a_checkpoint_of_megatron_goes_on(tmp_path: Path) -> None:
    """Saved by Megatron's own layers on the whole sequence, loaded on two ranks."""
    saved = f"--save {tmp_path / 'saved'} --save-interval 2 --ckpt-format torch_dist"
    whole = (*MODEL, *saved.split(), "--context-parallel-algo", "megatron")
    losses = run_warm(tmp_path / "whole", *whole, script=JOB).succeeded().losses
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    split = f"--load {tmp_path / 'saved'} --ckpt-format torch_dist --context-parallel-algo zigzag"
    words = (*MODEL, *split.split(), "--context-parallel-size", "2")
    resumed = run_warm(tmp_path / "split", *words, ranks=2, script=JOB).succeeded().losses
    assert len(resumed) == 1
    assert resumed[0] == pytest.approx(losses[2], rel=1e-5)
    assert resumed[0] != losses[0]


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """A model that can be had: 4 context-parallel ranks, and fla."""
    monkeypatch.setattr(megatron, "HAVE_FLA", True)
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    words = WORDS + "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    words += "--context-parallel-size 4 --attention-dropout 0"
    parsed = parser.parse_args(words.split())
    parsed.world_size = 4
    return parsed


def refusal(args: argparse.Namespace, algo: str = "zigzag", **options: object) -> str:
    config = ContextParallelConfig(algo, args.context_parallel_size, options=tuple(options.items()))
    with pytest.raises(ConfigError) as error:
        check_arguments(args, config, torch.device("cpu"))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_other_layouts_are_refused(args: argparse.Namespace) -> None:
    assert refusal(args, "attention2d", variant="no") == (
        "gated delta net layers need a layout of consecutive tokens, got the cyclic layout of "
        "attention2d: use --cp-options variant=zigzag or --cp-options layout=contiguous or "
        "--cp-options layout=thd"
    )
    # One rank has the whole sequence.
    args.context_parallel_size = 1
    config = ContextParallelConfig("attention2d", 1, options=(("variant", "no"),))
    check_arguments(args, config, torch.device("cpu"))


@pytest.mark.parametrize("algo", ["zigzag", "ring", "attention2d", "usp"])
@pytest.mark.parametrize("variant", ["gated_delta_net", "gdn"])
def test_layouts_of_consecutive_tokens_pass(
    args: argparse.Namespace, algo: str, variant: str
) -> None:
    args.experimental_attention_variant = variant
    check_arguments(args, ContextParallelConfig(algo, 4), torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"linear_attention_freq": None}, "needs --linear-attention-freq, got none: add"),
        ({"linear_attention_freq": [1, 0, 0]}, "each of the 2 layers, got 3: use a number, or"),
        (
            {"linear_num_value_heads": 12, "linear_num_key_heads": 8},
            "divisible by linear_num_key_heads 8, got 12: use 8 or 16",
        ),
        (
            {"tensor_model_parallel_size": 8, "world_size": 32},
            "linear_num_key_heads divisible by tensor_model_parallel_size = 8, got 4: use 8, or "
            "fewer ranks",
        ),
        (
            {"tensor_model_parallel_size": 2, "world_size": 8, "linear_num_key_heads": 8},
            "tensor-parallel ranks, got tensor_model_parallel_size 2: add --sequence-parallel",
        ),
        ({"transformer_impl": "local"}, "got --transformer-impl local: use transformer_engine"),
        ({"seq_length": 68}, "zigzag needs seq_length divisible by 2 * context_parallel_size = 8"),
        ({"mtp_num_layers": 1}, "Megatron's scripts build no multi-token prediction beside gated"),
        ({"experimental_attention_variant": "gdn2"}, "other than gated delta net and DSA, got"),
    ],
)
def test_what_cannot_be_had_is_refused(
    args: argparse.Namespace, settings: dict[str, object], said: str
) -> None:
    vars(args).update(settings)
    assert said in refusal(args)


def test_what_is_not_installed_is_refused(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron, "HAVE_FLA", False)
    assert refusal(args).endswith("got none: pip install flash-linear-attention")
    monkeypatch.setattr(rules, "running_version", lambda: ((0, 18), "0.18.2"))
    assert "got context_parallel_size 4: use Megatron 0.19 or later" in refusal(args)


def test_layers_of_linear_attention_are_refused(args: argparse.Namespace) -> None:
    args.group_query_attention = args.attention_output_gate = args.qk_layernorm = False
    args.position_embedding_type = "none"
    options = (("layout", "zigzag"),)
    config = ContextParallelConfig("lasp2", 4, options=options, linear_model="transnormer")
    with pytest.raises(ConfigError, match="got --cp-linear-model transnormer: leave it or"):
        check_arguments(args, config, torch.device("cpu"))


def test_layers_that_a_script_makes_by_itself() -> None:
    """Without the flag."""
    delta = ModuleSpec(megatron.GatedDeltaNet)
    layer = ModuleSpec(object, submodules=TransformerLayerSubmodules(self_attention=delta))
    runtime = Runtime(ContextParallelConfig("ring", 2))
    ours = with_attention(layer, runtime).submodules.self_attention
    assert issubclass(ours.module, megatron.GatedDeltaNet)
    assert ours.params == {"runtime": runtime}
    cyclic = ContextParallelConfig("attention2d", 2, options=(("variant", "no"),))
    ours = with_attention(layer, Runtime(cyclic)).submodules.self_attention
    with pytest.raises(ContextParallelError, match="got the cyclic layout of attention2d"):
        ours.module(**ours.params)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron's layer with stand-ins for fla's kernels."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "stand_ins"))
    for module, kernel in (
        ("modules.convolution", "causal_conv1d"),
        ("modules.l2norm", "l2norm"),
        ("ops.gated_delta_rule", "chunk_gated_delta_rule"),
    ):
        stand_in = getattr(importlib.import_module(f"fla.{module}"), kernel)
        for place in (common, gdn):
            if hasattr(place, kernel):
                monkeypatch.setattr(place, kernel, stand_in)
    monkeypatch.setattr(common, "HAVE_FLA", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    with torch.compiler.set_stance("force_eager"):
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]


def delta_net(kind: type, place: Any, **params: object) -> Any:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=4,
        linear_value_head_dim=6,
        activation_func=nn.SiLU(),
        perform_initialization=False,
    )
    config.activation_func.__name__ = "silu"  # type: ignore[attr-defined]
    parts = megatron.GatedDeltaNetSubmodules(Projection, WrappedTorchNorm, Projection)
    groups: Any = SimpleNamespace(cp=place, tp=ALONE)
    layer = kind(config, parts, pg_collection=groups, **params)
    return with_weights(layer)


@pytest.mark.parametrize(
    ("algo", "options", "size"),
    [
        ("ring", {}, 1),
        ("ring", {}, 3),
        ("zigzag", {}, 2),
        ("zigzag", {"layout": "thd"}, 2),
        ("zigzag", {"layout": "documents"}, 4),
    ],
)
def test_each_document_is_a_sequence(
    on_cpu: None, algo: str, options: dict[str, str], size: int
) -> None:
    def of_rank(place: Any, runtime: Runtime) -> Any:
        return delta_net(served(megatron.GatedDeltaNet), place, runtime=runtime)

    whole = delta_net(megatron.GatedDeltaNet, ALONE)
    config = ContextParallelConfig(algo, size, options=tuple(options.items()))
    check_documents(whole, of_rank, config, tokens=48, bound=1e-5)
