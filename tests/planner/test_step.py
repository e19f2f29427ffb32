"""A step of a model: what is counted, and what cannot be split."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.command import megatron_settings
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.memory import activation_bytes, memory, memory_of_stage
from megatron_cp_plugin.planner.model import MODELS, Model, Split
from megatron_cp_plugin.planner.splits import Job
from megatron_cp_plugin.planner.step import step

H100 = Machine.load("h100_400g")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2-7b", 6.74),
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.6),
        ("llama3-405b", 405.9),
        ("mixtral-8x7b", 46.7),
        ("qwen3-30b-a3b", 30.5),
        ("deepseek-v3", 671),
    ],
)
def test_parameters_are_those_of_the_model(name, billions):
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_step_without_attention_is_its_products():
    """6 FLOP for each parameter and token, and 2 more where a forward runs again."""
    model = replace(MODELS["llama2-7b"], vocabulary=1)
    free = replace(H100, memory_bytes_per_second=1e30)
    for recompute, flop in (("none", 6), ("full", 8)):
        found = step(model, Split(recompute=recompute), 4096, free, attention=0.0)
        expected = flop * model.layers * model.layer_parameters * 4096 / H100.matmul_flops
        assert found.parts["matrix products"] == pytest.approx(expected, rel=1e-3)
        assert found.tokens == 4096


def test_what_splitting_does():
    model, attention = MODELS["llama3-8b"], 1e-3

    def of(**ways):
        return step(model, Split(**ways), 131072, H100, attention=attention)

    assert of(context=8).memory["activations"] == pytest.approx(of().memory["activations"] / 8)
    assert of(context=8, recompute="full").gib < of(context=8).gib
    assert "tensor-parallel messages" in of(tensor=8).parts
    inside, between = (of(tensor=ways).parts["tensor-parallel messages"] for ways in (8, 16))
    assert between > inside
    bubble = of(pipeline=4, micro_batches=8).parts["pipeline bubble"]
    rest = of(pipeline=4, micro_batches=8).seconds - bubble
    assert bubble == pytest.approx(rest * 3 / 8, rel=0.2)
    copies = of(data=8).memory["optimizer"]
    assert copies == pytest.approx(of().memory["optimizer"] / 8)
    assert of(data=8, distributed_optimizer=False).memory["optimizer"] == of().memory["optimizer"]


def test_experts():
    model = MODELS["mixtral-8x7b"]
    alone, spread = (
        step(model, Split(data=8, expert=ways), 8192, H100, attention=0.0) for ways in (1, 8)
    )
    assert spread.memory["parameters and gradients"] < alone.memory["parameters and gradients"] / 4
    assert "expert-parallel messages" in spread.parts
    # One expert with eight times the rows.
    assert 1 < alone.parts["matrix products"] / spread.parts["matrix products"] < 1.2


def test_tokens_that_come_to_experts_are_kept():
    """Each a copy, for the gradient of the expert's first matrix."""
    model = MODELS["qwen3-30b-a3b"]
    fewer = replace(model, active=4)
    kept = [step(one, Split(), 8192, H100, attention=0.0) for one in (model, fewer)]
    grown = (kept[0].memory["activations"] - kept[1].memory["activations"]) * 2**30
    assert grown == pytest.approx(model.layers * 8192 * 2 * 4 * (3 * model.ffn + model.hidden))


@pytest.mark.parametrize(("name", "last"), [("deepseek-v3", 1), ("llama3-405b", 6)])
def test_a_last_stage_with_fewer_layers(name, last):
    """DeepSeek-V3 has 61 layers, Llama 3 405B 126, each on 16 stages."""
    model, split = MODELS[name], Split(8, 8, 16, micro_batches=16, recompute="full")
    assert split.last_layers(model) == last
    found = step(model, split, 131072, H100, attention=1e-3)
    assert found.fits(H100) == (name == "llama3-405b")
    job = Job(model, 131072, 1024, H100, next(iter(H100.kernels)), Mask(), 16)
    assert megatron_settings(job, split)["decoder_last_pipeline_num_layers"] == last
    even = megatron_settings(job, replace(split, pipeline=1))
    assert "decoder_last_pipeline_num_layers" not in even


