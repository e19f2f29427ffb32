"""Parameters that are sharded as Megatron-FSDP does it: memory, messages, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_cp_plugin import cli
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.machine import Links, Machine, Rate
from megatron_cp_plugin.planner.model import MODELS, Split
from megatron_cp_plugin.planner.step import TrainingStep, step

H100 = Machine.load("h100_400g")
LLAMA, MIXTRAL = MODELS["llama3-8b"], MODELS["mixtral-8x7b"]
GIB = 2**30


def of(
    split: Split, machine: Machine = H100, seconds: float = 0.0, tokens: int = 15360
) -> TrainingStep:
    model = MIXTRAL if split.expert > 1 else LLAMA
    return step(model, split, tokens, machine, attention=seconds)


@pytest.mark.parametrize(
    "split",
    [
        Split(context=3, data=5, sharded=True),
        Split(context=4, data=2, tensor=2, sharded=True),
        Split(context=2, data=4, expert=4, sharded=True),
        Split(context=2, data=4, tensor=2, expert=8, sharded=True),
    ],
)
def test_all_gpus_together_have_all_states_once(split: Split) -> None:
    parameters = (MIXTRAL if split.expert > 1 else LLAMA).parameters
    found = of(split).memory
    assert found["optimizer"] * GIB * split.gpus == pytest.approx(12 * parameters)
    assert found["parameters and gradients"] * GIB * split.gpus == pytest.approx(6 * parameters)
    whole = of(replace(split, sharded=False)).memory
    assert "layers gathered" not in whole
    assert found["activations"] == whole["activations"]


def test_layers_are_gathered_while_they_compute() -> None:
    """Of Llama 3 8B: 218.1M parameters a layer, 1050.7M of embedding and logits."""
    layer, ends = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336), 2 * 4096 * 128256
    found = of(Split(context=8, sharded=True)).memory["layers gathered"] * GIB
    # One that computes and three that come, 0.65 thousand million elements; a thousand million
    # elements of gradients wait, and those of a layer are made.
    assert found == pytest.approx(2 * (ends + 4 * layer) + 4 * (1e9 + layer))
    # Wide layers: one comes, and gradients of two wait.
    wide = replace(LLAMA, hidden=16384, ffn=53248, heads=128, name="wide")
    layer, ends = 16384 * (2 * 16384 + 2 * 1024 + 3 * 53248), 2 * 16384 * 128256
    memory = step(wide, Split(context=8, sharded=True), 8192, H100, attention=0.0).memory
    expected = 2 * (ends + 2 * layer) + 4 * 3 * layer
    assert memory["layers gathered"] * GIB == pytest.approx(expected)
    # A model of two layers has no more than these.
    few = replace(LLAMA, layers=2, vocabulary=256)
    memory = step(few, Split(context=8, sharded=True), 8192, H100, attention=0.0).memory
    assert memory["layers gathered"] * GIB == pytest.approx(6 * few.parameters)


def test_messages_hide_behind_what_is_computed() -> None:
    """Gathered twice in bfloat16, scattered once in float32, in each micro-batch."""
    rate = 1e9
    slow = replace(H100, gpus_per_node=8, inside=Links(Rate(0.0, rate)), copy=None, group_share=1.0)
    name, split = "messages of sharded parameters", Split(context=5, sharded=True)
    part = LLAMA.parameters * 4 / 5
    every, ends = (2 * 2 + 4) * part / rate, (2 + 4) * part / rate / LLAMA.layers
    nothing = of(split, replace(slow, matmul_flops=1e30, memory_bytes_per_second=1e30))
    assert nothing.parts[name] == pytest.approx(every)
    assert of(split, slow, seconds=100.0).parts[name] == pytest.approx(ends)
    twice = of(replace(split, micro_batches=2), slow, seconds=100.0)
    assert twice.parts[name] == pytest.approx(2 * ends)
    # Kernels are slower meanwhile.
    shared = of(split, replace(slow, group_share=0.9), seconds=100.0)
    assert shared.parts[name] == pytest.approx(ends + 0.1 * (every - ends))
    whole = of(replace(split, sharded=False), slow)
    assert name not in whole.parts
    more = whole.parts["gradients and optimizer"] - of(split, slow).parts["gradients and optimizer"]
    assert more > (2 + 4) * part / rate


@pytest.mark.parametrize(
    ("model", "split", "message"),
    [
        (
            "llama3-8b",
            Split(pipeline=2, data=2),
            "needs no pipeline, got pipeline 2: use 1",
        ),
        (
            "llama3-8b",
            Split(tensor=2),
            "needs ranks with the same parameters, got data 1",
        ),
        ("tnl-1b", Split(tensor=2, data=2), "needs whole layers of linear attention, got"),
    ],
)
def test_what_megatron_or_the_plugin_refuses(model: str, split: Split, message: str) -> None:
    sharded = replace(split, sharded=True)
    with pytest.raises(ConfigError, match=message):
        step(MODELS[model], sharded, 8192, H100, attention=0.0)
    assert step(MODELS[model], split, 8192, H100, attention=0.0).seconds > 0


def test_sharded_where_whole_parameters_do_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    words = f"plan --model llama2-7b --tokens 8K --gpus 4 --machine a800 --yaml {path}"
    assert cli.main([*words.split(), "--batch", "4"]) == 0
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.split("the first:")[0].splitlines()[2:-1]
        if line.startswith("│")
    ]
    rows = [row for row in rows if row[0]]  # others are folded
    sharded = [row for row in rows if "S" in row[4]]
    assert sharded
    assert all(row[2] == "1" for row in sharded)  # no pipeline
    settings = yaml.safe_load(path.read_text())["megatron"]
    assert settings.get("use_megatron_fsdp", False) == ("S" in rows[1][4])
