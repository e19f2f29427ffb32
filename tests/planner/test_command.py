"""`megatron-cp plan` with a machine: what it prints, writes and refuses."""

from pathlib import Path

import pytest
import yaml

from megatron_cp_plugin import cli, registry
from megatron_cp_plugin.planner.model import MODELS

LAYER = "plan --size 4 --seq-len 32K --heads 8:2 --machine h200"


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
        (LAYER.replace("--machine h200", ""), "got no --machine: add it"),
        (f"{LAYER} --seq-len 0", "--seq-len takes a number of tokens, such as"),
        (f"{LAYER} --mask full --window 3", "needs causal attention"),
        (LAYER.replace("h200", "h300"), "there is no machine 'h300'"),
        (LAYER.replace("8:2", "8:0"), "which divide them, such as 32 or 32:8, got '8:0'"),
        (
            "plan --size 4",
            "plan needs --machine, --size, --seq-len and --heads, or --model, got no --s",
        ),
        ("plan --model llama3-8b --tokens 8K --gpus 8", "got no --machine"),
        (
            "plan --model llama4 --tokens 8K --gpus 8 --machine h100",
            "no model 'llama4': use one of",
        ),
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
            "--batch takes a whole number above 0, got '-4'",
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


def test_a_mixture_of_experts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    words = f"plan --model mixtral-8x7b --tokens 4K --gpus 8 --machine b200 --yaml {path}"
    assert cli.main(words.split()) == 0
    said = capsys.readouterr().out
    assert "│ DP │ EP │" in said
    assert max(map(len, said.partition("experts of")[0].splitlines())) <= 100
    lines = [line.split("│")[1:-1] for line in said.split("experts of")[0].splitlines()[4:]]
    rows = [cells for cells in lines if cells and cells[0].strip()]  # others are folded
    memory: dict[tuple[str, ...], list[int]] = {}  # by all but the split of experts
    for row in rows:
        memory.setdefault((*row[:4], str("R" in row[5])), []).append(int(row[10]))
        assert abs(float(row[9].strip().rstrip("%")) / 100 - int(row[8]) / 2250) < 0.01
    assert any(len(several) > 1 for several in memory.values())
    for several in memory.values():  # the fastest first: what is slower needs less
        assert several == sorted(several, reverse=True)
    assert "to all experts equally many\n" in said
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