@pytest.mark.parametrize(("pipeline", "layers", "ends"), [(16, 4, 0), (2, 30, 1)])
def test_later_stages_hold_experts_where_the_first_has_dense_layers(
    pipeline: int, layers: int, ends: int
) -> None:
    """DeepSeek-V3: three of the first stage's layers have none."""
    model, split = MODELS["deepseek-v3"], Split(1, 32, pipeline, 2, 8)
    attention = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    expert = 3 * 7168 * 2048
    own = layers * (attention + (256 // 8 + 1) * expert) + ends * 129280 * 7168
    found = step(model, split, 32768, H100, attention=0.0).memory
    assert found["parameters and gradients"] * 2**30 == pytest.approx(6 * own)


def test_a_chunked_loss_needs_little_memory_and_another_product():
    model, local = MODELS["llama3-8b"], Split(context=8, recompute="full")
    whole, chunked = (
        step(model, replace(local, chunked_loss=on), 2**20, H100, attention=1e-3)
        for on in (False, True)
    )
    name = "logits, or a layer run again"
    assert whole.memory[name] == pytest.approx(6 * model.vocabulary * 2**17 / 2**30)
    assert chunked.memory[name] < whole.memory[name] / 4
    more = chunked.parts["matrix products"] - whole.parts["matrix products"]
    flop = 2 * 2**17 * model.hidden * model.vocabulary
    assert more == pytest.approx(flop / H100.matmul_flops, rel=0.05)


def test_the_last_stage_of_a_pipeline_has_the_logits():
    """DISTFLASHATTN's Table 6, of 64K tokens: 2.3 GB less from stage to stage, more in the last."""
    model = Model("llama-2h", 512, 256, 11008, 2, 2, 128, 32000)
    split = Split(tensor=2, pipeline=8, micro_batches=8, recompute="full")
    each = [sum(memory_of_stage(model, split, 65536, n).values()) * 1.0737 for n in range(8)]
    theirs = (31.5, 28.7, 26.0, 24.6, 21.8, 20.5, 17.9, 32.0)
    assert (each[0] - each[6]) / 6 == pytest.approx((theirs[0] - theirs[6]) / 6, rel=0.1)
    logits = 6 * 32000 * 32768 / 2**30
    name = "logits, or a layer run again"
    assert [memory_of_stage(model, split, 65536, n)[name] for n in (6, 7)] == [
        pytest.approx(model_layer := activation_bytes(model, split) * 32768 / 2**30),
        pytest.approx(logits),
    ]
    assert model_layer < logits / 2
    # One micro-batch: all stages hold one, and the last needs most.
    assert memory(model, replace(split, micro_batches=1), 65536)[name] == pytest.approx(logits)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (Split(tensor=3), "heads divisible by tensor, got 32 heads and tensor 3"),
        (
            Split(pipeline=24),
            "for all stages of a pipeline, got 32 layers and pipeline 24: use a divisor of 32",
        ),
        (Split(context=7), "tokens divisible by tensor . context, got 8192 tokens"),
        (Split(expert=2), "experts divisible by expert, got 1 experts and expert 2"),
    ],
)
def test_what_cannot_be_split_is_refused(split, message):
    with pytest.raises(ConfigError, match=message):
        step(MODELS["llama3-8b"], split, 8192, H100, attention=0.0)


@pytest.mark.parametrize(
    ("gpus", "thousands", "recompute", "gib"),
    [
        (1, 32, "none", 74.4),
        (1, 64, "none", 129.1),
        (2, 64, "none", 68.0),
        (2, 128, "none", 122.7),
        (1, 64, "full", 51.6),
        (1, 128, "full", 83.5),
        (2, 256, "full", 77.1),
    ],
)
def test_memory_of_linear_attention_is_that_measured(
    gpus: int, thousands: int, recompute: Any, gib: float
) -> None:
    """TNL-1B on H200, measured at 196ba6b (docs/papers/lasp.md)."""
    found = memory(MODELS["tnl-1b"], Split(context=gpus, recompute=recompute), 1024 * thousands)
    assert sum(found.values()) == pytest.approx(gib, rel=0.02)
