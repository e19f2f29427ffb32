"""The cards of docs/models: they say what the rules say, and one of them again."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.integration.features import Stage
from megatron_cp_plugin.integration.rules import refusals
from megatron_cp_plugin.integration.settings import Settings
from tests.integration.megatron_job import run_warm
from tests.integration.model_cards_job import small
from tests.integration.public_models import MODELS

JOB = Path(__file__).with_name("model_cards_job.py")
PAGE = Path(__file__).parents[2] / "docs" / "models" / "README.md"
CARDS = sorted(PAGE.parent.glob("*.yaml"))
PUBLIC = {model.name: model for model in MODELS}
THD = ContextParallelConfig("zigzag", 2, options=(("layout", "thd"),))
BOUNDS = {"loss": 1e-5, "log-probs": 1e-4, "gradients": 1e-4, "weights": 0.0}


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_a_card_agrees_with_the_rules(path: Path) -> None:
    card = yaml.safe_load(path.read_text())
    # What is built of the models now, but for what reading YAML turns into lists.
    for name in card["models"]:
        assert json.loads(json.dumps(small(dict(PUBLIC[name].settings)))) == card["built"]
    for errors in (each for of_path in card["equal"].values() for each in of_path.values()):
        assert all(float(error) <= BOUNDS[name] for name, error in errors.items())
    model = PUBLIC[card["models"][0]]
    paths = {
        "samples": {},
        "packed documents": {"sft": True},
        "packed documents with padding": {"sft": True},
        "multi-token prediction": {"sft": True, "mtp_num_layers": 1},
    }
    for each, asked in paths.items():
        given = {**model.settings, "context_parallel_size": 2, **asked}
        settings = Settings(SimpleNamespace(**given), THD, torch.device("cuda"))
        stages: list[Stage] = ["model", *(["recurrent layer"] if settings.is_recurrent else [])]
        found = [said for stage in stages for _, said in refusals(stage, settings)]
        refused = each in card["refused"] or "all" in card["refused"]
        assert bool(found) == refused, (each, found)
        assert refused or each in card["equal"]


def test_the_table_says_what_the_cards_say() -> None:
    sys.path.insert(0, str(PAGE.parents[2] / "scripts"))
    from model_cards import table

    cards = {path.stem: yaml.safe_load(path.read_text()) for path in CARDS}
    listed = [line.split("](")[0] for line in PAGE.read_text().splitlines() if line[:3] == "| ["]
    names = [name.removeprefix("| [") for name in listed]
    assert sorted(names) == sorted(cards)
    assert table({name: cards[name] for name in names}) == PAGE.read_text()


@pytest.mark.slow
def test_tensor_parallelism(tmp_path: Path) -> None:
    """On four ranks, of which two split sequences; pipelines: test_cut_batches.py."""
    name = "nemotron-3-nano-30b-a3b"
    words = (str(tmp_path), "tensor", "2", name)
    job = run_warm(tmp_path / "logs", *words, ranks=4, script=JOB).succeeded()
    line = next(line for line in job.processes[0].stdout.splitlines() if line.startswith("FOUND"))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND"))[name]
    for error, value in found["off"]["tensor parallelism"].items():
        assert value <= BOUNDS[error]


@pytest.mark.slow
def test_sparse_attention_beside_the_plugin(tmp_path: Path) -> None:
    """Megatron's DSA layers, in samples and in packs that a program cuts, on two ranks."""
    job = run_warm(
        tmp_path / "logs", str(tmp_path), "nothing", "2", "glm-5", ranks=2, script=JOB
    ).succeeded()
    line = next(line for line in job.processes[0].stdout.splitlines() if line.startswith("FOUND"))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND"))["glm-5"]
    assert not found["refused"]
    assert len(found["off"]) == 5
    for path, errors in found["off"].items():
        for name, error in errors.items():
            assert error <= BOUNDS[name], (path, name, error)
