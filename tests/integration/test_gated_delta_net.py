"""Megatron's gated delta net layers beside softmax attention of the plugin, and what is refused.

The reference is Megatron's own attention on the whole sequence. The softmax layers have an output
gate, as those of Qwen3-Next.
"""

import argparse
from pathlib import Path

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import gated_delta_net as megatron
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.training.arguments import add_megatron_arguments
from torch import nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.harness.parity import Comparison, Recording, Tolerances, compare
from megatron_cp_plugin.integration.batch import Batches
from megatron_cp_plugin.integration.checks import check_arguments
from megatron_cp_plugin.integration.inputs import serve_inputs
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.spec import with_attention
from tests.integration.megatron_job import TINY, run_warm
from tests.integration.ranks import ALONE

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
        ("--context-parallel-algo ulysses --cp-options layout=zigzag", 2),
        # By Megatron's own chunks in torch; the stand-in goes token by token.
        pytest.param(
            "--context-parallel-algo attention2d --deterministic-mode", 4, marks=pytest.mark.slow
        ),
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
            "--tensor-model-parallel-size 2 --sequence-parallel",
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


def test_another_layout_would_be_wrong(whole: Recording, tmp_path: Path) -> None:
    """So that the check can fail."""
    script = tmp_path / "without_the_check.py"
    script.write_text(
        "import runpy\n"
        "from megatron_cp_plugin.integration import rules\n"
        "rules.RULES = [rule for rule in rules.RULES if 'zigzag layout' not in rule.text]\n"
        f"runpy.run_path({str(JOB)!r}, run_name='__main__')\n"
    )
    flags = "--context-parallel-algo ring --context-parallel-size 2"
    comparison = compare(whole, train(tmp_path, flags, 2, script), Tolerances())
    assert comparison.loss.error > 1e-3
    assert comparison.gradients["decoder.layers.0.self_attention.A_log, iteration 1"] > 1e-1


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


FITTING = "--context-parallel-algo allgather or attention2d or usp or zigzag"


@pytest.mark.parametrize(
    ("algo", "options", "layout", "instead"),
    [
        ("ring", {}, "contiguous", FITTING),
        ("distflash", {}, "contiguous", FITTING),
        ("ulysses", {}, "contiguous", f"--cp-options layout=zigzag, or {FITTING}"),
        (
            "usp",
            {"layout": "contiguous"},
            "contiguous",
            f"--cp-options layout=zigzag, or {FITTING}",
        ),
        ("attention2d", {"variant": "no"}, "cyclic", f"--cp-options variant=zigzag, or {FITTING}"),
    ],
)
def test_other_layouts_are_refused(
    args: argparse.Namespace, algo: str, options: dict[str, str], layout: str, instead: str
) -> None:
    assert refusal(args, algo, **options) == (
        "Megatron splits gated delta net layers by its own zigzag layout, got the "
        f"{layout} layout of {algo}: use {instead}"
    )
    # One rank has the whole sequence.
    args.context_parallel_size = 1
    config = ContextParallelConfig(algo, 1, options=tuple(options.items()))
    check_arguments(args, config, torch.device("cpu"))


@pytest.mark.parametrize("algo", ["zigzag", "allgather", "attention2d", "usp"])
@pytest.mark.parametrize("variant", ["gated_delta_net", "gdn"])
def test_the_zigzag_layout_passes(args: argparse.Namespace, algo: str, variant: str) -> None:
    args.experimental_attention_variant = variant
    check_arguments(args, ContextParallelConfig(algo, 4), torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"linear_attention_freq": None}, "needs --linear-attention-freq, got none: add"),
        ({"linear_attention_freq": [1, 0, 0]}, "each of the 2 layers, got 3: use a number, or"),
        ({"linear_num_key_heads": 2}, "context_parallel_size = 4, got 2: use 4, or fewer ranks"),
        ({"linear_num_value_heads": 6}, "= 4, got 6: use 4 or 8, or fewer ranks"),
        (
            {"linear_num_value_heads": 12, "linear_num_key_heads": 8},
            "divisible by linear_num_key_heads 8, got 12: use 8 or 16",
        ),
        (
            {"tensor_model_parallel_size": 2, "world_size": 8},
            "linear_num_key_heads divisible by tensor_model_parallel_size * context_parallel_size "
            "= 8, got 4: use 8, or fewer ranks",
        ),
        (
            {"tensor_model_parallel_size": 2, "world_size": 8, "linear_num_key_heads": 8},
            "tensor-parallel ranks, got tensor_model_parallel_size 2: add --sequence-parallel",
        ),
        ({"transformer_impl": "local"}, "got --transformer-impl local: use transformer_engine"),
        ({"seq_length": 68}, "zigzag needs seq_length divisible by 2 * context_parallel_size = 8"),
        ({"sft": True}, "packed conversations with gated delta net layers, got --sft True"),
        ({"mtp_num_layers": 1}, "multi-token prediction with gated delta net layers, got"),
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
    # As before Megatron 0.19.
    monkeypatch.setattr(megatron.GatedDeltaNet, "__init__", lambda self, config: None)
    assert "got context_parallel_size 4: use Megatron 0.19 or later" in refusal(args)


def test_layers_of_linear_attention_are_refused(args: argparse.Namespace) -> None:
    args.group_query_attention = args.attention_output_gate = args.qk_layernorm = False
    args.position_embedding_type = "none"
    options = (("layout", "zigzag"),)
    config = ContextParallelConfig("lasp2", 4, options=options, linear_model="transnormer")
    with pytest.raises(ConfigError, match="got --cp-linear-model transnormer: leave it or"):
        check_arguments(args, config, torch.device("cpu"))


@pytest.mark.parametrize("algo", ["zigzag", "ring"])
def test_layers_that_a_script_makes_by_itself(algo: str) -> None:
    """Without the flag."""
    delta = ModuleSpec(megatron.GatedDeltaNet)
    layer = ModuleSpec(object, submodules=TransformerLayerSubmodules(self_attention=delta))
    runtime = Runtime(ContextParallelConfig(algo, 2))
    if algo == "zigzag":
        assert with_attention(layer, runtime) is layer
        return
    with pytest.raises(ContextParallelError, match="got the contiguous layout of ring"):
        with_attention(layer, runtime)


def test_documents_that_a_script_packs_by_itself() -> None:
    class Delta(megatron.GatedDeltaNet):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.config = Delta(), None

        def forward(self, tokens: int, packed_seq_params: object = None) -> object:
            return packed_seq_params

    model = Model()
    serve_inputs(model, Batches(Runtime(ContextParallelConfig("zigzag", 1))), ALONE)
    assert model(1) is None
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    with pytest.raises(ContextParallelError, match="carry their state across documents"):
        model(1, packed_seq_params=PackedSeqParams("thd", bounds, bounds))
