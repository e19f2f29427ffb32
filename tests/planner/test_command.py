"""`megatron-cp plan` with a machine: what it prints, writes and refuses."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_cp_plugin import cli, registry
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.command import megatron_settings
from megatron_cp_plugin.planner.detected_machine import machine_here, machine_named
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.model import MODELS, Split
from megatron_cp_plugin.planner.splits import Job, proposals
from megatron_cp_plugin.planner.step import step

LAYER = "plan --size 4 --seq-len 32K --heads 8 --kv-heads 2 --machine h200"


@pytest.mark.parametrize("documents", ["", "--documents 4096"])
def test_a_layer(capsys: pytest.CaptureFixture[str], tmp_path: Path, documents: str) -> None:
    path = tmp_path / "run.yaml"
    assert cli.main([*LAYER.split(), *documents.split(), "--yaml", str(path)]) == 0
    *table, said, wrote = capsys.readouterr().out.splitlines()
    assert said.startswith("auto chose ")
    assert ("one random draw of their lengths" in table[-1]) == bool(documents)
    assert wrote == f"wrote {path}"
    written = yaml.safe_load(path.read_text())
    megatron = {"context_parallel_size": 4, "seq_length": 32768}
    assert written["megatron"] == megatron | (
        {"dataloader_inter_document_masking": True} if documents else {}
    )
    algo = written["context_parallel"].pop("algo")
    registry.read_options(algo, written["context_parallel"])
    assert said.removeprefix("auto chose ").startswith(algo)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{LAYER} --algo zigzag", "--machine tries all algorithms and options: leave --algo out"),
        (LAYER.replace("h200", "h300"), "there is no machine 'h300'"),
        (LAYER.replace("-heads 2", "-heads 0"), "--kv-heads must divide the 8 heads, got 0"),
        (LAYER.replace("--machine h200", "--yaml x.yaml"), "needs --machine, got none"),
        ("plan --size 4", "plan needs --size, --seq-len and --heads, or --model, got no --seq-len"),
        ("plan --model llama3-8b --tokens 8K --gpus 8", "got no --machine"),
        ("plan --model llama3-8 --tokens 8K --gpus 8 --machine h100", "did you mean 'llama3-8b'?"),
        (
            "plan --model llama3-8b --tokens 8K --gpus 8 --machine h100 --heads 8",
            "--model sets its own sizes, got --heads",
        ),
        (
            "plan --model llama3-405b --tokens 128K --gpus 8 --machine h100",
            "does not fit 8 GPUs of 80 GiB",
        ),
        (
            "plan --model llama3-8b --tokens 12345 --gpus 8 --machine h100",
            ": use --tokens 12336 or 12352\n",
        ),
        (
            "plan --model llama3-8b --tokens 8K --gpus 2 --batch -4 --machine h100",
            "--batch must be more than 0, got -4",
        ),
        (
            "plan --model llama3-8b --tokens 8K --gpus 7 --machine h100",
            "a divisor of --batch: use --gpus 4\n",
        ),
        (
            "plan --model llama3-8b --tokens 12345 --gpus 12 --machine h100",
            ": use --gpus 8 and --tokens 12336 or 12352\n",
        ),
    ],
)
def test_mistakes(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines(keepends=True)
    assert said in line


def test_a_loss_is_in_chunks_where_attention_leaves_no_room_for_whole_logits() -> None:
    machine = machine_named("h100")
    kernel = next(iter(machine.kernels))
    job = Job(MODELS["llama3-8b"], 65536, 8, machine, kernel, Mask(), 8)
    unchunked = [one for one in proposals(job, 20) if not one.split.chunked_loss]
    whole = max(unchunked, key=lambda one: one.step.memory["logits, or a layer run again"])
    room = whole.step.gib - whole.step.memory["attention"] / 2
    smaller = replace(job, machine=replace(machine, memory_gib=room / 0.9))
    found = proposals(smaller, 20)
    assert replace(whole.split, chunked_loss=True) in [one.split for one in found]
    assert all(one.step.fits(smaller.machine) for one in found)


def test_ways_to_split_a_model_are_ranked_and_fit() -> None:
    machine = machine_named("h100")
    kernel = next(iter(machine.kernels))
    job = Job(MODELS["llama3-8b"], 65536, 8, machine, kernel, Mask(), 8)
    found = proposals(job, 4)
    assert 1 < len(found) <= 4
    assert [one.rate for one in found] == sorted((one.rate for one in found), reverse=True)
    for one in found:
        assert one.split.gpus == 8
        assert one.step.fits(machine)
        assert one.step.memory["attention"] > 0
        settings = megatron_settings(job, one.split)
        assert settings["context_parallel_size"] == one.split.context
        assert settings["num_query_groups"] == 8


def test_what_fits_only_without_attention_is_refused() -> None:
    machine, model = machine_named("h100"), MODELS["llama3-8b"]
    ways = [
        Split(**{name: 2, "micro_batches": 1 if name == "data" else 2}, recompute="full")
        for name in ("tensor", "context", "pipeline", "data")
    ]
    least = min(
        step(model, replace(way, chunked_loss=True), 65536, machine, attention=0.0).gib
        for way in ways
    )
    few = replace(machine, memory_gib=(least + 1e-6) / 0.9)
    job = Job(model, 65536, 2, few, next(iter(few.kernels)), Mask(), 2)
    with pytest.raises(ConfigError, match=r"does not fit 2 GPUs of .* GiB, got .* GiB at least"):
        proposals(job, 4)


def test_a_mixture_of_experts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    words = f"plan --model mixtral-8x7b --tokens 4K --gpus 8 --machine b200 --yaml {path}"
    assert cli.main(words.split()) == 0
    said = capsys.readouterr().out
    assert "│ EP │ ETP │" in said
    assert max(map(len, said.partition("experts of")[0].splitlines())) <= 100
    lines = [line.split("│")[1:-1] for line in said.split("experts of")[0].splitlines()[4:]]
    rows = [cells for cells in lines if cells and cells[0].strip()]  # others are folded
    memory: dict[tuple[str, ...], list[int]] = {}  # by all but the split of experts
    for row in rows:
        memory.setdefault((*row[:4], str("R" in row[6])), []).append(int(row[11]))
        assert abs(float(row[10].strip().rstrip("%")) / 100 - int(row[9]) / 2250) < 0.01
    assert any(len(several) > 1 for several in memory.values())
    for several in memory.values():  # the fastest first: what is slower needs less
        assert several == sorted(several, reverse=True)
    assert "all experts are taken to get equally many\n" in said
    written = yaml.safe_load(path.read_text())["megatron"]
    assert written["expert_model_parallel_size"] > written["expert_tensor_parallel_size"] == 1
    assert f"experts of the first: tokens come by {written['moe_token_dispatcher_type']}, " in said


def test_operations_of_a_model() -> None:
    """Six for each parameter that a token meets, and those of attention."""
    model = MODELS["llama3-8b"]
    weights = model.parameters - model.hidden * model.vocabulary  # the embedding multiplies nothing
    pairs = 8192 * 8193 / 2
    expected = 6 * weights * 8192 + 3 * 32 * 4 * 32 * 128 * pairs
    assert model.flop(8192, pairs) == pytest.approx(expected)
    active = MODELS["deepseek-v3"].flop(4096, 0) / 4096 / 6
    assert active == pytest.approx(37e9, rel=0.03)  # its report: 37B for each token


def test_machines_by_their_gpu() -> None:
    assert machine_here(None, "NVIDIA A100-SXM4-80GB")[0] == Machine.load("a100_8x200g")
    assert machine_here(None, "NVIDIA H100 80GB HBM3")[0] == Machine.load("h100_400g")
    assert machine_here(None, "NVIDIA A800-SXM4-80GB")[0] == Machine.load("a800_4x200g")
    found, how = machine_here(None, "NVIDIA T4")
    assert found == Machine.load("h200_nvlink")
    assert how == "by default, for no machine is known for NVIDIA T4: name yours"
    assert machine_here("h100", "NVIDIA T4") == (Machine.load("h100_400g"), "as it was named")


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        ("memory_gib", -1, "memory_gib must be more than 0, got -1"),
        ("memory_gib", float("nan"), "memory_gib must be more than 0, got nan"),
        ("inside exchange bytes_per_second", 0, "inside.exchange.bytes_per_second must be more"),
        ("between exchange bytes_per_second", "1e11", "must be a number, such as 4.0e+10, got '1e"),
        ("between exchange seconds", -1e-6, "between.exchange.seconds must be at least 0, got"),
        ("gpus_per_node", 0, "gpus_per_node must be more than 0, got 0"),
        ("gpus_per_node", 2.5, "gpus_per_node must be a whole number, got 2.5"),
        ("group_share", 1.5, "group_share must be at most 1, got 1.5"),
        ("kernels", {}, "kernels must name one at least, got none"),
        ("kernels flash4 by_pass", {}, "got no backward causal"),
        ("host call", True, "host.call must be a number"),
    ],
)
def test_machines_that_cannot_be(tmp_path: Path, keys: str, value: object, message: str) -> None:
    values = Machine.load("h100_400g").values()
    *path, last = keys.split()
    inner = values
    for key in path:
        inner = inner[key]
    inner[last] = value
    file = tmp_path / "machine.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        Machine.load(file)
    assert str(error.value).startswith(f"machine file {file} cannot be read: ")
    assert "\n" not in str(error.value)


def test_linear_attention_on_a_machine_that_does_not_know_it() -> None:
    machine = replace(machine_named("h100"), linear_flops={})
    with pytest.raises(ConfigError, match="has no linear_flops of a forward: add them, or use"):
        step(MODELS["tnl-1b"], Split(context=2), 8192, machine, "lasp2")
